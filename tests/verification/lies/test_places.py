"""What is wrong in one range of an axis alone is caught at drawn places, where no honest pass is refused."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from llmforge.passes import CpuKernels, FlashAttention, QuantizeWeights
from llmforge.rewrite.pass_base import Budget
from llmforge.verification import verifier
from llmforge.verification.verifier import Verifier

from ...models import graphs
from . import places, table
from .test_passes import SAMPLE, Traced, traced

LIES = (*places.OF_THE_TABLE, *places.MORE)
QUICK = {lie.name for lie in places.OF_THE_TABLE}


@pytest.fixture(scope="module")
def sample() -> Traced:
    return traced(SAMPLE)


@pytest.fixture
def any_operator(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let operators stand for what a kernel would do, that the dialect lacks."""
    monkeypatch.setattr(verifier.dialect, "check", lambda model: None)


@pytest.mark.parametrize(
    "lie",
    [pytest.param(lie, marks=[] if lie.name in QUICK else [pytest.mark.thorough]) for lie in LIES],
    ids=lambda lie: lie.name,
)
@pytest.mark.usefixtures("any_operator")
def test_a_lie_about_places_is_caught(lie: table.Lie, sample: Traced, tmp_path: Path) -> None:
    model, promises = sample
    texts = [np.random.default_rng(7).integers(0, promises.vocabulary, length) for length in (24, 20)]
    message = table.caught(lie, model, promises, tmp_path, graphs.CPU, texts=texts)
    assert message is not None, f"{lie.name}: not seen"
    assert message.startswith("pass lying-pass declares ")


def test_lies_about_places_are_many_and_have_names() -> None:
    assert len({lie.name for lie in LIES}) == len(LIES) >= 45


@pytest.mark.thorough
@pytest.mark.parametrize("seed", range(4))
def test_honest_passes_hold_at_any_places(
    seed: int, sample: Traced, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, promises = sample
    trial, budget = model.clone(), Budget(kld_mean=100.0)
    texts = [np.random.default_rng(seed).integers(0, promises.vocabulary, length) for length in (48, 40)]
    monkeypatch.setattr(Verifier, "_seed", lambda self, after: seed)
    check = Verifier(trial, promises=promises, folder=tmp_path, texts=texts, threads=1)
    for step in (FlashAttention(), QuantizeWeights(block_size=32, method="rtn", budget=budget), CpuKernels(budget)):
        check.check(step, trial, step.run(trial, graphs.CPU))
