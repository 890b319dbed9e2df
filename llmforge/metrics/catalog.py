"""The catalog of metrics: one record each, that recipes, gates, and every form of a report read.

Who asks goes over `ALL` and knows no metric by name. A new metric of quality is a record in `quality_metrics` and,
where none of `tokens` says it, the value of a token that it is made from. One of a plug-in (llmforge.base.plugins) is
measured where a recipe names it, and found by its name.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from typing import Annotated, Any, TypeVar

from pydantic import AfterValidator
from pydantic_core import PydanticKnownError

from llmforge.base.errors import InputError
from llmforge.base.plugins import Plugin
from llmforge.base.wording import shown
from llmforge.metrics import adapters
from llmforge.metrics.artifact_metrics import ARTIFACT, BehaviourMetric, RetrievalMetric, SizeMetric, TaskMetric
from llmforge.metrics.artifact_metrics import RuntimeMetric as RuntimeMetric
from llmforge.metrics.intervals import Estimate
from llmforge.metrics.latency import Conditions, LatencyPoint, LoadTrial, TimedSide, Timing
from llmforge.metrics.latency_metrics import LATENCY, BestMetric, PointMetric, RunMetric, SlowestMetric, TimingMetric
from llmforge.metrics.metric import Measured, Metric
from llmforge.metrics.metric_plugins import SEAM as SEAM
from llmforge.metrics.quality import OfSums
from llmforge.metrics.quality_metrics import QUALITY
from llmforge.metrics.quality_metrics import AdapterMetric as AdapterMetric
from llmforge.metrics.quality_metrics import QualityMetric as QualityMetric
from llmforge.metrics.tasks import PREFIX, ScoreFigures
from llmforge.metrics.units import BITS_A_BYTE, RATIO, SHARE

Kind = TypeVar("Kind", bound=Metric)

ADAPTER_PATTERN = r"^adapter\.[a-z0-9][a-z0-9._-]{0,63}\.[a-z0-9_]{1,64}$"

TASK_PATTERN = r"^task\.[A-Za-z0-9_-]{1,128}\.[A-Za-z0-9_.-]{1,64}$"

BEHAVIOUR_PATTERN = r"^behaviour\.[a-z_]{1,64}\.[A-Za-z0-9_-]{1,64}$"  # of a slice

_OF_TEXT = {"perplexity": RATIO, "word_perplexity": RATIO, "byte_perplexity": RATIO, "bits_per_byte": BITS_A_BYTE}

ALL: tuple[Metric, ...] = (*QUALITY, *LATENCY, *ARTIFACT)


def of_quality(measured: Collection[str]) -> tuple[QualityMetric, ...]:
    """List the metrics of quality, in the order of the catalog, and those of plug-ins that were `measured`.

    Those of a plug-in that is not installed here are left out.
    """
    known = {metric.name for metric in ALL}
    others = (SEAM.find(name, known) for name in sorted(set(measured) - known) if name in SEAM.names())
    return (*of_kind(QualityMetric), *(metric for metric in others if metric is not None))


def plugin_of(name: str) -> Plugin | None:
    """Find the plug-in that brings the metric `name`; None: it is one of `ALL`, of a task, or there is none.

    Raises:
        PluginError: several bring it, or it is written for another interface.
    """
    return SEAM.plugin(name, {metric.name for metric in ALL})


def of_kind(kind: type[Kind]) -> tuple[Kind, ...]:
    """List the metrics of one kind, in the order of the catalog."""
    return tuple(metric for metric in ALL if isinstance(metric, kind))


Deciding = (
    QualityMetric
    | SlowestMetric
    | BestMetric
    | RunMetric
    | RuntimeMetric
    | SizeMetric
    | TaskMetric
    | AdapterMetric
    | BehaviourMetric
    | RetrievalMetric
)


def deciding() -> dict[str, Deciding]:
    """Give the metrics of every artifact that a gate can decide on, by name: one figure, exact or with bounds."""
    found = (metric for metric in ALL if isinstance(metric, Deciding))
    return {metric.name: metric for metric in found if metric.decides}


def limitable() -> dict[str, Deciding]:
    """Give those of `deciding` that a gate may limit: one direction is better."""
    return {name: metric for name, metric in deciding().items() if metric.better != "neither"}


def find(name: str) -> Deciding | None:
    """Give the metric of that name that a gate can decide on, of tasks and adapters, too; None: there is none."""
    return deciding().get(name) or _of_task(name) or _of_adapter(name) or _of_slice(name) or _of_plugin(name)


def _of_slice(name: str) -> BehaviourMetric | None:
    if re.fullmatch(BEHAVIOUR_PATTERN, name) is None:
        return None
    whole, _, part = name.rpartition(".")
    metric = deciding().get(whole)
    return metric.of_slice(part) if isinstance(metric, BehaviourMetric) else None


def _of_plugin(name: str) -> QualityMetric | None:
    metric = None if name not in SEAM.names() else SEAM.find(name, {each.name for each in ALL})
    return metric if metric is not None and metric.decides else None


def _known(name: str) -> str:
    """Allow the metrics that a gate can decide on, and say of others what pydantic says of a Literal."""
    if find(name) is None:
        known = [f"'{each}'" for each in (*limitable(), *SEAM.names())]
        raise PydanticKnownError("literal_error", {"expected": f"{', '.join(known[:-1])} or {known[-1]}"})
    return name


def _of_a_plugin(name: str) -> str:
    """Allow the metrics of plug-ins."""
    if SEAM.find(name, {metric.name for metric in ALL}) is None:
        known = ", ".join(SEAM.names()) or "none is installed"
        raise ValueError(f"no plug-in brings a metric {shown(name)}; known: {known}")
    return name


PluginMetricName = Annotated[str, AfterValidator(_of_a_plugin)]
MetricName = Annotated[str, AfterValidator(_known)]  # of one that a gate can decide on


def named(name: str) -> Deciding:
    """Give the metric of that name.

    Raises:
        InputError: there is none, as where a report is of another version.
    """
    metric = find(name)
    if metric is None:
        raise InputError(
            f"no gate decides on {shown(name)}",
            hint="what names it was written by another llmforge or with a plug-in that is not here, or was changed",
        )
    return metric


def names(*measured: Measured) -> tuple[str, ...]:
    """Name the metrics that a gate can decide on, with the scores of tasks and adapters that were `measured`."""
    figures = [name for each in measured if each.quality is not None for name in each.quality.figures]
    others = sorted({name for name in figures if _of_plugin(name) is not None} - {metric.name for metric in ALL})
    bounded = [name for name, metric in OF_ADAPTERS.items() if metric.decides]
    of_adapters = (
        f"{adapters.PREFIX}{found.adapter}.{name}" for each in measured for found in each.adapters for name in bounded
    )
    scores = (name for each in measured for name in each.scores)
    slices = (name for each in measured if each.behaviour is not None for name in each.behaviour.metrics)
    of_slices = (name for name in dict.fromkeys(slices) if name not in deciding())
    return (*deciding(), *others, *dict.fromkeys(scores), *dict.fromkeys(of_adapters), *of_slices)


OF_ADAPTERS: dict[str, QualityMetric] = {  # what is measured of each adapter: sums over its text, which are small
    metric.name: metric
    for metric in of_kind(QualityMetric)
    if isinstance(metric.form, OfSums) and metric.source == "text"
}


def _of_adapter(name: str) -> AdapterMetric | None:
    if re.fullmatch(ADAPTER_PATTERN, name) is None:
        return None
    adapter, _, of = name.removeprefix(adapters.PREFIX).rpartition(".")
    metric = OF_ADAPTERS.get(of)
    if metric is None or not metric.decides:
        return None
    title = f"{adapter}, {metric.title}"
    return AdapterMetric(name, title, metric.unit, metric.better, adapter, metric, ideal=metric.ideal)


def _of_task(name: str) -> TaskMetric | None:
    if re.fullmatch(TASK_PATTERN, name) is None:
        return None
    task, _, score = name.removeprefix(PREFIX).partition(".")
    of_text = next((unit for known, unit in _OF_TEXT.items() if score.startswith(known)), None)
    title = f"{task}, {score.replace('_', ' ')}"
    if of_text is not None:
        return TaskMetric(name, title, of_text, "lower", meaning="of texts of the task")
    return TaskMetric(name, title, SHARE, "higher", meaning="mean over the items of the task")


def needed(name: str) -> str | None:
    """Name what a recipe's `validation.latency` must ask for, so that a metric is measured; None: nothing."""
    metric = named(name)
    return metric.needs if isinstance(metric, RunMetric | SlowestMetric | BestMetric) else None


