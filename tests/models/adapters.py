"""Write LoRA adapters as peft saves them, with random numbers large enough that texts differ."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import load_file, save_file

DTYPES = {"float32": np.float32, "float16": np.float16, "bfloat16": ml_dtypes.bfloat16}
ATTENTION = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj")
MLP = ("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")
PREFIX = "base_model.model."


def base_of(checkpoint: Path) -> dict[str, NDArray[Any]]:
    """Read the weights of a checkpoint of one file."""
    return load_file(checkpoint / "model.safetensors")


def write_adapter(
    folder: Path,
    checkpoint: Path,
    *,
    targets: Sequence[str] = ATTENTION + MLP,
    rank: int = 4,
    alpha: float = 8,
    seed: int = 0,
    size: float = 0.5,
    dtype: str = "float32",
    settings: Mapping[str, Any] | None = None,
    more: Mapping[str, NDArray[Any]] | None = None,
    dora: bool = False,
) -> Path:
    """Write an adapter of every module of `checkpoint` whose name ends with one of `targets`; return the folder.

    The product scale·B·A of a module has about `size` times the size of its weight.
    """
    folder.mkdir(parents=True, exist_ok=True)
    rng = np.random.default_rng(seed)
    tensors: dict[str, NDArray[Any]] = {}
    for name, weight in sorted(base_of(checkpoint).items()):
        module = name.removesuffix(".weight")
        if not module.endswith(tuple(targets)):
            continue
        n, k = weight.shape
        own = size * float(np.std(weight.astype(np.float32))) / (alpha / rank) / rank**0.5
        tensors[f"{PREFIX}{module}.lora_A.weight"] = rng.standard_normal((rank, k)).astype(DTYPES[dtype])
        tensors[f"{PREFIX}{module}.lora_B.weight"] = (own * rng.standard_normal((n, rank))).astype(DTYPES[dtype])
        if dora:
            tensors[f"{PREFIX}{module}.lora_magnitude_vector"] = rng.uniform(0.5, 1.5, n).astype(DTYPES[dtype])
    tensors |= more or {}
    save_file(tensors, folder / "adapter_model.safetensors")
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": checkpoint.name,
        "r": rank,
        "lora_alpha": alpha,
        "target_modules": sorted({target.rpartition(".")[2] for target in targets}),
        "use_dora": dora,
        "bias": "none",
        "fan_in_fan_out": False,
        "init_lora_weights": True,
        "inference_mode": True,
        **(settings or {}),
    }
    (folder / "adapter_config.json").write_text(json.dumps(config), encoding="utf-8")
    return folder


def merged(checkpoint: Path, folder: Path, weight: float = 1.0) -> dict[str, NDArray[Any]]:
    """Merge an adapter of plain LoRA, or DoRA, by loops over its tensors, in fp64: a reference."""
    config = json.loads((folder / "adapter_config.json").read_text())
    base, own = base_of(checkpoint), load_file(folder / "adapter_model.safetensors")
    result = {name: value.astype(np.float64) for name, value in base.items()}
    for name, a in own.items():
        if not name.endswith(".lora_A.weight"):
            continue
        module = name.removeprefix(PREFIX).removesuffix(".lora_A.weight")
        b = own[f"{PREFIX}{module}.lora_B.weight"].astype(np.float64)
        rank = len(a)
        scale = config["lora_alpha"] / (rank**0.5 if config.get("use_rslora") else rank)
        result[f"{module}.weight"] += weight * scale * (b @ a.astype(np.float64))
        if config.get("use_dora"):
            magnitude = own[f"{PREFIX}{module}.lora_magnitude_vector"].astype(np.float64)
            whole = result[f"{module}.weight"]
            result[f"{module}.weight"] = whole * (magnitude / np.linalg.norm(whole, axis=1))[:, None]
    return result


def write_merged(folder: Path, checkpoint: Path, adapter: Path) -> Path:
    """Write the checkpoint that `adapter` makes of `checkpoint`, in its dtypes; return its folder."""
    folder.mkdir(parents=True)
    for file in checkpoint.iterdir():
        if file.name != "model.safetensors":
            (folder / file.name).write_bytes(file.read_bytes())
    base = base_of(checkpoint)
    tensors = {name: value.astype(base[name].dtype) for name, value in merged(checkpoint, adapter).items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder
