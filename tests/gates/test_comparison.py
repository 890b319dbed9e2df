"""Two recipes beside each other: passes are told apart by name."""

from __future__ import annotations

from typing import Any

import pytest

from llmforge.gates.comparison import _differing

A: list[dict[str, Any]] = [{"fuse": {}}, {"quantize": {"bits": 4}}, {"quantize": {"bits": 8}}]


@pytest.mark.parametrize(
    ("b", "found"),
    [
        (A, {}),
        (A[1:], {"passes.fuse": ({}, None)}),
        (A[:2], {"passes.quantize (2)": ({"bits": 8}, None)}),
        ([*A, {"lower": {}}], {"passes.lower": (None, {})}),
        ([A[0], {"quantize": {"bits": 2}}, A[2]], {"passes.quantize.bits": (4, 2)}),
    ],
)
def test_passes_are_told_apart_by_name(b: list[Any], found: dict[str, Any]) -> None:
    got = dict(_differing({"passes": A}, {"passes": b}))
    assert got == found


def test_another_order_is_told_place_by_place() -> None:
    got = dict(_differing({"passes": A}, {"passes": [A[1], A[0], A[2]]}))
    assert got["passes.0.fuse"] == ({}, None)
    assert got["passes.1.fuse"] == (None, {})
