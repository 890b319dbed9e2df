"""What shipped passes declare for `plan` and `init`, apart from the passes: read without build tools.

Each pass inherits its class here. In the order of `llmforge.passes.ALL`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import ClassVar, cast

from llmforge.backends.record import Dtype
from llmforge.rewrite.traits import Codes, Deployment, FewerKernels, OwnKernels, Prediction, Proposal, Storage, Traits

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


JUDGED: tuple[Dtype, ...] = ("int8", "fp8")  # dtypes of channels


class SavesKernels(Traits):
    """Traits of a pass that saves kernels in every layer, and that each engine takes which can run what it writes."""

    saves: ClassVar[FewerKernels]
    in_onnxruntime_alone: ClassVar[bool] = False  # which then runs the graph as it is written

    @classmethod
    def predicts(cls, there: Deployment) -> Iterable[Prediction]:
        """Judge it by the kernels that it saves."""
        yield Prediction(cls.name, cls.saves)

    @classmethod
    def proposes(cls, there: Deployment) -> Iterable[Proposal]:
        """Propose it for engines of llmforge's, or where ONNX Runtime runs the graph."""
        if there.in_onnxruntime if cls.in_onnxruntime_alone else not there.exported:
            yield Proposal(change=cls.name)


class FuseNormsTraits(SavesKernels):
    """Traits of `fuse-norms`."""

    name: ClassVar[str] = "fuse-norms"
    saves = FewerKernels(2, "one kernel for an Add and a norm, twice per layer")
    in_onnxruntime_alone = True


class PackQkvTraits(SavesKernels):
    """Traits of `pack-qkv`."""

    name: ClassVar[str] = "pack-qkv"
    saves = FewerKernels(2, "one matmul instead of three")


class PackGateUpTraits(SavesKernels):
    """Traits of `pack-gate-up`."""

    name: ClassVar[str] = "pack-gate-up"
    saves = FewerKernels(1, "one matmul instead of two")


class FlashAttentionTraits(SavesKernels):
    """Traits of `flash-attention`, which also saves the scores of a prompt."""

    name: ClassVar[str] = "flash-attention"
    saves = FewerKernels(3, "avoids writing {scores_gb:.2g} GB of prompt scores", scores=True)
    in_onnxruntime_alone = True


class QuantizeWeightsTraits(Traits):
    """Traits of `quantize-weights`."""

    name: ClassVar[str] = "quantize-weights"
    writes_codes: ClassVar[Codes | None] = "blocks"

    @classmethod
    def predicts(cls, there: Deployment) -> Iterable[Prediction]:
        """Judge 4 bits, and 8 where blocks of 8 bits are multiplied as they are."""
        if there.backend.scales == "blocks":
            yield Prediction(f"{cls.name}, bits: 8", Storage(weights="int8"))
        yield Prediction(f"{cls.name}, bits: 4", Storage(weights="int4"))

    @classmethod
    def proposes(cls, there: Deployment) -> Iterable[Proposal]:
        """Propose the formats that the engine runs best, or the codes of the checkpoint."""
        propose = of_stored if there.is_quantized else of_weights
        return propose(cls.name, there)


class QuantizeChannelsTraits(Traits):
    """Traits of `quantize-channels`."""

    name: ClassVar[str] = "quantize-channels"
    writes_codes: ClassVar[Codes | None] = "channels"

    @classmethod
    def predicts(cls, there: Deployment) -> Iterable[Prediction]:
        """Judge each dtype, of weights alone and of what they multiply, where such weights are read as they are."""
        if there.backend.scales == "channels":
            for dtype in JUDGED:
                yield Prediction(f"{cls.name}, dtype: {dtype}", Storage(weights=dtype, block=0))
                both = Storage(weights=dtype, product=dtype, block=0)
                yield Prediction(f"{cls.name}, dtype: {dtype}, activations: static", both)

    @classmethod
    def proposes(cls, there: Deployment) -> Iterable[Proposal]:
        """Propose fp8 where it is judged."""
        if there.backend.scales == "channels" and not there.is_quantized:
            change, weights = f"{cls.name}, dtype: fp8", Storage(weights="fp8", block=0)
            yield Proposal("dtype: fp8, {budget}", 0.02, weights, change, near_lossless=True, bits=8)
            yield Proposal(
                "dtype: fp8, activations: static, {budget}",
                0.03,
                Storage(weights="fp8", product="fp8", block=0),
                f"{change}, activations: static",
                calibrated=True,
                bits=8,
            )


class QuantizeFp4Traits(Traits):
    """Traits of `quantize-fp4`."""

    name: ClassVar[str] = "quantize-fp4"
    writes_codes: ClassVar[Codes | None] = "fp4"

    @classmethod
    def predicts(cls, there: Deployment) -> Iterable[Prediction]:
        """Judge it where weights in 8 bits have scales of channels: an engine for GPUs."""
        if there.backend.scales == "channels":
            yield Prediction(cls.name, Storage(weights="fp4", product="fp4"))


class QuantizeKvCacheTraits(Traits):
    """Traits of `quantize-kv-cache`."""

    name: ClassVar[str] = "quantize-kv-cache"

    @classmethod
    def predicts(cls, there: Deployment) -> Iterable[Prediction]:
        """Judge it by the bytes of the cache."""
        yield Prediction(f"{cls.name}, bits: 8", Storage(kv="int8"))

    @classmethod
    def proposes(cls, there: Deployment) -> Iterable[Proposal]:
        """Propose 8 bits on CPUs, where some quality may go; latents stay as they are."""
        if there.on_cpu and not there.exported and not there.caches_latents and there.goal != "quality":
            stores, reason = Storage(kv="int8"), "a quarter of the cache's memory"
            yield Proposal("bits: 8, {budget}", 0.005, stores, reason=reason, calibrated=True)


class LowerPrecisionTraits(Traits):
    """Traits of `lower-precision`."""

    name: ClassVar[str] = "lower-precision"

    @classmethod
    def proposes(cls, there: Deployment) -> Iterable[Proposal]:
        """Propose the dtype in which a GPU computes."""
        if not there.on_cpu and not there.exported and there.compute in ("fp16", "bf16"):
            yield Proposal(f"dtype: {there.compute}, {{budget}}", 0.005, reason="as the GPU computes")


class CpuKernelsTraits(Traits):
    """Traits of `cpu-kernels`."""

    name: ClassVar[str] = "cpu-kernels"

    @classmethod
    def predicts(cls, there: Deployment) -> Iterable[Prediction]:
        """Judge it by what both libraries' layers reach on a CPU."""
        if there.on_cpu:
            yield Prediction(cls.name, OwnKernels("faster kernels for quantized layers than ONNX Runtime's"))

    @classmethod
    def proposes(cls, there: Deployment) -> Iterable[Proposal]:
        """Propose it for engines of llmforge's on CPUs."""
        if there.on_cpu and not there.exported:
            yield Proposal("{budget}, fallback: onnxruntime", 0.005, reason="llmforge's own kernels")


DECLARED: tuple[type[Traits], ...] = (
    FuseNormsTraits,
    PackQkvTraits,
    PackGateUpTraits,
    FlashAttentionTraits,
    QuantizeWeightsTraits,
    QuantizeChannelsTraits,
    QuantizeFp4Traits,
    QuantizeKvCacheTraits,
    LowerPrecisionTraits,
    CpuKernelsTraits,
)
