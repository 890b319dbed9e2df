"""GPTQ: what its tensors stand for, which codes are held as they are, and what is refused."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from numpy.typing import NDArray
from safetensors.numpy import load_file, save_file

from llmforge.base.errors import CheckpointError, UnsupportedError
from llmforge.checkpoint import Checkpoint
from llmforge.checkpoint.quantized import UnrepresentableCodes
from llmforge.checkpoint.quantized.gptq import GptqTensor
from llmforge.quantization.grids import dequantize

from . import writers
from .writers import Drawn

Q_PROJ = "model.layers.0.self_attn.q_proj"
DOWN_PROJ = "model.layers.1.mlp.down_proj"


def config(bits: int = 4, size: int = 32, **more: Any) -> dict[str, Any]:
    return {"quant_method": "gptq", "bits": bits, "group_size": size, **more}


def written(
    folder: Path, said: Mapping[str, Any], *, version: int = 1, symmetric: bool = False, dtype: Any = np.float16
) -> dict[str, Drawn]:
    """Store all linear layers of a checkpoint as `said`; return what was drawn, by parameter."""
    drawn: dict[str, Drawn] = {}

    def store(name: str, shape: tuple[int, int]) -> tuple[writers.Tensors, NDArray[Any]]:
        n, k = shape
        groups = 1 if said["group_size"] == -1 else k // int(said["group_size"])
        shuffled = bool(said.get("desc_act"))
        made = writers.draw(n, k, int(said["bits"]), groups, symmetric=symmetric, shuffled=shuffled, dtype=dtype)
        drawn[f"{name}.weight"] = made
        return writers.gptq(name, made, int(said["bits"]), version=version), made.weight

    writers.quantize(folder, said, store)
    return drawn


def tensor(checkpoint: Checkpoint, name: str) -> GptqTensor:
    found = checkpoint.tensors[name]
    assert isinstance(found, GptqTensor)
    return found


@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize("act", [False, True])
@pytest.mark.parametrize("bits", [2, 3, 4, 8])
def test_weights_are_those_of_the_documented_layout(tiny_checkpoint: Path, bits: int, act: bool, version: int) -> None:
    said = config(bits, desc_act=act, checkpoint_format="gptq" if version == 1 else "gptq_v2")
    drawn = written(tiny_checkpoint, said, version=version)
    checkpoint = Checkpoint.open(tiny_checkpoint)
    assert len(drawn) == 14
    for name, expected in drawn.items():
        weight = checkpoint.tensor(name).numpy()
        assert weight.dtype == np.float16
        assert weight.tobytes() == expected.weight.tobytes()
    checkpoint.verify()


@pytest.mark.parametrize("bits", [3, 4, 8])
def test_codes_in_order_are_held_as_they_are(tiny_checkpoint: Path, bits: int) -> None:
    drawn = written(tiny_checkpoint, config(bits))[f"{DOWN_PROJ}.weight"]
    held = tensor(Checkpoint.open(tiny_checkpoint), f"{DOWN_PROJ}.weight")
    assert held.columns() is None
    matrix = held.codes()
    assert (matrix.grid.bits, matrix.grid.block_size, matrix.grid.symmetric, matrix.grid.scale) == (
        bits,
        32,
        False,
        "fp16",
    )
    assert matrix.grid == held.grid()
    assert np.array_equal(matrix.codes, drawn.codes)
    assert np.array_equal(matrix.scales, drawn.scales.astype(np.float32))
    assert matrix.zero_points is not None
    assert np.array_equal(matrix.zero_points, drawn.zeros)


def test_symmetric_codes_need_no_zero_points(tiny_checkpoint: Path) -> None:
    drawn = written(tiny_checkpoint, config(sym=True), symmetric=True)[f"{Q_PROJ}.weight"]
    matrix = tensor(Checkpoint.open(tiny_checkpoint), f"{Q_PROJ}.weight").codes()
    assert matrix.grid.symmetric
    assert matrix.zero_points is None
    assert np.array_equal(matrix.codes, drawn.codes)


def test_two_bits_are_held_as_four(tiny_checkpoint: Path) -> None:
    drawn = written(tiny_checkpoint, config(2), symmetric=True)[f"{Q_PROJ}.weight"]
    matrix = tensor(Checkpoint.open(tiny_checkpoint), f"{Q_PROJ}.weight").codes()
    assert matrix.grid.bits == 4
    assert np.array_equal(matrix.codes, drawn.codes)
    assert np.array_equal(dequantize(matrix).astype(np.float16), drawn.weight)


def test_shuffled_groups_are_put_in_order(tiny_checkpoint: Path) -> None:
    drawn = written(tiny_checkpoint, config(desc_act=True))[f"{DOWN_PROJ}.weight"]
    held = tensor(Checkpoint.open(tiny_checkpoint), f"{DOWN_PROJ}.weight")
    columns = held.columns()
    assert columns is not None
    assert np.array_equal(np.sort(columns), np.arange(128))
    matrix = held.codes()
    assert np.array_equal(matrix.codes, drawn.codes[:, columns])
    back = np.empty_like(drawn.weight)
    back[:, columns] = dequantize(matrix).astype(np.float16)
    assert np.array_equal(back, drawn.weight)


def test_groups_that_no_block_divides_are_not_held(tiny_checkpoint: Path) -> None:
    written(tiny_checkpoint, config(size=8))
    held = tensor(Checkpoint.open(tiny_checkpoint), f"{Q_PROJ}.weight")
    with pytest.raises(UnrepresentableCodes, match="do not begin at multiples of 16"):
        held.grid()


def test_a_channel_is_held_in_blocks_with_one_scale(tiny_checkpoint: Path) -> None:
    drawn = written(tiny_checkpoint, config(size=-1), dtype=ml_dtypes.bfloat16)[f"{Q_PROJ}.weight"]
    held = tensor(Checkpoint.open(tiny_checkpoint), f"{Q_PROJ}.weight")
    assert held.format == "int4 by channel, with g_idx"
    matrix = held.codes()
    assert (matrix.grid.block_size, matrix.grid.scale) == (64, "fp32")
    assert np.array_equal(dequantize(matrix).astype(ml_dtypes.bfloat16), drawn.weight)


def test_zero_points_of_zero_borrow_from_their_neighbours(tiny_checkpoint: Path) -> None:
    """v1 takes 1 from whole words: a zero point of 0 is stored as 15, and the one above as one less again."""
    written(tiny_checkpoint, config())
    file = tiny_checkpoint / "model.safetensors"
    stored = dict(load_file(file))
    zeros = np.tile(np.array([0, 3, 0, 0, 9, 15, 1, 0], np.uint8), (2, 8))
    plain = writers.words(zeros, 4).view(np.uint32)
    stored[f"{Q_PROJ}.qzeros"] = (plain - np.uint32(0x11111111)).view(np.int32)
    save_file(stored, file)
    assert np.array_equal(tensor(Checkpoint.open(tiny_checkpoint), f"{Q_PROJ}.weight").zero_points(), zeros.T)


def test_a_scale_of_zero_is_held_as_codes_at_the_zero_point(tiny_checkpoint: Path) -> None:
    written(tiny_checkpoint, config())
    file = tiny_checkpoint / "model.safetensors"
    stored = dict(load_file(file))
    stored[f"{Q_PROJ}.scales"][1, 5] = 0
    save_file(stored, file)
    held = tensor(Checkpoint.open(tiny_checkpoint), f"{Q_PROJ}.weight")
    matrix = held.codes()
    assert matrix.scales[5, 1] == 1
    assert np.array_equal(dequantize(matrix).astype(np.float16), held.dequantize())


def test_layers_of_other_bits(tiny_checkpoint: Path) -> None:
    said = config(dynamic={"+:.*down_proj": {"bits": 8, "group_size": 64}})
    written(tiny_checkpoint, said)
    drawn = writers.draw(64, 128, 8, 2)
    file = tiny_checkpoint / "model.safetensors"
    save_file({**load_file(file), **writers.gptq(DOWN_PROJ, drawn, 8)}, file)
    assert tensor(Checkpoint.open(tiny_checkpoint), f"{DOWN_PROJ}.weight").bits == 8
    weight = Checkpoint.open(tiny_checkpoint).tensor(f"{DOWN_PROJ}.weight").numpy()
    assert weight.tobytes() == drawn.weight.tobytes()


def resize(rows: int) -> Any:
    return lambda array: array[:rows]


@pytest.mark.parametrize(
    ("role", "change", "said"),
    [
        ("qzeros", None, r"'model.layers.0.self_attn.q_proj.qzeros' is missing"),
        ("scales", None, r"'model.layers.0.self_attn.q_proj.scales' is missing"),
        ("qweight", resize(3), r"q_proj.qweight' has shape \[3, 64\]; 64 input features.* make it \[8, 64\]"),
        ("qweight", lambda array: array[:, :8], r"q_proj.scales' has shape \[2, 64\]; the 8 output features"),
        ("scales", resize(1), r"q_proj.qzeros' has shape \[2, 8\]; 64 output features in 1 groups.* make it \[1, 8\]"),
        ("qzeros", lambda array: array[:, :3], r"q_proj.qzeros' has shape \[2, 3\]"),
        ("g_idx", resize(32), r"q_proj.qweight' has shape \[8, 64\]; 32 input features"),
        ("g_idx", lambda array: array.astype(np.int64), r"q_proj.g_idx' is INT64; it must be INT32"),
        ("qweight", lambda array: array.astype(np.uint8), r"q_proj.qweight' is UINT8; it must be INT32"),
        ("qweight", lambda array: array[None], r"q_proj.qweight' has shape \[1, 8, 64\]; it must have 2 axes"),
        ("qweight", resize(0), r"q_proj.qweight' has shape \[0, 64\]"),
    ],
)
def test_parts_that_do_not_fit(tiny_checkpoint: Path, role: str, change: Any, said: str) -> None:
    written(tiny_checkpoint, config())
    file = tiny_checkpoint / "model.safetensors"
    stored = dict(load_file(file))
    held = stored.pop(f"{Q_PROJ}.{role}")
    if change is not None:
        stored[f"{Q_PROJ}.{role}"] = np.ascontiguousarray(change(held))
    save_file(stored, file)
    with pytest.raises(CheckpointError, match=said) as caught:
        Checkpoint.open(tiny_checkpoint)
    assert caught.value.exit_code == 5
    assert caught.value.hint is not None


@pytest.mark.parametrize("group", [-1, 2, 2**31 - 1])
def test_a_group_that_is_none(tiny_checkpoint: Path, group: int) -> None:
    written(tiny_checkpoint, config(desc_act=True))
    file = tiny_checkpoint / "model.safetensors"
    stored = dict(load_file(file))
    stored[f"{Q_PROJ}.g_idx"][7] = group
    save_file(stored, file)
    checkpoint = Checkpoint.open(tiny_checkpoint)
    for ask in (checkpoint.tensor(f"{Q_PROJ}.weight").numpy, tensor(checkpoint, f"{Q_PROJ}.weight").codes):
        with pytest.raises(CheckpointError, match=rf"q_proj.g_idx' names group {group} at 7; there are 2"):
            ask()


def test_weights_beyond_fp16(tiny_checkpoint: Path) -> None:
    written(tiny_checkpoint, config())
    file = tiny_checkpoint / "model.safetensors"
    stored = dict(load_file(file))
    stored[f"{Q_PROJ}.scales"][:] = 60000
    save_file(stored, file)
    with pytest.raises(CheckpointError, match=r"q_proj.scales' makes weights of .* that are not finite"):
        Checkpoint.open(tiny_checkpoint).tensor(f"{Q_PROJ}.weight").numpy()


@pytest.mark.parametrize(
    ("change", "said", "kind"),
    [
        ({"bits": 5}, "bits is 5; GPTQ is taken with 2, 3, 4 or 8", UnsupportedError),
        ({"bits": "4"}, 'bits is "4"', UnsupportedError),
        ({"bits": 8}, r"make it \[\d+, \d+\]", CheckpointError),
        ({"group_size": 0}, "group_size is 0", CheckpointError),
        ({"group_size": 64}, "has 4 groups; 128 input features, and group_size 64, make it 2", CheckpointError),
        ({"checkpoint_format": "marlin"}, 'checkpoint_format is "marlin"; GPTQ is taken as gptq or gptq_v2', None),
        ({"is_marlin_format": True}, "is_marlin_format is true, which is not taken", UnsupportedError),
        ({"rotation": "hadamard"}, "rotation is", UnsupportedError),
    ],
)
def test_configurations_that_are_not_taken(
    tiny_checkpoint: Path, change: Mapping[str, Any], said: str, kind: type[Exception] | None
) -> None:
    written(tiny_checkpoint, config())
    writers.quantize(tiny_checkpoint, config() | change, lambda name, shape: ({}, np.empty(shape)))
    with pytest.raises(kind or UnsupportedError, match=said):
        Checkpoint.open(tiny_checkpoint)
