"""`engine/plan.json`: what a plan was built from, and what proves that it is what it claims; and the plan's key."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from llmforge.backends import PlanModule
from llmforge.base import small_file, strict_json
from llmforge.base.errors import InputError

FILE = "plan.json"
FORMAT = 2


@dataclass(frozen=True)
class PlanSource:
    """All that decides what a builder makes: equal sources give interchangeable plans."""

    module: PlanModule
    version: str
    sm: str  # "89"
    device: str  # whose kernels were timed, as its driver names it; "" where nothing is timed
    flags: tuple[
        str, ...
    ]  # builder flags that differ from the module's defaults: "-TF32" is cleared, and other settings
    profiles: Mapping[str, Mapping[str, tuple[tuple[int, ...], ...]]]  # profile → input → smallest, tuned for, largest
    onnx_sha256: str  # of model.onnx and its data (`digest`)

    @property
    def key(self) -> str:
        """Name it by its content: SHA-256, hex."""
        text = json.dumps(dataclasses.asdict(self), sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(text.encode()).hexdigest()


@dataclass(frozen=True)
class PlanRecord:
    """Content of `plan.json`. Times stay out of it: equal plans have equal records."""

    format: int
    key: str  # of the source
    source: PlanSource
    layers: Mapping[str, int]  # of TensorRT's network, by type, and products (`layers`, `precisions`)
    warnings: tuple[str, ...]
    sha256: str  # of the plan
    size_bytes: int

    def to_json(self) -> str:
        """Write the file's text: sorted keys, one trailing newline."""
        return json.dumps(dataclasses.asdict(self), indent=1, sort_keys=True) + "\n"

    @classmethod
    def read(cls, path: Path) -> PlanRecord:
        """Read `path`.

        Raises:
            InputError: it is missing, no record of this format, or its key is not that of its source.
        """
        if not path.exists():
            raise InputError(f"{path} is missing: the origin of the plan next to it is unknown")
        data = small_file.read_json(path)
        record = strict_json.read(cls, data, str(path))
        if record.format != FORMAT or record.key != record.source.key:
            raise InputError(
                f"{path}: not a plan record of format {FORMAT}, or edited", hint="build the artifact again"
            )
        return record


def digest(*files: Path) -> str:
    """Hash files by name and content, in the given order: SHA-256 over one line `<name> <SHA-256>` a file."""
    whole = hashlib.sha256()
    for file in files:
        whole.update(f"{file.name} {file_digest(file)}\n".encode())
    return whole.hexdigest()


def file_digest(file: Path) -> str:
    """Hash the content of a file: SHA-256, hex."""
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()
