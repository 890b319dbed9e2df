"""Builds that SIGKILL ends: nothing lost, nothing that looks finished, and the same bytes in the end.

`benchmarks/kill_builds.py` does the same to whole processes. Here one process has imported everything and traced the
model, and forks for each build, so that a build takes a second.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from llmforge.artifact import Artifact
from llmforge.cache import Cache, Key
from llmforge.gates import records

from ..models.checkpoints import write_checkpoint

MOST = 4  # builds a kill: some end before their moment comes
WORDS = ("graph", "engine", "pass", "weight", "scale", "token", "cache", "layer", "head", "probe", "gate", "report")

# It says how many seconds the trace took, which it keeps in the cache of its second argument. Then one line of standard
# input a build: recipe, out, cache, the file that moments and titles of its stages are written to, and the number of
# changes of the disk after which the build kills itself, or -1. It answers with the id of the process that builds, and,
# when that has ended, with its exit status.
_FORKS = """
import itertools, os, signal, sys, time, traceback
from functools import partial
from pathlib import Path
from llmforge.base import process
process.prepare()
import onnxruntime, torch
from llmforge.base.progress import Silent
from llmforge.compile import pipeline, reuse
from llmforge.cache import Cache
from llmforge.checkpoint import Checkpoint
from llmforge.recipe import Recipe

torch.set_num_threads(1)  # a process with threads must not fork
with Cache(Path(sys.argv[2])) as cache:
    kept, checkpoint = reuse.Reuse(cache), Checkpoint.located(Path(sys.argv[1]))
    kept.configure(checkpoint, Silent())
    began = time.monotonic()
    kept.trace(checkpoint, Silent())
    took = time.monotonic() - began

class Told(Silent):
    def __init__(self, file):
        self.file = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    def stage(self, title):
        os.write(self.file, f"{time.monotonic()} {title}\\n".encode())

NAMES = "rename", "mkdir", "rmdir", "remove", "link", "symlink", "truncate", "chmod", "utime"
CHANGES = {f"os.{name}" for name in NAMES}
WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT

def build(recipe, out, cache, told, last):
    changes = itertools.count()
    def count(event, arguments):
        if event in CHANGES or (event == "open" and arguments[2] & WRITES):
            if next(changes) == int(last):
                os.kill(os.getpid(), signal.SIGKILL)
    told_stages = Told(told)
    sys.addaudithook(count)
    result = pipeline.build(Recipe.load(Path(recipe)), Path(out), told_stages, partial(Cache, Path(cache)))
    made = next(changes)
    Path(told).with_suffix(".path").write_text(str(result.path))
    Path(told).with_suffix(".changes").write_text(str(made))

print(took, flush=True)
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
    trace_seconds: float

    @property
    def out(self) -> Path:
        return self.folder / "out"

    @property
    def cache(self) -> Path:
        return self.folder / "cache"

    @property
    def traced(self) -> Path:
        """The cache that holds the trace alone."""
        return self.folder / "traced"

    def told(self) -> list[tuple[float, str]]:
        """The stages that the last build has begun, and when, in seconds."""
        lines = (self.folder / "told.log").read_text().splitlines(keepends=True)
        pairs = [line.split(" ", 1) for line in lines if line.endswith("\n")]
        return [(float(moment), title.rstrip()) for moment, title in pairs]

    def changes(self) -> int:
        """Count the changes of the disk (a file opened to be written, renamed, removed …) of the last whole build."""
        return int((self.folder / "told.changes").read_text())

    def run(self, until: Callable[[Builds], object] | None = None, *, changes: int = -1) -> int:
        """Build, and return the exit status.

        The build, if it still runs, is killed when `until` returns, or where it would change the disk once more than
        `changes` times.
        """
        assert self.process.stdin is not None
        (self.folder / "told.log").write_text("")
        told = self.folder / "told.log"
        self.process.stdin.write(f"{self.recipe}\t{self.out}\t{self.cache}\t{told}\t{changes}\n")
        self.process.stdin.flush()
        child = int(self.line())
        if until is not None:
            until(self)
            with contextlib.suppress(ProcessLookupError):
                os.kill(child, signal.SIGKILL)
        return os.waitstatus_to_exitcode(int(self.line()))

    def built(self) -> tuple[Artifact, records.Report]:
        """Open what the last build, which was not killed, has made."""
        artifact = Artifact.open(Path((self.folder / "told.path").read_text()))
        artifact.verify()
        return artifact, records.read(artifact)

    def line(self) -> str:
        """Read the next line that the process says."""
        assert self.process.stdout is not None
        return self.process.stdout.readline()

    def clear(self, *, traced: bool) -> None:
        """Begin with no artifact, and with an empty cache, or the trace in it."""
        for folder in (self.cache, self.out):
            shutil.rmtree(folder, ignore_errors=True)
        if traced:
            shutil.copytree(self.traced, self.cache)


