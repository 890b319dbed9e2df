"""Causal models that score pairs by their yes and no, as Qwen3-Reranker does: beside transformers' logits by hand."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers
from transformers import AutoConfig, AutoModelForCausalLM

from llmforge import trace
from llmforge.base.errors import CheckpointError, UnsupportedError, UsageError
from llmforge.checkpoint import Checkpoint
from llmforge.checkpoint.encoding import QWEN3, RERANKERS
from llmforge.measure.encoder_baseline import CheckpointEncoder
from llmforge.serving.encoder_runner import EncoderRunner
from llmforge.verification import encoder_runs, probe
from llmforge.verification.trace_verifier import verify_trace

TEMPLATE = RERANKERS[QWEN3]
QUERY, TEXTS = "who makes the file", ["the file is made", "the lock is free", "yes or no the file lies in the cache"]


def tokenizer(words: str) -> Tokenizer:
    """Make a tokenizer of words, with Qwen's control tokens."""
    found = dict.fromkeys(f"{words} {TEMPLATE.pair(QUERY, ' '.join(TEXTS))}".replace("<", " <").split())
    splits = pre_tokenizers.Whitespace().pre_tokenize_str(" ".join(found))
    vocabulary = {word: at for at, word in enumerate(dict.fromkeys(["[UNK]", *(word for word, _ in splits)]))}
    made = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    made.add_tokens([AddedToken(word, special=True) for word in ("<|im_start|>", "<|im_end|>", "<think>", "</think>")])
    return made


def checkpoint(folder: Path, *, tied: bool, words: str = "yes no", **settings: Any) -> Path:
    """Write a random Qwen3 that predicts tokens."""
    torch.manual_seed(0)
    made = tokenizer(words)
    config = AutoConfig.for_model(  # type: ignore[no-untyped-call]
        "qwen3", vocab_size=made.get_vocab_size() + 3, hidden_size=32, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, head_dim=16, intermediate_size=48, max_position_embeddings=256, pad_token_id=0,
        bos_token_id=None, eos_token_id=None, tie_word_embeddings=tied,
    )  # fmt: skip
    model = AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    model.save_pretrained(folder)
    made.save(str(folder / "tokenizer.json"))
    written = json.loads((folder / "config.json").read_text()) | settings
    (folder / "config.json").write_text(json.dumps(written))
    return folder


def runner_of(opened: Checkpoint, most: int | None = None) -> EncoderRunner:
    """Trace a checkpoint, and run its graph as it is written."""
    graph = trace.trace(opened)
    verify_trace(opened, graph)
    assert opened.encoding is not None
    session = encoder_runs.open_graph(graph, opened.encoding, 1, probe.InitializerArrays())
    if most is not None:
        object.__setattr__(session.config, "max_tokens", most)
    return EncoderRunner(session, opened.tokenizer)


@torch.no_grad()
def by_hand(folder: Path, ids: list[int]) -> tuple[float, float]:
    """Return the probability of yes against no behind these tokens, as the model card computes it, and its logit."""
    words = Tokenizer.from_file(str(folder / "tokenizer.json"))
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    logits = model(torch.tensor([ids])).logits[0, -1].double()
    two = torch.stack([logits[words.token_to_id("no")], logits[words.token_to_id("yes")]])
    return float(two.softmax(0)[1]), float(two[1] - two[0])


@pytest.mark.thorough
@pytest.mark.parametrize("tied", [True, False])
def test_scores_are_those_of_yes_against_no(tmp_path: Path, tied: bool) -> None:
    folder = checkpoint(tmp_path, tied=tied)
    opened = Checkpoint.open(folder, reranker=QWEN3)
    runner = runner_of(opened)
    scores = runner.score(QUERY, TEXTS)

    words = Tokenizer.from_file(str(folder / "tokenizer.json"))
    parts = [[TEMPLATE.before.split("<Instruct>")[0]], [TEMPLATE.behind]]
    prefix, suffix = (words.encode(part, add_special_tokens=False).ids for [part] in parts)
    instruct = "<Instruct>: Given a web search query, retrieve relevant passages that answer the query"
    bodies = [words.encode(f"{instruct}\n<Query>: {QUERY}\n<Document>: {text}").ids for text in TEXTS]
    expected = [by_hand(folder, [*prefix, *body, *suffix]) for body in bodies]
    np.testing.assert_allclose(scores, [score for score, _ in expected], atol=2e-6)
    assert np.ptp(scores) > 0.01

    inputs = runner.pairs([(QUERY, text) for text in TEXTS])
    baseline = CheckpointEncoder(opened, runner.config, threads=1)
    logits = [[logit] for _, logit in expected]
    np.testing.assert_allclose(baseline.encode([each.ids for each in inputs]), logits, atol=1e-5)


@pytest.mark.thorough
def test_of_a_long_text_the_end_is_cut_and_the_prompt_stays(tmp_path: Path) -> None:
    opened = Checkpoint.open(checkpoint(tmp_path, tied=True), reranker=QWEN3)
    whole = runner_of(opened).pairs([(QUERY, TEXTS[2])])[0]
    runner = runner_of(opened, len(whole) - 3)
    words = opened.tokenizer
    with pytest.raises(UsageError, match="text 0 with its query has"):
        runner.pairs([(QUERY, TEXTS[2])])
    (cut,) = runner.pairs([(QUERY, TEXTS[2])], truncate=True)
    behind = words.encode(TEMPLATE.behind).ids
    assert cut.truncated
    assert len(cut) == runner.config.max_tokens
    assert list(cut.ids) == [*whole.ids[: -len(behind) - 3], *behind]
    (few,) = runner.pairs([(QUERY, TEXTS[2])], truncate=True, most_text_tokens=2)
    assert list(few.ids) == words.encode(TEMPLATE.pair(QUERY, "yes or")).ids
    assert few.truncated
    (fits,) = runner.pairs([(QUERY, TEXTS[0])], most_text_tokens=4)
    assert not fits.truncated
    with pytest.raises(UsageError, match="leaves none of"):
        runner.pairs([(f"{QUERY} file file file file file file", TEXTS[2])], truncate=True)


def test_a_folder_says_so_with_the_key_that_vllm_reads(tmp_path: Path) -> None:
    folder = checkpoint(tmp_path, tied=True)
    assert Checkpoint.open(folder).encoding is None
    named = checkpoint(tmp_path, tied=True, is_original_qwen3_reranker=True)
    opened = Checkpoint.open(named).encoding
    assert opened == Checkpoint.open(folder, reranker=QWEN3).encoding
    assert opened is not None
    assert opened.kind == "reranker"


def test_what_has_no_answers_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedError, match="BertModel; only a causal language model"):
        Checkpoint.open(checkpoint(tmp_path, tied=True, architectures=["BertModel"]), reranker=QWEN3)
    folder = checkpoint(tmp_path, tied=True)
    text = (folder / "tokenizer.json").read_text().replace('"yes"', '"yea"')
    (folder / "tokenizer.json").write_text(text)
    with pytest.raises(CheckpointError, match="no tokens 'yes' and 'no'"):
        Checkpoint.open(folder, reranker=QWEN3)
