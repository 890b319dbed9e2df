"""A new metric is one record: with no other file touched it decides a gate and shows in every form of a report."""

from __future__ import annotations

import json
import os
import re
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner
from numpy.typing import NDArray
from rich.console import Console

from llmforge import passes, recipe
from llmforge.base.errors import InputError, RecipeError
from llmforge.checkpoint.text import TokenWindow
from llmforge.cli import cli
from llmforge.compile.evidence import Evidence
from llmforge.gates.decision import Verdict, overall
from llmforge.gates.records import Report
from llmforge.measure import quality
from llmforge.metrics import catalog, units
from llmforge.metrics.catalog import QualityMetric
from llmforge.metrics.quality import OfSums, Quality
from llmforge.metrics.tokens import TokenBlock, TokenValue
from llmforge.recipe import Recipe
from llmforge.report import render

from ..models.logits import V, random_logits
from ..report.test_pages import graph
from ..samples import reports, stored


def moved(block: TokenBlock) -> NDArray[np.bool_]:
    """Whether the true token has another rank than in the reference [R]."""
    ranks = [
        (logits > np.take_along_axis(logits, block.targets[:, None], -1)).sum(-1)
        for logits in (block.reference, block.logits)
    ]
    return ranks[0] != ranks[1]


RANK_MOVED = QualityMetric(
    name="rank_moved",
    title="Rank moved",
    meaning="tokens whose rank is not the baseline's",
    unit=units.SHARE,
    better="lower",
    form=OfSums((TokenValue("rank_moved", moved),), lambda tokens, moved: moved / tokens),
    key=9,
)

RECIPE = """
schema: 1
name: sample
checkpoint: sample-llama
target: cpu-avx2
engine: {max_context: 256}
passes: []
validation:
  quality: {data: evaluation.jsonl, context: 128}
gates:
  rank_moved: {max: 0.01}
"""


def compared(scale: float = 0.1) -> Quality:
    """Compare made-up logits, of which noise of this scale moves some ranks."""
    table, noise, rng = random_logits(7, V), random_logits(8, V, scale), np.random.default_rng(0)
    windows = [TokenWindow(f"doc-{i}", rng.integers(0, V, rng.integers(5, 30))) for i in range(12)]
    return quality.compare(windows, lambda ids: table[ids], lambda ids: table[ids] + noise[ids])


@pytest.fixture
def registered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(catalog, "ALL", (*catalog.ALL, RANK_MOVED))


@pytest.fixture
def loaded(tmp_path: Path, registered: None) -> Recipe:
    path = tmp_path / "r.yaml"
    path.write_text(RECIPE)
    return Recipe.load(path)


@pytest.fixture
def report(loaded: Recipe) -> Report:
    found = compared()
    results = Evidence(found, None, "the checkpoint").judge(loaded.gates, reports.ENGINE, reports.CHECKPOINT)
    return reports.make(quality=found, gates=results, verdict=overall(results), latency=None)


def test_it_is_measured_on_every_token(registered: None) -> None:
    table, noise, rng = random_logits(7, V), random_logits(8, V, 0.1), np.random.default_rng(0)
    moves = []
    for _ in range(12):
        ids = rng.integers(0, V, rng.integers(5, 30)).tolist()
        for here, target in pairwise(ids):
            orders = [np.argsort(-row).tolist() for row in (table[here], table[here] + noise[here])]
            moves.append(orders[0].index(target) != orders[1].index(target))
    found = compared()
    estimate = found.figures["rank_moved"]
    assert 0.1 < estimate.value < 0.9
    assert estimate.value == pytest.approx(sum(moves) / len(moves))
    assert estimate.low < estimate.value < estimate.high
    assert sum(document.figures["rank_moved"] for document in found.per_document) == sum(moves)


def test_it_leaves_the_other_figures_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    alone = compared()
    monkeypatch.setattr(catalog, "ALL", (RANK_MOVED, *catalog.ALL))
    beside = compared()
    assert {name: beside.figures[name] for name in alone.figures} == alone.figures
    assert set(beside.figures) == {*alone.figures, "rank_moved"}


def test_it_decides_a_gate(report: Report) -> None:
    (result,) = report.gates
    assert (result.metric, result.verdict) == ("rank_moved", Verdict.FAIL)
    assert result.explanation.startswith("rank_moved: 0.")
    assert result.explanation.endswith("is above 0.01")


def test_a_recipe_without_it_in_the_catalog_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "r.yaml"
    path.write_text(RECIPE)
    with pytest.raises(RecipeError, match=r"r\.yaml:11:3: gates\.rank_moved: must be 'perplexity_ratio', "):
        Recipe.load(path)


def test_a_gate_needs_what_measures_it(tmp_path: Path, registered: None) -> None:
    path = tmp_path / "r.yaml"
    path.write_text(RECIPE.replace("validation:\n  quality: {data: evaluation.jsonl, context: 128}\n", ""))
    with pytest.raises(RecipeError, match=r"gates\.rank_moved: it would not be measured") as caught:
        Recipe.load(path)
    assert "quality" in (caught.value.hint or "")
    path.write_text(RECIPE.replace("rank_moved", "rank_mooved"))
    with pytest.raises(RecipeError) as caught:
        Recipe.load(path)
    assert caught.value.hint == "did you mean 'rank_moved'?"


