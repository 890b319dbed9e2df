"""What a checkpoint itself answers: many prompts at a time as one alone, ended where the model ends, and kept."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from llmforge.base.progress import Silent
from llmforge.cache import Cache
from llmforge.checkpoint import Checkpoint, text
from llmforge.checkpoint.documents import Document, read_documents
from llmforge.compile import texts
from llmforge.compile.answered import answering
from llmforge.compile.reuse import Reuse
from llmforge.measure import chat_answers
from llmforge.measure.baseline import Baseline
from llmforge.recipes import TEXT

from ..models import smollm2
from ..models.checkpoints import write_checkpoint

PROMPTS = {f"p{n}": [3 + (7 * n + i) % 200 for i in range(2 + 3 * n)] for n in range(5)}


@pytest.fixture(scope="module")
def opened(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    folder = tmp_path_factory.mktemp("answers")
    write_checkpoint(folder)
    return Checkpoint.open(folder)


def naive(checkpoint: Checkpoint, ids: list[int], ends: set[int]) -> list[int]:
    """Read the whole text again for each token."""
    model, said = Baseline(checkpoint, threads=1), list[int]()
    while len(said) < chat_answers.MOST_TOKENS and not (said and said[-1] in ends):
        said.append(int(model.logits(np.array([*ids, *said]))[-1].argmax()))
    return said


def test_prompts_of_all_lengths_are_answered_as_one_alone(opened: Checkpoint) -> None:
    free = {name: naive(opened, ids, set()) for name, ids in PROMPTS.items()}
    assert len({*map(tuple, free.values())}) > 1
    found = chat_answers.answer(opened, PROMPTS, (), threads=1)
    assert found == free
    ends = {free["p1"][5], free["p3"][20]}
    ended = chat_answers.answer(opened, PROMPTS, ends, threads=1)
    assert ended == {name: naive(opened, ids, ends) for name, ids in PROMPTS.items()}
    assert ended["p1"][-1] in ends, "the token that ends an answer is a part of it"
    assert len(ended["p1"]) <= 6


def test_a_model_that_takes_no_padding_answers_one_by_one(opened: Checkpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    found = chat_answers.answer(opened, PROMPTS, (), threads=1)
    monkeypatch.setattr(Baseline, "_takes_padding", lambda self: False)
    assert chat_answers.answer(opened, PROMPTS, (), threads=1) == found


def test_answers_are_kept(opened: Checkpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    whole = chat_answers.answer

    def counted(*args: Any, **options: Any) -> Any:
        asked.append(len(args[1]))
        return whole(*args, **options)

    monkeypatch.setattr(chat_answers, "answer", counted)
    with Cache(tmp_path / "cache", 2**30) as cache:
        first, again = (answering(Reuse(cache))(opened, PROMPTS, Silent()) for _ in range(2))
        other = answering(Reuse(cache))(opened, {"p0": PROMPTS["p0"]}, Silent())
    assert first == again
    assert other == {"p0": first["p0"]}
    assert asked == [5, 1]


def test_a_large_model_is_not_asked(opened: Checkpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chat_answers, "MOST_BYTES", 1000)
    why = answering()(opened, PROMPTS, Silent())
    assert isinstance(why, str)
    assert "would take too long to answer" in why


@pytest.mark.slow
def test_a_real_model_answers_the_chats_that_ship() -> None:
    checkpoint = Checkpoint.open(smollm2.checkpoint())
    every = [each for role in ("calibration", "evaluation") for each in read_documents(TEXT / f"chat-{role}.jsonl")]
    asks = {"role": "user", "content": "What is the capital of France?"}
    capital = [Document("capital", asks["content"], "here", (asks,))]
    prompts = {each.id: each.ids.tolist() for each in text.ids_of([*every, *capital], texts.encoder_of(checkpoint))}
    said = chat_answers.answer(checkpoint, prompts, checkpoint.eos_token_ids, threads=2)
    answer = checkpoint.tokenizer.decode(said[capital[0].id], skip_special_tokens=False)
    assert answer == "The capital of France is Paris.<|im_end|>"
    ended = sum(ids[-1] in checkpoint.eos_token_ids for ids in said.values())
    assert ended > len(said) / 4
    assert all(0 < len(ids) <= chat_answers.MOST_TOKENS for ids in said.values())
