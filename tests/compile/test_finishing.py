"""Builds for GPUs without a GPU: TensorRT-RTX plans, and engines that are deferred and finished elsewhere."""

from __future__ import annotations

import json
import math
import os
import shutil
import statistics
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import onnx
import pytest
from click.testing import CliRunner, Result

from llmforge import targets
from llmforge.artifact import Artifact
from llmforge.cli import cli
from llmforge.gates import records
from llmforge.gates.decision import Verdict
from llmforge.gates.records import Report

pytest.importorskip("tensorrt_rtx")

LOOSE = {"kld_mean": 5.0}  # random weights
TEXTS = [{"id": str(i), "text": f"graph engine pass weight scale token cache {i} " * 6} for i in range(8)]
RTX = {"backend": "tensorrt-rtx", "max_context": 96, "max_batch": 2}
Write = Callable[..., Path]


pytestmark = [pytest.mark.usefixtures("no_device", "shared_build_cache"), pytest.mark.xdist_group("finishing")]


@pytest.fixture
def recipe(tmp_path: Path, tiny_checkpoint: Path) -> Write:
    (tmp_path / "evaluation.jsonl").write_text("\n".join(map(json.dumps, TEXTS)))

    def write(name: str = "recipe.yaml", **sections: Any) -> Path:
        content = {
            "schema": 1,
            "name": "tiny",
            "checkpoint": str(tiny_checkpoint),
            "target": "l4",
            "engine": RTX,
            "passes": [{"lower-precision": {"dtype": "fp16", "budget": LOOSE}}],
            "validation": {"quality": {"data": "evaluation.jsonl", "context": 64}},
            "gates": {"kld_mean": {"max": 0.1}, "size_bytes": {"max": 1e8}},
            **sections,
        }
        (tmp_path / name).write_text(json.dumps(content))  # JSON is YAML
        return tmp_path / name

    return write


def run(*arguments: object) -> Result:
    return CliRunner().invoke(cli, [str(argument) for argument in arguments])


def build(recipe: Path, *options: object) -> Result:
    return run("build", recipe, "--out", recipe.parent / "out", "--quiet", *options)


def built(result: Result) -> tuple[Artifact, Report]:
    """Open what a build published; its path is the last line of standard output."""
    opened = Artifact.open(Path(result.stdout.splitlines()[-1]))
    opened.verify()
    return opened, records.read(opened)


@pytest.mark.thorough
def test_a_plan_is_published_and_nothing_unmeasured_passes(recipe: Write) -> None:
    result = build(recipe())
    assert result.exit_code == 4, result.output
    opened, report = built(result)
    assert {path for path in opened.manifest.files if path.startswith("engine/")} == {
        "engine/model.plan",
        "engine/plan.json",
        "engine/runtime.json",
    }
    assert opened.manifest.requires.keys() == {"tensorrt-rtx"}
    assert opened.verdict == "inconclusive"
    assert {gate.metric: gate.verdict for gate in report.gates} == {
        "kld_mean": Verdict.INCONCLUSIVE,
        "size_bytes": Verdict.PASS,
    }
    assert report.gates[0].explanation == "kld_mean: not measured: no CUDA device here; limit: at most 0.1"
    assert report.quality is None
    assert report.engine.unmeasured == "no CUDA device here"
    assert report.engine.facts["attention"].startswith("2 in fused kernels")
    markdown = (opened.path / "report/report.md").read_text()
    assert "**Unverified**: the engine was not run: no CUDA device here." in markdown
    assert "Not measured: no CUDA device here." in markdown
    assert "compute capability: SM89" in markdown
    assert "Unverified" in (opened.path / "report/report.html").read_text()
    config = (opened.path / "triton/tiny/config.pbtxt").read_text()
    assert "KIND_GPU" in config
    shown = run("inspect", opened.path, "--verify")
    assert shown.exit_code == 0
    assert "requires    tensorrt-rtx" in shown.stdout
    assert "unverified: the engine was not run" in shown.stdout
    answered = run("run", opened.path, "graph")
    assert answered.exit_code == 8, answered.output


