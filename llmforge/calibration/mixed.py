"""Choose a format for each weight where bytes are limited, by what each format loses on calibration text.

Some documents are held out. On the others, a calibration measures every format of every weight, and a knapsack takes
those that lose least. They are kept only if a model that was quantized so has a smaller KLD on the text held out than
one whose linears all have one format, the best that the budget has room for; else that one is taken.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np
import torch

from llmforge.base.errors import DataError, UsageError
from llmforge.calibration.skeleton import Skeleton
from llmforge.checkpoint import Checkpoint
from llmforge.checkpoint.text import TokenWindow
from llmforge.quantization import allocation
from llmforge.quantization.allocation import FormatOption
from llmforge.quantization.grid import Grid
from llmforge.quantization.grids import Float32, QuantizedMatrix, dequantize
from llmforge.quantization.methods.base import InputStatistic, LayerInputs, Method
from llmforge.quantization.statistics import WeightDemand

Names = tuple[str, ...]


@dataclass(eq=False)
class Losses:
    """What the formats `linears` and `tables` cost: choices by the weights that share one, in the order of formats.

    A weight of which no gradients are known is not here, nor a format that it cannot have.
    """

    linears: Sequence[Grid]
    tables: Sequence[Grid]
    choices: dict[Names, dict[Grid, FormatOption]] = field(default_factory=dict)
    of_tables: dict[str, dict[Grid, FormatOption]] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """Write what was measured as JSON has it."""

        def listed(choices: Mapping[Grid, FormatOption]) -> list[Any]:
            return [[asdict(grid), choice.size_bytes, choice.loss] for grid, choice in choices.items()]

        return {
            "linears": [[list(names), listed(choices)] for names, choices in self.choices.items()],
            "tables": [[name, listed(choices)] for name, choices in self.of_tables.items()],
        }

    def read(self, found: Mapping[str, Any]) -> None:
        """Read what `to_json` wrote."""

        def choices(listed: Sequence[Any]) -> dict[Grid, FormatOption]:
            return {Grid(**grid): FormatOption(size_bytes, loss) for grid, size_bytes, loss in listed}

        self.choices.update((tuple(names), choices(listed)) for names, listed in found["linears"])
        self.of_tables.update((name, choices(listed)) for name, listed in found["tables"])

    def measure(self, names: Sequence[str], weights: Sequence[Float32], method: Method, seen: LayerInputs) -> None:
        """Measure linears `names`, [Nᵢ, K], that read what was `seen`.

        Raises:
            ValueError: their inputs do not allow `method`.
        """
        if not seen.outputs:
            return
        own = _own(seen)
        moments = own.sums[InputStatistic.MOMENTS] / np.float32(seen.tokens)
        heights = [len(weight) for weight in weights]
        whole, bounds = np.concatenate(weights), np.cumsum(heights)[:-1]
        of_group = self.choices[tuple(names)] = {}
        for grid in self.linears:
            if not allocation.fits(heights, whole.shape[1], grid):
                continue
            errors = np.split(whole - dequantize(method.quantize(whole, grid, own)), bounds)
            lost = sum(allocation.loss(e, moments, o) for e, o in zip(errors, seen.outputs, strict=True))
            of_group[grid] = FormatOption(sum(allocation.size_bytes(n, whole.shape[1], grid) for n in heights), lost)

    def measure_table(self, name: str, table: Float32, method: Method, seen: LayerInputs) -> None:
        """Measure an embedding or head [V, K]; `seen` has its mean moments, of which each row has the same share."""
        moments = seen.sums[InputStatistic.MOMENTS]
        of_table = self.of_tables[name] = {}
        for wanted in self.tables:
            grid = wanted.dividing(table.shape[1])
            if grid is None or not allocation.fits([len(table)], table.shape[1], grid):
                continue
            error = table - dequantize(method.quantize(table, grid, _own(seen)))
            lost = 0.5 * float(np.vdot(error, error @ moments)) / len(table)
            of_table[wanted] = FormatOption(allocation.size_bytes(len(table), table.shape[1], grid), lost)


def _own(seen: LayerInputs) -> LayerInputs:
    """Return what was seen but for what layers before have changed: the error is that of rounding alone."""
    moments = {InputStatistic.MOMENTS: seen.sums[InputStatistic.MOMENTS]}
    return replace(seen, sums=moments, held=None, notes=[])


HELD_OUT = 4  # of so many documents, one is held out
TOKENS = 16384  # at most that formats are measured on
HELD_TOKENS = 8192  # at most that models are compared on
AIM = 0.8  # of a budget, that weights may lose on the text held out: evaluation is other text, activations are rounded
TRIALS, AGAIN = 3, 0.9  # that a loss is held to, and what of a further one is allowed that would just keep it
CLOSE = 2e-3  # of the bytes, to which they are as few as can be

Matrices = Mapping[str, QuantizedMatrix]
Trial = Callable[[WeightDemand, Sequence[TokenWindow], Losses | None], Matrices]
Keep = Callable[[str, WeightDemand, Callable[[], Any]], Any]  # of a kind, for a demand, as JSON has it


@dataclass(frozen=True)
class _Formats:
    """A choice of formats: of each weight, and of embedding and head; what they take and are predicted to lose."""

    mixed: tuple[tuple[str, Grid], ...]
    tables: Grid | None
    size_bytes: int
    loss: float

    def of(self, demand: WeightDemand) -> WeightDemand:
        return replace(demand.unlimited, mixed=self.mixed, tables=self.tables)


def choose(
    checkpoint: Checkpoint, windows: Sequence[TokenWindow], demand: WeightDemand, trial: Trial, keep: Keep
) -> tuple[WeightDemand, str]:
    """Return `demand` with the formats that fit its bytes and lose least, and a note of what was compared.

    Where it limits the loss instead, those are the formats with the fewest bytes that keep it on the text held out.

    `trial` quantizes the weights by a demand on windows, measures losses on the way, and returns them. What is measured
    depends on no budget: `keep` finds what an earlier choice on these windows has measured for a demand.

    Raises:
        DataError: the text cannot be divided, or has no gradients.
        UsageError: not even the smallest formats fit.
    """
    fitted, held = divide(windows)
    losses = Losses(allocation.LINEARS[demand.grid.scale], allocation.TABLES[demand.grid.scale])
    without = demand.unlimited

    def measure() -> dict[str, Any]:
        new = Losses(losses.linears, losses.tables)
        measured = trial(without, fitted, new)
        return {**new.to_json(), "others": _others(checkpoint, measured, new)}

    found = keep("losses", without, measure)
    losses.read(found)
    if demand.weight_loss is not None:
        return _smallest(losses, found["others"], _Comparison(checkpoint, demand, fitted, held, trial, keep))
    allowed = demand.weight_bytes
    if allowed is None:
        assert demand.weight_bits is not None
        allowed = int(demand.weight_bits * checkpoint.parameters / 8)
    best, uniform = _candidates(losses, demand, allowed, found["others"])

    def bits(formats: _Formats) -> str:
        return f"{8 * formats.size_bytes / checkpoint.parameters:.2f} bits"

    if uniform is None:
        return best.of(demand), f"auto: mixed formats, {bits(best)} a weight; no uniform format is small enough"
    compare = _Comparison(checkpoint, demand, fitted, held, trial, keep)
    of_best, of_uniform = compare.lost(best), compare.lost(uniform)
    kept, text = (best, "mixed formats") if of_best < of_uniform else (uniform, "a uniform format")
    said = f"uniform {uniform.mixed[0][1].format.name}"
    if uniform.tables is not None:
        said += f", embedding and head {uniform.tables.format.name}"
    return kept.of(demand), (
        f"auto: {text}, {bits(kept)} a weight: on {compare.tokens} held-out tokens of the calibration text, mixed "
        f"formats have a KLD of {of_best:.5f} with {bits(best)} (predicted: {best.loss:.5f}), {said}, {of_uniform:.5f} "
        f"with {bits(uniform)}"
    )


@dataclass(frozen=True, eq=False)
class _Comparison:
    """Measures models quantized in other formats on the text held out; what it has measured is kept."""

    checkpoint: Checkpoint
    demand: WeightDemand
    fitted: Sequence[TokenWindow]
    held: Sequence[TokenWindow]
    trial: Trial
    keep: Keep

    @property
    def tokens(self) -> int:
        return sum(len(window.ids) for window in self.held)

    def lost(self, formats: _Formats) -> float:
        """Measure the KLD, nats a token."""
        own = formats.of(self.demand)

        def compute() -> float:
            return divergence(self._skeleton, self.held, self.trial(own, self.fitted, None))

        lost: float = self.keep("divergence", own, compute)
        return lost

    @cached_property
    def _skeleton(self) -> Skeleton:
        return Skeleton.build(self.checkpoint)


def _smallest(losses: Losses, others: int, compare: _Comparison) -> tuple[WeightDemand, str]:
    """Return the demand with the formats of the fewest bytes that lose no more than it allows, and a note.

    What is measured may be more than the sum of what weights lose alone: then less is allowed of that sum. The proof of
    the pass decides where the last trial still loses more.
    """
    demand = compare.demand
    assert demand.weight_loss is not None
    wanted = predicted = AIM * demand.weight_loss
    for _ in range(TRIALS):
        formats = _within(losses, demand, others, predicted)
        lost = compare.lost(formats)
        if lost <= wanted:
            break
        predicted = AGAIN * min(predicted, formats.loss) * wanted / lost
    bits = 8 * formats.size_bytes / compare.checkpoint.parameters
    kept = "the fewest that keep the budget" if lost <= wanted else f"more is lost than wanted, after {TRIALS} trials"
    return formats.of(demand), (
        f"auto: mixed formats, {bits:.2f} bits a weight, {kept}: on {compare.tokens} held-out "
        f"tokens of the calibration text, a KLD of {lost:.5f} (predicted: {formats.loss:.5f}; wanted: {wanted:.5f})"
    )


def _within(losses: Losses, demand: WeightDemand, others: int, allowed: float) -> _Formats:
    """Return the formats with the fewest bytes whose losses add up to no more than `allowed`; else with the least."""
    sizes = [[each.size_bytes for each in formats.values()] for formats in losses.choices.values()]
    sizes += [[each.size_bytes for each in formats.values()] for formats in losses.of_tables.values()]
    low, high = (others + sum(map(end, sizes)) for end in (min, max))
    found, _ = _candidates(losses, demand, high, others)
    while high - low > high * CLOSE:
        middle = (low + high) // 2
        formats, _ = _candidates(losses, demand, middle, others)
        if formats.loss <= allowed:
            found, high = formats, middle
        else:
            low = middle
    return found


def divide(windows: Sequence[TokenWindow]) -> tuple[list[TokenWindow], list[TokenWindow]]:
    """Divide windows, by documents where there are several, into those to measure on and those that are held out.

    Raises:
        DataError: there is but one window.
    """
    documents = list(dict.fromkeys(window.document for window in windows))
    keys: Sequence[object] = [window.document for window in windows]
    if len(documents) < 2:
        keys = range(len(windows))
    distinct = list(dict.fromkeys(keys))
    if len(distinct) < 2:
        raise DataError(
            "the calibration text has one window: none can be held out to compare formats on",
            hint="give more calibration text, or a method other than auto",
        )
    apart = set(distinct[HELD_OUT - 1 :: HELD_OUT] or distinct[-1:])
    fitted = [window for window, key in zip(windows, keys, strict=True) if key not in apart]
    held = [window for window, key in zip(windows, keys, strict=True) if key in apart and len(window.ids) > 1]
    if not held:
        raise DataError("the calibration text that is held out has no two tokens", hint="give more calibration text")
    return _evenly(fitted, TOKENS), _evenly(held, HELD_TOKENS)


def _evenly(windows: Sequence[TokenWindow], tokens: int) -> list[TokenWindow]:
    """Take every so many windows, so that there are about `tokens`, or all."""
    return list(windows[:: max(1, round(sum(len(window.ids) for window in windows) / tokens))])


def _others(checkpoint: Checkpoint, measured: Matrices, losses: Losses) -> int:
    """Count the bytes of all that has no choice: quantized on a fixed grid, or left in fp32."""
    chosen = {name for names in losses.choices for name in names} | set(losses.of_tables)
    quantized = size_bytes = 0
    for name, matrix in measured.items():
        quantized += matrix.codes.size
        if name not in chosen:
            size_bytes += allocation.size_bytes(*matrix.shape, matrix.grid)
    return size_bytes + 4 * (checkpoint.parameters - quantized)


def _candidates(losses: Losses, demand: WeightDemand, allowed: int, others: int) -> tuple[_Formats, _Formats | None]:
    """Return the best formats within `allowed` bytes, and the best with one grid in all linears, if one fits."""
    groups = losses.choices
    if not groups:
        raise DataError(
            "no gradient reaches a linear layer, so that nothing is known of what formats lose",
            hint="choose a format, and a method other than auto",
        )
    tables: dict[Grid | None, FormatOption] = {
        demand.tables: FormatOption(0, 0.0)
    }  # where they are left, or rounded to nearest
    if losses.of_tables:
        own = list(losses.of_tables.values())
        tables = {
            grid: FormatOption(sum(each[grid].size_bytes for each in own), sum(each[grid].loss for each in own))
            for grid in own[0]
            if all(grid in each for each in own)
        }
    items = {names[0]: list(choices.items()) for names, choices in groups.items()}
    of_tables = list(tables.items())
    if others > allowed:
        raise UsageError(
            f"weights that are not quantized take {others} bytes, the budget has {allowed}", hint="allow more bytes"
        )
    sets = {name: [choice for _, choice in given] for name, given in items.items()}
    places = allocation.allocate({**sets, "": [choice for _, choice in of_tables]}, allowed - others)

    def formats(of_linears: Mapping[tuple[str, ...], Grid], of_table: Grid | None) -> _Formats:
        taken = [groups[names][grid] for names, grid in of_linears.items()] + [tables[of_table]]
        return _Formats(
            tuple((name, grid) for names, grid in of_linears.items() for name in names),
            of_table,
            others + sum(each.size_bytes for each in taken),
            sum(each.loss for each in taken),
        )

    best = formats({names: items[names[0]][places[names[0]]][0] for names in groups}, of_tables[places[""]][0])
    common = [grid for grid in losses.linears if all(grid in choices for choices in groups.values())]
    uniform = [formats(dict.fromkeys(groups, grid), table) for grid, table in itertools.product(common, tables)]
    return best, min((each for each in uniform if each.size_bytes <= allowed), key=lambda it: it.loss, default=None)


def divergence(skeleton: Skeleton, windows: Sequence[TokenWindow], matrices: Matrices) -> float:
    """Return the mean KLD, nats a token, of the model with `matrices` in place of its weights, over `windows`."""
    return sum(divergences(skeleton, windows, matrices)) / sum(len(window.ids) for window in windows)


def divergences(skeleton: Skeleton, windows: Sequence[TokenWindow], matrices: Matrices) -> list[float]:
    """Return the KLD of each of `windows`, nats, summed over its tokens; see `divergence`."""
    ids = [window.ids for window in windows]
    embedding, head = skeleton.tables()
    tables = {name: dequantize(matrices[name]) for name in (embedding, head) if name in matrices}
    calls, before = skeleton.enter(ids)
    after = skeleton.enter(ids, tables[embedding])[1] if embedding in tables else list(before)
    for index in range(len(skeleton.layers)):
        layer = skeleton.load(index, calls[index])
        before = [layer.run(window, state) for window, state in enumerate(before)]
        for name in [name for name in matrices if name.startswith(f"{skeleton.prefixes[index]}.")]:
            layer.set_weight(name, dequantize(matrices[name]))
        after = [layer.run(window, state) for window, state in enumerate(after)]
    plain, rounded = skeleton.leaving(ids), skeleton.leaving(ids, tables.get(head))
    totals = []
    for window, (one, other) in enumerate(zip(before, after, strict=True)):
        p, q = (leave(window, state)[0][0].float().log_softmax(-1) for leave, state in ((plain, one), (rounded, other)))
        totals.append(float(torch.nn.functional.kl_div(q, p, reduction="sum", log_target=True)))
    return totals
