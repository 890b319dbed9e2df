"""Every chart of a report: places against values, the side that fails, scales, and figures that are no numbers."""

from __future__ import annotations

import math
import re
from itertools import accumulate, pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llmforge.gates.comparison import Change, HistoryEntry
from llmforge.gates.decision import Bound, Earlier, GateResult, Verdict, judge
from llmforge.gates.records import StageRecord
from llmforge.gates.release import ArtifactReference
from llmforge.metrics import catalog
from llmforge.metrics.attribution import AttributedStep, Attribution, LayerCost
from llmforge.metrics.intervals import Estimate
from llmforge.metrics.quality import Segment
from llmforge.metrics.quality_metrics import QualityMetric
from llmforge.recipe import GateSpec
from llmforge.report import charts, load_charts, render
from llmforge.report.drawing import FigurePlot

from ..samples import pages, reports
from ..samples.pages import Page
from .test_report import HOSTILE, shown, wide

METRICS: dict[Bound, str] = {
    "min": "top1_agreement",
    "max": "kld_mean",
    "drop_max": "top1_agreement",
    "rise_max": "kld_mean",
}
EIGHTHS = st.integers(-80, 80).map(lambda number: number / 8)
LENGTHS = st.integers(0, 80).map(lambda number: number / 8)
BOUNDS = st.sampled_from(list(METRICS))
FEW = settings(max_examples=30, deadline=None)


def of(value: float, low: float | None = None, high: float | None = None, samples: int = 400) -> Estimate:
    return Estimate(value=value, low=low, high=high, samples=samples)


def result(bound: Bound, limit: float, measured: Estimate | None) -> GateResult:
    return GateResult(metric=METRICS[bound], bound=bound, limit=limit, measured=measured, verdict=Verdict.NONE,
                      samples_needed=None, explanation="kld_mean: made up")  # fmt: skip


def draw(macro: str, *arguments: Any) -> Page:
    """Draw one chart alone."""
    drawing = str(getattr(render._environment(True, None).get_template("charts.jinja").module, macro)(*arguments))
    page = Page(drawing)
    pages.check_drawings(page)
    return page


def number(shape: dict[str, str | None], name: str) -> float:
    return float((shape[name] or "").removesuffix("%"))


def shapes(page: Page, tag: str, kind: str) -> list[dict[str, str | None]]:
    return [shape for shape in page.all(tag) if kind in (shape.get("class") or "").split()]


def broken(bound: Bound, limit: float, value: float) -> bool:
    """Say by the words of a recipe if a figure, or a difference, breaks a limit."""
    return {"min": value < limit, "max": value > limit, "drop_max": -value > limit, "rise_max": value > limit}[bound]


@given(bound=BOUNDS, limit=LENGTHS, value=EIGHTHS, below=LENGTHS, above=LENGTHS)
@FEW
def test_a_mark_lies_where_its_gate_fails_exactly_if_it_breaks_the_limit(
    bound: Bound, limit: float, value: float, below: float, above: float
) -> None:
    plot = charts.gate(result(bound, limit, of(value, value - below, value + above)))
    assert plot is not None
    start, width = plot.forbidden
    assert plot.limit in (start, start + width)
    assert (start == 0) != (start + width == pytest.approx(100))  # it begins at the limit and has no other end

    def fails(at: float) -> bool:
        return start < at < start + width and not math.isclose(at, plot.limit)

    assert fails(plot.value) == broken(bound, limit, value)
    assert fails(plot.low) == broken(bound, limit, value - below)
    assert fails(plot.high) == broken(bound, limit, value + above)
    assert 0 < plot.low <= plot.value <= plot.high < 100
    scale = (plot.high - plot.low) / (below + above) if below + above else 0
    assert plot.value - plot.low == pytest.approx(scale * below, abs=1e-9)


def judged(bound: Bound, limit: float, measured: Estimate) -> GateResult:
    metric = METRICS[bound]
    earlier = Earlier("tiny/0123", {metric: measured}, {metric: 0.5})
    gates = {metric: GateSpec.model_validate({bound: limit})}
    (found,) = judge(gates, {metric: measured}, earlier=earlier)
    return found


