"""A line of sealed records in a folder, each `evidence/<SHA-256 of its bytes>.json`, and naming the one before it."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, Protocol, Self, TypeVar

from pydantic import ValidationError

from llmforge.artifact import sealed
from llmforge.base import whole_file
from llmforge.base.errors import InputError


class LinkedRecord(Protocol):
    """A record that may stand in a line."""

    previous: str | None  # digest of the record before this one

    @classmethod
    def model_validate_json(cls, json_data: bytes) -> Self:
        """Read it."""
        ...

    def model_copy(self, *, update: dict[str, Any]) -> Self:
        """Copy it with other fields."""
        ...

    def to_json(self) -> str:
        """Write it."""
        ...


R = TypeVar("R", bound=LinkedRecord)


@dataclass(frozen=True)
class SealedLine(Generic[R]):
    """How records of one kind are kept.

    `confirm` raises `ForgedVerdict` where a record, of a file, says something else than what was measured.
    """

    kind: type[R]
    name: str  # of one, for a reader: "judgement"
    begin: str  # how one gets the first: the hint where there is none
    again: str  # … and another in place of one that was changed
    confirm: Callable[[R, Path], None]

    def seal(self, folder: Path, made: R) -> tuple[Path, R]:
        """Write a record behind those that `folder` has; give its file, and what was written.

        Raises:
            InputError, ForgedVerdict: as `read`.
            OSError: it cannot be written.
        """
        before = self.read(folder) if (folder / sealed.EVIDENCE).is_dir() else ()
        made = made.model_copy(update={"previous": digest_of(before[-1]) if before else None})
        file = folder / sealed.EVIDENCE / f"{digest_of(made)}.json"

        def write(partial: Path) -> None:
            partial.write_text(made.to_json(), encoding="utf-8")
            partial.chmod(sealed.MODE)

        whole_file.write(file, write)
        return file, made

    def read(self, folder: Path) -> tuple[R, ...]:
        """Read the records of a folder, oldest first, and confirm each.

        Raises:
            InputError: there are none, one is none of this version, was changed, or they do not form one line.
            ForgedVerdict: one says something else than what was measured.
        """
        found: dict[str | None, R] = {}
        for file in sorted((folder / sealed.EVIDENCE).glob("*.json")):
            raw = sealed.read_file(file, sealed.LARGEST_RECORD)
            if hashlib.sha256(raw).hexdigest() != file.stem:
                raise InputError(f"{file}: was changed: its name is not its SHA-256", hint=self.again)
            try:
                made = self.kind.model_validate_json(raw)
            except ValidationError as error:
                first = error.errors()[0]
                where = ".".join(str(part) for part in first["loc"]) or "the file"
                raise InputError(f"{file}: no {self.name} of this version: {where}: {first['msg']}") from error
            if made.previous in found:
                raise InputError(f"{file}: two records follow {made.previous or 'none'}", hint="keep one of them")
            found[made.previous] = made
            self.confirm(made, file)
        line: list[R] = []
        following: str | None = None
        while following in found:
            line.append(found.pop(following))
            following = digest_of(line[-1])
        if not line or found:
            what = "lacks a record: they do not form one line" if found else f"has no {self.name}"
            raise InputError(f"{folder}: {what}", hint=self.begin)
        return tuple(line)


def digest_of(made: LinkedRecord) -> str:
    """Give the SHA-256 of a record's bytes, by which the next one names it."""
    return hashlib.sha256(made.to_json().encode()).hexdigest()
