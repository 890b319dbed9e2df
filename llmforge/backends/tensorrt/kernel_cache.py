"""Kernels that TensorRT-RTX compiles on this machine for a plan, kept for the next start.

A plan of TensorRT-RTX holds no kernels for one device: they are compiled as contexts run their first shapes, which
takes seconds at every start. Its runtime cache holds what was compiled, and refuses what another device, driver or
version left. It lies in llmforge's cache folder of the user, by the digest of the plan.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

from llmforge.base import remembered, small_file, whole_file
from llmforge.base.errors import InputError
from llmforge.runtime.config import plan_record

FOLDER = "tensorrt-rtx-kernels"
MOST_BYTES = 4 << 30  # a file above it is not what was kept here

logger = logging.getLogger(__name__)


class KernelCache:
    """The runtime cache that all contexts of one plan share.

    Args:
        plan: the plan's file. Beside it lies its record, which says its SHA-256; without, nothing is kept.
    """

    def __init__(self, plan: Path) -> None:
        self._file = _file_of(plan)
        self._cache: Any = None
        self._kept = b""
        self.found = False  # whether kernels of an earlier start were taken

    def attach(self, settings: Any) -> None:
        """Let a context that is made with `settings` (IRuntimeConfig) take kernels from the cache, and put them in."""
        if self._cache is None:
            self._cache = settings.create_runtime_cache()
            self._read()
        settings.set_runtime_cache(self._cache)

    def keep(self) -> None:
        """Write what was compiled, if it is more than was read; a folder that takes nothing is said in the log."""
        if self._file is None or self._cache is None:
            return
        content = bytes(self._cache.serialize())
        if content == self._kept:
            return
        try:
            whole_file.write(self._file, lambda file: file.write_bytes(content))
            self._kept = content
        except OSError as error:
            logger.warning("compiled kernels are not kept: %s: %s", self._file, error.strerror)

    def _read(self) -> None:
        if self._file is None:
            return
        try:
            if not self._file.is_file() or self._file.is_symlink() or self._file.stat().st_size > MOST_BYTES:
                return
            content = self._file.read_bytes()
        except OSError:  # as if there were none: they are compiled anew
            return
        self.found = bool(self._cache.deserialize(content))
        self._kept = content if self.found else b""


def _file_of(plan: Path) -> Path | None:
    """Name the file for a plan; None where its record does not say what it is, or there is no home folder."""
    try:
        digest = small_file.read_json(plan.with_name(plan_record(plan.name))).get("sha256")
        home = remembered.home()
    except (InputError, RuntimeError, AttributeError):
        return None
    if not isinstance(digest, str) or len(digest) != 64 or not set(digest) <= set("0123456789abcdef"):
        return None
    return home / FOLDER / f"{digest}.cache"