@pytest.mark.parametrize(
    ("bound", "limit", "value", "verdict"),
    [
        ("max", 0.03, 0.02, "PASS"), ("max", 0.01, 0.02, "FAIL"), ("max", 0.0201, 0.02, "INCONCLUSIVE"),
        ("min", 0.9, 0.95, "PASS"), ("min", 0.9, 0.85, "FAIL"), ("min", 0.9, 0.9001, "INCONCLUSIVE"),
        ("drop_max", 0.05, -0.01, "PASS"), ("drop_max", 0.05, 0.07, "PASS"), ("drop_max", 0.05, -0.09, "FAIL"),
        ("drop_max", 0.05, -0.0501, "INCONCLUSIVE"), ("drop_max", 0.05, 0.0, "PASS"),
        ("rise_max", 0.05, 0.01, "PASS"), ("rise_max", 0.05, -0.07, "PASS"), ("rise_max", 0.05, 0.09, "FAIL"),
        ("rise_max", 0.05, 0.0501, "INCONCLUSIVE"), ("rise_max", 0.05, 0.0, "PASS"),
    ],
)  # fmt: skip
def test_the_tinted_side_says_what_the_verdict_says(bound: Bound, limit: float, value: float, verdict: str) -> None:
    found = judged(bound, limit, of(value, value - 0.002, value + 0.002))
    assert found.verdict.name == verdict
    page = draw("gate", found, charts.gate(found), "the limit")
    (area,), (interval,) = shapes(page, "rect", "forbidden"), shapes(page, "rect", "range")
    (dot,), (line,) = page.all("circle"), shapes(page, "line", "limit")
    left, right = number(area, "x"), number(area, "x") + number(area, "width")
    assert number(line, "x1") in (pytest.approx(left, abs=0.02), pytest.approx(right, abs=0.02))
    inside = [
        left < at < right
        for at in (number(interval, "x"), number(dot, "cx"), number(interval, "x") + number(interval, "width"))
    ]
    assert {"PASS": not any(inside), "FAIL": all(inside), "INCONCLUSIVE": 0 < sum(inside) < 3}[verdict]
    assert "the limit" in page.text


def test_a_limit_between_figures_has_its_label_where_there_is_room() -> None:
    sides = [charts.gate(result("max", 0.5, of(value))) for value in (0.0, 2.0)]
    assert [plot and plot.label_at for plot in sides] == ["end", "start"]
    between = charts.gate(result("max", 0.5, of(0.5, 0.0, 1.0)))
    assert between is not None
    assert between.label_at == "middle"


@pytest.mark.parametrize("bound", METRICS)
@pytest.mark.parametrize("low", [-math.inf, math.nan, 0.125, None])
@pytest.mark.parametrize("high", [math.inf, math.nan, 0.75, None])
def test_a_bound_that_is_no_number_reaches_the_end(bound: Bound, low: float | None, high: float | None) -> None:
    found = result(bound, 0.5, of(0.25, low, high))
    plot = charts.gate(found)
    assert plot is not None
    draw("gate", found, plot, "the limit")
    assert (plot.low == 0) == (low not in (None, 0.125))
    assert (plot.high == 100) == (high not in (None, 0.75))


@pytest.mark.parametrize("measured", [None, of(math.nan), of(math.inf), of(-math.inf)])
def test_a_gate_without_a_figure_is_not_drawn(measured: Estimate | None) -> None:
    found = result("max", 0.5, measured)
    assert charts.gate(found) is None
    page = pages.check(render.to_html(reports.make(gates=(found,))))
    assert "max 0.500" in page.text


def test_a_figure_that_is_its_limit_is_drawn_on_it() -> None:
    for value in (0.0, 7.0):
        plot = charts.gate(result("max", value, Estimate.exact(value)))
        assert plot is not None
        assert plot.value == plot.limit == plot.low == plot.high


