"""Passes that change nothing and have every kind of option, for tests of what reads passes."""

from typing import Annotated, ClassVar, Literal

import onnx_ir as ir
from pydantic import Field
from pydantic.dataclasses import dataclass

from llmforge.statistics import Demand, KvRangeDemand
from llmforge.transform import Budget, Changes, Context, Numerics, Pass


class Inert(Pass):
    numerics: ClassVar[Numerics] = Numerics.EXACT

    def run(self, model: ir.Model, context: Context) -> Changes:
        return Changes()


@dataclass(frozen=True)
class Tidy(Inert):
    """Tidy up."""

    name: ClassVar[str] = "tidy-up"


@dataclass(frozen=True)
class Lay(Inert):
    """Lay the ground."""

    name: ClassVar[str] = "lay-ground"
    provides: ClassVar[frozenset[str]] = frozenset({"ground"})


@dataclass(frozen=True)
class Squeeze(Inert):
    """Squeeze weights.

    All of them.
    """

    name: ClassVar[str] = "squeeze-weights"
    numerics: ClassVar[Numerics] = Numerics.LOSSY
    requires: ClassVar[frozenset[str]] = frozenset({"ground"})

    budget: Annotated[Budget, Field(description="what it may cost")]
    bits: Annotated[Literal[4, 8], Field(description="bits of a weight")] = 4
    block_size: Annotated[int, Field(ge=16, le=256, description="neighbours that share a scale")] = 32
    damping: Annotated[float, Field(gt=0, description="share of the mean diagonal")] = 0.01
    method: Literal["plain", "calibrated"] = "plain"
    layers: tuple[int, ...] = ()

    def demands(self) -> tuple[Demand, ...]:
        return (KvRangeDemand(),) if self.method == "calibrated" else ()


REGISTRY: tuple[type[Pass], ...] = (Tidy, Lay, Squeeze)
