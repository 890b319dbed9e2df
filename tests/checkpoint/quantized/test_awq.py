"""AWQ: what its tensors stand for, codes held as they are, and what is refused."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from safetensors.numpy import load_file, save_file

from llmforge.base.errors import CheckpointError, ForgeError, UnsupportedError
from llmforge.checkpoint import Checkpoint
from llmforge.checkpoint.quantized.awq import AwqTensor

from . import writers
from .writers import Drawn

CONFIG = {"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True, "version": "gemm"}
UP_PROJ = "model.layers.0.mlp.up_proj"


def written(folder: Path, said: Mapping[str, Any] = CONFIG) -> dict[str, Drawn]:
    """Store all linear layers of a checkpoint; return what was drawn, by parameter."""
    drawn: dict[str, Drawn] = {}

    def store(name: str, shape: tuple[int, int]) -> tuple[writers.Tensors, NDArray[Any]]:
        made = drawn[f"{name}.weight"] = writers.draw(*shape, 4, shape[1] // 32)
        return writers.awq(name, made), made.weight

    writers.quantize(folder, said, store)
    return drawn


def test_weights_and_codes_are_those_of_the_documented_layout(tiny_checkpoint: Path) -> None:
    drawn = written(tiny_checkpoint)
    checkpoint = Checkpoint.open(tiny_checkpoint)
    assert len(drawn) == 14
    for name, expected in drawn.items():
        assert checkpoint.tensor(name).numpy().tobytes() == expected.weight.tobytes()
        held = checkpoint.tensors[name]
        assert isinstance(held, AwqTensor)
        assert held.columns() is None
        matrix = held.codes()
        assert (matrix.grid.bits, matrix.grid.block_size, matrix.grid.scale) == (4, 32, "fp16")
        assert np.array_equal(matrix.codes, expected.codes)
        assert matrix.zero_points is not None
        assert np.array_equal(matrix.zero_points, expected.zeros)
        assert np.array_equal(matrix.scales, expected.scales.astype(np.float32))


@pytest.mark.parametrize(
    ("role", "change", "said"),
    [
        ("qzeros", None, r"'model.layers.0.mlp.up_proj.qzeros' is missing"),
        ("qzeros", lambda array: array[:1], r"up_proj.qzeros' has shape \[1, 16\]; .* make it \[2, 16\]"),
        ("scales", lambda array: array[:, :8], r"up_proj.scales' has shape \[2, 8\]; .* make it \[2, 128\]"),
        ("qweight", lambda array: array[:63], r"up_proj.qweight' has 63 input features, no multiple of group_size, 32"),
    ],
)
def test_parts_that_do_not_fit(tiny_checkpoint: Path, role: str, change: Any, said: str) -> None:
    written(tiny_checkpoint)
    file = tiny_checkpoint / "model.safetensors"
    stored = dict(load_file(file))
    held = stored.pop(f"{UP_PROJ}.{role}")
    if change is not None:
        stored[f"{UP_PROJ}.{role}"] = np.ascontiguousarray(change(held))
    save_file(stored, file)
    with pytest.raises(CheckpointError, match=said):
        Checkpoint.open(tiny_checkpoint)


@pytest.mark.parametrize(
    ("change", "said", "kind"),
    [
        ({"bits": 8}, "bits is 8; AWQ is taken with 4", UnsupportedError),
        ({"version": "gemv"}, 'version is "gemv"; AWQ is taken with "gemm"', UnsupportedError),
        ({"zero_point": False}, "zero_point is false; AWQ is taken with true", UnsupportedError),
        ({"group_size": "all"}, 'group_size is "all"', CheckpointError),
    ],
)
def test_configurations_that_are_not_taken(
    tiny_checkpoint: Path, change: Mapping[str, Any], said: str, kind: type[ForgeError]
) -> None:
    written(tiny_checkpoint, CONFIG | change)
    with pytest.raises(kind, match=said):
        Checkpoint.open(tiny_checkpoint)
