from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from llmforge.base.errors import CheckpointError, DataError, VerificationError
from llmforge.checkpoint import Checkpoint
from llmforge.checkpoint.text import TokenWindow
from llmforge.gates import decision
from llmforge.gates.decision import Verdict
from llmforge.measure import quality
from llmforge.measure.baseline import Baseline
from llmforge.measure.quality import QualityRun
from llmforge.metrics import quality_metrics
from llmforge.metrics.document_figures import spreads
from llmforge.metrics.intervals import SMALLEST_SAMPLE
from llmforge.metrics.quality import Quality
from llmforge.recipe import GateSpec

from ..models.logits import V, naive, random_logits

SAMPLE = Path(__file__).parents[1] / "data" / "docs-llama-7m"


def windows(documents: int = 12, seed: int = 0) -> list[TokenWindow]:
    """Two windows a document, of different lengths."""
    rng = np.random.default_rng(seed)
    return [
        TokenWindow(f"doc-{document}", rng.integers(0, V, rng.integers(5, 30)))
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
    quantiles = tuple(got.figures[name].value for name in ("kld_median", "kld_p90", "kld_p95", "kld_p99", "kld_p999"))
    assert quantiles == pytest.approx(tuple(np.quantile(kld, (0.5, 0.9, 0.95, 0.99, 0.999))), rel=1e-6)
    assert got.kld_max == pytest.approx(kld.max())
    assert got.top1_agreement.value == pytest.approx(same.mean())
    assert 0 < got.top1_agreement.value < 1
    assert got.delta_p_rms == pytest.approx(math.sqrt((delta**2).mean()))
    assert sum(got.kld_histogram) == got.tokens
    assert sum(document.tokens for document in got.per_document) == got.tokens
    first = naive(baseline(cut[0].ids)[:-1], artifact(cut[0].ids)[:-1], cut[0].ids[1:])[2].sum()
    second = naive(baseline(cut[1].ids)[:-1], artifact(cut[1].ids)[:-1], cut[1].ids[1:])[2].sum()
    assert got.per_document[0].kld == pytest.approx(first + second)


def test_intervals_hold_the_figure() -> None:
    got = quality.compare(windows(), model(0.0), model(0.3))
    for estimate in (got.perplexity_ratio, got.kld_mean, got.top1_agreement):
        assert estimate.low is not None
        assert estimate.high is not None
        assert estimate.low < estimate.value < estimate.high
        assert estimate.samples == 12


def test_few_documents_have_no_interval() -> None:
    got = quality.compare(windows(documents=SMALLEST_SAMPLE - 1), model(0.0), model(0.3))
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
    with pytest.raises(DataError, match="no tokens to predict"):
        quality.compare([TokenWindow("empty", np.array([0]))], model(0.0), model(0.0))


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


@pytest.fixture(scope="module")
def baseline() -> Baseline:
    return Baseline(Checkpoint.open(SAMPLE), threads=1)


def test_baseline_says_what_it_is(baseline: Baseline) -> None:
    assert "fp32 arithmetic on the stored weights" in baseline.description
    assert baseline.load_seconds > 0


def test_baseline_generates_the_argmax_of_its_logits(baseline: Baseline) -> None:
    prompt = np.arange(40, 60)
    tokens = [token for (token,) in baseline.generate(prompt[None], 8)]
    logits = baseline.logits(np.concatenate([prompt, tokens]))
    assert logits.shape == (28, 8192)
    assert logits.dtype == np.float32
    assert logits[19:27].argmax(-1).tolist() == tokens


def test_baseline_generates_for_several_prompts_what_it_generates_for_each(baseline: Baseline) -> None:
    prompts = np.random.default_rng(5).integers(3, 500, (3, 9))
    together = np.array(list(baseline.generate(prompts, 4)))
    alone = [[token for (token,) in baseline.generate(prompt[None], 4)] for prompt in prompts]
    assert together.T.tolist() == alone


def test_baseline_leaves_the_process_its_threads(baseline: Baseline) -> None:
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        baseline.logits(np.arange(4))
        next(baseline.generate(np.arange(4)[None], 2))
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


def chats(documents: int = 12) -> list[TokenWindow]:
    """One window a chat, whose last third was said."""
    cut = windows(documents, seed=1)[::2]
    return [
        TokenWindow(f"chat-{i}", each.ids, np.arange(len(each.ids)) >= 2 * len(each.ids) // 3)
        for i, each in enumerate(cut)
    ]


def test_answer_tokens_are_figured_apart() -> None:
    cut = [*windows(), *chats()]
    baseline, artifact = model(0.0), model(0.3)
    got = quality.compare(cut, baseline, artifact)
    whole = [naive(baseline(w.ids)[:-1], artifact(w.ids)[:-1], w.ids[1:]) for w in chats()]
    p_nll, q_nll, kld, same, _ = (
        np.concatenate([column[w.answers[1:]] for column, w in zip(parts, chats(), strict=True)])
        for parts in zip(*whole, strict=True)
    )
    assert got.documents == 24
    assert [sums.document for sums in got.per_chat] == [f"chat-{i}" for i in range(12)]
    assert sum(sums.tokens for sums in got.per_chat) == len(kld)
    assert got.answer_kld_mean.value == pytest.approx(kld.mean())
    assert got.answer_perplexity_ratio.value == pytest.approx(math.exp(q_nll.mean() - p_nll.mean()))
    assert got.answer_top1_agreement.value == pytest.approx(same.mean())
    assert got.answer_kld_mean.low < got.answer_kld_mean.value < got.answer_kld_mean.high
    assert got.answer_kld_mean.samples == 12
    again = Quality.model_validate_json(got.model_dump_json())
    assert again.per_chat == got.per_chat
    assert spreads(again, ["answer_kld_mean"])["answer_kld_mean"].value == got.answer_kld_mean.value


def test_without_chats_there_are_no_answers() -> None:
    got = quality.compare(windows(), model(0.0), model(0.3))
    assert not {"answer_kld_mean", "per_chat"} & got.model_dump().keys()
    assert quality_metrics.answers_apart(got) is None


def test_what_sets_chats_and_documents_apart_is_said() -> None:
    errors = {"chat": model(0.9), "doc": model(0.3)}
    names = {w.ids.tobytes(): w.document[:4].strip("-") for w in (*windows(), *chats())}
    worse = quality.compare([*windows(), *chats()], model(0.0), lambda ids: errors[names[ids.tobytes()]](ids))
    said = quality_metrics.answers_apart(worse)
    assert said is not None
    assert "as high on answers of chats (" in said
    assert quality_metrics.answers_apart(quality.compare(chats(), model(0.0), model(0.3))) is None, "nothing beside"
    alike = quality.compare([*windows(), *chats()], model(0.0), model(0.3))
    assert quality_metrics.answers_apart(alike) is None


ENDS = (3, V - 1)


def ending_documents() -> list[TokenWindow]:
    """Twelve texts of two windows, the second of which ends each, and twelve chats that end a turn and the text."""
    texts = [TokenWindow(w.document, w.ids, None, bool(i % 2)) for i, w in enumerate(windows())]
    ended = [
        TokenWindow(
            w.document, np.array([*w.ids[:-2], ENDS[i % 2], 5]), w.answers & (np.arange(len(w.ids)) < len(w.ids) - 1)
        )
        for i, w in enumerate(chats())
    ]
    return [*texts, *ended]


def test_the_shift_of_ends_equals_a_naive_loop() -> None:
    cut, baseline, artifact = ending_documents(), model(0.0), model(0.3)
    got = quality.compare(cut, baseline, artifact, QualityRun(ends=ENDS))
    at_ends, elsewhere = [], []
    for window in cut:
        p, q = (each(window.ids).astype(np.float64) for each in (baseline, artifact))
        log_p, log_q = (np.log(np.exp(x)[:, ENDS].sum(-1)) - np.log(np.exp(x).sum(-1)) for x in (p, q))
        shift = log_q - log_p
        for place, token in enumerate(window.ids[1:]):
            said = window.answers is None or window.answers[place + 1]
            at_ends += [shift[place]] if token in ENDS and said else []
            elsewhere += [0.0 if token in ENDS else shift[place]]
        at_ends += [shift[-1]] if window.is_end and window.ids[-1] not in ENDS else []
    assert got.eos_shift_at_ends.value == pytest.approx(np.mean(at_ends))
    assert got.eos_shift_elsewhere.value == pytest.approx(np.mean(elsewhere))
    assert got.eos_shift_at_ends.low < got.eos_shift_at_ends.value < got.eos_shift_at_ends.high
    assert len(got.per_ending) == got.eos_shift_at_ends.samples == len({w.document for w in cut})
    again = Quality.model_validate_json(got.model_dump_json())
    assert again.per_ending == got.per_ending


@pytest.mark.parametrize(("bias", "metric", "limit"), [
    (-15.0, "eos_shift_at_ends", {"min": -1.0}), (3.0, "eos_shift_elsewhere", {"max": 1.0})
])  # fmt: skip
def test_a_bias_on_the_end_fails_its_gate_alone(bias: float, metric: str, limit: dict[str, float]) -> None:
    def biased(ids: NDArray[np.int64]) -> NDArray[np.float32]:
        logits = model(0.01)(ids).copy()
        logits[:, ENDS] += np.float32(bias)
        return logits

    def verdict(artifact: object) -> Verdict:
        got = quality.compare(ending_documents(), model(0.0), artifact, QualityRun(ends=ENDS))
        figures = {name: got.figures[name] for name in ("eos_shift_at_ends", "eos_shift_elsewhere")}
        (result,) = decision.judge({metric: GateSpec(**limit)}, figures)
        return result.verdict

    assert verdict(biased) is Verdict.FAIL
    assert verdict(model(0.01)) is Verdict.PASS


def test_where_no_token_is_an_end_nothing_is_said_of_ends() -> None:
    got = quality.compare(ending_documents(), model(0.0), model(0.3))
    assert not {"eos_shift_at_ends", "eos_shift_elsewhere", "per_ending"} & got.model_dump().keys()
