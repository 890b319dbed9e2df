"""Architectures beyond the hooks: their own attention is traced, recorded, and proved; what is wrong is refused."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import onnx_ir as ir
import pytest
import torch

from llmforge.base.errors import UnsupportedError, VerificationError
from llmforge.checkpoint import Checkpoint
from llmforge.ir import dialect, interface
from llmforge.trace import trace
from llmforge.trace.export.limits import LONGEST
from llmforge.trace.hooks import masks
from llmforge.trace.hooks.uniform import Uniform
from llmforge.verification.trace_verifier import prove_candidate, verify_trace

from ..sweep import compare, shrink

pytestmark = [
    pytest.mark.thorough,
    pytest.mark.filterwarnings("ignore"),  # transformers' own, about its models
    pytest.mark.xdist_group("trace_fallback"),
]


def operators(model: ir.Model) -> Counter[str]:
    return Counter(f"{node.domain}::{node.op_type}".removeprefix("::") for node in model.graph)


@pytest.fixture(scope="module")
def diffllama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("diffllama")
    shrink.write("diffllama", folder)
    return folder


def compiled(folder: Path) -> ir.Model:
    """Trace as a build does: what is only a candidate is proved."""
    checkpoint = Checkpoint.open(folder)
    model = trace(checkpoint)
    prove_candidate(checkpoint, model)
    return model


@pytest.fixture(scope="module")
def graph(diffllama: Path) -> ir.Model:
    """Two attentions over one cache, which the hooks do not take; nobody may change it."""
    return trace(Checkpoint.open(diffllama))


def test_its_own_attention_gives_the_logits_of_transformers(diffllama: Path, graph: ir.Model) -> None:
    outcome = compare.compare("diffllama", diffllama, lambda _: graph)
    assert (outcome.outcome, outcome.reason) == ("right", "")


def test_the_graph_says_why_it_was_taken(graph: ir.Model) -> None:
    assert "attention reads other keys and values than its layer caches" in graph.metadata_props[interface.FALLBACK]
    found = operators(graph)
    assert found["TensorScatter"] == sum(value.name.startswith("past_key_values.") for value in graph.graph.inputs) > 0
    assert "llmforge::Attention" not in found
    assert interface.FALLBACK in dialect.expand(graph).metadata_props


def test_what_only_the_fallback_may_hold_is_refused_elsewhere(graph: ir.Model) -> None:
    hooked = graph.clone()
    del hooked.metadata_props[interface.FALLBACK]
    with pytest.raises(VerificationError, match="is not in the dialect"):
        dialect.check(hooked)


def test_the_proof_runs_a_text_longer_than_any_window(diffllama: Path, graph: ir.Model) -> None:
    proof = verify_trace(Checkpoint.open(diffllama), graph)
    own = "one row", "a ragged batch", "a prompt longer than the windows", "larger numbers"
    assert proof.probes == (*own, "a text as long as the context")
    assert 0 < proof.max_abs_difference < 1e-5


def test_what_computes_other_logits_is_refused(diffllama: Path, graph: ir.Model) -> None:
    wrong = graph.clone()
    scale = next(node for node in wrong.graph if node.op_type == "Softmax")
    scale.op_type = "Tanh"
    scale.attributes.clear()
    with pytest.raises(
        UnsupportedError,
        match=r"'DiffLlamaForCausalLM' cannot be compiled: attention reads other keys.* first diverging layer: ",
    ):
        verify_trace(Checkpoint.open(diffllama), wrong)


@pytest.mark.slow
def test_one_length_of_the_past_for_all_rows_is_refused(tmp_path: Path) -> None:
    shrink.write("trocr", tmp_path)
    with pytest.raises(UnsupportedError, match=r"the traced graph does not run: .* out of data bounds"):
        compiled(tmp_path)


@pytest.mark.slow
def test_a_large_one_is_proved_by_some_of_its_layers(tmp_path: Path) -> None:
    """CodeGen's masks and angles stand in front of its layers, which are then all alike."""
    shrink.write("codegen", tmp_path)
    checkpoint = Checkpoint.open(tmp_path)
    model = trace(checkpoint)
    proof = verify_trace(checkpoint, model, whole_bytes=1)
    assert (proof.layers, proof.depth) == (3, 3)
    assert verify_trace(checkpoint, model).layers == 3
    assert interface.FALLBACK in model.metadata_props


