"""The store of earlier builds for later ones, in the user's cache folder: plans by their key, and kernel timings.

A plan is reused where everything that decides it is equal, and its hash is what was recorded. The oldest go when all
together take more than `LIMIT_BYTES`.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import re
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from llmforge.backends import PlanModule
from llmforge.base import small_file, strict_json, whole_file
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


ENVIRONMENT = "LLMFORGE_CACHE"  # names another folder
LIMIT_BYTES = 32 << 30  # of plans: two of an 8B model in fp16


def default_folder() -> Path:
    """Find the user's cache folder: `$LLMFORGE_CACHE`, else `llmforge` in `$XDG_CACHE_HOME` or `~/.cache`."""
    if (named := os.environ.get(ENVIRONMENT)) is not None:
        return Path(named)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "llmforge"


@dataclass(frozen=True)
class PlanCache:
    """Plans and timings in `folder`, which is made when something is kept."""

    folder: Path
    limit_bytes: int = LIMIT_BYTES

    def take(self, key: str, plan: Path) -> PlanRecord | None:
        """Put the plan of `key` at `plan` and return its record; None where there is none that is whole."""
        record_file = self._record(key)
        kept = record_file.with_suffix(".plan")
        try:
            record = PlanRecord.read(record_file)
        except InputError:  # there is none, or it is of another format
            return None
        if record.key != key or not kept.is_file() or file_digest(kept) != record.sha256:
            return None
        _link(kept, plan)
        os.utime(record_file)  # used last
        return record

    def keep(self, record: PlanRecord, plan: Path) -> None:
        """Keep a plan, with a hard link where the file system allows it, and drop the oldest above the limit."""
        if record.size_bytes > self.limit_bytes:
            return
        file = self._record(record.key)
        whole_file.write(file.with_suffix(".plan"), lambda partial: _link(plan, partial))
        whole_file.write(file, lambda partial: partial.write_text(record.to_json(), encoding="utf-8"))
        self._drop_oldest()

    def timings(self, source: PlanSource) -> bytes:
        """Read what was timed with this version on this device; b"" where nothing was."""
        file = self._timings(source)
        return file.read_bytes() if file.is_file() else b""

    def keep_timings(self, source: PlanSource, timings: bytes) -> None:
        """Keep what was timed."""
        file = self._timings(source)
        whole_file.write(file, lambda partial: partial.write_bytes(timings))

    def _drop_oldest(self) -> None:
        records = sorted(self.folder.glob("plans/*.json"), key=lambda file: file.stat().st_mtime)
        sizes = {record: plan.stat().st_size for record in records if (plan := record.with_suffix(".plan")).is_file()}
        total = sum(sizes.values())
        for record in records[:-1]:
            if total <= self.limit_bytes:
                return
            record.unlink(missing_ok=True)
            record.with_suffix(".plan").unlink(missing_ok=True)
            total -= sizes.get(record, 0)

    def _record(self, key: str) -> Path:
        """Name the record of a plan; the plan lies beside it."""
        return self.folder / "plans" / f"{key}.json"

    def _timings(self, source: PlanSource) -> Path:
        device = re.sub(r"[^A-Za-z0-9]+", "-", source.device).strip("-").lower()
        return self.folder / "timings" / f"{source.version}-sm{source.sm}-{device}.cache"


def _link(source: Path, target: Path) -> None:
    try:
        os.link(source, target)
    except OSError:  # another file system, or one without hard links
        shutil.copyfile(source, target)
