"""Experts as matrix products over all of them: TensorRT's parser takes no operator that chooses matrices.

    y = llmforge::MoE(x, expert_ids, expert_weights, up, down[, up_bias, down_bias])
    becomes, with T tokens and E experts,
    w = ReduceSum(Where(Equal(ids, experts), expert_weights, 0))     [T, E], 0 where a token did not choose an expert
    a = between(MatMul(x, up) + up_bias)                             [E, T, I], one product for every expert
    y = MatMul(w·a, down) + MatMul(w, down_bias)                     [T, E·I] · [E·I, H]

Right for every router: weights of an expert that was chosen twice add up. A step reads every expert, so a decode step
reads E / top_k times the matrices that it needs: refused where that is more than `MOST_READ`.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from llmforge.ir import expansion, graph
from llmforge.ir.operators import canonical

MOST_READ = 4  # a Mixtral has 8 experts, of which a token chooses 2


def reason_against(layer: canonical.MoE) -> str | None:
    """Say why the experts of `layer` are not computed all; None where they are."""
    experts, top_k = graph.static(layer.up)[0], graph.width(layer.expert_ids)
    if experts > MOST_READ * top_k:
        return (
            f"a token chooses {top_k} of {experts} experts; the lowering computes all of them, and reads "
            f"{experts / top_k:g} times what is chosen, of which {MOST_READ} are allowed"
        )
    return None


def lower(model: ir.Model, layer: canonical.MoE) -> str:
    """Replace one `llmforge::MoE`; say what it became."""
    graph.replace_value(layer.output, _Dense(model, layer).result())
    return f"MoE to products with all {graph.static(layer.up)[0]} experts"


@dataclass
class _Dense(expansion.MoEExpansion):
    """The products of one layer; comments give shapes."""

    _inner = expansion.MoEExpansion._outer  # no loop, so nothing inside of one

    def result(self) -> ir.Value:
        layer = self.experts
        experts, hidden, width = graph.static(layer.up)
        _, inner, _ = graph.static(layer.down)
        weights = self._chosen(experts)
        h = self._inner("MatMul", [self._flat(layer.x), layer.up])  # [E, T, 2·I or I]
        if (bias := layer.up_bias) is not None:
            column = self._constant(f"by_expert_{experts}_{width}", [experts, 1, width])
            h = self._inner("Add", [h, self._inner("Reshape", [bias, column])])
        h = self._inner("Transpose", [self._between(h)], {"perm": [1, 0, 2]})  # [T, E, I]
        h = self._inner("Mul", [h, self._inner("Unsqueeze", [weights, self._constant("axis_2", [2])])])
        h = self._inner("Reshape", [h, self._constant(f"side_by_side_{experts * inner}", [-1, experts * inner])])
        down = self._inner("Reshape", [layer.down, self._constant(f"stacked_{hidden}", [-1, hidden])])
        y = self._inner("MatMul", [h, down])  # [T, H]
        if (bias := layer.down_bias) is not None:
            y = self._inner("Add", [y, self._inner("MatMul", [weights, bias])])
        return self._inner("Reshape", [y, self._inner("Shape", [layer.x])])

    def _chosen(self, experts: int) -> ir.Value:
        """[T, E]: the weights of each token's experts."""
        ids, weights = self._flat(self.experts.expert_ids), self._flat(self.experts.expert_weights)  # [T, top_k]
        last = self._constant("axis_2", [2])
        numbers = self._constant(f"experts_{experts}", list(range(experts)))
        equal = self._inner("Equal", [self._inner("Unsqueeze", [ids, last]), numbers])  # [T, top_k, E]
        spread = self._inner("Where", [equal, self._inner("Unsqueeze", [weights, last]), self._number(0.0)])
        return self._inner("ReduceSum", [spread, self._constant("axis_1", [1])], {"keepdims": 0})

    def _number(self, value: float) -> ir.Value:
        """In what the experts compute in."""
        return self._constant(f"number_{value}_{self._dtype.name}", np.asarray(value, self._dtype.numpy()))
