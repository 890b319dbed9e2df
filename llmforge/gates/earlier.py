"""The earlier artifact that a release is held against."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from llmforge.artifact import Artifact, versions
from llmforge.artifact.references import resolve
from llmforge.base.errors import UsageError
from llmforge.gates import release
from llmforge.gates.release import MeasuredArtifact
from llmforge.recipe import GateSpec

LATEST, NOTHING = "latest-passed", "none"


def find(
    subject: MeasuredArtifact, specs: Mapping[str, GateSpec], named: str | None, out: Path
) -> tuple[MeasuredArtifact | None, tuple[str, ...]]:
    """Find the artifact that is `named`, and what is to be said of it; None: there is none to be held against.

    Where limits need one and none is named, it is the newest earlier version that passed, as with `LATEST`.

    Raises:
        InputError: a record of it is damaged, or says another verdict than its evidence.
        UsageError: no earlier version passed, or there is no such artifact.
    """
    needed = release.is_relative(specs)
    if named == NOTHING:
        return None, ("limits against an earlier artifact were left out: --against none",) if needed else ()
    if named is None and not needed:
        return None, ()
    if named is not None and named != LATEST:
        opened = Artifact.open(resolve(named, out))
    else:
        opened = _latest_passed(subject, out)
    unused = "no gate limits a change against the earlier artifact: add `rise_max` or `drop_max`"
    return MeasuredArtifact.checked(opened), () if needed else (unused,)


def _latest_passed(subject: MeasuredArtifact, out: Path) -> Artifact:
    parent = subject.opened.path.parent
    home = parent.parent if parent.name == subject.report.name else out
    made = subject.opened.evidence[0].created
    for each in versions.listed(home, subject.report.name):
        found = each.artifact
        if (
            found is not None
            and found.manifest.content_digest != subject.report.content
            and found.verdict == "pass"
            and found.evidence[0].created <= made
        ):
            return found
    raise UsageError(
        f"{subject.side.reference}: no earlier version of {subject.report.name} in {home} passed its gates",
        hint="name one with --against ARTIFACT; for a first release: --against none",
    )
