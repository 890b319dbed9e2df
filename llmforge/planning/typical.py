"""Figures of a CPU of its kind, by arithmetic: what a recipe is chosen by.

Measured figures differ from minute to minute. They are for plans; a recipe is the same whenever it is written.
"""

from __future__ import annotations

from collections.abc import Mapping

from llmforge.measure.machine import Machine
from llmforge.targets import Isa, SourcedFigure, Target

BANDWIDTH_GBS = 51.2  # two channels of DDR4-3200 (JEDEC JESD79-4): 2 · 8 bytes · 3.2 GT/s
GHZ = 3.0
# Operations of one core in a cycle, in fp32 and int8. Two units for vectors, of 4, 8 or 16 floats, multiply and add.
# Codes of 8 bits are four times as many, and widened first where there is no dot product for them (half of the gain).
# AMX: a tile product of 16 · 16 · 64 in 16 cycles (Intel Optimization Reference Manual, chapter on AMX).
_OPERATIONS: Mapping[Isa, tuple[int, int]] = {
    Isa.GENERIC: (16, 32),
    Isa.AVX2: (32, 64),
    Isa.AVX512: (64, 128),
    Isa.AVX512_VNNI: (64, 256),
    Isa.AMX: (64, 2048),
}


def of_cpu(target: Target, here: Machine) -> Target:
    """Give a CPU target that has no figures those of its instruction set, with the cores and the memory of `here`."""
    if target.isa is None or target.bandwidth_gbs is not None:
        return target
    fp32, int8 = (_figure(count * here.cores * GHZ / 1e3) for count in _OPERATIONS[target.isa])
    found = {
        "cores": here.cores,
        "title": here.cpu,
        "memory_gb": _figure(here.memory_bytes / 1e9),
        "bandwidth_gbs": _figure(BANDWIDTH_GBS),
        "rates": {"fp32": fp32, "int8": int8},
    }
    return target.model_copy(update=found)


def _figure(value: float) -> SourcedFigure:
    return SourcedFigure(
        value=value, source="typical of such a CPU, by arithmetic (llmforge/planning/typical.py)", verified=False
    )
