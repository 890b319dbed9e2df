from __future__ import annotations

import gc
import json
import weakref
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import onnx_ir as ir
import psutil
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from llmforge.base.errors import CheckpointError, NotADecoder, UnsupportedError
from llmforge.checkpoint import Checkpoint
from llmforge.ir import dialect, graph, interface
from llmforge.trace import trace
from llmforge.trace.export import skeleton, weights
from llmforge.trace.hooks import internals, masks, norms
from llmforge.trace.hooks.attention import AttentionHook
from llmforge.verification.trace_verifier import prove_candidate

from ..models import zoo
from ..models.checkpoints import safetensors_bytes, write_checkpoint, write_tokenizer

TOLERANCE = 1e-5  # fp32 logits of standard deviation 0.6


def traced(folder: Path) -> ir.Model:
    return trace(Checkpoint.open(folder))


def compiled(folder: Path) -> ir.Model:
    """Trace as a build does."""
    checkpoint = Checkpoint.open(folder)
    model = trace(checkpoint)
    prove_candidate(checkpoint, model)
    return model


def operators(model: ir.Model) -> Counter[str]:
    return Counter(f"{node.domain}::{node.op_type}".removeprefix("::") for node in model.graph)


# The same logits as transformers -----------------------------------------------------------------------------------


# What they exercise alone is beyond the Llama family, or is among the twenty of tests/trace/test_sweep.py.
SLOW = {
    "deepseek-v3",
    "gemma3",
    "gemma3n",
    "glm4-moe",
    "gpt-neox",
    "gpt-oss",
    "jamba",
    "nemotron-h",
    "granitemoe",
    "llama-mha-biases",
    "minicpm3",
    "mixtral",
    "mistral-window",
    "olmo-hybrid",
    "phimoe",
    "qwen2",
    "qwen2-moe",
    "qwen3",
    "qwen3-moe",
    "qwen3-next",
    "smollm3",
    "youtu",
}


# By default: plain attention, windows and norms that differ, latents, scans and delta rules.
QUICK = {"llama", "gemma2", "deepseek-v2", "bamba", "qwen3-5"}


def of_the_zoo() -> list[object]:
    later = {name: pytest.mark.slow if name in SLOW else pytest.mark.thorough for name in set(zoo.ZOO) - QUICK}
    return [pytest.param(name, marks=[later[name]] if name in later else []) for name in zoo.ZOO]


def test_what_is_quick_is_in_the_zoo() -> None:
    assert set(zoo.ZOO) - SLOW >= QUICK


@pytest.mark.parametrize("name", of_the_zoo())
def test_logits_equal_those_of_transformers(name: str, tmp_path: Path) -> None:
    zoo.write(name, tmp_path)
    model = dialect.expand(traced(tmp_path))
    expected = zoo.reference(tmp_path)
    differences = {
        schedule: zoo.largest_difference(model, expected, zoo.SCHEDULES[schedule]) for schedule in zoo.SCHEDULES
    }
    assert max(differences.values()) <= TOLERANCE, differences


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_weights_are_cast_exactly(dtype: torch.dtype, tmp_path: Path) -> None:
    zoo.write("llama-tied", tmp_path, dtype, num_hidden_layers=1)
    model = dialect.expand(traced(tmp_path))
    assert zoo.largest_difference(model, zoo.reference(tmp_path), zoo.SCHEDULES["ragged"]) <= TOLERANCE


def test_windows_of_layers_come_from_their_masks(tmp_path: Path) -> None:
    zoo.write("qwen2-mixed-windows", tmp_path)
    model = traced(tmp_path)
    assert [node.attributes.get_int("window") for node in model.graph if node.op_type == "Attention"] == [0, 7, 7]


def test_a_head_of_other_content_than_the_embedding_is_not_tied(tmp_path: Path) -> None:
    """transformers unties such a checkpoint too, whatever its configuration says."""
    zoo.write("llama-tied", tmp_path, num_hidden_layers=1)
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].flip(0).contiguous()
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    model = traced(tmp_path)
    assert "lm_head.weight" in model.graph.initializers
    assert "Transpose" not in operators(model)
    assert zoo.largest_difference(dialect.expand(model), zoo.reference(tmp_path), zoo.SCHEDULES["one"]) <= TOLERANCE


