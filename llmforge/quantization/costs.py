"""What formats cost a model, measured on a few windows of text before anything is built."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from llmforge.quantization.grid import Grid


@dataclass(frozen=True)
class ModelFormats:
    """The grids of all weights: of linear layers and experts, and of embedding and head; None: these stay."""

    linears: Grid
    tables: Grid | None


@dataclass(frozen=True)
class FormatCost:
    """The mean KLD, nats a token, of weights rounded to nearest in these formats, and the bytes of all weights."""

    formats: ModelFormats
    kld: float
    size_bytes: int


@dataclass(frozen=True)
class ProbedCosts:
    """What was measured against the checkpoint in fp32, on so many `tokens`; each change alone.

    `cache` is the KLD of keys and values in int8, rotated, with a scale a token; `activations` that of what linear
    layers read in int8, in blocks of 32.
    """

    tokens: int
    parameters: int
    weights: tuple[FormatCost, ...]
    cache: float
    activations: float

    def of(self, formats: ModelFormats) -> FormatCost | None:
        """Find what `formats` cost; None: they were not measured."""
        return next((each for each in self.weights if each.formats == formats), None)

    def to_json(self) -> dict[str, Any]:
        """Write it as JSON has it."""
        return asdict(self)

    @classmethod
    def read(cls, found: Mapping[str, Any]) -> ProbedCosts:
        """Read what `to_json` wrote."""
        weights = [FormatCost(_formats(each["formats"]), each["kld"], each["size_bytes"]) for each in found["weights"]]
        return cls(**{**found, "weights": tuple(weights)})


def _formats(found: Mapping[str, Any]) -> ModelFormats:
    tables = found["tables"]
    return ModelFormats(Grid(**found["linears"]), None if tables is None else Grid(**tables))
