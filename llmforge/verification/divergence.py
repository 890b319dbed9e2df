"""How far graphs are from one another on text, document by document, with the cache in use: KL(reference || graph).

The first quarter of each document is a prefill, the rest continues it a few tokens at a time, so that what is lost in a
cache shows. Several documents run side by side. A graph that is too large to run whole is streamed block by block, and
document by document.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from llmforge.ir import graph
from llmforge.metrics.tokens import KLD, Floats, require_finite, score
from llmforge.trace.export.limits import WHOLE_BYTES
from llmforge.verification import probe, streamed_execution
from llmforge.verification.probe import AfterStep

ROWS = 8  # documents side by side
CONTINUED = 32  # tokens of a step behind the prefill
_FILE = "reference.f32"


@dataclass(eq=False)
class Divergence:
    """The divergence of graphs from a `reference`, whose logits are kept in a file of `folder`.

    Args:
        texts: token ids, int64 [length], of one document each.
        folder: an existing one, which is the caller's to delete.
        threads: of ONNX Runtime.
    """

    texts: Sequence[NDArray[np.int64]]
    folder: Path
    threads: int
    whole_bytes: int = WHOLE_BYTES
    weights: probe.InitializerArrays = field(default_factory=probe.InitializerArrays)

    @property
    def tokens(self) -> Floats:
        """Tokens of each document, [D]."""
        return np.array([len(text) for text in self.texts], np.float64)

    def hold_against(self, reference: ir.Model, after_step: AfterStep | None = None) -> None:
        """Run the `reference` and keep its logits.

        Raises:
            UnsupportedError: ONNX Runtime refuses the graph.
            VerificationError: a logit is NaN or infinite.
        """
        with (self.folder / _FILE).open("wb") as stream:
            for _, logits in self._rows(reference, after_step):
                stream.write(np.ascontiguousarray(logits, np.float32).tobytes())

    def of(self, model: ir.Model, after_step: AfterStep | None = None) -> Floats:
        """Sum KL(reference || `model`) over the tokens of each document, in nats, [D].

        Raises:
            UnsupportedError: ONNX Runtime refuses the graph.
            VerificationError: a logit is NaN or infinite.
        """
        sums, at = np.zeros(len(self.texts)), 0
        file = self.folder / _FILE
        for document, logits in self._rows(model, after_step):
            expected = np.fromfile(file, np.float32, logits.size, offset=at).reshape(logits.shape)
            at += logits.nbytes
            found = score(expected, logits, np.zeros(len(logits), np.int64), (KLD,))
            sums[document] += found[KLD.name].sum()
        self.weights.keep(model)
        return sums

    def streams(self, model: ir.Model) -> bool:
        """Say if `model` is too large to run whole."""
        return graph.weight_bytes(model) > self.whole_bytes

    def _rows(self, model: ir.Model, after_step: AfterStep | None) -> Iterator[tuple[int, NDArray[np.float32]]]:
        """Run all documents; give the logits [tokens, V] of each row of each step, and its document."""
        # Behind a past, GroupQueryAttention reads several tokens of one row alone; blocks are run as they are.
        rows = 1 if self.streams(model) else ROWS
        firsts = range(0, len(self.texts), rows)
        runs = [_run(f"documents from {first} on", self.texts[first : first + rows]) for first in firsts]
        if self.streams(model):
            made: Iterator[Iterable[NDArray[np.float32]]]
            made = iter(streamed_execution.drive(model, runs, threads=self.threads, after_step=after_step))
        else:
            session = probe.open_session(model, self.weights, self.threads)
            made = (probe.logits(session, run, after_step) for run in runs)
        for first, run, steps in zip(firsts, runs, made, strict=True):
            for number, (step, logits) in enumerate(zip(run.steps, steps, strict=True)):
                for row, length in enumerate(step.lengths.tolist()):
                    if length:
                        require_finite("graph", logits[row, :length], run.where(number))
                        yield first + row, logits[row, :length]


def _run(name: str, texts: Sequence[NDArray[np.int64]]) -> probe.Run:
    """Divide documents side by side among steps; a shorter one ends before the others."""
    left = [len(text) for text in texts]
    counts = [tuple(max(1, each // 4) for each in left)]
    left = [each - taken for each, taken in zip(left, counts[0], strict=True)]
    while any(left):
        counts.append(tuple(min(each, CONTINUED) for each in left))
        left = [each - taken for each, taken in zip(left, counts[-1], strict=True)]
    return probe.schedule(name, texts, counts)
