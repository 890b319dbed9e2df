"""Demands on calibration and the statistics that it yields; torch-free, so that passes can read it."""

from __future__ import annotations

import fnmatch
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from llmforge.base.errors import UnsupportedError
from llmforge.quantization.methods.base import NO_INPUTS, InputStatistic, LayerInputs, Method

if TYPE_CHECKING:
    from llmforge.quantization.grid import Grid
    from llmforge.quantization.grids import QuantizedMatrix
    from llmforge.quantization.low_rank import Dtype, LowRankCorrection
    from llmforge.quantization.sparsity import SparseMatrix
    from llmforge.quantization.structure import PrunedStructure, Structure


LayerBits = tuple[tuple[str, int], ...]  # globs of parameters, and the bits of their weights


@dataclass(frozen=True)
class WeightDemand:
    """Quantize every decoder linear and expert by `method`, but parameters that match a glob of `exclude`.

    `routers` says whether linears that choose experts are quantized, too; `tables` is the grid of the embedding and of
    the head, tied to it or not, with its largest block that divides their width; None: they are left alone. `mixed` has
    parameters of linears whose grids are others than `grid`, and `layer_bits` globs of parameters, tables among them,
    that have other bits, the last one that matches; linears that read the same must have one grid.

    With `weight_bits` for each parameter, or `weight_bytes`, all weights of the model may take so much, and with
    `weight_loss` they may lose so much, nats a token, in as few bytes as that takes: calibration chooses `mixed` and
    `tables` among those formats that have the scales of `grid` (`quantization.allocation`).
    """

    method: Method
    grid: Grid
    exclude: tuple[str, ...] = ()
    routers: bool = False
    tables: Grid | None = None
    mixed: tuple[tuple[str, Grid], ...] = ()
    layer_bits: LayerBits = ()
    weight_bits: float | None = None
    weight_bytes: int | None = None
    weight_loss: float | None = None

    @property
    def is_limited(self) -> bool:
        """Whether formats are to be chosen, within bytes or within a loss."""
        return any(each is not None for each in (self.weight_bits, self.weight_bytes, self.weight_loss))

    @property
    def unlimited(self) -> WeightDemand:
        """The demand without those limits."""
        return replace(self, weight_bits=None, weight_bytes=None, weight_loss=None)

    def grid_of(self, names: Sequence[str], width: int = 0) -> Grid:
        """Return the grid of linears `names`, which read the same, in rows of `width`; 0: of any.

        Raises:
            UnsupportedError: they have different ones.
        """
        own = dict(self.mixed)
        grids = {own[name] if name in own else with_bits(self.grid, [name], self.layer_bits) for name in names}
        if len(grids) > 1:
            raise several_bits(names)
        return grids.pop().of_rows(width)

    def table_grid(self, name: str, width: int) -> Grid | None:
        """Return the grid of an embedding or head whose rows have this width; None: it stays."""
        return None if self.tables is None else with_bits(self.tables, [name], self.layer_bits).dividing(width)


@dataclass(frozen=True)
class KvRangeDemand:
    """Record the largest magnitudes of keys and values as attention sees them, after rotary embedding."""


@dataclass(frozen=True)
class Smoothing:
    """How inputs will be rounded, which decides how much smoothing is best: `dtype` is "int8" or "fp8"."""

    dtype: str
    per_token: bool
    alpha: float | None = None  # None: that of the least error, of `smoothing.ALPHAS`


@dataclass(frozen=True, eq=False)
class Smoothed:
    """Factors for the inputs of linears that read one tensor, 2**exponents, and what rounding then costs.

    A loss is Σ |ŷ - y|² / |y|², the mean over tokens, before and after; `alpha` is None where no smoothing is best.
    """

    exponents: NDArray[np.int8]
    alpha: float | None
    loss_before: float
    loss: float

    @property
    def factors(self) -> NDArray[np.float32]:
        """The factors s, powers of two, [K]."""
        return factors(self.exponents)


def factors(exponents: NDArray[np.int8]) -> NDArray[np.float32]:
    """Return 2**exponents."""
    return np.exp2(exponents.astype(np.float32))


@dataclass(frozen=True)
class InputRangeDemand:
    """Record the largest magnitude of each feature that a linear of a layer reads, and factors that smooth it."""

    smoothing: Smoothing | None = None  # None: no factors


@dataclass(frozen=True)
class ExpertRangeDemand:
    """Record the largest magnitude of each feature that both products of experts read, by the parameter."""


@dataclass(frozen=True)
class ChannelDemand:
    """Sum what each linear of a layer and the head read, and its squares, by feature (`methods.base.BY_CHANNEL`)."""


@dataclass(frozen=True)
class SparsityDemand:
    """Prune every decoder linear to 2:4 (`quantization.sparsity`), but parameters that match a glob of `exclude`."""

    damping: float
    exclude: tuple[str, ...] = ()


@dataclass(frozen=True)
class LowRankDemand:
    """Correct what quantized linears lose by products of low rank (`quantization.low_rank`), experts apart.

    Factors take at most `bits` for each number of a weight. `damping` is the share of the mean diagonal of the inputs'
    moments that is added to it. Parameters that match a glob of `exclude` are left alone.
    """

    bits: float
    dtype: Dtype
    damping: float
    exclude: tuple[str, ...] = ()


