"""Manifests as a build writes them: what stands in the folder of an artifact is llmforge.artifact.sealed's to say."""

from __future__ import annotations

import json
import platform
import stat
from collections.abc import Callable, Mapping
from importlib.metadata import PackageNotFoundError
from importlib.metadata import version as installed_version
from pathlib import Path
from typing import Any

from llmforge import __version__
from llmforge.artifact.sealed import SCHEMA, FileRecord, Manifest, is_content, walk
from llmforge.backends import PROVIDERS
from llmforge.base.hashed_files import sha256

TOOLS = (
    "jinja2", "ml-dtypes", "numpy", "onnx", "onnx-ir", "onnxscript", *(each.package for each in PROVIDERS.values()),
    "tokenizers", "torch", "transformers",
)  # fmt: skip


def tool_versions() -> dict[str, str]:
    """List Python, llmforge and the packages that shape an artifact, as installed here."""
    versions = {"python": platform.python_version(), "llmforge": __version__}
    for package in TOOLS:
        try:
            versions[package] = installed_version(package)
        except PackageNotFoundError:  # an extra that is not installed shapes nothing
            continue
    return versions


def seal(
    folder: Path,
    *,
    recipe: Mapping[str, Any],
    checkpoint: str,
    target: str,
    requires: Mapping[str, str],
    hash_of: Callable[[Path], str] = sha256,
) -> Manifest:
    """Make the manifest of the content in `folder`, which `staging` made; evidence may be written after that.

    `recipe` is the resolved recipe as JSON data, `checkpoint` the digest of the checkpoint, `requires` the packages
    and versions that the engine must be run with. `hash_of` gives the SHA-256 of a file.
    """
    return Manifest(
        schema=SCHEMA,
        name=folder.parent.name,
        target=target,
        checkpoint=checkpoint,
        recipe=json.loads(json.dumps(recipe, allow_nan=False)),  # as it is read back
        requires=dict(requires),
        files=records(folder, content=True, hash_of=hash_of),
    )


def records(folder: Path, *, content: bool, hash_of: Callable[[Path], str] = sha256) -> dict[str, FileRecord]:
    """Hash everything in `folder` that is content, or everything that is not."""
    files = {}
    for path in sorted(walk(folder)):
        if is_content(path) == content:
            file = folder / path
            assert stat.S_ISREG(file.lstat().st_mode), f"{file}: an artifact holds regular files only"
            files[path] = FileRecord(hash_of(file), file.stat().st_size)
    return files
