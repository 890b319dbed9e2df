"""Time encoders beside ONNX Runtime and OpenVINO, in turns: python benchmarks/encoders.py FOLDER --sides …

Each side is a process of its own (benchmarks/peers/encoder_worker.py, which also makes the checkpoint and the peers'
models), and all wait while one runs. A point is a batch of texts of one length; its time is the median of its runs, a
few in each turn, and what is printed is how many times as many texts a second `llmforge` takes as the better peer.

    python benchmarks/encoders.py --sides int8=llmforge:engine-int8 int8=onnxruntime:int8.onnx@PYTHON …

A side is PRECISION=RUNTIME:MODEL, with @PYTHON where another environment has the runtime.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

WORKER = Path(__file__).parent / "peers" / "encoder_worker.py"
OURS = "llmforge"
MOST_MS = 1500.0  # a turn, about


@dataclass(eq=False)
class Side:
    """A runtime with a model, in a process of its own."""

    precision: str
    runtime: str
    process: subprocess.Popen[str]
    times: dict[tuple[int, int], list[float]] = field(default_factory=dict)

    @classmethod
    def start(cls, text: str, threads: int) -> Side:
        """Start the side that `text` describes."""
        precision, _, rest = text.partition("=")
        rest, _, python = rest.partition("@")
        runtime, _, model = rest.partition(":")
        environment = dict(os.environ) if not python else {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
        command = [python or sys.executable, str(WORKER), "serve", runtime, model, str(threads)]
        pipe = subprocess.PIPE
        process = subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, env=environment)
        return cls(precision, runtime, process)

    def answer(self) -> Any:
        """Read a line."""
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise SystemExit(f"{self.precision} {self.runtime}: it ended")
        return json.loads(line)

    def run(self, batch: int, length: int, runs: int, warm: int = 0) -> list[float]:
        """Run a point so many times, in milliseconds."""
        assert self.process.stdin is not None
        print(json.dumps({"batch": batch, "length": length, "runs": runs, "warm": warm}), file=self.process.stdin)
        self.process.stdin.flush()
        times: list[float] = self.answer()
        return times


def measure(sides: list[Side], points: list[tuple[int, int]], rounds: int) -> None:
    """Time every point on all sides, in turns."""
    for batch, length in points:
        took = {side: min(side.run(batch, length, 1)) for side in sides}  # warms up
        for _ in range(rounds if max(took.values()) < MOST_MS else min(rounds, 2)):
            for side in sides:
                runs = max(1, min(10, int(MOST_MS / rounds / took[side])))
                side.times.setdefault((batch, length), []).extend(side.run(batch, length, runs))
        said = {f"{s.precision} {s.runtime}": round(statistics.median(s.times[batch, length]), 1) for s in sides}
        print(f"batch {batch}, length {length}: {said}", file=sys.stderr, flush=True)


def table(sides: list[Side], points: list[tuple[int, int]]) -> list[str]:
    """Write a row for each point: our texts a second, and the ratio to each peer, by precision."""
    precisions = list(dict.fromkeys(side.precision for side in sides))
    head, rows = ["length", "batch"], []
    for precision in precisions:
        own = [side for side in sides if side.precision == precision]
        head += [f"{precision} / {side.runtime}" for side in own if side.runtime != OURS]
    for batch, length in points:
        cells = [str(length), str(batch)]
        for precision in precisions:
            own = {s.runtime: statistics.median(s.times[batch, length]) for s in sides if s.precision == precision}
            cells += [f"{time_ / own[OURS]:.2f}" for runtime, time_ in own.items() if runtime != OURS]
        rows.append(cells)
    lines = [head, ["--:"] * len(head), *rows]
    return ["| " + " | ".join(line) + " |" for line in lines]


def main() -> None:
    """Print the table, of ratios of throughput to each peer."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sides", nargs="+", required=True, metavar="PRECISION=RUNTIME:MODEL[@PYTHON]")
    parser.add_argument("--lengths", nargs="+", type=int, default=[16, 128, 512])
    parser.add_argument("--batches", nargs="+", type=int, default=[1, 8, 32])
    parser.add_argument("--rounds", type=int, default=5, help="turns of each side at each point (5)")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("-o", "--output", type=Path, help="a file for all times, JSON")
    given = parser.parse_args()
    sides = [Side.start(text, given.threads) for text in given.sides]
    try:
        for side in sides:
            side.answer()
        points = [(batch, length) for length in given.lengths for batch in given.batches]
        measure(sides, points, given.rounds)
        print("\n".join(table(sides, points)))
    finally:
        for side in sides:
            side.process.kill()
    if given.output:
        found = {
            f"{side.precision} {side.runtime}": {f"{b}x{n}": times for (b, n), times in side.times.items()}
            for side in sides
        }
        given.output.write_text(json.dumps(found) + "\n")


if __name__ == "__main__":
    main()