def test_an_override_sets_its_limit(loaded: Recipe) -> None:
    assert Recipe.load(loaded.path, ["gates.rank_moved.max=0.5"]).gates["rank_moved"].max == 0.5


def test_the_schema_of_recipes_has_it(registered: None) -> None:
    gates = recipe.json_schema(passes.ALL)["properties"]["gates"]
    assert gates["properties"]["rank_moved"] == {
        "$ref": "#/$defs/GateSpec",
        "description": "Rank moved (share, 0 to 1; lower is better): tokens whose rank is not the baseline's",
    }
    assert gates["additionalProperties"] is False


def test_it_shows_in_every_form_of_a_report(report: Report) -> None:
    assert report.quality is not None
    share = units.percent(report.quality.figures["rank_moved"].value)
    interval = units.interval(report.quality.figures["rank_moved"], units.percent)

    written = json.loads(report.to_json())
    assert written["quality"]["rank_moved"]["value"] == report.quality.figures["rank_moved"].value
    assert written["quality"]["per_document"][0]["rank_moved"] > 0
    assert written["gates"][0]["metric"] == "rank_moved"

    page = render.to_html(report)
    assert "<strong>Rank moved</strong><small>tokens whose rank is not the baseline&#39;s</small>" in page
    cell = f'<td class="num"><strong>{share}</strong><small>{interval}</small></td>'
    assert f'<tr><th scope="row">Rank moved</th>{cell}</tr>' in page
    assert '<th scope="col" class="num">Rank moved</th>' in page  # of the documents that moved the most
    assert f'<div><dt>Rank moved</dt><dd class="value">{share}</dd>' in page

    markdown = render.to_markdown(report)
    assert f"| Rank moved | **{share}** | share, 0 to 1; {interval} |" in markdown
    assert f"| Rank moved | max 1.0 % | {share} | {interval} | **FAIL** |" in markdown
    assert f"| Rank moved | {share} | {interval} |" in markdown

    console = Console(width=120, record=True, file=open(os.devnull, "w"))  # noqa: PTH123, SIM115
    with console.file:
        console.print(render.summary(report))
        terminal = console.export_text()
    assert f"Rank moved        {share}" in terminal
    assert "rank_moved: 0." in terminal


def test_diff_history_and_gates_against_an_earlier_version_know_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(catalog, "ALL", (*catalog.ALL, RANK_MOVED))
        measured = [compared(scale) for scale in (0.1, 0.5)]
    before, after = (
        stored.put(tmp_path, days=day, quality=quality, gates={}, files={"engine/model.onnx": graph(day)})
        for day, quality in enumerate(measured)
    )
    monkeypatch.setattr(catalog, "ALL", (*catalog.ALL, RANK_MOVED))
    page, limits = tmp_path / "page.html", tmp_path / "gates.yaml"
    limits.write_text("gates:\n  rank_moved: {rise_max: 0.01}\n")

    def command(*words: object) -> str:
        done = CliRunner().invoke(cli, [str(word) for word in words])
        assert done.exit_code in (0, 3), done.output
        return done.stdout

    told = command("diff", before.path, after.path, "--html", page)
    change = re.search(r"^rank_moved: (.*) % → (.*) % \(change \+(.*), 95% interval .*; worse\)$", told, re.MULTILINE)
    assert change is not None, told
    first, second, moved = map(float, change.groups())
    assert second - first == pytest.approx(100 * moved, abs=0.11)
    assert '<tr class="worse"><th scope="row">Rank moved</th>' in page.read_text()

    words = ("history", "tiny", "--metric", "rank_moved", "--html", page, "--out", tmp_path)
    title, *rows = command(*words).splitlines()
    assert title.split()[-1] == "RANK_MOVED"
    assert [row.endswith("▼") for row in rows] == [False, True]
    assert "<strong>Rank moved</strong>: tokens whose rank is not" in page.read_text()

    words = ("gate", after.path, "--against", before.path, "--gates", limits, "--out", tmp_path, "--json")
    (gate,) = json.loads(command(*words))["gates"]
    assert (gate["metric"], gate["bound"], gate["verdict"]) == ("rank_moved", "rise_max", "fail")
    assert gate["measured"]["value"] == pytest.approx(moved, rel=1e-3)


def test_a_report_reads_back_without_its_catalog(report: Report, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(catalog, "ALL", catalog.ALL[:-1])
    again = Report.model_validate_json(report.to_json())
    assert again == report
    assert "Rank moved" not in render.to_markdown(again.model_copy(update={"gates": ()}))
    with pytest.raises(InputError, match='no gate decides on "rank_moved"'):
        render.to_markdown(again)


def test_a_figure_without_an_interval_decides_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert isinstance(RANK_MOVED.form, OfSums)
    unbounded = replace(RANK_MOVED, form=replace(RANK_MOVED.form, bounded=False), key=None)
    monkeypatch.setattr(catalog, "ALL", (*catalog.ALL, unbounded))
    assert isinstance(compared().figures["rank_moved"], float)
    path = tmp_path / "r.yaml"
    path.write_text(RECIPE)
    with pytest.raises(RecipeError, match="rank_moved: must be"):
        Recipe.load(path)
