"""Experts in MXFP4, as GPT-OSS is published: `P_blocks` and `P_scales` make the parameter `P` (see `microscaling`)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from llmforge.base.errors import CheckpointError
from llmforge.checkpoint.quantized.layout import Grouped, QuantizedLayout, QuantizedTensor
from llmforge.checkpoint.safetensors_file import DAMAGED, TensorEntry, damaged, data_type
from llmforge.quantization.stored import UnrepresentableCodes

E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)
_PAIRS = np.stack([E2M1[np.arange(256) & 15], E2M1[np.arange(256) >> 4]], axis=-1)  # of every byte: [256, 2]
_E8M0 = np.append(np.ldexp(np.float32(1), np.arange(255) - 127), np.nan).astype(np.float32)  # of every byte
MXFP4_BLOCK = 32
NVFP4_BLOCK = 16


def unpack_e2m1(packed: NDArray[np.uint8]) -> NDArray[np.float32]:
    """Read two numbers out of every byte: uint8 [..., n] to fp32 [..., 2n]."""
    return _PAIRS[packed].reshape(*packed.shape[:-1], 2 * packed.shape[-1])


def e8m0(scales: NDArray[np.uint8]) -> NDArray[np.float32]:
    """Read scales that are an exponent alone, 2**(byte - 127); 255 is NaN."""
    return _E8M0[scales]


def scaled_blocks(values: NDArray[np.float32], scales: NDArray[np.float32], block_size: int) -> NDArray[np.float32]:
    """Multiply neighbours along the last axis by the scale of their block: [..., K] by [..., K / block_size]."""
    blocks = values.reshape(*scales.shape, block_size)
    with np.errstate(over="ignore", invalid="ignore"):  # what overflows is infinity, and refused where it is used
        return (blocks * scales[..., None]).reshape(values.shape)


def dequantize_mxfp4(blocks: NDArray[np.uint8], scales: NDArray[np.uint8]) -> NDArray[Any]:
    """Return the bf16 weights [E, K, N] of experts, the transpose of how they are stored.

    blocks: uint8 [E, N, K / 32, 16], two numbers a byte.  scales: E8M0 as uint8 [E, N, K / 32]. Every number is exact
    in bf16 but the few beyond its range. Bit-equal to transformers' `convert_moe_packed_tensors`.

    Raises:
        ValueError: blocks and scales do not belong together.
    """
    if blocks.ndim != 4 or blocks.shape[:-1] != scales.shape or 2 * blocks.shape[-1] != MXFP4_BLOCK:
        raise ValueError(f"blocks of shape {list(blocks.shape)} and scales of shape {list(scales.shape)}")
    experts, rows, count, _ = blocks.shape
    import ml_dtypes  # what serves has no such package

    result = np.empty((experts, count * MXFP4_BLOCK, rows), ml_dtypes.bfloat16)
    for expert in range(experts):  # one at a time in fp32
        values = unpack_e2m1(blocks[expert]).reshape(rows, -1)
        result[expert] = scaled_blocks(values, e8m0(scales[expert]), MXFP4_BLOCK).T.astype(ml_dtypes.bfloat16)
    return result


_BLOCKS, _SCALES = "blocks", "scales"


@dataclass(frozen=True, eq=False)
class Mxfp4Tensor(QuantizedTensor):
    """Weights [E, K, N] of experts, stored as [E, N, K / 32, 16] bytes and [E, N, K / 32] exponents."""

    @property
    def format(self) -> str:
        """Name it."""
        return "MXFP4 in blocks of 32"

    def dequantize(self) -> NDArray[Any]:
        """Return its weights, bf16."""
        weights = dequantize_mxfp4(self.read(_BLOCKS), self.read(_SCALES))
        return self.finite(weights, _SCALES, "holds exponents of NaN, or of numbers that bf16 does not reach")

    def grid(self) -> Any:
        """Refuse: no kernel reads levels that are not evenly spaced."""
        raise UnrepresentableCodes("are MXFP4, whose levels are not evenly spaced")


class Mxfp4(QuantizedLayout):
    """OpenAI's GPT-OSS."""

    name: ClassVar[str] = "MXFP4"
    methods: ClassVar[tuple[str, ...]] = ("mxfp4",)

    def check(self, config: Mapping[str, Any], where: Path) -> str:
        """Nothing can be configured."""
        return "MXFP4 in blocks of 32"

    def group(self, settings: Mapping[str, Any], stored: Mapping[str, TensorEntry], folder: Path) -> Grouped:
        """Put blocks and their scales together."""
        plain, quantized = dict(stored), []
        for key, scales in stored.items():
            name = key.removesuffix(f"_{_SCALES}")
            blocks = stored.get(f"{name}_{_BLOCKS}")
            if name == key or blocks is None:
                continue
            fits = len(blocks.shape) == 4 and blocks.shape[:-1] == scales.shape
            if not fits or 2 * blocks.shape[-1] != MXFP4_BLOCK or {blocks.dtype.name, scales.dtype.name} != {"UINT8"}:
                raise CheckpointError(
                    f"{blocks.file}: tensors {blocks.name!r} of shape {list(blocks.shape)} and {scales.name!r} of "
                    f"shape {list(scales.shape)} must be uint8 [E, N, K / 32, 16] and [E, N, K / 32]",
                    hint=DAMAGED,
                )
            experts, rows, count, _ = blocks.shape
            shape = (experts, count * MXFP4_BLOCK, rows)
            quantized.append(Mxfp4Tensor(name, shape, data_type("BFLOAT16"), {_BLOCKS: blocks, _SCALES: scales}))
            del plain[blocks.name], plain[key]
        for name, entry in plain.items():
            if name.endswith((f"_{_BLOCKS}", f"_{_SCALES}")):
                raise damaged(entry, "lacks the other of blocks and scales")
        return Grouped(quantized, plain)
