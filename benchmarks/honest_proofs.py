"""Prove honest passes at places that many seeds draw; none may be refused.

    python -m benchmarks.honest_proofs tests/data/docs-llama-7m --seed 0 --count 33
    python -m benchmarks.honest_proofs zoo:gpt-oss --seed 0 --count 33

Each seed is one set of passes as builds have them, in turn (`SETS`): weights in 4, 6 and 8 bits, a KV cache in int8
with scales by channel and by token, ONNX Runtime's kernels and llmforge's. Every pass is proven as a build proves it,
but at places, and on texts, that the seed draws; then the engine is written and held to the last graph. `zoo:NAME` is a
model of tests/models/zoo.py with the seed's random weights. Prints a line for each seed; exit code 1 where one is
refused.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from llmforge import targets
from llmforge.backends.engines import BuildRequest
from llmforge.backends.onnxruntime import builder
from llmforge.base.errors import ForgeError
from llmforge.calibration import calibrate
from llmforge.checkpoint import Checkpoint
from llmforge.checkpoint.text import TokenWindow
from llmforge.ir import dialect
from llmforge.passes import CpuKernels, FlashAttention, FuseNorms, PackGateUp, PackQkv, QuantizeKvCache, QuantizeWeights
from llmforge.recipe import EngineSpec
from llmforge.rewrite.pass_base import Budget, Context, Pass
from llmforge.trace import trace
from llmforge.verification import written_engine
from llmforge.verification.promises import Promises
from llmforge.verification.reports import GraphSnapshot
from llmforge.verification.verifier import Verifier

BATCH, MOST_CONTEXT = 8, 1024
LOOSE = Budget(kld_mean=5.0)  # of random weights: budgets are not what is on trial
ALIKE: tuple[Pass, ...] = (FuseNorms(), PackQkv(), PackGateUp(), FlashAttention())


def weights(bits: int) -> Pass:
    """Round to nearest, in blocks of 32, the embedding in 8 bits."""
    return QuantizeWeights(bits=bits, block_size=32, method="rtn", embedding_bits=8, budget=LOOSE)  # type: ignore[arg-type]


SETS: tuple[tuple[Pass, ...], ...] = (
    (*ALIKE, weights(4), QuantizeKvCache(budget=LOOSE), CpuKernels(LOOSE)),
    (*ALIKE, weights(8), QuantizeKvCache(budget=LOOSE, granularity="per_token"), CpuKernels(LOOSE)),
    (*ALIKE, weights(4), QuantizeKvCache(budget=LOOSE)),
    (*ALIKE, weights(6), CpuKernels(LOOSE)),
)


class SeededVerifier(Verifier):
    """Draws places by a seed of its own."""

    seed: int

    def _seed(self, after: GraphSnapshot) -> int:
        return self.seed


def prove(checkpoint: Checkpoint, traced: ir.Model, seed: int) -> str:
    """Prove the passes of a seed, and the engine; raises what refuses them, else says what was run."""
    model, random, steps = traced.clone(), np.random.default_rng(seed), SETS[seed % len(SETS)]
    context = min(checkpoint.geometry.context or MOST_CONTEXT, MOST_CONTEXT)
    promises = Promises.of(checkpoint, context, BATCH)
    texts: list[NDArray[np.int64]] = [
        random.integers(0, promises.vocabulary, int(random.integers(16, min(96, context)))) for _ in range(5)
    ]
    demands = [demand for step in steps for demand in step.demands()]
    windows = [TokenWindow(str(number), text) for number, text in enumerate(texts)]
    statistics = calibrate(checkpoint, windows, demands, caches=dialect.caches(model)) if demands else None
    with tempfile.TemporaryDirectory() as folder:
        verifier = SeededVerifier(model, promises=promises, folder=Path(folder), texts=texts, threads=1)
        verifier.seed = seed
        for step in steps:
            verifier.check(step, model, step.run(model, Context(targets.local(), statistics)))
        engine = Path(folder) / "engine"
        lowered, _ = builder.lower(model, targets.local())
        spec = EngineSpec(max_context=context, max_batch=BATCH, threads=1)
        builder.build(BuildRequest(lowered, engine, spec, targets.local(), (0,), 0))
        return written_engine.require_same(model, engine, f"{seed:016x}", texts, threads=1)


def traced(named: str, seed: int, folder: Path) -> tuple[Checkpoint, ir.Model]:
    """Trace a checkpoint, or a model of the zoo with weights of a seed."""
    if not named.startswith("zoo:"):
        checkpoint = Checkpoint.open(Path(named))
        return checkpoint, trace(checkpoint)
    from tests.models import zoo

    zoo.write(named.removeprefix("zoo:"), folder, seed=seed, max_position_embeddings=512)
    checkpoint = Checkpoint.open(folder)
    return checkpoint, trace(checkpoint)


def main(arguments: Sequence[str]) -> int:
    """Prove what the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--count", type=int, default=33)
    options = parser.parse_args(arguments)
    refused, known = 0, None
    for seed in range(options.seed, options.seed + options.count):
        with tempfile.TemporaryDirectory() as folder:
            known = known or traced(options.checkpoint, seed, Path(folder))
            started = time.process_time()
            try:
                said = prove(*known, seed)
            except ForgeError as error:
                refused, said = refused + 1, f"REFUSED: {error.message}"
            print(f"{seed}: {time.process_time() - started:.1f} CPU s: {said}", flush=True)
            if options.checkpoint.startswith("zoo:"):
                known = None
    print(f"{options.count} seeds, {refused} refused")
    return 1 if refused else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
