"""What every backend does with a step before its graph runs: bounds, feeds, rows that must run alone."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from llmforge import interface
from llmforge.errors import UsageError
from llmforge.runtime.backend import Rows
from llmforge.runtime.signature import Signature

_LAST_ROW = np.array([-1], np.int64)  # the default of `logits_rows` (docs/dialect.md)

C = TypeVar("C", bound=Rows)
Counts = NDArray[np.integer[Any]]
# Runs the graph once: feeds, past lengths, the cache, and the logits [B, R, V] that it gives exactly.
Run = Callable[[Mapping[str, NDArray[Any]], NDArray[np.int32], C, NDArray[np.float32]], None]


def run_step(
    signature: Signature,
    run: Run[C],
    ids: NDArray[np.int64],
    past_lengths: NDArray[np.int32],
    cache: C,
    rows: NDArray[np.int64] | None,
    out: NDArray[np.float32] | None,
    lengths: Counts | None,
    text_lengths: Counts | None,
    *,
    alone: bool = False,
) -> NDArray[np.float32]:
    """Do what `llmforge.runtime.session.Session.step` says, with `run` for the graph.

    `alone`: a row of several tokens always runs by itself. Nothing runs that would write beyond `cache`: kernels do not
    look.
    """
    if ids.ndim != 2 or ids.shape[0] != cache.batch or ids.shape[1] < 1 or past_lengths.shape != (cache.batch,):
        raise ValueError(f"ids {ids.shape}, past_lengths {past_lengths.shape}, cache of {cache.batch} rows")
    longest = int(past_lengths.max()) + ids.shape[1]
    if longest > cache.capacity or past_lengths.min() < 0:
        raise UsageError(
            f"a step of {ids.shape[1]} tokens after {past_lengths.tolist()} does not fit into a cache of "
            f"{cache.capacity} tokens"
        )
    shape = (cache.batch, 1 if rows is None else len(rows), signature.vocabulary)
    if out is None:
        out = np.empty(shape, np.float32)
    elif out.shape != shape or out.dtype != np.float32 or not out.flags.c_contiguous:
        raise ValueError(f"out is {out.dtype} {out.shape}; the logits are fp32 {shape}, C-contiguous")
    split = alone or (signature.one_row_continuations and past_lengths.any())
    if split and cache.batch > 1 and ids.shape[1] > 1:
        for b in range(cache.batch):
            row = slice(b, b + 1)
            counts = [None if x is None else x[row] for x in (lengths, text_lengths)]
            _run_rows(signature, run, ids[row], past_lengths[row], cache.rows(b, b + 1), rows, out[row], *counts)
    else:
        _run_rows(signature, run, ids, past_lengths, cache, rows, out, lengths, text_lengths)
    return out


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


def _run_rows(
    signature: Signature,
    run: Run[C],
    ids: NDArray[np.int64],
    past_lengths: NDArray[np.int32],
    cache: C,
    rows: NDArray[np.int64] | None,
    out: NDArray[np.float32],
    lengths: Counts | None,
    text_lengths: Counts | None,
) -> None:
    last = rows is None or (ids.shape[1] == 1 and len(rows) == 1)
    if signature.gives_all_rows and not (last and ids.shape[1] == 1):
        every = np.empty((*ids.shape, signature.vocabulary), np.float32)
        run(make_feeds(signature, ids, past_lengths, None, lengths, text_lengths), past_lengths, cache, every)
        out[...] = every[:, -1:] if rows is None else every[:, rows]
        return
    feeds = make_feeds(signature, ids, past_lengths, _LAST_ROW if rows is None else rows, lengths, text_lengths)
    run(feeds, past_lengths, cache, out)
