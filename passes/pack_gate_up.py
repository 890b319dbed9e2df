"""Give the gate and the up projection of a gated MLP one matrix product.

    act(x·Wg) * (x·Wu)   becomes   g, u = Split(x·W); act(g) * u   with W = [Wg Wu]

`Wg` and `Wu` are [K, N], `W` is [K, 2·N]; biases [N] are stacked likewise. Works for any activation of one tensor.

Fires for every `Mul` whose one side is a linear layer and whose other side is an activation of another linear layer,
written as one node (`Gelu`, `Relu`, `Sigmoid`, …) or as `Mul(g, Sigmoid(g))`, where both layers
- read the same tensor,
- own their initializers (nothing else reads them),
- both have a bias or both have none.

Numerics: as of `pack-qkv`: the same sums, whose order a matrix library may choose by the shape of the whole matrix.
"""

from __future__ import annotations

from typing import ClassVar

import onnx_ir as ir
from pydantic.dataclasses import dataclass

from llmforge.lowering import linear
from llmforge.lowering.pass_base import Changes, Context, Numerics, Pass, Rewritten, Skipped

_ACTIVATIONS = {"Elu", "Gelu", "HardSwish", "Mish", "Relu", "Sigmoid", "Softplus", "Swish", "Tanh"}


@dataclass(frozen=True)
class PackGateUp(Pass):
    """Give the gate and the up projection of a gated MLP one matrix product."""

    name: ClassVar[str] = "pack-gate-up"
    numerics: ClassVar[Numerics] = Numerics.ROUNDING

    def run(self, model: ir.Model, context: Context) -> Changes:
        """Rewrite every gated MLP of `model`."""
        changes = Changes()
        for node in list(model.graph):
            sides = _gated(node)
            if sides is None:
                continue
            gate, up = linear.of(sides[0]), linear.of(sides[1])
            if gate is None or up is None:
                missing = sides[0] if gate is None else sides[1]
                changes.skipped.append(Skipped(str(node.name), f"{missing.name} does not come from a linear layer"))
                continue
            name = linear.common_name([gate, up], "gate_up_proj")
            reason = linear.obstacle([gate, up], name)
            if reason is not None:
                changes.skipped.append(Skipped(str(node.name), reason))
                continue
            changes.rewritten.append(Rewritten(str(gate.matmul.name), f"gate and up are one product, {name}"))
            linear.stack([gate, up], name)
        return changes


def _gated(node: ir.Node) -> tuple[ir.Value, ir.Value] | None:
    """Return (gate, up) of `Mul(act(gate), up)`, in either order of the factors; None if `node` is something else."""
    if node.domain or node.op_type != "Mul":
        return None
    for activated, up in (node.inputs, node.inputs[::-1]):
        if activated is None or up is None:
            return None
        gate = _activated(activated)
        if gate is not None and gate is not up:  # gate is up: the inner product of SiLU itself
            return gate, up
    return None


def _activated(value: ir.Value) -> ir.Value | None:
    """Return `g` where `value` is an activation of `g`; None where it is none."""
    node = value.producer()
    if node is None:
        return None
    if node.op_type in _ACTIVATIONS:
        return node.inputs[0]
    if node.domain or node.op_type != "Mul":
        return None
    for factor, sigmoid in (node.inputs, node.inputs[::-1]):
        inner = None if sigmoid is None else sigmoid.producer()
        if inner is not None and inner.op_type == "Sigmoid" and inner.inputs[0] is factor:
            return factor
    return None
