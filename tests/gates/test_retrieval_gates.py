"""Gates on retrieval: against the checkpoint query by query, and on cosines to it."""

from __future__ import annotations

import numpy as np
import pytest

from llmforge.gates import decision
from llmforge.gates.decision import GateResult, Verdict
from llmforge.metrics import catalog
from llmforge.metrics.metric import Measured
from llmforge.metrics.retrieval import results
from llmforge.metrics.retrieval.corpus import RetrievalCorpus
from llmforge.metrics.retrieval.results import Side
from llmforge.recipe import GateSpec

COUNT = 120


def measured(noise: float) -> Measured:
    """Make an embedder whose embeddings are off by `noise`; queries are noisy copies of what answers them."""
    texts = tuple(f"text {at}" for at in range(COUNT))
    corpus = RetrievalCorpus(texts, texts, tuple(frozenset({at}) for at in range(COUNT)))
    rng = np.random.default_rng(0)
    base = rng.standard_normal((COUNT, 16)).astype(np.float32)
    theirs = np.concatenate([base + 0.5 * rng.standard_normal(base.shape), base]).astype(np.float32)
    ours = (theirs + noise * rng.standard_normal(theirs.shape)).astype(np.float32)
    sides = [Side(list(each[:COUNT] @ each[COUNT:].T), each) for each in (ours, theirs)]
    return Measured(retrieval=results.measured(corpus, None, *sides, engine="engine", baseline="checkpoint"))


def judge(name: str, found: Measured, **limits: float) -> GateResult:
    specs = {name: GateSpec.model_validate(limits)}
    (result,) = decision.judge(specs, catalog.estimates(found), original=decision.checkpoint(found))
    return result


@pytest.mark.parametrize(
    ("noise", "name", "limits", "verdict"),
    [
        (0.001, "retrieval.ndcg_10", {"drop_max": 0.005}, Verdict.PASS),
        (1.0, "retrieval.ndcg_10", {"drop_max": 0.005}, Verdict.FAIL),
        (0.001, "retrieval.cosine_mean", {"min": 0.995}, Verdict.PASS),
        (1.0, "retrieval.cosine_mean", {"min": 0.995}, Verdict.FAIL),
        (1.0, "retrieval.cosine_p01", {"min": 0.995}, Verdict.INCONCLUSIVE),  # of 240 texts 2 or 3 lie below,
    ],
)
def test_retrieval_is_judged(noise: float, name: str, limits: dict[str, float], verdict: Verdict) -> None:
    assert judge(name, measured(noise), **limits).verdict is verdict
