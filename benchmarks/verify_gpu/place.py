"""The device that is verified, and the target that stands for it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from benchmarks.verify_gpu.scale import Scale
from llmforge.base.errors import EnvironmentLacks
from llmforge.runtime.device import cuda as devices
from llmforge.runtime.device.cuda import Device
from tests.fakes.host_device import HostDevice

if TYPE_CHECKING:
    from llmforge.targets import Target


def device(scale: Scale) -> Device:
    """Reach the device that is verified; in a dry run the host's memory."""
    return HostDevice() if scale.dry else devices.CudaDevice()


def target(scale: Scale, name: str | None) -> Target:
    """Find the target of the device, as `llmforge doctor` names it, unless `name` says.

    Raises:
        EnvironmentLacks: there is none.
    """
    # What reads targets is not there where engines are only run.
    from llmforge import targets
    from llmforge.measure.gpus import Gpu

    if scale.dry:
        return targets.local()
    if name is not None:
        return targets.load(name)
    found = devices.CudaDevice()
    known = Gpu(found.index, found.name, str(found.sm), found.memory()[1]).target
    if known is None:
        raise EnvironmentLacks(f"no target is {found.name} of compute capability {found.sm}", hint="--target NAME")
    return targets.load(known)
