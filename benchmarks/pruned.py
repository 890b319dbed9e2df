"""Decode and time to the first token of two artifacts, interleaved in one process: what pruning is worth.

    python -m benchmarks.pruned ARTIFACT OTHER --rounds 40

Every round decodes one token and prefills one prompt with each artifact's engine, in turn; medians and minima are
printed, and the ratio of medians with 95 % of resampled rounds.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from llmforge.backends.loading import open_engine
from llmforge.runtime.config import FILE, RuntimeConfig
from llmforge.runtime.interface import StepInputs

RESAMPLES = 2000


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser()
    parser.add_argument("artifacts", nargs=2, type=Path)
    parser.add_argument("--prompt", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--threads", type=int, default=1)
    given = parser.parse_args()
    folders = [path / "engine" for path in given.artifacts]
    sessions = [open_engine(folder, RuntimeConfig.read(folder / FILE), given.threads) for folder in folders]
    ids = np.random.default_rng(0).integers(3, 200, (1, given.prompt))
    caches = [session.allocate(1, given.prompt + 8) for session in sessions]
    last, none = np.array([-1], np.int64), np.zeros(1, np.int32)
    past = np.full(1, given.prompt, np.int32)
    seconds = np.zeros((given.rounds, 2, 2))  # round, artifact, decode or prefill
    for number in range(-3, given.rounds):
        for which, (session, cache) in enumerate(zip(sessions, caches, strict=True)):
            times = []
            for tokens, before in ((ids, none), (ids[:, :1], past)):
                begun = time.perf_counter()
                session.step(StepInputs(tokens, before, last), cache)
                times.append(time.perf_counter() - begun)
            if number >= 0:
                seconds[number, which] = times[::-1]
    for place, what in enumerate(("decode", "first token")):
        one, other = (1e3 * seconds[:, which, place] for which in (0, 1))
        print(f"{what}: {_said(one)}, {_said(other)}; {_ratio(one, other)}")


def _said(milliseconds: NDArray[np.float64]) -> str:
    return f"{np.median(milliseconds):.3f} ms (least {milliseconds.min():.3f})"


def _ratio(one: NDArray[np.float64], other: NDArray[np.float64]) -> str:
    """Return how many times as fast the second is, with 95 % of resampled rounds."""
    rounds = np.random.default_rng(0).integers(0, len(one), (RESAMPLES, len(one)))
    ratios = np.median(one[rounds], 1) / np.median(other[rounds], 1)
    low, high = np.quantile(ratios, [0.025, 0.975])
    return f"{np.median(one) / np.median(other):.2f} times as fast ({low:.2f} … {high:.2f})"


if __name__ == "__main__":
    main()
