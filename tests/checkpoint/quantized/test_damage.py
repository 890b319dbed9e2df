"""Quantized checkpoints that are damaged at random: each ends in one message, or in weights that are numbers."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from safetensors.numpy import load_file, save_file

from llmforge.base.errors import CheckpointError, UnsupportedError
from llmforge.checkpoint import Checkpoint
from llmforge.checkpoint.quantized import QuantizedTensor, UnrepresentableCodes

from . import writers

ROUNDS = 60
VALUES = (None, True, 0, -1, 3, 2**70, 1.5, "", "gptq", [], [1], {}, {"weights": {}}, {"format": []})
Writer = Callable[[str, tuple[int, int]], tuple[writers.Tensors, NDArray[Any]]]


def as_gptq(name: str, shape: tuple[int, int]) -> tuple[writers.Tensors, NDArray[Any]]:
    drawn = writers.draw(*shape, 4, shape[1] // 32, shuffled=True)
    return writers.gptq(name, drawn, 4), drawn.weight


def as_awq(name: str, shape: tuple[int, int]) -> tuple[writers.Tensors, NDArray[Any]]:
    drawn = writers.draw(*shape, 4, shape[1] // 32)
    return writers.awq(name, drawn), drawn.weight


def as_packed(name: str, shape: tuple[int, int]) -> tuple[writers.Tensors, NDArray[Any]]:
    drawn = writers.draw(*shape, 4, shape[1] // 32)
    return writers.packed(name, drawn, 4, symmetric=False, g_idx=True), drawn.weight


GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": True}
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True, "version": "gemm"}
PACKED = writers.compressed("pack-quantized", writers.scheme(4, "group", symmetric=False, group_size=32))


def damage_tensor(stored: writers.Tensors, rng: random.Random) -> None:
    """Change one tensor: gone, cut, in another dtype, of another shape, or with other bits."""
    name = rng.choice([name for name in stored if "_proj." in name])
    array = stored.pop(name)
    match rng.randrange(5):
        case 1 if array.ndim:
            stored[name] = np.ascontiguousarray(array[: rng.randrange(len(array))])
        case 2:
            with np.errstate(all="ignore"):
                stored[name] = array.astype(rng.choice([np.int8, np.uint8, np.int64, np.float64, np.float16]))
        case 3:
            stored[name] = array.reshape(-1)
        case 4:
            data = bytearray(array.tobytes())
            data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
            stored[name] = np.frombuffer(bytes(data), array.dtype).reshape(array.shape)


def damage_config(config: dict[str, Any], rng: random.Random) -> None:
    """Give one field, perhaps of a group, another value."""
    place = config
    while inside := [value for value in place.values() if isinstance(value, dict)]:
        if rng.random() < 0.3:
            break
        place = rng.choice(inside)
    place[rng.choice([*place, "group_size", "format", "strategy", "dynamic"])] = rng.choice(VALUES)


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize(("config", "store"), [(GPTQ, as_gptq), (AWQ, as_awq), (PACKED, as_packed)])
def test_damage(tiny_checkpoint: Path, config: dict[str, Any], store: Writer) -> None:
    writers.quantize(tiny_checkpoint, config, store)
    file, said = tiny_checkpoint / "model.safetensors", tiny_checkpoint / "config.json"
    whole, settings = dict(load_file(file)), said.read_text()
    refused = 0
    for seed in range(ROUNDS):
        rng, stored, changed = random.Random(seed), dict(whole), json.loads(settings)
        damage_tensor(stored, rng) if seed % 2 else damage_config(changed["quantization_config"], rng)
        save_file(stored, file)
        said.write_text(json.dumps(changed))
        try:
            checkpoint = Checkpoint.open(tiny_checkpoint)
            for tensor in checkpoint.tensors.values():
                if isinstance(tensor, QuantizedTensor):
                    assert np.isfinite(tensor.dequantize().astype(np.float32)).all()
                    tensor.codes()
        except (CheckpointError, UnsupportedError) as error:
            refused += error.hint is not None
        except UnrepresentableCodes:
            continue
    assert refused > ROUNDS // 4
