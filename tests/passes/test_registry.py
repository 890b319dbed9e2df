"""All passes together: what each must state of itself, and the graph that they leave of a traced Llama."""

from __future__ import annotations

import inspect
import re
import sys
from dataclasses import FrozenInstanceError, fields, is_dataclass
from pathlib import Path

import pytest

from llmforge import passes
from llmforge.checkpoint import Checkpoint
from llmforge.ir import graph
from llmforge.passes import FlashAttention, FuseNorms, PackGateUp, PackQkv
from llmforge.rewrite.pass_base import Numerics, Pass
from llmforge.trace import trace
from llmforge.verification.verifier import Verifier

from ..models import graphs


def test_names_are_verb_noun_in_kebab_case_and_unique() -> None:
    names = [change.name for change in passes.ALL]
    assert len(set(names)) == len(names)
    assert all(re.fullmatch(r"[a-z]+(-[a-z]+[0-9]*)+", name) for name in names)


@pytest.mark.parametrize("change", passes.ALL, ids=lambda change: change.name)
def test_a_pass_states_what_it_is(change: type[Pass]) -> None:
    assert is_dataclass(change)
    assert isinstance(change.numerics, Numerics)
    module = sys.modules[change.__module__]
    assert Path(str(module.__file__)).stem == change.name.replace("-", "_")
    assert len(str(module.__doc__)) > 200  # the cases in which it fires, and the shapes
    assert change.__doc__
    assert ("budget" in {option.name for option in fields(change)}) == (change.numerics is Numerics.LOSSY)


@pytest.mark.parametrize("change", passes.ALL, ids=lambda change: change.name)
def test_a_pass_imports_no_other_pass(change: type[Pass]) -> None:
    source = inspect.getsource(sys.modules[change.__module__])
    assert not re.findall(r"^\s*(?:from|import) llmforge\.passes", source, re.MULTILINE)


def test_every_requirement_is_provided_by_some_pass() -> None:
    provided = frozenset[str]().union(*(change.provides for change in passes.ALL))
    assert all(change.requires <= provided for change in passes.ALL)


def test_passes_are_frozen() -> None:
    with pytest.raises(FrozenInstanceError):
        FuseNorms().name = "other"  # type: ignore[misc]


def test_a_traced_llama_of_two_layers_needs_27_nodes(tiny_checkpoint: Path, tmp_path: Path) -> None:
    model = trace(Checkpoint.open(tiny_checkpoint))
    check = Verifier(model, promises=graphs.PROMISES, folder=tmp_path / "failed")
    for change in (FuseNorms(), PackQkv(), PackGateUp(), FlashAttention()):
        verification = check.check(change, model, change.run(model, graphs.CPU))
        assert verification.allowed is not None
        assert verification.largest_difference <= 0.5 * verification.allowed
    assert graph.nodes(model) == 27
    assert graphs.operators(model) == {
        "Gather": 2,
        "RMSNormalization": 1,
        "MatMul": 9,
        "GroupQueryAttention": 2,
        "SkipSimplifiedLayerNormalization": 4,
        "Split": 2,
        "Sigmoid": 2,
        "Mul": 4,
        "Transpose": 1,
    }
    packed = model.graph.initializers["model.layers.1.self_attn.qkv_proj.weight"]
    assert graph.sources(packed) == [f"model.layers.1.self_attn.{part}_proj.weight" for part in "qkv"]
    assert {value.name for value in model.graph.inputs if not str(value.name).startswith("past_key_values.")} == {
        "input_ids",
        "logits_rows",
        "seqlens_k",
        "total_sequence_length",
    }


@pytest.mark.parametrize("order", [[PackQkv, FlashAttention], [FlashAttention, PackQkv]])
def test_order_does_not_change_the_numbers(order: list[type[Pass]], tmp_path: Path) -> None:
    model = graphs.llama()
    check = Verifier(model, promises=graphs.PROMISES, folder=tmp_path)
    for change in order:
        check.check(change(), model, change().run(model, graphs.CPU))
    assert len(graphs.find(model, "MatMul")) == 11
    assert len(graphs.find(model, "GroupQueryAttention")) == 2
