"""Write quantized linear layers as their layouts document it: codes are packed one by one, by integers of any size."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import load_file, save_file

Tensors = dict[str, NDArray[Any]]


@dataclass(frozen=True, eq=False)
class Drawn:
    """Codes [N, K], scales [N, G], zero points [N, G], the group of each input feature [K], and what they stand for."""

    codes: NDArray[np.uint8]
    scales: NDArray[Any]
    zeros: NDArray[np.uint8]
    group_of: NDArray[np.int64]

    @property
    def weight(self) -> NDArray[Any]:
        """Difference and product in the dtype of the scales, as tools compute them."""
        dtype = self.scales.dtype
        zeros, scales = self.zeros[:, self.group_of], self.scales[:, self.group_of]
        product: NDArray[Any] = (self.codes.astype(dtype) - zeros.astype(dtype)) * scales
        return product


def draw(
    n: int,
    k: int,
    bits: int,
    groups: int,
    *,
    symmetric: bool = False,
    shuffled: bool = False,
    dtype: Any = np.float16,
    seed: int = 0,
) -> Drawn:
    """Draw a matrix: every code and zero point of so many bits, groups in the order of input features, or shuffled."""
    random = np.random.default_rng([seed, n, k, bits, groups])
    top = 1 << bits
    zeros = np.full((n, groups), top // 2) if symmetric else random.integers(1, top, (n, groups))
    group_of = np.arange(k) // -(-k // groups)
    return Drawn(
        random.integers(0, top, (n, k)).astype(np.uint8),
        random.uniform(0.001, 0.01, (n, groups)).astype(dtype),
        zeros.astype(np.uint8),
        random.permutation(group_of) if shuffled else group_of,
    )


def words(codes: NDArray[Any], bits: int) -> NDArray[np.int32]:
    """Pack rows of codes [R, C] into rows of int32, the first code in the lowest bits of the first word."""
    count = -(-codes.shape[1] * bits // 32)
    packed = []
    for row in codes.tolist():
        whole = sum(int(code) << (bits * at) for at, code in enumerate(row))
        packed.append(np.frombuffer(whole.to_bytes(4 * count, "little"), "<i4"))
    return np.stack(packed)


def gptq(name: str, drawn: Drawn, bits: int, *, version: int = 1) -> Tensors:
    """Store a matrix as GPTQ does."""
    return {
        f"{name}.qweight": np.ascontiguousarray(words(drawn.codes, bits).T),
        f"{name}.qzeros": words(drawn.zeros.T.astype(np.int64) - (version == 1), bits),
        f"{name}.scales": np.ascontiguousarray(drawn.scales.T),
        f"{name}.g_idx": drawn.group_of.astype(np.int32),
    }


def awq(name: str, drawn: Drawn) -> Tensors:
    """Store a matrix as AWQ does, which packs output features 0 2 4 6 1 3 5 7 of each eight."""

    def interleaved(by_output: NDArray[Any]) -> NDArray[np.int32]:
        eights = by_output.reshape(len(by_output), -1, 8)[..., [0, 2, 4, 6, 1, 3, 5, 7]]
        return words(eights.reshape(len(by_output), -1), 4)

    return {
        f"{name}.qweight": interleaved(drawn.codes.T),
        f"{name}.qzeros": interleaved(drawn.zeros.T),
        f"{name}.scales": np.ascontiguousarray(drawn.scales.T),
    }


def packed(name: str, drawn: Drawn, bits: int, *, symmetric: bool, g_idx: bool = False) -> Tensors:
    """Store a matrix as pack-quantized does."""
    made: Tensors = {
        f"{name}.weight_packed": words(drawn.codes, bits),
        f"{name}.weight_scale": drawn.scales,
        f"{name}.weight_shape": np.array(drawn.codes.shape, np.int64),
    }
    if not symmetric:
        made[f"{name}.weight_zero_point"] = np.ascontiguousarray(words(drawn.zeros.T, bits).T)
    return made | ({f"{name}.weight_g_idx": drawn.group_of.astype(np.int32)} if g_idx else {})


def in_bytes(name: str, drawn: Drawn, *, symmetric: bool) -> Tensors:
    """Store a matrix of 8 bits as int-quantized does."""
    made: Tensors = {
        f"{name}.weight": (drawn.codes.astype(np.int16) - 128).astype(np.int8),
        f"{name}.weight_scale": drawn.scales,
    }
    if not symmetric:
        made[f"{name}.weight_zero_point"] = (drawn.zeros.astype(np.int16) - 128).astype(np.int8)
    return made


def scheme(bits: int, strategy: str, *, kind: str = "int", symmetric: bool = True, **more: Any) -> dict[str, Any]:
    """Write the weights of a config group."""
    return {"num_bits": bits, "type": kind, "symmetric": symmetric, "strategy": strategy, "dynamic": False, **more}


def compressed(form: str, *schemes: Mapping[str, Any], **more: Any) -> dict[str, Any]:
    """Write the quantization_config of compressed-tensors."""
    groups = {
        f"group_{at}": {"targets": ["Linear"], "weights": dict(weights), "input_activations": None, "format": form}
        for at, weights in enumerate(schemes)
    }
    own = {"quant_method": "compressed-tensors", "format": form, "quantization_status": "compressed"}
    return {**own, "config_groups": groups, "ignore": ["lm_head"], **more}


def quantize(
    folder: Path, config: Mapping[str, Any], store: Callable[[str, tuple[int, int]], tuple[Tensors, NDArray[Any]]]
) -> dict[str, NDArray[Any]]:
    """Put codes in the place of each linear layer of a checkpoint; return what they stand for, by parameter.

    `store` gives the tensors of a module, of a shape [N, K], and its weight.
    """
    file = folder / "model.safetensors"
    held = dict(load_file(file))
    weights = {}
    for name in [name for name in held if name.endswith("_proj.weight")]:
        made, weights[name] = store(name.removesuffix(".weight"), held.pop(name).shape)
        held |= made
    save_file(held, file)
    settings = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**settings, "quantization_config": dict(config)}))
    return weights


BF16 = ml_dtypes.bfloat16
