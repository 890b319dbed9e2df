"""Builds that SIGKILL ends at random moments: nothing lost, nothing that looks finished, and the same bytes in the end.

`benchmarks/kill_builds.py` does the same a hundred times to whole processes. Here one process has imported everything
and forks for each build, so that a build takes a second.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from llmforge.artifact import Artifact
from llmforge.cache import Cache, Key
from llmforge.report import model as reports

from ..checkpoints import write_checkpoint

KILLS = 10
MOST = 40  # builds: some end before their moment comes
WORDS = ("graph", "engine", "pass", "weight", "scale", "token", "cache", "layer", "head", "probe", "gate", "report")

# One line of standard input a build: recipe, out, cache, and the file that its stages are written to. It answers with
# the id of the process that builds, and, when that has ended, with its exit status.
_FORKS = """
import os, sys, traceback
from functools import partial
from pathlib import Path
from llmforge.base import process
process.prepare()
import onnxruntime, torch
from llmforge.base.progress import Silent
from llmforge.build import pipeline
from llmforge.cache import Cache
from llmforge.checkpoint import Checkpoint
from llmforge.recipe import Recipe
from llmforge.trace import trace

torch.set_num_threads(1)  # a process with threads must not fork
trace(Checkpoint.open(Path(sys.argv[1])))  # the first one imports most of torch.onnx

class Told(Silent):
    def __init__(self, file):
        self.file = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    def stage(self, title):
        os.write(self.file, f"{title}\\n".encode())

def build(recipe, out, cache, told):
    result = pipeline.build(Recipe.load(Path(recipe)), Path(out), Told(told), partial(Cache, Path(cache)))
    Path(told).with_suffix(".path").write_text(str(result.path))

print("ready", flush=True)
for line in sys.stdin:
    child = os.fork()
    if child == 0:
        try:
            build(*line.rstrip("\\n").split("\\t"))
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    print(child, flush=True)
    print(os.waitpid(child, 0)[1], flush=True)
"""


@dataclass
class Builds:
    """The process that forks, and the folders of its builds."""

    process: subprocess.Popen[str]
    recipe: Path
    folder: Path

    @property
    def out(self) -> Path:
        return self.folder / "out"

    @property
    def cache(self) -> Path:
        return self.folder / "cache"

    @property
    def told(self) -> list[str]:
        """The stages that the last build began."""
        return (self.folder / "told.log").read_text().splitlines()

    def run(self, moment: float | None = None) -> int:
        """Build, and kill the build after `moment` seconds if it still runs; return its exit status."""
        assert self.process.stdin is not None
        self.process.stdin.write(f"{self.recipe}\t{self.out}\t{self.cache}\t{self.folder / 'told.log'}\n")
        self.process.stdin.flush()
        child = int(self._line())
        if moment is not None:
            time.sleep(moment)
            with contextlib.suppress(ProcessLookupError):
                os.kill(child, signal.SIGKILL)
        return os.waitstatus_to_exitcode(int(self._line()))

    def finish(self) -> tuple[Artifact, reports.Report]:
        """Build to the end."""
        assert self.run() == 0
        artifact = Artifact.open(Path((self.folder / "told.path").read_text()))
        artifact.verify()
        return artifact, reports.read(artifact)

    def _line(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline()


@pytest.fixture
def builds(tmp_path: Path) -> Iterator[Builds]:
    write_checkpoint(tmp_path / "tiny-llama")
    rng = random.Random(0)
    lines = [{"id": str(i), "text": f"{i} " + " ".join(rng.choices(WORDS, k=30))} for i in range(6)]
    (tmp_path / "calibration.jsonl").write_text("\n".join(map(json.dumps, lines)))
    loose = {"budget": {"kld_mean": 5.0}}  # random weights
    recipe: dict[str, Any] = {
        "schema": 1,
        "name": "tiny",
        "checkpoint": "tiny-llama",
        "target": "local",
        "engine": {"max_context": 128, "max_batch": 2, "threads": 1},
        "calibration": {"data": "calibration.jsonl", "samples": 4, "length": 64, "threads": 1},
        "passes": [
            "fuse-norms",
            "pack-qkv",
            "flash-attention",
            {"quantize-weights": {"block_size": 32, **loose}},
            {"quantize-kv-cache": loose},
        ],
    }
    (tmp_path / "recipe.yaml").write_text(json.dumps(recipe))  # JSON is YAML
    with subprocess.Popen(
        [sys.executable, "-c", _FORKS, str(tmp_path / "tiny-llama")],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        made = Builds(process, tmp_path / "recipe.yaml", tmp_path)
        assert made._line() == "ready\n"
        yield made
        assert process.stdin is not None
        process.stdin.close()


def finished_passes(folder: Path) -> set[str]:
    """Name the passes whose proofs a cache holds."""
    return {entry.parts["pass"] for entry in Cache(folder).entries() if entry.kind == "proof"}


def whole_entries(folder: Path) -> int:
    """Count the entries of the cache, each of which must be as its record says."""
    with Cache(folder) as cache:
        entries = cache.entries()
        assert all(cache.find(Key(entry.kind, entry.parts)) for entry in entries)
        assert cache.notes == []
        assert not list((folder / "locks").iterdir())  # what a dead build held
        assert len(list((folder / "entries").iterdir())) == len(entries)  # what it was writing
    return len(entries)


def timed(builds: Builds) -> tuple[str, float]:
    """Build to the end; return the content digest, and how long it took, in seconds."""
    began = time.monotonic()
    artifact, _ = builds.finish()
    seconds = time.monotonic() - began
    shutil.rmtree(builds.out)
    return artifact.manifest.content_digest, seconds


@pytest.mark.timeout(300)
def test_builds_killed_at_random_moments_lose_nothing(builds: Builds) -> None:
    seed = int(os.environ.get("LLMFORGE_TEST_SEED") or random.randrange(1 << 32))
    print(f"LLMFORGE_TEST_SEED={seed} repeats these moments, as far as a machine repeats")
    rng = random.Random(seed)
    whole, cold = timed(builds)
    # More than half of such a build is its trace: only the first round begins without one.
    for entry in Cache(builds.cache).entries():
        if entry.kind != "trace":
            shutil.rmtree(builds.cache / "entries" / entry.digest)
    traced = builds.folder / "traced"
    shutil.copytree(builds.cache, traced)
    shutil.rmtree(builds.cache)

    known: set[str] = set()  # passes that some build had finished since the cache was emptied
    kills, carried, longest = 0, 0, cold
    for _ in range(MOST):
        ended = builds.run(rng.uniform(0, longest))
        assert ended in (0, -signal.SIGKILL)
        kills += ended != 0
        if builds.cache.is_dir():
            whole_entries(builds.cache)
        for path in builds.out.glob("*/[!.]*"):  # of a build that was killed behind its last step
            Artifact.open(path).verify()
        if ended != 0 and builds.cache.is_dir():
            known |= finished_passes(builds.cache)
        if ended == 0 or len(known) >= 2 or kills == KILLS:
            artifact, report = builds.finish()
            hidden = [path.name for path in builds.out.glob("*/.*")]
            assert hidden == [".lock"]  # what killed builds left is gone
            assert artifact.manifest.content_digest == whole
            reused = {done.name for done in report.passes if done.reused}
            assert known <= reused
            assert [note for note in report.notes if "cache" in note] == []
            carried += len(known)
            for folder in (builds.cache, builds.out):
                shutil.rmtree(folder)
            shutil.copytree(traced, builds.cache)
            known, longest = set(), cold / 2
        if kills == KILLS:
            break
    assert kills == KILLS
    assert carried > 0
