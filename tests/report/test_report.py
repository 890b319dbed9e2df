from __future__ import annotations

import math
import os
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from llmforge.gates.decision import Verdict, judge, overall
from llmforge.gates.records import Report, ReusedRecord
from llmforge.metrics import catalog, units
from llmforge.metrics.attribution import AttributedStep, Attribution, LayerCost
from llmforge.metrics.intervals import Estimate
from llmforge.metrics.latency import Compute, DataSheet, EngineStart, HourlyPrice, Noise, TimedSide
from llmforge.metrics.metric import Measured, Sizes
from llmforge.metrics.quality import Sample
from llmforge.metrics.token_records import DocumentTokens
from llmforge.metrics.workload import MeasuredWorkload, RequestTimes, Slo
from llmforge.recipe import GateSpec
from llmforge.report import by_layer, charts, drawing, load_charts, render, top, view
from llmforge.rewrite.pass_base import Rewritten, Skipped

from ..samples import pages, reports
from ..samples.pages import Page

GOLDEN = Path(__file__).parents[1] / "golden"


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


def test_page_stands_alone_and_is_accessible() -> None:
    page = pages.check(render.to_html(reports.make()))
    # gates, histogram, position, latency, loads (TPOT, TTFT), passes (weights of all), sizes, stages
    assert len(page.all("svg")) == 4 + 1 + 1 + 8 + 2 + 4 + 1 + 4


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
    assert "Mean KLD: not measured, limit: at most 1" in page.text
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
    assert len(plot.placed) == 4 * (len(plot.ticks) - 1)
    assert max(column.value for column in plot.placed) == 1
    tallest = max(plot.placed, key=lambda column: column.value)
    ticks = {tick.label: tick.at for tick in plot.ticks}
    assert ticks["1e-3"] < tallest.left < ticks["0.01"]
    marks = {mark.label.rpartition(" ")[0]: mark.at for mark in plot.flags}
    assert ticks["0.01"] < marks["median"] < marks["mean"] < ticks["0.1"] < marks["99 %"] < ticks["1"]
    assert {mark.label for mark in plot.flags} == {"median 0.0114", "mean 0.0210", "99 % 0.119"}


@pytest.mark.parametrize("places", [(10, 12, 40), (50, 51, 52), (60, 90, 99), (0, 1, 2)])
def test_no_label_of_a_mark_is_crossed(places: tuple[float, ...]) -> None:
    flags = drawing.flags(
        [drawing.Mark(at, f"{label} 0.0123") for at, label in zip(places, ("a", "b", "c"), strict=True)]
    )
    assert sorted(flag.row for flag in flags) == [0, 1, 2]
    for flag in flags:
        lines = [other.at for other in flags if other.row < flag.row]  # of lines that begin above this label
        assert all(at <= flag.at if flag.side == "start" else at >= flag.at for at in lines)


def test_a_curve_shows_every_stretch_at_its_height() -> None:
    (plot,) = charts.by_position(reports.QUALITY)
    assert [tick.label for tick in plot.ticks] == ["1", "16", "24", "384"]
    assert [stretch.left for stretch in plot.placed] == [0, 25, 50, 75]
    heights = [stretch.value for stretch in plot.placed]
    assert heights == pytest.approx([0.0188 / 0.0257, 0.0193 / 0.0257, 0.0199 / 0.0257, 1])  # from 0
    assert plot.placed[0].low == pytest.approx(0.0171 / 0.0257)
    assert plot.placed[-1].low is None
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
    assert '<p class="text"> the whole interval <mark>lies within its limit.</mark></p>' in page
    assert '<p class="text"> the whole interval <mark>is inside of it.</mark></p>' in page
    assert "<strong>guide-<wbr>0</strong>: differs after 20 characters" in page
    assert "<strong>guide-<wbr>1</strong>: the same" in page
    markdown = render.to_markdown(reports.make())
    assert "- artifact goes on: is inside of it." in markdown
    assert markdown.count("goes on:") == 2  # the other two answers are the same


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


def test_what_a_pass_did_in_each_layer_is_told_once() -> None:
    places = [
        *(Rewritten(f"model.layers.{n}.mlp/Norm", f"merged with model.layers.{n}/Add") for n in (0, 1, 2, 4)),
        *(Rewritten(f"model.layers.{n}.norm/Norm", f"merged with model.layers.{n - 1}/Add_2") for n in (1, 2)),
        Rewritten("model.layers.3.mlp/Norm", "merged with model.layers.9/Add"),
        Rewritten("model.norm/Norm", "merged with model.layers.4/Add_2"),
    ]
    assert by_layer.groups(places) == [
        by_layer.NodeGroup("0–2, 4", "model.layers.N.mlp/Norm", "merged with model.layers.N/Add", 4),
        by_layer.NodeGroup("1–2", "model.layers.N.norm/Norm", "merged with model.layers.N-1/Add_2", 2),
        by_layer.NodeGroup("3", "model.layers.N.mlp/Norm", "merged with model.layers.9/Add", 1),
        by_layer.NodeGroup("", "model.norm/Norm", "merged with model.layers.4/Add_2", 1),
    ]


