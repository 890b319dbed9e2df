"""Give a Llama checkpoint activations with outliers, and leave what it computes as it was.

Channels of what a norm makes are multiplied by a power of two, and the columns that read them divided by it; a few
rows of the up projection grow much more, at the cost of the columns of the down projection, so that some tokens make
activations a thousand times as large as others do ("massive activations", Sun et al. 2024, arXiv 2402.17762). Powers
of two change no mantissa: the logits, in fp32 and from bf16 weights too, have the same bits but for the order of sums.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import load_file, save_file

CHANNELS = 0.05  # share of the channels of a norm
SCALE = 2.0**5
MASSIVE = 2.0**10  # of one inner channel of each layer
READERS = {
    "input_layernorm": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "post_attention_layernorm": ("mlp.gate_proj", "mlp.up_proj"),
}


def write_outliers(source: Path, folder: Path, *, seed: int = 0) -> None:
    """Write the checkpoint `source`, of one file of weights, to `folder` with outliers."""
    shutil.copytree(source, folder)
    file = folder / "model.safetensors"
    weights: dict[str, NDArray[Any]] = load_file(file)
    random = np.random.default_rng(seed)
    for name in [name for name in weights if name.endswith("layernorm.weight")]:
        layer, _, norm = name.removesuffix(".weight").rpartition(".")
        width = len(weights[name])
        factors = np.ones(width, np.float32)
        factors[random.choice(width, max(1, round(CHANNELS * width)), replace=False)] = SCALE
        weights[name] = _scaled(weights[name], factors)
        for reader in READERS[norm]:
            weights[f"{layer}.{reader}.weight"] = _scaled(weights[f"{layer}.{reader}.weight"], 1 / factors)
        if norm == "post_attention_layernorm":
            up, down = f"{layer}.mlp.up_proj.weight", f"{layer}.mlp.down_proj.weight"
            factors = np.ones(len(weights[up]), np.float32)
            factors[random.integers(len(factors))] = MASSIVE
            weights[up], weights[down] = _scaled(weights[up].T, factors).T, _scaled(weights[down], 1 / factors)
    save_file({name: np.ascontiguousarray(array) for name, array in weights.items()}, file)


def _scaled(array: NDArray[Any], factors: NDArray[np.float32]) -> NDArray[Any]:
    """Multiply along the last axis, in the dtype of `array`."""
    return (array.astype(np.float32) * factors).astype(array.dtype)
