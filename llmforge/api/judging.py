"""`llmforge.gate` and `llmforge.evaluate`: verdicts on what was measured, and more to measure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from llmforge.artifact import Artifact
from llmforge.artifact.references import resolve
from llmforge.base import extras, folders
from llmforge.base.errors import UsageError
from llmforge.base.progress import Progress
from llmforge.gates import release
from llmforge.gates.decision import Verdict
from llmforge.gates.release import ReleaseQuestion
from llmforge.recipe import GatesFile
from llmforge.report import release_text

if TYPE_CHECKING:
    from llmforge.gates.release import Judgement
    from llmforge.metrics.tasks import TaskResult


@dataclass(frozen=True)
class Judged:
    """The verdict on a release. A notebook shows it as a table."""

    judgement: Judgement

    @property
    def verdict(self) -> Verdict:
        """How all gates together ended: pass, fail or inconclusive."""
        return self.judgement.verdict

    @property
    def passed(self) -> bool:
        """Whether all gates passed."""
        return self.verdict is Verdict.PASS

    def __str__(self) -> str:
        return "\n".join(release_text.text(self.judgement))

    def _repr_markdown_(self) -> str:
        return release_text.markdown(self.judgement)


def gate(
    artifact: str | Path,
    *,
    against: str | Path | None = None,
    gates: Mapping[str, Mapping[str, float]] | str | Path | None = None,
    out: str | Path | None = None,
) -> Judged:
    """Decide gates on the evidence of an artifact, alone and against an earlier one, as `llmforge gate` does.

    `gates` maps metrics to limits ({"kld_mean": {"max": 0.02}}), or is a file of them; default: those of the recipe.
    Nothing is measured: limits on how latency moves are left undecided.

    Raises:
        llmforge.base.errors.ForgeError: an artifact is damaged, or limits make no sense.
    """
    home = folders.artifacts(out)
    subject = _subject(artifact, home)
    source = "gates"
    if gates is None:
        specs, source = dict(subject.sealed_limits), f"the recipe of {subject.side.reference}"
    elif isinstance(gates, str | Path):
        specs, source = dict(GatesFile.load(Path(gates)).gates), str(gates)
    else:
        specs = dict(GatesFile.of(gates).gates)
    release.check(specs, source, hint='give gates={"kld_mean": {"max": 0.02}}')
    earlier = None if against is None else _subject(against, home)
    return Judged(release.judge(ReleaseQuestion(subject, specs, earlier)))


def _subject(artifact: str | Path, out: Path) -> release.MeasuredArtifact:
    return release.MeasuredArtifact.checked(Artifact.open(resolve(str(artifact), out)))


def evaluate(
    artifact: str | Path,
    tasks: Sequence[str],
    *,
    recipe: str | Path | None = None,
    checkpoint: str | Path | None = None,
    limit: int | None = None,
    out: str | Path | None = None,
    progress: Progress | None = None,
    **options: Any,
) -> tuple[TaskResult, ...]:
    """Run tasks on an artifact and on its checkpoint, and add the evidence to the artifact, as `llmforge eval` does.

    The checkpoint is the recipe's, or given itself; default: that of the artifact's own recipe. `options`: few_shot.

    Raises:
        llmforge.base.errors.ForgeError: there is no such task, or the artifact is of another checkpoint.
    """
    extras.require("build", "eval")
    from llmforge import cache
    from llmforge.checkpoint import Checkpoint
    from llmforge.compile import validating
    from llmforge.diagnosis import reproducing
    from llmforge.measure.scoring import TaskRequest
    from llmforge.recipe import Recipe

    if recipe is not None and checkpoint is not None:
        raise UsageError("give either recipe or checkpoint, of what the artifact was built from")
    path = resolve(str(artifact), folders.artifacts(out))
    if checkpoint is not None:
        folder = Path(checkpoint)
    elif recipe is not None:
        folder = Recipe.load(Path(recipe)).fetched()
    else:
        with TemporaryDirectory() as scratch:
            folder = reproducing.recorded(path, None, (), Path(scratch)).fetched()
    found = validating.evaluate(
        path,
        TaskRequest(tuple(tasks), limit, **options),
        Checkpoint.open(folder),
        progress,
        cache=partial(cache.Cache, cache.default_folder(), cache.default_size()),
    )
    return tuple(found.tasks)
