"""Choose a format for each weight where bytes are limited, by what each format is predicted to lose.

While gradients are taken, every format of every weight is priced (`calibration.pricing`), and a knapsack takes those
that lose least. They are held against one format in all linears, the best that the budget has room for, by a trial:
both are rounded to nearest, which takes no calibration, and what a trial loses more than was predicted of it, scales
what is predicted of the method.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from llmforge.base.errors import DataError, UsageError
from llmforge.calibration import experts, probe
from llmforge.calibration.layer import linears_of
from llmforge.calibration.pricing import Losses
from llmforge.calibration.skeleton import Skeleton
from llmforge.checkpoint.text import TokenWindow, held_out
from llmforge.quantization import allocation
from llmforge.quantization.allocation import FormatOption
from llmforge.quantization.grid import Grid
from llmforge.quantization.grids import QuantizedMatrix, dequantize
from llmforge.quantization.statistics import WeightDemand, exclusion
from llmforge.trace.hooks.experts import marked

HELD_OUT = 4  # of so many documents, one is held out
TOKENS = 16384  # at most that are not held out
HELD_TOKENS = 8192  # at most that models are compared on
TRIAL_TOKENS = 2048  # that formats are tried on
AIM = 0.8  # of a budget, that weights may lose: evaluation is other text, activations are rounded
TRIALS, AGAIN = 4, 0.95  # that a loss is held to, and what of a further one is allowed that would just keep it
# What a price of codes of a trellis counts more than others where formats are mixed, for weights lose more there than
# they are priced at. SmolLM2-135M, KLD × 1000 on documentation, with 1.2 and with 1: at 6.7 bits 4.64 and 4.99 (without
# trellises of 5 bits 4.49); on those of 5 bits alone at 6 bits 8.56 and 8.37, at 5.4 bits 14.66 and 14.75.
TRELLIS = 1.2
CLOSE = 2e-3  # of the bytes, to which they are as few as can be

Matrices = Mapping[str, QuantizedMatrix]
Price = Callable[[Losses], None]  # fills in what formats lose
Keep = Callable[[str, WeightDemand, Callable[[], Any]], Any]  # of a kind, for a demand, as JSON has it


@dataclass(frozen=True)
class _Formats:
    """A choice of formats: of each weight, and of embedding and head; what they take and are predicted to lose.

    `nearest` is what they would lose rounded to nearest.
    """

    mixed: tuple[tuple[str, Grid], ...]
    tables: Grid | None
    size_bytes: int
    loss: float
    nearest: float

    def of(self, demand: WeightDemand) -> WeightDemand:
        return replace(demand.unlimited, mixed=self.mixed, tables=self.tables)


def choose(
    skeleton: Skeleton, windows: Sequence[TokenWindow], demand: WeightDemand, price: Price, keep: Keep, threads: int
) -> tuple[WeightDemand, str]:
    """Return `demand` with the formats that fit its bytes and lose least, and a note of what was compared.

    Where it limits the loss instead, those are the formats with the fewest bytes that are predicted to keep it.

    What `price` measures depends on no budget: `keep` finds what an earlier choice on these windows has measured.

    Raises:
        DataError: the text has no gradients.
        UsageError: not even the smallest formats fit.
    """
    losses = Losses(allocation.LINEARS[demand.grid.scale], allocation.TABLES[demand.grid.scale])
    checkpoint = skeleton.checkpoint

    def measure() -> dict[str, Any]:
        new = Losses(losses.linears, losses.tables)
        price(new)
        return new.to_json()

    losses.read(keep("losses", demand.unlimited, measure))
    others = _others(skeleton, demand, losses)
    trials = _Trials(skeleton, demand, _evenly(windows, TRIAL_TOKENS), keep, threads)
    if demand.weight_loss is not None:
        return _smallest(losses, others, trials)
    allowed = demand.weight_bytes
    if allowed is None:
        assert demand.weight_bits is not None
        allowed = int(demand.weight_bits * checkpoint.parameters / 8)
    best, uniform = _candidates(losses, demand, allowed, others)

    def bits(formats: _Formats) -> str:
        return f"{8 * formats.size_bytes / checkpoint.parameters:.2f} bits"

    if uniform is None:
        return best.of(demand), f"auto: mixed formats, {bits(best)} a weight; no uniform format is small enough"
    of_best, of_uniform = trials.predicted(best, uniform)
    kept, text = (best, "mixed formats") if of_best < of_uniform else (uniform, "a uniform format")
    said = f"uniform {uniform.mixed[0][1].format.name}"
    if uniform.tables is not None:
        said += f", embedding and head {uniform.tables.format.name}"
    return kept.of(demand), (
        f"auto: {text}, {bits(kept)} a weight: predicted from a trial on {trials.tokens} tokens of the calibration "
        f"text, mixed formats have a KLD of {of_best:.5f} with {bits(best)}, {said}, {of_uniform:.5f} with "
        f"{bits(uniform)}"
    )


@dataclass(frozen=True, eq=False)
class _Trials:
    """Measures formats with weights rounded to nearest; what it has measured is kept."""

    skeleton: Skeleton
    demand: WeightDemand
    windows: Sequence[TokenWindow]
    keep: Keep
    threads: int

    @property
    def tokens(self) -> int:
        return sum(len(window.ids) for window in self.windows)

    def predicted(self, *formats: _Formats) -> list[float]:
        """Predict the KLD that the method leaves, nats a token: it gains as much as it is predicted to."""
        demands = [each.of(self.demand) for each in formats]
        measured: list[float] = []  # of all, which run side by side

        def measure(place: int) -> float:
            if not measured:
                ids = [window.ids for window in self.windows]
                measured[:] = probe.divergences(self.skeleton, ids, demands, self.threads)
            return measured[place]

        lost = [self.keep("trial", each, partial(measure, place)) for place, each in enumerate(demands)]
        return [each.loss * kld / each.nearest for each, kld in zip(formats, lost, strict=True)]


def _smallest(losses: Losses, others: int, trials: _Trials) -> tuple[WeightDemand, str]:
    """Return the demand with the formats of the fewest bytes that lose no more than it allows, and a note.

    What is predicted by a trial may be more than the sum of what weights lose alone: then less is allowed of that sum.
    The proof of the pass decides where the last trial still loses more.
    """
    demand = trials.demand
    assert demand.weight_loss is not None
    wanted = allowed = AIM * demand.weight_loss
    for _ in range(TRIALS):
        formats = _within(losses, demand, others, allowed)
        (lost,) = trials.predicted(formats)
        if lost <= wanted:
            break
        allowed = AGAIN * min(allowed, formats.loss) * wanted / lost
    bits = 8 * formats.size_bytes / trials.skeleton.checkpoint.parameters
    kept = "the fewest that keep the budget" if lost <= wanted else f"more is lost than wanted, after {TRIALS} trials"
    return formats.of(demand), (
        f"auto: mixed formats, {bits:.2f} bits a weight, {kept}: predicted from a trial on {trials.tokens} tokens of "
        f"the calibration text, a KLD of {lost:.5f} (sum of all weights: {formats.loss:.5f}; wanted: {wanted:.5f})"
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
    if len(windows) < 2:
        raise DataError(
            "the calibration text has one window: none can be held out to compare formats on",
            hint="give more calibration text, or a method other than auto",
        )
    apart = set(held_out([window.document for window in windows], HELD_OUT))
    fitted = [window for number, window in enumerate(windows) if number not in apart]
    held = [window for number, window in enumerate(windows) if number in apart and len(window.ids) > 1]
    if not held:
        raise DataError("the calibration text that is held out has no two tokens", hint="give more calibration text")
    return _evenly(fitted, TOKENS), _evenly(held, HELD_TOKENS)


def _evenly(windows: Sequence[TokenWindow], tokens: int) -> list[TokenWindow]:
    """Take every so many windows, so that there are about `tokens`, or all."""
    return list(windows[:: max(1, round(sum(len(window.ids) for window in windows) / tokens))])


def _others(skeleton: Skeleton, demand: WeightDemand, losses: Losses) -> int:
    """Count the bytes of all that has no choice: quantized on the grid of `demand`, or left in fp32."""
    settled = {name for names in losses.choices for name in names} | losses.kept
    quantized = sum(skeleton.model.get_parameter(name).numel() for names in losses.choices for name in names)
    size_bytes = 0

    def counted(name: str, n: int, k: int, grid: Grid | None) -> None:
        nonlocal quantized, size_bytes
        if grid is not None and allocation.fits([n], k, grid) and not exclusion([name], demand.exclude):
            quantized += n * k
            size_bytes += allocation.size_bytes(n, k, grid)

    for prefix, layer in zip(skeleton.prefixes, skeleton.layers, strict=True):
        for name, linear in linears_of(layer, prefix).items():
            if name not in settled:
                counted(name, linear.out_features, linear.in_features, demand.grid_of([name], linear.in_features))
        for local, module in layer.named_modules():
            if not marked(module):
                continue
            widths = experts.widths(module)
            for parameter, k in zip(experts.matrices(module), widths, strict=True):
                name = f"{prefix}.{local}.{parameter}"
                n = module.get_parameter(parameter).numel() // k
                counted(name, n, k, demand.grid_of([name]).fitting(*widths))
    for name in filter(None, dict.fromkeys(skeleton.tables())):
        n, k = skeleton.model.get_parameter(name).shape
        if name in losses.of_tables:
            quantized += n * k
        else:
            counted(name, n, k, demand.table_grid(name, k))
    return size_bytes + 4 * (skeleton.checkpoint.parameters - quantized)


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
            grid: FormatOption(
                sum(each[grid].size_bytes for each in own),
                sum(each[grid].loss for each in own),
                sum(each[grid].nearest for each in own),
            )
            for grid in own[0]
            if all(grid in each for each in own)
        }
    items = {names[0]: list(choices.items()) for names, choices in groups.items()}
    of_tables = list(tables.items())
    if others > allowed:
        raise UsageError(
            f"weights that are not quantized take {others} bytes, the budget has {allowed}", hint="allow more bytes"
        )
    sets = {
        name: [replace(choice, loss=choice.loss * (TRELLIS if grid.trellis else 1)) for grid, choice in given]
        for name, given in items.items()
    }
    places = allocation.allocate({**sets, "": [choice for _, choice in of_tables]}, allowed - others)

    def formats(of_linears: Mapping[tuple[str, ...], Grid], of_table: Grid | None) -> _Formats:
        taken = [groups[names][grid] for names, grid in of_linears.items()] + [tables[of_table]]
        return _Formats(
            tuple((name, grid) for names, grid in of_linears.items() for name in names),
            of_table,
            others + sum(each.size_bytes for each in taken),
            sum(each.loss for each in taken),
            sum(each.nearest for each in taken),
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
