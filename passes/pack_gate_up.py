"""Pack the gate and up projections of an MLP into one MatMul.

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

from llmforge.ir.operators.record import Operator
from llmforge.ir.operators.standard import Gelu, Mul, Relu, Sigmoid, Softplus, Tanh
from llmforge.rewrite import linear
from llmforge.rewrite.declared import PackGateUpTraits
from llmforge.rewrite.pass_base import Changes, Context, Numerics, Pass, Rewritten
from llmforge.rewrite.patterns import NotApplicable, rewrite_each, skip_if

ACTIVATIONS: tuple[type[Operator], ...] = (Gelu, Relu, Sigmoid, Softplus, Tanh)


@dataclass(frozen=True)
class PackGateUp(PackGateUpTraits, Pass):
    """Pack the gate and up projections of an MLP into one MatMul."""

    numerics: ClassVar[Numerics] = Numerics.ROUNDING

    def run(self, model: ir.Model, context: Context) -> Changes:
        """Rewrite every gated MLP of `model`."""
        return rewrite_each(Mul.all(model), _pack, Changes())


def _pack(product: Mul) -> Rewritten | None:
    """Pack the two layers that a product gates; None where it gates nothing."""
    sides = _gated(product)
    if sides is None:
        return None
    gate, up = linear.of(sides[0]), linear.of(sides[1])
    if gate is None or up is None:
        raise NotApplicable(f"{sides[gate is not None].name} does not come from a linear layer")
    name = linear.common_name([gate, up], "gate_up_proj")
    skip_if(linear.stack([gate, up], name))
    return Rewritten(str(gate.matmul.name), f"gate and up projections packed into {name}")


def _gated(product: Mul) -> tuple[ir.Value, ir.Value] | None:
    """Return (gate, up) of `Mul(act(gate), up)`, in either order of the factors; None if `product` is none."""
    for activated, up in product.either_way:
        gate = _activated(activated)
        if gate is not None and gate is not up:  # gate is up: the inner product of SiLU itself
            return gate, up
    return None


def _activated(value: ir.Value) -> ir.Value | None:
    """Return `g` where `value` is an activation of `g` alone; None where it is none."""
    for activation in ACTIVATIONS:
        if (read := _read_by(activation, value)) is not None:
            return read
    silu = Mul.made(value)
    for factor, other in () if silu is None else silu.either_way:
        if _read_by(Sigmoid, other) is factor:
            return factor
    return None


def _read_by(activation: type[Operator], value: ir.Value) -> ir.Value | None:
    """Return the one input of the `activation` that makes `value`; None where something else does."""
    found = activation.made(value)
    return found.first_input if found is not None and len(found.node.inputs) == 1 else None
