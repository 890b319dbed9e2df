"""Prove what a traced graph makes of positions, at all of them: rotary angles and attention windows, without a run.

The graph's own nodes turn positions into rows of its rotary tables; they run alone, on every position of the context.
The model's own rotary module gives the angles that must stand there, and the model's own mask function says what a
query sees. Both are taken from a run of transformers, layer by layer: nothing is read off the graph but what is on
trial.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from llmforge.base.errors import UnsupportedError, VerificationError
from llmforge.ir import graph, interface
from llmforge.ir.operators import canonical, standard
from llmforge.ir.subgraph import Index, extract
from llmforge.trace.export.reference import Given, OwnMask, RotaryCall
from llmforge.verification import probe
from llmforge.verification.subgraph_session import SubgraphSession

TOLERANCE = 1e-5  # of a cos or sin: the model's code and the table's differ by the last bits of fp32
CHUNK = 8192  # positions at a time
CHUNKS = 3  # chunks of attention whose ends are looked at
NEAR = 2  # positions on both sides of a border
HINT = "this is a bug in llmforge's support of this architecture; nothing was built"

Angles = tuple[NDArray[np.float32], NDArray[np.float32]]


def borders(named: Collection[int], context: int) -> list[int]:
    """List the positions around each of `named`, and those at the beginning and the end of `context`."""
    near = {at + step for at in (*named, context) for step in range(-NEAR, NEAR + 1)}
    return sorted({at for at in {*range(16), *near} if 0 <= at < context})


def require_angles(
    model: ir.Model,
    layers: Mapping[int, Sequence[ir.Node]],
    given: Sequence[Given],
    context: int,
    named: Collection[int],
) -> None:
    """Hold the rotary angles of each layer against those that the model's own module computes.

    `layers` has the nodes of each layer, `given` what the model hands it; `named` are the lengths that the
    configuration names. Of a text as long as the context, all positions count; of texts up to each border and beyond,
    those around the borders.

    Raises:
        VerificationError: angles differ; names the layer, the position and the length of the text.
    """
    places = _Places(model, context, borders(named, context))
    proven: set[tuple[object, ...]] = set()
    for index, nodes in layers.items():
        calls = given[index].rotary
        for node in nodes:
            rotary = standard.RotaryEmbedding.of(node)
            if rotary is None or not calls:
                continue
            what = (rotary.cos, rotary.sin, rotary.position_ids, *(id(call.outputs) for call in calls))
            if what not in proven:
                _require(rotary, calls, places, str(node.name))
                proven.add(what)


def _require(rotary: standard.RotaryEmbedding, calls: Sequence[RotaryCall], places: _Places, where: str) -> None:
    cos, sin = (np.asarray(graph.tensor(value).numpy()) for value in (rotary.cos, rotary.sin))
    for length, positions in places.texts():
        rows = places.of(rotary.position_ids, length, positions)
        inside = (rows >= 0) & (rows < len(cos))
        if not inside.all():
            at = int(positions[np.argmin(inside)])
            raise VerificationError(
                f"{where} turns position {at} of a text of {length} tokens by row {rows[at]} of its table, which has "
                f"{len(cos)}",
                hint=HINT,
            )
        different = [_first_apart((cos[rows], sin[rows]), call, length, positions) for call in calls]
        if None not in different:
            at = max(each for each in different if each is not None)
            raise VerificationError(
                f"{where} turns position {at} of a text of {length} tokens by other angles than the model's rotary "
                f"embedding does",
                hint=HINT,
            )


def _first_apart(got: Angles, call: RotaryCall, length: int, positions: NDArray[np.int64]) -> int | None:
    """Return the first position whose angles differ from those that `call` gives; None: they are equal."""
    for begin in range(0, len(positions), CHUNK):
        asked = positions[begin : begin + CHUNK]
        whole = np.append(asked, length - 1)  # what the module computes may depend on the last position
        expected = tuple(part[:-1] for part in call.angles(whole))
        apart = np.ones(len(asked), np.bool_)
        for layout in _layouts(expected, got[0].shape[1]):
            differ = np.zeros(len(asked), np.bool_)
            for made, wanted in zip(got, layout, strict=True):
                differ |= ~(np.abs(made[begin : begin + CHUNK] - wanted) <= TOLERANCE).all(-1)
            if not differ.any():
                apart[:] = False
                break
            apart &= differ
        if apart.any():
            return int(asked[np.argmax(apart)])
    return None


def _layouts(angles: tuple[NDArray[np.float32], ...], width: int) -> Iterator[tuple[NDArray[np.float32], ...]]:
    """Take one number a rotated pair, of angles that may hold each twice, side by side or far apart."""
    if angles[0].shape[1] == width:
        yield angles
    if angles[0].shape[1] == 2 * width:
        yield tuple(part[:, :width] for part in angles)
        yield tuple(part[:, ::2] for part in angles)


class _Places:
    """Evaluates what a graph computes from positions and lengths of texts alone."""

    def __init__(self, model: ir.Model, context: int, near: Sequence[int]) -> None:
        self._index = Index.of(model)
        self._context, self._near = context, np.array(near, np.int64)
        self._sessions: dict[str, SubgraphSession] = {}
        names = {value.name for value in model.graph.inputs}
        self._lengths = [int(at) + 1 for at in near] if interface.TEXT_LENGTHS in names else []

    def texts(self) -> Iterator[tuple[int, NDArray[np.int64]]]:
        """List lengths of texts, and the positions of each that count."""
        yield self._context, np.arange(self._context)
        for length in self._lengths:
            yield length, self._near[self._near < length]

    def of(self, value: ir.Value, length: int, positions: NDArray[np.int64]) -> NDArray[np.int64]:
        """Compute the row that `value` [B, S] has for each of `positions` [n] in a text of `length` tokens."""
        if value.producer() is None:
            if value.name != interface.POSITION_IDS:
                raise VerificationError(f"rotary positions are the input {value.name}", hint=HINT)
            return positions
        name = str(value.name)
        if name not in self._sessions:
            subgraph = extract(self._index, [name], ())
            self._sessions[name] = SubgraphSession(subgraph, probe.InitializerArrays(), 1)
        session = self._sessions[name]
        if strange := set(session.inputs) - {interface.POSITION_IDS, interface.TEXT_LENGTHS, interface.INPUT_IDS}:
            raise UnsupportedError(f"rotary positions follow from {', '.join(sorted(strange))}")
        step = probe.ProbeCall(positions[None] * 0, np.array([len(positions)]), np.zeros(1, np.int32))
        given = {interface.POSITION_IDS: positions[None], interface.TEXT_LENGTHS: np.array([length])}
        return np.asarray(session.run(step, given, {})[name][0])


def require_windows(
    layers: Mapping[int, Sequence[ir.Node]], given: Sequence[Given], context: int, named: Collection[int]
) -> set[int]:
    """Hold the attention window of each layer against the mask function that the model has for it.

    Return the windows of layers for which the model's own code gives no mask function.

    Raises:
        VerificationError: a query sees other tokens; names the layer.
    """
    unknown: set[int] = set()
    proven: set[tuple[OwnMask, int, int]] = set()
    for index, nodes in layers.items():
        for node in nodes:
            attention = next((kind(node) for kind in canonical.ATTENTIONS if kind.matches(node)), None)
            if attention is None:
                continue
            mask = given[index].mask
            if mask is None:
                unknown |= {attention.window, attention.chunk} - {0}
            elif (key := (mask, attention.window, attention.chunk)) not in proven:
                chunks = range(attention.chunk, min(context, CHUNKS * attention.chunk) + 1, attention.chunk or 1)
                asked = borders({*named, attention.window, *chunks}, context)
                for query in asked:
                    _require_row(mask, query, attention, str(node.name))
                proven.add(key)
    return unknown


def _require_row(
    mask: OwnMask, query: int, attention: canonical.Attention | canonical.LatentAttention, where: str
) -> None:
    """Hold what `query` sees in a window or chunk against what `mask` shows it."""
    keys, window, chunk = np.arange(query + 1), attention.window, attention.chunk
    sees = ((keys > query - window) | (window == 0)) & (keys >= (query - query % chunk if chunk else 0))
    shown = mask.shows(query)
    if not np.array_equal(sees, shown):
        raise VerificationError(
            f"{where} shows the token at position {query} {int(sees.sum())} tokens (window: {window or 'none'}, "
            f"chunk: {chunk or 'none'}); "
            f"the model shows it {int(shown.sum())}",
            hint=HINT,
        )
