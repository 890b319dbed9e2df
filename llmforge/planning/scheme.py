"""In which dtypes a decoder is stored and computed, and how many bytes its parts take so."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from llmforge.backends import BackendName
from llmforge.backends.record import Dtype, Role, StoredDtype
from llmforge.base.errors import UnsupportedError
from llmforge.planning.shape import AttentionShape, Shape
from llmforge.quantization import formats
from llmforge.quantization.formats import SLOTS4_KV, Format, KvFormat
from llmforge.quantization.grid import Scale
from llmforge.rewrite.traits import NOTHING_SAID, Storage
from llmforge.targets import Target

BITS: Mapping[str, int] = formats.BITS
STATE_BYTES = 4  # recurrent states are fp32
INTEGERS: tuple[StoredDtype, ...] = ("int8", "int6", "int5", "int4", "int3")  # of codes in blocks
GPU_BLOCK, CPU_BLOCK = 128, 32  # weights that share a scale, where nothing is said


@dataclass(frozen=True)
class DtypeScheme:
    """Dtypes of a decoder.

    `compute` is the dtype of activations between layers, `product` that in which matrices are multiplied, `embedding`
    that of the table of tokens, `head` that of the product that gives logits (None: as the embedding; a tied head in
    another dtype is a matrix of its own). Quantized weights have one scale for `block` of them (0: for each output
    feature, which is not counted), and a minimum, or a zero point where they are not symmetric.
    """

    compute: Dtype
    weights: StoredDtype
    kv: Dtype
    product: Dtype
    embedding: StoredDtype
    block: int = GPU_BLOCK
    symmetric: bool = True
    head: StoredDtype | None = None
    cache: KvFormat | None = None  # that of the CPU kernels, with scales of its own; None: numbers of `kv`
    scale: Scale | None = None  # as what scales of blocks are stored; None: in the dtype of activations
    minimums: bool = False
    instructions: float = 1.0  # share of the device's rate that the matrix instructions of weights' products have

    @property
    def cached(self) -> str:
        """How keys and values are stored, in words."""
        return self.kv if self.cache is None else self.cache.name

    def weight_bits(self, dtype: StoredDtype) -> float:
        """Return the bits of one weight stored as `dtype`, with its part of scales and zero points."""
        if dtype == "fp4":
            return formats.NVFP4.bits_per_number
        if dtype in INTEGERS and self.block:
            zero_points = not (self.symmetric or self.minimums)
            return Format(dtype, self.block, self.scale or self.compute, zero_points, self.minimums).bits_per_number
        return BITS[dtype]

    def bytes_of(self, parameters: float, dtype: StoredDtype | None = None) -> float:
        """Return the bytes of so many weights of matrices, or of another `dtype`."""
        return parameters * self.weight_bits(dtype or self.weights) / 8

    def weight_bytes(self, shape: Shape, ranks: int = 1) -> int:
        """Return the bytes of all parameters on one of `ranks` devices; vectors are on each."""
        split = sum(count * (layer.matrices + layer.expert * layer.experts) for count, layer in shape.layers)
        own_head = shape.head or (0 if self.head in (None, self.embedding) else shape.head_matrix)
        tables = self.bytes_of(shape.embedding, self.embedding) + self.bytes_of(own_head, self.head or self.embedding)
        return math.ceil((self.bytes_of(split) + tables) / ranks + self.bytes_of(shape.all_vectors, self.compute))

    def head_bytes(self, shape: Shape) -> float:
        """Return the bytes of the product that gives logits."""
        return self.bytes_of(shape.head_matrix, self.head or self.embedding)

    def kv_bytes_per_token(self, shape: Shape, ranks: int = 1) -> int:
        """Return the bytes that one token adds to the caches on one of `ranks` devices.

        2 · layers · kv_heads · head_dim · bytes where keys and values are alike; scales of int8 caches are a vector a
        layer, and not counted, those of `cache` are.
        """
        return math.ceil(sum(count * self.kv_bytes(attention, ranks) for count, attention in shape.attentions()))

    def kv_bytes(self, attention: AttentionShape, ranks: int = 1) -> float:
        """Return the bytes of what is cached of one token in one layer on one of `ranks` devices."""
        if attention.latent is not None:  # no pass rounds latents to 8 bits
            return attention.latent * BITS[self.kv if BITS[self.kv] > 8 else self.compute] / 8
        if self.cache is None:
            return attention.kv_elements(ranks) * BITS[self.kv] / 8
        return attention.ranked_kv_heads(ranks) * self.cache.bytes_per_token(attention.key_dim, attention.value_dim)

    def state_bytes(self, shape: Shape, ranks: int = 1) -> int:
        """Return the bytes of the fixed-size states of one sequence."""
        return math.ceil(shape.state_elements() * STATE_BYTES / ranks)

    def words(self) -> str:
        """Say it in a line."""
        blocks = f" in blocks of {self.block}" if self.block else " with one scale per channel"
        stored = self.weights + (blocks if self.weights in INTEGERS else "")
        ends = {"embedding": self.embedding, "head": self.head or self.embedding}
        other = [f"{name} {dtype}" for name, dtype in ends.items() if dtype != self.weights]
        parts = [f"{self.compute} activations", f"weights {stored}", *other, f"cache {self.cached}"]
        return ", ".join([*parts, f"{self.product} matmul"])


def choose(target: Target, backend: BackendName, checkpoint: str, wanted: Storage = NOTHING_SAID) -> DtypeScheme:
    """Choose what is not given: the dtype of the `checkpoint` where the engine has it, 16 bits on a GPU, fp32 on a CPU.

    Raises:
        UnsupportedError: the engine does not take one of the dtypes on this target; says why.
    """
    support = target.support(backend)
    plain: tuple[Dtype, ...] = ("bf16", "fp16", "fp32")
    preferred = sorted(plain, key=lambda each: each != checkpoint)  # a checkpoint is in one of these
    possible = [each for each in preferred if each in support.compute]
    own: Dtype = next((each for each in possible if each in target.rates), possible[0])
    compute = wanted.compute or own
    weights, kv, product = wanted.weights or compute, wanted.kv or compute, wanted.product
    roles: tuple[tuple[StoredDtype, Role], ...] = ((compute, "compute"), (weights, "weights"), (kv, "kv"))
    for dtype, role in roles:
        reason = support.refusal(dtype, role)
        if reason is not None:
            option = {"compute": "--dtype", "weights": "--weights", "kv": "--kv"}[role]
            raise UnsupportedError(
                f"{backend} on {target.name} does not support {dtype} for {option}: {reason}",
                hint=f"supported: {', '.join(sorted(getattr(support, role)))}",
            )
    if product is not None and product not in target.rates:
        raise UnsupportedError(
            f"{target.name} cannot multiply in {product}: {support.why.get(product, 'its rate is unknown')}",
            hint=f"supported: {', '.join(target.rates)}",
        )
    cache = wanted.cache or (SLOTS4_KV if kv == "int4" and target.kind == "cpu" else None)
    if cache is not None and target.kind != "cpu":
        raise UnsupportedError(
            f"{backend} on {target.name} does not support caches of {cache.name}: llmforge's CPU kernels alone do",
            hint=f"supported: {', '.join(sorted(support.kv))}",
        )
    slower = target.require_engine(backend).slower_products.get(target.sm or "")
    return DtypeScheme(
        cache=cache,
        compute=compute,
        weights=weights,
        kv=kv,
        product=product or _product(target, compute, weights),
        embedding=wanted.embedding or _embedding(target, compute, weights),
        block=(GPU_BLOCK if target.kind == "gpu" else CPU_BLOCK) if wanted.block is None else wanted.block,
        symmetric=wanted.symmetric is not False,
        head=wanted.head,
        scale=wanted.scale,
        minimums=wanted.minimums is True,
        instructions=1.0 if slower is None or weights not in INTEGERS else slower.share,
    )


def _product(target: Target, compute: Dtype, weights: StoredDtype) -> Dtype:
    """Return the dtype in which matrices are multiplied, where nothing is said.

    Quantized weights are widened on GPUs, unless a pass rounds activations, too; on CPUs activations are rounded to
    int8 (docs/cpu-kernels.md).
    """
    return "int8" if target.kind == "cpu" and weights in INTEGERS else compute


def _embedding(target: Target, compute: Dtype, weights: StoredDtype) -> StoredDtype:
    """Leave embedding and head alone on GPUs, as NVIDIA's quantizers do; `quantize-weights` gives them 8 bits."""
    if target.kind == "cpu" and weights in INTEGERS:
        return "int8"
    return compute if weights in (*INTEGERS, "fp8", "fp4") else weights
