"""EAGLE-3 heads: a layer that drafts by what the decoder itself computed (Li et al. 2025, arXiv 2503.01840).

At place p a head reads the token p + 1 and the decoder's hidden states of place p, and predicts the token p + 2. So it
always stands one token behind the text, and its cache has what the decoder has verified. Further tokens of a draft
have no hidden states of the decoder yet: in their place the head reads what it gave itself at the place before.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from typing import Generic

import numpy as np
from numpy.typing import NDArray

from llmforge.ir import interface
from llmforge.runtime.interface import C, Decoder, StepInputs


@dataclass
class _HeadText:
    """A text in the cache of a head, which begins at its place `start`: what was before it, the decoder was spared."""

    row: int
    start: int
    read: int = 0  # places that the cache holds
    waiting: list[NDArray[np.float32]] = field(default_factory=list)  # [n, width]: states of the places after those

    @property
    def end(self) -> int:
        """The first place whose states are not known."""
        return self.start + self.read + sum(map(len, self.waiting))


class DraftHead(Generic[C]):
    """Drafts the most probable tokens of a head, which keeps a cache of its own of each text.

    Args:
        backend: the head; its logits are of the decoder's vocabulary.
        rows: texts that it can follow at once; it has no drafts for others.
        capacity: tokens of the longest text.
        chunk: places of a text that it reads at once, and most that wait to be read.
    """

    def __init__(self, backend: Decoder[C], rows: int, capacity: int, chunk: int) -> None:
        self._backend = backend
        widths = backend.signature.hidden_widths
        self._widths = widths[interface.HIDDEN_STATES], widths[interface.DRAFT_STATES]
        self._cache = backend.allocate(rows, capacity)
        self._chunk = chunk
        self._free = list(range(rows))
        self._texts: dict[Hashable, _HeadText] = {}

    def observe(self, key: Hashable, tokens: Sequence[int], past: int, states: NDArray[np.float32]) -> None:
        """Take note of what the decoder computed of places `past` … of a text: `states` [n, width].

        A text whose places do not go on from those that are known begins anew there.
        """
        text = self._texts.get(key)
        if text is None:
            if not self._free:
                return
            text = self._texts[key] = _HeadText(self._free.pop(), past)
        elif text.end != past:
            text.start, text.read, text.waiting = past, 0, []
        text.waiting.append(states.copy())
        if text.end - text.start - text.read > self._chunk:
            self._read(text, tokens)

    def propose(self, key: Hashable, tokens: Sequence[int], most: int) -> list[int]:
        """Read what is new of the text, and decode greedily; nothing where the decoder's states are not known."""
        text = self._texts.get(key)
        if text is None or not text.waiting or text.end != len(tokens) - 1:
            return []
        most = min(most, self._cache.capacity - (text.end - text.start) + 1)
        best = self._read(text, tokens)
        if best is None or most < 1:
            return []
        draft, hidden = [best], np.zeros((1, 1, self._widths[0]), np.float32)
        for past in range(text.read, text.read + most - 1):
            assert self._backend.hidden_states is not None
            own = self._backend.hidden_states[:, -1:].copy()
            draft.append(self._run(text.row, draft[-1:], past, hidden, own))
        return draft

    def forget(self, key: Hashable) -> None:
        """Free the row of a text."""
        text = self._texts.pop(key, None)
        if text is not None:
            self._free.append(text.row)

    def _read(self, text: _HeadText, tokens: Sequence[int]) -> int | None:
        """Read the places that wait and whose next token is known; return the token that is predicted at their end."""
        states, best = np.concatenate(text.waiting), None
        first = text.start + text.read
        count = min(len(states), len(tokens) - 1 - first)
        for at in range(0, count, self._chunk):
            piece = states[at : min(at + self._chunk, count)]
            ids = tokens[first + at + 1 : first + at + 1 + len(piece)]
            own = np.zeros((1, len(piece), self._widths[1]), np.float32)
            best = self._run(text.row, ids, text.read, piece[None], own)
            text.read += len(piece)
        text.waiting = [states[count:]] if count < len(states) else []
        return best

    def _run(
        self,
        row: int,
        tokens: Sequence[int],
        past: int,
        hidden: NDArray[np.float32],
        own: NDArray[np.float32],
    ) -> int:
        """Run `tokens` after `past` places of `row`; return the most probable next token."""
        inputs = StepInputs(
            np.array([tokens], np.int64), np.array([past], np.int32), hidden_states=hidden, draft_states=own
        )
        return int(self._backend.step(inputs, self._cache.rows(row, row + 1))[0, 0].argmax())
