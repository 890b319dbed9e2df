from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from llmforge.base.errors import CheckpointError, DataError, VerificationError
from llmforge.checkpoint import Checkpoint
from llmforge.checkpoint.text import Window
from llmforge.evaluation import metrics, quality
from llmforge.evaluation.baseline import Baseline

SAMPLE = Path(__file__).parents[1] / "data" / "docs-llama-7m"
V = 50


def naive(reference: NDArray[np.float32], logits: NDArray[np.float32], targets: NDArray[np.int64]):
    """Score token by token with Python floats: (reference NLL, NLL, KLD, same top, Δp) of each row."""
    rows = []
    for p_row, q_row, target in zip(reference.tolist(), logits.tolist(), targets.tolist(), strict=True):
        p_norm = math.log(math.fsum(math.exp(x) for x in p_row))
        q_norm = math.log(math.fsum(math.exp(x) for x in q_row))
        kld = math.fsum(math.exp(p - p_norm) * ((p - p_norm) - (q - q_norm)) for p, q in zip(p_row, q_row, strict=True))
        same = p_row.index(max(p_row)) == q_row.index(max(q_row))
        p_true, q_true = p_row[target] - p_norm, q_row[target] - q_norm
        rows.append((-p_true, -q_true, kld, same, math.exp(q_true) - math.exp(p_true)))
    return [np.array(column) for column in zip(*rows, strict=True)]


def random_logits(seed: int, rows: int, scale: float = 3.0) -> NDArray[np.float32]:
    return np.random.default_rng(seed).normal(0, scale, (rows, V)).astype(np.float32)


@given(rows=st.integers(1, 40), scale=st.floats(0.01, 30), seed=st.integers(0, 2**32 - 1))
def test_scores_equal_a_naive_loop(rows: int, scale: float, seed: int) -> None:
    reference, logits = random_logits(seed, rows, scale), random_logits(seed + 1, rows, scale)
    targets = np.random.default_rng(seed).integers(0, V, rows)
    got = metrics.score(reference, logits, targets)
    expected = naive(reference, logits, targets)
    for values, wanted in zip((got.reference_nll, got.nll, got.kld, got.same_top, got.delta_p), expected, strict=True):
        np.testing.assert_allclose(values, wanted, rtol=1e-11, atol=1e-11)


def test_logits_far_from_zero_lose_nothing() -> None:
    reference, logits, targets = random_logits(0, 20), random_logits(1, 20), np.arange(20)
    shifted = metrics.score(reference + 4096, logits - 4096, targets)
    np.testing.assert_allclose(shifted.kld, metrics.score(reference, logits, targets).kld, rtol=2e-3)
    huge = metrics.score(reference * 1e4, logits, targets)  # one-hot: KLD is the NLL of the reference's choice
    np.testing.assert_allclose(huge.kld, metrics.score(reference, logits, reference.argmax(-1)).nll, rtol=1e-12)


def test_the_same_logits_have_no_divergence() -> None:
    logits = random_logits(0, 33)
    scores = metrics.score(logits, logits, np.zeros(33, np.int64))
    assert np.abs(scores.kld).max() < 1e-15
    assert scores.same_top.all()
    assert not scores.delta_p.any()


def test_kld_mean_takes_any_leading_axes() -> None:
    reference, logits = random_logits(0, 24), random_logits(1, 24)
    expected = naive(reference, logits, np.zeros(24, np.int64))[2].mean()
    assert metrics.kld_mean(reference, logits) == pytest.approx(expected, rel=1e-12)
    assert metrics.kld_mean(reference.reshape(2, 12, V), logits.reshape(2, 12, V)) == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_kld_mean_refuses_what_is_not_finite(value: float) -> None:
    logits = random_logits(0, 3)
    logits[2, 7] = value
    with pytest.raises(VerificationError, match=r"compared logits hold 1 values .* at row 2, token id 7"):
        metrics.kld_mean(random_logits(1, 3), logits)


