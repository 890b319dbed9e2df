"""Pack the query, key and value projections into one MatMul.

    q = x·Wq, k = x·Wk, v = x·Wv   becomes   q, k, v = Split(x·W)   with W = [Wq Wk Wv]

`Wq` is [K, Nq], `Wk` and `Wv` are [K, Nkv], `W` is [K, Nq + 2·Nkv]. Biases [N] are stacked likewise and added before
the Split. The activations are read once instead of three times, and a decode step has one larger product.

Fires for every `llmforge::Attention`, `llmforge::EncoderAttention` and `com.microsoft::GroupQueryAttention` whose
query, key and value come, each through rotary embedding, per-head normalization and reshapes or directly, from three
linear layers that
- read the same tensor,
- own their initializers (nothing else reads them),
- all have a bias or all have none.

Numerics: the sums of a column are the same, but a matrix library chooses its blocks by the shape of the whole matrix
and promises no order of summation. (ONNX Runtime 1.31 gave equal bits on AVX-512 for every shape tried.)
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import onnx_ir as ir
from pydantic.dataclasses import dataclass

from llmforge.ir.operators import canonical, contrib
from llmforge.ir.operators.standard import Reshape, RMSNormalization, RotaryEmbedding, Split, Transpose
from llmforge.rewrite import linear
from llmforge.rewrite.declared import PackQkvTraits
from llmforge.rewrite.pass_base import Changes, Context, Numerics, Pass, Rewritten
from llmforge.rewrite.patterns import NotApplicable, rewrite_each, skip_if


@dataclass(frozen=True)
class PackQkv(PackQkvTraits, Pass):
    """Pack the query, key and value projections into one MatMul."""

    numerics: ClassVar[Numerics] = Numerics.ROUNDING

    def run(self, model: ir.Model, context: Context) -> Changes:
        """Rewrite every attention of `model`."""
        return rewrite_each(list(model.graph), _pack, Changes())


def _pack(attention: ir.Node) -> Rewritten | None:
    """Pack the projections of an attention; None where it is something else."""
    operands = _operands(attention)
    if operands is None:
        return None
    layers = _projections(operands)
    name = linear.common_name(layers, "qkv_proj")
    skip_if(linear.stack(layers, name))
    return Rewritten(str(layers[0].matmul.name), f"q, k and v projections of {attention.name} packed into {name}")


def _operands(node: ir.Node) -> Mapping[str, ir.Value | None] | None:
    """Return what an attention reads, by role; None where `node` is something else."""
    if (own := canonical.Attention.of(node) or canonical.EncoderAttention.of(node)) is not None:
        return {"query": own.q, "key": own.k, "value": own.v}
    if (gqa := contrib.GroupQueryAttention.of(node)) is not None:
        return {"query": gqa.query, "key": gqa.key, "value": gqa.value}
    return None


def _projections(operands: Mapping[str, ir.Value | None]) -> list[linear.LinearLayer]:
    """Find the linear layers that make query, key and value."""
    layers = []
    for role, value in operands.items():
        if value is None:
            raise NotApplicable(f"{role} is part of a packed query")
        origin = _origin(value)
        if Split.made(origin) is not None:
            raise NotApplicable(f"{role} is already packed (comes from a Split)")
        layer = linear.of(origin)
        if layer is None:
            producer = origin.producer()
            made_by = "a graph input" if producer is None else f"{producer.op_type} {producer.name}"
            raise NotApplicable(f"{role} comes from {made_by}, not from a MatMul with an initializer")
        layers.append(layer)
    return layers


def _origin(value: ir.Value) -> ir.Value:
    """Walk up from an input of attention to the tensor that the projection made."""
    for between in (RotaryEmbedding, RMSNormalization, Reshape, Transpose):
        if (found := between.made(value)) is not None:
            return _origin(found.x)
    return value