def test_tensors_that_a_base_model_saved_are_found_by_their_shorter_names(tmp_path: Path) -> None:
    zoo.write("llama-tied", tmp_path, num_hidden_layers=1)
    expected = zoo.reference(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    renamed = {name.removeprefix("model."): tensor for name, tensor in tensors.items()}
    save_file(renamed, tmp_path / "model.safetensors", {"format": "pt"})
    model = traced(tmp_path)
    assert "model.layers.0.mlp.up_proj.weight" in model.graph.initializers
    assert zoo.largest_difference(dialect.expand(model), expected, zoo.SCHEDULES["one"]) <= TOLERANCE


# The canonical graph -----------------------------------------------------------------------------------------------

LLAMA = {
    "Gather": 2,
    "RMSNormalization": 5,
    "MatMul": 15,
    "RotaryEmbedding": 4,
    "llmforge::Attention": 2,
    "Add": 4,
    "Sigmoid": 2,
    "Mul": 4,
}


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> ir.Model:
    """A 2-layer Llama of bf16 weights, tied; nobody may change it."""
    folder = tmp_path_factory.mktemp("llama")
    zoo.write("llama-tied", folder, torch.bfloat16)
    return traced(folder)


def test_a_llama_holds_nothing_but_canonical_operators(llama: ir.Model, tmp_path: Path) -> None:
    zoo.write("llama", tmp_path)
    assert operators(traced(tmp_path)) == LLAMA
    assert operators(llama) == LLAMA | {"Transpose": 1}
    assert dict(llama.opset_imports) == {"": 24, "llmforge": 1}


def test_the_interface_is_the_one_of_the_dialect(llama: ir.Model) -> None:
    dialect.check(llama)
    inputs = {value.name: (value.dtype.name, graph.dims(value)) for value in llama.graph.inputs if value.dtype}
    cache = ("FLOAT", ("batch", 2, "capacity", 16))
    assert inputs == {
        "input_ids": ("INT64", ("batch", "sequence")),
        "position_ids": ("INT64", ("batch", "sequence")),
        "past_lengths": ("INT32", ("batch",)),
        "logits_rows": ("INT64", ("rows",)),
        "past_key_values.0.key": cache,
        "past_key_values.0.value": cache,
        "past_key_values.1.key": cache,
        "past_key_values.1.value": cache,
    }
    outputs = {value.name: graph.dims(value) for value in llama.graph.outputs}
    assert outputs.pop("logits") == ("batch", "rows", zoo.VOCABULARY)
    assert outputs == {f"present.{n}.{part}": cache[1] for n in (0, 1) for part in ("key", "value")}
    default = llama.graph.initializers["logits_rows"].const_value
    assert default is not None
    assert default.numpy().tolist() == [-1]


def test_logits_are_computed_for_the_selected_rows_alone(llama: ir.Model) -> None:
    head = next(value for value in llama.graph.outputs if value.name == "logits").producer()
    assert head is not None
    (selected, tied) = head.inputs
    assert selected is not None
    assert tied is not None
    chosen, transpose = selected.producer(), tied.producer()
    assert chosen is not None
    assert transpose is not None
    assert (chosen.op_type, chosen.inputs[1].name) == ("Gather", "logits_rows")  # type: ignore[union-attr]
    assert (transpose.op_type, transpose.inputs[0].name) == ("Transpose", "model.embed_tokens.weight")  # type: ignore[union-attr]


def test_weights_are_named_by_their_parameter_and_lie_transposed(llama: ir.Model) -> None:
    value = llama.graph.initializers["model.layers.1.self_attn.k_proj.weight"]
    assert graph.sources(value) == ["model.layers.1.self_attn.k_proj.weight"]
    assert graph.dims(value) == (64, 32)  # [K, N]; the checkpoint holds [32, 64]
    assert value.dtype == ir.DataType.FLOAT
    names = {value.name for value in llama.graph.initializers.values() if graph.sources(value)}
    assert len(names) == 2 * 9 + 2
    assert set(llama.graph.initializers) - names == {"rotary.cos", "rotary.sin", "logits_rows"}


def test_nodes_are_named_by_their_module(llama: ir.Model) -> None:
    names = [node.name for node in llama.graph]
    assert "model.layers.1.self_attn/Attention" in names
    assert "model.layers.0.mlp.up_proj/MatMul" in names
    assert len(set(names)) == len(names)


def test_rotary_tables_hold_the_models_own_angles(llama: ir.Model) -> None:
    cos, sin = (llama.graph.initializers[f"rotary.{part}"].const_value for part in ("cos", "sin"))
    angles = np.outer(np.arange(128), 10000.0 ** -(np.arange(0, 16, 2) / 16))
    assert cos is not None
    assert sin is not None
    assert cos.dtype == ir.DataType.FLOAT
    np.testing.assert_allclose(cos.numpy(), np.cos(angles), atol=2e-5)
    np.testing.assert_allclose(sin.numpy(), np.sin(angles), atol=2e-5)


def test_tracing_twice_gives_the_same_graph_without_paths_of_this_machine(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoint-folder"
    write_checkpoint(folder, dtype="bfloat16", num_hidden_layers=1)
    first, second = traced(folder), traced(folder)
    assert graph.fingerprint(first) == graph.fingerprint(second)
    for value in first.graph.initializers.values():
        value.const_value = None
    text = ir.to_proto(ir.Model(first.graph, ir_version=first.ir_version)).SerializeToString()
    for path in (str(folder), str(Path(__file__).parents[2])):
        assert path.encode() not in text


@pytest.mark.thorough
def test_the_trace_leaves_no_hooks_behind(tiny_checkpoint: Path) -> None:
    from transformers.models.llama import modeling_llama

    register, apply = torch.nn.Module.register_parameter, modeling_llama.apply_rotary_pos_emb
    traced(tiny_checkpoint)
    assert torch.nn.Module.register_parameter is register
    assert modeling_llama.apply_rotary_pos_emb is apply
    assert AttentionHook.NAME not in transformers.AttentionInterface().valid_keys()
    assert AttentionHook.NAME not in transformers.AttentionMaskInterface().valid_keys()


# Lazy weights ------------------------------------------------------------------------------------------------------


def test_fp32_tensors_that_lie_as_the_graph_wants_are_byte_ranges_of_the_file(tmp_path: Path) -> None:
    parameters = write_checkpoint(tmp_path, num_hidden_layers=1)
    initializers = traced(tmp_path).graph.initializers
    norm = initializers["model.norm.weight"].const_value
    assert isinstance(norm, ir.ExternalTensor)
    assert Path(norm.location) == tmp_path / "model.safetensors"
    np.testing.assert_array_equal(norm.numpy(), parameters["model.norm.weight"])
    assert isinstance(initializers["model.embed_tokens.weight"].const_value, ir.ExternalTensor)


def test_lazy_tensors_read_cast_transpose_and_keep_nothing(tmp_path: Path) -> None:
    parameters = write_checkpoint(tmp_path, dtype="bfloat16", num_hidden_layers=1)
    lazy = traced(tmp_path).graph.initializers["model.layers.0.mlp.down_proj.weight"].const_value
    assert isinstance(lazy, ir.LazyTensor)
    array = lazy.numpy()
    assert (array.dtype, array.flags.c_contiguous) == (np.float32, True)
    np.testing.assert_array_equal(array, parameters["model.layers.0.mlp.down_proj.weight"].astype(np.float32).T)
    alive = weakref.ref(array)
    del array
    gc.collect()
    assert alive() is None


def test_a_hub_snapshot_of_symbolic_links_and_shards_is_read(tmp_path: Path) -> None:
    blobs, snapshot = tmp_path / "blobs", tmp_path / "snapshot"
    parameters = write_checkpoint(blobs, shards=3, num_hidden_layers=1)
    snapshot.mkdir()
    for file in blobs.iterdir():
        (snapshot / file.name).symlink_to(file)
    for name, value in traced(snapshot).graph.initializers.items():
        if name in parameters:
            assert value.const_value is not None
            array = value.const_value.numpy()
            kept = name == "model.embed_tokens.weight" or array.ndim == 1
            np.testing.assert_array_equal(array if kept else array.T, parameters[name])


LARGE = {  # Llama-70B's embedding, head and one layer
    "hidden_size": 8192,
    "intermediate_size": 28672,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 128256,
    "num_hidden_layers": 1,
    "max_position_embeddings": 8192,
    "tie_word_embeddings": False,
}


def write_hollow(folder: Path, **changes: Any) -> int:
    """Write a checkpoint of zeros that takes no space on the disk; return its size in bytes."""
    from ..models.checkpoints import CONFIG, shapes

    config = {**CONFIG, **changes}
    header, offset = {}, 0
    for name, shape in shapes(config).items():
        size = 2 * int(np.prod(shape))
        header[name] = {"dtype": "BF16", "shape": list(shape), "data_offsets": [offset, offset + size]}
        offset += size
    raw = safetensors_bytes(header)
    file = folder / "model.safetensors"
    file.write_bytes(raw)
    with file.open("r+b") as handle:
        handle.truncate(len(raw) + offset)
    (folder / "config.json").write_text(json.dumps(config))
    write_tokenizer(folder)
    return offset


def test_tracing_reads_no_weights_and_gives_them_no_memory(tmp_path: Path, tiny_checkpoint: Path) -> None:
    traced(tiny_checkpoint)  # what a first trace imports is not counted
    size = write_hollow(tmp_path, **LARGE)
    process = psutil.Process()
    resident, read = process.memory_info().rss, process.io_counters().read_chars
    model = traced(tmp_path)
    assert size > 3e9
    assert process.memory_info().rss - resident < 2e8
    assert process.io_counters().read_chars - read < 2e7
    assert graph.dims(model.graph.initializers["model.layers.0.mlp.down_proj.weight"]) == (28672, 8192)


def test_weights_of_another_layout_go_through_transformers_own_converters(tmp_path: Path) -> None:
    """Mixtral stores one matrix per expert, and its model holds them merged: gate and up stacked."""
    changes = {"num_local_experts": 3, "num_experts_per_tok": 2, "sliding_window": None}
    config = transformers.MixtralConfig(**{**zoo.BASE, **changes})
    transformers.AutoModelForCausalLM.from_config(config).to(torch.bfloat16).save_pretrained(tmp_path)
    write_tokenizer(tmp_path)
    checkpoint = Checkpoint.open(tmp_path)
    assert "model.layers.0.mlp.experts.gate_up_proj" not in checkpoint.tensors
    expected = zoo.reference(tmp_path).state_dict()
    with internals.registered(AttentionHook.NAME, lambda: None, lambda: None):
        model, _ = skeleton.build(checkpoint.config, AttentionHook.NAME)
    sources = weights.plan(model, checkpoint)
    assert set(sources) == set(expected)
    merged = [name for name, source in sources.items() if source.converted is not None]
    assert len(merged) == 2 * 2
    for name in merged:
        read = sources[name].converted
        assert read is not None
        pieces = list(read())
        assert [len(piece) for piece in pieces] == [1, 1, 1]  # an expert at a time
        assert torch.equal(torch.cat(pieces).float(), expected[name])


# Refusals ----------------------------------------------------------------------------------------------------------


def edit_tensors(folder: Path, edit: Callable[[dict[str, torch.Tensor]], object]) -> None:
    tensors = load_file(folder / "model.safetensors")
    edit(tensors)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})


