"""Prove a pass on the subgraphs that it changed: both sides must make the same of the same numbers.

Each kind of subgraph (`changed_subgraphs`) runs at every place that a build promises (`promises`): steps of all
lengths, batches, both sides of every window and rotary border, the end of the context. A step at a far place costs no
more than a near one, because its caches are made up. Every other subgraph of a kind runs one small step with its own
weights: a product with random numbers shows any column that is not what it was.

Numbers at the edges are random, some of them a thousandth and some a thousand times the usual, with outliers and zeros,
and besides those what stands there when the graph before the pass reads text (`recorded`). Each token is held in units
of its own size, so that none hides behind a larger one.

Numbers that can never be negative, like the weights of a router, are not (`llmforge.ir.routing`). Where the graph
before makes no finite numbers of random ones, what stands in front of the subgraph can never make such: it, and each of
its kind, is made larger. Where two sides make finite numbers that differ, they differ.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, cached_property
from typing import Any

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from llmforge.ir import graph, interface, operators
from llmforge.ir.derived import Stored
from llmforge.ir.graph import is_constant
from llmforge.ir.interface import INPUT_IDS
from llmforge.ir.operators import contrib, cpu
from llmforge.ir.operators.standard import Gather
from llmforge.ir.subgraph import Index, extract
from llmforge.quantization import kv_cache
from llmforge.rewrite import cpu_attention, emulation, pruning
from llmforge.verification import changed_subgraphs, comparison, drawn_places, probe, promises
from llmforge.verification.changed_subgraphs import ChangedSubgraph
from llmforge.verification.drawn_places import Drawn, Extent
from llmforge.verification.probe import ProbeCall
from llmforge.verification.promises import Promises, SyntheticStep
from llmforge.verification.subgraph_session import Arrays, SubgraphSession, multiply_as_stored

WIDENED = 8  # how often a subgraph is made larger
CACHE_BYTES = 1 << 28  # of the caches of one side: what is further away is not run
_STATE_TOKENS = 64  # of a step through a state that random numbers make grow with every token
_PRODUCTS = 1e11  # of a step, at most: some seconds on two cores
_DRAWN_PRODUCTS = 3e11  # of all steps at drawn places, at most
_DRAWN_BYTES = 1 << 32  # of caches of all single tokens at drawn places, about: what is further away is not drawn
_SEED = 20_240_229
_CERTAINTY = 7.0  # an expert in e⁷ models is missed, where each is as likely as another
_PERIOD = (1 << 18) + 1  # numbers after which those that are fed come again: no power of two, like sizes of heads are
_SLOTS = 1021  # tokens after which those in the slots of a cache come again; a prime, too
_OUTLIER, _OUTLIERS = 30.0, 1 / 64  # size and share of the channels that are larger than others
_SCALES = np.array([1, 1e-3, 1e3, 1, 30, 1e-2, 0, 1, 100, 0.1], np.float32)  # of a step's tokens, in turn
# A rounding error that a subgraph itself makes large is told from a fault by what errors of its inputs become in it.
_NUDGE, _NUDGES = 2.0**-21, 8.0


@dataclass(frozen=True)
class Difference:
    """The place where a pass did not do what it declares."""

    what: str
    where: str
    is_outside: bool = False  # the graph before makes no finite numbers, either: these ones can never stand there


@dataclass(frozen=True)
class SubgraphProof:
    """What a proof of subgraphs ran, and the largest difference, in units of the token that differs."""

    places: int  # subgraphs that the pass changed
    kinds: int
    steps: int
    reach: int | None  # tokens that the longest step stood behind; None where nothing depends on that
    largest: float
    drawn: Drawn  # of the steps, those at places that nobody could foresee

    @property
    def names(self) -> tuple[str, ...]:
        """Say it in words."""
        kinds = f"{self.kinds} kinds" if self.kinds > 1 else "one kind"
        ran = f"{self.places} changed subgraphs of {kinds}, each with its own weights"
        behind = "" if self.reach is None else f", up to {self.reach} tokens"
        drawn = f", {self.drawn.steps} of them at drawn places{self.drawn.cut}" if self.drawn.steps else ""
        return ran, f"{self.steps} steps{behind}{drawn}"


@dataclass(frozen=True, eq=False)
class Made:
    """What both sides of a subgraph made of one step: the name of an output, before, after."""

    name: str
    before: NDArray[Any]
    after: NDArray[Any]


@dataclass(frozen=True, eq=False)
class Edges:
    """What a step feeds to both sides: values at the boundary, and the caches of each."""

    given: Arrays
    before: Arrays
    after: Arrays


class Pair:
    """Both sides of a changed subgraph in ONNX Runtime.

    Unless `bits` matter, weights are multiplied by as they are stored: to transpose them takes longer than the product.

    Raises:
        UnsupportedError: ONNX Runtime refuses a side.
    """

    def __init__(self, changed: ChangedSubgraph, threads: int, *, bits: bool = False) -> None:
        self.changed, self._threads, self._bits = changed, threads, bits
        self._open(changed)

    def load(self, member: ChangedSubgraph) -> None:
        """Take the weights of another subgraph of the kind."""
        if not (self.before.reloads and self.after.reloads):
            self.changed = member
            del self.before, self.after  # what they hold goes before the next is read
            self._open(member)
            return
        self.before.unload()
        self.after.unload()
        weights = probe.InitializerArrays()
        for session, model in zip((self.before, self.after), self._extract(member), strict=True):
            session.load(model, weights)

    def _open(self, changed: ChangedSubgraph) -> None:
        weights = probe.InitializerArrays()
        self.before, self.after = (
            SubgraphSession(model, weights, self._threads, fed_bytes=0) for model in self._extract(changed)
        )
        self.gives_rows = all(interface.LOGITS_ROWS in each.inputs for each in (self.before, self.after))

    def _extract(self, changed: ChangedSubgraph) -> tuple[ir.Model, ir.Model]:
        models = changed.extract()
        if not self._bits:
            for model in models:
                multiply_as_stored(model)
        return models

    @cached_property
    def has_places(self) -> bool:
        """Whether what it makes may depend on where a step stands."""
        return bool(self.changed.reads & interface.PLACES) or self.has_caches

    @property
    def has_caches(self) -> bool:
        """Whether a side reads the caches of earlier steps."""
        return self.before.has_caches or self.after.has_caches

    def cache_scale(self, name: str) -> NDArray[np.float32] | None:
        """Return the scales of the int8 cache `name` of the graph after; None where it is none."""
        for node in self.changed.after_nodes:
            view = operators.view(node)
            if isinstance(view, contrib.GroupQueryAttention | cpu.CpuGroupQueryAttention):
                for past, scale in ((view.past_key, view.k_scale), (view.past_value, view.v_scale)):
                    if past.name == name and scale is not None:
                        return graph.tensor(scale).numpy()
        return None

    def heads_left(self, name: str, before: NDArray[Any]) -> NDArray[Any]:
        """Return the KV heads of the cache `name` of the graph before that the graph after has, too."""
        kept, had = (pruning.kept_heads(side.model).get(name) for side in (self.changed.after, self.changed.before))
        if kept is None or kept == had:
            return before
        return before[:, list(kept)]

    def fill_slots(self, name: str, after: NDArray[np.uint8], before: NDArray[np.float32]) -> bool:
        """Store the fp32 cache `before` in the slots of the cache `name` of the graph after, and there as it is read.

        Some tokens come again and again. False: the cache has no slots.
        """
        found = (cpu_attention.slots_of(node, name) for node in self.changed.after_nodes)
        if (slots := next((each for each in found if each is not None), None)) is None:
            return False
        form, scale, dim = slots
        scales = None if scale is None else graph.tensor(scale).numpy()
        stored = kv_cache.write(before[:1, :, :_SLOTS], form, scales)
        read = kv_cache.read(stored, form, dim, scales)
        for at in range(0, before.shape[2], _SLOTS):
            count = min(_SLOTS, before.shape[2] - at)
            after[:, :, at : at + count] = stored[:, :, :count]
            before[:, :, at : at + count] = read[:, :, :count]
        return True

    def run(self, place: SyntheticStep, edges: Edges) -> Iterator[Made]:
        """Run both sides."""
        step, caches = place.step, (dict(edges.before), dict(edges.after))
        rows = place.rows if self.gives_rows else None  # else a side may give all of them
        given = edges.given
        if interface.ADAPTER_IDS in {*self.before.inputs} ^ {*self.after.inputs}:  # one side knows no adapters
            given = {**given, interface.ADAPTER_IDS: np.zeros(place.batch, np.int64)}
        results = (
            self.before.run(step, given, caches[0], rows),
            self.after.run(step, given, caches[1], rows),
        )
        filled = step.past + step.lengths
        for name in self.changed.outputs:
            past = interface.past_of(name)
            if past in caches[0] and past in caches[1]:
                caches[0][past] = self.heads_left(past, caches[0][past])
                before, after = ([*probe.real(past, cache[past], filled)] for cache in caches)
                yield from (Made(name, b, a) for b, a in zip(before, after, strict=True))
                continue
            b, a = (comparison.valid(result[name], step) for result in results)
            if b is not None and a is not None:
                yield Made(name, b, a)


def prove(
    before: ir.Model,
    after: ir.Model,
    promised: Promises,
    *,
    tolerance: float,
    threads: int,
    seed: int,
    text: NDArray[np.int64] | None = None,
) -> SubgraphProof | Difference:
    """Hold every subgraph where `after` differs from `before` to `tolerance`, in sizes of a token; 0: to the bit.

    `seed` draws places. `text`: token ids; values at the edges are also those that the graph before makes of it. None:
    of random tokens.

    Raises:
        UnsupportedError: ONNX Runtime refuses a subgraph, or fails to run it.
    """
    index = Index.of(before)
    found = changed_subgraphs.differences(index, Index.of(after))
    return prove_all(found, index, promised, tolerance=tolerance, threads=threads, seed=seed, text=text)


def prove_all(
    found: Sequence[ChangedSubgraph],
    index: Index,
    promised: Promises,
    *,
    tolerance: float,
    threads: int,
    seed: int,
    text: NDArray[np.int64] | None = None,
) -> SubgraphProof | Difference:
    """Hold the subgraphs `found` to `tolerance`, as `prove` does; `index` is of the graph before."""
    kinds = by_kind(found)
    names = {name for alike in kinds for name in alike[0].inputs}
    known = record(index, names, _tokens(promised) if text is None else text, threads)
    largest, proven, steps, drawn, reach = 0.0, 0, 0, Drawn(), None
    pending = [(alike, share, 0) for alike, share in shares(kinds, seed)]
    while pending:
        alike, share, level = pending.pop(0)
        trial = _ToleranceTrial(promised, tolerance, threads, known, share)
        outcome = trial.hold(alike)
        if isinstance(outcome, float):
            largest, proven = max(largest, outcome), proven + 1
            steps, drawn = steps + trial.steps, drawn + trial.drawn
            reach = trial.reach if reach is None else max(reach, trial.reach or 0)
        elif level == WIDENED or not alike[0].inputs or not outcome.is_outside:
            return outcome
        else:
            wider = by_kind([each.widened() for each in alike])
            pending += [(each, share, level + 1) for each, share in shares(wider, seed)]
    return SubgraphProof(len(found), proven, steps, reach, largest, drawn)


def by_kind(found: Sequence[ChangedSubgraph]) -> list[list[ChangedSubgraph]]:
    """Group subgraphs that are one function of their weights; one like no other is a group of its own."""
    kinds: dict[str, list[ChangedSubgraph]] = {}
    for number, changed in enumerate(found):
        kinds.setdefault(changed.kind or f"alone {number}", []).append(changed)
    return list(kinds.values())


def shares(
    kinds: Sequence[list[ChangedSubgraph]], seed: int
) -> Iterator[tuple[list[ChangedSubgraph], drawn_places.Share]]:
    """Divide drawn places among kinds that differ in floating-point constants alone, as scales of layers are."""
    forms = [alike[0].form for alike in kinds]
    seen: Counter[str | None] = Counter()
    for number, (alike, form) in enumerate(zip(kinds, forms, strict=True)):
        if form is None:
            yield alike, drawn_places.Share(seed + number)
            continue
        yield alike, drawn_places.Share(seed + forms.index(form), seen[form], forms.count(form))
        seen[form] += 1


def _tokens_to_choose(changed: ChangedSubgraph) -> int:
    """Count the tokens, two at least, among which no expert is likely not to be chosen by one."""
    experts, each = changed.tokens_per_expert
    return max(2, math.ceil(each * (math.log(experts) + _CERTAINTY))) if experts else 2


def _tokens(promised: Promises) -> NDArray[np.int64]:
    count = min(TOKENS, promised.context)
    return np.random.default_rng(_SEED).integers(0, promised.vocabulary, count, np.int64)


@dataclass
class _ToleranceTrial:
    """Holds the subgraphs of one kind to a tolerance."""

    promised: Promises
    tolerance: float
    threads: int
    known: Recorded
    share: drawn_places.Share
    steps: int = 0
    drawn: Drawn = field(default_factory=Drawn)
    reach: int | None = None

    def hold(self, alike: Sequence[ChangedSubgraph]) -> float | Difference:
        """Return the largest difference, or the first that is too large."""
        pair = Pair(alike[0], self.threads, bits=self.tolerance == 0.0)
        largest = 0.0
        for place, given in self._places(pair):
            self.steps += 1
            found = self._compare(pair, place, given, alike[0].outputs)
            if isinstance(found, Difference):
                return found
            largest = max(largest, found)
        few = promises.few(self.promised, _tokens_to_choose(pair.changed), ends=pair.has_places and not pair.has_caches)
        for member in alike[1:]:
            pair.load(member)
            for place in few:
                found = self._compare(pair, place, {}, member.outputs)
                if isinstance(found, Difference):
                    return found
                largest = max(largest, found)
        if self.tolerance == 0.0:
            for member in alike:
                if (what := member.other_numbers) is not None:
                    return Difference(f"{what} differs by too little for a step to show it,", "its numbers")
        return largest

    def _places(self, pair: Pair) -> Iterator[tuple[SyntheticStep, Mapping[str, NDArray[Any]]]]:
        """List the steps that show the kind, and what was recorded at the edges of each."""
        if pair.has_places:
            self.reach = reach_of(pair, self.promised)
        if self.known.covers(pair.changed.inputs):
            yield self.known.place, self.known.values
        for place in places(pair, self.promised, self.reach):
            yield place, {}
        if (extent := extent_of(pair, self.promised, self.reach)) is not None:
            drawn = [*drawn_places.draw(self.promised, extent, self.share)]
            self.drawn = Drawn.of(self.promised, extent, len(drawn))
            yield from ((place, {}) for place in drawn)

    def _compare(
        self, pair: Pair, place: SyntheticStep, given: Mapping[str, NDArray[Any]], names: Sequence[str]
    ) -> float | Difference:
        edges = made_up(pair, place, given)
        calls = dict(zip(pair.changed.outputs, names, strict=True))
        largest, moved = 0.0, None
        made = list(pair.run(place, edges))
        for at, each in enumerate(made):
            b, a = each.before, each.after
            if not place.scaled and pair.changed.inputs and not np.isfinite(b).all():
                return Difference(f"{calls[each.name]} is not finite,", place.where, is_outside=True)
            units = comparison.in_rows(b, a, exact=self.tolerance == 0.0)
            if units.max(initial=0.0) > self.tolerance and self.tolerance and edges.given:
                if moved is None:
                    moved = list(pair.run(place, _nudged(edges)))
                noise = comparison.in_rows(b, moved[at].before)
                units = np.where(units > np.maximum(self.tolerance, _NUDGES * noise), units, 0.0)
            worst = float(units.max(initial=0.0))
            if worst > self.tolerance:
                size = f", {worst:.3g} of a token's size" if self.tolerance else ""
                what = f"{calls[each.name]} differ by {comparison.largest(b, a):.3g}{size}"
                return Difference(f"{what}, allowed is {self.tolerance:.3g},", place.where)
            largest = max(largest, worst)
        return largest


def reach_of(pair: Pair, promised: Promises) -> int:
    """Return how many tokens of the context caches of a bounded size hold."""
    return max(2, min(promised.context, _slots(pair)))


def places(pair: Pair, promised: Promises, reach: int | None, tokens: int | None = None) -> Iterator[SyntheticStep]:
    """List the steps that `pair` must run, of at most `tokens`; `reach` is None where places mean nothing to it."""
    longest = min(tokens or promised.chunk, _most_tokens(pair, promised))
    yield from promises.near(promised, max(longest, 16))
    if reach is not None:
        rows = max(1, _slots(pair) // reach)
        yield from promises.far(promised, reach, rows)
        if interface.TEXT_LENGTHS in pair.changed.reads:
            yield from promises.inside(promised, reach)
        if pair.changed.has_new_tables:
            yield from promises.every_position(promised, reach)
    if interface.INPUT_IDS in pair.changed.reads:
        yield from promises.every_token(promised)


def extent_of(pair: Pair, promised: Promises, reach: int | None) -> Extent | None:
    """Say how far `pair` runs at drawn places; None: each token is treated by itself, at any place alike."""
    if pair.changed.is_token_wise:
        return None
    most = int(_DRAWN_PRODUCTS / max(1, pair.changed.size_bytes // 8))  # tokens of all steps
    tokens = min(_most_tokens(pair, promised), promised.context, max(16, 2 * most // drawn_places.DRAWS))
    if reach is not None:
        slot = max(1, CACHE_BYTES // _slots(pair))
        reach = min(reach, 2 * _DRAWN_BYTES // (drawn_places.DRAWS * slot))
    return Extent(reach, tokens, _slots(pair), most)


def _slots(pair: Pair) -> int:
    """Count the tokens that caches of a bounded size hold."""
    return CACHE_BYTES // max(1, pair.before.slot_bytes, pair.after.slot_bytes)


def _most_tokens(pair: Pair, promised: Promises) -> int:
    """Count the tokens that a step has at most, so that it takes seconds."""
    tokens = min(promised.chunk, int(_PRODUCTS / max(1, pair.changed.size_bytes // 8)))
    if interface.LOGITS in pair.changed.outputs and not pair.gives_rows:
        tokens = min(tokens, _STATE_TOKENS)  # each costs the vocabulary
    if pair.before.has_states or pair.after.has_states:
        tokens = min(tokens, _STATE_TOKENS)
    return tokens


def made_up(pair: Pair, place: SyntheticStep, given: Mapping[str, NDArray[Any]], *, coarse: bool = False) -> Edges:
    """Draw the numbers that a step is fed; those `given` are taken as they are. `coarse`: with 8 bits of mantissa."""
    rng = np.random.default_rng(place.seed)
    values = {}
    for name, value in pair.changed.inputs.items():
        drawn = given[name] if name in given else _drawn(value, place, rng)
        if pair.changed.never_negative(name):
            drawn = np.abs(drawn)
        values[name] = _coarse(drawn) if coarse else drawn
    before = pair.before.allocate(place.batch, place.capacity)
    after = pair.after.allocate(place.batch, place.capacity)
    for name, buffer in before.items():
        _fill(buffer, rng)
        if place.alike:
            buffer[1:] = buffer[:1]
        if coarse:
            buffer[...] = _coarse(buffer)
        if name not in after:
            continue
        if after[name].dtype == buffer.dtype:
            after[name] = np.array(pair.heads_left(name, buffer))  # a cache that grows is written in place
        elif pair.fill_slots(name, after[name], buffer):
            continue
        elif (scale := pair.cache_scale(name)) is not None:
            after[name][...] = np.clip(np.round(buffer * 40), -127, 127)
            buffer[...] = after[name] * scale
    return Edges(values, before, after)


def _drawn(value: ir.Value, place: SyntheticStep, rng: np.random.Generator) -> NDArray[Any]:
    """Draw numbers for a value at the boundary: normal ones, some channels larger; tokens of all sizes where scaled."""
    step = place.step
    rows = step.ids.shape[1] if place.rows is None else len(place.rows)
    sizes = {"batch": place.batch, "sequence": step.ids.shape[1], "rows": rows, "capacity": place.capacity}
    dims = graph.dims(value) or ()
    dtype = np.dtype(np.float32) if value.dtype in emulation.HALVES else graph.dtype(value).numpy()
    shape = [dim if isinstance(dim, int) else sizes[str(dim)] for dim in dims]
    drawn = np.empty(shape, np.float32)
    _fill(drawn, rng)
    if place.alike and dims[:2] in (("batch", "sequence"), ("batch", "rows")):
        drawn[...] = drawn[:1, :1]
    if place.scaled and len(shape) > 1 and dims[1] in ("sequence", "rows"):
        channels = max(1, round(shape[-1] * _OUTLIERS))
        drawn[..., rng.choice(shape[-1], channels, replace=False)] *= np.float32(_OUTLIER)
        drawn *= np.resize(_SCALES, shape[1]).reshape(1, -1, *[1] * (len(shape) - 2))
    return drawn.astype(dtype)


def _fill(buffer: NDArray[Any], rng: np.random.Generator) -> None:
    """Fill a cache, whatever its dtype, from a random place of the same numbers on."""
    at = int(rng.integers(_PERIOD))
    if np.issubdtype(buffer.dtype, np.integer):
        numbers = _codes().astype(buffer.dtype, copy=False)
    else:
        numbers = _normals().astype(buffer.dtype, copy=False)
    flat = buffer.reshape(-1)  # in place: a cache may be as large as `CACHE_BYTES`
    flat[: _PERIOD - at] = numbers[at : at + flat.size]
    for begin in range(_PERIOD - at, flat.size, _PERIOD):
        flat[begin : begin + _PERIOD] = numbers[: flat.size - begin]


@cache
def _normals() -> NDArray[np.float32]:
    return np.random.default_rng(_SEED).standard_normal(_PERIOD, np.float32)


@cache
def _codes() -> NDArray[np.int8]:
    return np.random.default_rng(_SEED).integers(-100, 101, _PERIOD).astype(np.int8)


def _coarse(array: NDArray[Any]) -> NDArray[Any]:
    """Round to numbers that fp16 and bf16 both hold; those of 8 bits, and codes, stay as they are."""
    if array.dtype.itemsize == 1 or (not np.issubdtype(array.dtype, np.floating) and array.dtype.name != "bfloat16"):
        return array
    bits = np.array(array, np.float32).view(np.uint32)
    bits += 0x8000
    bits &= 0xFFFF0000
    rounded: NDArray[Any] = bits.view(np.float32).astype(array.dtype)
    return rounded


def _nudged(edges: Edges) -> Edges:
    """Move every number that is fed by an error of rounding."""
    rng = np.random.default_rng(_SEED)
    return Edges(
        {name: _nudge(array, rng) for name, array in edges.given.items()},
        {name: _nudge(array, rng) for name, array in edges.before.items()},
        edges.after,
    )


def _nudge(array: NDArray[Any], rng: np.random.Generator) -> NDArray[Any]:
    if not np.issubdtype(array.dtype, np.floating):
        return array
    signs = rng.integers(0, 2, min(array.size, _PERIOD), np.int8) * 2 - 1
    moved: NDArray[Any] = (array * (1 + np.resize(signs, array.shape) * np.float32(_NUDGE))).astype(array.dtype)
    return moved


TOKENS = 24  # of the text that is read
SHALLOW_BYTES = 1 << 28  # of weights that are read for it: of a large model, its first layers


@dataclass(frozen=True, eq=False)
class Recorded:
    """Values by name, as they were in a prefill: the step `place`."""

    place: SyntheticStep
    values: Mapping[str, NDArray[Any]] = field(repr=False)

    def covers(self, names: Collection[str]) -> bool:
        """Say whether each of `names` was recorded, and there are any."""
        return bool(names) and all(name in self.values for name in names)


def record(index: Index, names: Collection[str], text: NDArray[np.int64], threads: int) -> Recorded:
    """Run the graph on the first tokens of `text`, as far as its weights are few, and keep the values `names`.

    Raises:
        UnsupportedError: ONNX Runtime refuses the graph.
    """
    ids = text[None, :TOKENS]
    place = SyntheticStep("text", ProbeCall(ids, np.array([ids.shape[1]]), np.zeros(1, np.int32)))
    found = _looked_up(index, ids)
    values = {name: found[name] for name in names if name in found}
    wanted = sorted(set(names) - values.keys(), key=lambda name: index.position[graph.producer(index.values[name])])
    while wanted:
        model = extract(index, wanted, found.keys())
        if graph.weight_bytes(model) <= SHALLOW_BYTES:
            session = SubgraphSession(model, probe.InitializerArrays(), threads)
            made = session.run(place.step, found, session.allocate(1, place.capacity))
            values |= {name: made[name] for name in wanted}
            break
        wanted = wanted[: len(wanted) // 2]
    return Recorded(place, values)


def _looked_up(index: Index, ids: NDArray[np.int64]) -> dict[str, NDArray[Any]]:
    """Look `ids` up in stored embeddings, of which the rest is not read."""
    found = {}
    for lookup in Gather.all(index.model):
        tensor = lookup.data.const_value
        if lookup.indices.name != INPUT_IDS or lookup.axis != 0 or not is_constant(lookup.data):
            continue
        if isinstance(tensor, Stored) and tensor.is_matrix and not tensor.transposed:
            found[str(lookup.output.name)] = tensor.stored()[ids].astype(np.float32)
    return found
