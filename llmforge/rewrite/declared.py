"""What shipped passes declare for `plan` and `init`, apart from the passes: read without build tools.

Each pass inherits its class here. In the order of `llmforge.passes.ALL`.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import ClassVar

from llmforge.backends.record import Dtype
from llmforge.quantization.formats import ROTATED8_KV
from llmforge.rewrite import weight_proposals
from llmforge.rewrite.traits import Codes, Deployment, FewerKernels, OwnKernels, Prediction, Proposal, Storage, Traits

TEXT_KLD = 0.02  # nats a text that budgets of what embeds or scores allow; gates decide what texts are found
UNKNOWN_KLD = 0.02  # nats a token that budgets of the cache and the kernels allow where nothing was measured
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


class PacksProducts(SavesKernels):
    """Traits of a pass that makes one product of several, which pays for texts of any length, too."""

    @classmethod
    def proposes_to_encode(cls, there: Deployment) -> Iterable[Proposal]:
        """Propose it where our kernels read what it writes."""
        if there.own_kernels:
            yield Proposal(reason=cls.saves.what)


class FuseNormsTraits(SavesKernels):
    """Traits of `fuse-norms`."""

    name: ClassVar[str] = "fuse-norms"
    saves = FewerKernels(2, "one kernel for an Add and a norm, twice per layer")
    in_onnxruntime_alone = True

    @classmethod
    def proposes_to_encode(cls, there: Deployment) -> Iterable[Proposal]:
        """Propose it in fp32: of layers in int8, our kernels take the sum and the norm into the product."""
        if there.own_kernels and not there.encodes_in_int8:
            yield Proposal(reason=cls.saves.what)


class PackQkvTraits(PacksProducts):
    """Traits of `pack-qkv`."""

    name: ClassVar[str] = "pack-qkv"
    saves = FewerKernels(2, "one matmul instead of three")


class PackGateUpTraits(PacksProducts):
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
        propose = weight_proposals.of_stored if there.is_quantized else weight_proposals.of_weights
        return propose(cls.name, there)


class QuantizeChannelsTraits(Traits):
    """Traits of `quantize-channels`."""

    name: ClassVar[str] = "quantize-channels"
    writes_codes: ClassVar[Codes | None] = "channels"
    _of_servers: ClassVar[str] = "quantize-channels, dtype: fp8, activations: per_token"

    @classmethod
    def predicts(cls, there: Deployment) -> Iterable[Prediction]:
        """Judge each dtype, of weights alone and of what they multiply, where such weights are read as they are."""
        if there.backend.scales == "channels":
            for dtype in JUDGED:
                yield Prediction(f"{cls.name}, dtype: {dtype}", Storage(weights=dtype, block=0))
                both = Storage(weights=dtype, product=dtype, block=0)
                yield Prediction(f"{cls.name}, dtype: {dtype}, activations: static", both)
        elif there.serves_fp8:
            yield Prediction(cls._of_servers, Storage(weights="fp8", product="fp8", block=0))

    @classmethod
    def proposes(cls, there: Deployment) -> Iterable[Proposal]:
        """Propose fp8 where it is judged; to servers of others with a scale a token, which all of them load."""
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
        elif there.serves_fp8 and not there.is_quantized:
            yield Proposal(
                "dtype: fp8, activations: per_token, head: false, smooth: false, {budget}",
                0.02,
                Storage(weights="fp8", product="fp8", block=0),
                cls._of_servers,
                reason="fp8 by fp8 has twice the rate of 16 bits, which 4-bit codes are multiplied in",
                near_lossless=True,
                bits=8,
            )

    @classmethod
    def proposes_to_encode(cls, there: Deployment) -> Iterable[Proposal]:
        """Propose int8 by int8; outliers stay where they are, for norms of encoders have other readers."""
        if there.encodes_in_int8:
            yield Proposal(
                "dtype: int8, activations: per_token, smooth: false, {budget}",
                TEXT_KLD,
                Storage(weights="int8", product="int8", block=0),
                reason="weights and activations in int8",
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


class QuantizeMxTraits(Traits):
    """Traits of `quantize-mx`."""

    name: ClassVar[str] = "quantize-mx"
    writes_codes: ClassVar[Codes | None] = "mx"


class QuantizeExpertsTraits(Traits):
    """Traits of `quantize-experts`."""

    name: ClassVar[str] = "quantize-experts"
    writes_codes: ClassVar[Codes | None] = "experts"

    @classmethod
    def proposes(cls, there: Deployment) -> Iterable[Proposal]:
        """Propose fp8 beside `quantize-channels`, where servers of others multiply it, for many requests at once.

        For few, `quantize-weights` writes experts as well.
        """
        if there.serves_fp8 and there.has_experts and there.goal == "throughput" and not there.is_quantized:
            yield Proposal("format: fp8, {budget}", UNKNOWN_KLD, reason="experts as the other layers")


class QuantizeKvCacheTraits(Traits):
    """Traits of `quantize-kv-cache`."""

    name: ClassVar[str] = "quantize-kv-cache"

    @classmethod
    def predicts(cls, there: Deployment) -> Iterable[Prediction]:
        """Judge it by the bytes of the cache."""
        yield Prediction(f"{cls.name}, bits: 8", Storage(kv="int8"))

    @classmethod
    def proposes(cls, there: Deployment) -> Iterable[Proposal]:
        """Propose 8 bits on CPUs, where some quality may go; latents stay as they are.

        The CPU kernels have a scale a token, which needs no calibration, and rotate heads: both lose less
        (docs/quantization.md).
        """
        if not there.on_cpu or there.exported or there.caches_latents or there.goal == "quality":
            return
        stores, options = Storage(kv="int8"), "bits: 8, {budget}"
        if there.own_kernels:
            stores = Storage(kv="int8", cache=ROTATED8_KV)
            options = "bits: 8, granularity: per_token, rotation: hadamard, {budget}"
        yield Proposal(
            options,
            UNKNOWN_KLD,
            stores,
            reason="a quarter of the cache's memory",
            calibrated=not there.own_kernels,
            adds=lambda costs: costs.cache,
            rerounds=True,
        )


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
            options = "{budget}" if there.own_kernels else "{budget}, fallback: onnxruntime"
            reason = "llmforge's own kernels"
            yield Proposal(options, UNKNOWN_KLD, reason=reason, adds=lambda costs: 0.0, rerounds=True)

    @classmethod
    def proposes_to_encode(cls, there: Deployment) -> Iterable[Proposal]:
        """Propose it for layers in int8."""
        if there.encodes_in_int8:
            yield Proposal("{budget}", TEXT_KLD, reason="llmforge's own kernels", rerounds=True)


DECLARED: tuple[type[Traits], ...] = (
    FuseNormsTraits,
    PackQkvTraits,
    PackGateUpTraits,
    FlashAttentionTraits,
    QuantizeWeightsTraits,
    QuantizeChannelsTraits,
    QuantizeFp4Traits,
    QuantizeMxTraits,
    QuantizeExpertsTraits,
    QuantizeKvCacheTraits,
    LowerPrecisionTraits,
    CpuKernelsTraits,
)
