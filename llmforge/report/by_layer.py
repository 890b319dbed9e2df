"""The nodes that a pass changed, told once for all layers in which it did the same."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from llmforge.metrics import units
from llmforge.rewrite.pass_base import Rewritten, Skipped

_NUMBER = re.compile(r"(?<=\.)\d+(?=[./])|(?<=\.)\d+$")  # a part of a dotted name: a layer, after it an expert


@dataclass(frozen=True)
class NodeGroup:
    """Nodes that differ in the number of their layer, or of an expert in it, and what became of all of them."""

    layers: str  # "0–5, 7"; "" where the name has no number
    node: str  # "model.layers.N.mlp.experts.*.down_proj/MatMul"
    what: str  # with N, N-1 and N+1 for this layer and those beside it
    count: int


def groups(places: Sequence[Rewritten] | Sequence[Skipped]) -> list[NodeGroup]:
    """Group nodes that differ in their layer alone; in the order of the first of each."""
    found: dict[tuple[str, str], list[int | None]] = {}
    for place in places:
        layer, node, what = _template(place.node, place.what if isinstance(place, Rewritten) else place.reason)
        found.setdefault((node, what), []).append(layer)
    return [
        NodeGroup(
            layers=units.ranges(sorted({layer for layer in layers if layer is not None})),
            node=node,
            what=what,
            count=len(layers),
        )
        for (node, what), layers in found.items()
    ]


def _template(node: str, what: str) -> tuple[int | None, str, str]:
    """Write a node, and what is said of it, without the numbers of its layer and of what is counted in it."""
    numbers = _NUMBER.findall(node)
    if not numbers:
        return None, node, what
    layer, inner = int(numbers[0]), set(numbers[1:])
    named = {str(layer): "N", str(layer - 1): "N-1", str(layer + 1): "N+1"}

    def of_name(found: re.Match[str]) -> str:
        """Write one dotted name; its first number is that of a layer."""
        seen = 0

        def number(digits: re.Match[str]) -> str:
            nonlocal seen
            seen += 1
            return named.get(digits[0], digits[0]) if seen == 1 else "*" if digits[0] in inner else digits[0]

        return _NUMBER.sub(number, found[0])

    return layer, re.sub(r"\S+", of_name, node), re.sub(r"\S+", of_name, what)
