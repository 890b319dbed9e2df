"""A GGUF file in the place of a folder: traced, planned and built."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from safetensors.numpy import save_file

from llmforge import trace
from llmforge.checkpoint import Checkpoint, read_settings
from llmforge.checkpoint.quantized.gguf import GgufTensor
from llmforge.cli import cli
from llmforge.ir import dialect
from llmforge.planning import config, source
from llmforge.quantization.grid import Grid
from llmforge.quantization.grids import dequantize, round_to_nearest

from ...models import smollm2, zoo
from ...models.checkpoints import write_checkpoint
from ...models.gguf_files import F16, F32, Q4_0, Q4_1, Q8_0, Tensor, write


def test_a_traced_file_computes_what_its_checkpoint_does(tmp_path: Path) -> None:
    """Plain numbers, so that nothing but names, orders and configuration can differ."""
    zoo.write("llama", tmp_path / "hf")
    write(tmp_path / "hf", tmp_path / "model.gguf", kind=F32)
    graph = trace.trace(Checkpoint.open(tmp_path / "model.gguf"))
    assert zoo.largest_difference(dialect.expand(graph), zoo.reference(tmp_path / "hf"), zoo.SCHEDULES["ragged"]) < 1e-5


def dequantized(file: Path, folder: Path) -> None:
    """Write the weights of a GGUF file as a folder of fp32, with the configuration and the tokenizer of the file."""
    checkpoint = Checkpoint.open(file)
    settings = read_settings(file)
    settings.pop("quantization_config", None)
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(settings))
    (folder / "tokenizer.json").write_text(checkpoint.tokenizer.to_str())
    save_file({name: checkpoint.tensor(name).numpy() for name in checkpoint.tensors}, folder / "model.safetensors")


@pytest.mark.parametrize("kind", [Q4_0, pytest.param(Q4_1, marks=pytest.mark.thorough), Q8_0])
def test_a_quantized_file_computes_what_its_weights_in_a_folder_do(kind: int, tmp_path: Path) -> None:
    zoo.write("llama", tmp_path / "hf")
    write(tmp_path / "hf", tmp_path / "model.gguf", kind=kind)
    dequantized(tmp_path / "model.gguf", tmp_path / "folder")
    own, folder = (trace.trace(Checkpoint.open(tmp_path / name)) for name in ("model.gguf", "folder"))
    expected = zoo.reference(tmp_path / "folder")
    for graph in (own, folder):
        assert zoo.largest_difference(dialect.expand(graph), expected, zoo.SCHEDULES["ragged"]) < 1e-5
    assert zoo.largest_difference(dialect.expand(own), zoo.reference(tmp_path / "hf"), zoo.SCHEDULES["one"]) > 1e-4


@pytest.mark.slow  # 135 million parameters
@pytest.mark.timeout(1800)
def test_a_real_file_computes_what_its_weights_in_a_folder_do(tmp_path: Path) -> None:
    """Bit for bit, and within 1e-5 of the largest logit of what transformers computes with those weights."""
    dequantized(smollm2.gguf(), tmp_path / "folder")
    own, folder = (trace.trace(Checkpoint.open(path)) for path in (smollm2.gguf(), tmp_path / "folder"))
    assert [node.op_type for node in own.graph] == [node.op_type for node in folder.graph]
    assert list(own.graph.initializers) == list(folder.graph.initializers)
    for name, held in own.graph.initializers.items():
        other = folder.graph.initializers[name]
        assert held.const_value is not None
        assert other.const_value is not None
        assert np.array_equal(held.const_value.numpy(), other.const_value.numpy()), name
    expected = zoo.reference(tmp_path / "folder")
    with torch.no_grad():
        largest = float(expected(torch.arange(3, 40)[None]).logits.abs().max())
    assert zoo.largest_difference(dialect.expand(own), expected, zoo.SCHEDULES["one"]) < 1e-5 * largest


def test_its_shape_is_read_for_a_plan(tmp_path: Path, sample_checkpoint: Path) -> None:
    write(sample_checkpoint, tmp_path / "sample.gguf", kind=F16)
    ours, own = config.read(tmp_path / "sample.gguf"), config.read(sample_checkpoint)
    assert (ours.name, ours.layers, ours.parameters) == ("sample", own.layers, own.parameters)


def test_only_blocks_count_as_codes(tmp_path: Path) -> None:
    """Plain numbers may be quantized without a word about it in the recipe; blocks are not quantized again."""
    write_checkpoint(tmp_path / "hf", num_hidden_layers=1)
    for kind, said, grid in (
        (F16, None, None),
        (Q4_0, "GGUF, most of it Q4_0", Grid(4, 32, True, "fp16")),
        (Q8_0, "GGUF, most of it Q8_0", Grid(8, 32, True, "fp16")),
    ):
        file = tmp_path / f"{kind}.gguf"
        write(tmp_path / "hf", file, kind=kind)
        settings = read_settings(file)
        assert (source.described(settings, file), source.grid_of(settings, file)) == (said, grid)


def test_levels_of_iq4_are_kept_as_codes_of_8_bits(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "hf")
    drawn = np.random.default_rng(0).integers(0, 256, (64 * 2, 18), np.uint8)
    drawn[:, :2] = np.array([0.03125], np.float16).view(np.uint8)
    drawn[3, :2] = 0  # a block of zeros

    def as_iq4(tensor: Tensor) -> Tensor:
        name, shape, _, _ = tensor
        return (name, shape, 20, drawn.tobytes()) if name == "blk.0.attn_output.weight" else tensor

    write(tmp_path / "hf", tmp_path / "m.gguf", change=lambda tensors: [as_iq4(each) for each in tensors])
    tensor = Checkpoint.open(tmp_path / "m.gguf").tensors["model.layers.0.self_attn.o_proj.weight"]
    assert isinstance(tensor, GgufTensor)
    held = tensor.codes()
    assert held.grid == Grid(8, 32, True, "fp16")
    assert len(np.unique(held.codes)) == 17  # 16 levels, and that of 0
    assert (dequantize(held) == tensor.dequantize()).all()


def built(folder: Path, checkpoint: str, backend: str, options: dict[str, Any]) -> tuple[Path, dict[str, Any]]:
    """Build `checkpoint` with one pass; return the artifact and its record of evidence."""
    (folder / "text.jsonl").write_text(json.dumps({"text": "The function returns the length of the list. " * 40}))
    recipe = {
        "schema": 1,
        "name": "sample",
        "checkpoint": checkpoint,
        "target": "cpu-generic",
        "engine": {"backend": backend, "max_context": 128, "max_batch": 1},
        "passes": [{"quantize-weights": {**options, "budget": {"kld_mean": 0.5}}}],
        "calibration": {"data": "text.jsonl", "samples": 1, "length": 64},
    }
    (folder / "recipe.yaml").write_text(json.dumps(recipe))
    done = CliRunner().invoke(cli, ["build", str(folder / "recipe.yaml"), "--out", str(folder / "artifacts")])
    assert done.exit_code == 0, done.output
    [artifact] = [path.parent for path in (folder / "artifacts/sample").glob("[!.]*/manifest.json")]
    [record] = (artifact / "evidence").glob("*.json")
    return artifact, json.loads(record.read_text())


@pytest.mark.slow  # a whole build
def test_a_file_builds_with_its_codes_as_they_are(sample_checkpoint: Path, tmp_path: Path) -> None:
    write(sample_checkpoint, tmp_path / "sample.gguf", kind=Q4_0)
    _, record = built(tmp_path, "sample.gguf", "onnxruntime", {"method": "stored", "scales": "fp16"})
    kept = [each["what"] for each in record["passes"][0]["rewritten"]]
    assert sum("stored, 4 bits, blocks of 32, symmetric, scales fp16" in each for each in kept) >= 6 * 7


@pytest.mark.slow  # a whole build
@pytest.mark.parametrize("bits", [4, 8])
def test_what_is_written_for_llama_cpp_is_read_again(bits: int, sample_checkpoint: Path, tmp_path: Path) -> None:
    """The backend writes with the gguf package; codes are those that quantize-weights chooses."""
    pytest.importorskip("gguf", reason="gguf is not installed")
    options = {"bits": bits, "block_size": 32, "symmetric": True, "scales": "fp16", "method": "rtn"}
    artifact, _ = built(tmp_path, str(sample_checkpoint), "gguf", options)
    own, found = Checkpoint.open(sample_checkpoint), Checkpoint.open(artifact / "engine" / "model.gguf")
    assert set(found.tensors) == set(own.tensors)
    for layer in range(6):
        for part in ("self_attn.q_proj", "self_attn.k_proj", "self_attn.o_proj", "mlp.down_proj"):
            name = f"model.layers.{layer}.{part}.weight"
            tensor = found.tensors[name]
            assert isinstance(tensor, GgufTensor)
            wanted = round_to_nearest(own.tensor(name).numpy(), Grid(bits, 32, True, "fp16"))
            held = tensor.codes()
            assert held.grid == wanted.grid
            assert (dequantize(held) == dequantize(wanted)).all()
    assert found.tokenizer.encode("Hello, world!").ids == own.tokenizer.encode("Hello, world!").ids
