"""Values of single tokens as a record keeps them: those that quantiles and curves are made of, in few bytes."""

from __future__ import annotations

import base64
import binascii
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from llmforge.metrics.record import FiguresRecord

KEPT_TOKENS = 2**19  # of all documents; 11 bytes of a record each, with what is kept today

TokenScores = Mapping[str, NDArray[Any]]  # of each token of a text [R], by the name of its value


@dataclass(frozen=True, eq=False)
class WindowScores:
    """What is known of the predicted tokens of one window."""

    before: int  # tokens of context before the first of them
    values: TokenScores

    @property
    def tokens(self) -> int:
        """How many are predicted."""
        return len(next(iter(self.values.values())))


Count = Annotated[int, Field(ge=1, lt=2**31)]


class DocumentTokens(FiguresRecord):
    """Values of the predicted tokens of one document, by name, window after window.

    Floats are stored in fp32, little-endian, and booleans as bits, the first the highest of its byte; all in base64.
    """

    __pydantic_extra__: dict[str, str]

    document: str
    windows: tuple[tuple[Count, Count], ...]  # context before the first predicted token, and predicted tokens

    @property
    def tokens(self) -> int:
        """How many there are."""
        return sum(tokens for _, tokens in self.windows)

    @property
    def context(self) -> NDArray[np.int64]:
        """Tokens of context before each [R]."""
        return np.concatenate([np.arange(before, before + tokens) for before, tokens in self.windows])

    def values(self, name: str) -> NDArray[np.float64]:
        """Read a value of every token [R]; booleans are 0 and 1.

        Raises:
            ValueError: it is not there, or not of so many tokens.
        """
        try:
            raw = base64.b64decode(self.figures[name], validate=True)
        except (KeyError, TypeError, binascii.Error) as error:
            raise ValueError(f"{name} of the tokens of {self.document[:40]}: {error}") from error
        if len(raw) == 4 * self.tokens:
            return np.frombuffer(raw, "<f4").astype(np.float64)
        if len(raw) == -(-self.tokens // 8):
            return np.unpackbits(np.frombuffer(raw, np.uint8), count=self.tokens).astype(np.float64)
        raise ValueError(f"{name} of {self.document[:40]}: {len(raw)} bytes for {self.tokens} tokens")


def keep(
    scores: Mapping[str, Sequence[WindowScores]], names: Sequence[str], most: int | None = None
) -> tuple[DocumentTokens, ...]:
    """Record the values `names` of at most `most` tokens (`KEPT_TOKENS`) in whole windows, spread over all documents.

    That is the first window of every document, then the second, and so on; the first is kept whatever its length.
    """
    left = KEPT_TOKENS if most is None else most
    turns = sorted((turn, place) for place, windows in enumerate(scores.values()) for turn in range(len(windows)))
    documents = list(scores)
    kept: dict[str, list[WindowScores]] = {}
    for turn, place in turns:
        window = scores[documents[place]][turn]
        left -= window.tokens
        if left < 0 and kept:
            break
        kept.setdefault(documents[place], []).append(window)
    return tuple(
        DocumentTokens(
            document=document,
            windows=tuple((window.before, window.tokens) for window in kept[document]),
            **{name: _written(np.concatenate([w.values[name] for w in kept[document]])) for name in names},  # type: ignore[arg-type]
        )
        for document in documents
        if document in kept
    )


def _written(values: NDArray[Any]) -> str:
    raw = np.packbits(values) if values.dtype == np.bool_ else values.astype("<f4")
    return base64.b64encode(raw.tobytes()).decode()
