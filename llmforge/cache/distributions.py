"""Distributions with plug-ins: their top-level packages, the files of those, and what they require."""

from __future__ import annotations

import importlib.util
import re
import sys
from collections.abc import Iterable, Mapping
from functools import cache
from pathlib import Path

from llmforge.base import plugins
from llmforge.base.plugins import Package

_DISTRIBUTION = re.compile(r"[\w.-]+")


def of_module(module: str) -> Package | None:
    """Tell whose plug-in a module is part of, by its top-level package; None: of none."""
    return tops().get(module.partition(".")[0])


def tops() -> Mapping[str, Package]:
    """Give the top-level packages and modules of all distributions with plug-ins, and whose they are."""
    return _tops(tuple(sys.path))


@cache
def _tops(path: tuple[str, ...]) -> Mapping[str, Package]:
    whose: dict[str, Package] = {}
    for plugin in plugins.found().plugins:
        tops = {plugin.module.partition(".")[0]}
        if (distribution := plugin.entry.dist) is not None:
            tops |= set((distribution.read_text("top_level.txt") or "").split())
            for file in distribution.files or ():
                if file.suffix == ".py" and ".." not in file.parts:
                    tops.add(file.parts[0].removesuffix(".py"))
        for top in sorted(tops - {plugins.OURS}):
            whose.setdefault(top, plugin.package)
    return whose


def requirements(package: Package) -> dict[str, str]:
    """Give the versions of what a distribution with plug-ins requires besides llmforge, as far as it is installed."""
    return _requirements(package.name, tuple(sys.path))


@cache
def _requirements(name: str, path: tuple[str, ...]) -> dict[str, str]:
    return {
        each: version for each, version in installed([name]).items() if each not in (plugins.normal(name), plugins.OURS)
    }


def installed(names: Iterable[str]) -> dict[str, str]:
    """Give the versions of distributions and of what they require, without extras, as far as it is installed.

    What llmforge requires is not listed as a requirement of others.
    """
    from importlib import metadata

    found: dict[str, str] = {}
    waiting = list(names)
    while waiting:
        name = plugins.normal(waiting.pop())
        if name in found:
            continue
        try:
            distribution = metadata.distribution(name)
        except (metadata.PackageNotFoundError, ValueError):
            continue
        found[name] = distribution.version
        for line in () if name == plugins.OURS else distribution.requires or []:
            match = _DISTRIBUTION.match(line)
            if match is not None and "extra ==" not in line:
                waiting.append(match[0])
    return dict(sorted(found.items()))


def folders(top: str) -> tuple[Path, ...]:
    """Find the folders of a top-level package, or the file of a module; several: a namespace. () : there is no file."""
    try:
        spec = importlib.util.find_spec(top)
    except (ImportError, ValueError):
        return ()
    if spec is None:
        return ()
    if spec.submodule_search_locations is not None:
        return tuple(path for path in map(Path, spec.submodule_search_locations) if path.is_dir())
    file = Path(spec.origin or "")
    return (file,) if file.is_file() else ()
