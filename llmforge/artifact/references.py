"""How commands name an artifact: by its path, `NAME/VERSION`, `NAME:TAG`, or the beginning of a version."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from llmforge.artifact import tags, versions
from llmforge.artifact.sealed import MANIFEST, is_name
from llmforge.base.errors import InputError, UsageError

LATEST = "latest"  # in place of a tag: the newest version
SHORTEST = 4  # characters of a version that stand for it without its name


def resolve(text: str, out: Path, *, newest: bool = True) -> Path:
    """Find the folder of the artifact that `text` names.

    A path to an artifact is that path; one to the folder of its versions, the newest of them. Else, under `out`:
    `NAME`, the newest version; `NAME:TAG`; `NAME:latest`, where no tag is called so; `NAME/VERSION`; `NAME/…` or `…`,
    where … begins one version alone (of all names: at least 4 characters). What is none of them is returned as a path.
    Without `newest` a name stands for no version.

    Raises:
        InputError: the name is there and has no such tag or version.
        UsageError: several versions begin so.
    """
    path = Path(text)
    try:
        if path.exists():
            if (path / MANIFEST).exists():
                return path
            places = (path, out / text) if is_name(text) else (path,)  # a folder may be called as an artifact is
            return next((_newest(each, newest) for each in places if versions.version_names(each)), path)
    except OSError as error:
        raise InputError(
            f"{text}: cannot be read: {error.strerror}", hint=f"check the permissions of {text}"
        ) from error
    name, colon, tag = text.partition(":")
    if colon and is_name(name) and (out / name).is_dir():
        return _tagged(out / name, tag)
    if is_name(text):
        if (out / text).is_dir():
            return _newest(out / text, newest)
        parents = [out / name for name in versions.names(out)] if len(text) >= SHORTEST else []
        return _beginning(text, parents) or path
    name, _, beginning = text.partition("/")
    if is_name(name) and is_name(beginning) and (out / name).is_dir():
        found = _beginning(beginning, [out / name])
        if found is None:
            raise InputError(f"{text}: {name} has no such version in {out}", hint=_versions(out / name))
        return found
    return path


def _newest(parent: Path, newest: bool) -> Path:
    """Return the newest version in `parent`; `parent` itself, which names its versions where it is opened, if none."""
    found = versions.listed(parent.parent, parent.name) if newest and versions.version_names(parent) else []
    return next((each.path for each in found if each.artifact is not None), parent)


def _tagged(parent: Path, tag: str) -> Path:
    version = tags.current(parent, tag)
    if version is None and tag == LATEST:
        return _newest(parent, newest=True)
    if version is None:
        known = ", ".join(f"{parent.name}:{each}" for each in tags.current_of_all(parent))
        raise InputError(
            f"{parent.name}:{tag}: no such tag in {parent.parent}",
            hint=f"known: {known}" if known else f"set it: llmforge tag {parent.name}/VERSION {tag}",
        )
    return parent / version


def _beginning(beginning: str, parents: Sequence[Path]) -> Path | None:
    """Find the one version that is called so, else the one that begins so."""
    all_ = [parent / version for parent in parents for version in versions.version_names(parent)]
    found = [path for path in all_ if path.name == beginning] or [p for p in all_ if p.name.startswith(beginning)]
    if len(found) > 1:
        named = ", ".join(f"{path.parent.name}/{path.name}" for path in found)
        raise UsageError(f"{beginning}: several versions begin so: {named}", hint="give more characters")
    return found[0] if found else None


def _versions(parent: Path) -> str:
    found = versions.version_names(parent)
    return f"known: {', '.join(found)}" if found else f"see `llmforge ls --out {parent.parent}`"
