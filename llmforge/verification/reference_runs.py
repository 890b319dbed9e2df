"""What transformers computes of the runs that a traced graph is held to.

None of it is made of the graph: what can be told of the runs before there is one may be computed while it is traced.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import numpy as np

from llmforge.checkpoint import Checkpoint
from llmforge.trace.export.reference import Given, Observation, ReferenceModel
from llmforge.verification import magnified, probe
from llmforge.verification.trace_runs import rows_of


class ReferenceRuns:
    """Runs of a checkpoint's model in transformers, whole or a `part` of it, each computed once.

    A run is known by its tokens and by what is computed of it: what was computed otherwise before is computed anew.
    """

    def __init__(self, checkpoint: Checkpoint, *, part: bool) -> None:
        self.part = part
        self.reference = ReferenceModel(checkpoint, part=part)
        self.given: list[Given] = []  # to each layer, in the run that was `watched`
        self._made: dict[tuple[Any, ...], list[Observation]] = {}

    def observed(
        self,
        run: probe.Run,
        kept: int,
        *,
        head: bool,
        watched: bool = False,
        magnified_weights: Collection[str] | None = None,
    ) -> list[Observation]:
        """Run the rows of `run` one by one, and keep the logits of the last tokens of each.

        If it is `watched`, what each layer is given is written down in `given`. With `magnified_weights` of norms, all
        rows run at once, on larger embeddings and those weights.
        """
        rows = rows_of(run)
        weights = None if magnified_weights is None else tuple(sorted(magnified_weights))
        key = *(ids.tobytes() for ids in rows), kept, head, watched, weights
        if key in self._made:
            return self._made[key]
        if weights is not None:
            with self.reference.magnified(weights, magnified.ADDED, magnified.SCALES):
                made = self.reference.run_batch(np.stack(rows), kept, head=head)
        elif watched:
            with self.reference.watched() as self.given:
                made = [self.reference.run(ids, min(len(ids), kept), head=head) for ids in rows]
        else:
            made = [self.reference.run(ids, min(len(ids), kept), head=head) for ids in rows]
        return self._made.setdefault(key, made)
