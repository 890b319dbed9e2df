"""Cutting documents into windows."""

from __future__ import annotations

import numpy as np
import pytest

from llmforge.base.errors import DataError
from llmforge.checkpoint.text import TokenizedDocument, TokenWindow, sample, sample_tokens, shares, spread, windows


def tokenized(*lengths: int, prefix: int = 1) -> list[TokenizedDocument]:
    return [
        TokenizedDocument(f"d{i}", np.array([0] * prefix + [5] * length, np.int64), prefix)
        for i, length in enumerate(lengths)
    ]


def test_every_token_stands_in_one_window_behind_bos() -> None:
    cut = windows(tokenized(7, 0, 3, 4), length=4)
    assert [(window.document, len(window.ids)) for window in cut] == [
        ("d0", 4), ("d0", 4), ("d0", 2), ("d2", 4), ("d3", 4), ("d3", 2),
    ]  # fmt: skip
    assert all(window.ids[0] == 0 and window.ids.dtype == np.int64 for window in cut)
    assert (np.concatenate([window.ids[1:] for window in cut]) == 5).all()


def test_without_bos_windows_are_all_text() -> None:
    assert [len(window.ids) for window in windows(tokenized(7, prefix=0), length=4)] == [4, 3]
    assert len(windows(tokenized(3, prefix=0), length=1)) == 3
    with pytest.raises(ValueError, match="no text after BOS"):
        windows(tokenized(7), length=1)


def test_a_chat_that_is_too_long_is_cut_with_its_answers() -> None:
    mask = np.array([False, False, False, True, True])
    cut = windows([TokenizedDocument("c", np.arange(5), answers=mask)], length=4)
    assert [window.ids.tolist() for window in cut] == [[0, 1, 2, 3], [4]]
    assert [None if each.answers is None else each.answers.tolist() for each in cut] == [mask[:4].tolist(), [True]]


@pytest.mark.parametrize(
    ("asked", "there", "found"),
    [(90, [100, 100], [45, 45]), (90, [10, 100], [10, 80]), (90, [100, 10, 20], [60, 10, 20]), (90, [5, 6], [5, 6])],
)
def test_texts_share_evenly_what_they_have(asked: int, there: list[int], found: list[int]) -> None:
    assert shares(asked, there) == found


def test_chats_are_drawn_at_random_and_by_their_tokens() -> None:
    of = [TokenWindow(f"c{n}", np.zeros(20 + n, np.int64), np.ones(20 + n, bool)) for n in range(10)]
    drawn = [[window.document for window in sample_tokens(of, 60, seed)] for seed in range(6)]
    assert all(len(names) in (2, 3) for names in drawn)
    assert len({*map(tuple, drawn)}) > 3
    assert [len(each.ids) for each in sample_tokens(pool(), 20, 0)] == [9, 9], "texts: the longest, as many as are near"


def pool() -> list[TokenWindow]:
    return [TokenWindow(f"d{i}", np.zeros(length, np.int64)) for i, length in enumerate([5, 9, 9, 2, 9, 9])]


def test_samples_are_long_and_drawn_by_the_seed() -> None:
    drawn = [[window.document for window in sample(pool(), 3, seed)] for seed in range(8)]
    assert all(set(names) <= {"d1", "d2", "d4", "d5"} for names in drawn)
    assert len({tuple(names) for names in drawn}) > 4
    assert drawn[0] == [window.document for window in sample(pool(), 3, 0)]
    assert [len(window.ids) for window in sample(pool(), 6, 0)] == [9, 9, 9, 9, 5, 2]


def test_too_few_windows_are_refused() -> None:
    with pytest.raises(DataError, match="holds 6 windows, the recipe asks for 7 samples"):
        sample(pool(), 7, 0)


def test_tokens_are_spread_over_all_documents_before_any_gives_more() -> None:
    pool = [TokenWindow(name, np.zeros(length, np.int64)) for name, length in
            [("a", 4), ("a", 4), ("a", 2), ("b", 4), ("c", 4), ("c", 3)]]  # fmt: skip
    assert spread(pool, 1) == pool[:1]
    assert spread(pool, 12) == [pool[0], pool[3], pool[4]]
    assert spread(pool, 15) == [pool[0], pool[3], pool[4]]
    assert spread(pool, 16) == [pool[0], pool[1], pool[3], pool[4]]
    assert spread(pool, 99) == pool
