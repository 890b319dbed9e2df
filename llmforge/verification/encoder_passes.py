"""Proofs of passes over an encoder: the same embeddings or scores, the same but for rounding, or within a budget.

Both graphs run whole, on sequences side by side: short ones of unequal lengths, at every border of a window ± 1, and
the longest one. What a lossy pass costs is a divergence of what texts are told apart by, in nats a text: of an
embedder, of the distribution over the other texts that cosines make (a softmax, as in training by contrast), of a
reranker, of the labels of a pair.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from llmforge.backends.onnxruntime.encoder import OnnxEncoder
from llmforge.base.errors import VerificationError
from llmforge.checkpoint import Encoding
from llmforge.ir.operators.canonical import EncoderAttention
from llmforge.ir.operators.cpu import CpuEncoderAttention
from llmforge.rewrite.pass_base import Numerics, Pass
from llmforge.verification import encoder_runs
from llmforge.verification.promises import Promises
from llmforge.verification.reports import GraphSnapshot
from llmforge.verification.subgraph_proof import Difference
from llmforge.verification.verifier import PassVerification, Verifier, budget_of, not_as_declared, require_text

TEMPERATURE = 0.05  # that embedders are trained with by contrast (SimCSE, arXiv:2104.08821; E5, arXiv:2212.03533: .01)
ROWS = 32  # texts that run side by side

Rows = NDArray[np.float32]


@dataclass(frozen=True, eq=False)
class EncoderTexts:
    """Texts that budgets are measured on: ids of each, int64 [length], and which of two texts a token is of."""

    ids: Sequence[NDArray[np.int64]]
    types: Sequence[NDArray[np.int64]]


class EncoderVerifier(Verifier):
    """Follows the graph of an encoder from pass to pass, and holds each pass to what it declares.

    Args:
        before: the graph before the first pass.
        encoding: what it gives for a text.
        promises: the longest text that the graph must be right at.
        folder: where the graphs before and after a failed pass are saved, without weights.
        read: what budgets of lossy passes are measured on.
        threads: of ONNX Runtime.

    Raises:
        UnsupportedError: no tolerance is known for the dtype of what it gives.
    """

    def __init__(
        self,
        before: GraphSnapshot,
        encoding: Encoding,
        *,
        promises: Promises,
        folder: Path,
        read: EncoderTexts,
        threads: int = 1,
    ) -> None:
        super().__init__(before, promises=promises, folder=folder, threads=threads)
        self._loss = None  # of graphs that are streamed: an encoder runs whole
        self._encoding, self._read = encoding, read
        self._given: Rows | None = None  # for `read`, by the graph that was measured last

    def _prove_subgraphs(self, step: Pass, after: GraphSnapshot) -> PassVerification:
        """Hold a pass that keeps what the graph gives to that, on whole graphs."""
        tolerance = 0.0 if step.numerics is Numerics.EXACT else self._tolerance
        before, changed = (self._open(model) for model in (self._before.model, after.model))
        most, names = 0.0, list[str]()
        for run in self._runs(after):
            types = run.types if before.config.token_types else None
            expected, made = (graph.encode(run.sequences, types) for graph in (before, changed))
            found = encoder_runs.deviation(expected, made)
            if not found <= tolerance:
                what = f"{found:.3g} of the mean; allowed are {tolerance:g}"
                raise not_as_declared(step, Difference(f"what texts give differs by {what}", run.name))
            most, names = max(most, found), [*names, run.name]
        return PassVerification(step.numerics, most, tolerance, None, None, tuple(names), 0.0)

    def _prove_loss(self, step: Pass, after: GraphSnapshot) -> PassVerification:
        """Hold a lossy pass to its budget, and to finite numbers at every length."""
        require_text(step, self._read.ids)
        graph = self._open(after.model)
        for run in self._runs(after):
            made = graph.encode(run.sequences, run.types if graph.config.token_types else None)
            if not np.isfinite(made).all():
                raise not_as_declared(step, Difference("what texts give is NaN or infinite", run.name))
        if self._given is None:
            self._given = self._texts_of(self._before.model)
        before, made = self._given, self._texts_of(after.model)
        if not np.isfinite(made).all():
            raise not_as_declared(step, Difference("what texts give is NaN or infinite", "the texts of the budget"))
        self._given = made
        cost = divergence(before, made, embeds=self._encoding.kind == "embedder")
        largest, budget = encoder_runs.deviation(before, made), budget_of(step).kld_mean
        return PassVerification(step.numerics, largest, None, cost, budget, (f"{len(made)} texts",), 0.0)

    def _runs(self, after: GraphSnapshot) -> list[encoder_runs.EncoderRun]:
        """Draw what both graphs run on; a pass cannot know what is drawn."""
        model = self._before.model
        layers: list[EncoderAttention | CpuEncoderAttention] = [*EncoderAttention.all(model)]
        layers += CpuEncoderAttention.all(model)
        sides = {side for layer in layers for side in (layer.left, layer.right) if side > 0}
        borders = {border for side in sides for border in (side + 1, 2 * side + 1)} | {64, 128}
        most = min(encoder_runs.interface_limit(model), self._promises.context)
        near = sorted(border for border in borders if border < min(most, encoder_runs.LONGEST))
        return encoder_runs.make_runs(self._promises.vocabulary, most, near, self._seed(after), [])

    def _texts_of(self, model: ir.Model) -> Rows:
        graph = self._open(model)
        order = np.argsort([len(ids) for ids in self._read.ids], kind="stable")
        made: Rows | None = None
        for first in range(0, len(order), ROWS):
            some = order[first : first + ROWS]
            types = [self._read.types[at] for at in some] if graph.config.token_types else None
            rows = graph.encode([self._read.ids[at] for at in some], types)
            made = np.empty((len(order), rows.shape[1]), np.float32) if made is None else made
            made[some] = rows
        assert made is not None
        return made

    def _open(self, model: ir.Model) -> OnnxEncoder:
        return encoder_runs.open_graph(model, self._encoding, self._threads, self._weights)


def divergence(before: Rows, after: Rows, *, embeds: bool) -> float:
    """Return the mean KL(before || after) in nats a text, of embeddings or of logits, [texts, D].

    Raises:
        VerificationError: a number of `before` is NaN or infinite.
    """
    if not np.isfinite(before).all():
        raise VerificationError("what texts give before the pass is NaN or infinite")
    if embeds:
        b, a = _cosines(before), _cosines(after)
    elif before.shape[1] == 1:  # the logistic function: a softmax beside 0
        b, a = (np.pad(rows.astype(np.float64), ((0, 0), (0, 1))) for rows in (before, after))
    else:
        b, a = before.astype(np.float64), after.astype(np.float64)
    b, a = (x - np.logaddexp.reduce(x, axis=1, keepdims=True) for x in (b, a))
    p = np.exp(b)
    return max(0.0, float(np.where(p > 0, p * (b - a), 0.0).sum(1).mean()))


def _cosines(rows: Rows) -> NDArray[np.float64]:
    """Give the cosines of each text with all others, over the temperature; with itself -inf."""
    wide = rows.astype(np.float64)
    unit = wide / np.maximum(np.linalg.norm(wide, axis=1, keepdims=True), np.finfo(np.float32).tiny)
    cosines: NDArray[np.float64] = unit @ unit.T / TEMPERATURE
    count = len(cosines)
    return cosines[~np.eye(count, dtype=bool)].reshape(count, count - 1)
