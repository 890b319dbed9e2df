"""Builds on a real Ray of this machine: a matrix, a worker that is killed, a store, interruptions."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from llmforge.artifact import Artifact
from llmforge.base import extras
from llmforge.farm import cluster, connection, page, placing, preflight, running
from llmforge.farm.matrix import Build, Matrix, expand
from llmforge.farm.preflight import NodeNeeds
from llmforge.farm.rows import Row, worst
from llmforge.farm.running import FarmSettings

from ..models import zoo
from ..samples import pages
from .nodes import SLOW_TO_IMPORT, paths

ROOT = Path(__file__).parents[2]
pytestmark = [
    pytest.mark.slow,
    pytest.mark.xdist_group("ray"),
    pytest.mark.timeout(900),
    pytest.mark.skipif(extras.trouble("ray") is not None, reason="ray is not installed (extra `farm`)"),
    # Ray leaves sockets and processes to the garbage collector, and warns of what it will change.
    pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::FutureWarning", "ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]

RECIPE = """\
schema: 1
name: zoo
checkpoint: llama
target: local
engine: {max_context: 64, max_batch: 2}
passes: [fuse-norms, pack-qkv, pack-gate-up, flash-attention]
"""
MATRIX = """\
schema: 1
name: release
recipe: recipe.yaml
models:
  llama: {checkpoint: llama}
  qwen3: {checkpoint: qwen3}
targets:
  local:
  cpu-avx2:
  rtx-4090:
    target: rtx-4090
    engine.backend: tensorrt-rtx
    engine.deferred: true
    validation.quality: {data: evaluation.jsonl, context: 32}
    passes: [pack-qkv, pack-gate-up, lower-precision: {dtype: fp16, budget: {kld_mean: 1}}]
variants:
  one: {engine.max_batch: 1}
  two:
"""


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with two checkpoints, a recipe, a matrix and a text."""
    folder = tmp_path_factory.mktemp("farm")
    for name in ("llama", "qwen3"):
        zoo.write(name, folder / name)
    text = "".join(json.dumps({"id": f"d{n}", "text": f"{n} quick brown foxes " * 4}) + "\n" for n in range(4))
    (folder / "evaluation.jsonl").write_text(text, encoding="utf-8")
    (folder / "recipe.yaml").write_text(RECIPE, encoding="utf-8")
    (folder / "release.yaml").write_text(MATRIX, encoding="utf-8")
    return folder


def environ(tmp_path: Path) -> dict[str, str]:
    found = paths(ROOT, *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep)))
    more = {"PYTHONPATH": found, "ABSENT_MODULES": SLOW_TO_IMPORT, "LLMFORGE_CACHE": str(tmp_path / "cache")}
    return {**os.environ, **more}


def llmforge(tmp_path: Path, *arguments: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "llmforge", *map(str, arguments)],
        capture_output=True, text=True, timeout=850, env=environ(tmp_path), check=False,
    )  # fmt: skip


def test_a_matrix_is_built(place: Path, tmp_path: Path) -> None:
    """Two models × three targets × two variants; the GPU's engines are left to the machine that has it."""
    out = tmp_path / "artifacts"
    (tmp_path / "store").mkdir()
    done = llmforge(
        tmp_path, "build", "--matrix", place / "release.yaml", "--out", out, "--jobs", 2, "--json",
        "--store", (tmp_path / "store").as_uri(),
    )  # fmt: skip
    assert done.returncode == 10, done.stderr  # no node has the GPU
    made = json.loads(done.stdout)
    assert len(made["builds"]) == 12
    verdicts = {(row["target"], row["verdict"]) for row in made["builds"]}
    assert verdicts == {("local", "none"), ("cpu-avx2", "none"), ("rtx-4090", "pending")}
    for row in made["builds"]:
        Artifact.open(Path(row["artifact"])).verify()
        version = Path(row["artifact"])
        assert (tmp_path / "store" / version.parent.name / f"{version.name}.tar").is_file()
    # Each model was traced once, whoever came first.
    traced = [row["model"] for row in made["builds"] if "trace" not in row["reused"]]
    assert sorted(traced) == ["llama", "qwen3"]
    shown = pages.check(Path(made["page"]).read_text(encoding="utf-8"))
    assert "qwen3" in shown.text
    assert "PENDING" in shown.text
    assert "Load llmforge" in done.stderr  # plain lines of stages, in a pipe
    # The bytes do not depend on who starts a build.
    row = next(each for each in made["builds"] if (each["model"], each["target"]) == ("llama", "local"))
    alone = llmforge(
        tmp_path, "build", place / "recipe.yaml", "--no-cache", "--out", tmp_path / "alone",
        "--set", f"name={Path(row['artifact']).parent.name}", "--set", "engine.max_batch=1",
    )  # fmt: skip
    assert alone.returncode == 0, alone.stderr
    assert Path(alone.stdout.splitlines()[-1]).name == Path(row["artifact"]).name


@pytest.fixture
def farm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[cluster.Farm]:
    """A Ray of this machine, which says that it is an RTX 4090, too."""
    for name, value in environ(tmp_path).items():
        monkeypatch.setenv(name, value)
    real = placing.here
    monkeypatch.setattr(placing, "here", lambda isa, gpus: real(isa, [*gpus, "rtx-4090"]))
    with connection.opened(cpus=2) as opened:
        yield opened


