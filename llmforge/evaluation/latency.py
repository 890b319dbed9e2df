"""Latency of an artifact beside its baseline: both in one process, turn by turn, on the same random prompts."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from llmforge.base.errors import UsageError, VerificationError
from llmforge.evaluation.machine import read_bandwidth
from llmforge.metrics import catalog
from llmforge.metrics.latency import Bandwidth, Footprint, Latency

if TYPE_CHECKING:
    from llmforge.runtime import Runner

_DECIMALS = 5  # of milliseconds: 10 ns
DRAM_PROBE_BYTES = 2**28  # 256 MB: several times the last-level cache of most machines


@dataclass(frozen=True)
class Subject:
    """Something that generates: the artifact or the baseline.

    `generate(ids [S] int64, tokens)` yields `tokens` greedy tokens one by one, each as soon as it is known, reusing
    nothing of earlier calls and ignoring EOS.
    """

    description: str
    generate: Callable[[NDArray[np.int64], int], Iterator[int]]
    load_seconds: float

    @classmethod
    def of_runner(cls, runner: Runner, *, description: str, load_seconds: float) -> Subject:
        """Time the shipped engine: its tokens, without turning them into text, as on the baseline's side."""
        from llmforge.runtime import Sampling  # brings ONNX Runtime, which who only reads reports does not need

        def generate(ids: NDArray[np.int64], tokens: int) -> Iterator[int]:
            sampling = Sampling(temperature=0.0, max_tokens=tokens, ignore_eos=True)
            for step in runner.generate_batch([ids.tolist()], [sampling]):
                yield from (token for token in step.token_ids if token is not None)

        return cls(description, generate, load_seconds)


def measure(
    artifact: Subject,
    baseline: Subject | None,
    footprint: Footprint,
    *,
    prompt_tokens: Sequence[int],
    output_tokens: int,
    repetitions: int,
    vocabulary: int,
    threads: int,
    seed: int = 0,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Latency:
    """Time both sides in turn (A B A B …), so that a machine that slows down slows both.

    Every repetition has a new random prompt, the same for both sides, so that no prefix can be reused. One generation
    of each side and length runs before the clock counts. `progress` is told generations done and their total.

    Raises:
        UsageError: fewer than 2 output tokens, no prompt length, or no repetition.
        VerificationError: a side yields another number of tokens than it was asked for.
    """
    if output_tokens < 2 or repetitions < 1 or not prompt_tokens or min(prompt_tokens) < 1:
        raise UsageError(
            f"latency of {repetitions} repetitions, prompts {list(prompt_tokens)}, {output_tokens} output tokens: "
            "expected 1 repetition or more, prompts of 1 token or more, and 2 output tokens or more"
        )
    rng = np.random.default_rng(seed)
    subjects = (artifact,) if baseline is None else (artifact, baseline)
    times: dict[tuple[int, int], list[NDArray[np.float64]]] = {}
    done, total = 0, len(subjects) * len(prompt_tokens) * (repetitions + 1)
    for repetition in range(-1, repetitions):  # -1 warms up
        for length in prompt_tokens:
            ids = rng.integers(0, vocabulary, length, np.int64)
            for side, subject in enumerate(subjects):
                progress(done, total)
                durations = _timed(subject, ids, output_tokens)
                if repetition >= 0:
                    times.setdefault((length, side), []).append(durations)
                done += 1
    progress(total, total)
    bandwidth = _bandwidth(footprint, min(prompt_tokens) + output_tokens // 2, threads)
    return Latency(
        repetitions=repetitions,
        output_tokens=output_tokens,
        threads=threads,
        seed=seed,
        artifact=artifact.description,
        baseline=None if baseline is None else baseline.description,
        artifact_load_ms=artifact.load_seconds * 1e3,
        baseline_load_ms=None if baseline is None else baseline.load_seconds * 1e3,
        footprint=footprint,
        bandwidth=bandwidth,
        points=tuple(
            catalog.point(length, times[length, 0], times.get((length, 1)), footprint, bandwidth)
            for length in prompt_tokens
        ),
    )


def _timed(subject: Subject, ids: NDArray[np.int64], tokens: int) -> NDArray[np.float64]:
    """Generate once and return the milliseconds that each token took [tokens]; the first is the TTFT."""
    stamps = [time.perf_counter()]
    stamps.extend(time.perf_counter() for _ in subject.generate(ids, tokens))
    if len(stamps) != tokens + 1:
        raise VerificationError(
            f"{subject.description} yielded {len(stamps) - 1} tokens after a prompt of {len(ids)}; expected {tokens}",
            hint="timed generation ignores EOS and stop strings; check that the prompt fits the context",
        )
    # Rounded to what the clock tells, so that figures can be made again of what a report says.
    return np.round(np.diff(stamps) * 1e3, _DECIMALS)


def _bandwidth(footprint: Footprint, context: int, threads: int) -> Bandwidth:
    working_set = footprint.weight_bytes_per_token + context * footprint.kv_bytes_per_token
    return Bandwidth(
        threads=threads,
        dram_bytes_per_second=read_bandwidth(DRAM_PROBE_BYTES, threads),
        working_set_bytes=working_set,
        # Beyond the probe of DRAM a larger working set tells nothing new, and its memory may not be there.
        working_set_bytes_per_second=read_bandwidth(min(working_set, DRAM_PROBE_BYTES), threads),
    )