def at_stage(number: int, share: float, seconds: float) -> Callable[[Builds], None]:
    """Wait until `share` of the stage `number`, which takes so long, has passed; 1: until the next one begins."""

    def wait(builds: Builds) -> None:
        until = time.monotonic() + 600  # machines that are shared stop tests for minutes
        while len(builds.told()) <= number + (share == 1) and time.monotonic() < until:
            if (builds.folder / "told.path").exists():
                return  # it was the last one
            time.sleep(0.001)
        time.sleep(share * seconds if share < 1 else 0)

    return wait


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
        [sys.executable, "-c", _FORKS, str(tmp_path / "tiny-llama"), str(tmp_path / "traced")],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        yield Builds(process, tmp_path / "recipe.yaml", tmp_path, float(process.stdout.readline()))
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


def survey(builds: Builds) -> set[str]:
    """See what a killed build left: whole entries and artifacts; return the passes that it had finished."""
    for path in builds.out.glob("*/[!.]*"):  # of a build that was killed behind its last step
        Artifact.open(path).verify()
    if not builds.cache.is_dir():
        return set()
    whole_entries(builds.cache)
    return finished_passes(builds.cache)


def judge(builds: Builds, whole: str, known: set[str]) -> None:
    """See that the last build, which was not killed, reused the passes `known` to be finished, and made `whole`."""
    artifact, report = builds.built()
    hidden = [path.name for path in builds.out.glob("*/.*")]
    assert hidden == [".lock"]  # what killed builds left is gone
    assert artifact.manifest.content_digest == whole
    assert known <= {done.name for done in report.passes if done.reused}
    assert [note for note in report.notes if "cache" in note] == []


def undisturbed(builds: Builds) -> tuple[str, list[tuple[str, float]]]:
    """Build to the end with the trace; return the content digest, and each stage with the seconds that it took."""
    builds.clear(traced=True)
    assert builds.run() == 0
    artifact, _ = builds.built()
    told = [*builds.told(), (time.monotonic(), "")]
    return artifact.manifest.content_digest, [(a[1], b[0] - a[0]) for a, b in itertools.pairwise(told)]


def drawn() -> random.Random:
    seed = int(os.environ.get("LLMFORGE_TEST_SEED") or random.randrange(1 << 32))
    print(f"LLMFORGE_TEST_SEED={seed} repeats these moments, as far as a machine repeats")
    return random.Random(seed)


def kill_and_go_on(builds: Builds, whole: str, kills: int, run: Callable[[int], int]) -> int:
    """Kill builds until `kills` of them were killed, and see what comes of them; return how many passes were reused.

    `run` builds, and kills at a moment of its own choice, given how many were killed before. More than half of such a
    build is its trace: only the first one begins without it.
    """
    builds.clear(traced=False)
    known: set[str] = set()  # passes that some build had finished since the cache was emptied
    killed, carried, rounds = 0, 0, 0
    for _ in range(MOST * kills):
        ended = run(killed)
        assert ended in (0, -signal.SIGKILL)
        if ended != 0:
            killed += 1
            known |= survey(builds)
            shutil.copytree(builds.traced, builds.cache, dirs_exist_ok=True)
            if len(known) < 2 and killed < kills:
                continue
            assert builds.run() == 0
        judge(builds, whole, known)
        carried, rounds = carried + len(known), rounds + 1
        builds.clear(traced=True)
        known = set()
        if killed == kills:
            break
    print(f"{killed} kills, {rounds} builds to the end, which reused {carried} finished passes")
    assert killed == kills
    return carried


@pytest.mark.thorough
@pytest.mark.timeout(1800)
def test_builds_killed_before_a_change_of_the_disk_lose_nothing(builds: Builds) -> None:
    rng, kills = drawn(), 20
    whole, _ = undisturbed(builds)
    # One of each part of the build, so that some have finished passes on every machine.
    moments = [int((part + rng.random()) / kills * builds.changes()) for part in range(kills)]
    rng.shuffle(moments)
    print(f"before the changes {moments} of {builds.changes()}")
    assert kill_and_go_on(builds, whole, kills, lambda killed: builds.run(changes=moments[killed])) > 0


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_builds_killed_at_random_moments_lose_nothing(builds: Builds) -> None:
    rng = drawn()
    whole, stages = undisturbed(builds)
    seconds = sum(took for _, took in stages)

    def run(killed: int) -> int:
        moment = rng.uniform(0, seconds + (0 if killed else builds.trace_seconds))
        return builds.run(lambda _: time.sleep(moment))

    assert kill_and_go_on(builds, whole, 100, run) > 0


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_builds_killed_in_every_stage_lose_nothing(builds: Builds) -> None:
    whole, stages = undisturbed(builds)
    killed, carried = 0, 0
    for number, (title, seconds) in enumerate(stages):
        for share in (0.0, 0.5, 1.0):
            builds.clear(traced=True)
            (builds.folder / "told.path").unlink()
            ended = builds.run(at_stage(number, share, seconds))
            assert ended in (0, -signal.SIGKILL)
            assert title in [each for _, each in builds.told()]
            known = survey(builds)
            assert builds.run() == 0
            judge(builds, whole, known)
            killed, carried = killed + (ended != 0), carried + len(known)
    print(f"{killed} kills in {len(stages)} stages; the builds behind them reused {carried} finished passes")
    assert killed >= 2 * len(stages)  # at the end of the last one there may be nothing left to kill
    assert carried > 0
