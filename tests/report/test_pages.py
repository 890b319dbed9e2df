"""All pages: what holds for each of them, and how they look in Chromium where there is one."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from html import escape, unescape
from pathlib import Path

import onnx_ir as ir
import pytest
from click.testing import CliRunner

from llmforge.artifact import Artifact
from llmforge.cli import cli
from llmforge.gates import comparison, records
from llmforge.gates.comparison import Previous
from llmforge.metrics import catalog
from llmforge.report import charts, render, top

from ..samples import pages, reports
from ..samples.stored import latency, put, quality
from .test_report import HOSTILE, hostile, wide

CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")
WIDTHS = (390, 1280)


def store(out: Path) -> list[Artifact]:
    """Publish three versions: the second is better, the third worse than the one before."""
    facts = [(0.021, 0.5), (0.018, 0.4), (0.024, 0.6)]
    return [
        put(out, days=day, quality=quality(kld), latency=latency(tpot), files={"engine/model.onnx": graph(day)})
        for day, (kld, tpot) in enumerate(facts)
    ]


def graph(nodes: int) -> bytes:
    """The file of a graph of so many nodes, and one."""
    lines = "".join(f" a{number + 1} = Neg (a{number})" for number in range(nodes + 1))
    text = f'<ir_version: 10, opset_import: ["" : 24]> g (float[2] a0) => (float[2] a{nodes + 1}) {{{lines} }}'
    return ir.to_proto(ir.from_onnx_text(text)).SerializeToString()


def previous(out: Path) -> tuple[records.Report, Previous]:
    *_, last = store(out)
    report = records.read(last)
    found = comparison.previous(out, report)
    assert isinstance(found, Previous)
    return report, found


def every(out: Path) -> dict[str, str]:
    """Write every page there is."""
    report, before = previous(out)
    versions = [Artifact.open(path.parent) for path in sorted(out.glob("tiny/*/manifest.json"))]
    versions.sort(key=lambda each: each.evidence[0].created)
    entries = comparison.history(versions, tuple(catalog.deciding()))
    return {
        "report": render.to_html(reports.make()),
        "surface": render.to_html(wide()),
        "hostile": render.to_html(hostile()),
        "empty": render.to_html(reports.make(quality=None, latency=None, passes=(), gates=(), notes=())),
        "beside": render.to_html(report, before),
        "diff": render.diff_page(comparison.compare(*versions[1:]), [HOSTILE]),
        "history": render.history_page("tiny", entries),
        "first": render.history_page("tiny", entries[:1]),
    }


def test_every_page_stands_alone_and_is_accessible(tmp_path: Path) -> None:
    for name, html in every(tmp_path).items():
        page = pages.check(html)
        assert "script" not in {tag for tag, _ in page.tags}, name


def test_the_version_before_stands_beside_its_successor(tmp_path: Path) -> None:
    report, before = previous(tmp_path)
    assert before.report.created == "2026-11-22T10:42:00+00:00"  # the second of three
    page = pages.check(render.to_html(report, before))
    assert f"Against {before.reference} (PASS, measured 2026-11-22 10:42 UTC)" in page.text
    assert "▼ worse than 0.0179 before" in page.text
    findings = re.findall("▼ worse|▲ better|no change shown", page.text[page.text.index("Change of each metric") :])
    assert findings == sorted(findings, key=["▼ worse", "no change shown", "▲ better"].index)
    assert findings[0] == "▼ worse"
    assert "0.400 ms before" in page.text  # of another run: no word on which is better
    tiles = {tile.figure.title: tile for panel in top.panels(report, before) for tile in panel.tiles}
    assert tiles["Mean KLD"].change is not None
    assert tiles["Mean KLD"].change.worse
    assert "Since the previous version" not in render.to_html(report)


def test_durations_of_another_load_are_not_set_beside(tmp_path: Path) -> None:
    report, before = previous(tmp_path)
    assert report.latency is not None
    points = tuple(point.model_copy(update={"prompt_tokens": 99}) for point in report.latency.points)
    longer = report.model_copy(update={"latency": report.latency.model_copy(update={"points": points})})
    tiles = {tile.figure.title: tile.before for panel in top.panels(longer, before) for tile in panel.tiles}
    assert tiles["TPOT"] is None
    assert tiles["Mean KLD"] == "0.0179"


def test_there_is_no_previous_of_the_first_and_a_damaged_one_is_told(tmp_path: Path) -> None:
    (only,) = [put(tmp_path)]
    report = records.read(only)
    assert comparison.previous(tmp_path / "nothing", report) is None
    assert comparison.previous(tmp_path, report) is None
    later = report.model_copy(update={"content": "f" * 64})
    assert isinstance(comparison.previous(tmp_path, later), Previous)
    first = only.evidence[0].created
    assert comparison.previous(tmp_path, later, made=first.replace(year=2020)) is None
    record = next((only.path / "evidence").iterdir())
    only.path.joinpath("evidence").chmod(0o755)
    record.chmod(0o644)
    record.write_bytes(record.read_bytes()[:-20])
    said = comparison.previous(tmp_path, later)
    assert isinstance(said, str)
    assert said.startswith(f"the version before, tiny/{only.path.name}, cannot be read: ")


def test_diff_and_history_write_pages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _, second, third = store(tmp_path / "store")
    monkeypatch.setenv("LLMFORGE_ARTIFACTS", str(tmp_path / "store"))
    monkeypatch.chdir(tmp_path)
    run = CliRunner().invoke
    assert run(cli, ["diff", str(second.path), str(third.path), "--html", "d.html"]).exit_code == 0
    page = pages.check((tmp_path / "d.html").read_text())
    assert "0 better" in page.text
    assert re.search(r"Mean KLD\s*0.0179\s*0.0239\s*\+0.00\d+\s*\+0.00\d+ to \+0.00\d+", page.text)
    assert "▼ worse" in page.text
    assert "40 documents were measured of both" in page.text
    assert run(cli, ["history", "tiny", "--html", "h.html", "--json"]).exit_code == 0
    page = pages.check((tmp_path / "h.html").read_text())
    for version in (second, third):
        assert version.path.name in page.text
    assert len(page.all("svg")) > 5
    for words in (["diff", str(second.path), str(third.path)], ["history", "tiny"]):
        refused = run(cli, [*words, "--html", "no/such/folder.html"])
        assert refused.exit_code == 2
        assert "no/such/folder.html: cannot be written" in refused.output


def test_a_course_marks_its_regressions(tmp_path: Path) -> None:
    entries = comparison.history(store(tmp_path), ("kld_mean", "tpot_p50_ms", "kld_p999"))
    kld, tpot, *_ = charts.courses(entries)
    assert [place.kind for place in kld.placed] == ["same", "better", "worse"]
    assert kld.placed[1].value < kld.placed[0].value < kld.placed[2].value
    assert kld.placed[0].low is not None
    assert f"regressions in {entries[2].side.version}" in kld.description
    assert [place.kind for place in tpot.placed] == ["same"] * 3  # of other runs
    assert "no regression" in tpot.description


def test_a_change_is_drawn_around_zero_and_true_to_scale(tmp_path: Path) -> None:
    _, second, third = store(tmp_path)
    found = {change.metric: change for change in comparison.compare(second, third).metrics}
    plot, moved = charts.change(found["kld_mean"]), found["kld_mean"].difference
    assert plot is not None
    assert moved is not None
    assert plot.kind == "worse"
    assert moved.high is not None
    assert (plot.high - 50) / (plot.value - 50) == pytest.approx(moved.high / moved.value)
    assert 50 < plot.low < plot.value < plot.high < 100
    assert charts.change(found["tpot_p50_ms"]) is None


@pytest.mark.thorough
@pytest.mark.skipif(CHROMIUM is None, reason="there is no Chromium")
def test_nothing_is_cut_off_in_a_window_of_a_telephone_or_a_desk(tmp_path: Path) -> None:
    frames = []
    for name, html in every(tmp_path / "store").items():
        shown = re.sub("<meta http-equiv[^>]*>", "", html).replace("<details>", "<details open>")
        frames += [
            f'<iframe title="{name}" style="width: {width}px" srcdoc="{escape(shown)}"></iframe>' for width in WIDTHS
        ]
    file = tmp_path / "frames.html"
    file.write_text(f"<!doctype html>{''.join(frames)}<p id=found></p><script>{_LOOK}</script>", encoding="utf-8")
    dom = chromium(tmp_path, "--dump-dom", "--window-size=1400,900", file.as_uri())
    said = re.search(r'<p id="found">(.*?)</p>', dom, re.DOTALL)
    assert said is not None
    found = json.loads(unescape(said[1]))
    assert len(found) == len(frames)
    assert all(each["height"] > 300 for each in found)  # it was laid out
    wrong = [f"{each}"[:600] for each in found if each["page"] > each["window"] or each["cut"]]
    assert not wrong, "\n".join(wrong)


_LOOK = """addEventListener("load", () => {
  const found = [...document.querySelectorAll("iframe")].map((frame) => {
    const page = frame.contentDocument, width = frame.contentWindow.innerWidth;
    const cut = [...page.querySelectorAll("main *, header *")].filter((each) =>
      each.getBoundingClientRect().right > width + 1 && !each.closest("pre, .unseen, thead, svg"));
    return {name: frame.title, window: width, page: page.documentElement.scrollWidth,
      height: page.documentElement.scrollHeight,
      cut: cut.map((each) => each.tagName + " " + each.textContent.slice(0, 40)).join(";")};
  });
  document.querySelector("#found").textContent = JSON.stringify(found);
});"""


@pytest.mark.thorough
@pytest.mark.skipif(CHROMIUM is None, reason="there is no Chromium")
def test_both_color_schemes_are_drawn(tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    page.write_text(render.to_html(reports.make()), encoding="utf-8")
    sizes = {}
    for scheme in (0, 1):  # dark, light
        file = tmp_path / f"{scheme}.png"
        chromium(tmp_path, f"--blink-settings=preferredColorScheme={scheme}", f"--screenshot={file}", page.as_uri())
        sizes[scheme] = file.read_bytes()
    assert all(data.startswith(b"\x89PNG") and len(data) > 10_000 for data in sizes.values())
    assert sizes[0] != sizes[1]


def chromium(home: Path, *options: str) -> str:
    """Run it without a window; return what it writes."""
    assert CHROMIUM is not None
    command = [CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={home / 'profile'}", *options]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=True).stdout
