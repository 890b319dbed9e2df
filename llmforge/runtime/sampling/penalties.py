"""Penalties on the tokens that a sequence has already, and how often it has each."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from llmforge.runtime.sampling.options import Sampling


class Penalties:
    """Counts the tokens of one sequence, and lowers their logits: repetition, frequency, presence (see `Sampling`)."""

    def __init__(self, sampling: Sampling, prompt: Sequence[int]) -> None:
        self._sampling = sampling
        penalties = (sampling.repetition_penalty, sampling.frequency_penalty, sampling.presence_penalty)
        self.needed = penalties != (1, 0, 0)
        seen = np.unique(np.asarray(prompt, np.int64)) if sampling.repetition_penalty != 1 else np.empty(0, np.int64)
        self._index_of = {int(token): index for index, token in enumerate(seen)}
        self._size = len(seen)  # of the arrays below, which grow ahead of need
        self._tokens = seen
        self._counts = np.zeros(len(seen), np.float32)  # of generated tokens: 0 for those of the prompt alone

    def count(self, token: int) -> None:
        """Count one more generated token."""
        index = self._index_of.setdefault(token, self._size)
        if index == self._size:
            if self._size == len(self._tokens):
                self._tokens = np.resize(self._tokens, 2 * self._size + 64)
                self._counts = np.resize(self._counts, 2 * self._size + 64)
            self._tokens[index], self._counts[index] = token, 0
            self._size += 1
        self._counts[index] += 1

    def apply(self, logits: NDArray[np.float32]) -> None:
        """Change `logits` [V] in place."""
        tokens, counts = self._tokens[: self._size], self._counts[: self._size]
        values = logits[tokens]
        repetition = np.float32(self._sampling.repetition_penalty)
        values = np.where(values > 0, values / repetition, values * repetition)
        values -= np.float32(self._sampling.frequency_penalty) * counts
        values -= np.float32(self._sampling.presence_penalty) * (counts > 0)
        logits[tokens] = values
