"""What servers of others load of what this backend writes, and how that is known: the one place that says so.

Recipes' notes, reports, refusals and docs/other-runtimes.md are made from these tables or held to them;
`tests/compile/test_vllm.py` runs what stands here as run or refused on a CPU. What was read was read in the servers'
sources: vLLM 0.32.0 and SGLang 0.5.23 (`layers/quantization/compressed_tensors`, `modelopt.py`), and TensorRT-LLM of
2026-11 (`quant_config_utils.py`, its reader of ModelOpt's configuration, and `modules/linear.py` of its PyTorch
backend). Where that leaves open whether the server computes with a format, it is *not known*.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, cast

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

    # seen here; read in its source, not run; it ends with an error; its source did not tell
    known: Literal["run", "read", "refused", "not known"]
    why: str = ""


_RUN, _READ = Loads("run"), Loads("read")
_NO_AWQ = Loads("refused", "it has no W4A16_AWQ: `ModelOpt currently only supports`")
_STATIC = Loads("refused", "scales of activations must be per token")
_NULL = Loads("refused", "it reads `input_activations`, which is null")
_NO_KERNEL = "no kernel: `Failed to find a kernel that can implement the {} linear`"
_NARROW = Loads("refused", "its kernel fails: `narrow() cannot be applied to a 0-dim tensor`")
_NO_SCHEME = Loads("refused", "it has no scheme: `No compressed-tensors compatible scheme was found`")
_FP8_ALONE = Loads("refused", "of ModelOpt's fp8 it has one scale a matrix alone")
_OPEN_NAMES = Loads("not known", "it reads the configuration; its linear layers read tensors by ModelOpt's names")
_OPEN_MXFP8 = Loads("not known", "it has the algorithm; by which names it reads tensors was not seen")
_OPEN_CACHES = Loads("not known", "it reads `kv_cache_scheme`, and scales by ModelOpt's names alone")
_OPEN_MXFP4 = Loads("not known", "it takes them for W4A16_MXFP4, of experts")
_NO_MXFP8 = Loads("refused", "of 8 bits it reads channels and blocks of 128: `Unsupported weights_quant_strategy`")
_NO_INT8 = Loads("refused", "its kernel has 4 bits alone: `not supported by CPUWNA16`")
_NO_EXPERTS = "no kernel: `No WNA16 MoE backend supports the deployment configuration`"
_NO_INT8_EXPERTS = Loads("refused", "no kernel: `No Int8 MoE backend supports the deployment configuration`")
_NO_FP8_EXPERTS = Loads("refused", "no kernel: `Unsupported FP8 MoE backend: NONE`")
_NO_NVFP4_EXPERTS = Loads("refused", "no kernel: `No NvFp4 MoE backend supports the deployment configuration`")
_NPU = Loads("refused", "it has them for NPUs alone: `implemented only for NPU`")
_FP8_TAKEN = Loads("refused", "it takes the codes for fp8, and does not say so")
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
    "int8-per_token": _row(_RUN, _READ, _READ, _FP8_TAKEN),
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
        _OPEN_NAMES,
    ),
    "nvfp4-modelopt": _row(Loads("refused", _NO_KERNEL.format("NVFP4")), _READ, _READ, _READ),
    "mxfp4": _row(Loads("refused", _NO_KERNEL.format("MXFP4")), _READ, _NO_SCHEME, _OPEN_MXFP4),
    "mxfp8": _row(Loads("refused", _NO_KERNEL.format("MXFP8")), _READ, _NO_SCHEME, _NO_MXFP8),
    "mxfp8-modelopt": _row(
        Loads("refused", _NO_KERNEL.format("MXFP8")),
        _READ,
        _FP8_ALONE,
        _OPEN_MXFP8,
    ),
}
EXPERTS: Mapping[FormatName, Row] = {  # of a mixture, in these formats
    "int4": _row(Loads("refused", _NO_EXPERTS), _READ, _READ, _NULL),
    "int8": _row(_NO_INT8, _READ, _READ, _NULL),
    "int8-per_token": _row(_NO_INT8_EXPERTS, _READ, _NPU, _FP8_TAKEN),
    "fp8-per_token": _row(_NO_FP8_EXPERTS, _READ, _READ, _READ),
    "fp8-block": _row(_NO_FP8_EXPERTS, _READ, _READ, _READ),
    "nvfp4": _row(_NO_NVFP4_EXPERTS, _READ, _READ, _OPEN_NAMES),
}
CACHES: Mapping[CacheName, Row] = {
    "fp8": _row(_RUN, _READ, _READ, _OPEN_CACHES),
    "fp8-modelopt": _row(_RUN, _READ, _READ, _READ),
}
# Seen here, code by code; vLLM's kernels for GPUs convert by CUDA's `__nv_cvt_float_to_fp8`, which rounds to nearest.
TRUNCATES = "vLLM on CPUs truncates what it caches in fp8, and loses more than GPUs, which round to nearest"


def described(
    formats: frozenset[FormatName], *, experts: frozenset[FormatName] = frozenset(), caches: bool = False
) -> str:
    """Say which servers load a checkpoint that has all of `formats`, some of `experts`, and caches in fp8 or not.

    Of caches it says which server gives them other codes than the emulation.
    """
    rows = [SERVERS[name] for name in sorted(formats)] + [EXPERTS[name] for name in sorted(experts)]
    if caches:
        rows.append(CACHES["fp8-modelopt" if any(name.endswith("-modelopt") for name in formats) else "fp8"])
    found: dict[str, list[str]] = {"run": [], "read": [], "not known": [], "refused": []}
    for server, version in VERSIONS.items():
        each = {row[server].known for row in rows}
        worst = next(known for known in ("refused", "not known", "read", "run") if known in each)
        found[worst].append(f"{server} {version}")
    titles = {"run": "tried", "read": "by their sources", "not known": "not known of", "refused": "refused by"}
    said = [f"{titles[known]}: {', '.join(servers)}" for known, servers in found.items() if servers]
    return "; ".join([*said, TRUNCATES] if caches else said)


def planned(linears: frozenset[str], experts: frozenset[str], *, caches: bool, quant_method: str) -> str | None:
    """Say which servers load what passes write of linear layers and experts, by compressed-tensors' names.

    None: the table has no row for one of them.
    """
    own = "" if quant_method == "compressed-tensors" else f"-{quant_method}"
    named = {f"{name}{own}" for name in linears}
    if not (named | experts) or not (named <= SERVERS.keys() and experts <= EXPERTS.keys()):
        return None
    return described(
        cast(frozenset[FormatName], frozenset(named)), experts=cast(frozenset[FormatName], experts), caches=caches
    )


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
