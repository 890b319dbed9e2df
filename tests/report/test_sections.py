"""Every section of the page, and its counterpart in Markdown: the rows are those of the record, in their order."""

from __future__ import annotations

import html as entities
import re

import numpy as np

from llmforge.gates.records import Report
from llmforge.metrics.adapters import AdapterQuality
from llmforge.metrics.behaviour import results
from llmforge.metrics.behaviour.answer import BehaviourAnswer
from llmforge.metrics.behaviour.document import BehaviourDocument
from llmforge.metrics.retrieval import results as retrieval
from llmforge.metrics.retrieval.corpus import RetrievalCorpus
from llmforge.metrics.retrieval.results import Side
from llmforge.metrics.tasks import Score, TaskResult
from llmforge.report import behaviour, differences, render, view

from ..samples import pages, reports
from .test_charts import attributed
from .test_report import HOSTILE, wide


def section(page: str, name: str) -> str:
    """Give the HTML of a section."""
    found = re.search(rf'<section aria-labelledby="{name}">(.*?)</section>', page, re.DOTALL)
    assert found is not None, name
    return found[1]


def text(markup: str) -> str:
    """Write what is shown of a part of a page, without the words of drawings."""
    shown = re.sub(r"<svg.*?</svg>|</?span[^>]*>", "", markup, flags=re.DOTALL)
    return " ".join(entities.unescape(re.sub(r"<br>|<[^>]+>", " ", shown.replace("<wbr>", ""))).split())


def rows(markup: str) -> list[list[str]]:
    """Read the bodies of all tables: rows of cells."""
    found = re.findall(r"<tr\b.*?</tr>", "".join(re.findall(r"<tbody>.*?</tbody>", markup, re.DOTALL)), re.DOTALL)
    return [[text(cell) for cell in re.findall(r"<(?:td|th)\b.*?</(?:td|th)>", row, re.DOTALL)] for row in found]


def facts(markup: str) -> dict[str, str]:
    """Read a list of terms."""
    return {text(a): text(b) for a, b in re.findall(r"<dt>(.*?)</dt><dd>(.*?)</dd>", markup, re.DOTALL)}


def task(name: str = "quiz") -> TaskResult:
    theirs, documents = (1.0,) * 60 + (0.0,) * 20, tuple(range(80))
    score = Score.of("mean", (0.0,) * 20 + (1.0,) * 40 + (0.0,) * 20, theirs, documents)
    return TaskResult(
        name=name, version="1", digest="0", few_shot=0, documents=documents, scores={"accuracy": score},
        created="2026-01-01T00:00:00+00:00", engine="engine", baseline="checkpoint",
    )  # fmt: skip


def full() -> Report:
    return reports.make(
        latency=wide().latency,
        attribution=attributed(0.0168, 0.0013),
        tasks=(task(), task("riddle")),
        adapters=(AdapterQuality(adapter="legal", quality=reports.QUALITY),
                  AdapterQuality(adapter="medical", quality=reports.QUALITY)),
        engine=reports.ENGINE.model_copy(update={"facts": {"kernels": "own"}}),
    )  # fmt: skip


def test_quality_has_a_row_for_each_figure_and_each_document() -> None:
    found = rows(section(render.to_html(full()), "quality"))
    shown = view.quality_rows(reports.QUALITY)
    assert [row[0] for row in found] == [*(title for title, _, _ in shown), "guide-1", "guide-0"]
    assert ["Mean KLD", "0.0210 0.0200 – 0.0221"] in found
    assert found[-2][:3] == ["guide-1", "25,893", "0.0211"]  # 545.875 / 25,893
    assert found[-1][:3] == ["guide-0", "40,000", "0.0210"]


def test_attribution_has_a_row_for_the_traced_graph_and_each_step() -> None:
    page, markdown = render.to_html(full()), render.to_markdown(full())
    steps = rows(section(page, "attribution"))
    assert [row[0] for row in steps] == ["traced", "quantize-weights", "quantize-kv-cache"]
    assert steps[2][1] == "0.00130 0.00120 – 0.00140"
    assert steps[2][3].startswith("0.0181")
    assert "| quantize-kv-cache | 0.0181 | no interval: only 400 documents | 0.00130 | 0.00120 – 0.00140 |" in markdown


def test_passes_have_a_row_each_and_say_what_they_did() -> None:
    found = section(render.to_html(full()), "passes")
    assert [row[:4] for row in rows(found)] == [
        ["fuse-norms rounding", "172 → 166", "–", "1.20e-11"],
        ["pack-qkv exact", "166 → 154", "–", "0"],
        ["quantize-weights lossy", "154 → 154", "0.0168 0.0167 – 0.0169", "0.0174 of 0.03"],
        ["quantize-kv-cache lossy", "154 → 154", "0.00130 0.00120 – 0.00140", "0.000400 of 0.002"],
    ]
    shown = text(found)
    assert "fuse-norms : 3 rewritten, 1 skipped" in shown
    assert "option method : gptq" in shown
    assert "skipped node_norm_0 : its input is no residual Add but the embedding" in shown
    assert "proven on prefill, decode, ragged" in shown
    assert text(section(render.to_html(reports.make(passes=())), "passes")) == "Passes The recipe has no passes."


