"""The collectives of ranks on GPUs, which llmforge's library brings to ONNX Runtime (docs/tensor-parallelism.md)."""

from __future__ import annotations

from llmforge.ir.operators.record import CUDA, Input, Operator, Output, Stage, integer


class _CudaCollective(Operator, domain=CUDA):
    """Where ranks meet through NCCL; not an operator itself."""

    x = Input()
    ranks = integer()
    y = Output(like="x")
    stage = Stage.LOWERED


class CudaAllReduce(_CudaCollective, op_type="AllReduce"):
    """The sum of `x` over all ranks, in its dtype."""


class CudaAllGather(_CudaCollective, op_type="AllGather"):
    """What all ranks have in `x`, [ranks, …]: one behind the other, in their order."""