def test_a_deferred_engine_is_finished_beside_it(recipe: Write, tmp_path: Path) -> None:
    file = recipe()
    first = build(file, "--defer")
    assert first.exit_code == 10, first.output
    assert "the engine is not built yet" in first.stderr
    pending, report = built(first)
    assert {path for path in pending.manifest.files if path.startswith("engine/")} == {
        "engine/model.onnx",
        "engine/model.onnx.data",
        "engine/pending.json",
    }
    assert pending.manifest.requires == {}
    assert report.engine.pending
    assert {gate.verdict for gate in report.gates} == {Verdict.INCONCLUSIVE}, "its size is not the engine's"
    assert "**Not built yet**" in (pending.path / "report/report.md").read_text()

    for name in ("model.onnx", "model.onnx.data"):  # as copies that share disk space have
        os.link(pending.path / "engine" / name, tmp_path / name)
    finished = run("build", "--finish", pending.path, "--quiet")
    assert finished.exit_code == 4, finished.output
    opened, report = built(finished)
    assert opened.path.parent == pending.path.parent
    assert opened.path != pending.path
    assert "engine/model.plan" in opened.manifest.files
    assert opened.manifest.checkpoint == pending.manifest.checkpoint
    assert opened.manifest.recipe == pending.manifest.recipe
    assert not report.engine.pending
    assert [step.name for step in report.passes] == ["lower-precision"]
    assert any(pending.manifest.version in note for note in report.notes)
    assert {gate.metric: gate.verdict.value for gate in report.gates} == {
        "kld_mean": "inconclusive",
        "size_bytes": "pass",
    }
    pending.verify()

    direct, _ = built(build(file))
    for name in ("model.plan", "plan.json", "runtime.json"):
        path = f"engine/{name}"
        assert opened.manifest.files[path] == direct.manifest.files[path], "as built here and now"

    again = run("build", "--finish", opened.path)
    assert again.exit_code == 5
    assert "its engine is already built" in again.stderr
    assert run("build", "--finish", pending.path, "--quiet").exit_code == 4, "the same content"
    twice = Artifact.open(opened.path)
    twice.verify()
    assert [record.verdict for record in twice.evidence] == ["inconclusive", "inconclusive"]
    assert twice.evidence[0].digest == opened.evidence[0].digest
    assert (twice.path / twice.evidence[1].home / "report/report.html").is_file()
    assert not list(pending.path.parent.glob(".*building*"))

    other = recipe("other.yaml", engine={**RTX, "max_batch": 1, "deferred": True})
    refused = run("build", "--finish", pending.path, other)
    assert refused.exit_code == 2, refused.output
    assert "engine differ" in refused.stderr
    with_recipe = run("build", "--finish", pending.path, file, "--set", "engine.deferred=true", "--quiet")
    assert with_recipe.exit_code == 4, with_recipe.output
    assert "not measured: no CUDA device here" in with_recipe.output

    moved = tmp_path / "elsewhere" / "moved"
    shutil.copytree(pending.path, moved)
    moved.joinpath("engine/model.onnx.data").chmod(0o644)
    moved.joinpath("engine/model.onnx.data").write_bytes(b"changed")
    tampered = run("build", "--finish", moved)
    assert tampered.exit_code == 5
    assert "was changed after it was published" in tampered.stderr


# TensorRT as a provider of ONNX Runtime: its plans are compiled where the GPU is, too.
PROVIDER = {"backend": "onnxruntime", "max_context": 96, "max_batch": 2, "cuda_graphs": "off", "tensorrt": True}
FOR_ONNXRUNTIME = ["fuse-norms", "pack-qkv", "flash-attention"]


@pytest.fixture(params=["tensorrt", pytest.param("onnxruntime", marks=pytest.mark.thorough)])
def pending(recipe: Write, request: pytest.FixtureRequest) -> Path:
    if request.param == "tensorrt":
        sections: dict[str, Any] = {"engine": {**RTX, "backend": "tensorrt", "deferred": True}}
    else:
        steps = [*FOR_ONNXRUNTIME, {"lower-precision": {"dtype": "fp16", "budget": LOOSE}}]
        sections = {"engine": {**PROVIDER, "deferred": True}, "passes": steps}
    path = built(build(recipe(target="h200", **sections)))[0].path
    kept = json.loads((path / "engine" / "pending.json").read_text())
    assert json.loads(kept["engine"])["tensorrt"] is (request.param == "onnxruntime")
    return path


def test_a_pending_artifact_refuses_to_run_in_plain_words(pending: Path, tmp_path: Path) -> None:
    commands: tuple[tuple[object, ...], ...] = (
        ("run", pending, "graph"),
        ("serve", pending, "--port", 0),
        ("bench", pending),
        ("triton", pending, "--output", tmp_path / "repository"),
    )
    for command in commands:
        result = run(*command)
        assert result.exit_code == 8, (command, result.output)
        assert "is not built yet" in result.stderr.replace("\n", " ")
        assert f"--finish {pending}"[:20] in result.stderr
    shown = run("inspect", pending, "--verify")
    assert shown.exit_code == 0
    assert "engine      not built yet" in shown.stdout
    finished = run("build", "--finish", pending)
    assert finished.exit_code == 8
    assert "no CUDA device here" in finished.stderr
    assert "--defer" not in finished.stderr


def test_an_engine_that_is_built_on_its_gpu_is_not_built_elsewhere(recipe: Write, tmp_path: Path) -> None:
    result = build(recipe(target="h200", engine={**RTX, "backend": "tensorrt"}))
    assert result.exit_code == 8, result.output
    assert "no CUDA device here" in result.stderr
    assert "--defer" in result.stderr
    assert not (tmp_path / "out").exists()


def test_what_the_device_lacks_is_refused_at_plan_time(recipe: Write) -> None:
    result = build(recipe(), "--set", "passes=[]", "--set", "target=t4")
    assert result.exit_code == 6, result.output
    assert "fp32" in result.stderr
    assert "lower-precision" in result.stderr


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ((), "no recipe given"),
        (("--finish", "somewhere", "--out", "elsewhere"), "--out cannot be used with --finish"),
        (("--finish", "somewhere", "--defer"), "--defer cannot be used with --finish"),
    ],
)
def test_options_that_contradict_each_other_are_refused(arguments: tuple[str, ...], says: str) -> None:
    result = run("build", *arguments)
    assert result.exit_code == 2
    assert says in result.stderr


