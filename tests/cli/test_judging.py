"""The commands that judge releases, through the runner: verdicts, exit codes, and the forms that pipelines read."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import onnx_ir as ir
import pytest
from click.testing import CliRunner, Result

from llmforge.artifact import Artifact
from llmforge.cli import cli
from llmforge.gates import comparison, records
from llmforge.gates.records import EngineFile, EngineRecord
from llmforge.metrics import catalog
from llmforge.metrics.quality import DocumentSums, Quality, summarize
from llmforge.metrics.quality_metrics import QualityMetric
from llmforge.metrics.tasks import Score, TaskResult
from llmforge.metrics.token_records import WindowScores
from llmforge.report import comparison_text

from ..samples import pages, releases, reports
from ..samples.stored import FILES, put

MARGIN = {"kld_mean": {"max": 0.05, "rise_max": 0.005}}


@pytest.fixture(autouse=True)
def out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("LLMFORGE_ARTIFACTS", str(tmp_path / "store"))
    return tmp_path / "store"


def invoke(*args: object) -> Result:
    result = CliRunner().invoke(cli, [str(word) for word in args])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result


def quality(documents: list[DocumentSums]) -> Quality:
    """The quality of real documents, whose tokens are made up: each has its share of the sums."""
    forms = {metric.name: metric.form for metric in catalog.of_kind(QualityMetric) if metric.source == "text"}
    return summarize(forms, {each.document: [WindowScores(1, tokens(each))] for each in documents}, context=512)


def tokens(sums: DocumentSums) -> dict[str, np.ndarray]:
    count, same = sums.tokens, round(sums.figures["same_top"])
    shared = {name: np.full(count, total / count) for name, total in sums.figures.items()}
    uneven = -np.log((np.arange(count) + 0.5) / count)  # some tokens are much worse than others
    shared["kld"] *= uneven / uneven.mean()
    # What the recorded builds did not measure is that of a model that did not change.
    unmoved = {"delta_p": np.zeros(count), "end_shift_elsewhere": np.zeros(count)}
    return {"shared_top": np.ones(count), **unmoved, **shared, "same_top": np.arange(count) < same}


def worse(by: float, count: int = 56) -> list[DocumentSums]:
    """Documents that moved by so many nats a token more, give or take a third."""
    made = []
    for i, each in enumerate(releases.documents("gptq")[:count]):
        moved = by * each.tokens * (1 + math.sin(i) / 3)
        made.append(each.model_copy(update={"kld": each.figures["kld"] + moved}))
    return [DocumentSums.model_validate({**each.model_dump(), **each.__dict__}) for each in made]


def pair(out: Path, by: float, count: int = 56, gates: dict[str, Any] = MARGIN, **changes: Any) -> tuple[str, str]:
    """Publish yesterday's artifact and today's, which is worse `by` so much."""
    old = put(out, "old", gates=gates, quality=quality(releases.documents("gptq")[:count]))
    new = put(out, "new", gates=gates, days=1, **{"quality": quality(worse(by, count)), **changes})
    return f"tiny/{old.path.name}", f"tiny/{new.path.name}"


def test_a_planted_regression_fails(out: Path) -> None:
    old, new = pair(out, 0.01)
    done = invoke("gate", new, "--against", old)
    assert done.exit_code == 3
    assert f"FAIL: {new} against {old}: 1 of 2 gates failed\n" in done.stdout
    assert "FAIL  kld_mean: change +0.01" in done.stdout
    assert "allowed is a rise of at most 0.005" in done.stdout
    assert "one that did not change passes with 100 %" in done.stdout
    assert "post hoc" not in done.stdout


def test_equal_artifacts_pass(out: Path) -> None:
    old, new = pair(out, 0.0)
    done = invoke("gate", new, "--against", old)
    assert (done.exit_code, done.stderr) == (0, "")
    assert done.stdout.startswith(f"PASS: {new} against {old}: all 2 gates passed\n")


def test_three_documents_are_inconclusive_and_the_number_named_decides(out: Path) -> None:
    old, new = pair(out, 0.01, count=3)
    done = invoke("gate", new, "--against", old, "--json")
    assert done.exit_code == 4
    (relative,) = [gate for gate in json.loads(done.stdout)["gates"] if gate["bound"] == "rise_max"]
    assert relative["verdict"] == "inconclusive"
    assert relative["underpowered"]
    needed = relative["samples_needed"]
    assert 8 <= needed <= 56
    for artifact in (old, new):
        assert invoke("rm", artifact).exit_code == 0
    assert invoke("gate", (again := pair(out, 0.01, count=needed))[1], "--against", again[0]).exit_code == 3


def test_a_tail_of_the_same_tokens_is_compared_document_by_document(out: Path) -> None:
    """The 99th percentile moved by a hundredth of a nat: seen beside the same documents, and not by two intervals."""
    gates = {"kld_p99": {"rise_max": 0.005}}
    old, new = pair(out, 0.01, gates=gates)
    done = invoke("gate", new, "--against", old, "--json")
    assert done.exit_code == 3
    (gate,) = json.loads(done.stdout)["gates"]
    moved = gate["measured"]
    both = [records.read(Artifact.open(out / each)).quality for each in (old, new)]
    unpaired = both[1].figures["kld_p99"].less(both[0].figures["kld_p99"])
    assert moved["value"] == pytest.approx(unpaired.value)
    assert 1.5 * (moved["high"] - moved["low"]) < unpaired.high - unpaired.low


@pytest.mark.parametrize("bound", ["min", "max", "drop_max", "rise_max"])
def test_the_upper_tail_of_shifts_is_no_gate(out: Path, tmp_path: Path, bound: str) -> None:
    old, new = pair(out, 0.0)
    file = tmp_path / "gates.yaml"
    file.write_text(f"gates: {{delta_p_p99: {{{bound}: 0.1}}}}\n")
    done = invoke("gate", new, "--gates", file)
    assert done.exit_code == 2
    assert "more of it is neither better nor worse" in done.stderr
    assert "hint: limit the lower tail: delta_p_p01 or delta_p_p05" in done.stderr
    said = "\n".join(comparison_text.text(comparison.compare(Artifact.open(out / old), Artifact.open(out / new))))
    assert "delta_p_p99: " in said


def test_a_changed_limit_is_judged_again_and_said_to_be_post_hoc(out: Path, tmp_path: Path) -> None:
    old, new = pair(out, 0.01)
    file = tmp_path / "gates.yaml"
    file.write_text(f"baseline: {old}\ngates: {{kld_mean: {{max: 0.05, rise_max: 0.02}}}}\n")
    done = invoke("gate", new, "--gates", file, "--json")
    assert done.exit_code == 0
    found = json.loads(done.stdout)
    assert found["post_hoc"]
    assert {gate["bound"]: gate["post_hoc"] for gate in found["gates"]} == {"max": False, "rise_max": True}
    assert "(post hoc)" in invoke("gate", new, "--gates", file).stdout


def test_latest_passed_is_the_newest_earlier_one_that_passed(out: Path) -> None:
    old, new = pair(out, 0.0)
    put(out, "failed", gates={"kld_mean": {"max": 0.001, "rise_max": 1}}, quality=quality(worse(0)))  # same day as old
    put(out, "later", gates=MARGIN, days=2, quality=quality(worse(0.02)))
    for options in ((), ("--against", "latest-passed")):
        done = invoke("gate", new, *options, "--json")
        assert done.exit_code == 0
        against = json.loads(done.stdout)["against"]
        assert f"{against['name']}/{against['version']}" == old
    first = invoke("gate", old)
    assert first.exit_code == 2
    assert "no earlier version of tiny" in first.stderr
    assert "--against none" in first.stderr
    done = invoke("gate", old, "--against", "none")
    assert done.exit_code == 0
    assert "note: limits against an earlier artifact were left out" in done.stdout


def test_documents_that_are_not_the_same_are_not_compared(out: Path) -> None:
    renamed = [each.model_copy(update={"document": f"other-{i}"}) for i, each in enumerate(worse(0.0))]
    old, new = pair(out, 0.0, quality=quality(renamed))
    done = invoke("gate", new, "--against", old)
    assert done.exit_code == 4
    assert "no document was measured of both" in done.stdout


def test_tails_of_other_documents_or_of_another_checkpoint_are_not_compared(out: Path) -> None:
    limits = {"kld_p99": {"max": 9, "rise_max": 9}}
    renamed = [each.model_copy(update={"document": f"other-{i}"}) for i, each in enumerate(worse(0.0))]
    old, new = pair(out, 0.0, gates=limits, quality=quality(renamed))
    done = invoke("gate", new, "--against", old)
    assert done.exit_code == 4
    assert "kld_p99: not compared with" in done.stdout
    assert "no document was measured of both" in done.stdout
    other = put(out, "elsewhere", gates=limits, checkpoint="9" * 64, quality=quality(worse(0.0)))
    done = invoke("gate", f"tiny/{other.path.name}", "--against", old)
    assert done.exit_code == 4
    assert "built from another checkpoint" in done.stdout


def test_what_is_missing_fails(out: Path) -> None:
    old, new = pair(out, 0.0, quality=None)
    done = invoke("gate", new, "--against", old)
    assert done.exit_code == 3
    assert "kld_mean: not measured, limit: a rise of at most 0.005" in done.stdout


def test_latency_of_two_runs_is_not_compared(out: Path) -> None:
    old, new = pair(out, 0.0, gates={"tpot_p50_ms": {"max": 5, "rise_max": 1}})
    done = invoke("gate", new, "--against", old)
    assert done.exit_code == 4
    assert "not compared with tiny/" in done.stdout
    assert "in turns" in done.stdout


def test_a_limit_on_a_tail_that_was_not_timed_in_turns_and_repetitions_that_time_nothing(out: Path) -> None:
    old, new = pair(out, 0.0, gates={"tpot_p95_ms": {"max": 5, "rise_max": 1}})
    assert invoke("gate", new, "--against", old).exit_code == 4
    quality_alone = pair(out, 0.0, gates={"kld_mean": {"max": 0.9, "rise_max": 0.5}})
    for artifact, against in (quality_alone[::-1], (new, "none")):
        done = invoke("gate", artifact, "--against", against, "--repetitions", 80)
        assert done.exit_code == 2
        assert "--repetitions requires a `rise_max` of a duration" in done.stderr


def test_sizes_are_of_the_files_and_exact(out: Path, tmp_path: Path) -> None:
    """By hand, from the manifest and the record of the checkpoint."""
    opened = put(out, files=graph("Neg"))
    report = records.read(opened)
    shipped = sum(file.size_bytes for path, file in opened.manifest.files.items() if path.startswith("engine/"))
    ratio, bits = shipped / report.checkpoint.size_bytes, 8 * shipped / report.checkpoint.parameters
    file = tmp_path / "gates.yaml"
    reference = f"tiny/{opened.path.name}"
    for share, code in ((1.001, 0), (0.999, 3)):
        file.write_text(f"gates: {{size_ratio: {{max: {ratio * share}}}, weight_bits: {{max: {bits * share}}}}}")
        done = invoke("gate", reference, "--gates", file, "--json")
        assert done.exit_code == code
        found = {gate["metric"]: gate["measured"]["value"] for gate in json.loads(done.stdout)["gates"]}
        assert found == pytest.approx({"size_ratio": ratio, "weight_bits": bits})
    assert "weight_bits: " in invoke("diff", reference, reference).stdout


def test_a_release_without_a_limit_left_to_decide_is_no_failure(out: Path) -> None:
    made = put(out, gates={"kld_mean": {"rise_max": 0.5}})
    done = invoke("gate", f"tiny/{made.path.name}", "--against", "none")
    assert done.exit_code == 0
    assert "limits against an earlier artifact were left out" in done.stdout


def test_an_engine_that_is_not_built_has_an_exit_code_of_its_own(out: Path) -> None:
    engine = EngineRecord(
        backend="onnxruntime", files=(EngineFile(name="model.onnx", size_bytes=5),
        EngineFile(name="model.onnx.data", size_bytes=1280)), session={}, pending=True, unmeasured="not built yet",
    )  # fmt: skip
    made = put(out, "graph", quality=None, latency=None, engine=engine)
    done = invoke("gate", f"tiny/{made.path.name}")
    assert done.exit_code == 10
    assert "engine not built yet" in done.stdout
    assert "llmforge build --finish" in done.stderr
    assert invoke("validate", f"tiny/{made.path.name}", "--recipe", "none.yaml").exit_code == 2


@pytest.mark.parametrize(
    ("written", "message"),
    [
        ("gates: {kld_mean: {drop_max: 0.1}}", "would limit an improvement"),
        ("gates: {kld_mean: {rise_max: 0}}", "gates.kld_mean.rise_max"),
        ("gates: {kld_mean: {rise_max: .nan}}", "not a finite number"),
        ("gates: {kld_maen: {max: 1}}", "kld_maen"),
        ("gates: {}", "has no gates"),
        ("limits: {}", "limits"),
    ],
)
def test_a_file_of_gates_that_is_wrong(out: Path, tmp_path: Path, written: str, message: str) -> None:
    file = tmp_path / "gates.yaml"
    file.write_text(written)
    done = invoke("gate", f"tiny/{put(out).path.name}", "--gates", file)
    assert done.exit_code == 2
    assert message in done.stderr


def test_a_gate_that_could_not_fail_is_underpowered(out: Path, tmp_path: Path) -> None:
    old, new = pair(out, 0.0)
    file = tmp_path / "gates.yaml"
    file.write_text("gates: {top1_agreement: {drop_max: 0.95}}")
    done = invoke("gate", new, "--against", old, "--gates", file)
    assert done.exit_code == 4
    assert "underpowered" in done.stdout


def test_options_that_say_nothing_alone(out: Path) -> None:
    made = f"tiny/{put(out).path.name}"
    for options in (("--max-documents", 9), ("--text", "a"), ("--recipe", "r")):
        done = invoke("gate", made, *options)
        assert done.exit_code == 2
        assert "--until-decided" in done.stderr
    done = invoke("gate", made, "--until-decided")
    assert done.exit_code == 5
    assert "its manifest records no recipe of a build" in done.stderr  # it is made up here


def test_junit_validates_and_tells_what_failed(out: Path, tmp_path: Path, data: Path) -> None:
    xmlschema = pytest.importorskip("xmlschema")
    old, new = pair(out, 0.01)
    schema = xmlschema.XMLSchema(str(data / "junit.xsd"))
    for artifact, ends in ((new, (3, 1, 0)), (old, (0, 0, 0))):
        file = tmp_path / "gates.xml"
        done = invoke("gate", artifact, "--against", old, "--junit", file)
        schema.validate(str(file))
        suite = ElementTree.parse(file).getroot()[0]
        assert (done.exit_code, int(suite.attrib["failures"]), int(suite.attrib["errors"])) == ends
        assert len(suite.findall("testcase")) == int(suite.attrib["tests"]) == 2
        assert len(suite.findall("testcase/failure")) == ends[1]
    broken = file.read_text().replace('tests="2"', "")
    with pytest.raises(xmlschema.XMLSchemaException):
        schema.validate(broken)


def test_markdown_for_a_pull_request(out: Path, tmp_path: Path) -> None:
    old, new = pair(out, 0.01)
    file = tmp_path / "gates.md"
    assert invoke("gate", new, "--against", old, "--markdown", file).exit_code == 3
    lines = file.read_text(encoding="utf-8").splitlines()
    assert lines[0] == f"### ❌ FAIL: {new} against {old}: 1 of 2 gates failed"
    assert all(line.count("|") == 6 for line in lines if line.startswith("|"))
    assert any(line.startswith("| `kld_mean` rise_max | ❌ fail |") for line in lines)
    assert "56 documents paired" in lines[-1]


def graph(operator: str) -> dict[str, bytes]:
    """The file of a graph of one node."""
    text = f'<ir_version: 10, opset_import: ["" : 24]> g (float[2] x) => (float[2] y) {{ y = {operator} (x) }}'
    return {"engine/model.onnx": ir.to_proto(ir.from_onnx_text(text)).SerializeToString()}


def caches(dtype: str, layers: int = 4) -> dict[str, bytes]:
    """The file of a graph with a cache for each layer."""
    inputs = ", ".join(f'{dtype}[1, 4] "past.{layer}.key"' for layer in range(layers))
    outputs = ", ".join(f'{dtype}[1, 4] "present.{layer}.key"' for layer in range(layers))
    nodes = " ".join(f'"present.{layer}.key" = Identity ("past.{layer}.key")' for layer in range(layers))
    text = f'<ir_version: 10, opset_import: ["" : 24]> g ({inputs}) => ({outputs}) {{ {nodes} }}'
    return {"engine/model.onnx": ir.to_proto(ir.from_onnx_text(text)).SerializeToString()}


def test_diff_shows_metrics_first_and_folds_what_is_the_same_in_every_layer(out: Path) -> None:
    limits = {f"task.t{number}.accuracy": {"min": 0.5} for number in range(20)}
    old = f"tiny/{put(out, quality=quality(worse(0)), files=caches('float'), gates=MARGIN).path.name}"
    new = f"tiny/{put(out, quality=quality(worse(0)), files=caches('uint8'), gates={**MARGIN, **limits}).path.name}"
    lines = invoke("diff", old, new).stdout.splitlines()
    places = [[line.split(":")[0] for line in lines].index(name) for name in ("kld_mean", "size", "recipe", "graph")]
    assert places == sorted(places)
    assert [line for line in lines if line.startswith("graph")] == [
        "graph: ~ 4 inputs past.*.key: FLOAT [1, 4] → UINT8 [1, 4]",
        "graph: ~ 4 outputs present.*.key: FLOAT [1, 4] → UINT8 [1, 4]",
        "graph: one by one: --all",
    ]
    assert sum(line.startswith("recipe: gates.task.t") for line in lines) == 12
    assert "recipe: 8 more differences: --all" in lines
    whole = invoke("diff", old, new, "--all").stdout.splitlines()
    assert "graph: ~ output present.3.key: FLOAT [1, 4] → UINT8 [1, 4]" in whole
    assert sum(line.startswith("recipe: gates.task.t") for line in whole) == 20
    assert not [line for line in whole if "--all" in line]
    found = json.loads(invoke("diff", old, new, "--json").stdout)
    assert "~ input past.0.key: FLOAT [1, 4] → UINT8 [1, 4]" in found["graph"]
    assert len(found["recipe"]) == 20


def test_diff(out: Path) -> None:
    kept = {"gates": MARGIN, "days": 0}
    old = f"tiny/{put(out, quality=quality(worse(0)), files=graph('Neg'), **kept).path.name}"
    new = f"tiny/{put(out, quality=quality(worse(0.01)), files=graph('Exp'), **kept).path.name}"
    done = invoke("diff", old, new)
    assert done.exit_code == 0
    assert "recipe: same" in done.stdout
    assert "documents measured of both: 56" in done.stdout
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("kld_mean:")]
    assert "0.0107 → 0.0208 (change +0.01009" in line
    assert line.endswith("; worse)")
    assert "graph: ~ Neg: 1 → 0 nodes\n" in done.stdout
    found = json.loads(invoke("diff", new, old, "--json").stdout)
    (change,) = [each for each in found["metrics"] if each["metric"] == "kld_mean"]
    assert change["difference"]["high"] < 0
    assert not change["worse"]
    other = put(out, gates={}, quality=quality(worse(0.0)), files=graph("Neg"))
    assert "recipe: gates.kld_mean" in invoke("diff", old, f"tiny/{other.path.name}").stdout


def odd(out: Path, which: str) -> str:
    """Publish an artifact that has little to be compared by."""
    held = {**FILES, **graph("Neg")}
    files = tuple(
        EngineFile(name=path.removeprefix("engine/"), size_bytes=len(held[path]))
        for path in held
        if path.startswith("engine/")
    )
    waiting = EngineRecord(backend="onnxruntime", files=files, session={}, pending=True, unmeasured="not built yet")
    other = reports.make().machine.model_copy(update={"cpu": "Another CPU"})
    changes: dict[str, Any] = {
        "deferred": {"quality": None, "latency": None, "engine": waiting},
        "without latency": {"latency": None},
        "without both": {"quality": None, "latency": None},
        "other tokenizer": {"files": {**graph("Neg"), "tokenizer/tokenizer.json": b"{1}"}},
        "other checkpoint": {"checkpoint": "d" * 64},
        "other machine": {"machine": other},
        "no documents in common": {
            "quality": quality([each.model_copy(update={"document": f"other {i}"}) for i, each in enumerate(worse(0))])
        },
        "tasks": {"tasks": (quiz(),)},
    }[which]
    made_of = {"quality": quality(worse(0)), "files": graph("Neg"), "gates": MARGIN, "name": "odd", **changes}
    return f"odd/{put(out, **made_of).path.name}"


def quiz() -> TaskResult:
    right = tuple(float(i % 3 > 0) for i in range(30))
    score = Score.of("mean", right, right, tuple(range(30)))
    return TaskResult(
        name="quiz", version="1", digest="d" * 64, few_shot=0, documents=tuple(range(30)), scores={"accuracy": score},
        created="2026-11-21T10:42:00+00:00", engine="an engine", baseline="a checkpoint",
    )  # fmt: skip


@pytest.mark.parametrize(
    ("which", "notes", "says"),
    [
        ("deferred", ["the engine of B is not built yet: its size is that of the files that it is built from"],
         "measured of one alone"),
        ("without latency", ["latency of B was not measured"], "measured of one alone"),
        ("without both", ["quality and latency of B were not measured"], "measured of one alone"),
        ("other tokenizer", ["the tokenizers differ: a token of one is not a token of the other, and no figure per "
          "token is comparable"], "kld_mean: 0.0107 → 0.0107"),
        ("other checkpoint", [], "it was built from another checkpoint"),
        ("other machine", ["latency was measured on different machines: Example CPU 9000; Another CPU"], "change +0"),
        ("no documents in common", [], "no document was measured of both in the same windows"),
        ("tasks", [], "task.quiz.accuracy: – → 66.7 %"),
    ],
)  # fmt: skip
def test_artifacts_that_have_little_in_common(
    out: Path, tmp_path: Path, which: str, notes: list[str], says: str
) -> None:
    base = f"tiny/{put(out, quality=quality(worse(0)), files=graph('Neg'), gates=MARGIN).path.name}"
    other = odd(out, which)
    page = tmp_path / "diff.html"
    done = invoke("diff", base, other, "--html", page)
    assert done.exit_code == 0
    lines = done.stdout.splitlines()
    assert [line.removeprefix("note: ") for line in lines if line.startswith("note: ")] == notes
    assert says in done.stdout
    assert len([line for line in lines if line.startswith("not compared")]) <= 4  # a reason stands once
    found = json.loads(invoke("diff", base, other, "--json").stdout)
    assert found["notes"] == notes
    assert all(each["difference"] or each["why_not"] for each in found["metrics"] if each["a"] or each["b"])
    text = page.read_text(encoding="utf-8")
    pages.check(text)
    for note in notes:
        assert f"{note[0].upper()}{note[1:]}." in text
    assert ("Built from different checkpoints" in text) == (which == "other checkpoint")
    back = invoke("diff", other, base)
    assert back.exit_code == 0
    assert [line for line in back.stdout.splitlines() if " of A " in line and line.startswith("note")] == [
        f"note: {note.replace(' of B ', ' of A ')}" for note in notes if " of B " in note
    ]
    told = invoke("history", "odd", "--html", tmp_path / "history.html")
    assert told.exit_code == 0
    assert len(told.stdout.splitlines()) == 2  # one version, nothing before it
    assert "▼" not in told.stdout


def test_an_artifact_beside_itself(out: Path, tmp_path: Path) -> None:
    base = f"tiny/{put(out, quality=quality(worse(0)), files=graph('Neg'), gates=MARGIN).path.name}"
    page = tmp_path / "diff.html"
    done = invoke("diff", base, base, "--html", page)
    assert "content: the same" in done.stdout
    assert "graph: no difference" in done.stdout
    assert "worse" not in done.stdout
    assert "Both have the same content" in page.read_text()
    assert invoke("diff", base, "tiny/ffff").exit_code == 5
    assert invoke("diff", "none/ffff", base).exit_code == 5


def test_history_marks_regressions(out: Path) -> None:
    old, new = pair(out, 0.01)
    again = put(out, "again", gates=MARGIN, days=2, quality=quality(worse(0.0)))
    done = invoke("history", "tiny", "--metric", "kld_mean")
    head, *rows = done.stdout.splitlines()
    assert head.split() == ["VERSION", "MEASURED", "(UTC)", "GATES", "KLD_MEAN"]
    assert [row.split()[0] for row in rows] == [old[5:], new[5:], again.path.name]
    assert ["▼" in row for row in rows] == [False, True, False]
    found = json.loads(invoke("history", "tiny", "--json").stdout)
    assert [len(entry["metrics"]) for entry in found] == [len(catalog.deciding())] * 3
    assert invoke("history", "none").exit_code == 2
    assert invoke("history", "tiny", "--metric", "kld").exit_code == 2


def test_evidence_that_was_edited_is_not_judged(out: Path) -> None:
    made = put(out)
    (record,) = (made.path / "evidence").glob("*.json")
    record.chmod(0o644)
    record.write_bytes(record.read_bytes().replace(b'"kld_mean"', b'"kld_maen"', 1))
    done = invoke("gate", f"tiny/{made.path.name}")
    assert done.exit_code == 5
    assert Artifact.open(made.path).path == made.path
