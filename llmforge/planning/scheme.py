"""In which dtypes a decoder is stored and computed, and how many bytes its parts take so."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from llmforge.errors import UnsupportedError
from llmforge.planning.shape import Shape
from llmforge.targets import Backend, Target
from llmforge.targets.support import Dtype, Role

BITS: Mapping[str, int] = {"fp32": 32, "fp16": 16, "bf16": 16, "fp8": 8, "int8": 8, "int4": 4, "fp4": 4}
STATE_BYTES = 4  # recurrent states are fp32
GPU_BLOCK, CPU_BLOCK = 128, 32  # weights that share a scale, where nothing is said
FP4_BLOCK, FP4_SCALE_BITS = 16, 8  # NVFP4: an fp8 scale for 16 values


@dataclass(frozen=True)
class Scheme:
    """Dtypes of a decoder.

    `compute` is the dtype of activations between layers, `product` that in which matrices are multiplied, `embedding`
    that of the table of tokens and of the head. Quantized weights have one scale for `block` of them, and a zero point
    where they are not symmetric.
    """

    compute: Dtype
    weights: Dtype
    kv: Dtype
    product: Dtype
    embedding: Dtype
    block: int = GPU_BLOCK
    symmetric: bool = True

    def weight_bits(self, dtype: Dtype) -> float:
        """Return the bits of one weight stored as `dtype`, with its part of scales and zero points."""
        bits = BITS[dtype]
        if dtype == "fp4":
            return bits + FP4_SCALE_BITS / FP4_BLOCK
        if dtype in ("int8", "int4"):
            zero = 0 if self.symmetric else bits
            return bits + (BITS[self.compute] + zero) / self.block
        return bits

    def bytes_of(self, parameters: float, dtype: Dtype | None = None) -> float:
        """Return the bytes of so many weights of matrices, or of another `dtype`."""
        return parameters * self.weight_bits(dtype or self.weights) / 8

    def weight_bytes(self, shape: Shape, ranks: int = 1) -> int:
        """Return the bytes of all parameters on one of `ranks` devices; vectors are on each."""
        vectors = shape.vectors + sum(count * layer.vectors for count, layer in shape.layers)
        split = sum(count * (layer.matrices + layer.expert * layer.experts) for count, layer in shape.layers)
        tables = self.bytes_of(shape.embedding + shape.head, self.embedding)
        total = (self.bytes_of(split) + tables) / ranks + self.bytes_of(vectors, self.compute)
        return math.ceil(total)

    def kv_bytes_per_token(self, shape: Shape, ranks: int = 1) -> int:
        """Return the bytes that one token adds to the caches on one of `ranks` devices.

        2 · layers · kv_heads · head_dim · bytes where keys and values are alike; scales of int8 caches are a vector a
        layer, and not counted.
        """
        elements = sum(count * attention.kv_elements(ranks) for count, attention in shape.attentions())
        return math.ceil(elements * BITS[self.kv] / 8)

    def state_bytes(self, shape: Shape, ranks: int = 1) -> int:
        """Return the bytes of the fixed-size states of one sequence."""
        return math.ceil(shape.state_elements() * STATE_BYTES / ranks)

    def words(self) -> str:
        """Say it in a line."""
        stored = (
            self.weights
            if self.weights in ("fp32", "fp16", "bf16", "fp8", "fp4")
            else (f"{self.weights} in blocks of {self.block}")
        )
        head = "" if self.embedding == self.weights else f", embedding and head {self.embedding}"
        return f"{self.compute} activations, weights {stored}{head}, cache {self.kv}, products in {self.product}"


def choose(
    target: Target,
    backend: Backend,
    checkpoint: str,
    *,
    compute: Dtype | None = None,
    weights: Dtype | None = None,
    kv: Dtype | None = None,
    embedding: Dtype | None = None,
    block: int | None = None,
    symmetric: bool = True,
) -> Scheme:
    """Choose what is not given: the checkpoint's own dtype where the engine has it, 16 bits on a GPU, fp32 on a CPU.

    Raises:
        UnsupportedError: the engine does not take one of the dtypes on this target; says why.
    """
    support = target.support(backend)
    if compute is None:
        preferred = (checkpoint, "bf16", "fp16", "fp32")
        compute = next(each for each in preferred if each in support.compute)
    assert compute is not None
    weights, kv = weights or compute, kv or compute
    roles: tuple[tuple[Dtype, Role], ...] = ((compute, "compute"), (weights, "weights"), (kv, "kv"))
    for dtype, role in roles:
        reason = support.refusal(dtype, role)
        if reason is not None:
            option = {"compute": "--dtype", "weights": "--weights", "kv": "--kv"}[role]
            raise UnsupportedError(
                f"{backend} on {target.name} takes no {dtype} for {option}: {reason}",
                hint=f"it takes {', '.join(sorted(getattr(support, role)))}",
            )
    return Scheme(
        compute=compute,
        weights=weights,
        kv=kv,
        product=product(target, compute, weights),
        embedding=embedding or _embedding(target, compute, weights),
        block=block or (GPU_BLOCK if target.kind == "gpu" else CPU_BLOCK),
        symmetric=symmetric,
    )


def product(target: Target, compute: Dtype, weights: Dtype) -> Dtype:
    """Return the dtype in which matrices are multiplied.

    fp8 and fp4 engines round activations too. int8 and int4 weights are widened on GPUs; on CPUs activations are
    rounded to int8 (accuracy_level 4, docs/cpu-kernels.md).
    """
    if weights in ("fp8", "fp4"):
        return weights
    if weights in ("int8", "int4"):
        return "int8" if target.kind == "cpu" else compute
    return compute


def _embedding(target: Target, compute: Dtype, weights: Dtype) -> Dtype:
    """Leave embedding and head alone on GPUs, as NVIDIA's quantizers do; `quantize-weights` gives them 8 bits."""
    if target.kind == "cpu" and weights in ("int8", "int4"):
        return "int8"
    return compute if weights in ("int8", "int4", "fp8", "fp4") else weights
