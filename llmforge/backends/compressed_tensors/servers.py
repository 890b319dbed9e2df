"""What servers of others load of what this backend writes, and how that is known: the one place that says so.

Recipes' notes, reports, refusals and docs/other-runtimes.md are made from these tables or held to them;
`tests/compile/test_vllm.py` runs what stands here as run or refused on a CPU. What was read was read in the servers'
sources: vLLM 0.32.0 and SGLang 0.5.23 (`layers/quantization/compressed_tensors`, `modelopt.py`), and TensorRT-LLM of
2026-11 (`quant_config_utils.py` and `modules/linear.py` of its PyTorch backend, and its list of algorithms).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

# Codes, and what is made of activations: as in the options of the passes; `-modelopt`: by ModelOpt's names.
FormatName = Literal[
    "int4",
    "int4-modelopt",
    "int8",
    "int8-static",
    "int8-per_token",
    "fp8",
    "fp8-static",
    "fp8-per_token",
    "fp8-per_token-modelopt",
    "fp8-tensor",
    "fp8-tensor-modelopt",
    "fp8-block",
    "nvfp4",
    "nvfp4-modelopt",
    "mxfp4",
    "mxfp8",
    "mxfp8-modelopt",
]
CacheName = Literal["fp8", "fp8-modelopt"]
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
_NO_AWQ = Loads("refused", "it has no W4A16_AWQ: `ModelOpt currently only supports`")
_STATIC = Loads("refused", "scales of activations must be per token")
_NULL = Loads("refused", "it reads `input_activations`, which is null")
_NO_KERNEL = "no kernel: `Failed to find a kernel that can implement the {} linear`"
_NARROW = Loads("refused", "its kernel fails: `narrow() cannot be applied to a 0-dim tensor`")
_NO_SCHEME = Loads("refused", "it has no scheme: `No compressed-tensors compatible scheme was found`")
_FP8_ALONE = Loads("refused", "of ModelOpt's fp8 it has one scale a matrix alone")
_NO_MX = Loads("refused", "of compressed-tensors it reads fp8 by channels and blocks alone")
_NO_INT8 = Loads("refused", "its kernel has 4 bits alone: `not supported by CPUWNA16`")
_NO_EXPERTS = "no kernel: `No WNA16 MoE backend supports the deployment configuration`"
Row = Mapping[ServerName, Loads]


def _row(cpu: Loads, vllm: Loads, sglang: Loads, tensorrt_llm: Loads) -> Row:
    return dict(zip(VERSIONS, (cpu, vllm, sglang, tensorrt_llm), strict=True))


SERVERS: Mapping[FormatName, Row] = {
    "int4": _row(_RUN, _READ, _READ, _NULL),
    "int4-modelopt": _row(
        _NO_AWQ,
        _NO_AWQ,
        Loads("refused", "it has no W4A16_AWQ"),
        _READ,
    ),
    "int8": _row(_NO_INT8, _READ, _READ, _NULL),
    "int8-static": _row(_RUN, _READ, _READ, _STATIC),
    "int8-per_token": _row(_RUN, _READ, _READ, Loads("refused", "it takes the codes for fp8, and does not say so")),
    "fp8": _row(Loads("refused", _NO_KERNEL.format("ScaledMM")), _READ, _READ, _NULL),
    "fp8-static": _row(_NARROW, _READ, _READ, _STATIC),
    "fp8-per_token": _row(_RUN, _READ, _READ, _READ),
    "fp8-per_token-modelopt": _row(_RUN, _READ, _FP8_ALONE, _READ),
    "fp8-tensor": _row(Loads("refused", "its build has no `static_scaled_fp8_quant`"), _READ, _READ, _STATIC),
    "fp8-tensor-modelopt": _row(Loads("refused", "its build has no `silu_and_mul_quant`"), _READ, _READ, _READ),
    "fp8-block": _row(Loads("refused", "no kernel without AMX: `requires AMX tile support`"), _READ, _READ, _READ),
    "nvfp4": _row(
        Loads("refused", _NO_KERNEL.format("NVFP4")),
        _READ,
        _READ,
        Loads("refused", "it reads scales by ModelOpt's names"),
    ),
    "nvfp4-modelopt": _row(Loads("refused", _NO_KERNEL.format("NVFP4")), _READ, _READ, _READ),
    "mxfp4": _row(Loads("refused", _NO_KERNEL.format("MXFP4")), _READ, _NO_SCHEME, _NO_MX),
    "mxfp8": _row(Loads("refused", _NO_KERNEL.format("MXFP8")), _READ, _NO_SCHEME, _NO_MX),
    "mxfp8-modelopt": _row(
        Loads("refused", _NO_KERNEL.format("MXFP8")), _READ, _FP8_ALONE, Loads("refused", "it has no algorithm MXFP8")
    ),
}
EXPERTS: Mapping[FormatName, Row] = {  # of a mixture, in these formats
    "int4": _row(Loads("refused", _NO_EXPERTS), _READ, _READ, _NULL),
    "int8": _row(_NO_INT8, _READ, _READ, _NULL),
}
CACHES: Mapping[CacheName, Row] = {
    "fp8": _row(_RUN, _READ, _READ, Loads("refused", "of compressed-tensors it does not read `kv_cache_scheme`")),
    "fp8-modelopt": _row(_RUN, _READ, _READ, _READ),
}


def described(
    formats: frozenset[FormatName], *, experts: frozenset[FormatName] = frozenset(), caches: bool = False
) -> str:
    """Say which servers load a checkpoint that has all of `formats`, some of `experts`, and caches in fp8 or not."""
    rows = [SERVERS[name] for name in sorted(formats)] + [EXPERTS[name] for name in sorted(experts)]
    if caches:
        rows.append(CACHES["fp8-modelopt" if any(name.endswith("-modelopt") for name in formats) else "fp8"])
    found: dict[str, list[str]] = {"run": [], "read": [], "refused": []}
    for server, version in VERSIONS.items():
        each = {row[server].known for row in rows}
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
    rows = {name.replace("-", ", "): row for name, row in SERVERS.items()}
    rows |= {f"experts in {name}": row for name, row in EXPERTS.items()}
    rows |= {f"keys and values in {name.replace('-', ', ')}": row for name, row in CACHES.items()}
    for name, servers in rows.items():
        cells = [
            each.known if not each.why else f"{each.known}: {each.why}" for each in map(servers.__getitem__, VERSIONS)
        ]
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return "\n".join(lines)
