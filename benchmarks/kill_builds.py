"""Kill builds by SIGKILL at random moments, and see that nothing is lost and nothing looks finished.

    python benchmarks/kill_builds.py [--kills 100] [--recipe recipes/quickstart.yaml] [--seed 0]

A build without interruption comes first; its time is the range of moments. Each round begins with an empty cache with a
chance of one in four, else with what the last kill left. After each kill: no artifact has a visible name unless all its
files are as its manifest says; every entry of the cache is whole. Every fourth round a build runs to its end: it reuses
every pass that an earlier one had finished, and has the content of the first one.
"""

from __future__ import annotations

import argparse
import json
import os
import random
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


def command(recipe: Path, out: Path) -> list[str]:
    """Return the command line of a build without validation."""
    return [
        sys.executable, "-m", "llmforge", "build", str(recipe), "--out", str(out),
        *(word for value in FAST for word in ("--set", value)),
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


def main() -> None:
    """Run all rounds, and print one line each."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--recipe", type=Path, default=ROOT / "recipes" / "quickstart.yaml")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    rng = random.Random(options.seed)
    with tempfile.TemporaryDirectory() as scratch:
        cache, out = Path(scratch) / "cache", Path(scratch) / "out"
        environment = {**os.environ, "LLMFORGE_CACHE": str(cache)}
        began = time.monotonic()
        first = [*command(options.recipe, Path(scratch) / "first"), "--no-cache"]
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
                command(options.recipe, out), stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
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
                asked = [*command(options.recipe, out), "--json"]
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
