"""Fixed inputs that graphs are compared on, and how a graph is run on them.

A graph runs as it is written: ONNX Runtime's own optimizations are off, canonical operators are expanded, fp16 and bf16
are emulated in fp32 (`rewrite.emulation`), and the initializers are handed over in memory, so that no file is written
and a tensor that two graphs share is read once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from llmforge.backends.onnxruntime.session import HostCache, Session
from llmforge.ir import dialect, graph, interface
from llmforge.rewrite import emulation
from llmforge.runtime.config import SessionConfig
from llmforge.runtime.interface import StepInputs

# Arrays below this size stay in the serialized graph: ONNX Runtime wants shapes and axes as constants there.
_INLINE_BYTES = 1024
_SEED = 20_240_229  # any fixed number: probes must be the same in every build
# Threads of a session that waits for work would take the cores from the one that it is held against.
QUIET = {"session.intra_op.allow_spinning": "0"}
_TOGETHER = 4  # windows that run side by side
_SAMPLED = 4  # one token in so many of a long step is asked for logits: each costs the vocabulary
_LOGITS = 1 << 25  # of a step, at most: 128 MiB
_DECODED_OF_WINDOW = 16  # a decode that is broken outright costs nats a token: 16 of 512 lift the mean over any budget


@dataclass(frozen=True, eq=False)
class ProbeCall:
    """One call of a graph.

    ids: int64 [B, S], padded on the right.  lengths: int64 [B], the real tokens of each row.  past: int32 [B].
    text_lengths: int64 [B], the tokens of the text of each row, of which the step is a part.
    every: a token in how many gets logits, the first one first.
    """

    ids: NDArray[np.int64]
    lengths: NDArray[np.int64]
    past: NDArray[np.int32]
    text_lengths: NDArray[np.int64] | None = None  # None: the step ends it
    every: int = 1

    @property
    def adapters(self) -> NDArray[np.int64]:
        """The adapter of each row, where a graph takes them: every other one has the first, [B]."""
        return np.arange(len(self.ids)) % 2

    @property
    def rows(self) -> NDArray[np.int64]:
        """Positions of all tokens, [S]."""
        return np.arange(self.ids.shape[1])

    @property
    def valid(self) -> NDArray[np.bool_]:
        """Mark the real tokens: bool [B, S]."""
        return self.rows < self.lengths[:, None]

    @property
    def asked(self) -> NDArray[np.int64]:
        """Positions of the tokens that get logits, [R]."""
        return self.rows[:: self.every]

    @property
    def answered(self) -> NDArray[np.bool_]:
        """Mark the real tokens among `asked`: bool [B, R]."""
        return self.asked < self.lengths[:, None]


@dataclass(frozen=True, eq=False)
class Run:
    """Steps that continue one another over one cache."""

    name: str
    steps: tuple[ProbeCall, ...]

    @property
    def batch(self) -> int:
        """Number of rows."""
        return len(self.steps[0].ids)

    @property
    def capacity(self) -> int:
        """Slots that the cache needs: the longest row, padding included."""
        return max(int(step.past.max()) + int(step.ids.shape[1]) for step in self.steps)

    def where(self, index: int) -> str:
        """Describe a step for a message."""
        step = self.steps[index]
        kind = "decode" if step.ids.shape[1] == 1 else "continuation" if step.past.any() else "prefill"
        return f"{self.name}, step {index} ({kind}, {step.ids.shape[1]} tokens after {step.past.tolist()})"


@dataclass(frozen=True, eq=False)
class StepOutcome:
    """What one step gave, without padding.

    logits: fp32 [tokens, vocabulary] of those that the step asks for, row after row.
    caches: by input name, the filled slots of each row, [kv_heads, slots, head_dim], or its state as a whole.
    """

    logits: NDArray[np.float32]
    caches: Mapping[str, tuple[NDArray[Any], ...]]


# May change what a step has put into caches, [batch, kv_heads, slots, head_dim] by input name: all of a graph, or some.
AfterStep = Callable[[Mapping[str, NDArray[Any]], ProbeCall], None]


def schedule(name: str, rows: Sequence[NDArray[np.int64]], counts: Sequence[Sequence[int]]) -> Run:
    """Divide rows of tokens among the steps of a run: step `i` takes the next `counts[i][b]` tokens of row `b`."""
    past = np.zeros(len(rows), np.int32)
    totals = np.sum(np.array(counts, np.int64), axis=0)
    steps = []
    for count in counts:
        lengths = np.array(count, np.int64)
        ids = np.zeros((len(rows), int(lengths.max())), np.int64)
        for b, row in enumerate(rows):
            ids[b, : lengths[b]] = row[past[b] : past[b] + lengths[b]]
        steps.append(ProbeCall(ids, lengths, past, totals))
        past = (past + lengths).astype(np.int32)
    return Run(name, tuple(steps))


def random_runs(vocabulary: int, rng: np.random.Generator | None = None) -> tuple[Run, ...]:
    """Make the probes of every pass: one row through prefill, decode and continuation, and a ragged batch of two.

    Tokens are drawn with `rng`; None: the same in every build.
    """
    rng = np.random.default_rng(_SEED) if rng is None else rng

    def draw(length: int) -> NDArray[np.int64]:
        return rng.integers(0, vocabulary, length, np.int64)

    return (
        schedule("one row", [draw(20)], [(12,), *[(1,)] * 5, (3,)]),
        schedule("ragged batch", [draw(11), draw(14)], [(9, 12), (1, 1), (1, 1)]),
    )


def text_runs(texts: Sequence[NDArray[np.int64]], vocabulary: int) -> tuple[Run, ...]:
    """Make the probes of a lossy pass from token windows; every window is one text of the sample.

    The beginnings of the first few run side by side, of unequal lengths: a prefill, then decode. The others each run
    alone: most of it in a prefill, then a continuation, then decode. Of a prefill and a continuation, one token in
    `_SAMPLED` is asked for logits, or fewer where the vocabulary is so large that they would take `_LOGITS`.
    """
    runs = []
    together = min(_TOGETHER, len(texts)) if len(texts) > 1 else 0
    begun = [window[: _beginning(window, row)] for row, window in enumerate(texts[:together])]
    decoded = min((min(_DECODED_OF_WINDOW // 2, len(window) // 4) for window in begun), default=0)
    if decoded:
        prefill = tuple(len(window) - decoded for window in begun)
        name = f"windows 0 to {together - 1}, ragged"
        runs.append(schedule(name, begun, [prefill, *[(1,) * together] * decoded]))
    alone = max(0, min(together, len(texts) - 1)) if decoded else 0
    for index, window in enumerate(texts[alone:], alone):
        decoded = min(_DECODED_OF_WINDOW, len(window) // 4)
        continued = len(window) // 4
        counts = [(len(window) - continued - decoded,), (continued,), *[(1,)] * decoded]
        runs.append(schedule(f"window {index}", [window], [count for count in counts if count[0]]))
    return tuple(Run(run.name, tuple(_sampled(step, vocabulary) for step in run.steps)) for run in runs)


def _beginning(window: NDArray[np.int64], row: int) -> int:
    """Count the tokens that a window takes part with in row `row` of a ragged batch: a half of it or a little less."""
    return -(-len(window) * (_TOGETHER * 4 - row) // (_TOGETHER * 8))


def _sampled(step: ProbeCall, vocabulary: int) -> ProbeCall:
    """Ask for the logits of few tokens of a long step, and of all tokens of a short one."""
    tokens = step.ids.shape[1]
    if tokens < 2 * _SAMPLED:
        return step
    return replace(step, every=max(_SAMPLED, -(-step.ids.size * vocabulary // _LOGITS)))


@dataclass
class InitializerArrays:
    """Arrays of initializers, each read once for all graphs that share the tensor."""

    _arrays: dict[int, tuple[ir.TensorProtocol, NDArray[Any]]] = field(default_factory=dict)

    def array(self, tensor: ir.TensorProtocol) -> NDArray[Any]:
        """Return the values of `tensor`; a lazy one is computed the first time."""
        key = id(emulation.origin(tensor))
        if key not in self._arrays:  # the tensor is kept, too: its id cannot go to another
            self._arrays[key] = tensor, np.asarray(self.values(tensor), order="C")  # keeps scalars without axes
        return self._arrays[key][1]

    def values(self, tensor: ir.TensorProtocol) -> NDArray[Any]:
        """Read `tensor`."""
        return tensor.numpy()

    def keep(self, *models: ir.Model) -> None:
        """Forget every tensor that none of `models` has."""
        used = {id(value.const_value) for model in models for value in model.graph.initializers.values()}
        self._arrays = {key: entry for key, entry in self._arrays.items() if key in used}


def strip(model: ir.Model) -> dict[str, ir.TensorProtocol]:
    """Take the initializers out of `model`, which then refers to a file that is not there; return them.

    Small ones in memory stay.
    """
    return graph.detach(model, "weights", _INLINE_BYTES)


def executable(model: ir.Model) -> ir.Model:
    """Write `model`, which stays as it is, in operators that ONNX Runtime has; what nothing reads is not in it."""
    return dialect.expand(emulation.emulate(model))


def open_session(
    model: ir.Model,
    weights: InitializerArrays,
    threads: int,
    expose: Sequence[str] = (),
    optimized: Mapping[str, str] | None = None,
) -> Session:
    """Load `model`, which stays as it is, for checks; `expose` names intermediate values to be outputs as well.

    `optimized` are configuration entries with which ONNX Runtime optimizes it; None: it runs as written.

    Raises:
        UnsupportedError: ONNX Runtime refuses the graph.
    """
    written = executable(model)
    if expose:
        wanted = set(expose) - {value.name for value in written.graph.outputs}
        values = [value for node in written.graph for value in node.outputs if value.name in wanted]
        written.graph.outputs.extend(values)
    arrays = {name: weights.array(tensor) for name, tensor in strip(written).items()}
    serialized = ir.serde.serialize_model(written).SerializeToString()
    entries = {**(optimized or {}), **QUIET}
    config = SessionConfig(threads=threads, optimize=optimized is not None, entries=entries)
    return Session(serialized, config, initializers=arrays)


def drive(session: Session, run: Run, *, caches: bool) -> Iterator[StepOutcome]:
    """Run the steps of `run` one by one; with `caches`, copy what they hold after each."""
    cache = session.allocate(run.batch, run.capacity)
    for step in run.steps:
        logits = _step(session, step, cache)
        filled = step.past + step.lengths
        held = cache.buffers.items() if caches else ()
        yield StepOutcome(logits[step.answered], {name: tuple(real(name, buffer, filled)) for name, buffer in held})


def logits(session: Session, run: Run, after_step: AfterStep | None = None) -> Iterator[NDArray[np.float32]]:
    """Run the steps of `run` one by one; give the logits [B, S, V] of each, padding included.

    `after_step` may change what a step has put into the cache.
    """
    cache = session.allocate(run.batch, run.capacity)
    for step in run.steps:
        made = _step(session, step, cache)
        if after_step is not None:
            after_step(cache.buffers, step)
        yield made


def real(name: str, buffer: NDArray[Any], filled: NDArray[np.integer[Any]]) -> Iterator[NDArray[Any]]:
    """Copy what the cache input or output `name` holds for each row, of which `filled` tokens [B] are cached."""
    for row, count in zip(buffer, filled, strict=True):
        yield row.copy() if interface.is_state(name) else row[:, :count].copy()


def observe(session: Session, run: Run, index: int, names: Sequence[str]) -> dict[str, NDArray[Any]]:
    """Run the steps before step `index`, and read the outputs `names` of that step, padding included."""
    cache = session.allocate(run.batch, run.capacity)
    for step in run.steps[:index]:
        _step(session, step, cache)
    step = run.steps[index]
    return session.read(names, inputs(step, step.rows), cache)


def _step(session: Session, step: ProbeCall, cache: HostCache) -> NDArray[np.float32]:
    return session.step(inputs(step, step.asked), cache)


def inputs(step: ProbeCall, rows: NDArray[np.int64]) -> StepInputs:
    """Write a call as a decoder takes it; `rows` are the positions that get logits, [R]."""
    return StepInputs(step.ids, step.past, rows, step.lengths, step.text_lengths, step.adapters)
