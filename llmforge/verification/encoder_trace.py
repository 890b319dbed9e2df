"""The traced graph of an encoder, held to transformers on the real weights.

transformers runs each sequence alone, and some padded in one batch with a mask; the graph runs them side by side
without padding.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from llmforge.base import process
from llmforge.base.errors import VerificationError
from llmforge.checkpoint import Checkpoint
from llmforge.ir.operators.canonical import EncoderAttention
from llmforge.verification import encoder_runs, probe
from llmforge.verification.encoder_runs import EncoderRun

# In root mean squares of what is given, largest number of all: honest traces of twelve architectures had 4e-6 at most.
MOST = 1e-4
_SEED = 20_261_128
_PADDED = 4  # sequences of one batch with padding


@dataclass(frozen=True)
class EncoderProof:
    """What was run, and the largest difference."""

    sequences: int
    longest: int
    largest: float
    seconds: float

    def note(self) -> str:
        """Say it in a line for the report."""
        return (
            f"trace: equal to transformers on {self.sequences} sequences of up to {self.longest} tokens, side by side "
            f"without padding, alone and padded there (largest difference: {self.largest:.2g} of the mean)"
        )


def verify(checkpoint: Checkpoint, model: ir.Model, *, threads: int = 1) -> EncoderProof:
    """Hold `model`, the canonical graph of an encoder, to transformers.

    Raises:
        VerificationError: an embedding or a score differs; names the sequence.
        UnsupportedError: transformers or ONNX Runtime cannot run the model.
    """
    process.import_whole("transformers")  # another thread may be at it
    from llmforge.trace.export.encoder_reference import EncoderReference

    began, encoding = time.perf_counter(), checkpoint.encoding
    assert encoding is not None
    original = EncoderReference(checkpoint, encoding)
    sides = {side for layer in EncoderAttention.all(model) for side in (layer.left, layer.right) if side > 0}
    borders = {border for side in sides for border in (side + 1, 2 * side + 1)}
    runs = encoder_runs.make_runs(
        checkpoint.geometry.vocabulary,
        encoder_runs.interface_limit(model),
        sorted(border for border in borders if border <= encoder_runs.LONGEST),
        _SEED,
        [] if original.padding is None else [original.padding],
    )
    runs += _of_special_tokens(checkpoint, original.padding, encoder_runs.interface_limit(model))
    graph = encoder_runs.open_graph(model, encoding, threads, probe.InitializerArrays())
    typed, largest = graph.config.token_types, 0.0
    for run in runs:
        made = graph.encode(run.sequences, run.types if typed else None)
        rows = zip(run.sequences, run.types, strict=True)
        expected = np.concatenate([original.run([ids], [kinds] if typed else None) for ids, kinds in rows])
        largest = max(largest, _require_same(run, expected, made))
    run = _shortened(runs[0])
    types = run.types if typed else None
    largest = max(largest, _require_same(run, original.run(run.sequences, types), graph.encode(run.sequences, types)))
    longest = max(len(ids) for each in runs for ids in each.sequences)
    count = sum(len(each.sequences) for each in (*runs, run))
    return EncoderProof(count, longest, largest, time.perf_counter() - began)


def _of_special_tokens(checkpoint: Checkpoint, padding: int | None, most: int) -> list[EncoderRun]:
    """Make texts that have tokens which the configuration names, beside one that has none: a model may count them."""
    named = checkpoint.config.get_text_config().to_dict()
    ids = {each for name, each in named.items() if name.endswith("_token_id") and type(each) is int}
    found = sorted(each for each in ids - {padding} if 0 <= each < checkpoint.geometry.vocabulary)[: most // 2]
    if not found:
        return []
    others = [each for each in range(checkpoint.geometry.vocabulary) if each not in ids][: len(found) + 2]
    texts = tuple(np.array(each, np.int64) for each in ([*found, *others][:most], others[:most]))
    return [EncoderRun("texts with special tokens", texts, tuple(np.zeros_like(each) for each in texts))]


def _shortened(run: EncoderRun) -> EncoderRun:
    """Take those sequences of a run that one batch with padding is made of."""
    return EncoderRun("a padded batch", run.sequences[2 : 2 + _PADDED], run.types[2 : 2 + _PADDED])


def _require_same(run: EncoderRun, expected: NDArray[np.float32], made: NDArray[np.float32]) -> float:
    found = encoder_runs.deviation(expected, made)
    if not found <= MOST:
        worst = int(np.abs(expected - made).max(axis=1).argmax()) if expected.shape == made.shape else 0
        raise VerificationError(
            f"the trace does not compute what transformers does: {run.name}, sequence {worst} of "
            f"{len(run.sequences[worst])} tokens differs by {found:.3g} of the mean; allowed are {MOST:g}",
            hint="this is a bug in llmforge's frontend, or a model that computes otherwise than its kind",
        )
    return found
