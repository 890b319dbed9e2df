"""The verdict of an artifact, recomputed from the figures in its report: what a manifest says of itself is no proof."""

from __future__ import annotations

from collections.abc import Mapping

from pydantic import TypeAdapter, ValidationError

from llmforge.artifact import REPORT, Artifact
from llmforge.base.errors import InputError
from llmforge.evaluation import gates
from llmforge.evaluation.gates import GateResult
from llmforge.metrics import catalog
from llmforge.metrics.catalog import Measured
from llmforge.metrics.latency import Latency
from llmforge.metrics.quality import Quality
from llmforge.recipe import GateSpec
from llmforge.report import model
from llmforge.report.model import EngineRecord

_SPECS = TypeAdapter(dict[str, GateSpec])


def judge(
    specs: Mapping[str, GateSpec], quality: Quality | None, latency: Latency | None, engine: EngineRecord
) -> tuple[GateResult, ...]:
    """Decide the gates of a recipe; what could not be measured leaves them undecided."""
    measured = Measured(quality, latency, None if engine.pending else engine.size_bytes)
    return gates.judge(specs, catalog.estimates(measured), unmeasured=engine.unmeasured)


def recompute(artifact: Artifact) -> tuple[GateResult, ...]:
    """Decide the gates of the recipe of `artifact` by the figures in its report; `Artifact.verify` looks at the files.

    Raises:
        InputError: there is no report, or the verdict that the manifest gives is another.
    """
    file = artifact.path / REPORT / "report.json"
    if not file.is_file():
        raise InputError(f"{artifact.path}: it has no report/report.json, by which its gates could be judged")
    record = model.read(file)
    try:
        specs = _SPECS.validate_python(artifact.manifest.recipe.get("gates", {}))
    except ValidationError as error:
        raise InputError(
            f"{artifact.path}: the gates in its manifest are damaged: {error.errors()[0]['msg']}"
        ) from error
    results = judge(specs, record.quality, record.latency, record.engine)
    found = gates.overall(results).value
    if found != artifact.manifest.verdict:
        raise InputError(
            f"{artifact.path}: the manifest says that its gates end with {artifact.manifest.verdict}; the figures in "
            f"its report give {found}",
            hint="build it again",
        )
    return results
