"""How many cores a process may use."""

from __future__ import annotations

import os
from pathlib import Path


def physical_cores() -> int:
    """Count the physical cores that this process may use: hyper-threads share one, a container's quota limits them."""
    allowed = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else range(os.cpu_count() or 1)  # macOS
    siblings = {_siblings(cpu) for cpu in allowed}
    return max(1, min(len(siblings), _quota(Path("/sys/fs/cgroup/cpu.max"), len(allowed))))


def _siblings(cpu: int) -> str:
    topology = Path(f"/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list")
    return topology.read_text() if topology.exists() else str(cpu)


def _quota(cpu_max: Path, unlimited: int) -> int:
    """Read the CPUs that a control group grants: `cpu.max` holds "quota period" in µs, or "max period"."""
    if not cpu_max.exists():
        return unlimited
    quota, period = cpu_max.read_text().split()
    return unlimited if quota == "max" else max(1, int(quota) // int(period))
