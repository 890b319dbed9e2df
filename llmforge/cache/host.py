"""What of a machine decides numbers: its processor, since kernels are chosen by what it can, and settings of libraries.

Libraries read some settings from the environment, when they are imported: which kernels they choose, on how many
threads sums are divided, in which precision products are computed.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
from functools import cache
from pathlib import Path

_CPUINFO = Path("/proc/cpuinfo")
_DECIDE = ("model name", "flags", "Features")  # the last two: instruction sets, on x86-64 and on Arm
# Variables of OpenMP and its runtimes, MKL, OpenBLAS (which was GotoBLAS), BLIS, oneDNN, Accelerate, numpy, numexpr,
# torch (ATen), ONNX Runtime, and of kernels of XNNPACK and KleidiAI, begin with these.
_OF_LIBRARIES = (
    "OMP_", "GOMP_", "KMP_", "MKL_", "OPENBLAS_", "GOTO_", "BLIS_", "DNNL_", "ONEDNN_", "VECLIB_", "NPY_", "NUMEXPR_",
    "ATEN_", "TORCH_", "PYTORCH_", "ORT_", "MLAS_", "KLEIDIAI_",
)  # fmt: skip
# Of the C library, which chooses its exponential function by the processor; and of products on GPUs.
_OTHERS = frozenset({"GLIBC_TUNABLES", "LD_PRELOAD", "NVIDIA_TF32_OVERRIDE", "CUBLAS_WORKSPACE_CONFIG"})
# How threads wait and where logs go decides no number; `base.process.prepare` sets the first two.
_NO_NUMBERS = frozenset({"OMP_WAIT_POLICY", "OPENBLAS_THREAD_TIMEOUT", "KMP_BLOCKTIME", "TORCH_LOGS", "TORCH_HOME"})


@cache
def processor() -> str:
    """Name the processor, with a digest of the instruction sets that it, and the kernel, offer."""
    lines = _CPUINFO.read_text().splitlines() if _CPUINFO.exists() else []
    found: dict[str, str] = {}
    for line in lines:
        name, _, value = line.partition(":")
        if name.strip() in _DECIDE:
            found.setdefault(name.strip(), value.strip())
    words = found.get("model name", platform.processor() or platform.machine())
    return f"{words}, {hashlib.sha256(repr(sorted(found.items())).encode()).hexdigest()[:16]}"


def settings() -> str:
    """Write down the variables of the environment by which libraries compute otherwise, as JSON; "{}": none is set."""
    found = {
        name: value
        for name, value in os.environ.items()
        if (name in _OTHERS or name.startswith(_OF_LIBRARIES)) and name not in _NO_NUMBERS
    }
    return json.dumps(found, sort_keys=True)
