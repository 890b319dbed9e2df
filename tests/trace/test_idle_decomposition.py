"""A program that decomposing would only trace once more is translated as it is, to the same graph."""

from __future__ import annotations

from pathlib import Path

import onnx_ir as ir
import pytest

from llmforge.checkpoint import Checkpoint
from llmforge.ir import graph
from llmforge.trace import trace
from llmforge.trace.hooks import internals

from ..models import zoo

IDLE = {"llama": True, "glm": False}  # glm divides an axis that it counts from the end


@pytest.mark.thorough
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name == "llama" else [pytest.mark.slow]) for name in zoo.ZOO]
)
def test_the_graph_is_the_decomposed_one(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    zoo.write(name, tmp_path)
    checkpoint, judge, judged = Checkpoint.open(tmp_path), internals._translates, []
    monkeypatch.setattr(internals, "_translates", lambda *given: judged.append(judge(*given)) or judged[-1])
    one = trace(checkpoint)
    assert judged
    assert name not in IDLE or all(judged) is IDLE[name]
    monkeypatch.setattr(internals, "_translates", lambda *given: False)
    other = trace(checkpoint)
    assert graph.fingerprint(one) == graph.fingerprint(other)
    assert _named(one) == _named(other)


def _named(model: ir.Model) -> list[tuple[object, ...]]:
    return [(node.name, *(value and value.name for value in (*node.inputs, *node.outputs))) for node in model.graph]
