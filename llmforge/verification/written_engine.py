"""The engine as it lies there, held to the graph that was proven last.

Between the two stand lowering, the layout of weights that kernels want, ONNX Runtime's optimizations, the files, and
the session that serves. So what serves the engine opens it, and runs prompts, continuations and single tokens, alone
and in rows of unequal lengths, up to the longest text of `LONGEST`; the graph runs the same steps as proofs run it.
Lengths and tokens are drawn by the digest of the engine: a build repeats, and nothing can be made for a known place.
What chooses tokens from its logits is held to its definition (`chosen_tokens`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from llmforge.backends import loading
from llmforge.base.errors import VerificationError
from llmforge.metrics.tokens import KLD, require_finite, score
from llmforge.runtime.config import FILE, RuntimeConfig
from llmforge.verification import chosen_tokens, probe
from llmforge.verification.probe import Run

LONGEST = 1024  # tokens of a text
DECODED = 3  # tokens one by one, after prompt and continuation
ROWS = 3  # side by side, at most
ANSWERED = 64  # tokens of a step that get logits, at least where it has so many: each costs the vocabulary
# Nats a token, mean of a step. With llmforge's kernels, honest engines had equal bits (the sample and SmolLM2-135M,
# four draws each); elsewhere ONNX Runtime's optimizations sum in another order, and int8 inputs round otherwise for it.
MOST_KLD = 1e-3


def require_same(
    model: ir.Model, folder: Path, digest: str, texts: Sequence[NDArray[np.int64]], *, threads: int
) -> str:
    """Hold the engine in `folder` to `model`, and say in a line for the report what was run.

    `texts` are windows of token ids, int64 [length]; without any, tokens are random. `digest`, of the engine's files in
    hexadecimal, seeds what is drawn.

    Raises:
        VerificationError: a step of the engine has other logits, or tokens are chosen otherwise.
    """
    config = RuntimeConfig.read(folder / FILE)
    engine = loading.open_engine(folder, config, threads)
    proven = probe.open_session(model, probe.InitializerArrays(), threads)
    longest, most = 0, 0.0
    for run in make_runs(config, texts, int(digest[:16], 16)):
        cache = engine.allocate(run.batch, config.max_context)
        expected = probe.drive(proven, run, caches=False)
        for number, (step, outcome) in enumerate(zip(run.steps, expected, strict=True)):
            made = engine.step(probe.inputs(step, step.asked), cache)[step.answered]
            require_finite("engine", made, run.where(number))
            targets = np.zeros(len(made), np.int64)
            lost = float(score(outcome.logits, made, targets, (KLD,))[KLD.name].mean()) if len(made) else 0.0
            if lost > MOST_KLD:
                raise VerificationError(
                    f"the engine that was written does not compute what was proven: {run.where(number)}: a KLD of "
                    f"{lost:.3g} from the last graph, allowed are {MOST_KLD:g}",
                    hint="this is a bug in llmforge, or something else wrote to the engine; nothing was published",
                )
            most = max(most, lost)
        longest = max(longest, run.capacity)
    drawn = chosen_tokens.require_right(config.vocabulary, int(digest[:16], 16))
    chosen = f"; kernels chose {drawn} tokens as defined" if drawn else ""
    return (
        f"engine: as written, it computes what was proven, up to {longest} tokens of context (KLD: {most:.2g}){chosen}"
    )


def make_runs(config: RuntimeConfig, texts: Sequence[NDArray[np.int64]], seed: int) -> list[Run]:
    """Draw the runs: a long text alone, and as many rows of unequal lengths as the engine takes, up to `ROWS`."""
    random = np.random.default_rng(seed)
    context = min(config.max_context, LONGEST)
    rows = min(config.max_batch, ROWS)
    runs = []
    for name, count, most in (("a long text", 1, context), ("unequal rows", rows, max(2, context // 4))):
        decoded = max(0, min(DECODED, most - 2))
        lengths = random.integers(max(2, (most - decoded) // 2), most - decoded, count, endpoint=True)
        begun = random.integers(1, lengths)
        counts = [begun, lengths - begun, *[np.ones(count, np.int64)] * decoded]
        drawn = [_text(texts, int(length) + decoded, config.vocabulary, random) for length in lengths]
        run = probe.schedule(name, drawn, [each.tolist() for each in counts])
        steps = [replace(step, every=max(1, step.ids.shape[1] // ANSWERED)) for step in run.steps]
        runs.append(Run(name, tuple(steps)))
    return runs


def _text(
    texts: Sequence[NDArray[np.int64]], length: int, vocabulary: int, random: np.random.Generator
) -> NDArray[np.int64]:
    """Draw `length` tokens from a random place of the texts on; random ones where they have not so many."""
    whole = np.concatenate(texts) if len(texts) else np.zeros(0, np.int64)
    if len(whole) < length:
        return random.integers(0, vocabulary, length, np.int64)
    at = int(random.integers(0, len(whole) - length, endpoint=True))
    return whole[at : at + length]
