"""Retrieval: the corpus that ships, passages, orders and their figures, held against naive ones."""

from __future__ import annotations

import itertools
import math
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llmforge.base.errors import DataError
from llmforge.metrics import catalog
from llmforge.metrics.metric import Measured
from llmforge.metrics.retrieval import corpus as corpora
from llmforge.metrics.retrieval import passages, ranking, results
from llmforge.metrics.retrieval.corpus import RetrievalCorpus
from llmforge.metrics.retrieval.results import Side

SCORES = st.lists(st.tuples(st.integers(-3, 3), st.integers(-3, 3)), min_size=2, max_size=12)


@pytest.fixture(scope="module")
def shipped() -> RetrievalCorpus:
    return corpora.shipped()


# The corpus


def test_the_corpus_that_ships_is_always_the_same(shipped: RetrievalCorpus) -> None:
    assert (len(shipped.queries), len(shipped.passages)) == (300, 2996)
    assert shipped.digest == "426c580be5c4e41d3c019a1ce421d80778fdde2ff303a8897b4b5e95299c81c7"
    assert all(len(each) == 1 for each in shipped.relevant)
    assert len(set(shipped.queries)) == len(set(shipped.relevant)) == 300


def test_words_alone_find_most_answers_and_not_all(shipped: RetrievalCorpus) -> None:
    """BM25 puts the answer among ten for some of the queries: the others want more than equal words."""
    chosen = ranking.candidates(shipped.queries, shipped.passages, [()] * 300, 10)
    found = sum(bool(answers & {*some}) for answers, some in zip(shipped.relevant, chosen, strict=True))
    assert 200 < found < 280


def answers_of(corpus: RetrievalCorpus) -> dict[str, set[str]]:
    answers = [{corpus.passages[number] for number in each} for each in corpus.relevant]
    return dict(zip(corpus.queries, answers, strict=True))


def test_a_part_keeps_what_answers_its_queries(shipped: RetrievalCorpus) -> None:
    part = shipped.limited(30, 200)
    assert (len(part.queries), len(part.passages)) == (30, 200)
    whole = answers_of(shipped)
    assert all(whole[query] == answer for query, answer in answers_of(part).items())
    assert shipped.limited(None, None) == shipped
    assert len(shipped.limited(30, 5).passages) == 30  # what answers is never left out


@given(st.lists(st.text("ab .\n\t(XY1", max_size=900), max_size=3))
def test_passages_are_words_of_the_text_in_order(texts: list[str]) -> None:
    for text in texts:
        made = list(passages.passages(text))
        words, at = text.split(), 0
        for word in " ".join(made).split():
            while at < len(words) and not words[at].startswith(word) and word not in words[at]:
                at += 1
            assert at < len(words)
        assert all(len(each) <= 2 * passages.MOST for each in made)


def write(folder: Path, corpus: str, queries: str, qrels: str) -> Path:
    (folder / "qrels").mkdir()
    (folder / "corpus.jsonl").write_text(corpus)
    (folder / "queries.jsonl").write_text(queries)
    (folder / "qrels/test.tsv").write_text(qrels)
    return folder


CORPUS = '{"_id": "a", "title": "Files", "text": "lie"}\n{"_id": "b", "text": "run"}\n'
QUERIES = '{"_id": "1", "text": "where"}\n{"_id": "2", "text": "who"}\n'
QRELS = "query-id\tcorpus-id\tscore\n1\tb\t2\n1\ta\t0\n"


def test_folders_of_beir_are_read(tmp_path: Path) -> None:
    found = corpora.read_folder(write(tmp_path, CORPUS, QUERIES, QRELS))
    assert found == RetrievalCorpus(("where",), ("Files lie", "run"), (frozenset({1}),))


@pytest.mark.parametrize(
    ("corpus", "queries", "qrels", "said"),
    [
        ("{", QUERIES, QRELS, r"corpus.jsonl, line 1: not JSON"),
        ('{"_id": "a"}', QUERIES, QRELS, "corpus.jsonl, line 1: text: expected a string"),
        (CORPUS, "[]", QRELS, "queries.jsonl, line 1: expected an object"),
        (CORPUS, QUERIES, QRELS + "2\tb\n", "test.tsv, line 4: expected query-id, corpus-id, score, by tabs"),
        (CORPUS, QUERIES, QRELS + "2\tc\t1\n", "no passage 'c', which answers a query"),
        (CORPUS, QUERIES, "\n1\ta\t0\n", "no queries with passages that answer them"),
    ],
)
def test_other_folders_are_refused(tmp_path: Path, corpus: str, queries: str, qrels: str, said: str) -> None:
    with pytest.raises(DataError, match=said):
        corpora.read_folder(write(tmp_path, corpus, queries, qrels))


# Orders


def test_ndcg_and_recall_of_known_orders() -> None:
    assert ranking.ndcg([3, 1, 2], {3}) == 1
    assert ranking.ndcg([1, 3, 2], {3}) == pytest.approx(1 / math.log2(3))
    assert ranking.ndcg([1, 2, 3], {3}, cutoff=2) == 0
    assert ranking.ndcg([1, 2, 3], {1, 3}) == pytest.approx((1 + 1 / 2) / (1 + 1 / math.log2(3)))
    assert ranking.recall([1, 2, 3], {1, 3}, cutoff=2) == 0.5
    assert ranking.order(np.array([1.0, 3.0, 1.0, 2.0])) == [1, 3, 0, 2]


