"""Checks of an artifact before anything of it is loaded: that it is whole, and that its gates did not fail.

Manifest, evidence, the set of files and their sizes are checked each time; the hashes of files once, as long as the
file does not change (llmforge.base.hashed_files). The verdict is the one that the evidence gives; whether it follows
from what was measured, `llmforge verify` computes again.
"""

from __future__ import annotations

import stat
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

from llmforge.artifact import sealed
from llmforge.artifact.sealed import Manifest, Verdict
from llmforge.base import hashed_files
from llmforge.base.errors import GateFailed, InputError

LOADED = ("engine/", "tokenizer/")  # what the runtime reads
_HINT = "run `llmforge verify ARTIFACT`; fetch or build the artifact again"
_LISTED = 5  # files that a message names


@dataclass(frozen=True)
class AdmittedArtifact:
    """An artifact that may be loaded."""

    manifest: Manifest
    verdict: Verdict
    notes: tuple[str, ...]  # what whoever loads it should know


def admit(
    folder: Path,
    *,
    allow: str | None = None,
    rehash: bool = False,
    parts: Collection[str] = LOADED,
    signed: Collection[str] | None = None,
    how_to_allow: str = "--allow fail",
) -> AdmittedArtifact:
    """Check the artifact in `folder`, of which `parts` (paths' beginnings) are going to be used.

    `allow` names a verdict to be taken as it is. `rehash`: believe no hash that was computed before. `signed` are the
    digests of the records that count; None: all do.

    Raises:
        InputError: a file is missing, was changed or added; manifest or evidence are damaged.
        GateFailed: its verdict is FAIL, and `allow` does not say "fail".
    """
    manifest = sealed.open_manifest(folder)
    records = sealed.open_evidence(folder, manifest.content_digest)
    if signed is not None:
        records = tuple(record for record in records if record.digest in signed)
    verdict = sealed.effective(records)
    called = f"{manifest.name} {manifest.version}"
    if verdict == "fail" and allow != "fail":
        raise GateFailed(
            f"{folder}: the verdict of {called} is FAIL: a gate failed, or a pass exceeds its budget",
            hint=f"see `llmforge inspect`; to use it all the same: {how_to_allow}",
        )
    forgotten = _check_files(folder, manifest, tuple(parts), rehash)
    notes = []
    if verdict == "inconclusive" and allow != "inconclusive":
        notes.append(f"the gates of {called} are inconclusive: nothing shows that it is as good as it has to be")
    if forgotten is not None:
        notes.append(f"hashes of files cannot be remembered, and are computed at each start: {forgotten}")
    return AdmittedArtifact(manifest, verdict, tuple(notes))


def _check_files(folder: Path, manifest: Manifest, parts: tuple[str, ...], rehash: bool) -> str | None:
    """Compare the files below `parts` with the manifest; return why their hashes could not be remembered."""
    wanted = {path: file for path, file in manifest.files.items() if path.startswith(parts)}
    try:
        present = {f"{part}{path}" for part in parts for path in sealed.walk(folder / part)}
        statuses = {path: (folder / path).lstat() for path in wanted if path in present}
        changed = [
            path
            for path, status in statuses.items()
            if not stat.S_ISREG(status.st_mode) or status.st_size != wanted[path].size_bytes
        ]
        problems = {
            "missing": wanted.keys() - present,
            "changed": set(changed),
            "not in the manifest": present - wanted.keys(),
        }
        forgotten = None
        if not any(problems.values()):
            digests, forgotten = hashed_files.all_sha256([folder / path for path in wanted], again=rehash)
            problems["changed"] = {path for path in wanted if digests[folder / path] != wanted[path].sha256}
    except OSError as error:
        raise InputError(
            f"{error.filename or folder}: cannot be read: {error.strerror}", hint=f"check the permissions of {folder}"
        ) from error
    refuse_changed(folder, problems)
    return forgotten


def refuse_changed(folder: Path, problems: dict[str, Collection[str]] | dict[str, set[str]]) -> None:
    """Refuse an artifact some of whose files are not as they were published: what is wrong → which files.

    Raises:
        InputError: there are such files; names the first of each kind.
    """
    found = [f"{what}: {_listed(sorted(paths))}" for what, paths in problems.items() if paths]
    if found:
        raise InputError(f"{folder}: the artifact was changed after it was published: {'; '.join(found)}", hint=_HINT)


def _listed(paths: list[str]) -> str:
    more = f" and {len(paths) - _LISTED} more" if len(paths) > _LISTED else ""
    return ", ".join(paths[:_LISTED]) + more
