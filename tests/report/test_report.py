from __future__ import annotations

import math
import os
import re
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from llmforge.evaluation.gates import Verdict, judge, overall
from llmforge.lowering.pass_base import Rewritten, Skipped
from llmforge.metrics import catalog
from llmforge.metrics.catalog import Measured, Sizes
from llmforge.metrics.intervals import Estimate
from llmforge.metrics.latency import Compute, DataSheet, Noise, Price, Side, Start
from llmforge.metrics.quality import Sample
from llmforge.metrics.token_records import DocumentTokens
from llmforge.metrics.workload import RequestTimes, Slo, Workload
from llmforge.recipe import GateSpec
from llmforge.report import charts, render, view
from llmforge.report.model import Report, ReusedRecord

from .. import reports

GOLDEN = Path(__file__).parents[1] / "golden"
VOID = {"meta", "br"}


class Page(HTMLParser):
    """Collects what a page shows, and checks that its elements nest."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self.feed(html)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if not {"style", "title"} & set(self.open):
            self.text += data


def golden(name: str, text: str) -> None:
    """Compare with a file of tests/golden; UPDATE_GOLDEN=1 writes it instead."""
    path = GOLDEN / name
    if os.environ.get("UPDATE_GOLDEN"):
        path.write_text(text, encoding="utf-8")
    assert text == path.read_text(encoding="utf-8")


def test_json_is_golden() -> None:
    golden("report.json", reports.make().to_json())


def test_markdown_is_golden() -> None:
    golden("report.md", render.to_markdown(reports.make()))


def test_json_reads_back() -> None:
    report = reports.make()
    assert Report.model_validate_json(report.to_json()) == report


def test_json_of_a_broken_model_reads_back() -> None:
    broken = reports.make(
        quality=reports.QUALITY.model_copy(
            update={"kld_max": math.inf, "kld_mean": Estimate(value=math.nan, low=math.nan, high=math.inf, samples=56)}
        )
    )
    again = Report.model_validate_json(broken.to_json())
    assert again.quality is not None
    assert math.isnan(again.quality.kld_mean.value)
    assert again.quality.kld_max == math.inf
    assert "| KLD, largest | inf |" in render.to_markdown(again)
    assert "nan" in Page(render.to_html(again)).text


def test_write_puts_two_files(tmp_path: Path) -> None:
    render.write(reports.make(), tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["report.html", "report.md"]
    assert "Version" in (tmp_path / "report.html").read_text()


def test_page_holds_the_facts() -> None:
    report = reports.make()
    page = Page(render.to_html(report))
    facts = ["FAIL", "1 of 4 gates failed", "5.09 MB", "37.3 %", "0.0210", "0.0200 – 0.0221", "1.0108", "89.9 %",
             "0.482 ms", "12×", "about 153 documents needed to decide", "1.31 GB", "Example CPU 9000", "5b" * 32,
             "quantize-kv-cache", "its input is no residual Add but the embedding", report.notes[0]]  # fmt: skip
    for fact in facts:
        assert fact in page.text, fact
    for metric in reports.GATES:
        assert catalog.deciding()[metric].title in page.text


def test_page_stands_alone() -> None:
    html = render.to_html(reports.make())
    assert not re.search(r"""\ssrc=|href|url\(|@import|<script""", html)
    assert "default-src 'none'" in html


def test_page_is_accessible() -> None:
    page = Page(render.to_html(reports.make()))
    svgs = [attributes for tag, attributes in page.tags if tag == "svg"]
    assert len(svgs) == 4 + 1 + 1 + 8 + 1 + 8 + 4  # gates, histogram, position, latency, loads, passes, stages
    assert all(svg["role"] == "img" and svg["aria-label"] for svg in svgs)
    assert [tag for tag, _ in page.tags if re.fullmatch("h[1-6]", tag)][:2] == ["h1", "h2"]
    assert ("html", {"lang": "en"}) in page.tags
    assert all("scope" in attributes for tag, attributes in page.tags if tag == "th")


HOSTILE = "<script>alert(1)</script>|`*[x](y)\n# & \"'"


def hostile() -> Report:
    return reports.make(
        checkpoint=reports.make().checkpoint.model_copy(update={"name": HOSTILE}),
        passes=(
            reports.PASSES[0].model_copy(
                update={
                    "options": {HOSTILE: HOSTILE},
                    "rewritten": (Rewritten(HOSTILE, HOSTILE),),
                    "skipped": (Skipped(HOSTILE, HOSTILE),),
                }
            ),
        ),
        notes=(HOSTILE,),
        recipe={HOSTILE: HOSTILE},
        quality=reports.QUALITY.model_copy(
            update={
                "per_document": (reports.QUALITY.per_document[0].model_copy(update={"document": HOSTILE}),),
                "samples": (
                    Sample(document=HOSTILE, prompt=HOSTILE, shared=HOSTILE, baseline=HOSTILE, artifact=HOSTILE),
                ),
            }
        ),
    )


def test_hostile_names_stay_text_in_html() -> None:
    page = Page(render.to_html(hostile()))
    assert "script" not in {tag for tag, _ in page.tags}
    assert page.text.count("<script>alert(1)</script>") >= 14


def test_hostile_names_stay_text_in_markdown() -> None:
    markdown = render.to_markdown(hostile())
    assert "<script>" not in markdown
    assert r"\<script\>alert(1)\</script\>\|\`\*\[x\](y) # & " in markdown
    for line in markdown.splitlines():
        assert not line.startswith("# &")


def test_hostile_names_stay_text_in_the_terminal() -> None:
    assert "[bold]x[/bold]" in shown(reports.make(notes=("[bold]x[/bold]",)))


def shown(report: Report, width: int = 120) -> str:
    console = Console(width=width, record=True, file=open(os.devnull, "w"))  # noqa: PTH123, SIM115
    with console.file:
        console.print(render.summary(report))
        return console.export_text()


def test_summary_tells_the_verdict_first_and_everything_that_counts() -> None:
    lines = shown(reports.make()).splitlines()
    assert lines[0].split() == ["FAIL", "1", "of", "4", "gates", "failed", "docs-llama-int4", "3f9a1c0b7d2e"]
    text = "\n".join(lines)
    for fact in ("5.09 MB", "0.0210", "1.0108", "89.9 %", "0.611 ms", "31.7 ms", "INCONCLUSIVE", "note: The embedding"):
        assert fact in text


def test_what_was_reused_is_said_in_every_form() -> None:
    report = reports.make()
    said = "Reused from the build cache: trace; proof of the trace; calibration of layers 0–2, 5"
    for text in (shown(report), Page(render.to_html(report)).text, render.to_markdown(report)):
        assert said.casefold() in text.casefold()
    nothing = report.model_copy(update={"build": report.build.model_copy(update={"reused": ReusedRecord()})})
    for text in (shown(nothing), Page(render.to_html(nothing)).text, render.to_markdown(nothing)):
        assert "reused from" not in text.casefold()


def test_what_was_not_measured_is_said() -> None:
    report = reports.make(quality=None, quality_baseline=None, latency=None, passes=(), calibration=None, notes=(),
                          gates=judge({"kld_mean": GateSpec(max=1)}, {}), verdict=Verdict.FAIL)  # fmt: skip
    page, markdown = Page(render.to_html(report)), render.to_markdown(report)
    assert page.text.count("Not measured: the recipe does not ask for it.") == 2
    assert "kld_mean: not measured, limit: at most 1" in page.text
    assert markdown.count("Not measured: the recipe does not ask for it.") == 2
    assert "| Mean KLD | max 1.00 | – | not measured | **FAIL** |" in markdown
    assert "kld_mean: not measured" in shown(report)
    assert [figure.title for figure in view.key_figures(report)] == ["Size"]


def test_latency_without_baseline_renders() -> None:
    alone = reports.LATENCY.model_copy(
        update={
            "baseline": None,
            "baseline_load_ms": None,
            "points": tuple(
                point.model_copy(update={"baseline": None, "ttft_speedup": None, "tpot_speedup": None})
                for point in reports.LATENCY.points
            ),
        }
    )
    report = reports.make(latency=alone)
    assert "2,070" in Page(render.to_html(report)).text
    assert "| 32 | baseline |" not in render.to_markdown(report)
    assert "baseline speed" not in shown(report)


@pytest.mark.parametrize(
    ("gates", "text"),
    [
        ({}, "Built; the recipe has no gates"),
        ({"size_bytes": GateSpec(max=6e6)}, "The gate passed"),
        ({"size_bytes": GateSpec(max=6e6), "perplexity_ratio": GateSpec(max=2)}, "All 2 gates passed"),
        ({"kld_mean": GateSpec(max=0.0215)}, "1 of 1 gates inconclusive: not enough data"),
    ],
)
def test_headlines(gates: dict[str, GateSpec], text: str) -> None:
    measured = catalog.estimates(Measured(quality=reports.QUALITY, sizes=Sizes(5_000_000, 1, 1)))
    results = judge(gates, measured)
    report = reports.make(gates=results, verdict=overall(results))
    assert view.headline(report) == text
    assert text in Page(render.to_html(report)).text
    assert text in render.to_markdown(report)


def test_gate_plot_is_true_to_scale() -> None:
    (result,) = judge({"kld_mean": GateSpec(max=0.03)}, {"kld_mean": Estimate(value=2, low=1, high=4, samples=9)})
    plot = charts.gate(result)
    assert plot is not None
    scale = (plot.high - plot.low) / 3
    assert plot.value - plot.low == pytest.approx(scale)
    assert plot.low - plot.limit == pytest.approx(scale * 0.97)
    assert plot.forbidden == (plot.limit, 100 - plot.limit)
    assert 0 < plot.limit < plot.high < 100


def test_histogram_shows_all_tokens_at_their_place() -> None:
    (plot,) = charts.histograms(reports.QUALITY)
    assert len(plot.columns) == 4 * (len(plot.ticks) - 1)
    assert max(column.height for column in plot.columns) == 1
    tallest = max(plot.columns, key=lambda column: column.height)
    ticks = {tick.label: tick.at for tick in plot.ticks}
    assert ticks["1e-3"] < tallest.left < ticks["0.01"]
    marks = {mark.label: mark.at for mark in plot.marks}
    assert ticks["0.01"] < marks["median"] < marks["mean"] < ticks["0.1"] < marks["99 %"] < ticks["1"]


def test_a_curve_shows_every_stretch_at_its_height() -> None:
    (plot,) = charts.by_position(reports.QUALITY)
    assert [tick.label for tick in plot.ticks] == ["1", "16", "24", "384"]
    assert [stretch.left for stretch in plot.stretches] == [0, 25, 50, 75]
    heights = [stretch.value for stretch in plot.stretches]
    assert heights == pytest.approx([0.0188 / 0.0257, 0.0193 / 0.0257, 0.0199 / 0.0257, 1])  # from 0
    assert plot.stretches[0].low == pytest.approx(0.0171 / 0.0257)
    assert plot.stretches[-1].low is None
    assert (plot.bottom, plot.top) == ("0", "0.0257")
    text = Page(render.to_html(reports.make())).text
    assert "Mean KLD by position, by tokens of context" in text


def test_the_summary_has_tails_positions_steps_and_answers() -> None:
    text = shown(reports.make())
    for line in ("KLD of tokens         median 0.0114; 90 % 0.0498; 95 % 0.0713; 99 % 0.119; 99.9 % 0.412; largest",
                 "Top-5 agreement       mean 93.1 %",
                 "KLD by position       0.0188 at 1–15 tokens, 0.0257 at 384–511 tokens",
                 "Decode steps          KLD 0.0218; in prefill 0.0209; added 0.000900",
                 "Greedy answers        same first 32 tokens 75.0 %; same first 128 tokens 50.0 %"):  # fmt: skip
        assert line in text


def test_answers_stand_side_by_side_with_their_difference_marked() -> None:
    page = render.to_html(reports.make())
    assert "<p> the whole interval <mark>lies within its limit.</mark></p>" in page
    assert "<p> the whole interval <mark>is inside of it.</mark></p>" in page
    assert "<strong>guide-0</strong>: differs after 20 characters" in page
    assert "<strong>guide-1</strong>: the same" in page
    markdown = render.to_markdown(reports.make())
    assert "- artifact goes on: is inside of it." in markdown


def test_what_was_scored_and_kept_is_said() -> None:
    tokens = DocumentTokens(document="guide-0", windows=((1, 300), (1, 200)))  # type: ignore[call-arg]
    update = {"scored": "second-half", "per_token": (tokens,)}
    report = reports.make(quality=reports.QUALITY.model_copy(update=update))
    for text in (Page(render.to_html(report)).text, render.to_markdown(report)):
        assert "Only the second half of each window is scored, as llama.cpp does" in text
        assert "from 500 of the 65,893 tokens" in text
    assert "second half" not in render.to_markdown(reports.make())


def test_equal_reasons_are_told_once() -> None:
    places = [Skipped("a", "odd"), Skipped("b", "even"), Skipped("c", "odd")]
    assert list(view.grouped(places).items()) == [("odd", ["a", "c"]), ("even", ["b"])]


def test_a_difference_and_what_is_allowed_are_told_in_one_unit() -> None:
    report = reports.make()
    said = "largest difference 3.80e-06 standard deviations (allowed: 0.0001)"
    assert said in render.to_html(report)
    markdown = render.to_markdown(report)
    assert "| largest difference (σ) |" in markdown
    assert "| 3.80e-06 of 0.0001 |" in markdown


def wide() -> Report:
    """Add loads of several sequences, workloads and everything beside them."""
    rng, conditions = np.random.default_rng(0), reports.LATENCY.model_copy(update={
        "compute": Compute(dtype="int8", operations_per_second={"fp32": 2e11, "int8": 5e11}, probe="two products"),
        "footprint": reports.LATENCY.footprint.model_copy(update={"multiply_adds_per_token": 6_800_000}),
        "price": Price(usd_per_hour=3.6, source="a list", date="2026-01"),
        "slo": Slo(ttft_ms=50, tpot_ms=5),
        "data_sheet": DataSheet(
            target="h200", bytes_per_second=4.8e12, operations_per_second={"int8": 2e15}, source="s"
        ),
    })  # fmt: skip

    def side(batch: int, prompt: int) -> Side:
        return Side([np.array([prompt / 10, 2, 3]) * batch**0.5 * rng.uniform(1, 1.1) for _ in range(8)], batch)

    points = [catalog.point(p, side(b, p), None, conditions) for b in (1, 2, 8) for p in (32, 128, 512)]
    times = RequestTimes(sent_ms=0.0, token_ms=(45.0, 49.0), ended_ms=49.0, prompt_tokens=4, output_tokens=2)
    found = conditions.model_copy(
        update={
            "baseline": None,
            "points": tuple(points),
            "workloads": (Workload.of("shared_prefix", "two requests", ((times, times),), conditions.slo, 0.75),),
            "starts": (Start(load_ms=300.0, peak_host_bytes=150_000_000, peak_device_bytes=None),),
            "noise": Noise(probe_ms=(1.0,) * 10 + (2.0,) * 3, stolen_share=0.125, waits=7, load_average=1.5),
            "stopped": "the budget of 9 s ended",
        }
    )
    return reports.make(latency=found)


def test_tiles_that_stand_together_are_of_one_load() -> None:
    for report in (reports.make(), wide()):
        figures = [figure for figure in view.key_figures(report) if figure.title in ("TPOT", "TTFT")]
        assert len(figures) == 2
        assert all(figure.notes[0].startswith("512-token prompt") for figure in figures)


def test_a_surface_is_shown_in_every_form() -> None:
    report = wide()
    page, markdown, terminal = Page(render.to_html(report)), render.to_markdown(report), shown(report)
    for text in (page.text, markdown):
        for fact in ("3 loads of one sequence, 6 of several", "Repeated until the budget of 9 s ended", "0.500 TOP/s",
                     "TTFT ≤ 50 ms, TPOT ≤ 5 ms", "$3.6 per hour", "150 MB", "300 ms", "h200", "75.0 %", "two requests",
                     "12.5 % of CPU time taken by other virtual machines", "Cost of a million tokens"):  # fmt: skip
            assert fact in text, fact
    assert terminal.count("%") > 9
    assert "shared prefix: TTFT 45.0 ms" in terminal
    assert "100.0 % meet the SLO" in terminal
    assert "note: the machine was noisy: the slowest 5 % of one computation took 100% longer than usual" in terminal
    assert "noisy" not in shown(reports.make())
    assert all(len(line.rstrip()) <= 120 for line in terminal.splitlines())


def test_curves_lie_over_the_limit_of_the_bandwidth_and_true_to_scale() -> None:
    measured = wide().latency
    assert measured is not None
    assert measured.bandwidth is not None
    tpot, rate = charts.over_load(measured)
    assert [line.bound for line in tpot.lines] == [False, True] * 3
    assert [mark.label for mark in tpot.ticks] == ["32", "128", "512"]
    medians = [point.artifact.figures["tpot_ms"].p50.value for point in measured.points]
    assert [place[1] for place in tpot.lines[0].places] == pytest.approx([v / max(medians) for v in medians[:3]])
    floor = measured.points[0].figures["bytes_read_per_token"] / measured.bandwidth.working_set_bytes_per_second * 1e3
    assert tpot.lines[1].places[0][1] == pytest.approx(floor / max(medians))
    assert [line.label for line in rate.lines] == ["32-token prompts", "128-token prompts", "512-token prompts"]
    assert max(place[1] for line in rate.lines for place in line.places) == 1
    assert charts.over_load(measured.model_copy(update={"points": measured.points[:1]})) == []
    many = measured.points[0].model_copy
    crowd = measured.model_copy(update={"points": tuple(many(update={"batch": b}) for b in range(1, 12))})
    (rates,) = charts.over_load(crowd)
    assert len(rates.ticks) == 11


def test_more_lines_than_can_be_told_apart_are_left_to_the_table() -> None:
    assert charts._spread_out([1, 2, 4, 8]) == [1, 2, 4, 8]
    assert charts._spread_out([1, 2, 4, 8, 16, 32, 64]) == [1, 4, 16, 64]
