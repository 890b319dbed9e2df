"""Answers to tasks in the build cache: a run that was killed goes on where it was."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from llmforge.base.plugins import Package
from llmforge.compile.reuse import Reuse
from llmforge.measure.scoring import AnswerCache, Keep

ANSWERS = "answers.json"
_CODE = (
    "llmforge.measure.scoring",
    "llmforge.measure.decisive_tokens",
    "llmforge.measure.baseline",
    "llmforge.measure.padded_batch",
    "llmforge.runtime",
)


@dataclass(frozen=True)
class CachedAnswers(Keep):
    """Blocks of requests whose answers are kept in a cache."""

    reuse: Reuse
    side: str  # digest of what answers

    def block(self, kind: str, requests: Sequence[Any], compute: Callable[[], list[Any]]) -> list[Any]:
        """Give what was answered to a block of requests, or `compute` it; JSON has no tuples, so that all are lists."""
        asked = hashlib.sha256(json.dumps(requests).encode()).hexdigest()
        key = self.reuse.key("task-answers", _CODE, side=self.side, requests=asked, asks=kind)
        with self.reuse.cache.computing(key) as entry:
            if entry is not None:
                return list(entry.json(ANSWERS))
            found = compute()
            self.reuse.cache.put(key, partial(_write, found))
            return found


@dataclass(frozen=True)
class BuildCacheAnswers(AnswerCache):
    """Keeps answers in the cache of a build."""

    reuse: Reuse

    def of(self, side: str) -> Keep:
        """Keep the answers of a side, by the digest of what answers."""
        return CachedAnswers(self.reuse, side)

    def code_of(self, package: Package) -> str:
        """Give the digest of a package's code, which may change under one version."""
        return self.reuse.code.digest_of(package)


def _write(found: list[Any], folder: Path) -> None:
    (folder / ANSWERS).write_text(json.dumps(found), encoding="utf-8")
