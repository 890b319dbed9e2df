"""The decoder and the cache that a scheduler drives, and what every decoder does with a step before its graph runs.

Each folder of `llmforge.backends` whose engines run here has a `session`, the decoder for it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, NamedTuple, Self, TypeVar

import numpy as np
from numpy.typing import NDArray

from llmforge.base.errors import UsageError
from llmforge.ir import interface
from llmforge.ir.interface import TopLogits
from llmforge.runtime.signature import Signature

_LAST_ROW = np.array([-1], np.int64)  # the default of `logits_rows` (docs/dialect.md)

Counts = NDArray[np.integer[Any]]

# Tokens of a text that get logits in one step: at a vocabulary of 150,000, 256 rows of fp32 logits take 154 MB.
LOGITS_CHUNK = 256


class RowCopy(NamedTuple):
    """What `Rows.copy` copies."""

    row: int
    start: int
    source_row: int
    source_start: int
    tokens: int


@dataclass(frozen=True, eq=False)
class Rows(ABC):
    """A preallocated cache of `batch` rows, each with room for `capacity` tokens of one text."""

    batch: int
    capacity: int
    _views: dict[tuple[int, int], Self] = field(default_factory=dict, init=False, repr=False)

    def rows(self, start: int, stop: int) -> Self:
        """Give rows `start` … `stop - 1` as a cache that shares this one's memory; equal calls give one object."""
        if (start, stop) == (0, self.batch):
            return self
        if not 0 <= start < stop <= self.batch:
            raise ValueError(f"rows {start}:{stop} of a cache of {self.batch} rows")
        if (start, stop) not in self._views:
            self._views[start, stop] = self._view(start, stop)
        return self._views[start, stop]

    @abstractmethod
    def _view(self, start: int, stop: int) -> Self:
        """Make what `rows` gives."""

    @property
    @abstractmethod
    def size_bytes(self) -> int:
        """Size of all rows."""

    @abstractmethod
    def copy(self, row: int, start: int, source: Self, source_row: int, source_start: int, tokens: int) -> None:
        """Copy `tokens` tokens, and states as a whole, from token `source_start` of a row of `source` to `start`."""

    def copy_all(self, source: Self, copies: Sequence[RowCopy]) -> None:
        """Make `copies` of rows of `source`, of which none writes what another one reads."""
        for row, start, source_row, source_start, tokens in copies:
            self.copy(row, start, source, source_row, source_start, tokens)

    def row_arrays(self, row: int) -> Mapping[str, NDArray[Any]] | None:
        """Give the arrays of one row, by names, to be read and written in place; None: they are on a device."""
        return None


C = TypeVar("C", bound=Rows)


class StepInputs(NamedTuple):
    """What a step runs: B rows of S tokens each, shorter ones padded on the right.

    Attributes:
        ids: int64 [B, S].
        past_lengths: int32 [B], the tokens that each row of the cache holds already.
        rows: int64 [R], positions in 0 … S-1 (or negative, from the end) that get logits; None: the last. Or [B, R],
            those of each row, where the graph takes that (`Signature.chooses_by_row`).
        lengths: [B], the tokens of each row that are no padding; None: all. Layers with a state need it.
        text_lengths: [B], the tokens of the whole text that the step is a part of; None: the step ends it. Rotary
            angles that depend on the length of a text (LongRoPE) need it.
        adapters: [B], the adapter of each row, 0 for none, where the graph takes them; None: no row has one.
        temperatures: fp32 [B], more than 0, what each row's masses are summed at; None: 1.
        draws: fp32 [B, fields of `interface.Draw`], what each row's next token is guessed with; None: greedily.
        hidden_states: fp32 [B, S, width], of a head that drafts: what its target computed; None: zeros.
        draft_states: fp32 [B, S, hidden], what it computed itself for tokens that it drafted; None: zeros.
    """

    ids: NDArray[np.int64]
    past_lengths: NDArray[np.int32]
    rows: NDArray[np.int64] | None = None
    lengths: Counts | None = None
    text_lengths: Counts | None = None
    adapters: Counts | None = None
    temperatures: NDArray[np.float32] | None = None
    draws: NDArray[np.float32] | None = None
    hidden_states: NDArray[np.float32] | None = None
    draft_states: NDArray[np.float32] | None = None

    def only(self, b: int) -> StepInputs:
        """Give those of row `b` alone."""
        row = slice(b, b + 1)
        whole = self.rows if self.rows is None or self.rows.ndim == 1 else self.rows[row]
        return StepInputs._make(None if each is None else each[row] for each in self)._replace(rows=whole)

    def feeds(self, signature: Signature) -> dict[str, NDArray[Any]]:
        """Make what a graph takes besides its caches."""
        rows = None if signature.gives_all_rows else _LAST_ROW if self.rows is None else self.rows
        if rows is not None and signature.chooses_by_row:
            rows = _among_all(rows, *self.ids.shape)
        made = feeds(signature.inputs, self._replace(rows=rows), growing=signature.growing)
        for name, width in signature.hidden_widths.items():
            if name in signature.inputs and name not in made:
                made[name] = np.zeros((*self.ids.shape, width), np.float32)
        return made


