"""Merge a residual Add into the RMS normalization that reads its sum.

    sum = Add(residual, branch); y = RMSNormalization(sum, weight)
    becomes
    y, _, _, sum = com.microsoft::SkipSimplifiedLayerNormalization(residual, branch, weight)

All of `residual`, `branch`, `sum` and `y` are [batch, sequence, hidden]; `weight` is [hidden]. Where nothing else reads
the sum, the node does not give it out.

Fires for every RMSNormalization over the last axis, in fp32, of a sum
- of two computed tensors (a bias, which is an initializer, is no residual),
- of equal and known shape of rank 3 (the fused operator broadcasts only over the batch),
- that no earlier normalization took with it: of several readers the first is fused.

A normalization of something else (the first of a decoder, one per head) stays RMSNormalization, which ONNX Runtime runs
with the kernel of SimplifiedLayerNormalization: equal bits and time.

Numerics: the sum is bit-equal; the fused kernel adds up the squares in another order.
"""

from __future__ import annotations

from typing import ClassVar

import onnx_ir as ir
from pydantic.dataclasses import dataclass

from llmforge import graph
from llmforge.errors import UnsupportedError
from llmforge.transform import Changes, Context, Numerics, Pass, Rewritten, Skipped

_FUSED = "SkipSimplifiedLayerNormalization"
_EPSILON = 1e-5  # ONNX operator RMSNormalization 23: the default of `epsilon`


@dataclass(frozen=True)
class FuseNorms(Pass):
    """Merge a residual Add into the RMS normalization that reads its sum."""

    name: ClassVar[str] = "fuse-norms"
    numerics: ClassVar[Numerics] = Numerics.ROUNDING

    def run(self, model: ir.Model, context: Context) -> Changes:
        """Rewrite every normalized residual sum of `model`.

        Raises:
            UnsupportedError: the target has no ONNX Runtime, whose operator this is.
        """
        if "onnxruntime" not in context.target.engines:
            raise UnsupportedError(
                f"{self.name}: target {context.target.name} runs {', '.join(context.target.engines)}; {_FUSED} is an "
                "operator of ONNX Runtime",
                hint=f"leave {self.name} out of the recipe",
            )
        changes = Changes()
        for norm in list(model.graph):
            if norm.domain or norm.op_type != "RMSNormalization":
                continue
            reason = _obstacle(norm)
            if reason is not None:
                changes.skipped.append(Skipped(str(norm.name), reason))
                continue
            changes.rewritten.append(Rewritten(str(norm.name), f"takes in {_fuse(norm).name}"))
        if changes:
            model.opset_imports["com.microsoft"] = 1
        return changes


def _obstacle(norm: ir.Node) -> str | None:
    """Say why `norm` stays as it is; None where it can be fused."""
    total = norm.inputs[0]
    add = None if total is None else total.producer()
    if total is None or add is None:
        return "it normalizes a graph input"
    if add.domain or add.op_type != "Add":
        if add.op_type == _FUSED and total is not add.outputs[0]:
            return f"the sum it reads went into {add.name}"
        return f"it normalizes the output of {add.op_type} {add.name}, not a sum"
    for term in add.inputs:
        if term is None or term.is_initializer():
            return f"{add.name} adds an initializer, which is no residual"
    left, right, out = (None if value is None else graph.dims(value) for value in (*add.inputs, total))
    if left is None or None in left or left != right or left != out or len(left) != 3:
        return f"the terms of {add.name} are {left} and {right}; wanted one known shape of rank 3"
    axis = norm.attributes.get_int("axis", -1)
    if axis not in (-1, 2):
        return f"it normalizes from axis {axis} on; wanted the last"
    weight = norm.inputs[1]
    if weight is None or graph.dims(weight) != left[-1:]:
        return f"its weight is {None if weight is None else graph.dims(weight)}; wanted {left[-1:]}"
    if (
        norm.attributes.get_int("stash_type", ir.DataType.FLOAT) != ir.DataType.FLOAT
        or total.dtype != ir.DataType.FLOAT
    ):
        return f"it works in {total.dtype}, with stash_type {norm.attributes.get_int('stash_type', 1)}; wanted fp32"
    return None


def _fuse(norm: ir.Node) -> ir.Node:
    """Replace `norm` and the Add in front of it; return that Add, which is no longer in the graph."""
    total = norm.inputs[0]
    assert total is not None
    add = total.producer()
    assert add is not None and norm.graph is not None
    shared = len(total.uses()) > 1 or total.is_graph_output()
    # In front of the Add's own place: another reader of the sum may stand before the normalization.
    fused = graph.insert(
        add,
        _FUSED,
        [*add.inputs, norm.inputs[1]],
        {"epsilon": norm.attributes.get_float("epsilon", _EPSILON)},
        domain="com.microsoft",
        outputs=4 if shared else 1,
        name=norm.name,
    )
    graph.supersede(norm.outputs[0], fused[0])
    norm.graph.remove(norm, safe=True)
    if shared:
        graph.supersede(total, fused[3])
        fused[1].name = fused[2].name = ""  # mean and inverse deviation: not wanted
    fused_graph = add.graph
    assert fused_graph is not None
    fused_graph.remove(add, safe=True)
    return add
