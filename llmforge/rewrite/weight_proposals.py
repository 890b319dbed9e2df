"""Formats of weights in codes of blocks that `init` proposes, by what runs them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import cast

from llmforge.backends.record import Dtype
from llmforge.rewrite.traits import Deployment, Proposal, Storage

FOUR_KLD, EIGHT_KLD, STORED_KLD = 0.05, 0.005, 0.01  # nats a token that budgets allow


def of_weights(name: str, there: Deployment) -> Iterator[Proposal]:
    """Propose 4 and 8 bits of the pass `name`, in the blocks and with the scales that the engine reads best."""
    other, columns = there.backend.export_format, there.backend.scales == "channels"
    if other is not None:  # servers of others have the scales of symmetric codes in fp16
        more = f"symmetric: true, scales: fp16, {'' if other.tables else 'embedding_bits: 16, '}"
        yield _four(name, other.block, more)
        yield _eight(name, other.block, more)
    elif columns:
        yield _four(name, 128, "symmetric: true, embedding_bits: 16, ")
    elif there.on_cpu and there.goal == "size":
        options, stores = "method: auto, weight_bits: 4.5, {budget}", Storage(weights="int4", block=32)
        yield Proposal(options, FOUR_KLD, stores, f"{name}, bits: 4", calibrated=True, bits=4)
        yield _eight(name, 32)
    else:
        yield _four(name, 32, "" if there.on_cpu else "symmetric: true, ")
        yield _eight(name, 32)


def _four(name: str, block: int, more: str) -> Proposal:
    options, stores = (
        f"bits: 4, block_size: {block}, {more}method: gptq, {{budget}}",
        Storage(weights="int4", block=block),
    )
    return Proposal(options, FOUR_KLD, stores, f"{name}, bits: 4", calibrated=True, bits=4)


def _eight(name: str, block: int, more: str = "") -> Proposal:
    options, stores = (
        f"bits: 8, block_size: {block}, {more}method: rtn, {{budget}}",
        Storage(weights="int8", block=block),
    )
    return Proposal(options, EIGHT_KLD, stores, f"{name}, bits: 8", near_lossless=True, bits=8)


def of_stored(name: str, there: Deployment) -> Iterator[Proposal]:
    """Propose to take the codes of a checkpoint that comes quantized, where the engine's kernels read their grid."""
    grid, in_onnxruntime = there.stored, there.in_onnxruntime
    if grid is None:
        return
    if not there.on_cpu and not (grid.portable and (in_onnxruntime or (grid.symmetric and grid.bits == 4))):
        return
    few = 4 if grid.bits <= 4 else 8
    weights = cast(Dtype, f"int{grid.bits if grid.portable else few}")
    more = ", scales: fp16" if there.on_cpu else "" if in_onnxruntime else ", embedding_bits: 16"
    yield Proposal(
        f"method: stored{more}, {{budget}}",
        STORED_KLD,
        Storage(weights=weights, block=grid.block_size, symmetric=grid.symmetric),
        f"{name}, bits: {few}",
        reason="the codes of the checkpoint, as they are",
        bits=grid.bits,
    )