def test_tasks_and_adapters_have_a_row_each_in_every_form() -> None:
    page, markdown = render.to_html(full()), render.to_markdown(full())
    quiz, riddle = rows(section(page, "tasks"))
    assert quiz[:6] == ["quiz", "accuracy", "80", "75.0 %", "50.0 %", "-25.0 %"]
    low, high = (float(bound.removesuffix(" %")) for bound in quiz[6].split(" – "))
    assert low < -25 < high < 0
    assert riddle[0] == "riddle"
    assert f"| quiz | accuracy | 80 | 75.0 % | 50.0 % | -25.0 % | {quiz[6]} |" in markdown
    legal, medical = rows(section(page, "adapters"))
    assert legal[:3] == ["legal", "56", "65,893"]
    assert "0.0210 (0.0200 – 0.0221)" in legal
    assert medical[0] == "medical"
    assert f"| {' | '.join(legal)} |" in markdown


def test_behaviour_has_a_row_for_each_figure_and_slice_and_chats_side_by_side() -> None:
    asked = [
        BehaviourDocument.model_validate(
            {"id": f"{HOSTILE}{i}", "slice": f"part-{i % 6}", "messages": [{"role": "user", "content": HOSTILE}],
             "instructions": {"contains": ["yes"]}}
        )
        for i in range(60)
    ]  # fmt: skip
    yes, no = BehaviourAnswer(f"Say yes{HOSTILE}", tokens=3), BehaviourAnswer("Say <b>no</b>", tokens=6)
    found = results.measured(asked, [no, *[yes] * 59], [yes] * 60, engine="engine", baseline="checkpoint")
    report = reports.make(behaviour=found)
    page = section(render.to_html(report), "behaviour")
    assert [row[0] for row in rows(page)] == [
        *(behaviour.title(name) for name in found.outcomes), *(f"part-{i}" for i in range(6)),
    ]  # fmt: skip
    checks = rows(page)[0]
    assert checks[1:5] == ["60", "100.0 %", "98.3 %", "-1.7 %"]
    assert checks[-1] == "part-0, -10.0 %"
    assert page.count("<details") == 5
    assert page.count("<mark>") == 2
    assert "Say <mark>" in page
    assert "came out otherwise" in page
    assert HOSTILE not in page
    assert "<b>no</b>" not in page
    assert "part-0, -10.0 %" in render.to_markdown(report).replace("\\", "")
    assert "Behaviour" not in render.to_markdown(reports.make())


def test_what_differs_is_marked_by_words_and_few_words_between_are_too() -> None:
    left, right = differences.pieces(
        "The tea takes 12 minutes, and then it is ready.", "The tea takes 120 minutes, ready."
    )
    assert left == [
        ("The tea takes ", False),
        ("12", True),
        (" minutes, ", False),
        ("and then it is ", True),
        ("ready.", False),
    ]
    assert right == [("The tea takes ", False), ("120", True), (" minutes, ", False), ("ready.", False)]
    left, right = differences.pieces("one a two", "1 a 2")
    assert (left, right) == ([("one a two", True)], [("1 a 2", True)])
    assert differences.pieces("same", "same") == ([("same", False)], [("same", False)])
    assert differences.pieces("", "new") == ([], [("new", True)])
    assert differences.pieces("Say", "Say it") == ([("Say", False)], [("Say", False), (" it", True)])


def test_retrieval_has_a_row_for_each_figure() -> None:
    texts = tuple(f"text {i}" for i in range(20))
    corpus = RetrievalCorpus(texts, texts, tuple(frozenset({i}) for i in range(20)))
    made = np.eye(20, dtype=np.float32)
    worse = made.copy()
    worse[0, :2] = 0.6, 0.8
    sides = [Side(list(each), np.concatenate([each, made])) for each in (worse, made)]
    report = reports.make(retrieval=retrieval.measured(corpus, None, *sides, engine="engine", baseline="checkpoint"))
    page, markdown = rows(section(render.to_html(report), "retrieval")), render.to_markdown(report)
    assert page[0][:3] == ["nDCG@10", "1.0000", "0.9815"]
    assert page[0][4] == "-0.0185"
    assert [row[0] for row in page[2:]] == ["Cosine to the checkpoint, mean", "Cosine to the checkpoint, 1 % quantile"]
    assert page[2][1:3] == ["–", "0.99000"]
    assert "embedded the same 20 queries and 20 passages" in markdown
    assert "| nDCG@10 | 1.0000 | 0.9815 |" in markdown
    pairs = [Side(list(each[:, :4])) for each in (worse, made)]
    chosen = [[0, 1, 2, 3]] * 20
    corpus = RetrievalCorpus(texts, texts, tuple(frozenset({i % 4}) for i in range(20)))
    ranked = retrieval.measured(corpus, chosen, *pairs, engine="engine", baseline="checkpoint")
    report = reports.make(retrieval=ranked)
    assert [row[0] for row in rows(section(render.to_html(report), "retrieval"))] == [
        "nDCG@10", "Spearman's ρ to the checkpoint", "Kendall's τ to the checkpoint",
    ]  # fmt: skip
    assert "Retrieval" not in render.to_markdown(reports.make())