def test_a_missing_head_that_is_not_declared_tied_is_refused(tmp_path: Path) -> None:
    zoo.write("llama", tmp_path)
    edit_tensors(tmp_path, lambda tensors: tensors.pop("lm_head.weight"))
    with pytest.raises(CheckpointError, match=r"lacks 'lm_head.weight'.*does not declare tie_word_embeddings"):
        traced(tmp_path)


def test_a_missing_weight_is_refused(tiny_checkpoint: Path) -> None:
    edit_tensors(tiny_checkpoint, lambda tensors: tensors.pop("model.layers.1.mlp.up_proj.weight"))
    with pytest.raises(CheckpointError, match=r"lacks 'model.layers.1.mlp.up_proj.weight'"):
        traced(tiny_checkpoint)


def test_a_weight_of_another_shape_is_refused(tiny_checkpoint: Path) -> None:
    edit_tensors(tiny_checkpoint, lambda tensors: tensors.update({"model.norm.weight": torch.ones(65)}))
    with pytest.raises(CheckpointError, match=r"'model.norm.weight' has shape \[65\].*\[64\]"):
        traced(tiny_checkpoint)


def test_tensors_without_a_use_are_recorded(tiny_checkpoint: Path) -> None:
    edit_tensors(tiny_checkpoint, lambda tensors: tensors.update({"value_head.weight": torch.ones(3)}))
    model = traced(tiny_checkpoint)
    assert json.loads(model.metadata_props[weights.UNUSED]) == ["value_head.weight"]


