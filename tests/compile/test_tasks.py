"""`llmforge eval`: an artifact without quantization answers as its checkpoint, item by item; and what becomes of it."""

from __future__ import annotations

import importlib.util
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

import llmforge
from llmforge.artifact import Artifact
from llmforge.base import extras, resources
from llmforge.base.errors import EnvironmentLacks, ForgeError
from llmforge.cli import cli
from llmforge.compile import validating
from llmforge.gates import records
from llmforge.measure import tasks
from llmforge.measure.scoring import TaskRequest
from llmforge.metrics.tasks import TaskResult
from llmforge.report import render

from ..measure.test_scoring import serve
from ..samples.small_artifact import publish_small

pytestmark = pytest.mark.thorough

HERE = importlib.util.find_spec("lm_eval") is not None
harnessed = pytest.mark.skipif(not HERE, reason="needs the extra `eval`")
TASK = Path(__file__).parents[2] / "docs" / "tasks" / "next-sentence.yaml"
ITEMS = 36


def invoke(*args: object) -> Result:
    result = CliRunner().invoke(cli, [str(word) for word in args])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result


def recipe(folder: Path, checkpoint: Path, **changed: object) -> Path:
    written = {
        "schema": 1, "name": "plain", "checkpoint": str(checkpoint), "target": "local",
        "engine": {"max_context": 256, "max_batch": 4, "threads": 1}, "passes": ["fuse-norms"], **changed,
    }  # fmt: skip
    file = folder / "recipe.yaml"
    file.write_text(json.dumps(written))
    return file


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory, sample_checkpoint: Path) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("plain")
    gates = {"task.next_sentence.accuracy": {"drop_max": 0.15}, "size_bytes": {"max": 1}}
    validation = {"tasks": [str(TASK)]}
    file = recipe(folder, sample_checkpoint, gates=gates, validation=validation)
    limited = tasks.run

    def few(asked: TaskRequest, *args: Any, **options: Any) -> tasks.TaskResults:
        return limited(replace(asked, limit=ITEMS), *args, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LLMFORGE_CACHE", str(folder / "cache"))
        patch.setattr(tasks, "run", few)
        done = invoke("build", file, "--out", folder / "store", "--quiet")
    assert done.exit_code == 3, done.output  # its size, which no task decides
    return Path(done.stdout.splitlines()[-1]), file


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory, sample_checkpoint: Path) -> Path:
    return publish_small(tmp_path_factory.mktemp("small"), sample_checkpoint).path


@pytest.mark.thorough
@harnessed
def test_an_artifact_without_quantization_equals_its_checkpoint_item_by_item(built: tuple[Path, Path]) -> None:
    report = records.read(Artifact.open(built[0]))
    (task,) = report.tasks
    assert task.name == "next_sentence"
    for score in task.scores.values():
        assert len(score.artifact) == ITEMS
        assert score.artifact == score.baseline
        assert 0.25 < score.figures.artifact.value < 1
        assert score.figures.difference is not None
        assert score.figures.difference.value == 0
    assert [gate.metric for gate in report.gates] == ["task.next_sentence.accuracy", "size_bytes"]
    assert invoke("verify", built[0]).exit_code == 0
    for page in (render.to_html(report), render.to_markdown(report)):
        assert "Tasks" in page
        assert "next_sentence" in page.replace("\\", "")


@harnessed
def test_likelihoods_are_those_of_transformers(built: tuple[Path, Path], sample_checkpoint: Path) -> None:
    from llmforge import serving
    from llmforge.checkpoint import Checkpoint
    from llmforge.measure.baseline import Baseline
    from llmforge.measure.scoring import CheckpointSide, EngineSide

    runner = serving.load(built[0])
    items = [json.loads(line) for line in TASK.with_suffix(".jsonl").read_text().splitlines()[:6]]
    pairs = [
        (runner.encode(item["context"]), runner.tokenizer.encode(f" {choice}").ids)
        for item in items
        for choice in item["choices"]
    ]
    baseline = Baseline(Checkpoint.open(sample_checkpoint), threads=1)
    theirs = CheckpointSide(lambda: baseline, "", 256, runner.config.eos_token_ids, runner.tokenizer.decode)
    ours = EngineSide(runner, "")
    for (value, greedy), (expected, likeliest) in zip(ours.score(pairs), theirs.score(pairs), strict=True):
        assert value == pytest.approx(expected, abs=1e-2)
        assert greedy == likeliest
    prompt = pairs[0][0]
    assert ours.answer(prompt, 24, ["\n\n"]) == theirs.answer(prompt, 24, ["\n\n"])


