"""Checkpoints whose weights come quantized: one file a layout, and which of them a folder is in."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from llmforge.base.errors import UnsupportedError
from llmforge.base.wording import shown
from llmforge.checkpoint.quantized.awq import Awq
from llmforge.checkpoint.quantized.bitsandbytes import Bitsandbytes
from llmforge.checkpoint.quantized.compressed_tensors import CompressedTensors
from llmforge.checkpoint.quantized.fp8_blocks import Fp8
from llmforge.checkpoint.quantized.gguf import Gguf
from llmforge.checkpoint.quantized.gptq import GptqLayout
from llmforge.checkpoint.quantized.layout import Grouped, QuantizedLayout, QuantizedTensor, same_content, settings_of
from llmforge.checkpoint.quantized.modelopt import ModelOpt
from llmforge.checkpoint.quantized.mxfp4 import Mxfp4
from llmforge.quantization.stored import UnrepresentableCodes

LAYOUTS: tuple[QuantizedLayout, ...] = (
    GptqLayout(),
    Awq(),
    CompressedTensors(),
    ModelOpt(),
    Fp8(),
    Mxfp4(),
    Bitsandbytes(),
    Gguf(),
)

__all__ = [
    "LAYOUTS",
    "Grouped",
    "QuantizedLayout",
    "QuantizedTensor",
    "UnrepresentableCodes",
    "layout_of",
    "same_content",
    "settings_of",
]


def layout_of(settings: Mapping[str, Any], where: Path) -> QuantizedLayout | None:
    """Find the layout of a checkpoint by its configuration, which `where` holds; None where it is not quantized.

    Raises:
        UnsupportedError: it is quantized in a way that is not taken.
        CheckpointError: what it says of that makes no sense.
    """
    config = settings_of(settings)
    if config is None:
        return None
    method = config.get("quant_method") if isinstance(config, dict) else config
    layout = next((each for each in LAYOUTS if method in each.methods), None)
    if layout is None or not isinstance(config, dict):
        taken = ", ".join(name for each in LAYOUTS for name in each.methods)
        raise UnsupportedError(
            f"{where}: the weights are already quantized (quantization_config: {shown(method)}), "
            + (f"in a way that is not taken; taken are {taken}" if taken else "which is not taken"),
            hint="start from the unquantized checkpoint",
        )
    layout.check(config, where)
    return layout