@pytest.mark.parametrize(
    ("kind", "changes", "reason"),
    [
        ("BertConfig", {"is_decoder": False}, "it is an encoder, not a decoder"),
        ("OpenAIGPTConfig", {}, "no layer caches keys and values or a state"),
        ("T5Config", {"d_kv": 16, "num_layers": 1, "d_ff": 96}, "encoder-decoder"),
    ],
)
def test_an_architecture_that_cannot_be_traced_is_refused_by_name(
    kind: str, changes: dict[str, Any], reason: str, tmp_path: Path
) -> None:
    config = getattr(transformers, kind)(**{**zoo.BASE, "num_hidden_layers": 1, **changes})
    auto = transformers.AutoModelForSeq2SeqLM if config.is_encoder_decoder else transformers.AutoModelForCausalLM
    auto.from_config(config).save_pretrained(tmp_path)
    write_tokenizer(tmp_path)
    name = kind.removesuffix("Config")
    with pytest.raises(UnsupportedError, match=rf"architecture '{name}\w*' cannot be compiled: .*{reason}"):
        compiled(tmp_path)


def test_a_norm_with_other_arithmetic_is_traced_as_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers.models.llama.modeling_llama import LlamaRMSNorm

    original = LlamaRMSNorm.forward
    monkeypatch.setattr(LlamaRMSNorm, "forward", lambda self, x: original(self, x) + 1)
    zoo.write("llama-tied", tmp_path, num_hidden_layers=1)
    model = traced(tmp_path)
    assert "RMSNormalization" not in operators(model)
    assert operators(model)["ReduceMean"] == 3
    assert zoo.largest_difference(dialect.expand(model), zoo.reference(tmp_path), zoo.SCHEDULES["one"]) <= TOLERANCE


