"""What is refused before anything heavy: data, context and checkpoint, without torch."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from llmforge.base import extras
from llmforge.base.errors import CheckpointError, DataError, ForgeError, UnsupportedError
from llmforge.compile import preflight
from llmforge.compile.stages.trace import trace_model
from llmforge.farm import preflight as farm_preflight
from llmforge.recipe import Recipe

ROOT = Path(__file__).resolve().parents[2]
QUICKSTART = ROOT / "recipes/quickstart.yaml"
SAMPLE = ROOT / "tests/data/docs-llama-7m"  # made for 1024 tokens


@pytest.mark.parametrize(
    ("override", "code", "message"),
    [
        ("validation.quality.data=missing.jsonl", 5, "missing.jsonl: cannot be read"),
        ("calibration.data=missing.jsonl", 5, "missing.jsonl: cannot be read"),
        ("engine.max_context=1025", 6, "the model is made for 1024 tokens"),
        ("checkpoint=nowhere", 5, "no such folder"),
        ("engine.max_batch=0", 2, "greater than or equal to 1"),
    ],
)
def test_a_wrong_input_ends_before_torch_is_imported(override: str, code: int, message: str, tmp_path: Path) -> None:
    script = f"""
import sys
from llmforge.cli import cli
try:
    cli(["build", {str(QUICKSTART)!r}, "--quiet", "--out", {str(tmp_path)!r}, "--set", {override!r}])
finally:
    print(*sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, cwd=ROOT, check=False)
    assert done.returncode == code, done.stderr
    assert message in done.stderr.replace("\n", " ")
    assert not {"torch", "transformers", "onnxruntime"} & set(done.stdout.split())
    assert list(tmp_path.iterdir()) == []


def loaded(tmp_path: Path, *overrides: str, **changed: Any) -> Recipe:
    """The quickstart with a copy of its checkpoint, whose configuration is `changed`; None removes a field."""
    checkpoint = tmp_path / "checkpoint"
    shutil.copytree(SAMPLE, checkpoint)
    settings = {**json.loads((SAMPLE / "config.json").read_text()), **changed}
    kept = {name: value for name, value in settings.items() if value is not None}
    (checkpoint / "config.json").write_text(json.dumps(kept))
    return Recipe.load(QUICKSTART, [f"checkpoint={checkpoint}", *overrides])


@pytest.mark.parametrize(
    "changed",
    [
        {"alibi": True},
        {"position_embedding_type": "nope"},
        {"rope_theta": None, "rope_parameters": None, "rope_scaling": None},
        {"max_position_embeddings": None},
    ],
)
def test_the_graph_decides_where_the_configuration_does_not_say(tmp_path: Path, changed: dict[str, Any]) -> None:
    preflight.check(loaded(tmp_path, "engine.max_context=4096", **changed))
    with pytest.raises(UnsupportedError, match="made for 1024 tokens"):
        preflight.check(loaded(tmp_path / "as it is", "engine.max_context=4096"))


def test_a_nested_configuration_is_read(tmp_path: Path) -> None:
    text = {"rope_theta": 1e4, "max_position_embeddings": 512}
    recipe = loaded(tmp_path, max_position_embeddings=None, text_config=text)
    with pytest.raises(UnsupportedError, match="made for 512 tokens"):
        preflight.check(recipe)


def test_headers_of_weights_are_read(tmp_path: Path) -> None:
    recipe = loaded(tmp_path)
    preflight.check(recipe)
    weights = next(recipe.checkpoint.glob("*.safetensors"))
    weights.write_bytes(weights.read_bytes()[:100])
    with pytest.raises(CheckpointError, match="safetensors"):
        preflight.check(recipe)


TASK = {"task": "sums", "dataset_path": "json", "dataset_kwargs": {"data_files": {"test": ["items.jsonl"]}}}


def measuring(tmp_path: Path, section: str) -> Recipe:
    """A recipe of the quickstart's checkpoint, beside which its data files lie."""
    text = f"schema: 1\nname: a\ncheckpoint: {SAMPLE}\ntarget: local\nengine: {{max_context: 64, max_batch: 1}}\n"
    (tmp_path / "recipe.yaml").write_text(f"{text}passes: []\nvalidation: {{{section}}}\n")
    return Recipe.load(tmp_path / "recipe.yaml")


