"""The model card: what the Hub shows of an artifact, Markdown after a front matter in YAML."""

from __future__ import annotations

import io
import math
from collections.abc import Mapping, Sequence
from pathlib import PurePath

from ruamel.yaml import YAML

from llmforge.gates.records import Report
from llmforge.metrics import catalog
from llmforge.metrics.intervals import Estimate
from llmforge.metrics.quality_metrics import QualityMetric
from llmforge.report import render
from llmforge.rewrite.pass_base import Numerics
from llmforge.runtime.encoder import EncoderConfig

ORIGIN = (("report/report.html", "the whole evidence of the build"),)


def write(
    report: Report,
    *,
    repository: str | None,
    revision: str | None,
    encoder: EncoderConfig | None = None,
    origin: Sequence[tuple[str, str]] = (),
) -> str:
    """Write the card of what `report` is about.

    `repository` is the checkpoint's on the Hub, where that is known, and `revision` its commit. `encoder` says what an
    engine embeds or scores by; None: it predicts tokens. `origin` names files of the artifact that tell where it comes
    from, and what each is.
    """
    facts = {"revision": revision, "encoder": encoder, "origin": (*ORIGIN, *origin)}
    return _front_matter(report, repository, encoder) + "\n" + render.to_card(report, facts)


def _front_matter(report: Report, repository: str | None, encoder: EncoderConfig | None) -> str:
    """Write the Hub's metadata. A license is not among it: that of the checkpoint is not known here."""
    lossy = any(done.numerics is Numerics.LOSSY for done in report.passes)
    data: dict[str, object] = {
        "library_name": "llmforge",
        "pipeline_tag": _pipeline(encoder),
        "tags": ["llmforge", report.engine.backend, report.target.kind, *(["quantized"] if lossy else [])],
    }
    if repository is not None:
        data["base_model"] = repository
        if lossy:  # the Hub has no word for the same weights in another form
            data["base_model_relation"] = "quantized"
    if (results := _results(report)) is not None:
        data["model-index"] = [{"name": report.name, "results": [results]}]
    stream = io.StringIO()
    yaml = YAML(typ="safe")
    yaml.default_flow_style = False
    yaml.dump(data, stream)
    return f"---\n{stream.getvalue()}---\n"


def _pipeline(encoder: EncoderConfig | None) -> str:
    """Name the Hub's task, https://huggingface.co/tasks."""
    if encoder is None:
        return "text-generation"
    if encoder.kind == "embedder":
        return "sentence-similarity"
    return "text-classification" if encoder.classifies else "text-ranking"


def _results(report: Report) -> dict[str, object] | None:
    """Give the figures of quality as the Hub's `model-index` has evaluation results; None: there are none."""
    quality = report.quality
    if quality is None:
        return None
    metrics = [
        {"type": metric.name, "name": metric.title, "value": found.value}
        for metric in catalog.of_kind(QualityMetric)
        if isinstance(found := quality.figures.get(metric.name), Estimate) and math.isfinite(found.value)
    ]
    validation = report.recipe.get("validation") or {}
    data = (validation.get("quality") or {}).get("data") or "validation text"
    files = data if isinstance(data, list) else [data]
    names = [each["name"] if isinstance(each, Mapping) else PurePath(each).name for each in files]
    return {
        "task": {"type": "text-generation"},
        "dataset": {"type": "text", "name": ", ".join(names)},
        "metrics": metrics,
    }
