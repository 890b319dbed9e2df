"""Versions of artifacts below a folder: their list, and their removal."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from llmforge.artifact import tags
from llmforge.artifact.sealed import MANIFEST, is_name
from llmforge.artifact.store import Artifact, names_locked, open_version, remove_stale, take_away
from llmforge.base.errors import EnvironmentLacks, InputError, UsageError


@dataclass(frozen=True)
class Version:
    """A version that is there."""

    path: Path
    artifact: Artifact | None  # None: it cannot be read
    damage: str | None  # why not
    tags: tuple[str, ...]

    @property
    def reference(self) -> str:
        """Name it as commands take it: NAME/VERSION."""
        return f"{self.path.parent.name}/{self.path.name}"

    @property
    def size_bytes(self) -> int | None:
        """Size of all files that manifest and evidence list."""
        return None if self.artifact is None else sum(file.size_bytes for file in self.artifact.listed.values())

    @property
    def created(self) -> datetime | None:
        """When it was built the last time."""
        return None if self.artifact is None else self.artifact.evidence[-1].created


def names(out: Path) -> list[str]:
    """List the names of artifacts in `out` that have a version."""
    try:
        found = sorted(path.name for path in out.iterdir() if is_name(path.name) and path.is_dir())
    except FileNotFoundError:
        return []
    except OSError as error:
        raise InputError(f"{out}: cannot be read: {error.strerror}", hint="give another folder with --out") from error
    return [name for name in found if version_names(out / name)]


def version_names(parent: Path) -> list[str]:
    """List the names of the versions in the folder of one name; links, and what holds no manifest, are none."""
    return sorted(
        path.parent.name
        for path in parent.glob(f"*/{MANIFEST}")
        if is_name(path.parent.name) and not path.parent.is_symlink() and path.is_file()
    )


def listed(out: Path, name: str | None = None) -> list[Version]:
    """List the versions in `out`, or those of one name: by name, the newest first, damaged ones last.

    Raises:
        UsageError: there is no such name.
    """
    known = names(out)
    if name is not None and name not in known:
        raise UsageError(
            f"no artifact in {out} is named {name!r}",
            hint=f"known: {', '.join(known)}" if known else "give another folder with --out",
        )
    return [version for each in known if name in (None, each) for version in _of(out / each)]


def _of(parent: Path) -> list[Version]:
    tagged = tags.current_of_all(parent)
    found = []
    for version in version_names(parent):
        mine = tuple(tag for tag, on in tagged.items() if on == version)
        try:
            artifact = open_version(parent / version)
            _ = artifact.evidence
        except InputError as error:
            found.append(Version(parent / version, None, error.message, mine))
        else:
            found.append(Version(parent / version, artifact, None, mine))
    # `created` counts seconds; of two in one second the name decides, whatever order the disk gives
    return sorted(found, key=lambda each: 0.0 if each.created is None else -each.created.timestamp())


def remove(folders: Sequence[Path]) -> None:
    """Remove versions; a process that has their files open, or mapped, is not disturbed.

    Raises:
        UsageError: one of them has a tag; then none is removed.
        EnvironmentLacks: the file system does not let them be removed.
    """
    for folder in folders:
        _refuse_tagged(folder)
    for folder in folders:
        try:
            with names_locked(folder.parent):
                _refuse_tagged(folder)  # it may have got one since
                if not folder.exists():  # another process was quicker
                    continue
                delete = take_away(folder)
            delete()
        except OSError as error:
            raise _unremovable(folder, error) from error


def collect_garbage(out: Path, name: str | None = None, *, keep: int, dry_run: bool = False) -> list[Version]:
    """Remove all but the `keep` newest versions of each name, and return what was, or with `dry_run` would be, removed.

    What has a tag, and what the rollback of a tag would return to, stays and does not count; so does what cannot be
    read. Leftovers of killed builds go too.
    """
    removed: list[Version] = []
    for parent in dict.fromkeys(version.path.parent for version in listed(out, name)):
        try:
            with names_locked(parent):
                if not dry_run:
                    remove_stale(parent)
                kept = tags.needed(parent)
                old = [each for each in _of(parent) if each.artifact is not None and each.path.name not in kept][keep:]
                deletes = [] if dry_run else [take_away(each.path) for each in old]
            for delete in deletes:
                delete()
        except OSError as error:
            raise _unremovable(parent, error) from error
        removed += old
    return removed


def _refuse_tagged(folder: Path) -> None:
    name, version = folder.parent.name, folder.name
    if on := [tag for tag, at in tags.current_of_all(folder.parent).items() if at == version]:
        raise UsageError(
            f"{name}/{version} is tagged {', '.join(on)}",
            hint=f"put the tag on another version, or llmforge tag {name}/{version} {on[0]} --delete",
        )


def _unremovable(path: Path, error: OSError) -> EnvironmentLacks:
    return EnvironmentLacks(
        f"{error.filename or path}: cannot be removed: {error.strerror}", hint=f"check the permissions of {path.parent}"
    )
