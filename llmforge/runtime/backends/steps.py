"""What every session does with a step before its graph runs: bounds, feeds, rows that must run alone."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

from llmforge.base.errors import UsageError
from llmforge.ir import interface
from llmforge.runtime.backends.interface import Rows
from llmforge.runtime.backends.signature import CacheInput, Signature, StateInput

_LAST_ROW = np.array([-1], np.int64)  # the default of `logits_rows` (docs/dialect.md)

C = TypeVar("C", bound=Rows)
Counts = NDArray[np.integer[Any]]


class Stepping(ABC, Generic[C]):
    """A session that steps over caches of type `C`; a subclass sets `signature`, and runs its graph once.

    `rows_alone`: a row of several tokens always runs by itself.
    """

    rows_alone = False
    signature: Signature

    @property
    def inputs(self) -> tuple[str, ...]:
        """Names of what the graph takes."""
        return self.signature.inputs

    @property
    def outputs(self) -> tuple[str, ...]:
        """Names of what it returns."""
        return self.signature.outputs

    @property
    def vocabulary(self) -> int:
        """Number of logits of a row."""
        return self.signature.vocabulary

    @property
    def caches(self) -> tuple[CacheInput, ...]:
        """Its caches of keys and values."""
        return self.signature.caches

    @property
    def states(self) -> tuple[StateInput, ...]:
        """Its states of fixed size."""
        return self.signature.states

    @property
    def steady_from(self) -> int:
        """How many tokens of one row a step must have for the bits of each not to depend on how many there are."""
        return self.signature.steady_from

    @property
    def no_reuse_reason(self) -> str | None:
        """Why tokens in a row of a cache can neither serve another text nor be taken back; None: they can."""
        return self.signature.no_reuse_reason

    @abstractmethod
    def _run(
        self,
        feeds: Mapping[str, NDArray[Any]],
        past_lengths: NDArray[np.int32],
        cache: C,
        out: NDArray[np.float32],
    ) -> None:
        """Run the graph once, on `feeds`; it gives exactly the logits of `out` [B, R, V]."""

    def step(
        self,
        ids: NDArray[np.int64],
        past_lengths: NDArray[np.int32],
        cache: C,
        rows: NDArray[np.int64] | None = None,
        out: NDArray[np.float32] | None = None,
        lengths: Counts | None = None,
        text_lengths: Counts | None = None,
    ) -> NDArray[np.float32]:
        """Run the tokens `ids` after what `cache` holds, and store their keys and values there.

        Args:
            ids: int64 [B, S], B = `cache.batch`; shorter rows padded on the right.
            past_lengths: int32 [B], the tokens that each row of `cache` holds already.
            cache: written at slots `past_lengths[b]` … `past_lengths[b] + S - 1` of each row.
            rows: int64 [R], positions in 0 … S-1 (or negative, from the end) that get logits; None: the last.
            out: fp32 [B, R, V], C-contiguous, to write the logits to; the same array again saves binding it.
            lengths: [B], the tokens of each row that are no padding; None: all. Layers with a state need it.
            text_lengths: [B], the tokens of the whole text that the step is a part of; None: the step ends it. Rotary
                angles that depend on the length of a text (LongRoPE) need it.

        Returns:
            Logits, fp32 [B, R, V]: `out`, or a new array.

        Raises:
            UsageError: the tokens do not fit into the cache.
            ValueError: shapes do not agree.
        """
        self._check(ids, past_lengths, cache)
        shape = (cache.batch, 1 if rows is None else len(rows), self.vocabulary)
        if out is None:
            out = np.empty(shape, np.float32)
        elif out.shape != shape or out.dtype != np.float32 or not out.flags.c_contiguous:
            raise ValueError(f"out is {out.dtype} {out.shape}; the logits are fp32 {shape}, C-contiguous")
        split = self.rows_alone or (self.signature.one_row_continuations and past_lengths.any())
        if split and cache.batch > 1 and ids.shape[1] > 1:
            for b in range(cache.batch):
                row = slice(b, b + 1)
                counts = [None if x is None else x[row] for x in (lengths, text_lengths)]
                self._run_rows(ids[row], past_lengths[row], cache.rows(b, b + 1), rows, out[row], *counts)
        else:
            self._run_rows(ids, past_lengths, cache, rows, out, lengths, text_lengths)
        return out

    def _check(self, ids: NDArray[np.int64], past_lengths: NDArray[np.int32], cache: C) -> None:
        """Return if a step may run: kernels do not look whether they write beyond `cache`."""
        if ids.ndim != 2 or ids.shape[0] != cache.batch or ids.shape[1] < 1 or past_lengths.shape != (cache.batch,):
            raise ValueError(f"ids {ids.shape}, past_lengths {past_lengths.shape}, cache of {cache.batch} rows")
        longest = int(past_lengths.max()) + ids.shape[1]
        if longest > cache.capacity or past_lengths.min() < 0:
            raise UsageError(
                f"a step of {ids.shape[1]} tokens after {past_lengths.tolist()} does not fit into a cache of "
                f"{cache.capacity} tokens"
            )

    def _run_rows(
        self,
        ids: NDArray[np.int64],
        past_lengths: NDArray[np.int32],
        cache: C,
        rows: NDArray[np.int64] | None,
        out: NDArray[np.float32],
        *counts: Counts | None,
    ) -> None:
        """Run the graph on rows that may run together; `counts`: `lengths` and `text_lengths` of `step`."""
        graph = self.signature
        last = rows is None or (ids.shape[1] == 1 and len(rows) == 1)
        if graph.gives_all_rows and not (last and ids.shape[1] == 1):
            every = np.empty((*ids.shape, graph.vocabulary), np.float32)
            self._run(make_feeds(graph, ids, past_lengths, None, *counts), past_lengths, cache, every)
            out[...] = every[:, -1:] if rows is None else every[:, rows]
            return
        self._run(
            make_feeds(graph, ids, past_lengths, _LAST_ROW if rows is None else rows, *counts), past_lengths, cache, out
        )


def make_feeds(
    signature: Signature,
    ids: NDArray[np.int64],
    past_lengths: NDArray[np.int32],
    rows: NDArray[np.int64] | None,
    lengths: Counts | None,
    text_lengths: Counts | None,
) -> dict[str, NDArray[Any]]:
    """Make what the graph takes besides its caches."""
    rows = None if signature.gives_all_rows else rows
    names, growing = signature.inputs, signature.growing
    return interface.feeds(names, ids, past_lengths, rows, lengths, text_lengths, growing=growing)
