"""Quantizers on a checkpoint whose activations have outliers: what it computes is the same, so the order is, too."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from llmforge.calibration import calibrate, mixed
from llmforge.calibration.skeleton import Skeleton
from llmforge.checkpoint import Checkpoint
from llmforge.checkpoint.documents import read_documents
from llmforge.checkpoint.text import TokenWindow
from llmforge.compile import texts
from llmforge.quantization.grid import Grid
from llmforge.quantization.methods.gptq import Gptq
from llmforge.quantization.methods.rtn import Rtn
from llmforge.quantization.statistics import WeightDemand

from ..models.checkpoints import write_checkpoint
from ..models.outliers import MASSIVE, write_outliers

DATA = Path(__file__).parents[1] / "data"
GRID, TABLES = Grid(4, 32, False, "int8"), Grid(6, 64, True, "int8")


def peaks(folder: Path, ids: torch.Tensor) -> tuple[torch.Tensor, list[float]]:
    """Return logits, and of what each norm and each down projection reads or makes, the largest over the median."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    found: list[float] = []

    def note(x: torch.Tensor) -> None:
        found.append(float(x.abs().max() / x.abs().median()))

    for name, module in model.named_modules():
        if name.endswith("layernorm"):
            module.register_forward_hook(lambda _, inputs, made: note(made))
        if name.endswith("down_proj"):
            module.register_forward_pre_hook(lambda _, inputs: note(inputs[0]))
    with torch.no_grad():
        return model(ids).logits, found


def test_outliers_leave_the_logits_as_they_were(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "plain")
    write_outliers(tmp_path / "plain", tmp_path / "outliers")
    ids = torch.from_numpy(np.random.default_rng(0).integers(3, 259, (2, 50)))
    plain, before = peaks(tmp_path / "plain", ids)
    same, after = peaks(tmp_path / "outliers", ids)
    torch.testing.assert_close(same, plain, rtol=0, atol=1e-5)
    assert len(before) == len(after) == 6
    assert all(now > 4 * then for then, now in zip(before, after, strict=True))
    assert max(after) > MASSIVE / 4


@pytest.mark.slow
def test_methods_keep_their_order(tmp_path: Path) -> None:
    write_outliers(DATA / "docs-llama-7m", tmp_path / "outliers")
    cut = texts.windows_of(Checkpoint.open(DATA / "docs-llama-7m"), read_documents(DATA / "calibration.jsonl"), 512)
    text, held = cut[0:32:4], cut[2:18:4]
    checkpoint = Checkpoint.open(tmp_path / "outliers")
    of_rtn = kld(checkpoint, text, held, WeightDemand(Rtn(), GRID, tables=TABLES))
    of_gptq = kld(checkpoint, text, held, WeightDemand(Gptq(), GRID, tables=TABLES))
    assert of_rtn > 1.3 * of_gptq
    plain = kld(Checkpoint.open(DATA / "docs-llama-7m"), text, held, WeightDemand(Rtn(), GRID, tables=TABLES))
    assert of_rtn > 1.5 * plain  # or they are no outliers


def kld(checkpoint: Checkpoint, text: list[TokenWindow], held: list[TokenWindow], demand: WeightDemand) -> float:
    """Calibrate, and return the KLD on windows that were held out."""
    found = calibrate(checkpoint, text, [demand]).linears
    with torch.no_grad():
        return mixed.divergence(Skeleton.build(checkpoint), held, found)
