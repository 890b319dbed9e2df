"""The device that is verified, and the target that stands for it."""

from __future__ import annotations

from benchmarks.verify_gpu.scale import Scale
from llmforge import targets
from llmforge.base.errors import EnvironmentLacks
from llmforge.runtime.backends import device as devices
from llmforge.runtime.backends.device import Device, HostDevice


def device(scale: Scale) -> Device:
    """Reach the device that is verified; in a dry run the host's memory."""
    return HostDevice() if scale.dry else devices.CudaDevice()


def target(scale: Scale, name: str | None) -> targets.Target:
    """Find the target of the device: the one of its compute capability whose memory is nearest, unless `name` says.

    Raises:
        EnvironmentLacks: there is none.
    """
    if scale.dry:
        return targets.local()
    if name is not None:
        return targets.load(name)
    found = devices.CudaDevice()
    total_gb = found.memory()[1] / 1e9
    known = [targets.load(each) for each in targets.names()]
    fitting = [each for each in known if each.kind == "gpu" and each.sm == str(found.sm) and each.memory_gb is not None]
    if not fitting:
        raise EnvironmentLacks(f"no target is of compute capability {found.sm} ({found.name})", hint="--target NAME")
    return min(fitting, key=lambda each: abs(each.memory_gb.value - total_gb) if each.memory_gb else 0.0)