def windows(documents: int = 12, seed: int = 0) -> list[Window]:
    """Two windows a document, of different lengths."""
    rng = np.random.default_rng(seed)
    return [
        Window(f"doc-{document}", rng.integers(0, V, rng.integers(5, 30)))
        for document in range(documents)
        for _ in range(2)
    ]


def model(noise: float):
    """Logits that depend on the ids alone, plus noise that does too."""
    table = random_logits(7, V)
    error = random_logits(8, V, noise)
    return lambda ids: table[ids] + error[ids]


def test_quality_equals_a_naive_loop_over_windows() -> None:
    cut = windows()
    baseline, artifact = model(0.0), model(0.3)
    got = quality.compare(cut, baseline, artifact)
    columns = [naive(baseline(w.ids)[:-1], artifact(w.ids)[:-1], w.ids[1:]) for w in cut]
    p_nll, q_nll, kld, same, delta = (np.concatenate(parts) for parts in zip(*columns, strict=True))
    assert (got.documents, got.windows, got.tokens) == (12, 24, len(kld))
    assert got.baseline_perplexity == pytest.approx(math.exp(p_nll.mean()))
    assert got.perplexity == pytest.approx(math.exp(q_nll.mean()))
    assert got.perplexity_ratio.value == pytest.approx(math.exp(q_nll.mean() - p_nll.mean()))
    assert got.kld_mean.value == pytest.approx(kld.mean())
    assert (got.kld_median, got.kld_p95, got.kld_p99) == pytest.approx(tuple(np.quantile(kld, (0.5, 0.95, 0.99))))
    assert got.kld_max == pytest.approx(kld.max())
    assert got.top1_agreement.value == pytest.approx(same.mean())
    assert 0 < got.top1_agreement.value < 1
    assert got.delta_p_rms == pytest.approx(math.sqrt((delta**2).mean()))
    assert sum(got.kld_histogram) == got.tokens
    assert sum(document.tokens for document in got.per_document) == got.tokens
    first = naive(baseline(cut[0].ids)[:-1], artifact(cut[0].ids)[:-1], cut[0].ids[1:])[2].sum()
    second = naive(baseline(cut[1].ids)[:-1], artifact(cut[1].ids)[:-1], cut[1].ids[1:])[2].sum()
    assert got.per_document[0].kld == pytest.approx(first + second)


def test_intervals_hold_the_figure_and_follow_the_seed() -> None:
    cut = windows()
    got = quality.compare(cut, model(0.0), model(0.3), seed=5)
    assert got == quality.compare(cut, model(0.0), model(0.3), seed=5)
    other = quality.compare(cut, model(0.0), model(0.3), seed=6)
    assert other.kld_mean.value == got.kld_mean.value
    assert other.kld_mean.low != got.kld_mean.low
    for estimate in (got.perplexity_ratio, got.kld_mean, got.top1_agreement):
        assert estimate.low is not None
        assert estimate.high is not None
        assert estimate.low < estimate.value < estimate.high
        assert estimate.samples == 12


def test_few_documents_have_no_interval() -> None:
    got = quality.compare(windows(documents=metrics.SMALLEST_SAMPLE - 1), model(0.0), model(0.3))
    assert (got.kld_mean.low, got.kld_mean.high) == (None, None)
    assert not got.kld_mean.is_exact


@pytest.mark.parametrize(("side", "broken"), [("baseline", 0), ("artifact", 1)])
def test_nan_fails_closed_and_names_the_window(side: str, broken: int) -> None:
    cut = windows()

    def nan_in_window_3(ids: NDArray[np.int64]) -> NDArray[np.float32]:
        logits = model(0.0)(ids)
        if ids is cut[3].ids:
            logits[0, 4] = np.nan
        return logits

    sides = [model(0.0), model(0.0)]
    sides[broken] = nan_in_window_3
    with pytest.raises(VerificationError, match=rf"{side} logits .* in window 3 \(document doc-1"):
        quality.compare(cut, *sides)


def test_text_without_predictions_is_refused() -> None:
    with pytest.raises(DataError, match="no token to predict"):
        quality.compare([Window("empty", np.array([0]))], model(0.0), model(0.0))


