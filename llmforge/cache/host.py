"""The processor, as far as it decides numbers: kernels are chosen by what it can."""

from __future__ import annotations

import hashlib
import platform
from functools import cache
from pathlib import Path

_CPUINFO = Path("/proc/cpuinfo")
_DECIDE = ("model name", "flags", "Features")  # the last two: instruction sets, on x86-64 and on Arm


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