def test_a_cpu_engine_is_not_deferred(recipe: Write) -> None:
    result = build(recipe(target="local", engine={"max_context": 96}), "--defer")
    assert result.exit_code == 6
    assert "cannot be deferred" in result.stderr


# A process of another machine: a device that is made up, whose engine takes real time. All else is `build --finish`.
ELSEWHERE = """
import sys, time
from types import SimpleNamespace
from llmforge.backends import engines
from llmforge.base.errors import EnvironmentLacks
from llmforge.compile import evidence
from llmforge.cli import main
from llmforge.measure import gpus
from llmforge.measure.gpus import Gpu
from llmforge.measure import energy
from llmforge.serving import StepOutput

def generate_batch(prompts, samplings):
    for step in range(samplings[0].max_tokens):
        time.sleep(0.002 if step else 0.004)
        yield StepOutput((1,) * len(prompts), (None,) * len(prompts))

def none(*_):
    raise EnvironmentLacks("no counter")

plan = SimpleNamespace(module="tensorrt", version="11")
runner = SimpleNamespace(generate_batch=generate_batch, config=SimpleNamespace(vocabulary=64, plan=plan))
evidence.load_runner = lambda artifact, threads: runner
engines.why_not_run = lambda target: None
gpus.find = lambda: [Gpu(0, "NVIDIA L4", "89", 24 << 30)]
gpus.copy_bandwidth = lambda gpu: 2.5e11
gpus.matrix_rates = lambda gpu, product: {"fp16": 1e14}
energy.counter = none
sys.argv = ["llmforge", *sys.argv[1:]]
main()
"""


def read_by_hand(engine: Path) -> tuple[int, int]:
    """Bytes of weights that a decode step of `engine` reads, and of cache for each token; with the onnx package.

    Of tables a step reads a row, which counts as nothing, and what gives graphs their shapes is no weight.
    """
    graph = onnx.load(str(engine / "model.onnx"), load_external_data=False).graph
    tables = {node.input[0] for node in graph.node if node.op_type == "Gather"}
    tables -= {name for node in graph.node if node.op_type != "Gather" for name in node.input}
    tables |= {name for node in graph.node if node.op_type == "RotaryEmbedding" for name in node.input[1:3]}
    widths = {onnx.TensorProto.FLOAT: 4, onnx.TensorProto.FLOAT16: 2}
    weights = sum(
        math.prod(each.dims) * widths.get(each.data_type, 0) for each in graph.initializer if each.name not in tables
    )
    kv = 0
    for each in graph.input:
        if each.name.startswith("past_key_values"):
            dims = each.type.tensor_type.shape.dim
            kv += dims[1].dim_value * dims[3].dim_value * widths[each.type.tensor_type.elem_type]
    return weights, kv


@pytest.mark.thorough
def test_mbu_of_an_engine_that_another_process_finished_follows_from_the_files(recipe: Write, tmp_path: Path) -> None:
    timed = {"prompt_tokens": [8, 24], "output_tokens": 6, "repetitions": 3}
    file = recipe(
        validation={"latency": timed},
        gates={"size_bytes": {"max": 1e8}},
        engine={**RTX, "deferred": True},
        calibration={"data": "evaluation.jsonl", "samples": 4, "length": 16},  # text for the pass's budget
    )
    waiting, _ = built(build(file))
    export_format = Path(shutil.copytree(waiting.path, tmp_path / "elsewhere" / "tiny" / waiting.path.name))
    words = ("build", "--finish", str(export_format), str(file), "--quiet")
    done = subprocess.run([sys.executable, "-c", ELSEWHERE, *words], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    finished = Path(done.stdout.splitlines()[-1])
    assert finished.parent == export_format.parent
    weights, kv = read_by_hand(waiting.path / "engine")
    assert weights > 10 * kv > 0
    (record,) = (finished / "evidence").iterdir()
    found = json.loads(record.read_text())["latency"]
    bandwidth = found["bandwidth"]["working_set_bytes_per_second"]
    assert bandwidth == 2.5e11
    assert [point["prompt_tokens"] for point in found["points"]] == [8, 24]
    for point in found["points"]:
        generations = point["artifact"]["generations_ms"]
        assert [len(times) for times in generations] == [6] * 3
        tpot_s = statistics.median(statistics.mean(times[1:]) for times in generations) / 1e3
        assert 0.002 <= tpot_s < 0.1
        by_hand = (weights + kv * (point["prompt_tokens"] + 6 // 2)) / tpot_s / bandwidth
        assert point["bandwidth_utilization"] == pytest.approx(by_hand, rel=1e-3)  # 8 bytes give the graph a shape
        sheet = targets.load("l4").require_gpu().bandwidth_gbs.value * 1e9
        assert point["data_sheet_bandwidth_utilization"] == pytest.approx(by_hand * bandwidth / sheet, rel=1e-3)
