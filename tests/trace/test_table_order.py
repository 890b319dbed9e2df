"""Rotary tables are numbered as the layers apply them, not in the order of a set inside transformers."""

from __future__ import annotations

from pathlib import Path

import pytest
from transformers.models.gemma3 import modeling_gemma3

from llmforge.checkpoint import Checkpoint
from llmforge.trace import trace

from ..models import zoo


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # transformers' own, about its model
def test_the_order_of_a_set_does_not_number_tables(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A set of strings has the order of their hashes, which PYTHONHASHSEED decides; here it is given."""
    zoo.write("gemma3", tmp_path)
    graphs = []
    for backwards in (False, True):
        monkeypatch.setattr(
            modeling_gemma3, "set", lambda kinds, up=backwards: sorted({*kinds}, reverse=up), raising=False
        )
        graph = trace(Checkpoint.open(tmp_path)).graph
        tables = {
            name: value.const_value.numpy().tobytes()
            for name, value in graph.initializers.items()
            if value.const_value is not None and name.startswith("rotary.")
        }
        assert len(tables) == 4
        graphs.append(([(node.name, [value and value.name for value in node.inputs]) for node in graph], tables))
    assert graphs[0] == graphs[1]
