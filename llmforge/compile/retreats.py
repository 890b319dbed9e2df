"""Retreats: where a pass exceeds its budget, the layers that it lost most in get more bits, and the passes run again.

Which layers, is chosen by what keeping each would gain (`attribution.layer_shares`): a bit more leaves a quarter of
what rounding costs, for it halves the step, and what gains most for its bytes goes first, until the budget is predicted
to be kept. What is chosen becomes an option of the pass, so that the recipe of the artifact builds the same at once.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from llmforge.compile import attribution
from llmforge.compile.lossy_parts import LossyMatrix, LossyPart, LossyStep, literal, literal_layer, matrices_of
from llmforge.compile.state import CompileState
from llmforge.gates.records import PassRecord, RetreatRecord
from llmforge.ir import graph
from llmforge.metrics import units
from llmforge.quantization import allocation
from llmforge.quantization.grid import QMOE_BITS, Grid
from llmforge.rewrite.pass_base import Pass, Retreat
from llmforge.runtime.config import physical_cores

# Of the budget, that is predicted to be lost at most after a round; each may calibrate again. SmolLM2-135M lost more
# than was predicted: shares are measured on few tokens, and the largest of them are large by chance, too.
AIMS = (0.85, 0.7, 0.5)
LEAST_COME_TRUE = 0.25  # of what a round was predicted to gain, that the next one reckons with
LEFT_BY_A_BIT = 0.25  # of a loss: it goes with the mean square of rounding errors
ALL_LAYERS = "all layers"  # which retreat together where a graph is too large to tell them apart


@dataclass(frozen=True, eq=False)
class RetreatingWeight:
    """A weight as the pass stores it: one matrix [rows, k], of one or several parameters, or of all experts."""

    parameters: Sequence[str]
    rows: int
    k: int
    grid: Grid
    of_experts: bool = False

    @classmethod
    def of(cls, matrix: LossyMatrix, parameters: Sequence[str]) -> RetreatingWeight:
        """Describe what a pass has quantized."""
        rows = math.prod(matrix.tensor.shape.numpy()) // matrix.k
        return cls(parameters, rows, matrix.k, matrix.grid, matrix.order is not None)

    def allows(self, bits: int) -> bool:
        """Say whether it can be stored in so many bits, if it has fewer."""
        if bits <= self.grid.bits:
            return True
        wanted = self.grid.of_bits(bits)
        return bits in QMOE_BITS if self.of_experts else allocation.fits([self.rows], self.k, wanted)

    def size_bytes(self, bits: int) -> int:
        """Count its bytes in so many bits, or in its own where it has more."""
        return allocation.size_bytes(self.rows, self.k, self.grid.of_bits(max(bits, self.grid.bits)))


@dataclass(eq=False)
class RetreatingLayer:
    """A layer, embedding or head, and the bits that it is to get."""

    name: str
    weights: Sequence[RetreatingWeight]
    lost: float  # nats a token, its part of what the pass lost
    share: float | None  # of what the pass lost, that keeping it alone would gain; None: it was not measured
    bits: int = field(init=False)

    def __post_init__(self) -> None:
        self.bits = self.had = min(each.grid.bits for each in self.weights)

    def next_bits(self, wanted: Retreat) -> int | None:
        """Find the next bits that there are kernels for; None: there are none."""
        possible = (bits for bits in wanted.after(self.bits) if all(each.allows(bits) for each in self.weights))
        return next(possible, None)

    def bytes_at(self, bits: int) -> int:
        """Count the bytes of its weights, none with fewer than so many `bits`."""
        return sum(each.size_bytes(bits) for each in self.weights)

    def lost_at(self, bits: int) -> float:
        """Predict what it loses in so many bits, nats a token."""
        return self.lost * LEFT_BY_A_BIT ** (bits - self.had)

    def layer_bits(self) -> dict[str, int]:
        """Write its bits as an option of the pass: for all of the layer, or for those weights that have fewer."""
        finer = [each for each in self.weights if each.grid.bits < self.bits]
        whole = not any(each.grid.bits > self.bits for each in self.weights)
        return {(literal_layer if whole else literal)(name): self.bits for each in finer for name in each.parameters}


@dataclass(frozen=True, eq=False)
class ChosenRetreat:
    """The layers that get more bits; none, and `why_not`, where that would not keep the budget."""

    layers: Sequence[RetreatingLayer]
    predicted: float  # nats a token, that the pass loses with them
    why_not: str = ""


def retreat(state: CompileState, done: PassRecord, lossy: LossyStep) -> Pass | None:
    """Return the last pass that ran with more bits for its worst layers, so that all passes run again; None: it stays.

    What is chosen, or why nothing is, is written into `state`.
    """
    wanted, number = lossy.step.may_retreat, lossy.number
    if done.excess is None or wanted is None:
        return None
    before = state.retreats.get(number, ())
    tried = len({each.round for each in before})
    if tried == len(AIMS):
        state.stays[number] = f"no more than {tried} rounds are tried"
        return None
    state.clock.stage(f"Choose layers of {done.name} to retreat")
    layers = _layers(state, done, lossy)
    chosen = choose(layers, done, wanted, _stored_bytes(state), aim=AIMS[tried], comes_true=_came_true(before, done))
    if not chosen.layers:
        state.stays[number] = chosen.why_not
        return None
    state.retreats[number] = (*before, *_records(chosen, done, tried + 1))
    given: dict[str, int] = {}
    for each in chosen.layers:
        given |= each.layer_bits()
    return lossy.step.retreated(given)


def as_built(steps: Sequence[Pass], built: Mapping[str, Any]) -> tuple[Pass, ...]:
    """Return passes of a recipe with the bits that their layers have in an artifact, whose recipe is `built`."""
    made: list[Pass] = []
    for step, entry in itertools.zip_longest(steps, built.get("passes") or ()):
        given = (entry or {}).get(step.name) if step is not None else None
        if given and step.may_retreat is not None:
            made.append(step.retreated(given.get("layer_bits") or {}))
        elif step is not None:
            made.append(step)
    return tuple(made)


def choose(
    layers: Sequence[RetreatingLayer],
    done: PassRecord,
    wanted: Retreat,
    stored_bytes: int,
    *,
    aim: float = AIMS[0],
    comes_true: float = 1.0,
) -> ChosenRetreat:
    """Choose which `layers` get more bits, so that the pass loses an `aim` of its budget within the bytes `wanted`.

    All weights take `stored_bytes` now. Of what is predicted to be gained, so much of 1 `comes_true`.
    """
    found = done.verification
    assert found.kld_mean is not None
    assert found.budget is not None
    lost, room, limited = found.kld_mean, wanted.max_bytes - stored_bytes, False
    while lost > aim * found.budget:
        steps: list[tuple[float, float, int, RetreatingLayer, int]] = []
        for each in layers:
            if (bits := each.next_bits(wanted)) is not None:
                more = each.bytes_at(bits) - each.bytes_at(each.bits)
                gain = comes_true * (each.lost_at(each.bits) - each.lost_at(bits))
                limited |= more > room
                if more <= room and gain > 0:
                    steps.append((gain / max(more, 1), gain, more, each, bits))
        if not steps:
            break
        _, gain, more, best, bits = max(steps, key=lambda step: step[:2])
        best.bits, lost, room = bits, lost - gain, room - more
    moved = [each for each in layers if each.bits > each.had]
    if lost <= found.budget:
        return ChosenRetreat(moved, lost)
    allowed = f"retreat.max_bytes, {units.size(wanted.max_bytes)}, allows" if limited else "retreat.bits allow"
    least = f"with all that {allowed}, {lost:.2g} nats are predicted" if moved else f"{allowed} no more bits"
    return ChosenRetreat((), lost, least)


def _came_true(before: Sequence[RetreatRecord], done: PassRecord) -> float:
    """Say how much of what the last round was predicted to gain it has gained; all of it where there was none."""
    if not before:
        return 1.0
    last, now = before[-1], done.verification.kld_mean
    assert now is not None
    return min(max((last.kld_mean - now) / (last.kld_mean - last.predicted), LEAST_COME_TRUE), 1.0)


def _layers(state: CompileState, done: PassRecord, lossy: LossyStep) -> list[RetreatingLayer]:
    """Find the layers of a pass, and what each of them loses."""
    found = done.verification.kld_mean
    assert found is not None
    threads = state.recipe.engine.threads or physical_cores()
    shares = attribution.layer_shares(lossy, state.texts.of_documents(), state.clock, threads=threads)
    initializers = lossy.before.graph.initializers
    weights = {
        name: RetreatingWeight.of(matrix, graph.sources(initializers[name]) or [name])
        for name, matrix in matrices_of(lossy).items()
    }
    gained = sum(max(each.share, 0.0) for each in shares)
    if not gained:
        return [RetreatingLayer(ALL_LAYERS, [*weights.values()], found, None)]
    # Together they gain all that was lost, whatever each gains alone: errors of layers add to each other.
    return [
        RetreatingLayer(each.name, _of(each.part, weights), max(each.share, 0.0) / gained * found, each.share)
        for each in shares
    ]


def _of(part: LossyPart, weights: Mapping[str, RetreatingWeight]) -> list[RetreatingWeight]:
    return [weights[name] for name in sorted({name for name, *_ in part.leaves})]


def _records(chosen: ChosenRetreat, done: PassRecord, number: int) -> Iterator[RetreatRecord]:
    """Write down which layers retreat, and why."""
    found = done.verification
    for each in chosen.layers:
        yield RetreatRecord(
            round=number,
            layer=each.name,
            before=each.had,
            after=each.bits,
            share=each.share,
            kld_mean=found.kld_mean or 0.0,
            budget=found.budget or 0.0,
            predicted=chosen.predicted,
        )


def _stored_bytes(state: CompileState) -> int:
    """Count the bytes of all weights of the checkpoint as they are stored now, tables of positions apart."""
    fewer = graph.weight_bytes(state.traced) - graph.weight_bytes(state.model)
    return 4 * state.checkpoint.parameters - fewer
