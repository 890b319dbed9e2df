"""Show what the doctor found."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from llmforge.doctor.environment import Check
from llmforge.measure.gpus import Gpu
from llmforge.metrics.units import significant

if TYPE_CHECKING:
    from llmforge.measure.ceilings import CpuCeilings

_MARKS = {"yes": ("✓", "green"), "no": ("✗", "bold red"), "optional": ("·", "dim")}


def report(checks: Sequence[Check], ceilings: CpuCeilings | None) -> RenderableType:
    """Make the checklist, with hints under what is missing, and what was measured."""
    table = Table.grid(padding=(0, 1))
    for check in checks:
        mark, style = _MARKS[check.state]
        table.add_row(Text(mark, style), Text(check.name, "bold"), Text(check.found))
        if check.hint is not None:
            table.add_row("", "", Text(f"hint: {check.hint}", "cyan"))
    return table if ceilings is None else Group(table, Text(""), measured(ceilings))


def measured(ceilings: CpuCeilings) -> RenderableType:
    """Show the ceilings of a CPU."""
    table = Table.grid(padding=(0, 2))
    for count, rate in ceilings.bandwidth.items():
        table.add_row(f"memory, {count} {'thread' if count == 1 else 'threads'}", f"{significant(rate / 1e9)} GB/s")
    for dtype, rate in ceilings.rates.items():
        unit = "Gflop/s" if dtype.startswith("fp") else "Gop/s"
        table.add_row(f"{dtype} matmul", f"{significant(rate / 1e9)} {unit}", Text(ceilings.kernels[dtype], "dim"))
    for library, reached in ceilings.quantized.items():
        for dtype, each in reached.items():
            figures = f"{significant(each.rate / 1e9)} Gop/s, weights at {significant(each.read / 1e9)} GB/s"
            table.add_row(f"{dtype} layers", figures, Text(f"{library}'s kernels", "dim"))
    if not ceilings.disturbed:
        return table
    busy = f"other processes used {ceilings.others:.1f} cores meanwhile: an idle machine reaches more"
    return Group(table, Text(f"{busy}; a target file that is written says unverified", "yellow"))


def data(
    checks: Sequence[Check],
    packages: dict[str, str],
    settings: dict[str, str],
    gpus: Sequence[Gpu],
    ceilings: CpuCeilings | None,
) -> dict[str, Any]:
    """Write it as plain data; bytes and operations a second."""
    found: dict[str, Any] = {
        "checks": [vars(check) for check in checks],
        "packages": packages,
        "settings": settings,
        "gpus": [{**vars(gpu), "target": gpu.target} for gpu in gpus],
    }
    if ceilings is not None:
        found["ceilings"] = asdict(ceilings)  # JSON writes the numbers of threads as text
    return found