@harnessed
@pytest.mark.thorough
def test_eval_adds_a_record_that_verify_recomputes(
    built: tuple[Path, Path], sample_checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, file = built
    before = len(Artifact.open(path).evidence)
    done = invoke("eval", path, "--tasks", TASK, "--recipe", file, "--limit", 12, "--json")
    assert done.exit_code == 4, done.output  # 3 documents; the size, which failed, is not for tasks to decide
    assert "note: a gate of the artifact that these tasks do not decide failed" in done.stderr
    said = json.loads(done.stdout)
    assert said["verdict"] == "inconclusive"
    assert [gate["metric"] for gate in said["gates"]] == ["task.next_sentence.accuracy"]
    (found,) = said["tasks"]
    assert TaskResult.model_validate_json(json.dumps(found)).scores["accuracy"].figures.artifact.samples == 3
    opened = Artifact.open(path)
    assert len(opened.evidence) == before + 1
    assert len(records.read(opened).tasks[0].documents) == 12
    assert invoke("verify", path).exit_code == 0


@harnessed
@pytest.mark.slow
def test_a_checkpoint_that_does_not_fit_is_left_out_and_that_is_said(
    built: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(resources, "free_memory_bytes", lambda: 1000)
    done = invoke("eval", built[0], "--tasks", TASK, "--recipe", built[1], "--limit", 2, "--json", "--quiet")
    assert done.exit_code == 4, done.output
    assert "task.next_sentence.accuracy: not compared with the checkpoint: it was not run" in done.stderr
    (found,) = json.loads(done.stdout)["tasks"]
    assert found["scores"]["accuracy"]["baseline"] is None
    (said,) = [note for note in records.read(Artifact.open(built[0])).notes if "the checkpoint does not run" in note]
    assert said.endswith("and 1.00 kB of memory are free")


@harnessed
@pytest.mark.thorough
def test_a_figure_that_its_items_do_not_give_is_found(built: tuple[Path, Path]) -> None:
    from llmforge.gates import verdict

    report = records.read(Artifact.open(built[0]))
    (task,) = report.tasks
    score = task.scores["accuracy"]
    flipped = tuple(1 - value for value in score.artifact)
    wrong = task.model_copy(update={"scores": {"accuracy": score.model_copy(update={"artifact": flipped})}})
    assert list(verdict._figures(report)) == []
    found = list(verdict._figures(report.model_copy(update={"tasks": (wrong,)})))
    assert found == ["accuracy of task next_sentence"]


@pytest.mark.thorough
@harnessed
def test_a_server_is_measured_and_nothing_is_recorded(built: tuple[Path, Path], sample_checkpoint: Path) -> None:
    path = built[0]
    before = len(Artifact.open(path).evidence)
    with serve(path, "--allow", "fail") as url:
        done = invoke(
            "eval", path, "--tasks", TASK, "--checkpoint", sample_checkpoint, "--limit", 4, "--url", url, "--json",
            "--quiet",
        )  # fmt: skip
    assert done.exit_code == 0, done.output
    (found,) = json.loads(done.stdout)["tasks"]
    assert "http://" in found["engine"]
    assert found["scores"]["accuracy"]["artifact"] == found["scores"]["accuracy"]["baseline"]
    assert len(Artifact.open(path).evidence) == before


@harnessed
@pytest.mark.thorough
def test_what_cannot_be_asked_is_told(built: tuple[Path, Path], tiny_checkpoint: Path, sample_checkpoint: Path) -> None:
    path = built[0]
    both = invoke("eval", path, "--tasks", TASK, "--recipe", built[1], "--checkpoint", sample_checkpoint)
    assert both.exit_code == 2
    assert "--checkpoint cannot be used with --recipe" in both.output
    other = invoke("eval", path, "--tasks", TASK, "--checkpoint", tiny_checkpoint)
    assert other.exit_code == 2
    assert "but the artifact was built from" in other.output
    with pytest.raises(ForgeError, match="no such task") as unknown:  # from Python; the catalogue is read in seconds
        llmforge.evaluate(path, ["next_sentense"], checkpoint=sample_checkpoint)
    assert unknown.value.exit_code == 2


def test_a_build_that_asks_for_tasks_lacks_the_extra_before_it_begins(
    tmp_path: Path, sample_checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(extras, "missing", lambda extra: ["lm-eval"] if extra == "eval" else [])
    file = recipe(tmp_path, sample_checkpoint, validation={"tasks": ["arc_easy"]})
    done = invoke("build", file, "--out", tmp_path / "store")
    assert done.exit_code == EnvironmentLacks.exit_code == 8
    assert "lm-eval is not installed" in done.output
    assert "llmforge[eval]" in done.output


def test_a_recipe_names_tasks_and_gates_need_them(tmp_path: Path, sample_checkpoint: Path) -> None:
    from llmforge.base.errors import RecipeError
    from llmforge.recipe import Recipe

    (tmp_path / "quiz.yaml").write_text("task: quiz")
    gates = {"task.quiz.accuracy": {"drop_max": 0.01}}
    asked = {"tasks": ["quiz.yaml", "arc_easy"]}
    loaded = Recipe.load(recipe(tmp_path, sample_checkpoint, validation=asked, gates=gates))
    assert loaded.validation.tasks == (str(tmp_path / "quiz.yaml"), "arc_easy")
    first, second = loaded.resolved()["validation"]["tasks"]
    assert (first["name"], second) == ("quiz.yaml", "arc_easy")
    with pytest.raises(RecipeError, match="would not be measured"):
        Recipe.load(recipe(tmp_path, sample_checkpoint, gates=gates))
    with pytest.raises(RecipeError, match="name of a task"):
        Recipe.load(recipe(tmp_path, sample_checkpoint, validation={"tasks": ["../quiz"]}))
    plain = Recipe.load(recipe(tmp_path, sample_checkpoint))
    assert "tasks" not in plain.resolved()["validation"]  # versions of older recipes stay


@harnessed
def test_answers_are_kept_and_neither_side_is_asked_again(
    built: tuple[Path, Path], sample_checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = ("eval", built[0], "--tasks", TASK, "--checkpoint", sample_checkpoint, "--limit", 4, "--json", "--quiet")
    first = json.loads(invoke(*words).stdout)["tasks"]
    monkeypatch.setattr(
        "llmforge.measure.tasks.Baseline", lambda *_, **__: pytest.fail("the checkpoint was asked again")
    )
    monkeypatch.setattr(
        "llmforge.serving.Runner.logits_after", lambda *_, **__: pytest.fail("the engine was asked again")
    )
    again = json.loads(invoke(*words).stdout)["tasks"]
    assert again[0]["scores"] == first[0]["scores"]
    with pytest.raises(pytest.fail.Exception, match="asked again"):
        invoke(*words, "--no-cache")


@harnessed
def test_eval_takes_the_key_of_a_server(small: Path, sample_checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    servers: list[tasks.TaskServer] = []

    def evaluate(*args: object, server: tasks.TaskServer, **options: object) -> validating.Evaluated:
        servers.append(server)
        return validating.Evaluated((), (), None)

    monkeypatch.setattr(validating, "evaluate", evaluate)
    monkeypatch.setenv("OPENAI_API_KEY", "from-environment")
    asked = ("eval", small, "--tasks", TASK, "--checkpoint", sample_checkpoint)
    for more in ((), ("--api-key", "given", "--model", "m")):
        done = invoke(*asked, "--url", "http://127.0.0.1:9", *more)
        assert done.exit_code == 0, done.output
    assert [(each.at.key, each.model) for each in servers] == [("from-environment", None), ("given", "m")]
    assert "given" not in repr(servers)
    alone = invoke(*asked, "--api-key", "given")
    assert alone.exit_code == 2
    assert "--api-key requires --url" in alone.stderr
