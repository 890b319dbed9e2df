"""How the layers of a model repeat, as a graph records it."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass

import onnx_ir as ir

from llmforge.base.errors import UnsupportedError

# metadata_props key of a canonical graph: JSON of its `Pattern`, or {"irregular": reason} where all layers were traced.
LAYERS = "llmforge.layers"


@dataclass(frozen=True)
class Pattern:
    """Layers of a stack: `lead` of their own kind, then `period` kinds in turn, up to `depth`.

    Layer `i` ≥ `lead + period` computes with its own weights what layer `i - period` does with its.
    """

    stack: str  # name of the list of layers in the model, "model.layers"
    depth: int
    lead: int
    period: int

    @property
    def traced(self) -> int:
        """Layers that a trace needs: what leads, and two periods, so that the first proves how to copy the second."""
        return self.lead + 2 * self.period

    @property
    def kinds(self) -> int:
        """Layers that show each kind once: what leads, and one period."""
        return self.lead + self.period


class Irregular(UnsupportedError):
    """The layers do not provably repeat, which costs a trace of all of them; the message says why."""


def record(model: ir.Model, pattern: Pattern | Irregular) -> None:
    """Write into the metadata of `model` how its layers repeat, or why that is not known."""
    facts = {"irregular": pattern.message} if isinstance(pattern, Irregular) else dataclasses.asdict(pattern)
    model.metadata_props[LAYERS] = json.dumps(facts)


def recorded(model: ir.Model) -> Pattern | None:
    """Read how the layers of `model` repeat; None where that is not known."""
    facts = json.loads(model.metadata_props.get(LAYERS, "{}"))
    return Pattern(**facts) if "stack" in facts else None
