"""Time the choice of one token: python benchmarks/sampling.py [--vocabulary V].

The median in microseconds, for logits as a trained model gives them (61% of the mass in one token,
all but 1% in 64: Zipf with exponent 2) and as a model of random weights does (normal, deviation 1: the nucleus of 0.95
holds 40% of the vocabulary, which is the worst case). Penalties act on 2048 tokens.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from llmforge.runtime.sampling.sampler import TokenSampler  # noqa: E402
from llmforge.serving import Sampling  # noqa: E402

REPEATS = 300
CASES: Mapping[str, Mapping[str, Any]] = {
    "greedy": {},
    "temperature": {"temperature": 0.8},
    "top_k 50": {"temperature": 0.8, "top_k": 50},
    "top_p 0.95": {"temperature": 1.0, "top_p": 0.95},
    "min_p 0.05": {"temperature": 0.8, "min_p": 0.05},
    "top_k 50, top_p 0.95": {"temperature": 0.8, "top_k": 50, "top_p": 0.95},
    "greedy, repetition_penalty": {"repetition_penalty": 1.1},
    "greedy, logprobs 5": {"logprobs": 5},
    "all of them": {
        "temperature": 0.8, "top_k": 50, "top_p": 0.95, "min_p": 0.01, "repetition_penalty": 1.1, "logprobs": 5,
    },
}  # fmt: skip


def microseconds(call: Callable[[], object]) -> float:
    call()
    taken = []
    for _ in range(REPEATS):
        start = time.perf_counter()
        call()
        taken.append((time.perf_counter() - start) * 1e6)
    return statistics.median(taken)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vocabulary", type=int, default=151_936, help="Qwen's by default")
    vocabulary = parser.parse_args().vocabulary
    random = np.random.default_rng(0)
    logits = {
        "trained": random.permutation(-2 * np.log(np.arange(1, vocabulary + 1))).astype(np.float32),
        "random": random.standard_normal(vocabulary).astype(np.float32),
    }
    prompt = random.integers(0, vocabulary, 2048).tolist()
    print(f"numpy {np.__version__}, vocabulary {vocabulary:,}; µs")
    for name, options in CASES.items():
        figures = []
        for kind, row in logits.items():
            sampler = TokenSampler(Sampling(**options), prompt, ())
            taken = microseconds(lambda sampler=sampler, row=row: sampler.sample(row))
            figures.append(f"{kind} {taken:5.0f}")
        print(f"{name:28}" + "   ".join(figures))


if __name__ == "__main__":
    main()
