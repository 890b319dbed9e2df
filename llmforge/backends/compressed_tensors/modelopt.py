"""What ModelOpt's checkpoints in NVFP4 say of themselves, for TensorRT-LLM, vLLM and SGLang.

Tensors are those of compressed-tensors by other names: `weight` uint8 [N, K/2] in place of `weight_packed`, and
`weight_scale_2` and `input_scale`, fp32 [], which are the scales themselves and not their reciprocals.
(ModelOpt 0.47: torch/export/unified_export_hf.py, torch/export/convert_hf_config.py.)
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from llmforge.ir.fp4 import BLOCK

FILE: Final = "hf_quant_config.json"
NAME: Final = "modelopt"
_ALGORITHM: Final = "NVFP4"
_PRODUCER: Final = {"name": "llmforge"}


def quant_config(excluded: Sequence[str]) -> dict[str, Any]:
    """Write the content of hf_quant_config.json; `excluded` are the layers that stay."""
    return {
        "producer": _PRODUCER,
        "quantization": {
            "quant_algo": _ALGORITHM,
            "kv_cache_quant_algo": None,
            "group_size": BLOCK,
            "exclude_modules": list(excluded),
        },
    }


def inline_config(excluded: Sequence[str]) -> dict[str, Any]:
    """Write what config.json has of the same as `quantization_config`."""
    codes = {"num_bits": 4, "type": "float", "group_size": BLOCK, "dynamic": False}
    group = {"weights": codes, "input_activations": codes, "targets": ["Linear"]}
    return {
        "producer": _PRODUCER,
        "quant_method": NAME,
        "quant_algo": _ALGORITHM,
        "group_size": BLOCK,
        "ignore": list(excluded),
        "config_groups": {"group_0": group},
    }
