"""Architectures beyond the hooks: their own attention is traced, recorded, and proved; what is wrong is refused."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import onnx_ir as ir
import pytest
import torch

from llmforge import dialect, interface
from llmforge.checkpoint import Checkpoint
from llmforge.errors import UnsupportedError, VerificationError
from llmforge.trace import fallback, trace
from llmforge.trace.ones import Ones

from .sweep import compare, shrink

pytestmark = pytest.mark.filterwarnings("ignore")  # transformers' own, about its models


def operators(model: ir.Model) -> Counter[str]:
    return Counter(f"{node.domain}::{node.op_type}".removeprefix("::") for node in model.graph)


@pytest.fixture(scope="module")
def bloom(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("bloom")
    shrink.write("bloom", folder)
    return folder


@pytest.fixture(scope="module")
def graph(bloom: Path) -> ir.Model:
    """ALiBi, which the hooks do not take; nobody may change it."""
    return trace(Checkpoint.open(bloom))


def test_its_own_attention_gives_the_logits_of_transformers(bloom: Path, graph: ir.Model) -> None:
    outcome = compare.compare("bloom", bloom, lambda _: graph)
    assert (outcome.outcome, outcome.reason) == ("right", "")


def test_the_graph_says_why_it_was_taken(graph: ir.Model) -> None:
    assert "'Mask'" in graph.metadata_props[interface.FALLBACK]
    found = operators(graph)
    assert found["TensorScatter"] == sum(value.name.startswith("past_key_values.") for value in graph.graph.inputs) > 0
    assert "llmforge::Attention" not in found
    assert interface.FALLBACK in dialect.expand(graph).metadata_props


def test_what_only_the_fallback_may_hold_is_refused_elsewhere(graph: ir.Model) -> None:
    hooked = graph.clone()
    del hooked.metadata_props[interface.FALLBACK]
    with pytest.raises(VerificationError, match=r"shape of 'past_key_values|TensorScatter stands where"):
        dialect.check(hooked)


@pytest.mark.parametrize("model_type", ["trocr"])  # reads one length of the past for all rows of a batch
def test_what_computes_other_logits_is_refused(model_type: str, tmp_path: Path) -> None:
    shrink.write(model_type, tmp_path)
    with pytest.raises(UnsupportedError, match="computes other logits than transformers"):
        trace(Checkpoint.open(tmp_path))


def test_what_is_too_large_to_be_proved_is_refused(bloom: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fallback, "PROVED_PARAMETERS", 1000)
    with pytest.raises(UnsupportedError, match=r"its own attention is only compiled where it can be proved"):
        trace(Checkpoint.open(bloom))


@pytest.mark.parametrize(
    ("model_type", "reason"),
    [
        ("whisper", "it is an encoder-decoder"),
        ("xlm", "a token change with later tokens: it is an encoder, not a decoder"),
        ("roformer", "its attention sees later tokens: it is an encoder, not a decoder"),
        ("deepseek_v4", "holds torch.int64, not weights"),
    ],
)
def test_what_is_no_decoder_is_refused_in_plain_words(model_type: str, reason: str, tmp_path: Path) -> None:
    shrink.write(model_type, tmp_path)
    with pytest.raises(UnsupportedError, match=reason):
        trace(Checkpoint.open(tmp_path))


def test_ones_are_followed_by_how_they_are_made() -> None:
    x: dict[str, Any] = {}
    with Ones() as ones:
        x["made"] = torch.ones(2, 3)
        x["moved"] = x["made"].to(torch.bool)
        x["joined"] = torch.cat([x["made"], x["made"]], -1)
        x["taken"] = x["joined"][:, None, None, :]
        x["data"] = torch.arange(6).view(2, 3) != 1
        x["mixed"] = torch.cat([x["made"], torch.zeros(2, 3)], -1)
        x["summed"] = x["made"] + x["made"]
    assert [name for name, tensor in x.items() if tensor in ones] == ["made", "moved", "joined", "taken"]


def test_a_model_that_only_looks_at_ones_is_hooked(tmp_path: Path) -> None:
    """BioGPT makes a padding mask of ones where none is given."""
    shrink.write("biogpt", tmp_path)
    model = trace(Checkpoint.open(tmp_path))
    assert operators(model)["llmforge::Attention"] == shrink.LAYERS
    assert interface.FALLBACK not in model.metadata_props
