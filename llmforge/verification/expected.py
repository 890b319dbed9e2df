"""What transformers computes of fixed inputs, which a traced graph is held against.

None of it is made of the graph: what can be foreseen of the inputs may run while the graph is traced.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

import numpy as np
from numpy.typing import NDArray

from llmforge.checkpoint import Checkpoint
from llmforge.trace.export.reference import Given, Observation, ReferenceModel
from llmforge.verification import magnified

_Key = tuple[Any, ...]


class Expected:
    """Runs of a checkpoint's model in transformers, whole or a `part` of it, each computed once.

    A run is known by its tokens and by what is computed of it: what was foreseen otherwise is computed anew.
    """

    def __init__(self, checkpoint: Checkpoint, *, part: bool) -> None:
        self.part = part
        self.reference = ReferenceModel(checkpoint, part=part)
        self.given: list[Given] = []  # to each layer, in the run `watched`
        self._made: dict[_Key, list[Observation]] = {}

    def watched(self, rows: Collection[NDArray[np.int64]], kept: int) -> list[Observation]:
        """Run `rows` with a head, one by one, and write down in `given` what each layer is given."""

        def run() -> list[Observation]:
            with self.reference.watched() as self.given:
                return [self.reference.run(ids, min(len(ids), kept)) for ids in rows]

        return self._once(("watched", *_tokens(rows), kept), run)

    def plain(self, rows: Collection[NDArray[np.int64]], kept: int, *, head: bool) -> list[Observation]:
        """Run `rows` one by one, and keep the logits of the last tokens of each."""

        def run() -> list[Observation]:
            return [self.reference.run(ids, min(len(ids), kept), head=head) for ids in rows]

        return self._once(("plain", *_tokens(rows), kept, head), run)

    def larger(
        self, rows: Collection[NDArray[np.int64]], kept: int, weights: Collection[str], *, head: bool
    ) -> list[Observation]:
        """Run `rows` at once, on larger embeddings and `weights` of norms."""

        def run() -> list[Observation]:
            with self.reference.magnified(weights, magnified.ADDED, magnified.SCALES):
                return self.reference.run_batch(np.stack(list(rows)), kept, head=head)

        return self._once(("larger", *_tokens(rows), kept, *sorted(weights), head), run)

    def _once(self, key: _Key, run: Callable[[], list[Observation]]) -> list[Observation]:
        if key not in self._made:
            self._made[key] = run()
        return self._made[key]


def _tokens(rows: Collection[NDArray[np.int64]]) -> tuple[bytes, ...]:
    return tuple(ids.tobytes() for ids in rows)
