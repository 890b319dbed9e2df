"""What a scheduler needs of a decoder and of its cache: a small interface, so that other engines can stand behind it.

`runtime.backends.session` has the one for ONNX Runtime on the CPU, `runtime.backends.cuda` the one for its CUDA
provider, `llmforge.runtime.backends.tensorrt` the one for plans.
"""

from __future__ import annotations

from typing import Any, Protocol, Self, TypeVar

import numpy as np
from numpy.typing import NDArray


class Rows(Protocol):
    """A preallocated cache of `batch` rows, each with room for `capacity` tokens of one text."""

    @property
    def batch(self) -> int:
        """Number of rows."""

    @property
    def capacity(self) -> int:
        """Tokens that a row has room for."""

    @property
    def size_bytes(self) -> int:
        """Size of all rows."""

    def rows(self, start: int, stop: int) -> Self:
        """Give rows `start` … `stop - 1` as a cache that shares this one's memory; equal calls give one object."""

    def copy(self, row: int, start: int, source: Self, source_row: int, source_start: int, tokens: int) -> None:
        """Copy `tokens` tokens, and states as a whole, from a row of `source`, of the same decoder, into `row`."""


C = TypeVar("C", bound=Rows)


class Backend(Protocol[C]):
    """A decoder that is driven step by step over caches of its own.

    `step` means what `runtime.backends.steps.Stepping.step` says, and nothing more is asked of it than this: several
    rows of one token each; one row of several tokens, with or without a past; logits of the last row or of `rows`.
    """

    @property
    def vocabulary(self) -> int:
        """Number of logits of a row."""

    @property
    def buckets(self) -> tuple[int, ...] | None:
        """Batch sizes that decode steps are padded to, ascending; None: they run exactly the rows that they need.

        A recorded sequence of kernels (a CUDA graph) has fixed shapes, and a few of them must serve every number of
        rows. Where nothing is recorded, as on CPUs, a row of padding costs as much as any other and gains nothing.
        """

    @property
    def steady_from(self) -> int:
        """How many tokens of one row a step must have for the bits of each not to depend on how many there are.

        Kernels for few tokens add in another order than those for many; a step of fewer tokens may differ by rounding.
        """

    @property
    def longest_step(self) -> int | None:
        """Most tokens that a row may run in one step; None: any number, as far as memory reaches."""

    @property
    def notes(self) -> tuple[str, ...]:
        """What the decoder does without, though it was asked for, and why."""

    @property
    def no_reuse_reason(self) -> str | None:
        """Why tokens in a row can neither serve another text nor be taken back; None: they can."""

    def allocate(self, batch: int, capacity: int) -> C:
        """Reserve a cache; memory is taken as tokens reach it, where the device allows that."""

    def logits_array(self, shape: tuple[int, int, int]) -> NDArray[np.float32]:
        """Make an array that `step` fills fastest as its `out`."""

    def step(
        self,
        ids: NDArray[np.int64],
        past_lengths: NDArray[np.int32],
        cache: C,
        rows: NDArray[np.int64] | None = None,
        out: NDArray[np.float32] | None = None,
        lengths: NDArray[np.integer[Any]] | None = None,
        text_lengths: NDArray[np.integer[Any]] | None = None,
    ) -> NDArray[np.float32]:
        """Run the tokens `ids` [B, S] after what `cache` holds; return logits, fp32 [B, R, V]."""
