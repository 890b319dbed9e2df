"""What adapters take: bytes of an engine that keeps them apart, and what a decode step of a row reads more."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from llmforge.checkpoint.adapters import Adapter
from llmforge.metrics.units import percent, size
from llmforge.planning.scheme import BITS, DtypeScheme


@dataclass(frozen=True)
class Adapters:
    """The adapters of a recipe: those that are merged, and those that are kept apart."""

    merged: tuple[Adapter, ...] = ()
    apart: tuple[Adapter, ...] = ()

    def bytes_apart(self, scheme: DtypeScheme) -> int:
        """Size of all matrices in an engine: of each layer as many as there are adapters and one of zeros."""
        return (len(self.apart) + 1) * self.bytes_of_row(scheme) if self.apart else 0

    def bytes_of_row(self, scheme: DtypeScheme) -> int:
        """Size of the matrices that a row reads in a step, where an adapter changes every layer that one changes."""
        ranks: dict[str, tuple[int, int]] = {}
        for adapter in self.apart:
            for module, each in adapter.low_rank.items():
                rank = max(each.rank, ranks.get(module, (0, 0))[0])
                ranks[module] = rank, sum(each.shape)
        return sum(rank * features for rank, features in ranks.values()) * BITS[scheme.compute] // 8

    def notes(self, scheme: DtypeScheme, step_bytes: float) -> Sequence[str]:
        """Say it in words; a decode step moves `step_bytes` without them."""
        found = []
        if self.merged:
            names = ", ".join(adapter.name for adapter in self.merged)
            found.append(f"adapters merged ({names}): no bytes and no time of the engine")
        if self.apart:
            row = self.bytes_of_row(scheme)
            found.append(
                f"adapters kept apart ({', '.join(adapter.name for adapter in self.apart)}): "
                f"{size(self.bytes_apart(scheme))} in the engine, in {scheme.compute}; each row of a decode step that "
                f"has one reads {size(row)} more, {percent(row / step_bytes)} of the step's bytes"
            )
        return found
