"""Cutting documents into windows."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer

from llmforge.base.errors import DataError
from llmforge.checkpoint.documents import Document
from llmforge.checkpoint.text import TokenWindow, sample, spread, windows

from ..models.checkpoints import write_tokenizer


@pytest.fixture
def tokenizer(tmp_path: Path) -> Tokenizer:
    """One token a byte."""
    write_tokenizer(tmp_path)
    return Tokenizer.from_file(str(tmp_path / "tokenizer.json"))


def documents(*lengths: int) -> list[Document]:
    return [Document(f"d{i}", "x" * length, f"text:{i}") for i, length in enumerate(lengths)]


def test_every_token_stands_in_one_window_behind_bos(tokenizer: Tokenizer) -> None:
    cut = windows(tokenizer, documents(7, 0, 3, 4), length=4, bos=0)
    assert [(window.document, len(window.ids)) for window in cut] == [
        ("d0", 4), ("d0", 4), ("d0", 2), ("d2", 4), ("d3", 4), ("d3", 2),
    ]  # fmt: skip
    assert all(window.ids[0] == 0 and window.ids.dtype == np.int64 for window in cut)
    assert (np.concatenate([window.ids[1:] for window in cut]) == tokenizer.token_to_id("x")).all()


def test_without_bos_windows_are_all_text(tokenizer: Tokenizer) -> None:
    assert [len(window.ids) for window in windows(tokenizer, documents(7), length=4, bos=None)] == [4, 3]
    assert len(windows(tokenizer, documents(3), length=1, bos=None)) == 3
    with pytest.raises(ValueError, match="no text after BOS"):
        windows(tokenizer, documents(7), length=1, bos=0)


def test_text_that_looks_like_a_special_token_is_one(tokenizer: Tokenizer) -> None:
    [window] = windows(tokenizer, [Document("d", "<|im_end|>", "text:1")], length=8, bos=0)
    assert window.ids.tolist() == [0, 2]


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
