"""Computation on rows that a model lays out flat, [batch·sequence·n, D], brought back to [batch, sequence, n, D].

A reshape from flat rows back to batch and sequence needs both sizes, which no constant target can say.
"""

from __future__ import annotations

import math

import onnx_ir as ir

from llmforge.ir import graph, operators
from llmforge.ir.operators import standard
from llmforge.ir.subgraph import behind
from llmforge.trace.canonicalize.rewriting import Dims, set_target, target


def restore(model: ir.Model) -> None:
    """Keep batch and sequence apart between a reshape to flat rows and the reshape back.

    Fires for a reshape [n, D] → [batch, sequence, …] of computed target where only operators that treat each row by
    itself lie between it and reshapes from [batch, sequence, …], and nothing else reads what they compute.
    """
    for reshape in standard.Reshape.all(model):
        if ir.convenience.get_const_tensor(reshape.shape) is None:
            _restore(model, reshape)


def _restore(model: ir.Model, back: standard.Reshape) -> None:
    flat, after = graph.dims(back.x) or (), graph.dims(back.output) or ()
    if len(flat) != 2 or len(after) < 3:
        return
    (_, width), (batch, sequence, *_) = flat, after
    if not isinstance(width, int):
        return
    region, entries = _region(back.x, (batch, sequence))
    if not entries:
        return
    inside = {value for node in region for value in node.outputs} | {entry.output for entry in entries}
    readers = {node for value in inside for node, _ in value.uses()}
    if not readers <= {*region, back.node} or any(value.is_graph_output() for value in inside):
        return
    wanted, rows = target(model, [0, 0, -1, width]), _rows_of_token(entries[0])
    for entry in entries:
        set_target(entry, wanted)
    for value in inside:
        if value.shape is not None:
            value.shape = ir.Shape([batch, sequence, rows, width])


def _rows_of_token(entry: standard.Reshape) -> int | None:
    """Count the rows that one token has: those of the input of `entry` [batch, sequence, …]."""
    _, _, *dims = graph.dims(entry.x) or (None, None, None)
    *_, width = graph.dims(entry.output) or (None,)
    sizes = [dim for dim in dims if isinstance(dim, int)]
    if len(sizes) != len(dims) or not isinstance(width, int):
        return None
    return math.prod(sizes) // width


def _region(last: ir.Value, leading: Dims) -> tuple[set[ir.Node], list[standard.Reshape]]:
    """Collect what computes `last` on flat rows, and the reshapes that feed it; nothing where something else does."""

    def broadcasts(value: ir.Value) -> bool:  # a vector or a scalar, with an axis more as before
        return (dims := graph.dims(value)) is not None and len(dims) < 2

    def is_edge(value: ir.Value) -> bool:
        node = value.producer()
        by_row = node is not None and (operators.view(node).pointwise or standard.RMSNormalization.matches(node))
        return broadcasts(value) or not by_row

    region, edge = behind([last], is_edge)
    entries = [standard.Reshape.made(value) for value in edge if not broadcasts(value)]
    from_tokens = [x for x in entries if x and (graph.dims(x.x) or ())[:2] == leading and _rows_of_token(x) is not None]
    return (set(region), from_tokens) if len(from_tokens) == len(entries) else (set(), [])
