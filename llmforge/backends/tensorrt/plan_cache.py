"""The store of earlier builds for later ones, in the user's cache folder: plans by their key, and kernel timings.

A plan is reused where everything that decides it is equal, and its hash is what was recorded. The oldest go when all
together take more than `LIMIT_BYTES`.
"""

from __future__ import annotations

import os
import re
import shutil
from dataclasses import dataclass
from pathlib import Path

from llmforge.backends.tensorrt import plan_file
from llmforge.backends.tensorrt.plan_file import PlanRecord, PlanSource
from llmforge.base import whole_file
from llmforge.base.errors import InputError

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
        if record.key != key or not kept.is_file() or plan_file.file_digest(kept) != record.sha256:
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
