"""MXFP4: the experts of GPT-OSS, beside transformers' own loading, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file, save_file
from transformers import AutoModelForCausalLM, Mxfp4Config

from llmforge.base.errors import CheckpointError
from llmforge.checkpoint import Checkpoint
from llmforge.checkpoint.quantized import QuantizedTensor, UnrepresentableCodes
from llmforge.trace.export import skeleton

from ...models import zoo

DOWN = "model.layers.0.mlp.experts.down_proj"


def written(folder: Path, **changes: Any) -> None:
    """A random GPT-OSS whose experts are in MXFP4; `changes` are other arrays for blocks or scales of `DOWN`."""
    zoo.write("gpt-oss", folder)
    rng, held = np.random.default_rng(3), {}
    for name, weight in load_file(folder / "model.safetensors").items():
        if not name.endswith("_proj"):
            held[name] = weight
            continue
        experts, k, n = weight.shape
        held[name + "_blocks"] = rng.integers(0, 256, (experts, n, k // 32, 16), np.uint8)
        held[name + "_scales"] = rng.integers(120, 124, (experts, n, k // 32), np.uint8)
    for part, array in changes.items():
        held.pop(f"{DOWN}_{part}")
        if array is not None:
            held[f"{DOWN}_{part}"] = array
    save_file(held, folder / "model.safetensors")
    settings = json.loads((folder / "config.json").read_text())
    settings["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}
    (folder / "config.json").write_text(json.dumps(settings))


@pytest.mark.filterwarnings("ignore:The given NumPy array is not writable")
def test_weights_and_logits_are_those_of_transformers(tmp_path: Path) -> None:
    written(tmp_path)
    theirs = AutoModelForCausalLM.from_pretrained(
        tmp_path, dtype=torch.float32, quantization_config=Mxfp4Config(dequantize=True)
    )
    checkpoint = Checkpoint.open(tmp_path)
    for name, weight in theirs.state_dict().items():
        assert (np.asarray(checkpoint.tensor(name).numpy(), np.float32) == weight.numpy()).all(), name
    ours = skeleton.load(checkpoint)
    ids = torch.arange(20)[None]
    with torch.no_grad():
        assert torch.allclose(ours(ids).logits, theirs(ids).logits, atol=1e-5)
    tensor = checkpoint.tensors[DOWN]
    assert isinstance(tensor, QuantizedTensor)
    assert (tensor.shape, tensor.format) == ((4, 96, 64), "MXFP4 in blocks of 32")
    with pytest.raises(UnrepresentableCodes, match="not evenly spaced"):
        tensor.grid()


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"scales": None}, f"tensor '{DOWN}_blocks' lacks the other of blocks and scales"),
        ({"blocks": None}, f"tensor '{DOWN}_scales' lacks the other"),
        ({"scales": np.zeros((4, 64, 2), np.uint8)}, "must be uint8 [E, N, K / 32, 16]"),
        ({"scales": np.zeros((4, 64, 3), np.int8)}, "must be uint8 [E, N, K / 32, 16]"),
        ({"blocks": np.zeros((4, 64, 3, 8), np.uint8)}, "must be uint8 [E, N, K / 32, 16]"),
    ],
)
def test_what_does_not_fit_is_refused(changes: dict[str, Any], said: str, tmp_path: Path) -> None:
    written(tmp_path, **changes)
    with pytest.raises(CheckpointError) as caught:
        Checkpoint.open(tmp_path)
    assert said in str(caught.value)


def test_an_exponent_of_nan_is_refused_when_it_is_read(tmp_path: Path) -> None:
    written(tmp_path, scales=np.full((4, 64, 3), 255, np.uint8))
    with pytest.raises(CheckpointError, match=f"'{DOWN}_scales' holds exponents of NaN"):
        Checkpoint.open(tmp_path).tensor(DOWN).numpy()
