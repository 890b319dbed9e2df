"""The plug-ins that are installed, and those that cannot be used: each is imported, in this process."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

import llmforge
from llmforge import backends, targets
from llmforge.base import extras, plugins
from llmforge.base.errors import PluginError
from llmforge.base.plugins import KINDS, Plugin, Seam
from llmforge.doctor.environment import Check
from llmforge.metrics import catalog
from llmforge.quantization import methods
from llmforge.rewrite import pass_base

_BUILDS = ("passes", "methods")  # of no use without the extra `build`


def checks() -> Iterator[Check]:
    """List the packages that bring plug-ins, what each brings, and what is wrong with it."""
    found = plugins.found()
    for package in sorted({each.package for each in found.plugins}):
        mine = [each for each in found.plugins if each.package == package]
        broken = {each: problem for each in mine if (problem := _problem(each)) is not None}
        whole = ", ".join(f"{KINDS[each.kind]} {each.name}" for each in mine if each not in broken)
        if whole:
            yield Check("plug-in", "yes", f"{package}: {whole}")
        for wrong in broken.values():
            yield Check("plug-in", "no", wrong.message, wrong.hint)
    for damage in found.problems:
        known = ", ".join(f"llmforge.v{plugins.INTERFACE}.{kind}" for kind in KINDS)
        yield Check("plug-in", "no", damage, f"groups are {known}")


def _problem(plugin: Plugin) -> PluginError | None:
    """Say why a plug-in cannot be used, after importing it; None: it can."""
    if plugin.kind in _BUILDS and extras.missing("build"):
        return None
    seam, built_in = _seams()[plugin.kind]
    try:
        if plugin.interface != plugins.INTERFACE:
            raise plugins.other_interface(plugin)
        seam.find(plugin.name, built_in)
    except PluginError as error:
        return error
    return None


def _seams() -> dict[str, tuple[Seam[Any], Collection[str]]]:
    """Give what each kind is checked by, and the names that are llmforge's own; a pass is called as its file."""
    folder = Path(llmforge.__file__).parent / "passes"
    passes = {file.stem.replace("_", "-") for file in folder.glob("*.py")}
    return {
        "passes": (pass_base.SEAM, passes),
        "methods": (methods.SEAM, methods.built_in()),
        "metrics": (catalog.SEAM, {metric.name for metric in catalog.ALL}),
        "targets": (targets.SEAM, {*targets.built_in(), targets.LOCAL}),
        "backends": (backends.SEAM, backends.BUILT_IN),
    }