def test_a_wrecked_artifact_has_infinite_perplexity() -> None:
    got = quality.compare(windows(), model(0.0), lambda ids: model(0.0)(ids) * 1e5)
    assert got.perplexity == math.inf
    assert got.perplexity_ratio.value == math.inf
    again = quality.Quality.model_validate_json(got.model_dump_json())
    assert again.perplexity == math.inf


def test_progress_counts_windows() -> None:
    seen: list[tuple[int, int]] = []
    quality.compare(windows(2), model(0.0), model(0.1), progress=lambda done, total: seen.append((done, total)))
    assert seen == [(0, 4), (1, 4), (2, 4), (3, 4), (4, 4)]


def test_bootstrap_resamples_documents_whole() -> None:
    """Against a naive loop over the same draws."""
    rng = np.random.default_rng(3)
    sums = np.stack([rng.integers(5, 50, 20), rng.normal(3, 1, 20)], axis=1)
    bounds = metrics.bootstrap(sums, lambda totals: totals[:, 1:] / totals[:, :1], seed=9, resamples=500)
    assert bounds is not None
    draws = np.random.default_rng(9).integers(0, 20, (500, 20))
    figures = [sum(sums[d, 1] for d in draw) / sum(sums[d, 0] for d in draw) for draw in draws]
    tail = metrics._expanded_tail(20)
    np.testing.assert_allclose(bounds[0], np.quantile(figures, (tail, 1 - tail)))


def test_intervals_cover_the_truth_as_often_as_they_say() -> None:
    """Means of 10 skewed documents: plain percentiles cover about 88 % here."""
    rng = np.random.default_rng(0)
    trials, hits = 400, 0
    for seed in range(trials):
        values = rng.gamma(4.0, 0.25, (10, 1))  # of mean 1
        bounds = metrics.bootstrap(values, lambda totals: totals / 10, seed=seed, resamples=1000)
        assert bounds is not None
        hits += bounds[0, 0] <= 1 <= bounds[0, 1]
    assert 0.92 <= hits / trials <= 0.98


def test_quantile_interval_is_the_tabulated_one() -> None:
    """Ranks of the tables of distribution-free intervals: 6 and 15 of 20; none below 6 samples."""
    assert metrics.quantile_interval(np.arange(1.0, 21.0)[::-1], 0.5) == (6.0, 15.0)
    assert metrics.quantile_interval(np.arange(5.0), 0.5) is None
    assert metrics.quantile_interval(np.arange(6.0), 0.5) == (0.0, 5.0)
    assert metrics.quantile_interval(np.arange(71.0), 0.95) is None
    assert metrics.quantile_interval(np.arange(72.0), 0.95) is not None


@pytest.fixture(scope="module")
def baseline() -> Baseline:
    return Baseline(Checkpoint.open(SAMPLE), threads=1)


def test_baseline_says_what_it_is(baseline: Baseline) -> None:
    assert "fp32 arithmetic on the stored weights" in baseline.description
    assert baseline.load_seconds > 0


def test_baseline_generates_the_argmax_of_its_logits(baseline: Baseline) -> None:
    prompt = np.arange(40, 60)
    tokens = list(baseline.generate(prompt, 8))
    logits = baseline.logits(np.concatenate([prompt, tokens]))
    assert logits.shape == (28, 8192)
    assert logits.dtype == np.float32
    assert logits[19:27].argmax(-1).tolist() == tokens


def test_baseline_leaves_the_process_its_threads(baseline: Baseline) -> None:
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        baseline.logits(np.arange(4))
        next(baseline.generate(np.arange(4), 2))
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)


def test_baseline_refuses_missing_weights(tmp_path: Path) -> None:
    from safetensors.numpy import load_file, save_file

    for file in SAMPLE.iterdir():
        if file.suffix == ".json":
            (tmp_path / file.name).write_bytes(file.read_bytes())
    name = "model.layers.3.mlp.up_proj.weight"
    tensors = {key: value for key, value in load_file(SAMPLE / "model.safetensors").items() if key != name}
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(CheckpointError, match=name):
        Baseline(Checkpoint.open(tmp_path), threads=1)
