"""What ModelOpt's checkpoints say of themselves, for TensorRT-LLM, vLLM and SGLang, and by which names.

Where tensors differ from those of compressed-tensors:

- NVFP4: `weight` uint8 [N, K/2] in place of `weight_packed`; `weight_scale_2` and `input_scale`, fp32 [], are the
  scales themselves and not their reciprocals.
- FP8, one scale a matrix: `weight_scale` and `input_scale` are fp32 []. FP8_PER_CHANNEL_PER_TOKEN: `weight_scale` [N].
- MXFP8: the same tensors.
- W4A16_AWQ: `weight` uint8 [N/2, K], two signed codes of one column in a byte, the first in the lower bits;
  `weight_scale` [N, K/groups]; `pre_quant_scale` [K], ones, of layers that read no norm, where TensorRT-LLM wants it.
- Keys and values in fp8: `k_scale` and `v_scale` are fp32 [], and stand in k_proj and v_proj.

(ModelOpt 0.47: torch/export/unified_export_hf.py, quant_utils.py, convert_hf_config.py.)
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from llmforge.backends.compressed_tensors.servers import FormatName

FILE: Final = "hf_quant_config.json"
NAME: Final = "modelopt"
INT4_GROUPS: Final = (64, 128)  # of input features, that TensorRT-LLM's kernel takes
ALGORITHMS: Mapping[FormatName, str] = {
    "nvfp4": "NVFP4",
    "fp8-tensor": "FP8",
    "fp8-per_token": "FP8_PER_CHANNEL_PER_TOKEN",
    "mxfp8": "MXFP8",
    "int4": "W4A16_AWQ",
}
_PRODUCER: Final = {"name": "llmforge"}
_CODES: Mapping[str, Mapping[str, Any]] = {  # of weights, and of what they are multiplied by, by the algorithm
    "NVFP4": {"num_bits": 4, "type": "float", "dynamic": False},
    "FP8": {"num_bits": 8, "type": "float", "dynamic": False},
    "FP8_PER_CHANNEL_PER_TOKEN": {"num_bits": 8, "type": "float", "dynamic": False},
    "MXFP8": {"num_bits": 8, "type": "float", "dynamic": False},
    "W4A16_AWQ": {"num_bits": 4, "type": "int", "dynamic": False},
}


@dataclass(frozen=True)
class Algorithm:
    """How all quantized layers are stored."""

    codes: FormatName
    group_size: int | None
    excluded: tuple[str, ...]  # layers that stay
    caches: bool  # keys and values are cached in fp8

    @property
    def name(self) -> str:
        """Its name in `quant_algo`."""
        return ALGORITHMS[self.codes]

    def quant_config(self) -> dict[str, Any]:
        """Write the content of hf_quant_config.json."""
        own = {"has_zero_point": False, "pre_quant_scale": True} if self.codes == "int4" else {}
        return {
            "producer": _PRODUCER,
            "quantization": {
                "quant_algo": self.name,
                "kv_cache_quant_algo": "FP8" if self.caches else None,
                **({} if self.group_size is None else {"group_size": self.group_size}),
                **own,
                "exclude_modules": list(self.excluded),
            },
        }

    def inline_config(self) -> dict[str, Any]:
        """Write what config.json has of the same as `quantization_config`."""
        size = {} if self.group_size is None else {"group_size": self.group_size}
        codes = {**_CODES[self.name], **size}
        weights = codes | ({"strategy": "channel"} if self.codes == "fp8-per_token" else {})
        group = {"weights": weights, "targets": ["Linear"]}
        if self.codes != "int4":
            group["input_activations"] = codes
        caches = {"kv_cache_scheme": {"dynamic": False, "num_bits": 8, "type": "float"}} if self.caches else {}
        return {
            "producer": _PRODUCER,
            "quant_method": NAME,
            "quant_algo": self.name,
            **size,
            **caches,
            "ignore": list(self.excluded),
            "config_groups": {"group_0": group},
        }