def feeds(names: Collection[str], inputs: StepInputs, *, growing: bool = False) -> dict[str, NDArray[Any]]:
    """Make the non-cache inputs of one step for a graph whose inputs are `names`, of any stage of a build.

    Rows get logits as the graph's default says where `inputs` choose none. Caches that grow hold each row's past at
    their end (`growing`), others at their beginning.
    """
    ids, past_lengths = inputs.ids, inputs.past_lengths
    sequence, longest = ids.shape[1], int(past_lengths.max(initial=0))
    own = np.full(len(ids), sequence, np.int32) if inputs.lengths is None else inputs.lengths.astype(np.int32)

    def mask() -> NDArray[np.int64]:
        slots = np.arange(longest + sequence)[None]
        first = (longest - past_lengths)[:, None] if growing else np.zeros((len(ids), 1), np.int64)
        held = (slots >= first) & (slots < first + past_lengths[:, None] + sequence)
        return np.asarray(held, np.int64)

    def given(values: NDArray[Any] | None, default: Callable[[], NDArray[Any]]) -> NDArray[Any]:
        return default() if values is None else values

    # Made only where a graph takes them: a decode step waits for this.
    known: dict[str, Callable[[], NDArray[Any]]] = {
        interface.INPUT_IDS: lambda: np.ascontiguousarray(ids, np.int64),
        interface.POSITION_IDS: lambda: past_lengths.astype(np.int64)[:, None] + np.arange(sequence)[None],
        interface.PAST_LENGTHS: lambda: past_lengths.astype(np.int32),
        interface.LENGTHS: lambda: own,
        interface.TEXT_LENGTHS: lambda: given(inputs.text_lengths, lambda: past_lengths + own).astype(np.int64),
        interface.SEQLENS_K: lambda: (past_lengths + sequence - 1).astype(np.int32),
        interface.TOTAL_SEQUENCE_LENGTH: lambda: np.array(longest + sequence, np.int32),
        interface.ATTENTION_MASK: mask,
        interface.ADAPTER_IDS: lambda: given(inputs.adapters, lambda: np.zeros(len(ids))).astype(np.int64),
        interface.TEMPERATURES: lambda: given(inputs.temperatures, lambda: np.ones(len(ids), np.float32)),
        interface.DRAWS: lambda: given(inputs.draws, lambda: np.array([interface.GREEDY] * len(ids), np.float32)),
        interface.CHOSEN_IDS: lambda: np.zeros(1, np.int64),
    }
    made = {name: make() for name, make in known.items() if name in names}
    states = {interface.HIDDEN_STATES: inputs.hidden_states, interface.DRAFT_STATES: inputs.draft_states}
    made |= {name: value for name, value in states.items() if name in names and value is not None}
    if inputs.rows is not None:
        made[interface.LOGITS_ROWS] = np.ascontiguousarray(inputs.rows, np.int64)
    return made


def _among_all(rows: NDArray[np.int64], batch: int, tokens: int) -> NDArray[np.int64]:
    """Give the places of `rows`, [R] or [batch, R], among all tokens of a step [batch, tokens]: [batch, R]."""
    return np.arange(0, batch * tokens, tokens)[:, None] + np.where(rows < 0, rows + tokens, rows)


