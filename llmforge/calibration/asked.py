"""What passes ask calibration for, sorted by kind; what contradicts is refused."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

from llmforge.base.errors import UnsupportedError
from llmforge.quantization.methods.base import InputStatistic
from llmforge.quantization.statistics import (
    ChannelDemand,
    Demand,
    ExpertRangeDemand,
    InputRangeDemand,
    KvRangeDemand,
    LowRankDemand,
    PruningDemand,
    RecoveryDemand,
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
    recovery: RecoveryDemand | None
    pruning: PruningDemand | None
    kv: bool
    channels: bool
    experts: bool  # ranges of what they read

    @property
    def ranges(self) -> InputRangeDemand | None:
        """What is to be recorded of what linears read; sums by channel come with every range."""
        return self.inputs or (InputRangeDemand() if self.channels or self.experts else None)

    @classmethod
    def of(cls, demands: Sequence[Demand]) -> DemandsByKind:
        """Sort `demands` (UnsupportedError: two contradict each other)."""
        weights = _one(
            demands,
            WeightDemand,
            "{count} passes quantize the same linear layers with different calibration options: ",
            "keep one of them",
        )
        inputs = _one(
            demands,
            InputRangeDemand,
            "{count} passes round what linear layers read in different ways: ",
            "keep one of them, or give them the same `activations`, `smooth` and `alpha`",
        )
        chosen = dict.fromkeys(each for each in demands if isinstance(each, SparsityDemand | WeightDemand))
        sparsity = next((each for each in chosen if isinstance(each, SparsityDemand)), None)
        refuse(
            sparsity is not None and len(chosen) > 1,
            f"two passes choose the weights of the same linear layers by calibration: {'; '.join(map(str, chosen))}",
            "keep one of them; behind sparsify-weights, quantize-channels rounds weights and keeps their zeros",
        )
        correction = _one(demands, LowRankDemand, "two passes correct the same linear layers: ", "keep one of them")
        refuse(
            correction is not None and (weights is None or InputStatistic.MOMENTS not in weights.method.demands),
            "correct-low-rank corrects what quantize-weights chose by calibration text, and no pass does that",
            "put quantize-weights with method: gptq in front of it, or leave it out",
        )
        recovery = _one(demands, RecoveryDemand, "two passes train the same scales: ", "keep one of them")
        refuse(
            recovery is not None and (weights is None or not weights.method.demands),
            "recover-scales trains those of weights that quantize-weights chose by calibration text, and no pass does",
            "put quantize-weights with method: gptq or auto in front of it, or leave it out",
        )
        pruning = _one(demands, PruningDemand, "two passes prune the same layers: ", "keep one of them")
        refuse(
            pruning is not None and weights is not None and weights.is_limited,
            "prune-structure goes with one format of all weights: method: auto measures those of the whole model",
            "choose another method, or leave prune-structure out: auto takes bytes where they cost least",
        )
        refuse(
            pruning is not None and recovery is not None,
            "recover-scales trains against the whole checkpoint, and prune-structure takes parts of it out",
            "leave one of them out",
        )
        return cls(
            weights,
            inputs,
            sparsity,
            correction,
            recovery,
            pruning,
            KvRangeDemand() in demands,
            ChannelDemand() in demands,
            ExpertRangeDemand() in demands,
        )


def refuse(wrong: bool, problem: str, hint: str) -> None:
    """Raise UnsupportedError where something is `wrong`."""
    if wrong:
        raise UnsupportedError(problem, hint=hint)


def _one(demands: Sequence[Demand], kind: type[_D], problem: str, hint: str) -> _D | None:
    """Return the one demand of a `kind`; None where there is none."""
    found = list(dict.fromkeys(demand for demand in demands if isinstance(demand, kind)))
    refuse(len(found) > 1, problem.format(count=len(found)) + "; ".join(map(str, found)), hint)
    return found[0] if found else None