def test_experts_of_all_layers_are_told_once_and_other_sizes_apart() -> None:
    experts = [Skipped(f"model.layers.{n}.experts.{e}.up", "it has 2 bits") for n in range(3) for e in range(4)]
    assert by_layer.groups(experts) == [by_layer.NodeGroup("0–2", "model.layers.N.experts.*.up", "it has 2 bits", 12)]
    sizes = [Rewritten(f"h.{n}.attn", f"[256, {n}]") for n in range(2)]
    assert [group.what for group in by_layer.groups(sizes)] == ["[256, 0]", "[256, 1]"]


def test_what_is_proven_does_not_look_like_a_warning() -> None:
    report = reports.make(proven=("trace: logits match",), notes=("a note",))
    html = render.to_html(report)
    assert '<li class="proven"><span class="pass" aria-hidden="true">✓</span> <strong>Proven</strong> trace' in html
    assert 'class="warning"' not in html
    assert top.warnings(report) == []
    assert "proven: trace: logits match" in shown(report)
    assert "- Proven: trace: logits match" in render.to_markdown(report)


def test_what_speaks_against_figures_is_a_warning() -> None:
    unmeasured = reports.make(engine=reports.ENGINE.model_copy(update={"unmeasured": "it has no GPU"}))
    assert '<p class="warning"><strong>Warning</strong> the engine was not run: it has no GPU' in render.to_html(
        unmeasured
    )
    assert ["noisy" in warning for warning in top.warnings(wide())] == [True]


def test_the_verdict_is_said_in_words() -> None:
    assert top.reasons(reports.make()) == [
        "TPOT, median is 0.611 ms (95 % interval 0.599 ms – 0.629 ms); the limit is max 0.500 ms."
    ]
    passed = reports.make(verdict=Verdict.PASS)
    (gains,) = top.reasons(passed)
    assert gains == (
        "37.3 % of the checkpoint's size, 9.8× the speed of the baseline in decoding, perplexity ratio 1.0108, "
        "top-1 agreement 89.9 %."
    )
    limits = {name: GateSpec(max=0) for name in ("kld_mean", "kld_p99", "kld_p95", "kld_p90")}
    failed = reports.make(gates=judge(limits, catalog.estimates(reports.MEASURED)))
    assert top.reasons(failed)[-1] == "And 1 more, below."


def test_parts_of_the_size_add_up() -> None:
    parts = charts.sizes(reports.ENGINE)
    assert sum(part.size_bytes for part in parts) == reports.ENGINE.size_bytes
    assert sum(part.share for part in parts) == pytest.approx(1)
    assert [part.name for part in parts][-1] == "no weights"
    assert parts[1].start == pytest.approx(100 * parts[0].share)
    many = tuple(reports.ENGINE.weights[0].model_copy(update={"name": f"{n}", "size_bytes": 9}) for n in range(9))
    few = charts.sizes(reports.ENGINE.model_copy(update={"weights": many}))
    assert [part.what for part in few][6:] == ["18 tensors", "graph, configuration and alignment"]


