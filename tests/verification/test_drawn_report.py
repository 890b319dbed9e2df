"""A report says how many places were drawn, and where fewer were, to keep a proof's time and memory."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx_ir as ir
import pytest

from llmforge import native
from llmforge.checkpoint import Checkpoint
from llmforge.passes import CpuKernels, FlashAttention, QuantizeWeights
from llmforge.rewrite.pass_base import Budget
from llmforge.verification import subgraph_proof
from llmforge.verification.drawn_places import DRAWS, Drawn, Extent
from llmforge.verification.promises import Promises
from llmforge.verification.verifier import Verifier

from ..models import graphs

LONG = Promises(context=4096, batch=40, vocabulary=96)
WHOLE = Extent(reach=4096, tokens=512, slots=1 << 20, rows_of_tokens=10_000)


def test_what_was_not_cut_short_is_not_told() -> None:
    assert Drawn.of(LONG, WHOLE, 270) == Drawn(270)
    assert Drawn.of(LONG, Extent(None, 512, 1 << 20, 10_000), 90).cut == ""


def test_what_was_cut_short_is_told_of_the_shortest() -> None:
    positions = Drawn.of(LONG, Extent(1000, 512, 1 << 20, 10_000), 200)
    steps = Drawn.of(LONG, Extent(2000, 114, 1 << 20, 80), 100)
    assert positions.cut == " (to keep time and memory: positions below 1,000)"
    assert (positions + steps + Drawn(1)) == Drawn(301, 1000, 114, 2)
    told = "positions below 1,000, steps of up to 114 tokens, 2 draws of more than 16 rows"
    assert (steps + positions).cut == f" (to keep time and memory: {told})"


@pytest.mark.skipif(native.library() is None, reason="the kernels are not compiled")
@pytest.mark.parametrize("slots", [pytest.param(None, marks=pytest.mark.thorough), 16])
def test_both_kinds_of_proofs_tell(
    slots: int | None, bf16_llama: tuple[Checkpoint, ir.Model], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if slots is not None:
        monkeypatch.setattr(subgraph_proof, "_DRAWN_BYTES", DRAWS * slots * 256)  # bytes of a token's caches in a layer
    promised, model, loose = Promises(128, 2, 264), bf16_llama[1].clone(), Budget(kld_mean=100.0)
    texts = [np.random.default_rng(1).integers(0, 264, 20)]
    check = Verifier(model, promises=promised, folder=tmp_path, texts=texts)
    for step in (FlashAttention(), QuantizeWeights(block_size=32, method="rtn", budget=loose), CpuKernels(loose)):
        told = ", ".join(check.check(step, model, step.run(model, graphs.CPU)).probes)
        if not isinstance(step, QuantizeWeights):  # of which ONNX Runtime's kernels treat each token by itself
            assert " at drawn places" in told
            assert ("to keep time and memory: positions below" in told) == (slots is not None)
