"""Computation on rows that a model lays out flat, [batch·sequence·n, D], brought back to [batch, sequence, n, D].

A reshape from flat rows back to batch and sequence needs both sizes, which no constant target can say.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import onnx_ir as ir

from llmforge.ir import graph as g

# Operators that treat each row by itself, and whose inputs broadcast as well with more dimensions in front.
ROWWISE = frozenset(
    {"Add", "Div", "Erf", "Exp", "Gelu", "Mul", "Neg", "RMSNormalization", "Relu", "Sigmoid", "Sub", "Tanh"}
)


def unflatten(model: ir.Model) -> None:
    """Keep batch and sequence apart between a reshape to flat rows and the reshape back.

    Fires for a reshape [n, D] → [batch, sequence, …] of computed target where only operators that treat each row by
    itself lie between it and reshapes from [batch, sequence, …], and nothing else reads what they compute.
    """
    for node in list(model.graph):
        target = node.inputs[1] if (node.domain, node.op_type) == ("", "Reshape") else None
        if target is not None and ir.convenience.get_const_tensor(target) is None:
            _unflatten(model, node)


def _unflatten(model: ir.Model, back: ir.Node) -> None:
    last, after = back.inputs[0], g.dims(back.outputs[0]) or ()
    flat = None if last is None else g.dims(last)
    if last is None or flat is None or len(flat) != 2 or not isinstance(flat[1], int) or len(after) < 3:
        return
    region, entries = _region(last, flat, after[:2])
    if region is None or not entries:
        return
    inside = {value for node in region for value in node.outputs} | {entry.outputs[0] for entry in entries}
    readers = {node for value in inside for node, _ in value.uses()}
    if not readers <= {*region, back} or any(value.is_graph_output() for value in inside):
        return
    target = g.initializer(model, f"shape_0_0_n_{flat[1]}", np.array([0, 0, -1, flat[1]], np.int64))
    for entry in entries:
        entry.replace_input_with(1, target)
        entry.attributes.pop("allowzero", None)
    for value in inside:
        if value.shape is not None:
            value.shape = ir.Shape([*after[:2], _rows_of(entries[0]), flat[1]])


def _rows_of(entry: ir.Node) -> int | None:
    """Count the rows that one token has: those of the input of `entry` [batch, sequence, …]."""
    assert entry.inputs[0] is not None
    dims, flat = g.dims(entry.inputs[0]) or (), g.dims(entry.outputs[0]) or ()
    rest = [dim for dim in dims[2:] if isinstance(dim, int)]
    width = flat[-1]
    if len(rest) != len(dims) - 2 or not isinstance(width, int):
        return None
    return int(np.prod(rest)) // width


def _region(
    last: ir.Value, flat: Sequence[int | str | None], leading: Sequence[int | str | None]
) -> tuple[set[ir.Node] | None, list[ir.Node]]:
    """Collect what computes `last` on flat rows, and the reshapes that feed it; None where something else does."""
    region: set[ir.Node] = set()
    entries: list[ir.Node] = []
    pending = [last]
    while pending:
        node = pending.pop().producer()
        if node is None or node in region or node in entries:
            if node is None:
                return None, []
            continue
        if node.op_type == "Reshape" and node.domain == "":
            source = node.inputs[0]
            if source is None or list((g.dims(source) or ())[:2]) != list(leading) or _rows_of(node) is None:
                return None, []
            entries.append(node)
            continue
        if node.domain != "" or node.op_type not in ROWWISE:
            return None, []
        region.add(node)
        for value in node.inputs:
            dims = None if value is None else g.dims(value)
            if value is not None and (dims is None or len(dims) > 1):  # a vector or a scalar broadcasts as before
                pending.append(value)
    return region, entries
