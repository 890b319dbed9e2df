"""Figures of orders: nDCG, recall, rank correlation, and which passages share a query's rare words."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Collection, Sequence

import numpy as np
from numpy.typing import NDArray

CUTOFF = 10  # of nDCG and recall, as MTEB's retrieval tasks have them (arXiv:2210.07316)
_K1, _B = 1.2, 0.75  # of BM25: Robertson and Zaragoza, The Probabilistic Relevance Framework, 2009
_TERM = re.compile(r"[^\W_]+")
Floats = NDArray[np.float64]


def order(scores: NDArray[np.floating]) -> list[int]:
    """Order numbers of passages by falling scores; of equal ones the first comes first."""
    found: list[int] = np.argsort(-scores, kind="stable").tolist()
    return found


def ndcg(ranked: Sequence[int], relevant: Collection[int], cutoff: int = CUTOFF) -> float:
    """Normalized discounted cumulative gain of an order with gains of 0 and 1 (Järvelin and Kekäläinen, 2002)."""
    gain = sum(1 / math.log2(place + 2) for place, number in enumerate(ranked[:cutoff]) if number in relevant)
    return gain / sum(1 / math.log2(place + 2) for place in range(min(cutoff, len(relevant))))


def recall(ranked: Sequence[int], relevant: Collection[int], cutoff: int = CUTOFF) -> float:
    """Share of what is relevant among the first `cutoff`."""
    return len({*ranked[:cutoff]} & {*relevant}) / len(relevant)


def kendall(left: NDArray[np.floating], right: NDArray[np.floating]) -> float:
    """Kendall's τ-b of two lists of scores (Kendall, 1945); 1 where all of both are equal."""
    rows, columns = np.triu_indices(len(left), 1)
    a, b = (np.sign(side[rows].astype(np.float64) - side[columns]) for side in (left, right))
    ties = math.sqrt(float((a != 0).sum()) * float((b != 0).sum()))
    return float((a * b).sum() / ties) if ties else float(not a.any() and not b.any())


def spearman(left: NDArray[np.floating], right: NDArray[np.floating]) -> float:
    """Spearman's ρ of two lists of scores: the correlation of their ranks; 1 where all of both are equal."""
    a, b = (_ranks(side) - (len(side) - 1) / 2 for side in (left, right))
    spreads = math.sqrt(float((a * a).sum()) * float((b * b).sum()))
    return float((a * b).sum() / spreads) if spreads else float(not a.any() and not b.any())


def _ranks(scores: NDArray[np.floating]) -> Floats:
    """Give ranks 0 … N-1, those of equal scores their mean."""
    _, places, counts = np.unique(scores, return_inverse=True, return_counts=True)
    ends = np.cumsum(counts)
    found: Floats = ((ends - counts + ends - 1) / 2)[places].astype(np.float64)
    return found


def candidates(
    queries: Sequence[str], passages: Sequence[str], relevant: Sequence[Collection[int]], count: int
) -> list[list[int]]:
    """Choose passages for a reranker to order: those that answer a query, and the best others by BM25; by number."""
    terms = [Counter(_terms(passage)) for passage in passages]
    lengths = np.array([sum(each.values()) for each in terms], np.float64)
    postings: dict[str, list[tuple[int, int]]] = {}
    for number, counts in enumerate(terms):
        for term, count_ in counts.items():
            postings.setdefault(term, []).append((number, count_))
    mean = max(1.0, float(lengths.mean()))
    found = []
    for query, answers in zip(queries, relevant, strict=True):
        scores = np.zeros(len(passages))
        for term in sorted({*_terms(query)} & postings.keys()):
            numbers, times = np.array(postings[term], np.int64).T
            rarity = math.log(1 + (len(passages) - len(numbers) + 0.5) / (len(numbers) + 0.5))
            scores[numbers] += rarity * times * (_K1 + 1) / (times + _K1 * (1 - _B + _B * lengths[numbers] / mean))
        others = [number for number in order(scores) if number not in answers]
        found.append(sorted([*answers, *others[: max(0, count - len(answers))]]))
    return found


def _terms(text: str) -> list[str]:
    return _TERM.findall(text.lower())
