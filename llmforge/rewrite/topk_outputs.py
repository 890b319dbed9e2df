"""Outputs for the largest logits of each row, so that a step need not copy all of them (`interface.TopLogits`).

    last = Gather(logits, -1)                                        # [batch, rows, V] → [batch, V]
    top_logits, ids = TopK(last, HEAD)                               # [batch, HEAD], descending; all fp32
    weights = Exp(Div(Sub(last, top_logits[:, :1]), temperatures[:, None]))
    others = Where(Greater(last, top_logits[:, -1:]), 0, weights)    # NaN is among them
    masses = ReduceSum(Reshape(others, [batch, blocks, -1]), -1)     # padded with 0 where blocks do not divide V

Over blocks, a step has rows of several texts, which all get their own: Squeeze(logits), [1, rows, V] → [rows, V].

Where a device's TopK is slow over many rows, it runs over a few of them after the other: Slice, TopK, and Concat of
what all gave. Slices that a step of fewer rows leaves empty launch nothing.

64 rows of 128,256 logits are 32.8 MB; their largest are 0.15 MB. Sums are of weights relative to the largest logit:
they neither overflow nor lose digits where logits are large, as a logarithm would. And they are of what the host does
not have: so a rounding error of theirs is small beside the mass of the other tokens, and not only beside the whole.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from llmforge.ir import graph, interface
from llmforge.rewrite.pass_base import Rewritten

_OUTPUTS = frozenset({interface.TOP_LOGITS, interface.TOP_IDS, interface.MASSES})
_Dims = list[int | str | None]
_FLOAT, _INT32, _INT64, _BOOL = ir.DataType.FLOAT, ir.DataType.INT32, ir.DataType.INT64, ir.DataType.BOOL


def gives_top_logits(model: ir.Model) -> bool:
    """Say whether `add_topk_outputs` was here."""
    return any(value.name == interface.TOP_LOGITS for value in model.graph.outputs)


def without_topk_outputs(model: ir.Model) -> ir.Model:
    """Write a clone of `model` without what `add_topk_outputs` added."""
    plain = model.clone()
    outputs = plain.graph.outputs
    for value in [value for value in outputs if str(value.name) in _OUTPUTS]:
        outputs.remove(value)
    graph.drop_unused(plain)
    return plain


def add_topk_outputs(model: ir.Model, slices: Sequence[int] = ()) -> Rewritten:
    """Add the input `temperatures`, and the outputs `top_logits`, `top_ids` and `masses`, in place.

    `slices`: the rows, ascending, that the slices begin with which the largest are taken of, besides the first one.
    """
    main = model.graph
    logits = graph.output_named(model, interface.LOGITS)
    over_blocks = any(value.name == interface.BLOCK_TABLE for value in main.inputs)
    batch = (graph.dims(logits) or ("batch", "rows"))[1 if over_blocks else 0]
    vocabulary = graph.width(logits)
    top = min(interface.HEAD, vocabulary)
    temperatures = ir.Value(name=interface.TEMPERATURES, type=ir.TensorType(_FLOAT), shape=ir.Shape([batch]))
    main.inputs.append(temperatures)
    build = _Appending(model)
    if over_blocks:
        last = build.node("Squeeze", [logits, build.constant("axis_0", [0])], "last", [batch, vocabulary])
    else:
        last = build.node("Gather", [logits, build.constant("last", -1)], "last", [batch, vocabulary], axis=1)
    largest, ids = _largest(build, last, top, [0, *slices])
    [narrow] = build.nodes("Cast", [ids], [(interface.TOP_IDS, _INT32, [batch, top])], to=int(_INT32))
    masses = _masses(build, last, largest, temperatures)
    main.outputs.extend([largest, narrow, masses])
    blocks, _ = interface.mass_blocks(vocabulary)
    taken = f", of {len(slices) + 1} slices of rows" if slices else ""
    what = f"with the {top} largest of a row{taken}, and sums of the others in {blocks} blocks"
    return Rewritten(interface.LOGITS, what)


def _largest(build: _Appending, last: ir.Value, top: int, starts: Sequence[int]) -> tuple[ir.Value, ir.Value]:
    """Find the `top` largest of `last` [batch, V] and their ids, [batch, top], in slices that begin with `starts`."""
    dims: _Dims = [(graph.dims(last) or ())[0], top]
    size, axis = build.constant("size", [top]), build.constant("axis_0", [0])
    named = (interface.TOP_LOGITS, _FLOAT, dims), ("heads.ids", _INT64, dims)
    if len(starts) == 1:
        largest, ids = build.nodes("TopK", [last, size], list(named), axis=-1)
        return largest, ids
    parts = []
    for start, end in zip(starts, [*starts[1:], np.iinfo(np.int64).max], strict=True):
        rows = build.constant(f"row_{start}", [start]), build.constant(f"row_{end}", [end])
        part = build.node("Slice", [last, *rows, axis], f"rows_{start}", [None, graph.width(last)])
        shape: _Dims = [None, top]
        found = [(f"heads.largest_{start}", _FLOAT, shape), (f"heads.ids_{start}", _INT64, shape)]
        parts.append(build.nodes("TopK", [part, size], found, axis=-1))
    [largest], [ids] = (
        build.nodes("Concat", list(values), [name], axis=0)
        for values, name in zip(zip(*parts, strict=True), named, strict=True)
    )
    return largest, ids


def _masses(build: _Appending, last: ir.Value, largest: ir.Value, temperatures: ir.Value) -> ir.Value:
    """Sum the weights of the logits `last` [batch, V] that are below the `largest` [batch, top], in blocks."""
    batch, vocabulary = graph.dims(last) or ()
    row, top, one = [batch, vocabulary], graph.width(largest), [batch, 1]
    best = build.node("Gather", [largest, build.constant("first", [0])], "best", one, axis=1)
    column = build.node("Unsqueeze", [temperatures, build.constant("axis", [1])], "column", one)
    below = build.node("Sub", [last, best], "below", row)
    weights = build.node("Exp", [build.node("Div", [below, column], "scaled", row)], "weights", row)
    least = build.node("Gather", [largest, build.constant("end", [top - 1])], "least", one, axis=1)
    [above] = build.nodes("Greater", [last, least], [("heads.above", _BOOL, row)])
    nothing = graph.initializer(build.model, "heads.constant.nothing", np.zeros((), np.float32))
    others = build.node("Where", [above, nothing, weights], "others", row)
    blocks, size = interface.mass_blocks(graph.width(last))
    if short := blocks * size - graph.width(last):
        pads = build.constant("pads", [0, 0, 0, short])
        others = build.node("Pad", [others, pads], "padded", [batch, blocks * size])
    shape = build.constant("blocks", [0, blocks, size])  # 0: as it is
    blocked = build.node("Reshape", [others, shape], "blocked", [batch, blocks, size])
    sums = [(interface.MASSES, _FLOAT, [batch, blocks])]
    [masses] = build.nodes("ReduceSum", [blocked, build.constant("within", [2])], sums, keepdims=0)
    return masses


@dataclass(frozen=True)
class _Appending:
    """Appends nodes to the graph of `model`; stored names begin with "heads"."""

    model: ir.Model

    def constant(self, name: str, value: int | list[int]) -> ir.Value:
        """Add an int64 initializer."""
        return graph.initializer(self.model, f"heads.constant.{name}", np.array(value, np.int64))

    def node(self, op: str, inputs: list[ir.Value], name: str, dims: _Dims, **attributes: graph.Attribute) -> ir.Value:
        """Append a node with one fp32 output."""
        return self.nodes(op, inputs, [(f"heads.{name}", _FLOAT, dims)], **attributes)[0]

    def nodes(
        self,
        op: str,
        inputs: list[ir.Value],
        outputs: list[tuple[str, ir.DataType, _Dims]],
        **attributes: graph.Attribute,
    ) -> list[ir.Value]:
        """Append a node, and return its outputs of these names, dtypes and shapes."""
        made = [ir.Value(name=name, type=ir.TensorType(dtype), shape=ir.Shape(dims)) for name, dtype, dims in outputs]
        given = ir.convenience.convert_attributes(attributes)
        self.model.graph.append(ir.Node("", op, inputs, given, outputs=made, name=f"heads/{outputs[0][0]}"))
        return made
