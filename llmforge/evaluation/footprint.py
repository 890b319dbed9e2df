"""What one decode step reads, counted on the graph that the passes leave."""

from __future__ import annotations

import math
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

    def footprint(self, artifact_bytes: int) -> Footprint:
        """Put it beside the size of the artifact's engine."""
        return Footprint(artifact_bytes=artifact_bytes, weight_bytes_per_token=self.weights, kv_bytes_per_token=self.kv)


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


def _only_looked_up(value: ir.Value) -> bool:
    reads = [operators.operand(node, index) for node, index in value.uses()]
    return bool(reads) and all(read is not None and read.table for read in reads)


def _bytes(dtype: ir.DataType, dims: list[int | ir.SymbolicDim]) -> int:
    return -(-math.prod(dim for dim in dims if isinstance(dim, int)) * dtype.bitwidth // 8)
