"""Names and meaning of the graph's inputs and outputs (docs/dialect.md), stated once for every stage.

Canonical graphs take `past_lengths` (and `position_ids` where rotary embedding stands alone); after the
`flash-attention` pass they take `seqlens_k` and `total_sequence_length` as GroupQueryAttention wants them.
`feeds` serves both, so that verification, evaluation and serving drive every stage of a build the same way.
"""

from __future__ import annotations

from collections.abc import Collection

import numpy as np
from numpy.typing import NDArray

INPUT_IDS = "input_ids"  # int64 [batch, sequence]
POSITION_IDS = "position_ids"  # int64 [batch, sequence]
PAST_LENGTHS = "past_lengths"  # int32 [batch]
SEQLENS_K = "seqlens_k"  # int32 [batch]: past + sequence - 1
TOTAL_SEQUENCE_LENGTH = "total_sequence_length"  # int32 scalar: longest past + sequence
LOGITS_ROWS = "logits_rows"  # int64 [rows], default [-1]
LOGITS = "logits"  # [batch, rows, vocabulary]

FALLBACK = "llmforge.fallback"  # metadata_props key of a model: why its own attention was traced, in plain words


def past_key(layer: int) -> str:
    """Name the graph input that holds the cached keys of `layer`."""
    return f"past_key_values.{layer}.key"


def past_value(layer: int) -> str:
    """Name the graph input that holds the cached values of `layer`."""
    return f"past_key_values.{layer}.value"


def present_key(layer: int) -> str:
    """Name the graph output that holds the keys of `layer` after the step."""
    return f"present.{layer}.key"


def present_value(layer: int) -> str:
    """Name the graph output that holds the values of `layer` after the step."""
    return f"present.{layer}.value"


def present_of(past: str) -> str:
    """Name the output that continues the cache input `past`."""
    return past.replace("past_key_values.", "present.", 1)


def feeds(
    names: Collection[str],
    ids: NDArray[np.int64],
    past_lengths: NDArray[np.int32],
    rows: NDArray[np.int64] | None = None,
) -> dict[str, NDArray[np.generic]]:
    """Make the non-cache inputs of one step for a graph whose inputs are `names`.

    `ids` is int64 [batch, sequence], right-padded; `past_lengths` int32 [batch]; `rows` selects the rows that get
    logits (None: the graph's default, the last).
    """
    sequence = ids.shape[1]
    known: dict[str, NDArray[np.generic]] = {
        INPUT_IDS: np.ascontiguousarray(ids, np.int64),
        POSITION_IDS: past_lengths.astype(np.int64)[:, None] + np.arange(sequence)[None],
        PAST_LENGTHS: past_lengths.astype(np.int32),
        SEQLENS_K: (past_lengths + sequence - 1).astype(np.int32),
        TOTAL_SEQUENCE_LENGTH: np.array(int(past_lengths.max(initial=0)) + sequence, np.int32),
    }
    if rows is not None:
        known[LOGITS_ROWS] = np.ascontiguousarray(rows, np.int64)
    return {name: value for name, value in known.items() if name in names or name == LOGITS_ROWS}
