"""Tags: names that move from version to version, and remember where they were.

A tag of `out/<name>` is the file `out/<name>/.tags/<tag>`, one JSON object a line for each time that it moved: when,
from which version to which, and how. The last line says where it is. The file only grows; it is written anew beside
itself and renamed, so that a kill leaves the old lines or the new ones. Whoever moves tags has the names of
`out/<name>` locked, and so has whoever removes versions.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Literal

from pydantic import AwareDatetime, BaseModel, ConfigDict, Field, ValidationError

from llmforge.artifact.sealed import MANIFEST
from llmforge.artifact.store import check_name, names_locked, open_version
from llmforge.base import small_file
from llmforge.base.errors import EnvironmentLacks, InputError, UsageError

FOLDER = ".tags"

How = Literal["tag", "promote", "rollback", "delete"]


class Move(BaseModel):
    """One time that a tag moved."""

    model_config = ConfigDict(frozen=True, extra="forbid", serialize_by_alias=True)

    when: AwareDatetime  # UTC
    how: How
    before: str | None = Field(alias="from")  # version; None: the tag was not there
    after: str | None = Field(alias="to")  # version; None: the tag was deleted


def names(parent: Path) -> list[str]:
    """List the tags that versions in `parent` have or had."""
    return sorted(path.name for path in (parent / FOLDER).glob("[!.]*"))


def history(parent: Path, tag: str) -> tuple[Move, ...]:
    """Read where a tag was, oldest first; nothing where it never was.

    Raises:
        InputError: the file is damaged.
    """
    file = parent / FOLDER / check_name(tag, "tag")
    if not file.exists():
        return ()
    try:
        return tuple(
            Move.model_validate_json(line) for line in small_file.read(file, small_file.SETTINGS_BYTES).splitlines()
        )
    except ValidationError as error:
        raise InputError(
            f"{file}: not the history of a tag: {error.errors()[0]['msg']}",
            hint=f"restore it, or delete it and tag again; it belongs to {parent.name}:{tag}",
        ) from error


def current(parent: Path, tag: str) -> str | None:
    """Return the version that a tag is on; None: it is not there."""
    moves = history(parent, tag)
    return moves[-1].after if moves else None


def current_of_all(parent: Path) -> dict[str, str]:
    """Return the version that each tag in `parent` is on."""
    found = {tag: current(parent, tag) for tag in names(parent)}
    return {tag: version for tag, version in found.items() if version is not None}


def needed(parent: Path) -> set[str]:
    """List the versions that tags are on, and those that a rollback would return to."""
    found: set[str] = set()
    for tag in names(parent):
        found.update(_stack(history(parent, tag))[-2:])
    return found


def move(parent: Path, tag: str, version: str, how: Literal["tag", "promote"] = "tag") -> Move | None:
    """Put a tag on a version; None: it is there already. Whether gates passed is the caller's to know.

    Raises:
        InputError: there is no such version.
        UsageError: the name is not allowed, or `how` is "tag" and gates decide over this tag.
    """
    with names_locked(parent):
        moves = history(parent, tag)
        if how == "tag" and any(each.how == "promote" for each in moves):
            raise UsageError(
                f"{parent.name}:{tag} is a tag that `llmforge promote` moves, after a look at the gates",
                hint=f"llmforge promote {parent.name} {version} --to {tag}",
            )
        before = moves[-1].after if moves else None
        if before == version:
            return None
        _check_version(parent, version)
        return _append(parent, tag, moves, version, how)


def previous(parent: Path, tag: str) -> str:
    """Return the version that a rollback of a tag returns to: where it was before, rollbacks taken back.

    Raises:
        UsageError: there is none.
    """
    stack = _stack(history(parent, tag))
    if len(stack) < 2:
        raise UsageError(
            f"{parent.name}:{tag} has no version to return to",
            hint=f"see `llmforge ls {parent.name} --history`",
        )
    return stack[-2]


def rollback(parent: Path, tag: str, version: str) -> Move:
    """Return a tag to `version`, which `previous` named.

    Raises:
        UsageError: the tag has moved since then.
        InputError: the version was removed.
    """
    with names_locked(parent):
        if previous(parent, tag) != version:
            raise UsageError(f"{parent.name}:{tag} was moved in the meantime", hint="roll back again")
        _check_version(parent, version)
        return _append(parent, tag, history(parent, tag), version, "rollback")


def delete(parent: Path, tag: str, version: str) -> Move:
    """Take a tag off `version`; its history stays.

    Raises:
        UsageError: it is not on that version.
    """
    with names_locked(parent):
        moves = history(parent, tag)
        if not moves or moves[-1].after != version:
            where = f"is on {moves[-1].after}" if moves and moves[-1].after is not None else "does not exist"
            raise UsageError(f"{parent.name}:{tag} {where}; it cannot be deleted from {version}")
        return _append(parent, tag, moves, None, "delete")


def _stack(moves: Sequence[Move]) -> list[str]:
    """Follow a tag: a rollback takes back the last move, deleting the tag all of them; the last is where it is."""
    stack: list[str] = []
    for each in moves:
        if each.after is None:
            stack.clear()
        elif each.how == "rollback":
            del stack[-1:]
        else:
            stack.append(each.after)
    return stack


def _check_version(parent: Path, version: str) -> None:
    folder = parent / check_name(version, "version")
    if not (folder / MANIFEST).is_file():
        raise InputError(
            f"{parent.name}/{version}: no such version in {parent.parent}",
            hint=f"see `llmforge ls {parent.name}`",
        )
    open_version(folder)


def _append(parent: Path, tag: str, moves: Sequence[Move], version: str | None, how: How) -> Move:
    """Write one more line; call it with the names of `parent` locked."""
    before = moves[-1].after if moves else None
    now = datetime.now(UTC).replace(microsecond=0)
    added = Move.model_validate({"when": now, "how": how, "from": before, "to": version})
    folder = parent / FOLDER
    written = folder / f".{tag}.new"
    try:
        folder.mkdir(exist_ok=True)
        with written.open("w", encoding="utf-8") as stream:
            stream.writelines(f"{each.model_dump_json()}\n" for each in (*moves, added))
            stream.flush()
            os.fsync(stream.fileno())
        written.rename(folder / tag)
    except OSError as error:
        with suppress(OSError):
            written.unlink()
        raise EnvironmentLacks(f"{folder / tag}: cannot be written: {error.strerror}") from error
    return added