@pytest.mark.slow
def test_a_model_that_computes_with_the_length_of_the_past_is_refused(
    tiny_checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One length for all rows of a batch is wrong for ragged ones; positions are given."""
    from transformers.models.llama.modeling_llama import LlamaAttention

    original = LlamaAttention.forward

    def forward(self: Any, hidden_states: torch.Tensor, *, past_key_values: Any, **rest: Any) -> object:
        past = 0 if past_key_values is None else past_key_values.get_seq_length()
        scaled = hidden_states * (1 + past)
        return original(self, scaled, past_key_values=past_key_values, **rest)

    monkeypatch.setattr(LlamaAttention, "forward", forward)
    refused = r"is not in the dialect; .* own code failed too: the traced graph does not match .* differ by"
    with pytest.raises(UnsupportedError, match=refused):
        compiled(tiny_checkpoint)


def test_what_a_checkpoint_holds_besides_parameters_comes_from_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A persistent buffer has a value in the constructor, which must not stand in for the checkpoint's."""
    from transformers.models.llama.modeling_llama import LlamaMLP

    construct, compute = LlamaMLP.__init__, LlamaMLP.forward

    def init(self: Any, config: Any) -> None:
        construct(self, config)
        self.register_buffer("gain", torch.ones(config.hidden_size))

    monkeypatch.setattr(LlamaMLP, "__init__", init)
    monkeypatch.setattr(LlamaMLP, "forward", lambda self, x: compute(self, x) * self.gain)
    zoo.write("llama", tmp_path, num_hidden_layers=1)
    edit_tensors(tmp_path, lambda tensors: tensors["model.layers.0.mlp.gain"].fill_(3.0))
    model = traced(tmp_path)
    assert graph.sources(model.graph.initializers["model.layers.0.mlp.gain"]) == ["model.layers.0.mlp.gain"]
    assert zoo.largest_difference(dialect.expand(model), zoo.reference(tmp_path), zoo.SCHEDULES["one"]) <= TOLERANCE
    edit_tensors(tmp_path, lambda tensors: tensors.pop("model.layers.0.mlp.gain"))
    with pytest.raises(CheckpointError, match=r"lacks 'model.layers.0.mlp.gain'"):
        traced(tmp_path)


@pytest.mark.thorough
def test_a_rotary_function_with_other_arithmetic_is_left_to_the_model(
    tiny_checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers.models.llama import modeling_llama

    original = modeling_llama.apply_rotary_pos_emb

    def apply_rotary_pos_emb(q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> object:
        q, k = original(q, k, cos, sin)
        return q, k * 1.001

    monkeypatch.setattr(modeling_llama, "apply_rotary_pos_emb", apply_rotary_pos_emb)
    reason = compiled(tiny_checkpoint).metadata_props[interface.FALLBACK]
    assert "test_trace.apply_rotary_pos_emb is no rotary embedding" in reason


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        ({"position_bias": torch.zeros(1)}, "gives attention position_bias, which llmforge::Attention lacks"),
        ({"dropout": 0.1}, "drops out attention weights"),
        ({"attention_mask": torch.zeros(1)}, "a mask of its own making"),
        ({"attention_mask": None}, "gives attention no mask"),
    ],
)
def test_attention_with_an_unknown_argument_is_refused(given: dict[str, Any], reason: str) -> None:
    attention = AttentionHook(positions=16)
    arguments = {"attention_mask": masks.Mask(0), **given}
    x = torch.zeros(1, 2, 3, 4)
    with pytest.raises(UnsupportedError, match=reason):
        attention.attend(torch.nn.Identity(), x, x, x, **arguments)


# What hooks recognize ----------------------------------------------------------------------------------------------


def causal(b: torch.Tensor, h: torch.Tensor, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    return k <= q


@pytest.mark.parametrize(
    ("function", "window"),
    [
        (causal, 0),
        (lambda b, h, q, k: (k <= q) & (k > q - 7), 7),
        (lambda b, h, q, k: (k <= q) & (k > q - 1), 1),
        (lambda b, h, q, k: (k <= q) & (k > q - 500), 0),  # further than any position
    ],
)
def test_a_mask_is_classified(function: masks.MaskFunction, window: int) -> None:
    assert masks.classify(function, 100) == masks.Mask(window)


def test_chunks_are_classified() -> None:
    assert masks.classify(lambda b, h, q, k: (k <= q) & (k // 8 == q // 8), 100) == masks.Mask(0, chunk=8)
    assert masks.classify(lambda b, h, q, k: (k <= q) & (k // 50 == q // 50), 100) == masks.Mask(0, chunk=50)


@pytest.mark.parametrize(
    "function",
    [
        lambda b, h, q, k: (k <= q) & ((k + 3) // 8 == (q + 3) // 8),  # chunks, of which the first is shorter
        lambda b, h, q, k: (k <= q) & (k // 8 == q // 8) & (k > q - 6),  # a window in chunks
        lambda b, h, q, k: (k <= q) & ((k // 8 == q // 8) | (k < 4)),  # chunks that all see a prefix
        lambda b, h, q, k: (k <= q) | (k < 4),  # a prefix that all see
        lambda b, h, q, k: (k <= q) & ((k > q - 7) | (k < 2)),  # a window with sinks
        lambda b, h, q, k: k < q,
    ],
)
def test_another_mask_is_refused(function: masks.MaskFunction) -> None:
    with pytest.raises(UnsupportedError, match="neither causal nor a causal window"):
        masks.classify(function, 100)


def test_a_mask_that_hides_nothing_is_an_encoders() -> None:
    with pytest.raises(NotADecoder, match="it is an encoder, not a decoder"):
        masks.classify(lambda b, h, q, k: k >= 0, 100)


class Norm(torch.nn.Module):
    """x̂·w with hostile variations."""

    def __init__(self, eps: float = 1e-5, *, offset: float = 0.0, centered: bool = False, after: float = 0.0) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(16))
        self.variance_epsilon, self.other_epsilon = eps, 1e-3
        self.offset, self.centered, self.after = offset, centered, after

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x - x.mean(-1, keepdim=True) if self.centered else x
        x = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.variance_epsilon)
        return x * (self.offset + self.weight) + self.after


@pytest.mark.parametrize(
    ("norm", "expected"),
    [
        (Norm(), (0.0, 1e-5)),
        (Norm(1e-6), (0.0, 1e-6)),
        (Norm(offset=1.0), (1.0, 1e-5)),
        (Norm(offset=0.5), None),
        (Norm(centered=True), None),
        (Norm(after=1e-3), None),
    ],
)
def test_a_norm_is_recognized_by_what_it_computes(norm: Norm, expected: tuple[float, float] | None) -> None:
    assert norms.probe(norm, (16,), [norm.variance_epsilon, norm.other_epsilon]) == expected


def test_bfloat16_survives_the_way_to_torch_and_back() -> None:
    array = np.array([1.5, -2.25, 3e38], ml_dtypes.bfloat16)
    tensor = weights._torch(ir.Tensor(array, dtype=ir.DataType.BFLOAT16))
    assert tensor.dtype == torch.bfloat16
    np.testing.assert_array_equal(weights._numpy(tensor), array)


def test_every_value_has_a_type(tiny_checkpoint: Path) -> None:
    """A value with a shape and no type cannot be written, and onnx-ir complains of each."""
    model = trace(Checkpoint.open(tiny_checkpoint))
    assert [value.name for node in model.graph for value in node.outputs if value.dtype is None and value.shape] == []
