"""GGUF and bitsandbytes against the packages themselves, which are no dependencies: install them apart, and

pip install --target TOOLS --no-deps gguf==0.19.0 bitsandbytes==0.50.2
PYTHONPATH=TOOLS pytest -m slow tests/checkpoint/quantized/test_other_packages.py
"""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer, modeling_utils

from llmforge.checkpoint import Checkpoint
from llmforge.checkpoint.gguf import architectures, blocks
from llmforge.trace.export import skeleton

from ...models import zoo
from ...models.checkpoints import write_checkpoint
from ...models.gguf_files import F16, F32, Q4_0, Q8_0, write
from ..gguf.test_architectures import MODELS

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]
# Models of the zoo as transformers reads them of GGUF: without biases, and with sizes that it has no key for.
LOADED: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "qwen2": ("qwen2", {}),
    "qwen3": ("qwen3", {"head_dim": 128}),
    "qwen3moe": ("qwen3-moe", {"mlp_only_layers": [], "moe_intermediate_size": 768}),
}
KINDS = [kind for kind in blocks.TYPES.values() if kind.quantized]


def tool(name: str) -> Any:
    return pytest.importorskip(name, reason=f"{name} is not installed: see the head of this file")


@pytest.mark.parametrize("kind", KINDS, ids=[kind.name for kind in KINDS])
def test_blocks_are_dequantized_as_gguf_does(kind: blocks.BlockType) -> None:
    """Bits of every kind, NaN and infinity among the scales."""
    gguf = tool("gguf")
    data = np.random.default_rng(kind.number).integers(0, 256, (20_000, kind.size_bytes), np.uint8)
    with np.errstate(all="ignore"):
        theirs = gguf.quants.dequantize(data, gguf.GGMLQuantizationType(kind.number))
    ours = blocks.dequantize(data.reshape(-1), kind, (20_000, kind.elements))
    same = (ours.view(np.uint32) == theirs.view(np.uint32)) | (np.isnan(ours) & np.isnan(theirs))
    assert same.all()


def test_types_are_called_as_in_gguf() -> None:
    gguf = tool("gguf")
    theirs = {each.value: each.name for each in gguf.GGMLQuantizationType}
    assert {number: kind.name for number, kind in blocks.TYPES.items()} | dict(blocks.OTHER_TYPES) == theirs
    for number, kind in blocks.TYPES.items():
        assert gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType(number)] == (kind.elements, kind.size_bytes)


@pytest.mark.parametrize("name", MODELS)
def test_tensors_are_called_as_in_gguf(name: str) -> None:
    gguf = tool("gguf")
    [number] = [each for each, called in gguf.MODEL_ARCH_NAMES.items() if called == name]
    theirs = gguf.get_tensor_name_map(number, 4)
    for part, called in architectures.ARCHITECTURES[name].parts.items():
        assert theirs.get_name(f"model.layers.3.{called}") == f"blk.3.{part}"
    for outer, called in architectures._OUTER.items():
        assert theirs.get_name(called) in (outer, None)  # Gemma's head is its embedding