class DecodeRun(ABC):
    """A decode step that a device runs: one token of every row."""

    @abstractmethod
    def top_logits(self) -> TopLogits:
        """Wait for the step, and give the top logits of its rows; they hold until the next step begins."""

    @abstractmethod
    def logits(self, row: int) -> NDArray[np.float32]:
        """Fetch all logits of a row, fp32 [V]; they hold until the next call."""

    @abstractmethod
    def blocks(self, rows: Sequence[int], blocks: Sequence[int]) -> NDArray[np.float32]:
        """Fetch one block of the logits of each of some rows, fp32 [n, size]; they hold until the next call.

        Args:
            rows: [n], as of `logits`.
            blocks: [n], numbers of `interface.mass_blocks`, which says their size; -inf stands after a row's end.
        """

    def next_ids(self) -> NDArray[np.int64]:
        """Give the token that the device guesses to follow in each row, int64 [B], once `top_logits` has returned.

        They hold as long as those.
        """
        raise NotImplementedError

    def launched(self) -> None:
        """Wait until all that is asked of the device from now on comes after the step."""
        self.top_logits()


class Decoder(ABC, Generic[C]):
    """A decoder that is driven step by step over caches of type `C`.

    A subclass sets `signature`, allocates caches, and runs its graph once. `rows_alone`: a row of several tokens runs
    by itself, but for steps of `prompt_shapes`. `longest_step`: most tokens that a row may run in one step; None: any
    number, as far as memory reaches.
    """

    rows_alone = False
    # Rows and tokens of the steps that pieces of several prompts run in together, padded on the right by the caller;
    # none: each runs by itself. It pays where a step of few tokens costs what one of many does, as on GPUs.
    prompt_shapes: tuple[tuple[int, int], ...] = ()
    longest_step: int | None = None
    # Batch sizes that decode steps are padded to, ascending; none: they run exactly the rows that they need. A CUDA
    # graph has fixed shapes, and a few of them must serve every number of rows. Where nothing is captured, as on CPUs,
    # a row of padding costs as much as any other and gains nothing.
    buckets: tuple[int, ...] = ()
    signature: Signature
    # fp32 [B, S, width], what the step that ran last gave where `Signature.gives_hidden`; the next one overwrites it.
    hidden_states: NDArray[np.float32] | None = None

    @property
    def vocabulary(self) -> int:
        """Number of logits of a row."""
        return self.signature.vocabulary

    @property
    def processes(self) -> tuple[int, ...]:
        """The ids of processes that it has besides this one, whose memory counts."""
        return ()

    def when_ended(self, tell: Callable[[], None]) -> None:
        """Have `tell`, a method, called by another thread when processes of the decoder end and it can run no more."""

    def check_alive(self) -> None:
        """Return if steps can be run.

        Raises:
            ForgeError: why they cannot, any more.
        """

    @property
    def notes(self) -> tuple[str, ...]:
        """What the decoder does without, though it was asked for, and why."""
        return ()

    @property
    def spare_bytes(self) -> int | None:
        """Count the bytes that its device has left for more caches; None: the host's memory, taken page by page."""
        return None

    @abstractmethod
    def allocate(self, batch: int, capacity: int) -> C:
        """Reserve a cache; memory is taken as tokens reach it, where the device allows that."""

    def logits_array(self, shape: tuple[int, int, int]) -> NDArray[np.float32]:
        """Make an array that `step` fills fastest as its `out`."""
        return np.empty(shape, np.float32)

    @property
    def decodes_ahead(self) -> bool:
        """Whether decode steps run concurrently with the host and give top logits: `begin_decode` serves them."""
        return False

    @property
    def guesses_tokens(self) -> bool:
        """Whether a decode step guesses the tokens that follow, so that the next one can begin before it has ended."""
        return False

    def begin_decode(self, inputs: StepInputs, cache: C) -> DecodeRun:
        """Begin a step of one token a row, as `step` runs it; arrays are read before this returns.

        Where `guesses_tokens`, it may begin while the one before it runs, whose top logits are asked for next; an id of
        -1 - n is then the token that the step begun right before this one guesses for its row n.
        """
        raise NotImplementedError

    def begin_prompts(self, inputs: StepInputs, cache: C) -> DecodeRun:
        """Begin a step of pieces of several prompts, as `step` runs it, where it `decodes_ahead`.

        `ids` are of one of `prompt_shapes`, and `rows` [B, 1] the token of each row that gets logits.
        """
        raise NotImplementedError

    @abstractmethod
    def _run(self, inputs: StepInputs, cache: C, out: NDArray[np.float32]) -> None:
        """Run the graph once, on `inputs`; it gives exactly the logits of `out` [B, R, V]."""

    def step(self, inputs: StepInputs, cache: C, out: NDArray[np.float32] | None = None) -> NDArray[np.float32]:
        """Run tokens after what `cache` holds, and store their keys and values there.

        Args:
            inputs: of B = `cache.batch` rows.
            cache: written at `past_lengths[b]` … `past_lengths[b] + S - 1` of each row.
            out: fp32 [B, R, V], C-contiguous, to write the logits to; the same array again saves binding it.

        Returns:
            Logits, fp32 [B, R, V]: `out`, or a new array.

        Raises:
            UsageError: the tokens do not fit into the cache.
            ValueError: shapes do not agree.
        """
        self._check(inputs, cache)
        ids, rows = inputs.ids, inputs.rows
        if rows is not None and rows.ndim == 2 and (len(rows) != cache.batch or not self.signature.chooses_by_row):
            raise ValueError(f"rows {rows.shape} of a step of {cache.batch} rows, which choose none for themselves")
        shape = (cache.batch, 1 if rows is None else rows.shape[-1], self.vocabulary)
        if out is None:
            out = np.empty(shape, np.float32)
        elif out.shape != shape or out.dtype != np.float32 or not out.flags.c_contiguous:
            raise ValueError(f"out is {out.dtype} {out.shape}; the logits are fp32 {shape}, C-contiguous")
        split = self.rows_alone and (shape[1] > 1 or ids.shape not in self.prompt_shapes)
        split |= self.signature.one_row_continuations and bool(inputs.past_lengths.any())
        if split and cache.batch > 1 and ids.shape[1] > 1:
            states = []
            for b in range(cache.batch):
                self._run_together(inputs.only(b), cache.rows(b, b + 1), out[b : b + 1])
                states += [] if self.hidden_states is None else [self.hidden_states.copy()]
            self.hidden_states = np.concatenate(states) if states else None
        else:
            self._run_together(inputs, cache, out)
        return out

    def _check(self, inputs: StepInputs, cache: C) -> None:
        """Return if a step may run: kernels do not look whether they write beyond `cache`."""
        ids, past_lengths = inputs.ids, inputs.past_lengths
        if ids.ndim != 2 or ids.shape[0] != cache.batch or ids.shape[1] < 1 or past_lengths.shape != (cache.batch,):
            raise ValueError(f"ids {ids.shape}, past_lengths {past_lengths.shape}, cache of {cache.batch} rows")
        longest = int(past_lengths.max()) + ids.shape[1]
        if longest > cache.capacity or past_lengths.min() < 0:
            raise UsageError(
                f"a step of {ids.shape[1]} tokens after {past_lengths.tolist()} does not fit into a cache of "
                f"{cache.capacity} tokens"
            )

    def _check_prompts(self, inputs: StepInputs, cache: C) -> None:
        """Return if `begin_prompts` may run a step."""
        self._check(inputs, cache)
        ids, rows = inputs.ids.shape, None if inputs.rows is None else inputs.rows.shape
        if not self.decodes_ahead or ids not in self.prompt_shapes or rows != (ids[0], 1):
            raise ValueError(f"a step of {ids}, rows {rows}; top logits of one token a row of {self.prompt_shapes}")

    def _run_together(self, inputs: StepInputs, cache: C, out: NDArray[np.float32]) -> None:
        """Run the graph on rows that may run together."""
        rows, tokens = inputs.rows, inputs.ids.shape[1]
        if self.signature.gives_all_rows and not (tokens == 1 and (rows is None or len(rows) == 1)):
            every = np.empty((*inputs.ids.shape, self.vocabulary), np.float32)
            self._run(inputs, cache, every)
            out[...] = every[:, -1:] if rows is None else every[:, rows]
        else:
            self._run(inputs, cache, out)
