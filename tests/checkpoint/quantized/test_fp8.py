"""FP8 in blocks: what its tensors stand for, beside transformers' own loading, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import safetensors.torch
import torch
from safetensors.numpy import save_file
from transformers import AutoModelForCausalLM, FineGrainedFP8Config
from transformers.quantizers import quantizer_finegrained_fp8

from llmforge.base.errors import CheckpointError, UnsupportedError
from llmforge.checkpoint import Checkpoint
from llmforge.checkpoint.quantized import QuantizedTensor, UnrepresentableCodes
from llmforge.trace.export import skeleton

from ...models import zoo

BLOCKS = {"quant_method": "fp8", "weight_block_size": [128, 128], "activation_scheme": "dynamic"}
UP = "model.layers.0.mlp.up_proj.weight"


def written(folder: Path, config: dict[str, Any] = BLOCKS, *, scale: Any = np.float32, inner: int = 256) -> None:
    """A random Llama whose linear layers are in fp8."""
    zoo.write("llama", folder, hidden_size=128, intermediate_size=inner)
    rng, held = np.random.default_rng(3), {}
    sizes = config.get("weight_block_size")
    for name, weight in load_file(folder / "model.safetensors").items():
        held[name] = weight
        if name.endswith("_proj.weight"):
            shape = (1, 1) if sizes is None else [-(-n // size) for n, size in zip(weight.shape, sizes, strict=True)]
            held[name] = weight.astype(ml_dtypes.float8_e4m3fn)
            held[name + "_scale_inv"] = np.exp2(rng.integers(-3, 3, shape)).astype(scale)
            if scale is np.float32:
                held[name + "_scale_inv"] *= rng.random(shape).astype(np.float32)
    save_file(held, folder / "model.safetensors")
    settings = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**settings, "quantization_config": config}))


def load_file(file: Path) -> dict[str, Any]:
    """Read tensors of every dtype: safetensors gives numpy no fp8."""
    read = {name: torch_numpy(tensor) for name, tensor in safetensors.torch.load_file(file).items()}
    return dict(sorted(read.items()))


def torch_numpy(tensor: torch.Tensor) -> Any:
    for kind, bits, ours in (
        (torch.bfloat16, torch.uint16, ml_dtypes.bfloat16),
        (torch.float8_e4m3fn, torch.uint8, ml_dtypes.float8_e4m3fn),
        (torch.float8_e8m0fnu, torch.uint8, ml_dtypes.float8_e8m0fnu),
    ):
        if tensor.dtype == kind:
            return tensor.view(bits).numpy().view(ours)
    return tensor.numpy()


def changed(folder: Path, **tensors: Any) -> None:
    """Put other tensors in their place, dots written as double underscores; None: leave one out."""
    held = load_file(folder / "model.safetensors")
    for name, tensor in tensors.items():
        held.pop(name.replace("__", "."), None)
        if tensor is not None:
            held[name.replace("__", ".")] = tensor
    save_file(held, folder / "model.safetensors")


@pytest.mark.parametrize("config", [BLOCKS, {"quant_method": "fp8", "weight_block_size": None}])
def test_weights_and_logits_are_those_of_transformers(
    config: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written(tmp_path, config)
    monkeypatch.setattr(quantizer_finegrained_fp8, "is_accelerate_available", lambda: True)  # it is not used
    theirs = AutoModelForCausalLM.from_pretrained(
        tmp_path,
        dtype=torch.float32,
        quantization_config=FineGrainedFP8Config(
            dequantize=True, weight_block_size=config["weight_block_size"] or (128, 128)
        ),
    )
    checkpoint = Checkpoint.open(tmp_path)
    if config is BLOCKS:
        for name, weight in theirs.state_dict().items():
            assert (np.asarray(checkpoint.tensor(name).numpy()) == weight.numpy()).all(), name
    ours = skeleton.load(checkpoint)
    ids = torch.arange(20)[None]
    with torch.no_grad():
        assert torch.equal(ours(ids).logits, theirs(ids).logits)


@pytest.mark.parametrize("scale", [np.float32, ml_dtypes.bfloat16, ml_dtypes.float8_e8m0fnu])
def test_scales_are_of_any_of_these_dtypes_and_blocks_may_be_cut(scale: Any, tmp_path: Path) -> None:
    """Of 200 rows, the last block has 72."""
    written(tmp_path, scale=scale, inner=200)
    held = load_file(tmp_path / "model.safetensors")
    weight, scales = held[UP].astype(np.float32), held[UP + "_scale_inv"].astype(np.float32)
    checkpoint = Checkpoint.open(tmp_path)
    wanted = weight * np.repeat(scales, 128, axis=0)[:200]
    assert scales.shape == (2, 1)
    assert (checkpoint.tensor(UP).numpy() == wanted).all()
    assert set(checkpoint.tensors) == {name for name in held if not name.endswith("_scale_inv")}
    tensor = checkpoint.tensors[UP]
    assert isinstance(tensor, QuantizedTensor)
    assert tensor.format == "fp8 (E4M3) in blocks of 128 × 128"
    with pytest.raises(UnrepresentableCodes, match="no format here"):
        tensor.grid()


def test_scales_of_activations_are_left_out_and_told(tmp_path: Path) -> None:
    written(tmp_path)
    changed(tmp_path, model__layers__0__mlp__up_proj__activation_scale=np.float32(0.5).reshape(1))
    assert Checkpoint.open(tmp_path).notes == (
        "1 scales of activations are taken by `quantize-channels: {method: stored, activations: static}` alone",
    )


@pytest.mark.parametrize(
    ("config", "tensors", "said", "code"),
    [
        ({**BLOCKS, "fmt": "e5m2"}, {}, 'fp8 of the kind "e5m2" is not taken', 6),
        ({**BLOCKS, "weight_block_size": [128]}, {}, "weight_block_size must be two sizes, is [128]", 5),
        ({**BLOCKS, "weight_block_size": [0, 128]}, {}, "weight_block_size must be two sizes", 5),
        (BLOCKS, {UP.replace(".", "__") + "_scale_inv": None}, "is fp8 and has no", 5),
        (BLOCKS, {UP.replace(".", "__") + "_scale_inv": np.ones((1, 1), np.float32)}, "has shape [1, 1]", 5),
        (BLOCKS, {UP.replace(".", "__") + "_scale_inv": np.ones((2, 1), np.int32)}, "is INT32; scales are", 5),
        (BLOCKS, {UP.replace(".", "__"): np.ones((256, 64), np.int8)}, "has scales and is INT8", 6),
    ],
)
def test_what_does_not_fit_is_refused(
    config: dict[str, Any], tensors: dict[str, Any], said: str, code: int, tmp_path: Path
) -> None:
    written(tmp_path)
    changed(tmp_path, **tensors)
    settings = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**settings, "quantization_config": config}))
    with pytest.raises((CheckpointError, UnsupportedError)) as caught:
        Checkpoint.open(tmp_path)
    assert said in str(caught.value)
    assert caught.value.exit_code == code


def test_scales_beyond_the_numbers_are_refused_when_they_are_read(tmp_path: Path) -> None:
    written(tmp_path)
    changed(tmp_path, **{UP.replace(".", "__") + "_scale_inv": np.full((2, 1), np.inf, np.float32)})
    with pytest.raises(CheckpointError, match="gives weights that are NaN or infinite"):
        Checkpoint.open(tmp_path).tensor(UP).numpy()