@pytest.mark.parametrize("kind", [F32, F16, Q4_0, Q8_0], ids=["F32", "F16", "Q4_0", "Q8_0"])
@pytest.mark.parametrize("name", LOADED)
def test_logits_are_those_of_transformers(
    name: str, kind: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of the same file, which transformers reads by the gguf package."""
    tool("gguf")
    model, changes = LOADED[name]
    zoo.write(model, tmp_path / "hf", **changes)
    write(tmp_path / "hf", tmp_path / "model.gguf", architecture=name, kind=kind)
    monkeypatch.setattr(modeling_utils, "is_accelerate_available", lambda: True)  # it is not used
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file="model.gguf", dtype=torch.float32)
    ours = skeleton.load(Checkpoint.open(tmp_path / "model.gguf"))
    ids = torch.arange(24)[None]
    with torch.no_grad():
        assert torch.allclose(ours(ids).logits, theirs(ids).logits, atol=1e-5)


def test_the_tokenizer_is_that_of_transformers(sample_checkpoint: Path, tmp_path: Path) -> None:
    tool("gguf")
    write(sample_checkpoint, tmp_path / "model.gguf", kind=Q8_0)
    theirs = AutoTokenizer.from_pretrained(tmp_path, gguf_file="model.gguf")
    ours = Checkpoint.open(tmp_path / "model.gguf").tokenizer
    for text in ("Hello, world!", "  def f(x):\n\treturn x**2\n", "Grüße, 東京"):
        assert ours.encode(text).ids == theirs(text, add_special_tokens=False)["input_ids"]


def test_a_file_of_the_writer_is_read(tmp_path: Path) -> None:
    """The package writes what its name for each tensor and key is: nothing of it is ours."""
    gguf = tool("gguf")
    folder = tmp_path / "hf"
    parameters = write_checkpoint(folder, num_hidden_layers=1, tie_word_embeddings=True)
    settings = json.loads((folder / "config.json").read_text())
    writer = gguf.GGUFWriter(tmp_path / "written.gguf", "llama")
    writer.add_context_length(settings["max_position_embeddings"])
    writer.add_embedding_length(settings["hidden_size"])
    writer.add_block_count(1)
    writer.add_feed_forward_length(settings["intermediate_size"])
    writer.add_head_count(settings["num_attention_heads"])
    writer.add_head_count_kv(settings["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(settings["rms_norm_eps"])
    writer.add_rope_freq_base(settings["rope_theta"])
    writer.add_rope_dimension_count(settings["head_dim"])
    tokens = json.loads((folder / "tokenizer.json").read_text())["model"]["vocab"]
    padded = [*sorted(tokens, key=tokens.__getitem__), *(f"[PAD{at}]" for at in range(len(tokens), 264))]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(padded)
    writer.add_token_types([1] * 264)
    writer.add_token_merges([])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(0)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, 1)
    kinds = gguf.GGMLQuantizationType
    for name, weight in parameters.items():
        stem, _, leaf = name.rpartition(".")
        stored = weight
        if stem.endswith(("q_proj", "k_proj")):
            heads = 4 if stem.endswith("q_proj") else 2
            stored = weight.reshape(heads, 2, -1, 64).swapaxes(1, 2).reshape(weight.shape)
        called = f"{names.get_name(stem)}.{leaf}"
        if weight.ndim == 2:
            data = gguf.quants.quantize(np.ascontiguousarray(stored), kinds.Q8_0)
            writer.add_tensor(called, data, raw_dtype=kinds.Q8_0)
        else:
            writer.add_tensor(called, stored)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    found = Checkpoint.open(tmp_path / "written.gguf")
    assert found.verify()
    assert set(found.tensors) == set(parameters)
    for name, weight in parameters.items():
        made = found.tensor(name).numpy()
        if weight.ndim == 2:
            stored = gguf.quants.dequantize(gguf.quants.quantize(weight, kinds.Q8_0), kinds.Q8_0)
            assert (made == stored).all(), name
        else:
            assert (made == weight).all(), name


@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("kind", ["nf4", "fp4"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_four_bits_are_those_of_bitsandbytes(kind: str, dtype: torch.dtype, nested: bool, tmp_path: Path) -> None:
    """Weights that the package quantized and saved."""
    functional = _bitsandbytes()
    write_checkpoint(tmp_path, tie_word_embeddings=True)
    held = load_file(tmp_path / "model.safetensors")
    wanted = {}
    for at, name in enumerate([name for name in held if name.endswith("_proj.weight")]):
        size = (32, 64)[at % 2]  # larger than rows, its AVX-512 kernel takes wrong scales; its Python does not
        packed, state = functional.quantize_4bit(
            held[name].to(dtype), blocksize=size, quant_type=kind, compress_statistics=nested
        )
        wanted[name] = functional.dequantize_4bit(packed, state)
        held[name] = packed
        held |= {f"{name}.{part}": tensor for part, tensor in state.as_dict(packed=True).items()}
    _save(tmp_path, held, {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": kind})
    found = Checkpoint.open(tmp_path)
    for name, weight in wanted.items():
        assert (found.tensor(name).numpy().astype(np.float32) == weight.float().numpy()).all(), name


def test_eight_bits_are_those_of_bitsandbytes(tmp_path: Path) -> None:
    functional = _bitsandbytes()
    write_checkpoint(tmp_path, tie_word_embeddings=True)
    held = load_file(tmp_path / "model.safetensors")
    wanted = {}
    for name in [name for name in held if name.endswith("_proj.weight")]:
        codes, maxima, _ = functional.int8_vectorwise_quant(held[name].to(torch.float16))
        wanted[name] = functional.int8_vectorwise_dequant(codes, maxima)
        held[name], held[name.replace("weight", "SCB")] = codes, maxima
        held[name.replace("weight", "weight_format")] = torch.tensor(0, dtype=torch.uint8)
    _save(tmp_path, held, {"quant_method": "bitsandbytes", "load_in_8bit": True})
    found = Checkpoint.open(tmp_path)
    for name, weight in wanted.items():
        assert (found.tensor(name).numpy() == weight.numpy()).all(), name


def _bitsandbytes() -> Any:
    tool("bitsandbytes")
    return importlib.import_module("bitsandbytes.functional")


def _save(folder: Path, held: dict[str, torch.Tensor], config: dict[str, Any]) -> None:
    save_file({name: tensor.contiguous() for name, tensor in held.items()}, folder / "model.safetensors")
    settings = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**settings, "quantization_config": config}))
