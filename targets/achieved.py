"""How much of a data sheet's figures a decoder reaches: default assumptions of a plan, each with its source.

    decode step   = max(bytes / (bandwidth · its share), operations / (rate · its share)) + layers · layer_us
    all-reduce    = 2 · (n - 1) / n · bytes / (link · its share) + collective_us

The shares were chosen to reproduce the first column of public figures below, and hold for the second within 18 %, but
for gpt-fast's int4 (tests/planning/test_published.py names each figure and the error). A target file can replace them.

    fitted                                          held out
    gpt-fast, A100, Llama-2-7B bf16, 1 row          int8, 70B, and 2, 4 and 8 GPUs of both
    TensorRT-LLM 0.6, A100, LLaMA-7B, 60 rows       H100 and L40S in fp8, 48 to 112 rows
    TensorRT-LLM 0.5, A100, H100, L40S, LLaMA-7B,   LLaMA-70B on four A100 and four H100, prompt of 2048;
    prompt of 2048                                  ModelOpt, H200, Llama-3.1-8B in bf16 and fp8, 1 row
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

_TABLES = "fitted to gpt-fast's and TensorRT-LLM's published tables"
_NVIDIA = "NVIDIA AIConfigurator, p2p_latency of its system files"
_CPU = "docs/performance.md, two Zen 4 cores"


# What of the ceilings is reached; shares lie between 0 and 1. `matrix_16`, `matrix_8` and `matrix_4` are shares of the
# matrix rates of 16-bit (and wider), 8-bit and 4-bit dtypes that a long prompt reaches. `layer_us` is the time of a
# decode step for each layer that no ceiling explains: gaps between kernels, norms, small products. `collective_us`
# starts one all-reduce.
Share = Literal["bandwidth", "matrix_16", "matrix_8", "matrix_4", "layer_us", "link", "collective_us"]


@dataclass(frozen=True)
class Assumption:
    """A share or a time that a plan takes for granted, and where it comes from."""

    value: float
    source: str


def defaults(sm: str | None) -> Mapping[Share, Assumption]:
    """Return the assumptions for GPUs of capability `sm`, or for a CPU (None)."""
    if sm is None:
        return {
            "bandwidth": Assumption(0.75, f"75 % of the bandwidth measured in the same minute ({_CPU})"),
            "matrix_16": Assumption(0.85, f"340 of 390 Gflop/s of a large product ({_CPU})"),
            "matrix_8": Assumption(
                0.85, f"linear layers of a prompt of 512 at 606 Gop/s, the kernel alone at 719 ({_CPU})"
            ),
            "matrix_4": Assumption(0.85, "as 8 bits: codes are widened to int8"),
            "layer_us": Assumption(15.0, f"0.45 ms a token for 28 layers ({_CPU})"),
            "link": Assumption(1.0, "one device"),
            "collective_us": Assumption(0.0, "one device"),
        }
    hopper = int(sm) >= 90
    return {
        "bandwidth": Assumption(0.85, f"{_TABLES}: TensorRT-LLM 0.6, A100, LLaMA-7B fp16, 60 rows"),
        "matrix_16": Assumption(0.65, f"{_TABLES}: TensorRT-LLM 0.5, A100, LLaMA-7B fp16, prompt of 2048 in 133 ms"),
        "matrix_8": (
            Assumption(0.4, f"{_TABLES}: TensorRT-LLM 0.5, H100, LLaMA-7B fp8, prompt of 2048 in 36 ms")
            if hopper
            else Assumption(0.52, f"{_TABLES}: TensorRT-LLM 0.5, L40S, LLaMA-7B fp8, prompt of 2048 in 73 ms")
        ),
        "matrix_4": Assumption(0.4, "taken as for 8 bits; no public figure of a single prompt was found"),
        "layer_us": Assumption(60.0, f"{_TABLES}: gpt-fast, A100, Llama-2-7B bf16, one row in 9.53 ms"),
        "link": Assumption(0.8, "taken as the share of memory bandwidth that NVIDIA AIConfigurator assumes"),
        "collective_us": Assumption(10.0, _NVIDIA),
    }
