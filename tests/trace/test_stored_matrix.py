"""Matrices that stay in their file compute what modules with fp32 parameters compute, and keep nothing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import nn

from llmforge.checkpoint import Checkpoint
from llmforge.trace import trace
from llmforge.trace.export import stored_matrix
from llmforge.trace.export.reference import ReferenceModel
from llmforge.trace.export.stored_matrix import StoredMatrix
from llmforge.verification.trace_verifier import verify_trace

from ..models import zoo


@pytest.fixture
def matrix() -> NDArray[Any]:
    return np.random.default_rng(0).standard_normal((50, 16)).astype(ml_dtypes.bfloat16)


@pytest.mark.parametrize("bias", [True, False])
def test_modules_compute_with_it_what_they_compute_with_a_parameter(
    matrix: NDArray[Any], bias: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stored_matrix, "_READ_BYTES", 7 * 4 * 16)  # seven rows; 50 are no multiple
    read: list[int] = []
    stored = StoredMatrix.of(lambda: read.append(1) or matrix, matrix.shape)
    values = torch.from_numpy(matrix.astype(np.float32))
    linear, embedding = nn.Linear(16, 50, bias=bias), nn.Embedding(50, 16)
    x, ids = torch.randn(2, 3, 16), torch.tensor([[3, 0, 49]])
    with torch.inference_mode():
        linear.weight.copy_(values)
        embedding.weight.copy_(values)
        wanted, looked_up = linear(x), embedding(ids)
        linear._parameters["weight"] = embedding._parameters["weight"] = stored  # type: ignore[assignment]
        assert torch.allclose(linear(x), wanted, atol=1e-5)
        assert torch.equal(embedding(ids), looked_up)
        assert len(read) == 2
        assert torch.equal(stored.T, values.T)
        assert torch.equal(stored[4:6] + 1, values[4:6] + 1)
        assert torch.allclose(x @ stored.mT, x @ values.T)
    assert (stored.dtype, stored.shape, stored.device.type) == (torch.float32, values.shape, "cpu")
    assert not stored.is_meta


@pytest.mark.thorough
@pytest.mark.parametrize("name", ["llama-tied", "gemma3"])
def test_a_part_of_a_model_computes_the_same_with_its_matrices_on_disk(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    zoo.write(name, tmp_path, torch.bfloat16)
    checkpoint = Checkpoint.open(tmp_path)
    ids = np.arange(3, 20)
    whole = ReferenceModel(checkpoint, part=True).run(ids, 4)
    monkeypatch.setattr(stored_matrix, "TILE_BYTES", 0)
    made: list[str] = []
    stored = stored_matrix._stored
    monkeypatch.setattr(stored_matrix, "_stored", lambda of, named: made.append(named) or stored(of, named))
    held = ReferenceModel(checkpoint, part=True)
    assert len(made) >= 7 * len(held.kept)
    lean = held.run(ids, 4)
    np.testing.assert_allclose(lean.logits, whole.logits, atol=1e-5 * float(whole.logits.std()))
    for a, b in zip(lean.hidden, whole.hidden, strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5 * float(b.std()))
    proof = verify_trace(checkpoint, trace(checkpoint), whole_bytes=1)
    assert proof.max_abs_difference <= proof.allowed
