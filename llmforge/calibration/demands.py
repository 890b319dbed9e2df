"""The demands on one calibration, sorted by kind: of each there may be one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

from llmforge.base.errors import UnsupportedError
from llmforge.quantization.methods.base import InputStatistic
from llmforge.quantization.statistics import (
    Demand,
    InputRangeDemand,
    KvRangeDemand,
    LowRankDemand,
    PruningDemand,
    SparsityDemand,
    WeightDemand,
)

_D = TypeVar("_D")


@dataclass(frozen=True)
class DemandsByKind:
    """What is demanded of weights, of what linears read, and of keys and values; None where nothing is."""

    weights: WeightDemand | None
    inputs: InputRangeDemand | None
    sparsity: SparsityDemand | None
    correction: LowRankDemand | None
    pruning: PruningDemand | None
    kv: bool

    @classmethod
    def of(cls, demands: Sequence[Demand]) -> DemandsByKind:
        """Sort `demands`.

        Raises:
            UnsupportedError: two contradict each other.
        """
        weights = _one(
            demands,
            WeightDemand,
            "{count} passes quantize the same linear layers with different calibration options: ",
            "keep one of them",
        )
        return cls(
            weights,
            _one(
                demands,
                InputRangeDemand,
                "{count} passes round what linear layers read in different ways: ",
                "keep one of them, or give them the same `activations`, `smooth` and `alpha`",
            ),
            _sparsity(demands, weights),
            _correction(demands, weights),
            _pruning(demands, weights),
            KvRangeDemand() in demands,
        )


def _one(demands: Sequence[Demand], kind: type[_D], problem: str, hint: str) -> _D | None:
    """Return the one demand of a `kind`; None where there is none."""
    found = list(dict.fromkeys(demand for demand in demands if isinstance(demand, kind)))
    if len(found) > 1:
        raise UnsupportedError(problem.format(count=len(found)) + "; ".join(map(str, found)), hint=hint)
    return found[0] if found else None


def _sparsity(demands: Sequence[Demand], weights: WeightDemand | None) -> SparsityDemand | None:
    found = list(dict.fromkeys(demand for demand in demands if isinstance(demand, SparsityDemand)))
    if len(found) > 1 or (found and weights is not None):
        raise UnsupportedError(
            "two passes choose the weights of the same linear layers by calibration: "
            + "; ".join(str(demand) for demand in demands if isinstance(demand, SparsityDemand | WeightDemand)),
            hint="keep one of them; behind sparsify-weights, quantize-channels rounds weights and keeps their zeros",
        )
    return found[0] if found else None


def _correction(demands: Sequence[Demand], weights: WeightDemand | None) -> LowRankDemand | None:
    found = _one(demands, LowRankDemand, "two passes correct the same linear layers: ", "keep one of them")
    if found and (weights is None or InputStatistic.MOMENTS not in weights.method.demands):
        raise UnsupportedError(
            "correct-low-rank corrects what quantize-weights chose by calibration text, and no pass does that",
            hint="put quantize-weights with method: gptq in front of it, or leave it out",
        )
    return found


def _pruning(demands: Sequence[Demand], weights: WeightDemand | None) -> PruningDemand | None:
    found = _one(demands, PruningDemand, "two passes prune the same layers: ", "keep one of them")
    if found and weights is not None and weights.is_limited:
        raise UnsupportedError(
            "prune-structure goes with one format of all weights: method: auto measures those of the whole model",
            hint="choose another method, or leave prune-structure out: auto takes bytes where they cost least",
        )
    return found
