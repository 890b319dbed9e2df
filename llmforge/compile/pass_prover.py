"""Proofs of the passes of one build, by a verifier that follows the graph from pass to pass."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from llmforge.checkpoint import Encoding
from llmforge.compile.cached_passes import CachedPass
from llmforge.compile.overlap import PendingProof, ProofPool
from llmforge.gates import records
from llmforge.rewrite.pass_base import Changes, Numerics, Pass
from llmforge.verification.encoder_passes import EncoderTexts, EncoderVerifier
from llmforge.verification.promises import Promises
from llmforge.verification.reports import GraphSnapshot
from llmforge.verification.verifier import Verifier


@dataclass(eq=False)
class PassProver:
    """Proves passes one after the other, concurrently with the build.

    The verifier is made when the first pass comes that is to be proven, and again after one that is not.
    """

    folder: Path
    promises: Promises
    texts: Sequence[NDArray[np.int64]]
    threads: int
    proofs: ProofPool
    encoder: tuple[Encoding, EncoderTexts] | None = None  # what an encoder gives, and the texts of its budgets
    _last: GraphSnapshot | None = None  # the graph as it is now; None: after a pass that was not proven
    _verifier: Callable[[], Verifier] | None = None  # makes it when a proof first asks
    _previous: PendingProof[Any] | None = None  # which the next proof waits for
    _is_first: bool = True  # whether the verifier has measured no lossy pass

    def before(self, step: Pass, model: ir.Model) -> GraphSnapshot:
        """Record `model`, on which `step` is to run, and begin with what its proof needs of it."""
        if self._last is None:
            self._last = GraphSnapshot.of(model)
            self._verifier, self._is_first = self._once(self._last), True
        self._prepare(step, self._last)
        return self._last

    def skip(self) -> None:
        """Forget the graph before a pass whose proof is reused."""
        self._last = None

    def begin(
        self, step: Pass, before: GraphSnapshot, model: ir.Model, changes: Changes, kept: CachedPass, held: ExitStack
    ) -> PendingProof[records.VerificationRecord]:
        """Begin the proof of a pass that has run on the graph `before`; `held` is left at its end.

        Where the one before it failed, this one does not run, and fails alike.
        """
        overwritten, after = before.overwritten(), GraphSnapshot.of(model)
        self._last = after
        self._prepare(step, after)
        self._is_first &= step.numerics is not Numerics.LOSSY
        previous, verifier = self._previous, self._verifier
        assert verifier is not None, "no graph was recorded"

        def prove() -> records.VerificationRecord:
            if previous is not None:
                previous.result()
            found = verifier().prove(step, after, changes, overwritten)
            kept.keep_proof(found, after.model, changes)
            return records.VerificationRecord.model_validate(found, from_attributes=True)

        self._previous = proof = self.proofs.begin(held, prove, in_turn=True)
        return proof

    def _prepare(self, step: Pass, snapshot: GraphSnapshot) -> None:
        """Begin to run a graph before or after the first lossy pass; later ones have a graph that was measured."""
        verifier = self._verifier
        assert verifier is not None, "no graph was recorded"
        if step.numerics is Numerics.LOSSY and self._is_first:
            self.proofs.prepare(lambda: verifier().prepare(snapshot.model))

    def _once(self, before: GraphSnapshot) -> Callable[[], Verifier]:
        """Return what makes a verifier the first time, in whatever thread."""
        turn = threading.Lock()

        @cache
        def made() -> Verifier:
            if self.encoder is not None:
                encoding, read = self.encoder
                given: dict[str, Any] = {"promises": self.promises, "folder": self.folder, "threads": self.threads}
                return EncoderVerifier(before, encoding, read=read, **given)
            return Verifier(before, promises=self.promises, folder=self.folder, texts=self.texts, threads=self.threads)

        def locked() -> Verifier:
            with turn:
                return made()

        return locked
