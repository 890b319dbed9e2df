"""Facts of the machine that a measurement ran on, and how fast it reads memory."""

from __future__ import annotations

import os
import platform
import resource
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import psutil

from llmforge.metrics.latency import Noise
from llmforge.metrics.record import ReportRecord

_PROBE_WORDS = 1 << 17  # 1 MiB, which the cache of one core holds; sorting it takes about a millisecond

# Linux's names of the instruction sets that a kernel of ONNX Runtime or torch is chosen by.
_ISA = (
    "avx2", "fma", "f16c", "avx_vnni", "avx512f", "avx512bw", "avx512_vnni", "avx512_bf16", "avx512_fp16",
    "amx_tile", "amx_int8", "amx_bf16", "asimd", "asimddp", "i8mm", "bf16", "sve", "sve2",
)  # fmt: skip


class Machine(ReportRecord):
    """What stands under every timing of a report."""

    cpu: str  # model name
    cores: int  # physical
    usable_cpus: int  # logical ones that this process may run on
    isa: tuple[str, ...]  # of the flags that matter, those present
    memory_bytes: int
    os: str
    python: str


def describe() -> Machine:
    """Describe this machine; host names and addresses are left out."""
    info = _cpuinfo()
    flags = set((info.get("flags") or info.get("Features") or "").split())
    return Machine(
        cpu=info.get("model name") or platform.processor() or platform.machine(),
        cores=psutil.cpu_count(logical=False) or psutil.cpu_count() or 1,
        usable_cpus=len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1,
        isa=tuple(name for name in _ISA if name in flags),
        memory_bytes=psutil.virtual_memory().total,
        os=f"{platform.system()} {platform.release()} {platform.machine()}",
        python=platform.python_version(),
    )


def read_bandwidth(size_bytes: int, threads: int, seconds: float = 0.2) -> float:
    """Measure how fast `threads` threads read a working set of `size_bytes`, in bytes a second.

    Each thread takes the maximum of its own contiguous part as uint64, a reduction that is bound by loads (its
    vectorised loop does one load and one compare for 8 lanes), again and again for about `seconds`; the best round
    counts. A working set that fits a cache measures that cache, which is what a model of that size reads from.
    """
    words = max(size_bytes // 8, 1024)
    parts = np.array_split(np.ones(words, np.uint64), threads)
    sweeps = max(1, 2**26 // (words * 8))  # at least 64 MB a round, so that starting the threads does not count

    def sweep(part: np.ndarray[tuple[int], np.dtype[np.uint64]]) -> None:
        for _ in range(sweeps):
            part.max()

    best = float("inf")
    with ThreadPoolExecutor(threads) as pool:
        end = time.perf_counter() + seconds
        while True:
            began = time.perf_counter()
            list(pool.map(sweep, parts))
            now = time.perf_counter()
            best = min(best, now - began)
            if now > end:
                return words * 8 * sweeps / best


def peak_resident_bytes(process: int | None = None) -> int:
    """Return the largest resident set of this process so far; of another one where /proc tells, else 0.

    Linux's ru_maxrss survives exec: in a process that a larger one launched it is the latter's. VmHWM begins anew with
    the program (proc(5)). Elsewhere ru_maxrss is all there is; its unit is KiB, on macOS bytes.
    """
    status = Path("/proc", "self" if process is None else str(process), "status")
    if status.is_file():
        for line in status.read_text(encoding="utf-8").splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    if process is not None:
        return 0
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def reset_peak_resident_bytes() -> bool:
    """Let `peak_resident_bytes` count from now on; False: this system does not allow it.

    Linux: a 5 in /proc/self/clear_refs sets VmHWM to what is resident now (proc(5)).
    """
    try:
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
    except OSError:
        return False
    return True


class OthersMeter:
    """Counts the CPU time that others take on this machine, from when it was made."""

    def __init__(self) -> None:
        self._began, self._taken = time.perf_counter(), _taken_by_others()

    def cores(self) -> float:
        """Return how many cores they took, on average: of other processes, and of other guests of the host."""
        return max(0.0, _taken_by_others() - self._taken) / max(time.perf_counter() - self._began, 1e-9)


def _taken_by_others() -> float:
    """Return the CPU seconds of all cores since the start, less those of this process and of its children."""
    every, own = psutil.cpu_times(), os.times()
    idle = every.idle + getattr(every, "iowait", 0.0) + getattr(every, "guest", 0.0) + getattr(every, "guest_nice", 0.0)
    return float(sum(every) - idle - sum(own[:4]))


class NoiseProbe:
    """Records what else the machine does, from when it was made."""

    def __init__(self) -> None:
        self._words = np.random.default_rng(0).integers(0, 2**62, _PROBE_WORDS)
        self._load = os.getloadavg()[0] if hasattr(os, "getloadavg") else None
        self._stolen, self._waits = _stolen_ticks(), _waits()
        self._probe_ms: list[float] = []
        np.sort(self._words)  # warms up

    def probe(self) -> None:
        """Time the same small computation once more, on one core."""
        began = time.perf_counter()
        np.sort(self._words)
        self._probe_ms.append(round((time.perf_counter() - began) * 1e3, 5))

    def read(self) -> Noise:
        """Tell what was found."""
        stolen = None
        if (now := _stolen_ticks()) is not None and self._stolen is not None and now[1] > self._stolen[1]:
            stolen = (now[0] - self._stolen[0]) / (now[1] - self._stolen[1])
        return Noise(
            probe_ms=tuple(self._probe_ms),
            stolen_share=stolen,
            waits=_waits() - self._waits,
            load_average=self._load,
        )


def _waits() -> int:
    """Count how often this process had to leave a core to another one."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_nivcsw


def _stolen_ticks() -> tuple[int, int] | None:
    """Read the CPU time that other virtual machines took, and all CPU time (proc(5), /proc/stat); None: not told."""
    path = Path("/proc/stat")
    if not path.is_file():
        return None
    ticks = [int(each) for each in path.read_text(encoding="ascii").split("\n", 1)[0].split()[1:9]]
    return (ticks[7], sum(ticks)) if len(ticks) == 8 else None


def _cpuinfo() -> dict[str, str]:
    """Read the first processor's block of /proc/cpuinfo; empty where there is none."""
    path = Path("/proc/cpuinfo")
    if not path.exists():
        return {}
    pairs = (line.partition(":") for line in path.read_text().split("\n\n")[0].splitlines())
    return {key.strip(): value.strip() for key, _, value in pairs}
