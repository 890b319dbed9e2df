"""Formats of weights in codes of blocks that `init` proposes, by what runs them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import cast

from llmforge.backends.record import StoredDtype
from llmforge.quantization.costs import ModelFormats, ProbedCosts
from llmforge.quantization.formats import SUPERSCALED
from llmforge.quantization.grid import Grid, Scale, gguf_type
from llmforge.rewrite.traits import Deployment, Proposal, Storage

FOUR_KLD, EIGHT_KLD, STORED_KLD = 0.05, 0.005, 0.01  # nats a token that budgets allow, where nothing was measured
NATIVE_KLD = 0.1  # … of 5 and 6 bits rounded to nearest
# What GPTQ leaves of the KLD of rounding to nearest: .23 to .27 on two samples and with outliers; 5 bits of
# SmolLM2-135M .2 on documentation, of which calibration text was, and .6 on chats.
CALIBRATED_SHARE = 0.45
_BLOCK = 32
# What `importance` leaves of it: 6 bits of SmolLM2-135M .41 on documentation and .46 on answers of chats.
IMPORTANCE_SHARE = 0.6
# Bits, method, and bits of embedding and head that the CPU kernels have with int8 scales, and GGUF files by their
# types, the smallest first. Rounding to nearest is for what cannot be run layer by layer.
_NATIVE = (
    *((4, "gptq", 6), (5, "gptq", 6), (5, "importance", 6), (5, "rtn", 6)),
    *((6, "importance", 6), (6, "rtn", 6), (8, "rtn", 8)),
)
_SHARES = {"gptq": CALIBRATED_SHARE, "importance": IMPORTANCE_SHARE}


def of_weights(name: str, there: Deployment) -> Iterator[Proposal]:
    """Propose formats of the pass `name`, in the blocks and with the scales that the engine reads best.

    None to servers that multiply fp8 by fp8, for throughput: codes in blocks are multiplied in 16 bits, and from some
    64 rows on products take longer than reading their weights (docs/cuda.md).
    """
    other, columns = there.backend.export_format, there.backend.scales == "channels"
    native = there.on_cpu and there.own_kernels
    if there.serves_fp8 and there.goal == "throughput":
        return
    if other is not None and other.superblocks and native:
        yield from _native(name, gguf=True)
    elif other is not None:  # servers of others have symmetric codes, with scales in 16 bits
        scale: Scale = "bf16" if other.bf16_scales and there.is_bf16 else "fp16"
        yield from _portable(name, other.block, symmetric=True, scale=scale, tables=other.tables)
    elif columns:
        yield next(_portable(name, 128, symmetric=True, tables=False))
    elif native:
        yield from _native(name)
    else:
        yield from _portable(name, _BLOCK, symmetric=not there.on_cpu, retreats=True)


def _native(name: str, *, gguf: bool = False) -> Iterator[Proposal]:
    """Propose what llmforge's CPU kernels read: int8 scales cost a quarter of a bit a weight, fp32 ones a whole bit.

    With `gguf` the types of GGUF files, which the kernels read as well.
    """
    for bits, method, tables in _NATIVE:
        if gguf:
            formats, said = ModelFormats(gguf_type(bits), gguf_type(tables)), f"codes: gguf, bits: {bits}"
        else:
            symmetric = bits == 8
            formats = ModelFormats(Grid(bits, _BLOCK, symmetric, "int8"), Grid(tables, _BLOCK, True, "int8"))
            said = f"bits: {bits}, block_size: {_BLOCK}, {'symmetric: true, ' if symmetric else ''}scales: int8"
        grid, calibrated, share = formats.linears, method == "gptq", _SHARES.get(method, 1.0)
        yield Proposal(
            f"{said}, embedding_bits: {tables}, method: {method}, {{budget}}",
            FOUR_KLD if calibrated else EIGHT_KLD if bits == 8 else NATIVE_KLD,
            Storage(
                weights=cast(StoredDtype, f"int{bits}"),
                embedding=cast(StoredDtype, f"int{tables}"),
                block=grid.block_size,
                symmetric=grid.symmetric,
                scale=grid.scale if grid.scale in SUPERSCALED else None,
                minimums=grid.minimums,
            ),
            f"{name}, bits: {4 if bits == 4 else 8}",
            calibrated=calibrated,
            observes=method == "importance",
            share=share,
            near_lossless=bits == 8,
            bits=bits,
            formats=formats,
            adds=_adds(formats, share),
            retreat=tuple(dict.fromkeys(each for each, _, _ in _NATIVE if each > bits)),
        )


def _portable(
    name: str,
    block: int,
    *,
    symmetric: bool,
    scale: Scale = "fp32",
    tables: bool = True,
    retreats: bool = False,
) -> Iterator[Proposal]:
    """Propose 4 and 8 bits, which others read, too; `tables`: codes of embedding and head as well, in 8 bits."""
    more = f"{'symmetric: true, ' if symmetric else ''}{'' if scale == 'fp32' else f'scales: {scale}, '}"
    more += "" if tables else "embedding_bits: 16, "
    for bits, method, kld in ((4, "gptq", FOUR_KLD), (8, "rtn", EIGHT_KLD)):
        own = ModelFormats(Grid(bits, block, symmetric, scale), Grid(8, block, True, scale) if tables else None)
        calibrated = bits == 4
        yield Proposal(
            f"bits: {bits}, block_size: {block}, {more}method: {method}, {{budget}}",
            kld,
            Storage(weights=cast(StoredDtype, f"int{bits}"), block=block),
            f"{name}, bits: {bits}",
            calibrated=calibrated,
            near_lossless=bits == 8,
            bits=bits,
            formats=own,
            adds=_adds(own, CALIBRATED_SHARE if calibrated else 1.0),
            retreat=(8,) if calibrated and retreats else (),
        )


def _adds(formats: ModelFormats | None, share: float = 1.0) -> Callable[[ProbedCosts], float]:
    """Predict what weights in `formats` cost, of which a method leaves a share, and int8 activations."""

    def adds(costs: ProbedCosts) -> float:
        found = None if formats is None else costs.of(formats)
        return (0.0 if found is None else share * found.kld) + costs.activations

    return adds


def of_stored(name: str, there: Deployment) -> Iterator[Proposal]:
    """Propose to take the codes of a checkpoint that comes quantized, where the engine's kernels read their grid."""
    grid, in_onnxruntime = there.stored, there.in_onnxruntime
    if grid is None:
        return
    if not there.on_cpu and not (grid.portable and (in_onnxruntime or (grid.symmetric and grid.bits == 4))):
        return
    if there.on_cpu and not (grid.portable or there.own_kernels):
        return
    few = 4 if grid.bits <= 4 else 8
    weights = cast(StoredDtype, f"int{grid.bits}")
    scale: Scale | None = grid.scale if grid.minimums else None
    more = ", scales: fp16" if there.on_cpu else "" if in_onnxruntime else ", embedding_bits: 16"
    yield Proposal(
        f"method: stored{more}, {{budget}}",
        STORED_KLD,
        Storage(
            weights=weights,
            block=grid.block_size,
            symmetric=grid.symmetric,
            scale=scale,
            minimums=grid.minimums,
        ),
        f"{name}, bits: {few}",
        reason="the codes of the checkpoint, as they are",
        bits=grid.bits,
        adds=_adds(None),
    )
