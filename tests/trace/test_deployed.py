"""What Llama 4, DBRX, LongCat, MiniMax and DeepSeek V3.2 have that others lack; each beside what is nearly that."""

from __future__ import annotations

import inspect
import textwrap
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from torch import Tensor, nn
from transformers.models.dbrx import modeling_dbrx
from transformers.models.llama4 import modeling_llama4
from transformers.models.longcat_flash import modeling_longcat_flash
from transformers.models.minimax import modeling_minimax

from llmforge.backends import signatures
from llmforge.base.errors import UnsupportedError
from llmforge.checkpoint import Checkpoint
from llmforge.compile import unused_modules
from llmforge.ir import dialect, interface
from llmforge.ir.operators.canonical import MoE
from llmforge.ir.routing import never_negative
from llmforge.passes import FlashAttention, OptimumInterface
from llmforge.trace import trace
from llmforge.trace.hooks import indexers, lightning, looped_experts, miniature, position_tracer, rotary
from llmforge.verification.trace_verifier import verify_trace

from ..models import graphs, zoo
from ..models.checkpoints import write_tokenizer
from ..models.zoo import standard_session
from ..sweep import shrink

# Indexers ----------------------------------------------------------------------------------------------------------


class Indexer(nn.Module):
    """Chooses `index_topk` of the tokens before each query, as `choose` makes of that many."""

    def __init__(self, index_topk: int, choose: Callable[[Tensor], Tensor] = lambda x: x) -> None:
        super().__init__()
        self.index_topk = index_topk
        self.weight = nn.Parameter(torch.empty(4, 6))
        self._choose = choose

    def forward(self, x: Tensor, past_key_values: Any) -> Tensor:
        keys = past_key_values.update_indexer(x @ self.weight.T, 0)
        scores = (x @ self.weight.T) @ keys.transpose(1, 2)
        return self._choose(scores.topk(min(self.index_topk, keys.shape[1]), -1).indices)


def longest(module: nn.Module, positions: int = 64) -> int:
    bound = inspect.signature(module.forward).bind(torch.zeros(2, 3, 6), past_key_values=indexers._Keys(0, None))  # type: ignore[arg-type]
    return indexers.longest(module, bound, rotary.Tables(positions))


def test_an_indexer_chooses_every_token_of_a_text_that_is_no_longer() -> None:
    assert [longest(Indexer(count)) for count in (2, 7, 8, 31, 63)] == [2, 7, 8, 31, 63]
    assert longest(Indexer(64)) == longest(Indexer(2048)) == 64  # the whole context


