"""Lets a graph give the head of its last row of logits, so that a step need not copy them (`interface.Heads`).

    last = Gather(logits, -1)                                        # [batch, rows, V] → [batch, V]
    top_logits, ids = TopK(last, HEAD)                               # [batch, HEAD], descending; all fp32
    mass = ReduceSum(Exp(Div(Sub(last, top_logits[:, :1]), temperatures[:, None])))    # [batch]

64 rows of 128,256 logits are 32.8 MB; their heads are 0.13 MB. Of each row the sum is taken relative to its largest
logit: it neither overflows nor loses digits where logits are large, as a logarithm of it would.
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from llmforge.ir import graph, interface
from llmforge.lowering.pass_base import Rewritten

_OUTPUTS = frozenset({interface.TOP_LOGITS, interface.TOP_IDS, interface.MASS})
_FLOAT, _INT32, _INT64 = ir.DataType.FLOAT, ir.DataType.INT32, ir.DataType.INT64


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
    """Add the input `temperatures`, and the outputs `top_logits`, `top_ids` and `mass`, in place."""
    main = model.graph
    logits = graph.output_named(model, interface.LOGITS)
    batch = (graph.dims(logits) or ("batch",))[0]
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
    [last] = node("Gather", [logits, constant("last", -1)], [("heads.last", _FLOAT, row)], axis=1)
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
    [mass] = node("ReduceSum", [weights, constant("axis", [1])], [(interface.MASS, _FLOAT, [batch])], keepdims=0)
    main.outputs.extend([largest, narrow, mass])
    return Rewritten(interface.LOGITS, f"the {head} largest of a row, and the sum of all, come with them")
