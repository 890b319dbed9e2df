"""Latency of an embedder or a reranker as a recipe asks for it: batches of texts, beside the checkpoint in turns."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from llmforge.measure import machine, start
from llmforge.measure.encoder_baseline import CheckpointEncoder
from llmforge.measure.footprint import BytesRead
from llmforge.measure.latency import Instruments, LatencyRun, TimedModel, measure
from llmforge.measure.recipe_latency import facts, host_compute, loads, slo, until
from llmforge.metrics.latency import Bandwidth, Footprint, Latency
from llmforge.recipe import LatencySpec
from llmforge.serving.encoder_runner import EncoderRunner
from llmforge.targets import Target


@dataclass(frozen=True)
class TimedEncoder:
    """An engine in the folder `artifact` that `runner` has loaded, and what is known of it."""

    artifact: Path
    runner: EncoderRunner
    description: str
    load_seconds: float
    size_bytes: int  # of all files of the engine
    read: BytesRead
    threads: int


def run(
    spec: LatencySpec,
    engine: TimedEncoder,
    baseline: CheckpointEncoder,
    target: Target,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Latency:
    """Measure all that a recipe asks for: starts before the loads that take turns.

    A load is a number of texts of so many random token ids, special ones not told apart. Tokenizing is not counted.
    """
    chosen = loads(spec)
    largest = max(chosen, key=lambda load: load.batch * load.prompt_tokens)
    given = {"batch": largest.batch, "prompt_tokens": largest.prompt_tokens, "output_tokens": 0}
    starts = [start.measure(engine.artifact, threads=engine.threads, **given) for _ in range(spec.starts)]
    ours = TimedModel.of_encoder(engine.runner, description=engine.description, load_seconds=engine.load_seconds)

    def encode(ids: NDArray[np.int64], tokens: int) -> Iterator[object]:
        yield baseline.encode(list(ids))

    return measure(
        ours,
        TimedModel(baseline.description, encode, baseline.load_seconds),
        engine.read.footprint(engine.size_bytes),
        LatencyRun(
            chosen,
            vocabulary=engine.runner.vocabulary,
            threads=engine.threads,
            until=until(spec),
            facts=facts(target, 1, slo(spec)),
            instruments=Instruments(
                _no_bandwidth, partial(host_compute, engine.read, engine.threads), None, machine.NoiseProbe
            ),
        ),
        starts=starts,
        progress=progress,
    )


def _no_bandwidth(footprint: Footprint, context: int, threads: int) -> Bandwidth | None:
    """Measure none: a batch is bound by products, but for one short text."""
    return None
