"""The model card: what the Hub shows of an artifact, Markdown after a front matter in YAML."""

from __future__ import annotations

import io
from collections.abc import Sequence

from ruamel.yaml import YAML

from llmforge.gates.records import Report
from llmforge.report import render
from llmforge.rewrite.pass_base import Numerics

ORIGIN = (("report/report.html", "the whole evidence of the build"),)


def write(
    report: Report, *, repository: str | None, revision: str | None, origin: Sequence[tuple[str, str]] = ()
) -> str:
    """Write the card of what `report` is about.

    `repository` is the checkpoint's on the Hub, where that is known, and `revision` its commit. `origin` names files of
    the artifact that tell where it comes from, and what each is.
    """
    facts = {"revision": revision, "origin": (*ORIGIN, *origin)}
    return _front_matter(report, repository) + "\n" + render.to_card(report, facts)


def _front_matter(report: Report, repository: str | None) -> str:
    """Write the Hub's metadata. A license is not among it: that of the checkpoint is not known here."""
    lossy = any(done.numerics is Numerics.LOSSY for done in report.passes)
    data: dict[str, object] = {
        "library_name": "llmforge",
        "pipeline_tag": "text-generation",
        "tags": ["llmforge", report.engine.backend, report.target.kind, *(["quantized"] if lossy else [])],
    }
    if repository is not None:
        data["base_model"] = repository
        if lossy:  # the Hub has no word for the same weights in another form
            data["base_model_relation"] = "quantized"
    stream = io.StringIO()
    yaml = YAML(typ="safe")
    yaml.default_flow_style = False
    yaml.dump(data, stream)
    return f"---\n{stream.getvalue()}---\n"
