"""The target file of a machine: what was measured here, in the form of `targets/`."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from io import StringIO
from pathlib import Path
from typing import TYPE_CHECKING, cast

from ruamel.yaml import YAML

from llmforge import targets
from llmforge.base.errors import UnsupportedError, UsageError
from llmforge.measure.gpus import Gpu
from llmforge.measure.machine import Machine
from llmforge.targets import QuantizedLayers, Rate, SourcedFigure, Target
from llmforge.targets.achieved import Share

if TYPE_CHECKING:
    from llmforge.measure.ceilings import CpuCeilings

_DIGITS = 4  # of a measured figure


def of_cpu(name: str, machine: Machine, ceilings: CpuCeilings, day: str) -> Target:
    """Make the target of this machine's CPU; `day` is that of the measurement."""
    busy = f", while others took {ceilings.others:.1f} cores" if ceilings.disturbed else ""
    by, figure = f"measured by llmforge doctor on {day}{busy}", partial(_figure, verified=not ceilings.disturbed)
    widest = max(ceilings.bandwidth)
    local = targets.local()
    return Target(
        name=name,
        title=machine.cpu,
        kind="cpu",
        like=local.name,
        isa=local.isa,
        cores=machine.cores,
        memory_gb=_figure(machine.memory_bytes / 1e9, by),
        bandwidth_gbs=figure(ceilings.bandwidth[widest] / 1e9, f"{by}, {widest} threads reading"),
        rates={
            cast(Rate, dtype): figure(rate / 1e12, f"{by}, {ceilings.threads} threads, {ceilings.kernels[dtype]}")
            for dtype, rate in ceilings.rates.items()
        },
        kernels={
            library: {
                dtype: QuantizedLayers(
                    rate=figure(each.rate / 1e12, f"{by}, {ceilings.threads} threads"),
                    read_gbs=figure(each.read / 1e9, f"{by}, {ceilings.threads} threads"),
                )
                for dtype, each in reached.items()
            }
            for library, reached in ceilings.quantized.items()
        },
        engines=local.engines,
        notes=tuple(
            f"{count} {'thread reads' if count == 1 else 'threads read'} {rate / 1e9:.1f} GB/s"
            for count, rate in ceilings.bandwidth.items()
        ),
    )


def of_gpu(name: str, gpu: Gpu, bandwidth: float, rates: Mapping[str, float], day: str) -> Target:
    """Make the target of `gpu` from what was measured, and from the target that it is for the rest.

    Raises:
        UnsupportedError: no target is known for such a device.
    """
    if gpu.target is None:
        raise UnsupportedError(
            f"{gpu.title} (SM {gpu.sm}, {gpu.memory_bytes / 1e9:.0f} GB) matches no target in targets/",
            hint="write a target file by hand, starting from one of the same generation",
        )
    known, by = targets.load(gpu.target), f"measured by llmforge doctor on {day}"
    measured: dict[Rate, SourcedFigure] = {
        cast(Rate, dtype): _figure(rate / 1e12, f"{by}, a large product") for dtype, rate in rates.items()
    }
    reached = {
        "like": known.name,
        "bandwidth_gbs": _figure(bandwidth / 1e9, f"{by}, a copy, bytes read and written"),
        "memory_gb": _figure(gpu.memory_bytes / 1e9, f"{by}, as the driver reports it"),
        "rates": {**known.rates, **measured},
    }
    # The default shares are of data sheets' figures; a decoder reaches more of what was measured.
    peak = known.require_gpu().bandwidth_gbs.value * 1e9
    shares: dict[Share, SourcedFigure] = {"bandwidth": _rebased(known, "bandwidth", peak, bandwidth)}
    if "fp16" in rates:
        shares["matrix_16"] = _rebased(known, "matrix_16", known.rates["fp16"].value * 1e12, rates["fp16"])
    return known.model_copy(update={"name": name, "title": gpu.title, **reached, "achieved": shares})


def write(target: Target, path: Path) -> None:
    """Write `target` as YAML, which `--target` and recipes take; its name is that of the file.

    Raises:
        UsageError: the file cannot be written, or has no suffix of YAML.
    """
    if not targets.is_file(path.name):
        raise UsageError(f"{path}: a target is written as .yaml")
    content = target.model_dump(mode="json", exclude_none=True, exclude_defaults=True, exclude={"name"})
    text = StringIO()
    yaml = YAML(typ="safe", pure=True)
    yaml.default_flow_style = None  # a figure on one line
    yaml.width = 200
    yaml.dump(content, text)
    try:
        path.write_text(text.getvalue(), encoding="utf-8")
    except OSError as error:
        raise UsageError(f"{path}: cannot be written: {error.strerror}") from error


def _figure(value: float, source: str, *, verified: bool = True) -> SourcedFigure:
    return SourcedFigure(value=float(f"{value:.{_DIGITS}g}"), source=source, verified=verified)


def _rebased(known: Target, share: Share, peak: float, measured: float) -> SourcedFigure:
    """Turn a share of the data sheet's `peak` into one of what was `measured`; at most all of it."""
    taken = known.share(share)
    return _figure(min(1.0, taken.value * peak / measured), f"{taken.source}, of what was measured", verified=False)
