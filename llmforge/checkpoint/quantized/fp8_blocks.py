"""Weights in FP8 (E4M3) under scales of square blocks, as DeepSeek V3 publishes them.

A parameter `P` [..., N, K] in fp8 has `P_scale_inv` beside it, in spite of its name the numbers to multiply by: fp32,
bf16 or E8M0, [..., ceil(N / rows), ceil(K / columns)], where `weight_block_size` of the configuration gives rows and
columns; without it, one number for the whole. What is not in fp8 is stored as it is. Sources: `weight_dequant` of
DeepSeek-V3's `inference/kernel.py`; transformers' `integrations/finegrained_fp8.py`, which tells the size of blocks
from the shapes, and so takes only those that no edge cuts.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from llmforge.base.errors import CheckpointError, UnsupportedError
from llmforge.base.wording import shown
from llmforge.checkpoint.quantized.integers import INPUT_SCALE
from llmforge.checkpoint.quantized.layout import Grouped, QuantizedLayout, QuantizedTensor, settings_of
from llmforge.checkpoint.quantized.mxfp4 import e8m0
from llmforge.checkpoint.safetensors_file import DAMAGED, TensorEntry, damaged, data_type
from llmforge.quantization.stored import StoredChannels

_CODES, _SCALES = "codes", "scales"
_SUFFIX = "_scale_inv"
_SCALE_DTYPES = ("FLOAT", "BFLOAT16", "FLOAT8E8M0", "UINT8")
_ACTIVATIONS = (".activation_scale", ".input_scale")


def dequantize(weight: NDArray[Any], scales: NDArray[Any], block_size: tuple[int, int] | None) -> NDArray[np.float32]:
    """Return the fp32 weights [..., N, K] of fp8 ones: each product is rounded once, to fp32.

    Blocks at the lower and the right edge may be cut.  scales: [..., blocks, blocks], fp32, bf16, E8M0 or uint8 that
    is read as E8M0; without `block_size`, one for the whole, or [..., 1, 1].

    Raises:
        ValueError: the scales are not one for each block.
    """
    factors = e8m0(scales) if scales.dtype == np.uint8 else scales.astype(np.float32)
    values = weight.astype(np.float32)
    wanted = scale_shape(weight.shape, block_size)
    if factors.size == 1 and block_size is None:
        factors = factors.reshape((1,) * len(wanted))
    elif factors.shape != wanted:
        raise ValueError(f"scales of shape {list(wanted)} are expected, they are {list(factors.shape)}")
    with np.errstate(over="ignore", invalid="ignore"):  # what is not finite is refused where it is used
        if block_size is None:
            values *= factors
            return values
        rows, columns = block_size
        for band in range(wanted[-2]):  # of rows: never more than one band of spread scales
            spread = np.repeat(factors[..., band, :], columns, axis=-1)[..., : weight.shape[-1]]
            values[..., band * rows : (band + 1) * rows, :] *= spread[..., None, :]
    return values


def scale_shape(shape: tuple[int, ...], block_size: tuple[int, int] | None) -> tuple[int, ...]:
    """Return the shape of the scales of weights of `shape` [..., N, K]."""
    rows, columns = block_size or shape[-2:]
    return (*shape[:-2], -(-shape[-2] // rows), -(-shape[-1] // columns))


@dataclass(frozen=True, eq=False)
class Fp8Tensor(QuantizedTensor):
    """A parameter in fp8, with scales of blocks or one for all."""

    block_size: tuple[int, int] | None  # rows, columns

    @property
    def format(self) -> str:
        """Say which blocks share a scale."""
        blocks = "with one scale" if self.block_size is None else "in blocks of {} × {}".format(*self.block_size)
        return f"fp8 (E4M3) {blocks}"

    def dequantize(self) -> NDArray[np.float32]:
        """Return its weights, fp32: bit-equal to transformers, where that loads the model in fp32."""
        weights = dequantize(self.read(_CODES), self.read(_SCALES), self.block_size)
        return self.finite(weights, _SCALES, "gives weights that are NaN or infinite")

    def channels(self) -> StoredChannels:
        """Return the codes, where one scale is that of the whole."""
        if self.block_size is not None or len(self.shape) != 2:
            return super().channels()
        n, _ = self.shape
        stored = self.read(_SCALES)
        factors = e8m0(stored) if stored.dtype == np.uint8 else stored.astype(np.float32)
        scales = np.full(n, factors.item(), np.float32)
        return self.in_channels("fp8", lambda: self.read(_CODES), scales, self.number(INPUT_SCALE))


class Fp8(QuantizedLayout):
    """DeepSeek's FP8, and what transformers saves as FineGrainedFP8."""

    name: ClassVar[str] = "FP8"
    methods: ClassVar[tuple[str, ...]] = ("fp8",)

    def check(self, config: Mapping[str, Any], where: Path) -> str:
        """Return which blocks share a scale."""
        fmt, blocks = config.get("fmt", "e4m3"), _block_size(config, where)
        if fmt != "e4m3":
            raise UnsupportedError(f"{where}: fp8 of the kind {shown(fmt)} is not taken; taken is e4m3")
        return "FP8" if blocks is None else "FP8 in blocks of {} × {}".format(*blocks)

    def group(self, settings: Mapping[str, Any], stored: Mapping[str, TensorEntry], folder: Path) -> Grouped:
        """Put weights and their scales together."""
        block_size = _block_size(settings_of(settings), folder)
        plain, quantized, of_activations = dict(stored), [], 0
        inputs = {
            f"{name.removesuffix(end)}.weight": entry
            for name, entry in stored.items()
            for end in _ACTIVATIONS
            if name.endswith(end)
        }
        for name, entry in stored.items():
            if name.endswith(_ACTIVATIONS):
                del plain[name]
                of_activations += 1
            scales = stored.get(name + _SUFFIX)
            if scales is None and entry.dtype.name != "FLOAT8E4M3FN":
                continue
            if scales is None:
                raise damaged(entry, f"is fp8 and has no {name + _SUFFIX!r}")
            if entry.dtype.name != "FLOAT8E4M3FN":
                raise UnsupportedError(
                    f"{entry.file}: tensor {name!r} has scales and is {entry.dtype.name}; of FP8 checkpoints only "
                    "FLOAT8E4M3FN is taken",
                    hint="start from the unquantized checkpoint",
                )
            _check(entry, scales, block_size)
            parts = {_CODES: entry, _SCALES: scales}
            if block_size is None and name in inputs:
                parts[INPUT_SCALE] = inputs[name]
            quantized.append(Fp8Tensor(name, entry.shape, data_type("FLOAT"), parts, block_size))
            del plain[name], plain[name + _SUFFIX]
        notes = [
            f"{of_activations} scales of activations are taken by `quantize-channels: {{method: stored, activations: "
            "static}` alone"
        ]
        return Grouped(quantized, plain, notes if of_activations else ())


def _check(entry: TensorEntry, scales: TensorEntry, block_size: tuple[int, int] | None) -> None:
    if len(entry.shape) not in (2, 3):
        raise damaged(entry, f"in fp8 has shape {list(entry.shape)}")
    if scales.dtype.name not in _SCALE_DTYPES:
        raise damaged(scales, f"is {scales.dtype.name}; scales are {', '.join(_SCALE_DTYPES)}")
    wanted = scale_shape(entry.shape, block_size)
    single = block_size is None and all(side == 1 for side in scales.shape)
    if scales.shape != wanted and not single:
        raise damaged(scales, f"has shape {list(scales.shape)}; the weight's {list(entry.shape)} needs {list(wanted)}")


def _block_size(config: Mapping[str, Any], where: Path) -> tuple[int, int] | None:
    blocks = config.get("weight_block_size")
    if blocks is None:
        return None
    if not isinstance(blocks, list) or len(blocks) != 2 or not all(type(side) is int and side > 0 for side in blocks):
        raise CheckpointError(f"{where}: weight_block_size must be two sizes, is {shown(blocks)}", hint=DAMAGED)
    return blocks[0], blocks[1]
