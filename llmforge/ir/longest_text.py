"""How long a text a graph is right for, where that is less than the context that the model is made for."""

from __future__ import annotations

import json
from typing import NamedTuple

import onnx_ir as ir

LONGEST_TEXT = "llmforge.longest_text"  # metadata_props key of a model: JSON of a `TextLimit`


class TextLimit(NamedTuple):
    """The longest text in tokens, and why a longer one would be computed otherwise."""

    tokens: int
    reason: str


def record(model: ir.Model, limit: TextLimit) -> None:
    """Write `limit` into `model`."""
    model.metadata_props[LONGEST_TEXT] = json.dumps(limit._asdict())


def recorded(model: ir.Model) -> TextLimit | None:
    """Read the limit of `model`; None: there is none but the model's own."""
    facts = model.metadata_props.get(LONGEST_TEXT)
    return None if facts is None else TextLimit(**json.loads(facts))
