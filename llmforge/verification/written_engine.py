"""The engine as it lies there, held to the graph that was proven last.

Between the two stand lowering, the layout of weights that kernels want, ONNX Runtime's optimizations, the files, and
the session that serves. So what serves the engine opens it, and runs prompts, continuations and single tokens, alone
and in rows of unequal lengths, up to the longest text of `LONGEST`; the graph runs the same steps as proofs run it.
Lengths and tokens are drawn by the digest of the engine: a build repeats, and nothing can be made for a known place.
What chooses tokens from its logits is held to its definition (`chosen_tokens`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from llmforge.backends import loading
from llmforge.base.errors import VerificationError
from llmforge.ir.operators.standard import DequantizeLinear, MatMul
from llmforge.metrics.tokens import KLD, require_finite, score
from llmforge.runtime.config import FILE, RuntimeConfig
from llmforge.verification import chosen_tokens, probe
from llmforge.verification.probe import Run

LONGEST = 1024  # tokens of a text
DECODED = 3  # tokens one by one, after prompt and continuation
ROWS = 3  # side by side, at most
ANSWERED = 64  # tokens of a step that get logits, at least where it has so many: each costs the vocabulary
# Nats a token, mean of a step. With llmforge's kernels, honest engines had equal bits (the sample, a mixture of
# experts, SmolLM2-135M); elsewhere ONNX Runtime's optimizations sum in another order, and int8 inputs round otherwise
# for it: 2e-6 at most (gpt-oss). A twentieth of a mixture's positions, or ids, half as large again lost 4e-4.
MOST_KLD = 3e-4
MOST_KLD_16_BITS = 1e-3  # where numbers are rounded to 16 bits between operations: an honest step in fp16 lost 3.3e-4
# Nats that the logit of one token id moves against the others, mean of all that were asked for: a rare one decides
# where a text ends, and hardly any KLD. Honest: 0 with llmforge's kernels, 4e-7 with ONNX Runtime's (the sample).
MOST_SHIFT = 0.1
_HINT = "this is a bug in llmforge, or something else wrote to the engine; nothing was published"


def require_same(
    model: ir.Model, folder: Path, digest: str, texts: Sequence[NDArray[np.int64]], *, threads: int
) -> str:
    """Hold the engine in `folder` to `model`, and say in a line for the report what was run.

    `texts` are windows of token ids, int64 [length]; without any, tokens are random. `digest`, of the engine's files in
    hexadecimal, seeds what is drawn.

    Raises:
        VerificationError: a step of the engine has other logits, a token id is likelier or less likely throughout, or
            tokens are chosen otherwise.
    """
    config = RuntimeConfig.read(folder / FILE)
    engine = loading.open_engine(folder, config, threads)
    optimized = _fusions(model, config)
    proven = probe.open_session(model, probe.InitializerArrays(), threads, optimized=optimized)
    allowed = MOST_KLD_16_BITS if _has_16_bits(model) else MOST_KLD
    longest, most = 0, 0.0
    moved, rows = np.zeros(config.vocabulary), 0  # logits, summed over all tokens that were asked for them
    for run in make_runs(config, texts, int(digest[:16], 16)):
        cache = engine.allocate(run.batch, config.max_context)
        expected = probe.drive(proven, run, caches=False)
        for number, (step, outcome) in enumerate(zip(run.steps, expected, strict=True)):
            made = engine.step(probe.inputs(step, step.asked), cache)[step.answered]
            require_finite("engine", made, run.where(number))
            lost = _lost(outcome.logits, made)
            if lost > allowed:
                raise VerificationError(
                    f"the engine that was written does not compute what was proven: {run.where(number)}: a KLD of "
                    f"{lost:.3g} from the last graph, allowed are {allowed:g}",
                    hint=_HINT,
                )
            most = max(most, lost)
            moved += _moved(outcome.logits, made)
            rows += len(made)
        longest = max(longest, run.capacity)
    _require_even(moved / max(rows, 1))
    drawn = chosen_tokens.require_right(config.vocabulary, int(digest[:16], 16))
    chosen = f"; kernels chose {drawn} tokens as defined" if drawn else ""
    return (
        f"engine: as written, it computes what was proven, up to {longest} tokens of context (KLD: {most:.2g}){chosen}"
    )


def _lost(expected: NDArray[np.float32], made: NDArray[np.float32]) -> float:
    """Return the mean KLD of logits [R, V]; of none, 0."""
    targets = np.zeros(len(made), np.int64)
    return float(score(expected, made, targets, (KLD,))[KLD.name].mean()) if len(made) else 0.0


def _has_16_bits(model: ir.Model) -> bool:
    """Say whether nodes of a graph make numbers of fp16 or bf16."""
    halves = (ir.DataType.FLOAT16, ir.DataType.BFLOAT16)
    return any(value.dtype in halves for node in model.graph for value in node.outputs)


def _fusions(model: ir.Model, config: RuntimeConfig) -> Mapping[str, str] | None:
    """Return the options by which ONNX Runtime optimizes the engine, where that is more than another order of sums.

    Of products with weights that DequantizeLinear makes of int8 codes it makes MatMulNBits, which rounds what the
    products read to int8: that costs SmolLM2-135M a KLD of .009, and is no fault of what was written.
    """
    rounded = (product.w.producer() for product in MatMul.all(model))
    if not any(node and DequantizeLinear.matches(node) for node in rounded):
        return None
    return config.session.entries


def _require_even(shift: NDArray[np.float64]) -> None:
    """Return if no token id, of the mean logits' `shift` [V] in nats, is likelier or less likely than proven."""
    token = int(np.abs(shift).argmax())
    if abs(shift[token]) > MOST_SHIFT:
        raise VerificationError(
            f"the engine that was written does not compute what was proven: the logit of token {token} is "
            f"{shift[token]:+.3g} from the last graph's, in the mean; allowed are {MOST_SHIFT:g}",
            hint=_HINT,
        )


def _moved(expected: NDArray[np.float32], made: NDArray[np.float32]) -> NDArray[np.float64]:
    """Sum how far the logit of each token moved against the others, over rows [R, V]: [V], in nats."""
    differences = made - expected
    summed: NDArray[np.float64] = (differences - differences.mean(1, keepdims=True)).sum(0, dtype=np.float64)
    return summed


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
        # Of a text, most token ids have no part in; rows side by side have any.
        of = texts if count == 1 else ()
        drawn = [_text(of, int(length) + decoded, config.vocabulary, random) for length in lengths]
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
