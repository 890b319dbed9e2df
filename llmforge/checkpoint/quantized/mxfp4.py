"""Experts in MXFP4, as GPT-OSS is published: `P_blocks` and `P_scales` make the parameter `P` (see `microscaling`)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from numpy.typing import NDArray

from llmforge.base.errors import CheckpointError
from llmforge.checkpoint.quantized.layout import Grouped, QuantizedLayout, QuantizedTensor, is_finite
from llmforge.checkpoint.quantized.microscaling import MXFP4_BLOCK, dequantize_mxfp4
from llmforge.checkpoint.safetensors_file import DAMAGED, TensorEntry, data_type
from llmforge.quantization.stored import UnrepresentableCodes

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
        if not is_finite(weights):
            raise self.damaged(_SCALES, "holds exponents of NaN, or of numbers that bf16 does not reach")
        return weights

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
                raise CheckpointError(
                    f"{entry.file}: tensor {name!r} lacks the other of blocks and scales", hint=DAMAGED
                )
        return Grouped(quantized, plain)