@pytest.mark.parametrize(
    "choose",
    [
        lambda x: x // 2 * 2,  # the first of each two
        lambda x: x.clamp(min=1),  # never the first token
        lambda x: x + 1,  # one that is not there
        lambda x: x[..., : (x.shape[-1] + 1) // 2],  # half of them
        lambda x: x.float(),
        lambda x: x[:, :1],
    ],
)
def test_an_indexer_that_leaves_tokens_out_is_refused(choose: Callable[[Tensor], Tensor]) -> None:
    with pytest.raises(UnsupportedError, match="Indexer chooses which cached tokens each query reads"):
        longest(Indexer(16, choose))


def test_an_indexer_that_leaves_tokens_out_in_some_texts_is_refused() -> None:
    """All of short texts and of long ones: what is chosen must be all up to a length, and no more from there on."""
    with pytest.raises(UnsupportedError, match="chooses which cached tokens"):
        longest(Indexer(16, lambda x: x[..., :11] if 11 < x.shape[-1] < 16 else x))


@pytest.mark.parametrize(
    ("chosen", "tokens", "reason"),
    [
        (7, 7, "Indexer chooses 7 of the tokens that a query reads, and in a longer text not all"),
        (63, 63, "Indexer chooses 63 of the tokens that a query reads, and in a longer text not all"),
        (64, 64, "Indexer chooses every token of those, and is left out"),
        (2048, 64, "Indexer chooses every token of those, and is left out"),
    ],
)
def test_an_indexer_is_noted_even_if_it_chooses_every_token_of_the_context(
    chosen: int, tokens: int, reason: str
) -> None:
    """Only then is it known that no number follows from its parameters."""
    model, shortest = nn.ModuleList([Indexer(chosen)]), indexers.Shortest()
    indexers.substitute(model, rotary.Tables(64), shortest)
    assert model[0](torch.zeros(2, 3, 6), past_key_values=indexers._Keys(0, None)) == indexers.AllTokens("Indexer")  # type: ignore[arg-type]
    assert shortest.limit == interface.TextLimit(tokens, reason)


@pytest.mark.thorough
@pytest.mark.filterwarnings("ignore")  # transformers' own, about its models
@pytest.mark.parametrize(
    ("model_type", "chosen", "tokens"),
    [
        *(("deepseek_v32", tokens, tokens) for tokens in (8, 40, 64)),
        *((name, 2048, 64) for name in ("glm_moe_dsa", "axk2", "hy_v4")),
    ],
)
def test_a_model_with_indexers_is_proven_up_to_the_tokens_that_they_choose(
    model_type: str, chosen: int, tokens: int, tmp_path: Path
) -> None:
    """Below, at and above the context: a prompt in two pieces and decoding, to the last token that is promised."""
    config = shrink.config(model_type)
    config.index_topk, config.max_position_embeddings = chosen, 64
    zoo.save(config, tmp_path)
    checkpoint = Checkpoint.open(tmp_path)
    indexer = [name for name in checkpoint.tensors if ".indexer." in name]
    assert any(name.endswith("k_norm.bias") for name in indexer)
    model = trace(checkpoint)
    limit = interface.recorded_limit(model)
    assert limit is not None
    assert limit.tokens == tokens
    verify_trace(checkpoint, model)
    assert f"{len(indexer)} tensors not used for text are left out" in str(unused_modules.note(checkpoint, model))
    schedule = zoo.Schedule((tokens - 6,), (3, 1, 1, 1))
    reference = zoo.reference(tmp_path)
    assert zoo.largest_difference(dialect.expand(model), reference, schedule, capacity=tokens) < 1e-4
    if tokens < 64:  # the indexer does matter beyond
        longer = zoo.Schedule((tokens + 2,), (1,))
        assert zoo.largest_difference(dialect.expand(model), reference, longer, capacity=tokens + 3) > 1e-3


@pytest.mark.thorough
@pytest.mark.filterwarnings("ignore")  # transformers' own, about its models
def test_a_graph_says_up_to_which_length_its_indexers_choose_every_token(tmp_path: Path) -> None:
    shrink.write("deepseek_v32", tmp_path)
    checkpoint = Checkpoint.open(tmp_path)
    model = trace(checkpoint)
    assert interface.recorded_limit(model) == (
        shrink.INDEXED,
        f"DeepseekV32Indexer chooses {shrink.INDEXED} of the tokens that a query reads, and in a longer text not all",
    )
    signatures.check_context(model, shrink.INDEXED)
    with pytest.raises(
        UnsupportedError, match=r"max_context is 73; the graph is right for texts of up to 72"
    ) as caught:
        signatures.check_context(model, shrink.INDEXED + 1)
    assert caught.value.hint == "set engine.max_context to at most 72"
    verify_trace(checkpoint, model)
    assert unused_modules.note(checkpoint, model) == (
        "15 tensors not used for text are left out: model.layers.*.self_attn.indexer (98688 bytes)"
    )


# Chunks ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("chunk", [1, 3, 8, 64])
def test_expanded_chunks_equal_the_reference(chunk: int) -> None:
    model = graphs.llama(graphs.Llama(layers=1, chunk=chunk))
    (node,) = [node for node in model.graph if node.op_type == "Attention"]
    q, k, v = node.inputs[:3]
    model.graph.outputs.extend([value for value in (q, k, v, node.outputs[0]) if value is not None])
    rng = np.random.default_rng(0)
    session = standard_session(dialect.expand(model))
    caches = {
        value.name: rng.standard_normal([2, value.shape[1], 16, value.shape[3]]).astype(np.float32)
        for value in session.get_inputs()
        if value.name.startswith("past_key_values.")
    }
    past = np.array([2, 7], np.int32)
    feeds = {"input_ids": rng.integers(0, 96, (2, 5)), "past_lengths": past}
    feeds["position_ids"] = past.astype(np.int64)[:, None] + np.arange(5)
    names = {value.name for value in session.get_inputs()}
    *_, q, k, v, y = session.run(None, {**{n: x for n, x in feeds.items() if n in names}, **caches})
    attributes = {name: attribute.value for name, attribute in node.attributes.items() if name != "layer"}
    form = dialect.AttentionForm(**attributes)
    expected, *_ = dialect.attention(q, k, v, *caches.values(), past, form=form)
    np.testing.assert_allclose(y, expected, atol=1e-5)
    whole, *_ = dialect.attention(q, k, v, *caches.values(), past, form=replace(form, chunk=0))
    assert bool(np.abs(whole - expected).max() > 1e-3) is (chunk < 12)


def test_attention_in_chunks_is_no_group_query_attention_and_not_padded_on_the_left() -> None:
    changes = FlashAttention().run(graphs.llama(graphs.Llama(layers=1, chunk=8)), graphs.CPU)
    assert not changes
    assert changes.skipped[0].reason == "attention reads chunks of 8 tokens; GroupQueryAttention knows windows"
    with pytest.raises(UnsupportedError, match="reads chunks of 8 tokens, counted from the beginning of a text"):
        OptimumInterface().run(graphs.llama(graphs.Llama(layers=1, chunk=8)), graphs.CPU)


# Positions ---------------------------------------------------------------------------------------------------------


def test_positions_behind_a_cache_are_those_of_each_row() -> None:
    given = torch.tensor([[3, 4, 5], [0, 1, 2]])
    with position_tracer.PositionTracer() as counted:
        counted.position_ids = given
        length: Any = counted.length(3)
        positions: Any = torch.arange(3) + length
        grown = (torch.log1p(torch.floor((positions.float() + 1.0) / 2)) * 0.1 + 1.0).view((1, 3, 1, 1))
        assert isinstance(torch.arange(3) + 3, Tensor)  # a number that is no cache's
        assert isinstance(torch.arange(4) + length, Tensor)  # not the tokens of the step
        assert isinstance(torch.arange(1, 4) + length, Tensor)
    expected = torch.log1p(torch.floor((given.float() + 1.0) / 2)) * 0.1 + 1.0
    torch.testing.assert_close(grown, expected[..., None, None])
    assert positions.unsqueeze(0) is given
    assert torch.equal(positions[None, :, None], given[:, :, None])


@pytest.mark.parametrize(
    "compute",
    [
        lambda x: torch.sum(x),
        lambda x: torch.cumsum(x, 0),
        lambda x: x + torch.arange(3),
        lambda x: x.view(3, 1),
        lambda x: x[1:],
        lambda x: x[:, None],
        lambda x: x.unsqueeze(1),
        lambda x: torch.pow(2.0, x),
    ],
)
def test_what_is_no_function_of_each_position_is_refused(compute: Callable[[Any], object]) -> None:
    with pytest.raises(UnsupportedError, match="with positions that it counts from the length of its cache"):
        compute(position_tracer.Positions(torch.zeros(2, 3)))


# Experts -----------------------------------------------------------------------------------------------------------


def llama4_moe(**changes: Any) -> nn.Module:
    config = transformers.Llama4TextConfig(
        hidden_size=24, intermediate_size=20, num_local_experts=5, num_experts_per_tok=2, **changes
    )
    return modeling_llama4.Llama4TextMoe(config)


def dbrx_experts() -> nn.Module:
    config = modeling_dbrx.DbrxConfig(d_model=24, ffn_config={"ffn_hidden_size": 20, "moe_num_experts": 5})
    return modeling_dbrx.DbrxExperts(config.ffn_config)


def longcat_experts(zero: int = 2) -> nn.Module:
    config = transformers.LongcatFlashConfig(
        hidden_size=24, expert_ffn_hidden_size=20, n_routed_experts=5, zero_expert_num=zero
    )
    return modeling_longcat_flash.LongcatFlashExperts(config)


EXPERTS: dict[str, Callable[[], nn.Module]] = {
    "llama4": llama4_moe,
    "dbrx": dbrx_experts,
    "longcat": longcat_experts,
    "longcat without experts that hand on": lambda: longcat_experts(0),
}


@pytest.mark.parametrize("name", EXPERTS)
def test_experts_that_no_registry_knows_are_recognized(name: str) -> None:
    """The whole module, not the small copy that was probed, computes what stands for it."""
    module = miniature.copied(EXPERTS[name](), {}, torch.Generator().manual_seed(1))
    probe = looped_experts._probe_gated_input if name == "llama4" else looped_experts._probe_loop
    found = probe(module)
    assert found is not None
    assert found.activation.activation == "silu"
    x = torch.randn(6, 24) * 0.3
    if name == "llama4":
        made = looped_experts.run_gated_input(module, found.layout, found.activation, x, looped_experts.experts.compute)
        expected = module(x[None])[0]
    else:
        ids = torch.stack([torch.randperm(found.layout.total)[:2] for _ in range(6)])
        given = (x, ids, torch.rand(6, 2))
        made = looped_experts.run_loop(module, found.layout, found.activation, *given, looped_experts.experts.compute)
        expected = module(*given)
    torch.testing.assert_close(made, expected.reshape(6, 24), rtol=1e-4, atol=1e-4)


def with_tanh(kind: type[nn.Module], line: str, other: str) -> type[nn.Module]:
    """Make the class `kind` with `line` of its forward replaced."""
    source = inspect.getsource(kind.forward)
    assert line in source
    scope: dict[str, Any] = dict(vars(inspect.getmodule(kind)))
    exec(textwrap.dedent(source).replace(line, other), scope)  # transformers' own code
    return type("Twin" + kind.__name__, (kind,), {"forward": scope["forward"]})


@pytest.mark.parametrize(
    ("name", "line", "other"),
    [
        ("dbrx", "* top_k_weights[token_idx, idx, None]", "* top_k_weights[token_idx, idx, None].square()"),
        (
            "dbrx",
            "self.mlp(hidden_states[token_idx], w1, v1, w2)",
            "self.mlp(hidden_states[token_idx], w1, v1, w2) + 0.1",
        ),
        ("longcat", "self.act_fn(gate) * up", "self.act_fn(gate) * torch.tanh(up)"),
        ("longcat", "self.identity_expert(current_state)", "torch.relu(current_state)"),
        ("longcat", "self.act_fn(gate)", "(expert_idx + 1) * self.act_fn(gate)"),
        ("llama4", "router_scores.transpose(0, 1).reshape(-1, 1)", "router_scores.transpose(0, 1).reshape(-1, 1) ** 2"),
        ("llama4", ".sum(dim=0))", ".amax(dim=0))"),
    ],
)
def test_experts_that_compute_something_else_are_left_alone(name: str, line: str, other: str) -> None:
    module = EXPERTS[name]()
    module.__class__ = with_tanh(type(module), line, other)
    looped_experts.substitute(nn.ModuleList([module]))
    assert "forward" not in vars(module)


@pytest.mark.thorough
@pytest.mark.filterwarnings("ignore")  # transformers' own, about its models
def test_kernels_take_the_experts_of_longcat(tmp_path: Path) -> None:
    """The weights of experts that compute are known not to be negative, so that they can be quantized."""
    transformers.LongcatFlashForCausalLM(shrink.config("longcat_flash")).save_pretrained(tmp_path)
    write_tokenizer(tmp_path)
    found = list(MoE.all(trace(Checkpoint.open(tmp_path))))
    assert found
    assert all(never_negative(layer.expert_weights) for layer in found)


# Lightning attention -----------------------------------------------------------------------------------------------


def lightning_module(**changes: Any) -> nn.Module:
    config = transformers.MiniMaxConfig(
        hidden_size=24, num_attention_heads=3, head_dim=10, num_hidden_layers=4, block_size=4, hidden_act="silu",
        layer_types=["linear_attention"] * 4, **changes,
    )  # fmt: skip
    return modeling_minimax.MiniMaxLightningAttention(config, 1)


@pytest.mark.parametrize(
    ("line", "other"),
    [
        ("F.sigmoid(self.output_gate", "F.tanh(self.output_gate"),
        ("attn_output = self.norm(attn_output)", "attn_output = attn_output"),
        ("attn_weights_inter * block_decay +", "attn_weights_inter +"),  # no decay from block to block
        (
            "attn_weights_inter = ratio * attn_weights_inter",
            "attn_weights_inter = attn_weights_inter",
        ),  # while decoding
        ("current_diagonal_decay, current_value_states", "current_diagonal_decay.sqrt(), current_value_states"),
        ("torch.split(qkv_states, self.head_dim, dim=3)", "torch.split(qkv_states, self.head_dim, dim=3)[::-1]"),
    ],
)
def test_another_linear_attention_is_refused(line: str, other: str) -> None:
    module = lightning_module()
    lightning.probe(module)  # this one does
    module.__class__ = with_tanh(type(module), line, other)
    with pytest.raises(UnsupportedError, match="does not compute lightning attention"):
        lightning.probe(module)


def test_decays_of_blocks_that_do_not_follow_from_slopes_are_asked_for() -> None:
    model = nn.ModuleDict({"attention": lightning_module()})
    buffers = {f"attention.{name}" for name in ("query_decay", "key_decay", "diagonal_decay")}
    assert lightning.following(model) == buffers
    model["attention"].get_buffer("key_decay").mul_(1.01)
    assert lightning.following(model) == buffers - {"attention.key_decay"}


# A multimodal wrapper ----------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # transformers' own, about its models
def test_llama_4_is_compiled_from_inside_its_wrapper(tmp_path: Path) -> None:
    config = shrink.config("llama4")
    model = transformers.Llama4ForConditionalGeneration(config).eval()
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.copy_(noise * 0.6 / parameter.shape[-1] ** 0.5 if parameter.dim() > 1 else 1 + 0.1 * noise)
    model.save_pretrained(tmp_path)
    write_tokenizer(tmp_path)
    checkpoint = Checkpoint.open(tmp_path)
    traced = trace(checkpoint)
    verify_trace(checkpoint, traced)
    said = unused_modules.note(checkpoint, traced) or ""
    assert said.startswith(
        "only the language model is compiled; 58 tensors not used for text are left out: vision_model"
    )
    assert "multi_modal_projector" in said