@given(SCORES)
def test_kendall_is_that_of_the_pairs(pairs: list[tuple[int, int]]) -> None:
    left, right = (np.array(side, np.float32) for side in zip(*pairs, strict=True))
    concordant = ties_left = ties_right = 0
    for i, j in itertools.combinations(range(len(pairs)), 2):
        a, b = np.sign(left[i] - left[j]), np.sign(right[i] - right[j])
        concordant, ties_left, ties_right = concordant + a * b, ties_left + (a != 0), ties_right + (b != 0)
    if ties_left and ties_right:
        assert ranking.kendall(left, right) == pytest.approx(concordant / math.sqrt(ties_left * ties_right))
    else:
        assert ranking.kendall(left, right) == float(not ties_left and not ties_right)


@settings(deadline=None)  # scipy is imported by the first
@given(SCORES)
def test_rank_correlations_are_scipys(pairs: list[tuple[int, int]]) -> None:
    stats = pytest.importorskip("scipy.stats", reason="the extra dev")
    left, right = (np.array(side, np.float32) for side in zip(*pairs, strict=True))
    if len({*left}) > 1 and len({*right}) > 1:
        assert ranking.spearman(left, right) == pytest.approx(stats.spearmanr(left, right).statistic)
        assert ranking.kendall(left, right) == pytest.approx(stats.kendalltau(left, right).statistic)


def test_candidates_hold_the_answers_and_what_shares_rare_words() -> None:
    texts = ["the cache is full", "the file is lost", "a lock file", "the the the", "nothing"]
    assert ranking.candidates(["the lock file"], texts, [{4}], 3) == [[1, 2, 4]]
    assert ranking.candidates(["the lock file"], texts, [{0, 1, 4}], 2) == [[0, 1, 4]]


# Figures


def small_corpus(count: int = 40) -> RetrievalCorpus:
    passages_ = tuple(f"passage {at}" for at in range(count))
    return RetrievalCorpus(passages_, passages_, tuple(frozenset({at}) for at in range(count)))


def embeddings(noise: float, count: int = 40) -> np.ndarray:
    rng = np.random.default_rng(0)
    base = rng.standard_normal((count, 16)).astype(np.float32)
    made = np.concatenate([base + 1.5 * rng.standard_normal(base.shape), base]).astype(np.float32)
    return made + noise * np.random.default_rng(1).standard_normal(made.shape).astype(np.float32)


def side(made: np.ndarray) -> Side:
    queries, texts = made[:40], made[40:]
    return Side(list(queries @ texts.T), made)


def embedder(noise: float) -> results.RetrievalResult:
    return results.measured(
        small_corpus(), None, side(embeddings(noise)), side(embeddings(0)), engine="e", baseline="b"
    )


def test_an_equal_embedder_loses_nothing() -> None:
    found = embedder(0)
    assert found.kind == "embedder"
    assert found.metrics["retrieval.cosine_mean"].artifact.value == 1
    assert found.metrics["retrieval.cosine_p01"].artifact.value == 1
    moved = found.metrics["retrieval.ndcg_10"].difference
    assert moved is not None
    assert (moved.value, moved.low, moved.high) == (0, 0, 0)
    assert 0 < found.metrics["retrieval.ndcg_10"].artifact.value < 1
    assert found.metrics["retrieval.recall_10"].artifact.samples == 40


def test_a_noisy_embedder_is_seen_and_its_figures_are_made_again() -> None:
    found = embedder(1.0)
    mean, tail = (found.metrics[f"retrieval.cosine_{name}"].artifact for name in ("mean", "p01"))
    assert tail.value < mean.value < 0.95
    assert mean.low is not None
    assert mean.low < mean.value
    moved = found.metrics["retrieval.ndcg_10"].difference
    assert moved is not None
    assert moved.high is not None
    assert moved.value < 0
    assert found.again() == found.metrics
    again = results.RetrievalResult.model_validate_json(found.model_dump_json())
    assert again == found
    with pytest.raises(ValueError, match="cosine has another number of values than 80"):
        results.RetrievalResult.model_validate({**found.model_dump(), "columns": {"cosine": {"artifact": [1.0]}}})


def test_rerankers_are_held_to_the_order_of_their_checkpoint() -> None:
    corpus = small_corpus()
    chosen = [[at, *((at + step) % 40 for step in (1, 2, 3))] for at in range(40)]
    rng = np.random.default_rng(0)
    theirs = [rng.standard_normal(4).astype(np.float32) for _ in chosen]
    same = results.measured(corpus, chosen, Side(theirs), Side(theirs), engine="e", baseline="b")
    assert same.kind == "reranker"
    assert same.metrics["retrieval.spearman"].artifact.value == pytest.approx(1)
    turned = results.measured(corpus, chosen, Side([-each for each in theirs]), Side(theirs), engine="e", baseline="b")
    assert turned.metrics["retrieval.kendall"].artifact.value == pytest.approx(-1)
    assert same.digest.endswith("/4")


def test_two_artifacts_are_compared_query_by_query() -> None:
    left, right = embedder(1.0), embedder(0.1)
    for name in left.metrics:
        moved = results.between(left, right, name)
        assert not isinstance(moved, str)
        assert moved.value < 0
    assert results.between(left, None, "retrieval.ndcg_10") == "retrieval.ndcg_10 was not measured of both"
    other = right.model_copy(update={"digest": "x"})
    assert results.between(left, other, "retrieval.ndcg_10") == "its queries or passages are others"


def test_the_catalog_knows_every_figure() -> None:
    measured = Measured(retrieval=embedder(0.5))
    found = catalog.estimates(measured)
    assert set(measured.retrieval.metrics if measured.retrieval else ()) <= found.keys()
    assert catalog.checkpoint_differences(measured).keys() == {"retrieval.ndcg_10", "retrieval.recall_10"}
    assert {"retrieval.ndcg_10", "retrieval.cosine_p01", "retrieval.spearman"} <= catalog.limitable().keys()
