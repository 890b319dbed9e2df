"""compressed-tensors: what each of its formats stands for, codes held as they are, and what is refused."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from numpy.typing import NDArray
from safetensors.numpy import load_file, save_file

from llmforge.base.errors import CheckpointError, ForgeError, UnsupportedError
from llmforge.checkpoint import Checkpoint
from llmforge.checkpoint.quantized import QuantizedTensor, UnrepresentableCodes
from llmforge.quantization.grids import QuantizedMatrix

from . import writers
from .writers import BF16, Drawn

O_PROJ = "model.layers.0.self_attn.o_proj"
FP8 = ml_dtypes.float8_e4m3fn


def store_packed(
    folder: Path, bits: int = 4, size: int | None = 32, *, symmetric: bool = True, g_idx: bool = False, **more: Any
) -> dict[str, Drawn]:
    """Store all linear layers of a checkpoint as pack-quantized; return what was drawn, by parameter."""
    drawn: dict[str, Drawn] = {}

    def store(name: str, shape: tuple[int, int]) -> tuple[writers.Tensors, NDArray[Any]]:
        groups = 1 if size is None else shape[1] // size
        made = writers.draw(*shape, bits, groups, symmetric=symmetric, shuffled=g_idx, dtype=BF16)
        drawn[f"{name}.weight"] = made
        return writers.packed(name, made, bits, symmetric=symmetric, g_idx=g_idx), made.weight

    strategy = writers.scheme(
        bits, "channel" if size is None else "group", symmetric=symmetric, group_size=-1 if size is None else size
    )
    writers.quantize(folder, writers.compressed("pack-quantized", strategy, **more), store)
    return drawn


def held(folder: Path, name: str) -> QuantizedTensor:
    found = Checkpoint.open(folder).tensors[f"{name}.weight"]
    assert isinstance(found, QuantizedTensor)
    return found


def same(matrix: QuantizedMatrix, drawn: Drawn) -> bool:
    """Tell whether a matrix has the codes, scales and zero points that were drawn, its groups being its blocks."""
    points = drawn.zeros if matrix.zero_points is None else matrix.zero_points
    return (
        np.array_equal(matrix.codes, drawn.codes)
        and np.array_equal(matrix.scales, drawn.scales.astype(np.float32))
        and np.array_equal(points, drawn.zeros)
    )


@pytest.mark.parametrize("symmetric", [False, True])
@pytest.mark.parametrize(("bits", "size"), [(4, 32), (8, 32), (4, None), (8, None), (3, 64), (2, 32)])
def test_packed(tiny_checkpoint: Path, bits: int, size: int | None, symmetric: bool) -> None:
    drawn = store_packed(tiny_checkpoint, bits, size, symmetric=symmetric)
    checkpoint = Checkpoint.open(tiny_checkpoint)
    for name, expected in drawn.items():
        weight = checkpoint.tensor(name).numpy()
        assert weight.dtype == BF16
        assert weight.tobytes() == expected.weight.tobytes()
    checkpoint.verify()
    if size == 32 and bits > 2:
        assert same(held(tiny_checkpoint, O_PROJ).codes(), drawn[f"{O_PROJ}.weight"])


def test_groups_by_activation(tiny_checkpoint: Path) -> None:
    drawn = store_packed(tiny_checkpoint, g_idx=True)[f"{O_PROJ}.weight"]
    found = held(tiny_checkpoint, O_PROJ)
    assert found.dequantize().tobytes() == drawn.weight.tobytes()
    assert found.columns() is not None


def test_a_g_idx_that_says_nothing(tiny_checkpoint: Path) -> None:
    drawn = store_packed(tiny_checkpoint)[f"{O_PROJ}.weight"]
    file = tiny_checkpoint / "model.safetensors"
    save_file({**load_file(file), f"{O_PROJ}.weight_g_idx": np.full(64, -1, np.int32)}, file)
    assert held(tiny_checkpoint, O_PROJ).dequantize().tobytes() == drawn.weight.tobytes()


@pytest.mark.parametrize("symmetric", [False, True])
@pytest.mark.parametrize("strategy", ["channel", "group"])
def test_bytes(tiny_checkpoint: Path, strategy: str, symmetric: bool) -> None:
    drawn: dict[str, Drawn] = {}

    def store(name: str, shape: tuple[int, int]) -> tuple[writers.Tensors, NDArray[Any]]:
        groups = 1 if strategy == "channel" else shape[1] // 32
        made = drawn[f"{name}.weight"] = writers.draw(*shape, 8, groups, symmetric=symmetric, dtype=np.float32)
        return writers.in_bytes(name, made, symmetric=symmetric), made.weight

    scheme = writers.scheme(8, strategy, symmetric=symmetric, group_size=32 if strategy == "group" else None)
    writers.quantize(tiny_checkpoint, writers.compressed("int-quantized", scheme), store)
    checkpoint = Checkpoint.open(tiny_checkpoint)
    for name, expected in drawn.items():
        assert checkpoint.tensor(name).numpy().tobytes() == expected.weight.tobytes()
    matrix = held(tiny_checkpoint, O_PROJ).codes()
    assert np.array_equal(matrix.codes, drawn[f"{O_PROJ}.weight"].codes)
    assert matrix.grid.block_size == (64 if strategy == "channel" else 32)


@pytest.mark.parametrize("dtype", [np.float32, BF16])
@pytest.mark.parametrize(
    ("strategy", "more", "shape", "said"),
    [
        ("tensor", {}, lambda n, k: (1,), "fp8 with one scale"),
        ("channel", {}, lambda n, k: (n, 1), "fp8 by channel"),
        ("block", {"block_structure": [48, 32]}, lambda n, k: (-(-n // 48), k // 32), "fp8 in blocks of 48 by 32"),
        ("group", {"group_size": 32}, lambda n, k: (n, k // 32), "fp8 in blocks of 1 by 32"),
    ],
)
def test_fp8(tiny_checkpoint: Path, strategy: str, more: Mapping[str, Any], shape: Any, said: str, dtype: Any) -> None:
    random = np.random.default_rng(5)

    def store(name: str, sizes: tuple[int, int]) -> tuple[writers.Tensors, NDArray[Any]]:
        n, k = sizes
        codes = random.normal(0, 30, sizes).astype(FP8)
        scales = random.uniform(0.001, 0.01, shape(n, k)).astype(dtype)
        weight = np.empty(sizes, dtype)
        height, width = {"tensor": (n, k), "channel": (1, k), "group": (1, 32), "block": (48, 32)}[strategy]
        for row in range(n):
            for column in range(k):
                scale = scales.reshape(-(-n // height), -1)[row // height, column // width]
                weight[row, column] = codes[row, column].astype(dtype) * scale
        return {f"{name}.weight": codes, f"{name}.weight_scale": scales}, weight

    scheme = writers.scheme(8, strategy, kind="float", **more)
    expected = writers.quantize(tiny_checkpoint, writers.compressed("float-quantized", scheme), store)
    checkpoint = Checkpoint.open(tiny_checkpoint)
    for name, weight in expected.items():
        assert checkpoint.tensor(name).numpy().tobytes() == weight.tobytes()
    assert held(tiny_checkpoint, O_PROJ).format == said
    with pytest.raises(UnrepresentableCodes, match=f"are {said}"):
        held(tiny_checkpoint, O_PROJ).codes()


def test_nvfp4(tiny_checkpoint: Path) -> None:
    values = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
    random = np.random.default_rng(6)

    def store(name: str, sizes: tuple[int, int]) -> tuple[writers.Tensors, NDArray[Any]]:
        n, k = sizes
        codes = random.integers(0, 16, sizes)
        scales = random.uniform(8, 400, (n, k // 16)).astype(FP8)
        whole = np.array([1234.5], np.float32)
        numbers = np.array([[(-1 if code & 8 else 1) * values[code & 7] for code in row] for row in codes], np.float32)
        effective = np.repeat(scales.astype(np.float32) / whole, 16, axis=1)
        made = {
            f"{name}.weight_packed": (codes[:, ::2] | codes[:, 1::2] << 4).astype(np.uint8),
            f"{name}.weight_scale": scales,
            f"{name}.weight_global_scale": whole,
            f"{name}.input_global_scale": whole,
        }
        return made, (numbers * effective).astype(BF16)

    scheme = writers.scheme(4, "tensor_group", kind="float", group_size=16)
    expected = writers.quantize(tiny_checkpoint, writers.compressed("nvfp4-pack-quantized", scheme), store)
    checkpoint = Checkpoint.open(tiny_checkpoint)
    for name, weight in expected.items():
        assert checkpoint.tensor(name).numpy().tobytes() == weight.tobytes()
    assert not any("global_scale" in name for name in checkpoint.tensors)
    assert any("activations are quantized, too; the recipe decides that" in note for note in checkpoint.notes)


def test_layers_of_several_groups(tiny_checkpoint: Path) -> None:
    drawn = store_packed(tiny_checkpoint)
    own = writers.draw(64, 64, 8, 1, symmetric=True, dtype=BF16)
    file = tiny_checkpoint / "model.safetensors"
    stored = {name: array for name, array in load_file(file).items() if not name.startswith(O_PROJ)}
    save_file({**stored, **writers.packed(O_PROJ, own, 8, symmetric=True)}, file)
    schemes = writers.scheme(4, "group", group_size=32), writers.scheme(8, "channel")
    settings = json.loads((tiny_checkpoint / "config.json").read_text())
    settings["quantization_config"] = writers.compressed("pack-quantized", *schemes)
    (tiny_checkpoint / "config.json").write_text(json.dumps(settings))
    assert held(tiny_checkpoint, O_PROJ).dequantize().tobytes() == own.weight.tobytes()
    other = "model.layers.1.mlp.up_proj"
    assert held(tiny_checkpoint, other).dequantize().tobytes() == drawn[f"{other}.weight"].weight.tobytes()


def test_what_is_said_of_the_cache_is_not_taken(tiny_checkpoint: Path) -> None:
    store_packed(tiny_checkpoint, kv_cache_scheme={"num_bits": 8, "type": "float"})
    file = tiny_checkpoint / "model.safetensors"
    scales = {f"model.layers.0.self_attn.{which}_scale": np.ones(1, np.float32) for which in "kv"}
    save_file({**load_file(file), **scales}, file)
    checkpoint = Checkpoint.open(tiny_checkpoint)
    assert any("KV cache is quantized, which is not taken" in note for note in checkpoint.notes)
    assert not scales.keys() & checkpoint.tensors.keys()
    assert scales.keys() <= checkpoint.stored.keys()


@pytest.mark.parametrize(
    ("role", "change", "said"),
    [
        ("weight_scale", None, r"o_proj.weight_packed' has no weight_scale beside it"),
        ("weight_shape", None, r"'model.layers.0.self_attn.o_proj.weight_shape' is missing"),
        (
            "weight_shape",
            lambda array: np.array([64, 1 << 62]),
            r"o_proj.weight_shape' says \[64, 4611686018427387904\]",
        ),
        ("weight_shape", lambda array: np.array([-64, 64]), r"o_proj.weight_shape' says \[-64, 64\]"),
        ("weight_shape", lambda array: np.array([64, 64, 1]), r"o_proj.weight_shape' has shape \[3\]"),
        ("weight_packed", lambda array: array[:, :3], "no group of quantization_config fits it"),
        ("weight_scale", lambda array: array[:, :1], "no group of quantization_config fits it"),
        ("weight_scale", lambda array: array[:, :, None, None], r"o_proj.weight_scale' has shape \[64, 2, 1, 1\]"),
        ("weight_zero_point", lambda array: array[:3], r"o_proj.weight_zero_point' has shape \[3, 2\]"),
        ("weight_packed", lambda array: array.astype(np.int64), "o_proj.weight_packed' is INT64"),
    ],
)
def test_parts_that_do_not_fit(tiny_checkpoint: Path, role: str, change: Any, said: str) -> None:
    store_packed(tiny_checkpoint, symmetric=False)
    file = tiny_checkpoint / "model.safetensors"
    stored = dict(load_file(file))
    array = stored.pop(f"{O_PROJ}.{role}")
    if change is not None:
        stored[f"{O_PROJ}.{role}"] = np.ascontiguousarray(change(array))
    save_file(stored, file)
    with pytest.raises(CheckpointError, match=said):
        Checkpoint.open(tiny_checkpoint)


def test_codes_beyond_their_bits(tiny_checkpoint: Path) -> None:
    def store(name: str, shape: tuple[int, int]) -> tuple[writers.Tensors, NDArray[Any]]:
        made = writers.draw(*shape, 8, 1, symmetric=True)
        return writers.in_bytes(name, made, symmetric=True), made.weight

    config = writers.compressed("int-quantized", writers.scheme(4, "channel"))
    writers.quantize(tiny_checkpoint, config, store)
    with pytest.raises(CheckpointError, match=r"o_proj.weight' holds codes beyond 4 bits"):
        held(tiny_checkpoint, O_PROJ).dequantize()


@pytest.mark.parametrize(
    ("change", "said", "kind"),
    [
        ({"quantization_status": "frozen"}, "only compressed weights are taken", UnsupportedError),
        (
            {"config_groups": {"a": {"weights": {}, "format": "marlin-24"}}},
            'has format "marlin-24"; taken are pack-quantized',
            UnsupportedError,
        ),
        ({"sparsity_config": {"format": "sparse-24-bitmask"}}, "sparsity_config is not taken", UnsupportedError),
        ({"transform_config": {"config_groups": {"R1": {}}}}, "rotates what layers read", UnsupportedError),
        ({"config_groups": {}}, "config_groups must map names to schemes", CheckpointError),
        ({"config_groups": {"a": {"weights": 4}}}, r"config_groups\.a\.weights must be a mapping", CheckpointError),
        (
            {"config_groups": {"a": {"weights": {"num_bits": 4, "strategy": "group"}}}},
            "group_size is null; it must be at least 1",
            CheckpointError,
        ),
        (
            {"config_groups": {"a": {"weights": {"num_bits": 6, "type": "float"}}}},
            "float of 6 bits is not taken",
            UnsupportedError,
        ),
        (
            {"config_groups": {"a": {"weights": {"strategy": "block", "block_structure": "9" * 99}}}},
            "block_structure",
            CheckpointError,
        ),
    ],
)
def test_configurations_that_are_not_taken(
    tiny_checkpoint: Path, change: Mapping[str, Any], said: str, kind: type[ForgeError]
) -> None:
    store_packed(tiny_checkpoint)
    settings = json.loads((tiny_checkpoint / "config.json").read_text())
    settings["quantization_config"] |= change
    (tiny_checkpoint / "config.json").write_text(json.dumps(settings))
    with pytest.raises(kind, match=said):
        Checkpoint.open(tiny_checkpoint)