def write_measured(tmp_path: Path) -> None:
    """Write a trace, a task with its items, and queries with a passage."""
    (tmp_path / "data/qrels").mkdir(parents=True)
    for name, text in {
        "trace.jsonl": json.dumps({"at_s": 0, "prompt_tokens": 3, "output_tokens": 2}),
        "task.yaml": json.dumps(TASK),
        "items.jsonl": "{}",
        "data/corpus.jsonl": json.dumps({"_id": "p", "text": "passage"}),
        "data/queries.jsonl": json.dumps({"_id": "q", "text": "query"}),
        "data/qrels/test.tsv": "query-id\tcorpus-id\tscore\nq\tp\t1\n",
    }.items():
        (tmp_path / name).write_text(text)


TRACE = "latency: {prompt_tokens: [8], output_tokens: 4, repetitions: 1, workloads: {trace: {data: trace.jsonl}}}"


@pytest.mark.parametrize(
    ("section", "file"),
    [
        (TRACE, "trace.jsonl"),
        ("tasks: [task.yaml]", "task.yaml"),
        ("tasks: [task.yaml]", "items.jsonl"),
        ("retrieval: {data: data}", "data/corpus.jsonl"),
        ("retrieval: {data: data}", "data/queries.jsonl"),
        ("retrieval: {data: data}", "data/qrels/test.tsv"),
    ],
)
def test_what_is_measured_on_is_read_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, section: str, file: str
) -> None:
    monkeypatch.setattr(extras, "require", lambda *names: None)
    write_measured(tmp_path)
    recipe = measuring(tmp_path, section)
    preflight.check(recipe)
    (tmp_path / file).rename(tmp_path / "elsewhere")
    with pytest.raises(ForgeError, match=f"{file}: (cannot be read|there is no such file)"):
        preflight.check(recipe)


@pytest.mark.parametrize(
    ("section", "file", "text", "message"),
    [
        (TRACE, "trace.jsonl", '{"at_s": 0}\n', "trace.jsonl:1: has at_s; expected"),
        ("tasks: [task.yaml]", "task.yaml", "{task: a, class: evil.Task}", "class: not supported in a task file"),
        (
            "tasks: [task.yaml]",
            "task.yaml",
            "{task: a, dataset_path: json, dataset_kwargs: 3}",
            "task.yaml:1:31: dataset_kwargs: must be a mapping, not 3",
        ),
        ("retrieval: {data: data}", "data/corpus.jsonl", "[]\n", "corpus.jsonl, line 1: expected an object"),
    ],
)
def test_wrong_data_of_what_is_measured_is_refused_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, section: str, file: str, text: str, message: str
) -> None:
    monkeypatch.setattr(extras, "require", lambda *names: None)
    write_measured(tmp_path)
    (tmp_path / file).write_text(text)
    with pytest.raises(DataError, match=message):
        preflight.check(measuring(tmp_path, section))


def test_nodes_of_a_farm_need_what_is_measured_on(tmp_path: Path) -> None:
    write_measured(tmp_path)
    files = [*farm_preflight._texts(measuring(tmp_path, f"{TRACE}, tasks: [task.yaml, arc_easy]"))]
    assert files == [tmp_path / name for name in ("trace.jsonl", "task.yaml", "items.jsonl")]
    files = [*farm_preflight._texts(measuring(tmp_path, "retrieval: {data: data}"))]
    assert files == [tmp_path / "data" / name for name in ("corpus.jsonl", "queries.jsonl", "qrels/test.tsv")]
    assert [*farm_preflight._texts(measuring(tmp_path, "retrieval: {}"))] == []
    assert [*farm_preflight._texts(measuring(tmp_path, "behaviour: {data: own.jsonl}"))] == [tmp_path / "own.jsonl"]


def test_retrieval_of_a_language_model_is_refused_before_it_is_traced(tmp_path: Path) -> None:
    recipe, decoder = measuring(tmp_path, "retrieval: {}"), SimpleNamespace(name="docs-llama-7m", encoding=None)
    state: Any = SimpleNamespace(recipe=recipe, checkpoint=decoder, clock=None)
    with pytest.raises(UnsupportedError, match=r"predicts tokens, and validation\.retrieval is of") as refused:
        trace_model(state)
    assert refused.value.hint == "write `validation.quality` in its place"


def test_evaluation_on_calibration_text_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="also in the calibration data"):
        preflight.check(loaded(tmp_path, "validation.quality.data=../tests/data/calibration.jsonl"))