def test_a_change_against_an_earlier_artifact_has_its_sign_and_says_against_what() -> None:
    better, worse = judged("drop_max", 0.05, of(0.07, 0.06, 0.08)), judged("rise_max", 0.05, of(0.09, 0.08, 0.1))
    report = reports.make(gates=(better, worse), verdict=Verdict.FAIL)
    page, markdown = Page(render.to_html(report)), render.to_markdown(report)
    for said in ("+7.0 %", "+6.0 % – +8.0 %", "drop max 5.0 %", "+0.0900", "rise max 0.0500"):
        assert said in page.text
    assert page.text.count("against tiny/0123") == 3  # at both gates, and with the verdict
    assert "| Top-1 agreement | drop max 5.0 % | +7.0 % | +6.0 % – +8.0 % | **PASS** |" in markdown
    assert "| Mean KLD | rise max 0.0500 | +0.0900 | +0.0800 – +0.100 | **FAIL** |" in markdown
    falls = render.to_markdown(reports.make(gates=(judged("drop_max", 0.05, of(-0.01, -0.02, 0.0)),)))
    assert "| -1.0 % | -2.0 % – 0.0 % |" in falls


def histogram(counts: tuple[int, ...], **figures: object) -> list[FigurePlot]:
    return charts.histograms(reports.QUALITY.model_copy(update={"kld_histogram": counts, **figures}))


@given(st.lists(st.integers(0, 9), min_size=36, max_size=36))
@FEW
def test_a_histogram_shows_each_token_once_in_its_decade(counts: list[int]) -> None:
    found = histogram(tuple(counts))
    assert len(found) == any(counts)
    for plot in found:
        tokens = [round(column.value * max(counts)) for column in plot.placed]
        first = next(at for at, count in enumerate(counts) if count) // 4 * 4
        assert tokens == counts[first : first + len(tokens)]
        assert sum(tokens) == sum(counts)
        width = 100 / len(tokens)
        assert [column.left for column in plot.placed] == pytest.approx([width * at for at in range(len(tokens))])
        assert plot.placed[-1].left + plot.placed[-1].width == pytest.approx(100)
        low = -7 + first // 4
        assert plot.ticks[0].label == (f"1e{low}" if low < -2 else f"{10.0**low:g}")


def test_columns_of_a_histogram_stand_on_its_axis() -> None:
    (plot,) = charts.histograms(reports.QUALITY)
    page = draw("histogram", plot)
    (axis,) = shapes(page, "line", "axis")
    columns = shapes(page, "rect", "ours")
    assert len(columns) == sum(tokens > 0 for tokens in reports.QUALITY.kld_histogram)
    assert {round(number(each, "y") + number(each, "height"), 1) for each in columns} == {number(axis, "y1")}
    assert max(number(each, "height") for each in columns) == 125


def test_marks_that_are_no_numbers_are_named_and_not_drawn() -> None:
    (plot,) = histogram(reports.QUALITY.kld_histogram, kld_mean=of(math.nan), kld_p99=of(math.inf))
    assert sorted((mark.label, mark.at == 100) for mark in plot.flags) == [("99 % inf", True), ("median 0.0114", False)]
    assert "mean nan" in plot.description
    draw("histogram", plot)
    nothing = {name: of(math.nan) for name in ("kld_mean", "kld_median", "kld_p99")}
    (plot,) = histogram(reports.QUALITY.kld_histogram, **nothing)
    assert plot.flags == ()


def curve(*values: Estimate, metric: str = "kld_by_position") -> FigurePlot:
    """Lay out one curve alone, with a stretch of 9 tokens for each figure."""
    segments = tuple(Segment(first=1 + 9 * i, last=9 + 9 * i, tokens=9, figure=each) for i, each in enumerate(values))
    (plot,) = charts.by_position(reports.QUALITY.model_copy(update={"kld_by_position": segments}))
    if metric == "kld_by_position":
        return plot
    (known,) = (each for each in catalog.of_kind(QualityMetric) if each.name == metric)
    return charts._curve(known, segments)


