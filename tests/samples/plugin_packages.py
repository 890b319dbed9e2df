"""Installs plug-ins for tests: files and metadata as pip writes them, in a folder of the test's own, on `sys.path`."""

from __future__ import annotations

import shutil
import sys
import tomllib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

SAMPLE = Path(__file__).parents[1] / "plugin_sample"


def write_metadata(folder: Path, name: str, version: str, points: Mapping[str, Mapping[str, str]]) -> None:
    """Write the .dist-info of a distribution with entry points, group → name → value."""
    info = folder / f"{name.replace('-', '_')}-{version}.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.4\nName: {name}\nVersion: {version}\n")
    lines = [
        line for group, own in points.items() for line in (f"[{group}]", *(f"{n} = {v}" for n, v in own.items()), "")
    ]
    (info / "entry_points.txt").write_text("\n".join(lines))


def install_sample(folder: Path, version: str = "0.1.0") -> Path:
    """Install the sample plug-in into `folder`; return the folder of its package."""
    project = tomllib.loads((SAMPLE / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    shutil.copytree(
        SAMPLE / "llmforge_sample", folder / "llmforge_sample", ignore=shutil.ignore_patterns("__pycache__")
    )
    write_metadata(folder, project["name"], version, project["entry-points"])
    return folder / "llmforge_sample"


def install(
    folder: Path, name: str, source: str, points: Mapping[str, Mapping[str, str]], version: str = "1.0"
) -> None:
    """Install a plug-in that is one module, called as its distribution."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{name.replace('-', '_')}.py").write_text(source, encoding="utf-8")
    write_metadata(folder, name, version, points)


@contextmanager
def on_path(*folders: Path) -> Iterator[None]:
    """Let Python find what is installed in `folders`; what was imported from there is forgotten behind."""
    before, path = set(sys.modules), list(sys.path)
    sys.path[:0] = map(str, folders)
    try:
        yield
    finally:
        sys.path[:] = path
        for name in set(sys.modules) - before:
            file = getattr(sys.modules[name], "__file__", None) or ""
            if any(file.startswith(str(folder)) for folder in folders):
                del sys.modules[name]