@dataclass(frozen=True)
class RecoveryDemand:
    """Train the scales of quantized linears against the checkpoint's logits, on so many `tokens` of calibration text.

    They are taken where that lowers the KLD of text held out by a share of `least` or more. Parameters that match a
    glob of `exclude` are left alone.
    """

    tokens: int
    least: float
    exclude: tuple[str, ...] = ()


@dataclass(frozen=True)
class PruningDemand:
    """Take heads, channels and layers out of the decoder (`quantization.structure`), of the kinds in `units`.

    So many parameters go as are `fraction` of those of its layers, or, with `read` parameters that a decode step reads,
    as make it read `speedup` times fewer. Channels go `together` in a step, so that their count stays a multiple.
    `structure` says what there is, and `kept` what is left; None: calibration chooses.
    """

    units: tuple[str, ...]
    fraction: float | None
    speedup: float | None
    together: int
    damping: float
    structure: Structure | None = None
    read: int = 0
    kept: PrunedStructure | None = None

    def drops(self, layer: int) -> bool:
        """Say whether a layer goes as a whole."""
        return self.kept is not None and layer in self.kept.dropped

    @property
    def target(self) -> int:
        """Parameters that go."""
        assert self.structure is not None
        if self.speedup is not None:
            return int(self.read * (1 - 1 / self.speedup))
        assert self.fraction is not None
        return int(self.structure.parameters * self.fraction)


Demand = (
    WeightDemand
    | KvRangeDemand
    | InputRangeDemand
    | ChannelDemand
    | ExpertRangeDemand
    | SparsityDemand
    | LowRankDemand
    | RecoveryDemand
    | PruningDemand
)


@dataclass(frozen=True)
class KvRange:
    """Largest magnitude of each cached channel of one layer: fp32 [kv_heads, head_dim], of K and of V."""

    key: NDArray[np.float32]
    value: NDArray[np.float32]


@dataclass(frozen=True, eq=False)
class InputRange:
    """What a linear reads: the largest magnitude of each feature, fp32 [K], and what smooths it, if that was asked.

    `sums` and `squares` of each feature, fp32 [K], are over so many `tokens`.
    """

    peaks: NDArray[np.float32]
    smoothed: Smoothed | None = None
    sums: NDArray[np.float32] | None = None
    squares: NDArray[np.float32] | None = None
    tokens: int = 0

    def seen(self) -> LayerInputs:
        """Hand the sums to a method that demands no more than them."""
        if self.sums is None or self.squares is None:
            return NO_INPUTS
        return LayerInputs(self.tokens, False, {InputStatistic.SUMS: self.sums, InputStatistic.SQUARES: self.squares})


@dataclass(frozen=True)
class Statistics:
    """Results of one calibration, for all demands of a recipe."""

    samples: int
    tokens: int
    # By parameter name, "model.layers.0.self_attn.q_proj.weight"; of experts [E·N, K], one after another. May be lazy.
    linears: Mapping[str, QuantizedMatrix]
    kv: Mapping[int, KvRange]  # by layer
    inputs: Mapping[str, InputRange] = field(default_factory=dict)  # of what a linear reads, by parameter name
    sparse: Mapping[str, SparseMatrix] = field(default_factory=dict)  # pruned linears by parameter name; may be lazy
    low_rank: Mapping[str, LowRankCorrection] = field(default_factory=dict)  # of quantized linears; may be lazy
    recovered: Mapping[str, QuantizedMatrix] = field(default_factory=dict)  # `linears` with trained scales; may be lazy
    kept: PrunedStructure | None = None  # what is left of the decoder's heads, channels and layers; None: all of it
    pruned: Mapping[str, NDArray[np.float32]] = field(default_factory=dict)  # what makes up for them; may be lazy
    notes: tuple[str, ...] = ()  # what a reader of the report should know
    grids: Mapping[str, Grid] = field(default_factory=dict)  # of `linears`, where they are known without reading them

    def grid(self, name: str) -> Grid:
        """Return the grid of a linear."""
        return self.grids[name] if name in self.grids else self.linears[name].grid


def with_bits(grid: Grid, names: Sequence[str], layer_bits: LayerBits) -> Grid:
    """Return `grid` with the bits that `layer_bits` gives to the weight of parameters `names`.

    Raises:
        UnsupportedError: they are one weight, and are given different bits.
    """
    found = {
        next((bits for glob, bits in reversed(layer_bits) if fnmatch.fnmatchcase(name, glob)), grid.bits)
        for name in names
    }
    if len(found) > 1:
        raise several_bits(names)
    return grid.of_bits(found.pop()) if found else grid


def several_bits(names: Sequence[str]) -> UnsupportedError:
    """Refuse different bits for weights that are stored, or calibrated, as one."""
    return UnsupportedError(
        f"layer_bits: {', '.join(names)} read the same and have one format; they are given several",
        hint="use a glob that matches all of them, such as model.layers.0.*",
    )


def exclusion(names: Iterable[str], globs: Sequence[str]) -> str | None:
    """Say which of the parameters `names` is excluded by which of `globs`; None where none is.

    Upper and lower case differ, as in the checkpoint.
    """
    found = ((name, glob) for name in names for glob in globs if fnmatch.fnmatchcase(name, glob))
    return next((f"{name} is excluded by {glob!r}" for name, glob in found), None)