@given(st.lists(LENGTHS, min_size=1, max_size=12))
@FEW
def test_a_curve_is_as_high_as_its_figures(values: list[float]) -> None:
    lower, higher = (curve(*map(of, values), metric=name) for name in ("kld_by_position", "top1_by_position"))
    top, bottom = max(values), min(values)
    for plot, ground in ((lower, 0.0), (higher, bottom)):
        for stretch, value in zip(plot.placed, values, strict=True):
            assert stretch.value == pytest.approx((value - ground) / (top - ground) if top > ground else 0)
        assert plot.placed[-1].left + plot.placed[-1].width == pytest.approx(100)
        assert len(plot.ticks) <= 7
        page = draw("by_position", plot)
        heights = [number(dot, "cy") for dot in page.all("circle")]
        assert heights == pytest.approx([150 - 132 * (stretch.value or 0) for stretch in plot.placed], abs=0.06)
        assert len(shapes(page, "line", "curve")) == len(values) - 1


def test_a_curve_has_a_gap_where_a_figure_is_nan_and_ends_at_the_top_where_it_is_infinite() -> None:
    plot = curve(of(1.0, 0.5, math.inf), of(math.nan, math.nan, math.nan), of(2.0), of(math.inf, 1.0, math.inf))
    assert [stretch.value for stretch in plot.placed] == [0.5, None, 1.0, 1.0]
    assert (plot.bottom, plot.top) == ("0", "2.00")
    page = draw("by_position", plot)
    assert len(page.all("circle")) == 3
    assert len(shapes(page, "line", "curve")) == 1  # from the third to the fourth
    assert len(shapes(page, "rect", "band")) == 2


def test_a_page_of_figures_that_are_no_numbers_is_drawn() -> None:
    nan = Estimate(value=math.nan, low=math.nan, high=math.inf, samples=56)
    segments = tuple(each.model_copy(update={"figure": nan}) for each in reports.QUALITY.kld_by_position)
    update = {"kld_mean": nan, "kld_median": nan, "kld_max": math.inf, "kld_by_position": segments}
    pages.check(render.to_html(reports.make(quality=reports.QUALITY.model_copy(update=update))))
    empty = {"kld_histogram": (0,) * 36, "kld_by_position": segments[:1]}
    pages.check(render.to_html(reports.make(quality=reports.QUALITY.model_copy(update=empty))))


def step(name: str, reached: float, added: float, *layers: LayerCost) -> AttributedStep:
    return AttributedStep(name=name, kld_mean=of(reached), added=of(added, added - 1e-4, added + 1e-4), weight_bytes=9,
                          kv_bytes_per_token=9, step_ms=None, reached=(reached,) * 9, layers=layers, weights=(),
                          caches=())  # fmt: skip


def attributed(*added: float, names: tuple[str, ...] = ("quantize-weights", "quantize-kv-cache")) -> Attribution:
    reached = list(accumulate(added, initial=0.0))
    steps = [step("traced", 0.0, 0.0)]
    steps += [step(name, to, by) for name, to, by in zip(names, reached[1:], added, strict=True)]
    return Attribution(documents=24, tokens=99, document_tokens=(11,) * 9, context=512, memory=None, steps=tuple(steps))


def test_what_a_pass_added_is_its_cost_in_every_form_and_not_what_its_budget_is_held_against() -> None:
    report = reports.make(attribution=attributed(0.0168, 0.0013))
    bars = charts.passes(report)
    assert [None if each.added is None else each.added.value for each in bars] == [None, None, 0.0168, 0.0013]
    assert [each.added_percent for each in bars] == pytest.approx([0, 0, 100, 100 * 0.0013 / 0.0168])
    assert [each.weights_percent for each in bars] == pytest.approx([100, 100, 100 * 5_013_504 / 27_287_552,
                                                                     100 * 5_025_792 / 27_287_552])  # fmt: skip
    html, markdown = render.to_html(report), render.to_markdown(report)
    page = pages.check(html)
    row = re.search(r'<tr><th scope="row">quantize-kv-cache<small>lossy</small>.*?</tr>', html, re.DOTALL)
    assert row is not None
    cells = dict(re.findall(r'data-label="([^"]+)">(.*?)</td>', row[0], re.DOTALL))
    assert cells["added KLD"].startswith("<strong>0.00130</strong><small>0.00120 – 0.00140</small>")
    assert 'width="7.74%" height="8" rx="2" class="theirs"' in cells["added KLD"]
    assert cells["held to budget"] == "0.000400 of 0.002"
    assert "about what leaving it out would save" in page.text
    assert "on the budget's windows. The budget limits it; it is no share of the total." in page.text
    assert "| 0.00130 | 0.00120 – 0.00140 | 0.000400 of 0.002 |" in markdown
    assert "- KLD held to budget: KLD from the graph before the pass" in markdown
    assert "KLD added by pass     quantize-weights +0.0168; quantize-kv-cache +0.00130" in shown(report)


