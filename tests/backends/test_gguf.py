"""GGUF files hold our codes as they are; what they do not hold is refused. llama.cpp itself: test_gguf_in_llama_cpp."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from tokenizers import Tokenizer

from llmforge import targets
from llmforge.backends.engines import BuildRequest, exporter
from llmforge.backends.exported_parameters import Exported
from llmforge.backends.gguf import builder as gguf
from llmforge.backends.gguf import packing
from llmforge.base.errors import EnvironmentLacks, UnsupportedError, VerificationError
from llmforge.checkpoint import Checkpoint
from llmforge.compile import export_proxy
from llmforge.passes import QuantizeChannels, QuantizeWeights
from llmforge.quantization.grid import Grid
from llmforge.quantization.grids import QuantizedMatrix, dequantize, round_to_nearest
from llmforge.recipe import EngineSpec
from llmforge.rewrite.pass_base import Budget, Context

Traced = tuple[Checkpoint, ir.Model]
LOOSE = Budget(kld_mean=1.0)
LOCAL = targets.local()
SPEC = EngineSpec(backend="gguf", max_context=64)


def blocks(**changes: Any) -> QuantizeWeights:
    options = {"bits": 4, "block_size": 32, "symmetric": True, "scales": "fp16", "method": "rtn", **changes}
    return QuantizeWeights(budget=LOOSE, **options)


def read(data: NDArray[np.uint8], bits: int, k: int) -> NDArray[np.float32]:
    """Dequantize Q4_0 or Q8_0 by the definition in ggml-quants.c, weight by weight."""
    size = 2 + 32 * bits // 8
    found = np.empty((len(data), k), np.float32)
    for n, row in enumerate(data):
        for b in range(k // 32):
            block = row[b * size : (b + 1) * size]
            scale = block[:2].view("<f2")[0].astype(np.float32)
            for i in range(16):
                if bits == 4:
                    found[n, 32 * b + i] = (int(block[2 + i] & 15) - 8) * scale
                    found[n, 32 * b + 16 + i] = (int(block[2 + i] >> 4) - 8) * scale
                else:
                    found[n, 32 * b + i] = block[2 + i].view(np.int8) * scale
                    found[n, 32 * b + 16 + i] = block[18 + i].view(np.int8) * scale
    return found


@settings(max_examples=25, deadline=None)
@given(
    bits=st.sampled_from([4, 8]),
    block_size=st.sampled_from([32, 64, 128]),
    rows=st.integers(1, 3),
    spread=st.sampled_from([1e-6, 0.02, 3.0, 1e3]),
    seed=st.integers(0, 1000),
)
def test_codes_and_scales_are_held_exactly(bits: int, block_size: int, rows: int, spread: float, seed: int) -> None:
    weight = (spread * np.random.default_rng(seed).standard_normal((rows, 256))).astype(np.float32)
    weight[0, :block_size] = 0
    matrix = round_to_nearest(weight, Grid(bits, block_size, True, "fp16"))
    assert np.array_equal(read(packing.pack(matrix), bits, 256), dequantize(matrix))


def test_every_code_has_its_place() -> None:
    for bits in (4, 8):
        codes = (np.arange(256) % 2**bits).astype(np.uint8).reshape(1, 256)
        matrix = QuantizedMatrix(Grid(bits, 32, True, "fp16"), codes, np.full((1, 8), -0.5, np.float32), None)
        assert np.array_equal(read(packing.pack(matrix), bits, 256), dequantize(matrix))


def export(traced: Traced, *steps: Any) -> Exported:
    checkpoint, model = traced
    copy = model.clone()
    for step in steps:
        assert step.run(copy, Context(LOCAL))
    return export_proxy.exported(copy, model, checkpoint)


@pytest.fixture(scope="module")
def sample(sample_checkpoint: Path, sample_graph: ir.Model) -> Traced:
    return Checkpoint.open(sample_checkpoint), sample_graph


def test_our_sample_is_taken(sample: Traced) -> None:
    found = export(sample, blocks(embedding_bits=8))
    exporter("gguf", LOCAL).check(found, SPEC)
    embedding = found.quantized["model.embed_tokens.weight"]
    assert embedding.table  # type: ignore[union-attr]
    assert embedding.read().shape == (8192, 256)  # type: ignore[union-attr]
    assert embedding.bits == 8  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("step", "message", "hint"),
    [
        (blocks(symmetric=False), "Q4_1 does not hold zero points exactly", "symmetric: true"),
        (blocks(scales="fp32"), "its scales are fp32", "scales: fp16"),
        (QuantizeChannels(budget=LOOSE, dtype="int8", head=False), "one fp32 scale", "quantize-weights"),
    ],
)
def test_what_is_not_held_exactly_is_refused(sample: Traced, step: Any, message: str, hint: str) -> None:
    with pytest.raises(UnsupportedError, match=message) as caught:
        exporter("gguf", LOCAL).check(export(sample, step), SPEC)
    assert hint in (caught.value.hint or "")


def changed(sample: Traced, **entries: Any) -> Checkpoint:
    """The sample with other entries of config.json."""
    from dataclasses import replace

    checkpoint = sample[0]
    return replace(checkpoint, settings={**checkpoint.settings, **entries})


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        ({"model_type": "gemma3_text"}, "model type gemma3_text is not among those that were proven"),
        ({"model_type": "mistral", "sliding_window": 4096}, "does not have a sliding window"),
        ({"model_type": "qwen2", "use_sliding_window": True}, "does not have a sliding window"),
        ({"hidden_act": "gelu"}, "does not have hidden_act gelu"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "does not have rope_type yarn"),
        ({"partial_rotary_factor": 0.5}, "does not have partial rotary embedding"),
        ({"mlp_bias": True}, "does not have mlp_bias"),
    ],
)
def test_a_model_that_llama_cpp_would_compute_otherwise_is_refused(
    sample: Traced, entries: dict[str, Any], message: str
) -> None:
    with pytest.raises(UnsupportedError, match=message):
        gguf.architecture_of(changed(sample, **entries))


@pytest.mark.parametrize(
    ("edit", "name"),
    [
        ({}, "gpt-2"),
        ({"pre_tokenizer": {"type": "Whitespace"}}, None),
        ({"normalizer": {"type": "Lowercase"}}, None),
        ({"model": {"ignore_merges": True}}, None),
        ({"model": {"merges": []}}, None),
        *(
            (
                {
                    "pre_tokenizer": {
                        "type": "Sequence",
                        "pretokenizers": [
                            {"type": "Split", "pattern": {"Regex": regex}, "behavior": "Isolated", "invert": False},
                            {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False},
                        ],
                    },
                    "model": {"ignore_merges": merges},
                },
                wanted,
            )
            for regex, merges, wanted in (
                (gguf._LLAMA3, True, "llama-bpe"),
                (gguf._LLAMA3, False, None),
                (gguf._LLAMA3.replace("{1,3}", ""), False, "qwen2"),
                (r"\w+", False, None),
            )
        ),
    ],
)
def test_tokenizers_that_llama_cpp_has_are_told(sample: Traced, edit: dict[str, Any], name: str | None) -> None:
    from dataclasses import replace

    described = json.loads(sample[0].tokenizer.to_str())
    described |= {**edit, "model": {**described["model"], **edit.get("model", {})}}
    checkpoint = replace(sample[0], tokenizer=Tokenizer.from_str(json.dumps(described)))
    if name is not None:
        assert gguf.pre_tokenizer(checkpoint) == name
        return
    with pytest.raises(UnsupportedError, match="none of the byte-level ones"):
        gguf.pre_tokenizer(checkpoint)


def test_queries_and_keys_have_their_pairs_together(sample: Traced) -> None:
    """Rotary embedding of llama.cpp's llama turns channels 2i and 2i + 1; transformers' i and i + head_dim / 2."""
    llama, qwen = gguf.ARCHITECTURES["llama"], gguf.ARCHITECTURES["qwen2"]
    name = "model.layers.0.self_attn.{}.weight"
    order = gguf._rows(sample[0], llama, name.format("k_proj"))
    assert order is not None
    assert order[:4].tolist() == [0, 16, 1, 17]  # head_dim 32
    assert order[32:34].tolist() == [32, 48]
    assert sorted(order) == list(range(128))
    assert gguf._rows(sample[0], llama, name.format("v_proj")) is None
    assert gguf._rows(sample[0], qwen, name.format("k_proj")) is None


def test_rotary_factors_are_those_of_transformers() -> None:
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    from ..models.zoo import BASE, LLAMA3

    entries = {**BASE, "head_dim": 32, "rope_parameters": LLAMA3}
    scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](LlamaConfig(**entries), "cpu")  # type: ignore[arg-type]
    plain = 1 / 10000.0 ** (np.arange(0, 32, 2) / 32)
    found = gguf._rope_factors(entries)
    assert found is not None
    assert np.allclose(plain / found, scaled.numpy(), rtol=1e-6)
    assert gguf._rope_factors({**BASE}) is None


def test_without_the_package_the_command_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    from llmforge.base import extras

    monkeypatch.setattr(extras, "_origin", lambda module: None if module == "gguf" else "there")
    with pytest.raises(EnvironmentLacks, match="gguf is not installed") as caught:
        gguf.require_host(LOCAL, SPEC)
    assert caught.value.hint == "pip install 'llmforge[gguf]'"


# --- written by the package ------------------------------------------------------------------------------------------


def write(sample: Traced, folder: Path, *steps: Any) -> Any:
    package = pytest.importorskip("gguf", reason="pip install gguf==0.19.0")
    checkpoint, model = sample
    copy = model.clone()
    for step in steps:
        assert step.run(copy, Context(LOCAL))
    exported = export_proxy.exported(copy, model, checkpoint)
    gguf.build(BuildRequest(copy, folder, SPEC, LOCAL, [0], 0, exported=exported))
    return package.GGUFReader(folder / gguf.MODEL_FILE)


@pytest.mark.slow
def test_the_package_reads_what_was_written(sample: Traced, tmp_path: Path) -> None:
    reader = write(sample, tmp_path / "a", blocks(embedding_bits=8))
    tensors = {each.name: each for each in reader.tensors}
    kinds = {name: each.tensor_type.name for name, each in tensors.items()}
    assert kinds["token_embd.weight"] == "Q8_0"
    assert "output.weight" not in kinds, "the head is tied"
    assert kinds["blk.0.attn_q.weight"] == kinds["blk.5.ffn_down.weight"] == "Q4_0"
    assert kinds["blk.0.attn_norm.weight"] == "F32"
    fields = {name: field.contents() for name, field in reader.fields.items()}
    assert fields["general.architecture"] == "llama"
    assert fields["llama.attention.head_count_kv"] == 4
    assert fields["tokenizer.ggml.pre"] == "gpt-2"
    assert len(fields["tokenizer.ggml.tokens"]) == 8192
    assert len(fields["tokenizer.ggml.merges"]) == 7933
    assert fields["tokenizer.chat_template"] == sample[0].chat_template
    assert fields["tokenizer.ggml.add_bos_token"] is False
    write(sample, tmp_path / "b", blocks(embedding_bits=8))
    assert (tmp_path / "a/model.gguf").read_bytes() == (tmp_path / "b/model.gguf").read_bytes()


@pytest.mark.slow
def test_a_bit_that_is_not_written_is_noticed(sample: Traced, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pack = packing.pack

    def wrong(matrix: QuantizedMatrix) -> NDArray[np.uint8]:
        data = pack(matrix)
        data[-1, -1] ^= 16
        return data

    pytest.importorskip("gguf", reason="pip install gguf==0.19.0")
    monkeypatch.setattr(packing, "pack", wrong)
    with pytest.raises(VerificationError, match="was not written as it was quantized"):
        write(sample, tmp_path, blocks())