def settings_of(tmp_path: Path, jobs: int | None = None) -> FarmSettings:
    return FarmSettings(NodeNeeds(preflight.code(), tmp_path / "artifacts"), jobs)


def chosen(place: Path, *titles: str) -> list[Build]:
    path = place / "release.yaml"
    return [each for each in expand(Matrix.load(path), path) if each.title in titles]


def test_a_killed_worker_costs_what_was_running(place: Path, tmp_path: Path, farm: cluster.Farm) -> None:
    """The worker is killed when the first pass was proven: that, and the trace, are not computed again."""
    killed: list[int] = []

    def kept(kind: str) -> list[dict[str, Any]]:
        records = [
            json.loads(file.read_text() or "{}") for file in (tmp_path / "cache").glob("entries/[!.]*/record.json")
        ]
        return [record for record in records if record.get("kind") == kind]

    def kill(row: Row) -> None:
        if killed or row.stage.startswith(("Load", "Check")) or not kept("proof"):
            return
        [worker] = {
            process.ppid()
            for process in psutil.process_iter(["cmdline"])
            if "llmforge.farm.attached" in (process.info["cmdline"] or ())
            and str(tmp_path) in str(process.info["cmdline"])
        }
        killed.append(worker)
        os.kill(worker, signal.SIGKILL)

    [row] = running.run(chosen(place, "llama/local/one"), farm, settings_of(tmp_path, 1), kill)
    assert killed
    assert row.verdict == "none", row.outcome
    assert row.attempts == 2
    assert "again from what the cache kept" in row.notes[0]
    assert "trace" in row.reused
    assert set(row.reused) >= {"fuse-norms"}
    assert row.outcome is not None
    assert row.outcome.artifact is not None
    Artifact.open(row.outcome.artifact).verify()
    assert page.data([row])[0]["reused"] == list(row.reused)
    left = [each for each in psutil.process_iter(["cmdline"]) if str(tmp_path) in str(each.info["cmdline"])]
    assert not [each for each in left if "llmforge" in str(each.info["cmdline"])]


def test_the_node_with_the_device_finishes_engines(place: Path, tmp_path: Path, farm: cluster.Farm) -> None:
    said: list[str] = []
    [row] = running.run(
        chosen(place, "llama/rtx-4090/one"),
        farm,
        settings_of(tmp_path),
        lambda row: said.append(f"{row.state} {row.stage}"),
    )
    assert row.outcome is not None
    assert row.outcome.message is None
    assert not row.outcome.pending
    assert "finishing Build engine" in said
    assert row.outcome.artifact is not None
    assert (row.outcome.artifact / "engine").glob("*.plan")
    assert len(list((tmp_path / "artifacts" / "llama-rtx-4090-one").glob("[!.]*"))) == 2  # without an engine, and with


def test_what_cannot_be_built_is_a_row(place: Path, tmp_path: Path, farm: cluster.Farm) -> None:
    [build, *_] = chosen(place, "llama/local/one", "qwen3/local/one")
    wrong = Build("none", "local", "one", build.recipe, (*build.overrides, "checkpoint=nowhere"))
    early = Build("none", "amx", "one", build.recipe, (*build.overrides, "target=h200", "engine.backend=tensorrt",
                                                      "engine.max_context=100000"))  # fmt: skip
    rows = running.run([wrong, early, build], farm, settings_of(tmp_path, 2))
    assert [row.verdict for row in rows] == ["error", "error", "none"]
    assert rows[0].outcome is not None
    assert "nowhere" in str(rows[0].outcome.message)
    assert worst(row.exit_code for row in rows) == 5


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_an_interruption_ends_everything(place: Path, tmp_path: Path, number: signal.Signals) -> None:
    out = tmp_path / "artifacts"
    command = [sys.executable, "-m", "llmforge", "build", "--matrix", place / "release.yaml", "--out", out]
    with subprocess.Popen(
        list(map(str, command)), stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environ(tmp_path)
    ) as process:
        assert process.stderr is not None
        for line in process.stderr:
            if "Trace" in line:
                break
        children = psutil.Process(process.pid).children(recursive=True)
        agents = [each for each in children if is_agent(each)]
        process.send_signal(number)
        rest = process.stderr.read()
        code = process.wait(600)
    if number is signal.SIGINT:
        assert code == 130
        assert "run the same command to go on" in rest
    wait_for_ends([each for each in children if each not in agents], 300)
    wait_for_ends(agents, 600)  # Ray's own look for their parents now and then


def is_agent(process: psutil.Process) -> bool:
    """Whether it is one of Ray's own, which builds nothing."""
    with contextlib.suppress(psutil.NoSuchProcess):
        command = " ".join(process.cmdline()).strip()
        return command.endswith("Agent") or (f"{os.sep}ray{os.sep}" in command and "default_worker" not in command)
    return False


def wait_for_ends(processes: list[psutil.Process], seconds: float) -> None:
    until = time.monotonic() + seconds
    while left := [each for each in processes if each.is_running() and each.status() != psutil.STATUS_ZOMBIE]:
        assert time.monotonic() < until, left
        time.sleep(0.5)
