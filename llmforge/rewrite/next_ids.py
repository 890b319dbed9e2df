"""Lets a graph guess the token that follows each row, and take it in the next step without the host.

    ids = Where(Less(input_ids, 0), chosen_ids[-1 - input_ids], input_ids)     # as input_ids; chosen_ids [rows]
    next_ids = …                                                               # [batch], from heads and draws

`next_ids` lies where the next step reads `chosen_ids`: an id of -1 - n takes the guess of row n. The host decides every
token (`llmforge.runtime.sampling`), with the random numbers that `draws` brings here beforehand; a row whose guess was
another token runs again. So the guess is made as the host decides, without what makes that exact: the head of a row by
rank, or a block of all others by the sums of blocks, and a token of that block by id. There is no second attempt where
top-p cuts behind the head.
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from llmforge.ir import graph, interface
from llmforge.rewrite.pass_base import Rewritten

_FLOAT, _BOOL, _INT64 = ir.DataType.FLOAT, ir.DataType.BOOL, ir.DataType.INT64
Dims = list[int | str | None]


def feed_back(model: ir.Model) -> Rewritten:
    """Add the inputs `draws` and `chosen_ids` and the output `next_ids` to a graph that gives heads, in place."""
    values = {value.name: value for node in model.graph for value in node.outputs}
    batch = (graph.dims(values[interface.TOP_LOGITS]) or ("batch",))[0]
    _take_chosen(model)
    nodes = _Nodes(model)
    shape: Dims = [batch, len(interface.Draw._fields)]
    draws = ir.Value(name=interface.DRAWS, type=ir.TensorType(_FLOAT), shape=ir.Shape(shape))
    model.graph.inputs.append(draws)
    chosen = _guess(nodes, values, draws, batch, graph.width(graph.output_named(model, interface.LOGITS)))
    given = ir.Value(name=interface.NEXT_IDS, type=ir.TensorType(_INT64), shape=ir.Shape([batch]))
    only = nodes.constant("axes", np.array([1]))
    model.graph.append(ir.Node("", "Squeeze", [chosen, only], outputs=[given], name=interface.NEXT_IDS))
    model.graph.outputs.append(given)
    return Rewritten(interface.NEXT_IDS, "guesses of tokens, and a negative id takes one of the step before")


def _take_chosen(model: ir.Model) -> None:
    """Let all that reads `input_ids` read `chosen_ids` where they are negative."""
    main = model.graph
    ids = next(value for value in main.inputs if value.name == interface.INPUT_IDS)
    readers, dims = list(ids.uses()), list(graph.dims(ids) or ())
    chosen = ir.Value(name=interface.CHOSEN_IDS, type=ir.TensorType(_INT64), shape=ir.Shape(["rows_before"]))
    main.inputs.append(chosen)
    nodes, before = _Nodes(model), len(main)
    zero = nodes.constant("0", np.array(0))
    row = nodes("Max", dims, nodes("Sub", dims, nodes.constant("-1", np.array(-1)), ids), zero)
    taken = nodes("Where", dims, nodes("Less", dims, ids, zero), nodes("Gather", dims, chosen, row), ids)
    for reader in readers:
        reader.node.replace_input_with(reader.idx, taken)
    made = [main[i] for i in range(before, len(main))]
    main.remove(made)
    main.insert_before(main[0], made)


def _guess(
    nodes: _Nodes, values: dict[str | None, ir.Value], draws: ir.Value, batch: int | str | None, vocabulary: int
) -> ir.Value:
    """Choose a token of each row, int64 [batch, 1]."""
    ids = values["heads.ids"]
    width = graph.width(ids)
    column: Dims = [batch, 1]
    row: Dims = [batch, width]
    parts = nodes.split(draws, [f"draws.{name}" for name in interface.Draw._fields], column)
    draw = interface.Draw(*parts)
    zero, along = nodes.constant("zero", np.float32(0)), nodes.constant("1", np.array(1))
    below = nodes("Sub", row, values[interface.TOP_LOGITS], values["heads.best"])
    head = nodes("Exp", row, nodes("Div", row, below, values["heads.column"]))
    ranks = nodes.constant("ranks", np.arange(width, dtype=np.float32))
    kept = nodes("And", row, nodes("GreaterOrEqual", row, head, draw.min_p), nodes("Less", row, ranks, draw.top_k))
    sums = nodes("CumSum", row, nodes("Where", row, kept, head, zero), along)
    most = nodes.last(sums, column)
    ahead = whole = most
    if vocabulary > width:
        blocks, size = interface.mass_blocks(vocabulary)
        of_block: Dims = [batch, blocks]
        running = nodes("CumSum", of_block, values[interface.MASSES], along)
        # Of a row that ends behind its head, the least of it stands with those behind.
        least = nodes("Mul", column, nodes.last(head, column), draw.behind)
        ahead = nodes("Sub", column, most, least)
        whole = nodes("Add", column, ahead, nodes("Mul", column, nodes.last(running, column), draw.behind))
    # What the random number is a part of: the sum at which top-p cuts, if that is within the head, or the whole.
    edge = nodes("Mul", column, draw.top_p, whole)
    within = nodes("LessOrEqual", column, edge, most)
    cut = nodes("GatherElements", column, sums, nodes.count("Less", sums, edge, row, column), axis=1)
    target = nodes("Mul", column, draw.uniform, nodes("Where", column, within, cut, whole))
    of_head = nodes("GatherElements", column, ids, nodes.count("LessOrEqual", sums, target, row, column), axis=1)
    if vocabulary <= width:
        return of_head
    past = nodes("Sub", column, target, ahead)
    block = nodes.count("LessOrEqual", running, past, of_block, column)
    inside: Dims = [batch, size]
    first = nodes("Mul", column, block, nodes.constant("size", np.array(size)))
    index = nodes("Add", inside, first, nodes.constant("places", np.arange(size)))
    index = nodes("Min", inside, index, nodes.constant("final", np.array(vocabulary - 1)))
    others = nodes("CumSum", inside, nodes("GatherElements", inside, values["heads.others"], index, axis=1), along)
    past = nodes("Mul", column, draw.second, nodes.last(others, column))
    at = nodes.count("LessOrEqual", others, past, inside, column)
    of_block_id = nodes("GatherElements", column, index, at, axis=1)
    by_head = nodes("Or", column, within, nodes("Less", column, target, ahead))
    return nodes("Where", column, by_head, of_head, of_block_id)


class _Nodes:
    """Appends nodes to a graph."""

    def __init__(self, model: ir.Model) -> None:
        self._model = model

    def constant(self, name: str, value: NDArray[np.generic] | np.generic) -> ir.Value:
        """Give a constant."""
        return graph.initializer(self._model, f"next_ids.constant.{name}", value)

    def __call__(self, op: str, dims: Dims, *inputs: ir.Value, **attributes: graph.Attribute) -> ir.Value:
        """Append a node, whose only output has the type of its last input, but for comparisons and indices."""
        kind = _BOOL if op in ("Less", "LessOrEqual", "GreaterOrEqual", "And", "Or") else inputs[-1].dtype
        if op in ("GatherElements", "CumSum"):
            kind = inputs[0].dtype
        return self._append(
            op, [ir.Value(type=ir.TensorType(kind or _INT64), shape=ir.Shape(dims))], inputs, attributes
        )

    def _append(
        self, op: str, outputs: list[ir.Value], inputs: tuple[ir.Value, ...], attributes: dict[str, graph.Attribute]
    ) -> ir.Value:
        name = f"next_ids.{op}_{len(self._model.graph)}"
        for i, output in enumerate(outputs):
            output.name = output.name or (f"{name}.{i}" if i else name)
        given = ir.convenience.convert_attributes(attributes)
        self._model.graph.append(ir.Node("", op, inputs, given, outputs=outputs, name=name))
        return outputs[0]

    def split(self, value: ir.Value, names: list[str], dims: Dims) -> list[ir.Value]:
        """Cut [batch, n] into n columns."""
        parts = [ir.Value(name=name, type=ir.TensorType(value.dtype), shape=ir.Shape(dims)) for name in names]  # type: ignore[arg-type]
        self._append("Split", parts, (value,), {"axis": 1, "num_outputs": len(names)})
        return parts

    def last(self, values: ir.Value, column: Dims) -> ir.Value:
        """Give the last column."""
        end = self.constant(f"last.{graph.width(values)}", np.array([graph.width(values) - 1]))
        made = ir.Value(type=ir.TensorType(_FLOAT), shape=ir.Shape(column))
        return self._append("Gather", [made], (values, end), {"axis": 1})

    def count(self, compared: str, sums: ir.Value, wanted: ir.Value, row: Dims, column: Dims) -> ir.Value:
        """Count the `sums` of a row that compare so with `wanted`, of all but the last one: int64 [batch, 1].

        In fp32, which is exact, and which alone ONNX Runtime's CUDA provider sums without cuDNN.
        """
        ones, total, number = (
            ir.Value(type=ir.TensorType(dtype), shape=ir.Shape(dims))
            for dtype, dims in ((_FLOAT, row), (_FLOAT, column), (_INT64, column))
        )
        self._append("Cast", [ones], (self(compared, row, sums, wanted),), {"to": int(_FLOAT)})
        self._append("ReduceSum", [total], (ones, self.constant("axes", np.array([1]))), {"keepdims": 1})
        most = self.constant(f"most.{graph.width(sums)}", np.float32(graph.width(sums) - 1))
        self._append("Cast", [number], (self("Min", column, total, most),), {"to": int(_INT64)})
        return number
