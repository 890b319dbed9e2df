"""Dense architectures beyond the Llama family: code of their own for attention, norms, positions and layouts."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest
import torch

from llmforge.base.errors import UnsupportedError
from llmforge.checkpoint import Checkpoint
from llmforge.ir import dialect, summary
from llmforge.runtime.config import RuntimeConfig, SessionOptions
from llmforge.serving import runner
from llmforge.serving.prompts import read_tokenizer
from llmforge.trace import trace
from llmforge.trace.hooks import modules, rotary
from llmforge.verification import probe

from ..models import zoo, zoo_classic

TOLERANCE = 1e-5  # fp32 logits of standard deviation 0.6

# Node counts of two layers (cohere2: four), so that a detour that comes back is seen.
NODES = {
    "gpt2": 36,
    "opt": 47,
    "gpt-bigcode": 44,
    "gpt-neo": 36,
    "biogpt": 44,
    "xglm": 46,
    "falcon": 46,
    "falcon-7b": 40,
    "mpt": 26,
    "cohere": 53,
    "cohere2": 67,
    "phi": 43,
    "phi3": 36,
    "olmo": 44,
}
FAST = {"opt", "cohere", "phi"}  # others are among the twenty of tests/trace/test_sweep.py
SCHEDULES = {**zoo.SCHEDULES, "long": zoo.Schedule((30, 25))}  # longer than windows and original contexts


def traced(folder: Path) -> ir.Model:
    return trace(Checkpoint.open(folder))


@pytest.mark.thorough
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[] if name in FAST else [pytest.mark.slow])
        for name in zoo_classic.ZOO
        if name != "phi3-longrope"
    ],
)
def test_logits_equal_those_of_transformers(name: str, tmp_path: Path) -> None:
    zoo_classic.write(name, tmp_path)
    model = traced(tmp_path)
    expanded, expected = dialect.expand(model), zoo.reference(tmp_path)
    found = {
        schedule: zoo.largest_difference(expanded, expected, SCHEDULES[schedule], capacity=48) for schedule in SCHEDULES
    }
    assert max(found.values()) <= TOLERANCE, found
    assert len(model.graph) <= NODES.get(name, 1000), Counter(node.op_type for node in model.graph)


@pytest.mark.thorough
def test_windows_and_slopes_are_read_off_code_of_its_own(tmp_path: Path) -> None:
    zoo_classic.write("gpt-neo", tmp_path / "gpt-neo")
    nodes = [node for node in traced(tmp_path / "gpt-neo").graph if node.op_type == "Attention"]
    assert [node.attributes.get_int("window") for node in nodes] == [0, 7]
    assert [node.attributes.get_float("scale") for node in nodes] == [1.0, 1.0]
    zoo_classic.write("bloom", tmp_path / "bloom")
    graph = traced(tmp_path / "bloom").graph
    slopes = graph.initializers["alibi.slopes"].const_value
    assert slopes is not None
    np.testing.assert_allclose(slopes.numpy(), [2.0**-2, 2.0**-4, 2.0**-6, 2.0**-8], rtol=1e-6)
    assert {str(node.inputs[7].name) for node in graph if node.op_type == "Attention" and node.inputs[7]} == {
        "alibi.slopes"
    }


@pytest.mark.slow
def test_attention_code_with_other_arithmetic_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers.models.gpt_neo.modeling_gpt_neo import GPTNeoSelfAttention

    original = GPTNeoSelfAttention._attn

    def attend(self: Any, query: Any, key: Any, value: Any, mask: Any = None) -> object:
        y, weights = original(self, query, key, value, mask)
        return y + 1e-3 * torch.matmul(weights.square(), value), weights

    monkeypatch.setattr(GPTNeoSelfAttention, "_attn", attend)
    zoo_classic.write("gpt-neo", tmp_path)
    with pytest.raises(UnsupportedError, match="architecture 'GPTNeoForCausalLM' cannot be compiled"):
        traced(tmp_path)


@pytest.mark.slow
def test_position_biases_that_are_not_linear_are_refused(tmp_path: Path) -> None:
    """Falcon rounds its biases to bf16."""
    import transformers

    from ..models.checkpoints import write_tokenizer

    config = transformers.FalconConfig(**{**zoo.BASE, "alibi": True, "num_hidden_layers": 1})
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    write_tokenizer(tmp_path)
    with pytest.raises(UnsupportedError, match="architecture 'FalconForCausalLM' cannot be compiled"):
        traced(tmp_path)


SHORT_AND_LONG = (
    zoo.Schedule((12,), (1, 1, 2)),  # within the original context of 16 tokens, to its last
    zoo.Schedule((17,)),
    zoo.Schedule((40,), (1, 1, 2)),
    zoo.Schedule((10,), (10, 10, 1)),  # a text of 31 tokens in pieces, the first of them short
    zoo.Schedule((9, 30), (1, 2)),  # short and long rows of one batch
)


@pytest.mark.thorough
def test_long_rope_takes_the_factors_of_a_texts_length(tmp_path: Path) -> None:
    zoo_classic.write("phi3-longrope", tmp_path)
    model = traced(tmp_path)
    assert summary.rotary_switches(model) == {16}
    expanded, expected = dialect.expand(model), zoo.reference(tmp_path)
    for schedule in SHORT_AND_LONG:
        assert zoo.largest_difference(expanded, expected, schedule, capacity=64) <= TOLERANCE, schedule


@pytest.mark.thorough
def test_the_runtime_reads_a_long_prompt_in_pieces_with_the_angles_of_a_long_text(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Phi-3 with an original context of 16 tokens, and pieces of 8."""
    monkeypatch.setattr(runner, "LOGITS_CHUNK", 8)
    zoo_classic.write("phi3-longrope", tmp_path)
    session = probe.open_session(traced(tmp_path), probe.InitializerArrays(), threads=1)
    config = RuntimeConfig(
        format=2,
        onnxruntime="",
        kernels=None,
        max_context=64,
        max_batch=1,
        vocabulary=session.vocabulary,
        eos_token_ids=(),
        bos_token_id=None,
        caches=session.signature.caches,
        session=SessionOptions(threads=1, optimize=False, entries={}),
    )
    tokenizer = read_tokenizer(tmp_path / "tokenizer.json")
    ids = np.random.default_rng(0).integers(3, zoo.VOCABULARY, 40)
    with torch.no_grad():
        expected = zoo.reference(tmp_path)(torch.from_numpy(ids[None])).logits[0].numpy()
    got = runner.Runner(session, config, tokenizer, None).logits(ids.tolist())
    np.testing.assert_allclose(got, expected, rtol=0, atol=TOLERANCE)


