"""Kill builds by SIGKILL at random moments, and see that nothing is lost and nothing looks finished.

    python benchmarks/kill_builds.py [--kills 100] [--recipe recipes/quickstart.yaml] [--seed 0]

A build without interruption comes first; its time is the range of moments. Each round begins with an empty cache with a
chance of one in four, else with what the last kill left. After each kill: no artifact has a visible name unless all its
files are as its manifest says; every entry of the cache is whole. Every fourth round a build runs to its end: it reuses
every pass that an earlier one had finished, and has the content of the first one.

With `--stages` the moments are the beginning, the middle and the end of every stage that the first build tells: load,
check, trace, read, verify, calibrate, each pass, engine, proofs, quality, publish. One cache goes through all of them;
after each kill a build runs to its end on a copy of it. `--set` is handed on to the builds, in place of `FAST`.

The slow tests of `tests/compile/test_kills.py` do both to processes that fork from one which has imported everything:
as many kills in a tenth of the time.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from llmforge.artifact import Artifact
from llmforge.cache import Cache, Key

ROOT = Path(__file__).resolve().parents[1]
FAST = ("validation.quality=null", "validation.latency=null", "gates={}")


def command(recipe: Path, out: Path, changed: tuple[str, ...] = FAST) -> list[str]:
    """Return the command line of a build, without validation by default."""
    return [
        sys.executable, "-m", "llmforge", "build", str(recipe), "--out", str(out),
        *(word for value in changed for word in ("--set", value)),
    ]  # fmt: skip


def finished(cache: Path) -> set[str]:
    """Name the passes whose proofs a cache holds."""
    if not cache.is_dir():
        return set()
    return {entry.parts["pass"] for entry in Cache(cache).entries() if entry.kind == "proof"}


def check(out: Path, cache: Path) -> tuple[int, int]:
    """Verify all that has a visible name; return the artifacts and the entries of the cache."""
    artifacts = list(out.glob("*/[!.]*"))
    for path in artifacts:
        Artifact.open(path).verify()
    with Cache(cache) as store:
        entries = store.entries()
        for entry in entries:
            assert store.find(Key(entry.kind, entry.parts)) is not None, (entry, store.notes)
        assert not store.notes, store.notes
    return len(artifacts), len(entries)


def stages_of(line: list[str], environment: dict[str, str]) -> tuple[list[tuple[str, float]], str]:
    """Build to the end; return each stage with the seconds that it took, and the content digest."""
    told: list[tuple[str, float]] = []
    with subprocess.Popen(line, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment) as process:
        assert process.stderr is not None
        assert process.stdout is not None
        for said in process.stderr:
            if is_stage(said):
                told.append((said.strip(), time.monotonic()))
        path = process.stdout.read().splitlines()[-1]
    assert process.returncode == 0, process.returncode
    ends = [moment for _, moment in told[1:]] + [time.monotonic()]
    took = [(title, end - began) for (title, began), end in zip(told, ends, strict=True)]
    return took, Artifact.open(Path(path)).manifest.content_digest


def is_stage(said: str) -> bool:
    """Say if a line of progress begins a stage."""
    return bool(said.strip()) and not re.search(r": (took|failed|\d)|^(note|warning|error|hint):", said)


def kill_in(line: list[str], environment: dict[str, str], stage: str, share: float, seconds: float) -> bool:
    """Kill a build when `share` of `stage` has passed, 1: as soon as the next one begins; say if it came so far."""
    with subprocess.Popen(
        line, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, env=environment
    ) as process:
        assert process.stderr is not None
        seen = False
        for said in process.stderr:
            if seen and is_stage(said):
                break
            if said.strip() == stage:
                seen = True
                if share < 1:
                    time.sleep(share * seconds)
                    break
        process.send_signal(signal.SIGKILL)
    return seen


def kill_stages(recipe: Path, changed: tuple[str, ...], scratch: Path) -> None:
    """Kill at the beginning, in the middle and at the end of every stage, and print one line each."""
    cache, copy, out = scratch / "cache", scratch / "copy", scratch / "out"
    environment = {**os.environ, "LLMFORGE_CACHE": str(cache)}
    took, whole = stages_of([*command(recipe, scratch / "first", changed), "--no-cache"], environment)
    kills = 0
    for title, seconds in took:
        for share, name in ((0.0, "beginning"), (0.5, "middle"), (1.0, "end")):
            killed = kill_in(command(recipe, out, changed), environment, title, share, seconds)
            kills += killed
            artifacts, entries = check(out, cache)
            shutil.rmtree(out, ignore_errors=True)
            shutil.copytree(cache, copy)
            ended, digest = stages_of(command(recipe, out, changed), {**environment, "LLMFORGE_CACHE": str(copy)})
            assert digest == whole, (title, name, digest, whole)
            hidden = [path.name for path in out.glob("*/.*") if path.name != ".lock"]
            assert not hidden, hidden
            shutil.rmtree(copy)
            shutil.rmtree(out)
            how = "killed at" if killed else "was not reached again; killed behind"
            print(
                f"{title}: {how} its {name}: {entries} entries, {artifacts} artifacts; the next build took "
                f"{sum(s for _, s in ended):.1f} s and is equal",
                flush=True,
            )
    print(f"{kills} kills in {len(took)} stages")


def main() -> None:
    """Run all rounds, and print one line each."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--recipe", type=Path, default=ROOT / "recipes" / "quickstart.yaml")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--stages", action="store_true", help="kill in every stage and not at random moments")
    parser.add_argument("--set", dest="changed", action="append", default=[], metavar="PATH=VALUE")
    options = parser.parse_args()
    changed = tuple(options.changed) or FAST
    if options.stages:
        with tempfile.TemporaryDirectory() as scratch:
            kill_stages(options.recipe, changed, Path(scratch))
        return
    rng = random.Random(options.seed)
    with tempfile.TemporaryDirectory() as scratch:
        cache, out = Path(scratch) / "cache", Path(scratch) / "out"
        environment = {**os.environ, "LLMFORGE_CACHE": str(cache)}
        began = time.monotonic()
        first = [*command(options.recipe, Path(scratch) / "first", changed), "--no-cache"]
        done = subprocess.run(first, capture_output=True, text=True, check=True, env=environment)
        whole = Artifact.open(Path(done.stdout.splitlines()[-1])).manifest.content_digest
        longest = time.monotonic() - began
        known: set[str] = set()
        for number in range(options.kills):
            if rng.random() < 0.25:
                shutil.rmtree(cache, ignore_errors=True)
                known = set()
            moment = rng.uniform(0, longest)
            killed = subprocess.Popen(
                command(options.recipe, out, changed), stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
                env=environment,
            )  # fmt: skip
            try:
                killed.communicate(timeout=moment)
            except subprocess.TimeoutExpired:
                killed.send_signal(signal.SIGKILL)
                killed.communicate()
            known |= finished(cache)
            artifacts, entries = check(out, cache)
            line = f"{number + 1}: after {moment:.1f} s: {entries} entries, {artifacts} artifacts, passes {len(known)}"
            if number % 4 == 3:
                shutil.rmtree(out, ignore_errors=True)
                asked = [*command(options.recipe, out, changed), "--json"]
                end = subprocess.run(asked, capture_output=True, text=True, check=True, env=environment)
                result = json.loads(end.stdout)
                reused = {each["name"] for each in result["report"]["passes"] if each["reused"]}
                assert known <= reused, (known, reused)
                assert Artifact.open(Path(result["artifact"])).manifest.content_digest == whole
                known = {each["name"] for each in result["report"]["passes"]}
                line += f"; the next one reused {len(reused)} and is equal"
            print(line, flush=True)


if __name__ == "__main__":
    main()
