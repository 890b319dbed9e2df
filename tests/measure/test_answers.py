from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
from numpy.typing import NDArray

from llmforge.base.errors import DataError
from llmforge.checkpoint.text import TokenWindow
from llmforge.measure import answers
from llmforge.metrics.quality import (
    ANSWER_TOKENS,
    PROMPT_TOKENS,
    GreedyAnswer,
    ends_added,
    length_ratio,
    median_difference,
    share_same,
)

from ..models.logits import V, random_logits

END = 3


def model(noise: float):
    """Logits that depend on the last two tokens, so that greedy text does not run in a circle at once."""
    table, other, error = random_logits(7, V), random_logits(6, V), random_logits(8, V, noise)

    def logits(ids: NDArray[np.int64]) -> NDArray[np.float32]:
        before = np.concatenate([[0], ids[:-1]])
        turns = np.arange(len(ids))[:, None] % 7
        return table[ids] + other[before] * (1 + turns) / 4 + error[ids]

    return logits


def generator(logits):
    def generate(ids: NDArray[np.int64], tokens: int) -> Iterator[int]:
        said = list(ids)
        for _ in range(tokens):
            said.append(int(logits(np.array(said))[-1].argmax()))
            yield said[-1]

    return generate


def windows(documents: int = 20) -> list[TokenWindow]:
    rng = np.random.default_rng(1)
    return [
        TokenWindow(f"doc-{i}", rng.integers(4, V, rng.integers(10, 60))) for i in range(documents) for _ in range(2)
    ]


def compare(cut: list[TokenWindow], count: int, noise: float, ends: tuple[int, ...] = ()):
    baseline, artifact = model(0.0), model(noise)
    return answers.compare(
        cut,
        count,
        artifact=generator(artifact),
        baseline=lambda texts: baseline,
        continued=lambda texts, counts: [
            list(generator(baseline)(ids, count)) for ids, count in zip(texts, counts, strict=True)
        ],
        ends=ends,
        decode=lambda ids: " ".join(map(str, ids)),
    )


@pytest.mark.parametrize("ends", [(), (END,)])
def test_answers_equal_two_greedy_runs_side_by_side(ends: tuple[int, ...]) -> None:
    cut = windows()
    found, samples = compare(cut, 20, 0.05, ends)
    first = {window.document: window for window in reversed(cut)}
    same, lengths = [], []
    for answer in found:
        prompt = first[answer.document].ids[:PROMPT_TOKENS]
        assert answer.prompt_tokens == len(prompt)
        both = []
        for logits in (model(0.0), model(0.05)):
            said = list(generator(logits)(prompt, ANSWER_TOKENS))
            both.append(said[: said.index(ends[0]) + 1] if ends and ends[0] in said else said)
        differs = [i for i, (a, b) in enumerate(zip(*both, strict=False)) if a != b]
        assert answer.first_difference == (differs[0] if differs else None)
        assert (answer.baseline_tokens, answer.tokens) == tuple(map(len, both))
        assert (answer.baseline_ended, answer.ended) == tuple(said[-1] in ends for said in both)
        lengths.append((*map(len, both), *(said[-1] in ends for said in both)))
        same.append(differs[0] if differs else ANSWER_TOKENS)
        for sample in samples:
            if sample.document == answer.document:
                texts = [" ".join(map(str, said)) for said in both]
                assert [sample.shared + rest for rest in (sample.baseline, sample.artifact)] == texts
                assert sample.prompt == " ".join(map(str, prompt))
                assert bool(sample.baseline or sample.artifact) == (answer.first_difference is not None)
    assert len(samples) == 5
    assert len(set(same)) > 1  # some differ, and at different places
    assert share_same(found, 32).value == np.mean([each >= 32 for each in same])
    assert share_same(found, 128).value == np.mean([each >= 128 for each in same])
    assert median_difference(found).value == np.median(same)
    theirs, ours, they_end, we_end = np.array(lengths, np.float64).mean(0)
    ratio, added = length_ratio(found), ends_added(found)
    assert ratio is not None
    assert added is not None
    assert ratio.value == pytest.approx(ours / theirs)
    assert added.value == pytest.approx(we_end - they_end)
    assert ratio.low <= ratio.value <= ratio.high
    assert -1 <= added.low <= added.value <= added.high <= 1
    assert bool(ends) == (they_end > 0)


def answer(ended: bool, tokens: int, baseline_ended: bool | None, baseline_tokens: int | None) -> GreedyAnswer:
    return GreedyAnswer(
        document="a", prompt_tokens=4, tokens=tokens, first_difference=1,
        ended=ended, baseline_tokens=baseline_tokens, baseline_ended=baseline_ended,
    )  # fmt: skip


def test_a_model_that_never_stops_says_too_much() -> None:
    found = [answer(False, 128, True, tokens) for tokens in range(20, 40)]
    ratio, added = length_ratio(found), ends_added(found)
    assert ratio.low > 3
    assert added.value == -1
    assert added.high < -0.6
    quick = [answer(True, 8, False, 128) for _ in range(20)]
    assert length_ratio(quick).high < 0.1
    assert ends_added(quick).low > 0.6


def test_of_a_baseline_that_broke_off_lengths_are_not_known() -> None:
    found = [answer(True, 8, True, 8)] * 9 + [answer(True, 8, None, None)]
    assert length_ratio(found) is None
    assert ends_added(found) is None
    cut = answers.compare(
        windows(), 20,
        artifact=generator(model(0.05)), baseline=lambda texts: model(0.0),
        continued=lambda texts, counts: [[] for _ in texts],
        ends=(), decode=str,
    )[0]  # fmt: skip
    assert {each.baseline_tokens for each in cut if each.first_difference is not None} == {None}
    before = GreedyAnswer(document="a", prompt_tokens=4, tokens=8, first_difference=None)  # of an older record
    assert before.model_dump() == {"document": "a", "prompt_tokens": 4, "tokens": 8, "first_difference": None}


def test_the_same_model_says_the_same() -> None:
    found, samples = compare(windows(), 20, 0.0)
    assert [answer.first_difference for answer in found] == [None] * 20
    estimate = share_same(found, 128)
    assert (estimate.value, estimate.high) == (1, 1)
    assert estimate.low == pytest.approx(0.025 ** (1 / 20))  # 20 of 20 do not show that all are
    assert not any(sample.baseline or sample.artifact for sample in samples)


def test_documents_are_spread() -> None:
    found, _ = compare(windows(21), 3, 0.0)
    assert [answer.document for answer in found] == ["doc-0", "doc-10", "doc-20"]
    assert len(compare(windows(4), 100, 0.0)[0]) == 4


def test_no_text() -> None:
    with pytest.raises(DataError, match="no document to continue"):
        compare([], 3, 0.0)


def test_few_answers_have_no_median_interval() -> None:
    few = [GreedyAnswer(document="a", prompt_tokens=4, tokens=128, first_difference=i) for i in range(5)]
    assert median_difference(few).low is None
    assert median_difference([*few, few[0]]).low == 0
