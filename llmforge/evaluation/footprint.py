"""What one decode step reads, counted on the graph that the passes leave."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

import onnx_ir as ir

from llmforge.ir import interface, operators
from llmforge.ir.routing import share_read
from llmforge.metrics.latency import Footprint


@dataclass(frozen=True)
class BytesRead:
    """What a decode step reads at batch 1."""

    weights: int
    kv: int  # for each token of context
    multiply_adds: int | None = None  # of the weights, for each token; see `multiply_adds`

    def footprint(self, artifact_bytes: int) -> Footprint:
        """Put it beside the size of the artifact's engine."""
        return Footprint(
            artifact_bytes=artifact_bytes,
            weight_bytes_per_token=self.weights,
            kv_bytes_per_token=self.kv,
            multiply_adds_per_token=self.multiply_adds,
        )


def count(model: ir.Model) -> BytesRead:
    """Count the bytes that a decode step of `model` reads; an initializer that several nodes read counts once.

    Of experts count those that a token chooses, at batch 1. In a lowered graph these cannot be told any more: count
    before the lowering.

    A cache input is [batch, kv_heads, capacity, head_dim]; a token of context is one slot of it. States of fixed size
    do not grow with the context and count as none.
    """
    weights = sum(
        math.ceil(share_read(value) * _bytes(tensor.dtype, [int(dim) for dim in tensor.shape.numpy()]))
        for value in model.graph.initializers.values()
        if (tensor := value.const_value) is not None and not _only_looked_up(value)
    )
    kv = 0
    for value in model.graph.inputs:
        name = value.name or ""
        if interface.present_of(name) != name and not interface.is_state(name):
            if value.shape is None or value.dtype is None:
                raise ValueError(f"cache input {value.name} has no shape or dtype")
            kv += _bytes(value.dtype, [value.shape[axis] for axis in (1, 3)])
    return BytesRead(weights, kv)


def multiply_adds(model: ir.Model) -> int:
    """Count the multiply-adds of weights that one token takes: an element of a matrix each, of experts the chosen ones.

    For a graph as it was traced, whose weights have an element for each parameter. Attention's products of queries,
    keys and values are not among them: they grow with the context. Tables and vectors multiply nothing.
    """
    return sum(
        math.ceil(share_read(value) * tensor.size)
        for value in model.graph.initializers.values()
        if (tensor := value.const_value) is not None and len(tensor.shape) >= 2 and not _only_looked_up(value)
    )


@dataclass(frozen=True)
class Weights:
    """Initializers of one dtype whose names are the same but for the numbers between dots."""

    name: str  # "model.layers.*.mlp.down_proj.weight"
    dtype: str
    tensors: int
    size_bytes: int


_NUMBER = re.compile(r"(?<=\.)\d+(?=\.)")


def weights(model: ir.Model) -> list[Weights]:
    """Group all initializers, the largest group first; the values of none are read."""
    found: dict[tuple[str, str], list[int]] = {}
    for name, value in model.graph.initializers.items():
        if (tensor := value.const_value) is not None:
            key = _NUMBER.sub("*", name), tensor.dtype.name.lower()
            found.setdefault(key, []).append(tensor.nbytes)
    groups = [Weights(*key, tensors=len(sizes), size_bytes=sum(sizes)) for key, sizes in found.items()]
    return sorted(groups, key=lambda group: (-group.size_bytes, group.name, group.dtype))


def _only_looked_up(value: ir.Value) -> bool:
    reads = [operators.operand(node, index) for node, index in value.uses()]
    return bool(reads) and all(read is not None and read.table for read in reads)


def _bytes(dtype: ir.DataType, dims: list[int | ir.SymbolicDim]) -> int:
    return -(-math.prod(dim for dim in dims if isinstance(dim, int)) * dtype.bitwidth // 8)
