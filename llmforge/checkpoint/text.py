"""Cut documents into windows of token ids: one cutting for calibration, verification and evaluation."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

from llmforge.base.errors import DataError
from llmforge.checkpoint.documents import Document


@dataclass(frozen=True, eq=False)
class TokenWindow:
    """A stretch of one document: int64 [at most length], the first of them BOS where the checkpoint has one."""

    document: str  # id of the document
    ids: NDArray[np.int64]


def windows(tokenizer: Tokenizer, documents: Sequence[Document], length: int, bos: int | None) -> list[TokenWindow]:
    """Cut every document into windows of at most `length` tokens, in order and without overlap.

    A window is `bos` and the next `length - 1` tokens (`length` where `bos` is None), so that every token of a document
    stands in exactly one window; the last window of a document is shorter. Special tokens of the tokenizer's template
    are not added. A document without tokens gives no window.

    Raises:
        ValueError: `length` leaves no room for a token after BOS.
    """
    head = [] if bos is None else [bos]
    step = length - len(head)
    if step < 1:
        raise ValueError(f"windows of {length} tokens hold no text after BOS; at least 2 are needed")
    encodings = tokenizer.encode_batch([document.text for document in documents], add_special_tokens=False)
    return [
        TokenWindow(document.id, np.array(head + encoding.ids[at : at + step], np.int64))
        for document, encoding in zip(documents, encodings, strict=True)
        for at in range(0, len(encoding.ids), step)
    ]


def sample(pool: Sequence[TokenWindow], count: int, seed: int) -> list[TokenWindow]:
    """Draw `count` of the longest windows, in an order that `seed` decides.

    Windows are shuffled, then sorted by length, longest first (a stable sort): short ends of documents come last, and
    which of the equally long ones are drawn is random.

    Raises:
        DataError: there are fewer windows.
    """
    if len(pool) < count:
        raise DataError(
            f"the calibration text holds {len(pool)} windows, the recipe asks for {count} samples",
            hint="add documents, ask for fewer `samples`, or a shorter `length`",
        )
    shuffled = [pool[i] for i in np.random.default_rng(seed).permutation(len(pool))]
    return sorted(shuffled, key=lambda window: -len(window.ids))[:count]


def spread(pool: Sequence[TokenWindow], tokens: int) -> list[TokenWindow]:
    """Choose of `pool` the first window of every document, then the second and so on, up to `tokens` tokens in all.

    The first window is chosen whatever its length. Windows keep their order.
    """
    seen: dict[str, int] = {}
    turns = []
    for place, window in enumerate(pool):
        turns.append((seen.setdefault(window.document, 0), place))
        seen[window.document] += 1
    chosen: list[int] = []
    left = tokens
    for _, place in sorted(turns):
        left -= len(pool[place].ids)
        if left < 0 and chosen:
            break
        chosen.append(place)
    return [pool[place] for place in sorted(chosen)]
