"""Which servers load which of the formats that this backend writes, and how that is known.

`tests/compile/test_vllm.py` runs what stands here as run or refused on a CPU; docs/other-runtimes.md is held to this.
What was read was read in the servers' sources: vLLM 0.32.0, SGLang 0.5.23 (`layers/quantization/compressed_tensors`),
and TensorRT-LLM of 2026-11 (`quant_config_utils.py` of its PyTorch backend).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

# Codes, and what is made of activations: as in the options of quantize-weights and quantize-channels.
FormatName = Literal[
    "int4",
    "int8",
    "int8-static",
    "int8-per_token",
    "fp8",
    "fp8-static",
    "fp8-per_token",
    "fp8-block",
    "nvfp4",
    "nvfp4-modelopt",
]
ServerName = Literal["vLLM on CPUs", "vLLM on GPUs", "SGLang", "TensorRT-LLM"]
VERSIONS: Mapping[ServerName, str] = {
    "vLLM on CPUs": "0.32.0", "vLLM on GPUs": "0.32.0", "SGLang": "0.5.23", "TensorRT-LLM": "of 2026-11",
}  # fmt: skip


@dataclass(frozen=True)
class Loads:
    """What a server does with a format."""

    known: Literal["run", "read", "refused"]  # seen here; read in its source, not run; it ends with an error
    why: str = ""


_RUN, _READ = Loads("run"), Loads("read")
_NO_INT8 = Loads("refused", "its kernel has 4 bits alone: `not supported by CPUWNA16`")
_NULL = Loads("refused", "it reads `input_activations`, which is null")
SERVERS: Mapping[FormatName, Mapping[ServerName, Loads]] = {
    "int4": {"vLLM on CPUs": _RUN, "vLLM on GPUs": _READ, "SGLang": _READ, "TensorRT-LLM": _NULL},
    "int8": {"vLLM on CPUs": _NO_INT8, "vLLM on GPUs": _READ, "SGLang": _READ, "TensorRT-LLM": _NULL},
    "int8-static": {
        "vLLM on CPUs": _RUN,
        "vLLM on GPUs": _READ,
        "SGLang": _READ,
        "TensorRT-LLM": Loads("refused", "scales of activations must be per token"),
    },
    "int8-per_token": {
        "vLLM on CPUs": _RUN,
        "vLLM on GPUs": _READ,
        "SGLang": _READ,
        "TensorRT-LLM": Loads("refused", "it takes the codes for fp8, and does not say so"),
    },
    "fp8": {
        "vLLM on CPUs": Loads("refused", "no kernel: `Failed to find a kernel that can implement the ScaledMM linear`"),
        "vLLM on GPUs": _READ,
        "SGLang": _READ,
        "TensorRT-LLM": _NULL,
    },
    "fp8-static": {
        "vLLM on CPUs": Loads("refused", "its kernel fails: `narrow() cannot be applied to a 0-dim tensor`"),
        "vLLM on GPUs": _READ,
        "SGLang": _READ,
        "TensorRT-LLM": Loads("refused", "scales of activations must be per token"),
    },
    "fp8-per_token": {"vLLM on CPUs": _RUN, "vLLM on GPUs": _READ, "SGLang": _READ, "TensorRT-LLM": _READ},
    "fp8-block": {
        "vLLM on CPUs": Loads("refused", "no kernel without AMX: `requires AMX tile support`"),
        "vLLM on GPUs": _READ,
        "SGLang": _READ,
        "TensorRT-LLM": _READ,
    },
    "nvfp4": {
        "vLLM on CPUs": Loads("refused", "no kernel: `Failed to find a kernel that can implement the NVFP4 linear`"),
        "vLLM on GPUs": _READ,
        "SGLang": _READ,
        "TensorRT-LLM": Loads("refused", "it reads scales by ModelOpt's names"),
    },
    "nvfp4-modelopt": {
        "vLLM on CPUs": Loads("refused", "no kernel: `Failed to find a kernel that can implement the NVFP4 linear`"),
        "vLLM on GPUs": _READ,
        "SGLang": _READ,
        "TensorRT-LLM": _READ,
    },
}  # fmt: skip


def described(formats: frozenset[FormatName]) -> str:
    """Say which servers load a checkpoint that has all of `formats`."""
    found: dict[str, list[str]] = {"run": [], "read": [], "refused": []}
    for server, version in VERSIONS.items():
        each = {SERVERS[name][server].known for name in formats}
        worst = next(known for known in ("refused", "read", "run") if known in each)
        found[worst].append(f"{server} {version}")
    titles = {"run": "tried", "read": "by their sources", "refused": "refused by"}
    return "; ".join(f"{titles[known]}: {', '.join(servers)}" for known, servers in found.items() if servers)


def table() -> str:
    """Write the table of docs/other-runtimes.md, as Markdown."""
    lines = [
        "| codes and activations | " + " | ".join(f"{name} {version}" for name, version in VERSIONS.items()) + " |"
    ]
    lines.append("|---" * (len(VERSIONS) + 1) + "|")
    for name, servers in SERVERS.items():
        cells = [
            each.known if not each.why else f"{each.known}: {each.why}" for each in map(servers.__getitem__, VERSIONS)
        ]
        lines.append(f"| {name.replace('-', ', ')} | " + " | ".join(cells) + " |")
    return "\n".join(lines)
