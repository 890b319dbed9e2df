"""Lets a graph give heads of its rows of logits, so that a step need not copy them (`interface.TopLogits`).

    last = Gather(logits, -1)                                        # [batch, rows, V] → [batch, V]
    top_logits, ids = TopK(last, HEAD)                               # [batch, HEAD], descending; all fp32
    weights = Exp(Div(Sub(last, top_logits[:, :1]), temperatures[:, None]))
    others = Where(Greater(last, top_logits[:, -1:]), 0, weights)    # NaN is among them
    masses = ReduceSum(Reshape(others, [batch, blocks, -1]), -1)     # padded with 0 where blocks do not divide V

Over blocks, where a step has rows of several texts, all of them get heads: Squeeze(logits), [1, rows, V] → [rows, V].

64 rows of 128,256 logits are 32.8 MB; their heads are 0.15 MB. Sums are of weights relative to the largest logit: they
neither overflow nor lose digits where logits are large, as a logarithm would. And they are of what the host does not
have: so a rounding error of theirs is small beside the mass behind the head, and not only beside the whole.
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from llmforge.ir import graph, interface
from llmforge.rewrite.pass_base import Rewritten

_OUTPUTS = frozenset({interface.TOP_LOGITS, interface.TOP_IDS, interface.MASSES})
_FLOAT, _INT32, _INT64, _BOOL = ir.DataType.FLOAT, ir.DataType.INT32, ir.DataType.INT64, ir.DataType.BOOL


def gives_heads(model: ir.Model) -> bool:
    """Say whether `give_heads` was here."""
    return any(value.name == interface.TOP_LOGITS for value in model.graph.outputs)


def without_heads(model: ir.Model) -> ir.Model:
    """Write a clone of `model` without what `give_heads` added."""
    plain = model.clone()
    outputs = plain.graph.outputs
    for value in [value for value in outputs if str(value.name) in _OUTPUTS]:
        outputs.remove(value)
    graph.drop_unused(plain)
    return plain


def give_heads(model: ir.Model) -> Rewritten:
    """Add the input `temperatures`, and the outputs `top_logits`, `top_ids` and `masses`, in place."""
    main = model.graph
    logits = graph.output_named(model, interface.LOGITS)
    over_blocks = any(value.name == interface.BLOCK_TABLE for value in main.inputs)
    batch = (graph.dims(logits) or ("batch", "rows"))[1 if over_blocks else 0]
    vocabulary = graph.width(logits)
    head = min(interface.HEAD, vocabulary)
    temperatures = ir.Value(name=interface.TEMPERATURES, type=ir.TensorType(_FLOAT), shape=ir.Shape([batch]))
    main.inputs.append(temperatures)

    def constant(name: str, value: int | list[int]) -> ir.Value:
        return graph.initializer(model, f"heads.constant.{name}", np.array(value, np.int64))

    def node(
        op: str,
        inputs: list[ir.Value],
        outputs: list[tuple[str, ir.DataType, list[int | str | None]]],
        **attributes: graph.Attribute,
    ) -> list[ir.Value]:
        made = [ir.Value(name=name, type=ir.TensorType(dtype), shape=ir.Shape(dims)) for name, dtype, dims in outputs]
        main.append(
            ir.Node(
                "",
                op,
                inputs,
                ir.convenience.convert_attributes(attributes),
                outputs=made,
                name=f"heads/{outputs[0][0]}",
            )
        )
        return made

    row, top = [batch, vocabulary], [batch, head]
    last_row = [("heads.last", _FLOAT, row)]
    if over_blocks:
        [last] = node("Squeeze", [logits, constant("axis_0", [0])], last_row)
    else:
        [last] = node("Gather", [logits, constant("last", -1)], last_row, axis=1)
    largest, ids = node(
        "TopK",
        [last, constant("size", [head])],
        [(interface.TOP_LOGITS, _FLOAT, top), ("heads.ids", _INT64, top)],
        axis=-1,
    )
    [narrow] = node("Cast", [ids], [(interface.TOP_IDS, _INT32, top)], to=int(_INT32))
    [best] = node("Gather", [largest, constant("first", [0])], [("heads.best", _FLOAT, [batch, 1])], axis=1)
    [column] = node("Unsqueeze", [temperatures, constant("axis", [1])], [("heads.column", _FLOAT, [batch, 1])])
    [below] = node("Sub", [last, best], [("heads.below", _FLOAT, row)])
    [scaled] = node("Div", [below, column], [("heads.scaled", _FLOAT, row)])
    [weights] = node("Exp", [scaled], [("heads.weights", _FLOAT, row)])
    [least] = node("Gather", [largest, constant("end", [head - 1])], [("heads.least", _FLOAT, [batch, 1])], axis=1)
    [above] = node("Greater", [last, least], [("heads.above", _BOOL, row)])
    nothing = graph.initializer(model, "heads.constant.nothing", np.zeros((), np.float32))
    [others] = node("Where", [above, nothing, weights], [("heads.others", _FLOAT, row)])
    blocks, size = interface.mass_blocks(vocabulary)
    if short := blocks * size - vocabulary:
        pads = constant("pads", [0, 0, 0, short])
        [others] = node("Pad", [others, pads], [("heads.padded", _FLOAT, [batch, blocks * size])])
    shape = constant("blocks", [0, blocks, size])  # 0: as it is
    [blocked] = node("Reshape", [others, shape], [("heads.blocked", _FLOAT, [batch, blocks, size])])
    sums = [(interface.MASSES, _FLOAT, [batch, blocks])]
    [masses] = node("ReduceSum", [blocked, constant("within", [2])], sums, keepdims=0)
    main.outputs.extend([largest, narrow, masses])
    return Rewritten(interface.LOGITS, f"with the {head} largest of a row, and sums of the others in {blocks} blocks")
