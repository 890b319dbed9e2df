"""Texts to embeddings and scores: prompts, lengths, batches and their order, dimensions."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmforge.base.errors import UsageError
from llmforge.base.pair_template import PairTemplate
from llmforge.serving.encoder_runner import EncoderRunner, batches, relevance

from ..fakes.fake_encoder import FakeEncoder, fake_embedder, fake_reranker, word_tokenizer

TEXTS = ["the file", "a model runs in the server and the cache", "token", "gate of the build", "the file lies"]


def session_of(runner: EncoderRunner) -> FakeEncoder:
    assert isinstance(runner.session, FakeEncoder)
    return runner.session


def test_texts_keep_their_order_whatever_their_length() -> None:
    runner = fake_embedder()
    together = runner.embed(TEXTS)
    assert together.shape == (5, 8)
    assert together.dtype == np.float32
    for text, row in zip(TEXTS, together, strict=True):
        np.testing.assert_array_equal(runner.embed([text])[0], row)
    lengths = session_of(runner).batches[0]
    assert lengths == sorted(lengths, reverse=True)
    assert runner.embed([]).shape == (0, 8)


@given(st.lists(st.integers(1, 600), max_size=60), st.integers(1, 4096))
def test_batches_hold_every_sequence_once_within_their_tokens(lengths: list[int], most: int) -> None:
    made = batches(lengths, most)
    assert sorted(index for batch in made for index in batch) == list(range(len(lengths)))
    for batch in made:
        assert len(batch) == 1 or len(batch) * max(lengths[index] for index in batch) <= most


def test_prompts_stand_before_texts() -> None:
    runner = fake_embedder()
    plain, asked = runner.embed(["file"]), runner.embed(["file"], "query")
    np.testing.assert_array_equal(asked, runner.embed(["query file"]))
    np.testing.assert_array_equal(runner.embed(["file"], "document"), plain)
    np.testing.assert_array_equal(fake_embedder(default_prompt="query").embed(["file"]), asked)
    with pytest.raises(UsageError, match="prompt_name 'passage': the model has no such prompt; it has query, document"):
        runner.embed(["file"], "passage")


def test_dimensions_are_cut_and_normalized_again() -> None:
    runner = fake_embedder()
    whole, cut = runner.embed(TEXTS), runner.embed(TEXTS, dimensions=3)
    np.testing.assert_allclose(cut, whole[:, :3] / np.linalg.norm(whole[:, :3], axis=1, keepdims=True), rtol=1e-6)
    plain = fake_embedder(normalize=False)
    np.testing.assert_array_equal(plain.embed(TEXTS, dimensions=3), plain.embed(TEXTS)[:, :3])
    for wrong in (0, 9):
        with pytest.raises(UsageError, match=f"dimensions {wrong}: expected 1 to 8"):
            runner.embed(TEXTS, dimensions=wrong)


def test_long_texts_are_refused_or_cut_before_their_last_special_token() -> None:
    runner = fake_embedder()
    with pytest.raises(UsageError, match="text 1 has 42 tokens; the model reads at most 16"):
        runner.embed(["file", "file " * 40])
    (cut,) = runner.texts(["file " * 40], truncate=True)
    assert cut.truncated
    assert cut.ids.tolist() == [2, *[word_tokenizer().token_to_id("file")] * 14, 3]
    (whole,) = runner.texts(["file " * 14], truncate=True)
    assert not whole.truncated
    np.testing.assert_array_equal(whole.ids, cut.ids)


def test_texts_that_no_tokens_could_hold_are_not_tokenized() -> None:
    runner = fake_embedder()
    with pytest.raises(UsageError, match=r"text 0 has 100,000 characters; the model reads 16 tokens"):
        runner.embed(["x" * 100_000])
    (cut,) = runner.texts(["x" * 100_000], truncate=True)
    assert cut.truncated


def test_a_query_stays_whole_where_texts_are_cut() -> None:
    runner = fake_reranker()
    query, text = "the model runs", "file " * 40
    with pytest.raises(UsageError, match="text 0 with its query has 46 tokens; the model reads at most 16"):
        runner.pairs([(query, text)])
    (pair,) = runner.pairs([(query, text)], truncate=True)
    (fits,) = runner.pairs([(query, "file " * 10)])
    assert len(pair) == 16
    assert pair.truncated
    assert not fits.truncated
    np.testing.assert_array_equal(pair.ids, fits.ids)
    np.testing.assert_array_equal(pair.token_types, [0] * 5 + [1] * 11)
    (short,) = runner.pairs([(query, text)], truncate=True, most_text_tokens=2)
    assert len(short) == 3 + 3 + 2
    with pytest.raises(UsageError, match="the query has 14 tokens, and leaves none of 16 for texts"):
        runner.pairs([("file " * 14, "file")], truncate=True)


def test_scores_are_relevances_of_each_pair() -> None:
    runner = fake_reranker()
    scores = runner.score("the file lies", ["token", "the file", "the file lies in the cache"])
    np.testing.assert_allclose(scores, 1 / (1 + np.exp([1.5, -0.5, -1.5])))
    assert np.all(np.diff(relevance(np.array([-1e4, -3, 0, 20, 30], np.float32))) > 0)


def test_each_kind_refuses_what_the_other_does() -> None:
    with pytest.raises(UsageError, match="the model embeds texts, and scores no pairs"):
        fake_embedder().score("file", ["file"])
    with pytest.raises(UsageError, match="the model scores pairs, and embeds no texts"):
        fake_reranker().embed(["file"])
    with pytest.raises(UsageError, match="the model gives 3 logits for a pair; scores need one"):
        fake_reranker(labels=3).score("file", ["file"])


def test_token_ids_are_taken_as_they_are() -> None:
    runner = fake_embedder()
    assert runner.tokens([2, 5, 3], "input 0").ids.tolist() == [2, 5, 3]
    for wrong in ([], [21], [-1]):
        with pytest.raises(UsageError, match="input 0: expected token ids below 21"):
            runner.tokens(wrong, "input 0")
    with pytest.raises(UsageError, match="input 0 has 17 tokens"):
        runner.tokens([5] * 17, "input 0")


def test_halves_of_characters_are_refused() -> None:
    with pytest.raises(UsageError, match="text 1: character 2 is an unpaired surrogate"):
        fake_embedder().embed(["a", "a \ud800"])


def test_pairs_are_written_as_a_template_says_and_texts_alone_are_cut() -> None:
    template = PairTemplate("the query is ", " and the passage is ", " in the file")
    runner = fake_reranker(template=template, max_tokens=13)
    words = runner.tokenizer

    def ids(text: str) -> list[int]:
        return list(words.encode(text, add_special_tokens=False).ids)

    (fits,) = runner.pairs([("gate", "server token")])
    written = "the query is gate and the passage is server token in the file"
    assert (list(fits.ids), fits.truncated) == (ids(written), False)
    assert not fits.token_types.any()
    with pytest.raises(UsageError, match="text 0 with its query has 15 tokens; the model reads at most 13"):
        runner.pairs([("gate", "server token of cache")])
    (cut,) = runner.pairs([("gate", "server token of cache")], truncate=True)
    assert (list(cut.ids), cut.truncated) == (list(fits.ids), True)
    (few,) = runner.pairs([("gate", "server token")], most_text_tokens=1)
    assert (list(few.ids), few.truncated) == (ids("the query is gate and the passage is server in the file"), True)
    with pytest.raises(UsageError, match="with the prompt of the model, 13 tokens, and leaves none of 13"):
        runner.pairs([("gate gate gate", "server")], truncate=True)
    (long,) = runner.pairs([("gate", "token " * 50_000)], truncate=True)
    assert (len(long), long.truncated) == (13, True)
