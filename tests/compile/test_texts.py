"""The texts of a build: tokens that the model does not have are refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from llmforge.base.errors import CheckpointError
from llmforge.checkpoint import Checkpoint
from llmforge.checkpoint.documents import Document
from llmforge.compile import texts
from llmforge.recipe import CalibrationSpec

from ..models.checkpoints import write_checkpoint


def test_a_tokenizer_of_another_model_is_refused(tmp_path: Path) -> None:
    read = [Document("0", "graph engine pass weight " * 20, "text.jsonl:1")]
    spec = CalibrationSpec(data=tmp_path / "text.jsonl", samples=2, length=16)
    write_checkpoint(tmp_path / "right")
    right = Checkpoint.open(tmp_path / "right")
    found = texts.calibration_windows(spec, read, right)
    highest = max(int(window.ids.max()) for window in found)
    write_checkpoint(tmp_path / "wrong", vocab_size=highest)
    with pytest.raises(CheckpointError, match=rf"gives token {highest}, and vocab_size of the model is {highest}"):
        texts.calibration_windows(spec, read, Checkpoint.open(tmp_path / "wrong"))