def test_a_task_that_got_better_has_a_plus() -> None:
    better = task().scores["accuracy"]
    turned = Score.of("mean", better.baseline or (), better.artifact, tuple(range(80)))
    report = reports.make(tasks=(task().model_copy(update={"scores": {"accuracy": turned}}),))
    assert rows(section(render.to_html(report), "tasks"))[0][5] == "+25.0 %"


def test_latency_and_workloads_have_a_row_for_each_load() -> None:
    page = render.to_html(full())
    measured = full().latency
    assert measured is not None
    found = rows(section(page, "latency"))
    ttft = [row for row in found if row[0].startswith("artifact")][:3]
    assert [row[0] for row in ttft] == [f"artifact {prompt} prompt tokens" for prompt in (32, 128, 512)]
    surface = [row for row in found if len(row) == 4 and row[0] in ("1", "2", "8")]
    assert len(surface) == 9  # three tables of three batch sizes
    for table in (view.timing_table(measured, charts=True), view.point_table(measured)):
        for row in table.rows:
            assert [*row[1:]] in [shown[1:] for shown in found], row
    workloads = rows(section(page, "workloads"))
    assert {row[0].split()[0] for row in workloads} == {"shared"}
    assert any("45.0 ms" in row for row in workloads)


def test_size_build_engine_and_provenance_hold_their_facts() -> None:
    report = full()
    page = render.to_html(report)
    assert rows(section(page, "sizes")) == [
        ["model.layers.*.mlp.down_proj.weight 6 × uint8", "2.95 MB", "58.0 %"],
        ["model.embed_tokens.weight uint8", "2.06 MB", "40.6 %"],
        ["no weights graph, configuration and alignment", "73.6 kB", "1.4 %"],
    ]
    assert rows(section(page, "build")) == [
        ["Trace", "9.1 s", "", "820 MB"], ["Calibrate", "31.0 s", "", "1.31 GB"],
        ["Engine", "0.4 s", "", "–"], ["Quality", "33.7 s", "", "990 MB"],
    ]  # fmt: skip
    engine = facts(section(page, "engine"))
    assert engine["Backend"] == "onnxruntime"
    assert engine["Files"] == "model.onnx 61.3 kB; model.onnx.data 5.03 MB"
    assert engine["kernels"] == "own"
    assert engine["threads"] == "2"
    provenance = facts(section(page, "provenance"))
    assert provenance["Checkpoint"] == f"docs-llama-7m, 13.6 MB of bf16 sha256:{'5b' * 32}"
    assert provenance["Calibration"].endswith(f"32,768 tokens sha256:{'c1' * 32}")
    assert provenance["Versions"] == "llmforge 0.1.0, onnxruntime 1.31.1, torch 2.13.0"
    assert '"kld_mean": { "max": 0.022 }' in text(section(page, "provenance"))


def test_sections_are_there_if_there_is_something_to_say() -> None:
    always = ["gates", "quality", "latency", "passes", "engine", "provenance"]
    bare = reports.make(quality=None, latency=None, passes=(), gates=(), notes=(),
                        engine=reports.ENGINE.model_copy(update={"weights": ()}),
                        build=reports.make().build.model_copy(update={"stages": ()}))  # fmt: skip
    assert re.findall(r'<section aria-labelledby="(\w+)">', render.to_html(bare)) == always
    everything = re.findall(r'<section aria-labelledby="(\w+)">', render.to_html(full()))
    assert set(everything) - set(always) == {"answers", "workloads", "tasks", "adapters", "attribution", "sizes",
                                             "build"}  # fmt: skip
    assert re.findall(r'<a href="#(\w+)">', render.to_html(full())) == everything


def test_hostile_names_of_adapters_stay_text() -> None:
    report = reports.make(adapters=(AdapterQuality(adapter=HOSTILE, quality=reports.QUALITY),))
    page, markdown = pages.check(render.to_html(report)), render.to_markdown(report)
    assert "script" not in {tag for tag, _ in page.tags}
    assert page.text.count("<script>alert(1)</script>") == 1
    (line,) = (line for line in markdown.splitlines() if r"\<script\>" in line)
    assert line.count("|") - line.count(r"\|") == 1 + len(view.adapter_rows(report)[0])
