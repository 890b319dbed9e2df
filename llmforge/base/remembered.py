"""Texts that commands remember for the next one, by keys, in files of the user's cache folder."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from llmforge.base import small_file, whole_file
from llmforge.base.errors import InputError


def home() -> Path:
    """Return llmforge's cache folder of the user.

    Raises:
        RuntimeError: there is no home folder.
    """
    given = Path(os.environ.get("XDG_CACHE_HOME", ""))
    base = given if given.is_absolute() else Path.home() / ".cache"  # a relative one is to be ignored
    return base / "llmforge"


@dataclass(frozen=True)
class RememberedTexts:
    """The last `most` texts that were added to `file`."""

    file: str
    most: int

    def read(self) -> dict[str, str]:
        """Return all of them by their keys; what cannot be read is nothing, and is computed again."""
        try:
            found = small_file.read_json(home() / self.file)
        except (InputError, RuntimeError):
            return {}
        if not isinstance(found, dict):
            return {}
        return {key: text for key, text in found.items() if isinstance(text, str)}

    def add(self, new: Mapping[str, str]) -> str | None:
        """Add some; of two that add at once one may be forgotten. Return why they could not be written."""
        kept = dict(list({**self.read(), **new}.items())[-self.most :])
        try:
            whole_file.write(home() / self.file, lambda file: file.write_text(json.dumps(kept, indent=0), "utf-8"))
        except (OSError, RuntimeError) as error:
            return str(error)
        return None