def test_where_nothing_was_attributed_reports_say_so_and_how_to() -> None:
    report = reports.make()
    said = "not measured; set validation.attribution to true in the recipe to measure it"
    page = Page(render.to_html(report))
    for text in (page.text, render.to_markdown(report), shown(report)):
        assert said in text
    assert page.text.count("not measured") == 3  # of two lossy passes, and below them
    assert [each.added for each in charts.passes(report)] == [None] * 4
    exact = reports.make(passes=reports.PASSES[:2])
    for text in (Page(render.to_html(exact)).text, render.to_markdown(exact), shown(exact)):
        assert "validation.attribution" not in text
        assert "held to budget:" not in text.casefold()


def test_steps_belong_to_the_passes_that_may_have_lost_in_their_order() -> None:
    _, _, weights, cache = reports.PASSES
    idle = weights.model_copy(update={"rewritten": ()})
    twice = (weights, idle, cache, weights)
    names = ("quantize-weights", "quantize-kv-cache", "quantize-weights")
    report = reports.make(passes=twice, attribution=attributed(0.01, 0.002, -0.004, names=names))
    found = charts.passes(report)
    assert [None if each.added is None else each.added.value for each in found] == [0.01, None, 0.002, -0.004]
    assert [each.gains for each in found] == [False, False, False, True]
    assert found[3].added_percent == pytest.approx(40)
    page = render.to_html(report)
    assert '<rect x="0" y="2" width="40.00%" height="8" rx="2" class="gain"/>' in page


@given(st.lists(st.integers(-9, 9).map(lambda number: number / 64), min_size=1, max_size=6))
@FEW
def test_bars_of_a_waterfall_begin_where_the_one_before_ends(added: list[float]) -> None:
    reached = list(accumulate(added, initial=0.0))
    if min(reached) < 0:  # no divergence is
        added = [abs(each) for each in added]
        reached = list(accumulate(added, initial=0.0))
    names = tuple(f"pass {at}" for at in range(len(added)))
    falls = charts.waterfall(attributed(*added, names=names))
    scale = 100 / (max(reached) or 1.0)
    for (begin, end), fall in zip(pairwise(reached), falls, strict=True):
        assert fall.start == pytest.approx(scale * min(begin, end), abs=1e-9)
        assert fall.start + fall.width == pytest.approx(scale * max(begin, end), abs=1e-9)
        assert fall.end == pytest.approx(scale * end, abs=1e-9)
        assert fall.gains == (end < begin)
        (bar,) = draw("fall", fall, "a title").all("rect")
        assert bar["class"] == ("gain" if fall.gains else "ours")