def test_dynamic_angles_are_refused() -> None:
    def forward(ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        angles = ids[..., None] / (1.0 + ids.max())
        return angles.cos(), angles.sin()

    with pytest.raises(UnsupportedError, match="more than once"):
        rotary.find_switch("Rotary", forward, 100)


class Gelu(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 0.5 * x * (1 + torch.tanh(0.7978845608028654 * (x + 0.044715 * x**3)))


class Sigmoid(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * torch.sigmoid(1.702 * x)


def test_an_activation_is_recognized_by_what_it_computes() -> None:
    assert [modules.gelu(module) for module in (Gelu(), torch.nn.GELU(), Sigmoid(), torch.nn.Identity())] == [
        "tanh",
        "none",
        None,
        None,
    ]


@pytest.mark.thorough
@pytest.mark.parametrize("window", [0, 3])
def test_the_expansion_of_slopes_equals_the_reference(window: int, tmp_path: Path) -> None:
    """One step of a traced graph's attention cannot show it alone; bloom with a window can."""
    zoo_classic.write("bloom", tmp_path, num_hidden_layers=1)
    model = traced(tmp_path)
    (node,) = [node for node in model.graph if node.op_type == "Attention"]
    node.attributes["window"] = ir.AttrInt64("window", window)
    cut = dialect.expand(model)
    rng = np.random.default_rng(0)
    arrays = {
        "q": rng.standard_normal((2, 3, 64)),
        "k": rng.standard_normal((2, 3, 64)),
        "v": rng.standard_normal((2, 3, 64)),
    }
    arrays = {name: array.astype(np.float32) for name, array in arrays.items()}
    past = rng.standard_normal((2, 4, 9, 16)).astype(np.float32)
    lengths = np.array([2, 5], np.int32)
    slopes = np.array([0.25, 0.0625, 0.015625, 0.00390625], np.float32)
    form = dialect.AttentionForm(4, 4, 0.25, window=window, alibi_slopes=slopes)
    plain, none = (
        dialect.attention(arrays["q"], arrays["k"], arrays["v"], past, past, lengths, form=each)[0]
        for each in (form, replace(form, alibi_slopes=None))
    )
    assert np.abs(plain - none).max() > 1e-3
    assert not [node for node in cut.graph if node.domain == "llmforge"]
    assert "Where" in {node.op_type for node in cut.graph}