def test_errors_by_layer_stand_in_the_order_of_layers() -> None:
    def cost(name: str, gain: float) -> LayerCost:
        estimate = Estimate(value=gain, low=gain - 0.001, high=gain + 0.001, samples=9)
        return LayerCost(name=name, gain=estimate, gained=(gain,) * 9)

    def step(name: str, kld: float, added: float, *layers: LayerCost) -> AttributedStep:
        of = Estimate(value=kld, low=None, high=None, samples=9)
        return AttributedStep(name=name, kld_mean=of, added=of.model_copy(update={"value": added}), weight_bytes=9,
                              kv_bytes_per_token=9, step_ms=None, reached=(kld,) * 9, layers=layers,
                              weights=(), caches=())  # fmt: skip

    layers = cost("model.embed_tokens.weight", -0.0005), cost("layer 0", 0.001), cost("layer 1", 0.008)
    steps = step("traced", 0, 0), step("quantize-weights", 0.012, 0.012, *layers), step("better", 0.009, -0.003)
    attribution = Attribution(documents=9, tokens=99, document_tokens=(11,) * 9, context=512, memory=None, steps=steps)
    (plot,) = charts.by_layer(attribution)
    assert [mark.label for mark in plot.ticks] == ["a", "0", "1"]
    assert plot.others == (("a", "model.embed_tokens.weight"),)
    assert plot.placed[2].high == 1
    assert plot.placed[0].low == 0
    assert plot.zero == pytest.approx(0.0015 / 0.0105)
    assert "most: layer 1, 0.00800" in plot.description
    falls = charts.waterfall(attribution)
    assert [(round(fall.start), round(fall.width), round(fall.end), fall.gains) for fall in falls] == [
        (0, 100, 100, False), (75, 25, 75, True),
    ]  # fmt: skip
    page = pages.check(render.to_html(reports.make(attribution=attribution)))
    assert "Errors by layer" in page.text


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
        "footprint": reports.LATENCY.footprint.model_copy(
            update={"multiply_adds_per_token": 6_800_000, "head_multiply_adds": 800_000}
        ),
        "price": HourlyPrice(usd_per_hour=3.6, source="a list", date="2026-01"),
        "slo": Slo(ttft_ms=50, tpot_ms=5),
        "data_sheet": DataSheet(
            target="h200", bytes_per_second=4.8e12, operations_per_second={"int8": 2e15}, source="s"
        ),
    })  # fmt: skip

    def side(batch: int, prompt: int) -> TimedSide:
        return TimedSide([np.array([prompt / 10, 2, 3]) * batch**0.5 * rng.uniform(1, 1.1) for _ in range(8)], batch)

    points = [catalog.point(p, side(b, p), None, conditions) for b in (1, 2, 8) for p in (32, 128, 512)]
    times = RequestTimes(sent_ms=0.0, token_ms=(45.0, 49.0), ended_ms=49.0, prompt_tokens=4, output_tokens=2)
    found = conditions.model_copy(
        update={
            "baseline": None,
            "points": tuple(points),
            "workloads": (
                MeasuredWorkload.of("shared_prefix", "two requests", ((times, times),), conditions.slo, 0.75),
            ),
            "starts": (EngineStart(load_ms=300.0, peak_host_bytes=150_000_000, peak_device_bytes=None),),
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
    tpot, ttft, rate = load_charts.over_load(measured)
    assert [line.bound for line in tpot.lines] == [False, True] * 3
    assert [mark.label for mark in tpot.ticks] == ["32", "128", "512"]
    levels = {mark.label: mark.at / 100 for mark in tpot.levels}
    assert list(levels) == ["0.01 ms", "0.1 ms", "1 ms", "10 ms"]  # whole decades around all that is drawn
    medians = [point.artifact.figures["tpot_ms"].p50.value for point in measured.points]
    heights = [place[1] for place in tpot.lines[0].places]
    assert heights == pytest.approx([(math.log10(value) + 2) / 3 for value in medians[:3]])
    floor = measured.points[0].figures["bytes_read_per_token"] / measured.bandwidth.working_set_bytes_per_second * 1e3
    assert tpot.lines[1].places[0][1] == pytest.approx((math.log10(floor) + 2) / 3)
    products = 2 * (6_000_000 * 32 + 800_000) / 5e11 * 1e3  # of a prompt of 32 tokens, at the measured rate of int8
    assert f"limit of the compute rate, 32 prompt tokens: {units.ms(products)}" in ttft.lines[1].places[0][2]
    assert [line.label for line in rate.lines] == ["32-token prompts", "128-token prompts", "512-token prompts"]
    assert max(place[1] for line in rate.lines for place in line.places) == 1
    assert load_charts.over_load(measured.model_copy(update={"points": measured.points[:1]})) == []
    many = measured.points[0].model_copy
    crowd = measured.model_copy(update={"points": tuple(many(update={"batch": b}) for b in range(1, 12))})
    (rates,) = load_charts.over_load(crowd)
    assert len(rates.ticks) == 11


def test_a_surface_has_a_cell_for_each_batch_and_prompt() -> None:
    measured = wide().latency
    assert measured is not None
    found = load_charts.surfaces(measured)
    assert [surface.title for surface in found] == ["TTFT, median", "TPOT, median", "Output tokens/s"]
    for surface in found:
        assert surface.prompts == (32, 128, 512)
        assert [batch for batch, _ in surface.rows] == [1, 2, 8]
    ttft, surface = dict(found[0].rows), found[0].prompts
    at = {(point.batch, point.prompt_tokens): point for point in measured.points}
    shown = {
        (batch, prompt): cell for batch, cells in ttft.items() for prompt, cell in zip(surface, cells, strict=True)
    }
    for load, cell in shown.items():
        assert cell is not None
        assert cell.value == units.ms(at[load].artifact.figures["ttft_ms"].p50.value)
    shades = [cell.shade for cell in shown.values() if cell is not None]
    assert min(shades) == 0
    assert max(shades) == pytest.approx(1)
    assert shown[8, 512].shade == max(shades)
    holes = measured.model_copy(update={"points": measured.points[1:]})
    assert dict(load_charts.surfaces(holes)[0].rows)[1][0] is None
    assert load_charts.surfaces(load_charts.single(measured)) == []


def test_more_lines_than_can_be_told_apart_are_left_to_the_table() -> None:
    assert load_charts._spread_out([1, 2, 4, 8]) == [1, 2, 4, 8]
    assert load_charts._spread_out([1, 2, 4, 8, 16, 32, 64]) == [1, 4, 16, 64]