@given(st.lists(st.integers(-20, 20), min_size=1, max_size=40))
@FEW
def test_a_layer_rises_from_zero_or_hangs_below_it(gains: list[int]) -> None:
    costs = tuple(
        LayerCost(name=f"layer {at}", gain=of(gain, gain - 1, gain + 2), gained=(float(gain),) * 9)
        for at, gain in enumerate(gains)
    )
    found = attributed(0.02, 0.0).model_copy(update={"steps": (step("traced", 0, 0), step("x", 1, 1, *costs))})
    (plot,) = charts.by_layer(found)
    page = draw("layers", plot)
    zero = number(shapes(page, "line", "axis")[0], "y1")
    bars, whiskers = page.all("rect"), shapes(page, "line", "whisker")
    scale = 132 / (max(0, max(gains) + 2) - min(0, min(gains) - 1))
    for gain, bar, whisker in zip(gains, bars, whiskers, strict=True):
        top, bottom = number(bar, "y"), number(bar, "y") + number(bar, "height")
        assert (zero - top, bottom - zero) == pytest.approx((scale * max(gain, 0), scale * max(-gain, 0)), abs=0.2)
        assert bar["class"] == ("ours" if gain >= 0 else "theirs")
        assert number(whisker, "y1") - number(whisker, "y2") == pytest.approx(3 * scale, abs=0.2)
    assert len(plot.ticks) <= 12
    assert plot.ticks[0].label == "0"
    assert f"most: layer {gains.index(max(gains))}," in plot.description


def moved(metric: str, difference: Estimate | None) -> Change:
    low, high = (None, None) if difference is None else (difference.low, difference.high)
    better = catalog.named(metric).better
    worse = (low is not None and low > 0) if better == "lower" else (high is not None and high < 0)
    return Change(metric=metric, a=of(1.0), b=of(1.0), difference=difference, worse=worse)


@given(metric=st.sampled_from(["kld_mean", "top1_agreement"]), value=EIGHTHS, below=LENGTHS, above=LENGTHS)
@FEW
def test_a_change_lies_on_its_side_of_zero_in_its_color(metric: str, value: float, below: float, above: float) -> None:
    low, high = value - below, value + above
    plot = charts.change(moved(metric, of(value, low, high)))
    assert plot is not None
    reach = 1.2 * max(abs(low), abs(high)) or 1.0
    assert (plot.low, plot.value, plot.high) == pytest.approx([50 + 50 * each / reach for each in (low, value, high)])
    down, up = ("better", "worse") if metric == "kld_mean" else ("worse", "better")
    assert plot.kind == (up if low > 0 else down if high < 0 else "same")
    page = draw("change", plot, HOSTILE)
    assert page.all("circle")[0]["class"] == f"dot {plot.kind}"
    assert page.all("svg")[0]["aria-label"] == f"{HOSTILE}: {plot.kind}"


@pytest.mark.parametrize("difference", [None, of(1.0), of(math.nan, 0.0, 1.0), of(math.inf, 0.0, 1.0)])
def test_a_change_without_interval_or_figure_is_not_drawn(difference: Estimate | None) -> None:
    assert charts.change(moved("kld_mean", difference)) is None


def test_bounds_of_a_change_that_are_no_numbers_reach_both_ends() -> None:
    for low, high in ((-math.inf, math.inf), (math.nan, math.nan)):
        plot = charts.change(moved("kld_mean", of(0.5, low, high)))
        assert plot is not None
        assert (plot.low, plot.high) == (0, 100)
        draw("change", plot, "a title")


def entries(*figures: Estimate | None, metric: str = "kld_mean") -> list[HistoryEntry]:
    """Make a history of one metric; each version is worse than the one before by its figure."""
    found = []
    for at, (before, figure) in enumerate(zip([None, *figures], figures, strict=False)):
        side = ArtifactReference(name="tiny", version=f"{at}" * 12, content="c", evidence="e",
                    created="2026-11-21T10:42:00+00:00", documents=9)  # fmt: skip
        worse = before is not None and figure is not None and figure.value > before.value
        change = Change(metric=metric, a=before, b=figure, difference=None, worse=worse)
        found.append(HistoryEntry(side=side, verdict="pass", metrics=(change,)))
    return found


@pytest.mark.parametrize(
    ("metric", "said"),
    [
        ("kld_mean", "lower"),
        ("top1_agreement", "higher"),
        ("eos_shift_at_ends", "nearer to 0"),
        ("eos_shift_elsewhere", "nearer to 0"),
        ("greedy_ends_added", "nearer to 0"),
        ("greedy_length_ratio", "nearer to 1"),
    ],
)
def test_a_history_says_which_way_is_better(metric: str, said: str) -> None:
    page = render.history_page("tiny", entries(of(0.9), of(0.95), metric=metric))
    assert f"; {said} is better</figcaption>" in page