def test_a_large_one_whose_layers_do_not_repeat_is_refused(diffllama: Path, graph: ir.Model) -> None:
    with pytest.raises(UnsupportedError, match="only compiled where it can be proved by running it, up to 1 bytes"):
        verify_trace(Checkpoint.open(diffllama), graph, whole_bytes=1)


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
        compiled(tmp_path)


def test_ones_are_followed_by_how_they_are_made() -> None:
    x: dict[str, Any] = {}
    with Uniform() as ones:
        x["made"] = torch.ones(2, 3)
        x["moved"] = x["made"].to(torch.bool)
        x["joined"] = torch.cat([x["made"], x["made"]], -1)
        x["taken"] = x["joined"][:, None, None, :]
        x["data"] = torch.arange(6).view(2, 3) != 1
        x["mixed"] = torch.cat([x["made"], torch.zeros(2, 3)], -1)
        x["summed"] = x["made"] + x["made"]
        x["written"] = torch.ones(2, 3)
        seen_as = x["written"].view(6)
        x["written"][0, 1] = 0.0
        x["view"] = seen_as
        filled = torch.full((2, 3), -1)
    assert [name for name, tensor in x.items() if ones.holds(tensor)] == ["made", "moved", "joined", "taken"]
    assert ones.number(filled) == -1
    assert ones.number(x["written"]) is None


def test_a_mask_over_a_tensor_of_one_number_is_read_at_any_place() -> None:
    with Uniform() as known:
        offset, blocks = torch.zeros(2, dtype=torch.int64), torch.full((2, 3), -1)
        other = torch.arange(3)

    def hides(b: Any, h: Any, q: Any, k: Any) -> Any:
        return (k - offset[b]) // 4 == (q - offset[b]) // 4

    def within(b: Any, h: Any, q: Any, k: Any) -> Any:
        return (blocks[b, q] >= 0) | hides(b, h, q, k)

    resolved = known.resolved(within)
    far = torch.tensor(9)
    assert bool(resolved(torch.tensor(0), None, far, torch.tensor(8)))
    assert not bool(resolved(torch.tensor(0), None, far, torch.tensor(7)))
    assert known.resolved(lambda: other)() is other


@pytest.mark.thorough
def test_a_model_that_only_looks_at_ones_is_hooked(tmp_path: Path) -> None:
    """BioGPT makes a padding mask of ones where none is given."""
    shrink.write("biogpt", tmp_path)
    model = trace(Checkpoint.open(tmp_path))
    assert operators(model)["llmforge::Attention"] == shrink.LAYERS
    assert interface.FALLBACK not in model.metadata_props


WINDOWED = {
    "chunk": lambda b, h, q, k: (k <= q) & (k // 8 == q // 8),
    "window": lambda b, h, q, k: (k <= q) & (k > q - 7),
}


@pytest.mark.parametrize(("kind", "first"), [("chunk", 8), ("window", 7)])
def test_the_length_from_which_a_mask_hides_is_found(kind: str, first: int) -> None:
    assert masks.hides_from(WINDOWED[kind], 100) == first
    assert masks.hides_from(WINDOWED[kind], first) is None


def test_a_window_beyond_every_proof_is_refused(tmp_path: Path) -> None:
    """With a window that no proof reaches, nobody knows what a model's own code computes."""
    settings = shrink.config("diffllama")
    settings.sliding_window, settings.max_position_embeddings = LONGEST, 2 * LONGEST
    shrink.build(settings).save_pretrained(tmp_path)
    shrink.write_tokenizer(tmp_path)
    with pytest.raises(UnsupportedError, match=f"its sliding_window may change what it computes from token {LONGEST}"):
        compiled(tmp_path)
