"""The collectives of ranks on GPUs, which llmforge's library brings to ONNX Runtime (docs/tensor-parallelism.md)."""

from __future__ import annotations

from llmforge.ir.operators.record import CUDA, Input, Operator, Output, Stage, integer


class _Collective(Operator, domain=CUDA):
    """Where ranks meet through NCCL; not an operator itself."""

    x = Input()
    ranks = integer()
    y = Output(like="x")
    stage = Stage.LOWERED


class AllReduce(_Collective):
    """The sum of `x` over all ranks, in its dtype."""


class AllGather(_Collective):
    """What all ranks have in `x`, [ranks, …]: one behind the other, in their order."""