@given(st.lists(LENGTHS, min_size=1, max_size=9))
@FEW
def test_a_course_goes_from_the_oldest_version_to_the_newest_at_the_height_of_its_figures(values: list[float]) -> None:
    (plot,) = charts.courses(entries(*(of(value, value, value + 1) for value in values)))
    bottom, span = min(values), max(values) + 1 - min(values)
    assert [place.value for place in plot.placed] == pytest.approx([(value - bottom) / span for value in values])
    places = [place.at for place in plot.placed]
    assert places == sorted(set(places))
    assert plot.ticks[-1].at == places[-1]
    page = draw("course", plot)
    assert [number(dot, "cy") for dot in page.all("circle")] == pytest.approx(
        [150 - 120 * place.value for place in plot.placed], abs=0.06
    )
    assert page.text.count("▼") == sum(after > before for before, after in pairwise(values))
    for whisker in shapes(page, "line", "whisker"):
        assert number(whisker, "y1") - number(whisker, "y2") == pytest.approx(120 / span, abs=0.11)


def test_a_course_leaves_out_what_is_no_number_and_ends_unbounded_whiskers_at_its_edge() -> None:
    (plot,) = charts.courses(entries(of(1.0, 0.5, math.inf), None, of(math.nan), of(2.0, math.nan, 2.5)))
    assert [place.at for place in plot.placed] == [22, 94]
    assert [(place.low, place.high) for place in plot.placed] == [(0, 1), (0, 1)]
    assert charts.courses(entries(None, of(math.nan))) == []
    (flat,) = charts.courses(entries(of(1.0), of(1.0)))
    assert [place.value for place in flat.placed] == [0.5, 0.5]
    (one,) = charts.courses(entries(of(1.0)))
    assert [place.at for place in one.placed] == [50]
    for each in (plot, flat, one):
        draw("course", each)


@given(st.lists(st.integers(0, 10**9), min_size=1, max_size=12), st.integers(0, 10**6))
@FEW
def test_parts_of_an_engine_lie_end_to_end_and_fill_it(size_bytes: list[int], rest: int) -> None:
    groups = tuple(
        reports.ENGINE.weights[0].model_copy(update={"name": f"{at}", "size_bytes": size})
        for at, size in enumerate(size_bytes)
    )
    total = sum(size_bytes) + rest
    file = reports.ENGINE.files[0].model_copy(update={"size_bytes": total})
    parts = charts.sizes(reports.ENGINE.model_copy(update={"weights": groups, "files": (file,)}))
    assert sum(part.size_bytes for part in parts) == total
    for part, behind in pairwise(parts):
        assert part.start + 100 * part.share == pytest.approx(behind.start)
    if total:
        assert parts[-1].start + 100 * parts[-1].share == pytest.approx(100)
    page = draw("parts", parts)
    assert [number(each, "width") for each in page.all("rect")] == pytest.approx(
        [100 * part.share for part in parts], abs=0.006
    )


def test_an_engine_without_weights_has_no_parts() -> None:
    assert charts.sizes(reports.ENGINE.model_copy(update={"weights": ()})) == []


@given(st.lists(st.integers(0, 640).map(lambda number: number / 64), min_size=1, max_size=9))
@FEW
def test_stages_follow_each_other_through_the_time_of_the_build(seconds: list[float]) -> None:
    stages = tuple(StageRecord(title=f"{at}", seconds=each) for at, each in enumerate(seconds))
    found = charts.stages(reports.make().build.model_copy(update={"stages": stages, "seconds": sum(seconds)}))
    assert [stage for stage, _, _ in found] == list(stages)
    scale = 100 / (sum(seconds) or 1.0)
    assert [start for _, start, _ in found] == pytest.approx([scale * each for each in accumulate([0, *seconds])][:-1])
    assert [length for _, _, length in found] == pytest.approx([scale * each for each in seconds])


