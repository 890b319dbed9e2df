"""What stands between a checkpoint's parameters and those that transformers computes with."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx_ir as ir
import pytest
import torch
from numpy.typing import NDArray

from llmforge.base.errors import CheckpointError, VerificationError
from llmforge.checkpoint import Checkpoint
from llmforge.trace import trace
from llmforge.trace.export.reference import ReferenceModel
from llmforge.verification import bindings
from llmforge.verification.trace_verifier import verify_trace

from ..models import zoo


class Expected:
    """What transformers has of one parameter."""

    def __init__(self, array: NDArray[np.float32]) -> None:
        self.array = array

    def shape(self, name: str) -> tuple[int, ...]:
        return self.array.shape

    def rows(self, name: str, rows: NDArray[np.int64]) -> NDArray[np.float32]:
        return self.array[rows]


def compare(changed: NDArray[np.float32]) -> None:
    table = np.arange(1, 13, dtype=np.float32).reshape(4, 3)
    bindings._compare("table", ir.Tensor(table), Expected(table + changed), np.random.default_rng(0))  # type: ignore[arg-type]


def test_a_row_that_transformers_clears_is_named() -> None:
    changed = np.zeros((4, 3), np.float32)
    compare(changed)
    changed[2] = [-7, -8, -9]
    with pytest.raises(CheckpointError, match="writes zeros over row 2 of table, that of the padding token") as caught:
        compare(changed)
    assert "pad_token_id to null" in str(caught.value.hint)
    changed[2] = 1
    with pytest.raises(VerificationError, match="holds other numbers for parameter table"):
        compare(changed)


@pytest.mark.slow
def test_a_youtu_checkpoint_with_a_padding_row_is_stopped_by_name(tmp_path: Path) -> None:
    sizes = {"q_lora_rank": 32, "v_head_dim": 16, "head_dim": 8, "num_hidden_layers": 1}
    zoo.write("youtu", tmp_path / "padded", **sizes)
    zoo.write("youtu", tmp_path / "plain", **sizes, pad_token_id=None)
    padded, plain = (Checkpoint.open(tmp_path / name) for name in ("padded", "plain"))
    with pytest.raises(CheckpointError, match=r"zeros over row 0 of model\.embed_tokens\.weight"):
        verify_trace(padded, trace(padded))
    verify_trace(plain, trace(plain))


def test_parameters_that_no_text_reads_are_told_from_the_others(tmp_path: Path) -> None:
    zoo.write("llama", tmp_path, num_hidden_layers=1)
    reference = ReferenceModel(Checkpoint.open(tmp_path))
    reference.model.register_parameter("tower", torch.nn.Parameter(torch.ones(2)))
    read = ["model.embed_tokens.weight", "model.layers.0.self_attn.k_proj.weight", "model.norm.weight"]
    assert reference.read_by_text([*read, "tower"]) == set(read)