def estimates(measured: Measured) -> dict[str, Estimate]:
    """Read every figure that a gate can decide on, as far as it was measured."""
    found = ((name, named(name).estimate(measured)) for name in names(measured))
    return {name: estimate for name, estimate in found if estimate is not None}


def checkpoint_differences(measured: Measured) -> dict[str, Estimate]:
    """Read how far scores of tasks and behaviour are from the checkpoint's, as far as both were measured."""
    found = ((name, figures.difference) for name, figures in beside_checkpoint(measured).items())
    return {name: difference for name, difference in found if difference is not None}


def beside_checkpoint(measured: Measured) -> dict[str, ScoreFigures]:
    """Give the figures of what the checkpoint was asked as well, by the name of their metric."""
    scores = {name: score.figures for name, score in measured.scores.items()}
    behaviour = {} if measured.behaviour is None else measured.behaviour.metrics
    return {**scores, **behaviour, **({} if measured.retrieval is None else measured.retrieval.metrics)}


def point(prompt_tokens: int, artifact: TimedSide, baseline: TimedSide | None, conditions: Conditions) -> LatencyPoint:
    """Make every figure of one load of what was timed."""
    trial = LoadTrial(prompt_tokens, artifact, baseline, conditions)
    mine = [metric for metric in of_kind(PointMetric) if metric.is_of(encodes=artifact.encodes)]
    figures: dict[str, Any] = {metric.name: metric.figure(trial) for metric in mine}
    return LatencyPoint(
        prompt_tokens=prompt_tokens,
        batch=artifact.batch,
        artifact=_timing(artifact),
        baseline=None if baseline is None else _timing(baseline),
        **figures,
    )


def _timing(side: TimedSide) -> Timing:
    mine = [metric for metric in of_kind(TimingMetric) if metric.is_of(encodes=side.encodes)]
    figures: dict[str, Any] = {metric.name: metric.figure(side) for metric in mine}
    return Timing(
        generations_ms=tuple(tuple(durations.tolist()) for durations in side.generations),
        energy_j=None if side.energy_j is None else tuple(side.energy_j),
        **{name: figure for name, figure in figures.items() if figure is not None},
    )