def test_bars_of_latency_are_as_long_as_their_medians() -> None:
    found = load_charts.bars(reports.LATENCY)
    (ttft, tpot) = found.values()
    assert [bar.side for bar in ttft] == ["artifact", "baseline"] * 2
    for bars, medians in ((ttft, (2.31, 9.8, 31.7, 58.2)), (tpot, (0.482, 5.71, 0.611, 6.02))):
        longest = 1.18 * max(medians)  # its 95th percentile
        assert [bar.percent for bar in bars] == pytest.approx([100 * each / longest for each in medians])
        assert [bar.tail_percent for bar in bars] == pytest.approx([118 * each / longest for each in medians])
        page = draw("bar", bars[0].percent, "a title", "ours", bars[0].tail_percent)
        assert number(page.all("rect")[0], "width") == pytest.approx(bars[0].percent, abs=0.006)
        assert number(page.all("line")[0], "x1") == pytest.approx(bars[0].tail_percent, abs=0.006)


def test_the_darkest_cell_of_a_surface_is_the_worst_one() -> None:
    measured = wide().latency
    assert measured is not None
    for surface, name in zip(load_charts.surfaces(measured), ("ttft_ms", "tpot_ms", "rate"), strict=True):
        values = {
            (point.batch, point.prompt_tokens): point.figures["output_tokens_per_second"].value
            if name == "rate"
            else point.artifact.figures[name].p50.value
            for point in measured.points
        }
        cells = {
            (batch, prompt): cell.shade
            for batch, row in surface.rows
            for prompt, cell in zip(surface.prompts, row, strict=True)
            if cell is not None
        }
        order = sorted(values, key=lambda load: values[load], reverse=name == "rate")
        assert sorted(cells, key=lambda load: cells[load]) == order, surface.title
        assert (cells[order[0]], cells[order[-1]]) == (0, pytest.approx(1))


def test_lines_over_a_load_rise_with_what_was_measured() -> None:
    measured = wide().latency
    assert measured is not None
    for plot in load_charts.over_load(measured):
        page = draw("over_load", plot)
        dots = [number(dot, "cy") for dot in page.all("circle")]
        places = [place for line in plot.lines if not line.bound for place in line.places]
        assert dots == pytest.approx([176 - 158 * place[1] for place in places], abs=0.06)
        levels = [number(line, "y1") for line in page.all("line")[: len(plot.levels)]]
        assert levels == sorted(levels, reverse=True)  # the least at the bottom
        assert plot.title.startswith(("Time", "Output"))


def test_hostile_names_stay_text_in_every_chart() -> None:
    cost = LayerCost(name=HOSTILE, gain=of(0.1, 0.05, 0.2), gained=(0.1,) * 9)
    steps = (step(HOSTILE, 0, 0), step(HOSTILE, 0.1, 0.1, cost))
    found = attributed(0.1, names=("x",)).model_copy(update={"steps": steps})
    done = reports.PASSES[2].model_copy(update={"name": HOSTILE})
    weights = tuple(each.model_copy(update={"name": HOSTILE}) for each in reports.ENGINE.weights)
    stage = StageRecord(title=HOSTILE, seconds=1.0)
    against = Earlier(HOSTILE, {"kld_mean": of(0.1, 0.05, 0.2)}, {"kld_mean": 0.1})
    gates = judge({"kld_mean": GateSpec(rise_max=0.15)}, {}, earlier=against)
    build = reports.make().build.model_copy(update={"stages": (stage,)})
    report = reports.make(attribution=found, passes=(done,), gates=gates, build=build, verdict=Verdict.INCONCLUSIVE,
                          engine=reports.ENGINE.model_copy(update={"weights": weights}))  # fmt: skip
    page = pages.check(render.to_html(report))
    assert "script" not in {tag for tag, _ in page.tags}
    labels = [svg["aria-label"] or "" for svg in page.all("svg")]
    assert sum("<script>alert(1)</script>" in label for label in labels) >= 6
    markdown = render.to_markdown(report)
    assert "<script>" not in markdown
    assert not any(line.startswith("# &") for line in markdown.splitlines())
