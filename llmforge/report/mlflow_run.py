"""The evidence of an artifact as a run of MLflow: figures, options of the recipe, lineage, and the report's files."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from llmforge.artifact import CARD, Artifact
from llmforge.artifact.sealed import MANIFEST
from llmforge.base.errors import EnvironmentLacks, UsageError
from llmforge.base.wording import cut
from llmforge.gates.records import Report
from llmforge.metrics import catalog

FOLDER = "llmforge"  # of the files, in the run
EVIDENCE = "llmforge.evidence"  # the tag that tells runs of artifacts apart
_LONGEST = 6000  # characters of a parameter that MLflow takes
_AT_ONCE = 100  # parameters, and metrics, of a request: 100 and 1,000 are allowed


@dataclass(frozen=True)
class MlflowRun:
    """A run; `made`: it was not there before."""

    experiment: str
    run: str
    made: bool


def metrics(report: Report) -> dict[str, float]:
    """Give every figure that a gate can decide on, with its interval as `NAME.low` and `NAME.high`."""
    found: dict[str, float] = {}
    for name, estimate in catalog.estimates(report.measured).items():
        bounds = {} if estimate.is_exact else {f"{name}.low": estimate.low, f"{name}.high": estimate.high}
        each = {name: estimate.value, **bounds}
        found |= {key: value for key, value in each.items() if value is not None and math.isfinite(value)}
    return found


def parameters(recipe: Mapping[str, Any]) -> dict[str, str]:
    """Write the options of a recipe by their paths, `passes.2.quantize-weights.bits`."""
    return {path: cut(str(value), _LONGEST) for path, value in _leaves(recipe, "")}


def _leaves(value: Any, path: str) -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping) and value:
        for name, each in value.items():
            yield from _leaves(each, f"{path}.{name}" if path else str(name))
    elif isinstance(value, list | tuple) and any(isinstance(each, Mapping) for each in value):
        for place, each in enumerate(value):
            yield from _leaves(each, f"{path}.{place}")
    else:
        yield path, value


def tags(opened: Artifact, report: Report) -> dict[str, str]:
    """Say what it was made of, and how each gate ended."""
    manifest = opened.manifest
    return {
        "llmforge.artifact": f"{manifest.name}/{manifest.version}",
        "llmforge.content": manifest.content_digest,
        EVIDENCE: opened.evidence[-1].digest,
        "llmforge.checkpoint": report.checkpoint.name,
        "llmforge.checkpoint.digest": manifest.checkpoint,
        "llmforge.target": manifest.target,
        "llmforge.backend": report.engine.backend,
        "llmforge.verdict": report.verdict.value,
        **{f"llmforge.gate.{gate.metric}.{gate.bound}": gate.verdict.value for gate in report.gates},
    }


def write(opened: Artifact, report: Report, *, uri: str | None, experiment: str, name: str | None = None) -> MlflowRun:
    """Write the newest evidence of an artifact as a run; one that is there already stays as it is.

    `uri` is the tracking server's, or what MLFLOW_TRACKING_URI says; credentials are MLflow's own variables.

    Raises:
        EnvironmentLacks: there is no answer, or the server refuses.
        UsageError: the experiment cannot be used.
    """
    from mlflow import MlflowClient
    from mlflow.entities import Metric, Param, RunTag
    from mlflow.exceptions import MlflowException

    try:
        client = MlflowClient(tracking_uri=uri)
        known = client.get_experiment_by_name(experiment)
        if known is not None and known.lifecycle_stage != "active":
            raise UsageError(f"the experiment {experiment!r} was deleted", hint="restore it, or use another name")
        number = client.create_experiment(experiment) if known is None else known.experiment_id
        lineage = tags(opened, report)
        same = f"tags.`{EVIDENCE}` = '{lineage[EVIDENCE]}' and attributes.status = 'FINISHED'"
        if found := client.search_runs([number], filter_string=same, max_results=1):
            return MlflowRun(number, found[0].info.run_id, made=False)
        made = client.create_run(number, run_name=name or lineage["llmforge.artifact"])
        run, at = made.info.run_id, made.info.start_time
        figures = [Metric(key, value, at, 0) for key, value in metrics(report).items()]
        options = [Param(key, value) for key, value in parameters(opened.manifest.recipe).items()]
        client.log_batch(run, tags=[RunTag(key, value) for key, value in lineage.items()])
        for start in range(0, max(len(figures), len(options)), _AT_ONCE):
            part = slice(start, start + _AT_ONCE)
            client.log_batch(run, metrics=figures[part], params=options[part])
        for path in _files(opened):
            folder = "/".join([FOLDER, *path.split("/")[:-1]])
            client.log_artifact(run, str(opened.path / path), folder)
        client.set_terminated(run)
    except (MlflowException, OSError) as error:
        raise EnvironmentLacks(
            f"MLflow: {cut(str(error), 300)}", hint="check --tracking-uri, or MLFLOW_TRACKING_URI and its credentials"
        ) from error
    return MlflowRun(number, run, made=True)


def _files(opened: Artifact) -> list[str]:
    """Name what tells of the artifact: not the engine."""
    told = (CARD, MANIFEST, opened.evidence[-1].path)
    own = [path for path in opened.listed if path.startswith(("report/", "provenance/"))]
    return [path for path in (*told, *sorted(own)) if (opened.path / path).is_file()]
