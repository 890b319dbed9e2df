"""The loss of each weight in each format, measured while a calibration quantizes: ½ tr(O E H Eᵀ), nats a token.

E is the error that the method really leaves of the weight on that format's grid, H the mean x xᵀ of what it reads and O
the mean g gᵀ of the loss in what it makes (`quantization.allocation`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import numpy as np

from llmforge.quantization import allocation
from llmforge.quantization.allocation import FormatOption
from llmforge.quantization.grids import Float32, Grid, dequantize
from llmforge.quantization.methods.base import InputStatistic, LayerInputs, Method

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
