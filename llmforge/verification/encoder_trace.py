"""The traced graph of an encoder, held to transformers on the real weights.

transformers runs each sequence alone, and some padded in one batch with a mask; the graph runs them side by side
without padding. Pooling, Dense layers and normalization are computed here anew, by their definition.
"""

from __future__ import annotations

import inspect
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from llmforge.base import process
from llmforge.base.errors import VerificationError
from llmforge.checkpoint import Checkpoint, Encoding
from llmforge.ir.operators.canonical import EncoderAttention
from llmforge.verification import encoder_runs, probe
from llmforge.verification.encoder_runs import EncoderRun

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel

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
    from llmforge.trace.export import reference, skeleton
    from llmforge.trace.hooks import internals

    began, encoding = time.perf_counter(), checkpoint.encoding
    assert encoding is not None
    with internals.third_party("loading the model"):
        original = skeleton.load(checkpoint, reference.EAGER)
    padding = getattr(checkpoint.config.get_text_config(), "pad_token_id", None)
    sides = {side for layer in EncoderAttention.all(model) for side in (layer.left, layer.right) if side > 0}
    borders = {border for side in sides for border in (side + 1, 2 * side + 1)}
    runs = encoder_runs.make_runs(
        checkpoint.geometry.vocabulary,
        encoder_runs.interface_limit(model),
        sorted(border for border in borders if border <= encoder_runs.LONGEST),
        _SEED,
        [] if padding is None else [padding],
    )
    graph = encoder_runs.open_graph(model, encoding, threads, probe.InitializerArrays())
    typed, largest = graph.config.token_types, 0.0
    for run in runs:
        made = graph.encode(run.sequences, run.types if typed else None)
        expected = np.stack([_alone(original, encoding, run, row, typed=typed) for row in range(len(run.sequences))])
        largest = max(largest, _require_same(run, expected, made))
    run = _shortened(runs[0])
    with internals.third_party("running the model"):
        expected = _padded(original, encoding, run, padding or 0, typed=typed)
    largest = max(largest, _require_same(run, expected, graph.encode(run.sequences, run.types if typed else None)))
    longest = max(len(ids) for each in runs for ids in each.sequences)
    count = sum(len(each.sequences) for each in (*runs, run))
    return EncoderProof(count, longest, largest, time.perf_counter() - began)


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


def _alone(original: PreTrainedModel, encoding: Encoding, run: EncoderRun, row: int, *, typed: bool) -> Any:
    """Run one sequence in transformers: [dimensions], or [labels]."""
    from llmforge.trace.hooks import internals

    with internals.third_party("running the model"):
        return _run(original, encoding, [run.sequences[row]], [run.types[row]], 0, typed=typed)[0]


def _padded(original: PreTrainedModel, encoding: Encoding, run: EncoderRun, padding: int, *, typed: bool) -> Any:
    return _run(original, encoding, run.sequences, run.types, padding, typed=typed)


def _run(
    original: PreTrainedModel,
    encoding: Encoding,
    sequences: Sequence[NDArray[np.int64]],
    types: Sequence[NDArray[np.int64]],
    padding: int,
    *,
    typed: bool,
) -> NDArray[np.float32]:
    """Run a batch, padded on the right, in transformers."""
    import torch

    longest = max(map(len, sequences))
    ids, kinds, mask = (np.full((len(sequences), longest), fill, np.int64) for fill in (padding, 0, 0))
    for row, (own, kind) in enumerate(zip(sequences, types, strict=True)):
        ids[row, : len(own)], kinds[row, : len(own)], mask[row, : len(own)] = own, kind, 1
    given = {"input_ids": torch.from_numpy(ids), "attention_mask": torch.from_numpy(mask)}
    if typed:
        given["token_type_ids"] = torch.from_numpy(kinds)
    if "use_cache" in inspect.signature(original.forward).parameters:
        given["use_cache"] = False  # type: ignore[assignment]
    with torch.inference_mode():
        output = original(**given)
        if encoding.kind == "reranker":
            return np.asarray(output.logits, np.float32)
        hidden = output.last_hidden_state
        return np.stack([_embed(original, encoding, hidden[row, : len(own)]) for row, own in enumerate(sequences)])


def _embed(original: PreTrainedModel, encoding: Encoding, hidden: torch.Tensor) -> NDArray[np.float32]:
    """Pool the hidden states [length, H] of a sequence, and what stands behind that."""
    import torch

    from llmforge.trace.export.encoder import ACTIVATIONS

    match encoding.pooling:
        case "mean":
            x = hidden.double().mean(0).float()
        case "cls":
            x = hidden[0]
        case "last":
            x = hidden[-1]
    for layer in encoding.dense:
        module: Any = original.get_submodule(layer.folder)
        x = ACTIVATIONS[layer.activation](module["linear"](x))
    return np.asarray(torch.nn.functional.normalize(x, dim=-1) if encoding.normalize else x, np.float32)
