"""Tokens sampled from the head of each row, as a device gives it, are those of whole rows: same seed, same token."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from llmforge.ir.interface import HEAD, TopLogits, mass_blocks
from llmforge.runtime.sampling.sampler import TokenSampler, sample_top_logits
from llmforge.serving import Sampling

from ..native.heads_in_numpy import MARGIN

V = 1500
ROWS = 250  # of one call
SAMPLINGS = (
    Sampling(),
    Sampling(temperature=1.0),
    Sampling(temperature=0.7),
    Sampling(temperature=1e-30),
    Sampling(temperature=1e30),
    Sampling(temperature=1.0, top_p=0.95),
    Sampling(temperature=1.3, top_p=0.5),
    Sampling(temperature=0.4, top_p=1e-9),
    Sampling(temperature=1.0, top_k=1),
    Sampling(temperature=1.0, top_k=20, top_p=0.9, min_p=0.02),
    Sampling(temperature=2.0, top_k=HEAD),
    Sampling(temperature=2.0, top_k=HEAD + 1),
    Sampling(temperature=0.9, min_p=0.05),
    Sampling(temperature=5.0, min_p=1e-4, top_p=0.8),
)


def adversarial(random: np.random.Generator, rows: int, vocabulary: int) -> np.ndarray:
    """Rows of every kind that is hard to truncate, fp32 [rows, V]."""
    logits = random.standard_normal((rows, vocabulary)) * random.choice([0.1, 1, 3, 8, 40], (rows, 1))
    kind = random.integers(0, 9, rows)
    logits[kind == 0] = np.round(logits[kind == 0])  # ties at every border
    logits[kind == 1] = 2.5  # flat
    logits[kind == 2, : vocabulary - 7] = -np.inf  # few are left
    logits[kind == 3] *= 1e30  # huge values
    logits[kind == 4] = np.round(logits[kind == 4] / 3) * 3 + 1e4
    logits[kind == 5, ::3] = -np.inf
    ranks = np.log(np.arange(1, vocabulary + 1))  # text's: Zipf
    for row in np.flatnonzero(kind == 6):
        logits[row] = random.permutation(-random.uniform(0.9, 2.5) * ranks)
    logits[kind == 7] = -0.0
    logits[kind == 7, ::2] = 0.0
    with np.errstate(over="ignore"):
        rows32: np.ndarray = logits.astype(np.float32)
    return rows32


def heads_of(logits: np.ndarray, temperature: np.ndarray, random: np.random.Generator) -> TopLogits:
    """What a device may give: equals in any order, and sums rounded its own way."""
    shuffled = random.permutation(logits.shape[1])
    order = shuffled[np.argsort(-logits[:, shuffled], axis=1, kind="stable")[:, :HEAD]]
    best = logits.max(axis=1, keepdims=True)
    with np.errstate(over="ignore", invalid="ignore", under="ignore"):
        terms = np.exp((logits - best) * (np.float32(1) / temperature[:, None]))
    blocks, size = mass_blocks(logits.shape[1])
    terms[logits > np.sort(logits, axis=1)[:, -HEAD:][:, :1]] = 0
    terms = np.pad(terms, ((0, 0), (0, blocks * size - terms.shape[1]))).reshape(-1, blocks, size)
    with np.errstate(over="ignore", invalid="ignore", under="ignore"):
        masses = terms[:, :, random.permutation(size)].cumsum(axis=2, dtype=np.float32)[:, :, -1]
    return TopLogits(np.take_along_axis(logits, order, 1), order.astype(np.int32), masses, logits.shape[1])


class Fetched:
    """Rows of logits on a device: counts the blocks that are fetched."""

    def __init__(self, logits: np.ndarray) -> None:
        self.logits, self.blocks = logits, 0

    def __call__(self, rows: list[int], blocks: list[int]) -> np.ndarray:
        self.blocks += len(rows)
        count, size = mass_blocks(self.logits.shape[1])
        padded = np.pad(self.logits, ((0, 0), (0, count * size - self.logits.shape[1])), constant_values=-np.inf)
        return padded.reshape(-1, count, size)[rows, blocks]


def sampled(samplings: list[Sampling], logits: np.ndarray, random: np.random.Generator) -> tuple[int, int, int]:
    """Sample a token of each row in both ways, and hold them against each other; count rows, blocks, and whole rows."""
    starts = [[TokenSampler(sampling, (), ()) for sampling in samplings] for _ in range(2)]
    temperature = np.array([s.temperature or 1 for s in starts[0]], np.float32)
    heads, fetch, whole = heads_of(logits, temperature, random), Fetched(logits), 0
    for _ in range(2):  # the second token tells that as many random numbers were taken
        for i, (one, other, got) in enumerate(zip(*starts, sample_top_logits(starts[0], heads, fetch), strict=True)):
            whole += got is None
            assert (one.sample(logits[i], (heads, i)) if got is None else got) == other.sample(logits[i])
    return 2 * len(logits), fetch.blocks, whole


@pytest.mark.parametrize("vocabulary", [V, 1511, HEAD, 40])  # 1511 is a prime: its last block is short
def test_a_token_of_a_head_is_that_of_the_whole_row(vocabulary: int) -> None:
    random = np.random.default_rng(vocabulary)
    for batch in range(4):
        samplings = [dataclasses.replace(SAMPLINGS[i % len(SAMPLINGS)], seed=ROWS * batch + i) for i in range(ROWS)]
        _, blocks, whole = sampled(samplings, adversarial(random, ROWS, vocabulary), random)
        assert min(blocks, whole) > 0 and max(blocks, whole) < ROWS if vocabulary > HEAD else not blocks + whole


@pytest.mark.slow
def test_a_token_of_a_head_is_that_of_the_whole_row_in_100_000_draws() -> None:
    random, draws = np.random.default_rng(0), 0
    while draws < 100_000:
        samplings = [
            dataclasses.replace(SAMPLINGS[i % len(SAMPLINGS)], seed=int(random.integers(2**60))) for i in range(ROWS)
        ]
        draws += sampled(samplings, adversarial(random, ROWS, V), random)[0]


def test_a_sum_that_is_off_by_less_than_the_margin_changes_no_token() -> None:
    """And one that is off by far more does: the margin is what the tokens rest on."""
    random = np.random.default_rng(3)
    logits = (random.standard_normal((400, V)) * 2).astype(np.float32)
    samplings = [Sampling(temperature=1.0, top_p=0.3 if i % 2 else 1.0, seed=i) for i in range(400)]
    wanted = [TokenSampler(s, (), ()).sample(row) for s, row in zip(samplings, logits, strict=True)]
    exact = heads_of(logits, np.ones(400, np.float32), random)
    for off, agrees in ((0.9 * MARGIN, True), (-0.9 * MARGIN, True), (0.2, False)):
        heads = TopLogits(exact.logits, exact.ids, exact.masses * np.float32(1 + off), V)
        got = sample_top_logits([TokenSampler(s, (), ()) for s in samplings], heads, Fetched(logits))
        decided = [(one, other) for one, other in zip(got, wanted, strict=True) if one is not None]
        assert len(decided) > 150
        assert all(one == other for one, other in decided) is agrees


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_a_row_with_a_number_that_is_none_is_asked_for(bad: float) -> None:
    random = np.random.default_rng(4)
    logits = random.standard_normal((2, V)).astype(np.float32)
    logits[1, 700] = bad
    for sampling in (Sampling(), Sampling(temperature=1.0)):
        heads = heads_of(logits, np.ones(2, np.float32), random)
        samplers = [TokenSampler(sampling, (), ()) for _ in range(2)]
        assert sample_top_logits(samplers, heads, Fetched(logits))[1] is None


def test_what_changes_logits_asks_for_whole_rows() -> None:
    random = np.random.default_rng(5)
    logits = random.standard_normal((5, V)).astype(np.float32)
    samplings = [
        Sampling(),
        Sampling(repetition_penalty=1.2),
        Sampling(logit_bias=((3, 9.0),)),
        Sampling(min_tokens=2),
        Sampling(temperature=0.5, logprobs=2),
    ]
    heads = heads_of(logits, np.ones(5, np.float32), random)
    got = sample_top_logits([TokenSampler(s, (), ()) for s in samplings], heads, Fetched(logits))
    assert [each is None for each in got] == [False, True, True, True, True]
