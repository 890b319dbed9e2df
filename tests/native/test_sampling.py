"""Compiled sampling draws the tokens that numpy does, but for the last bit of e^x: every instruction set."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import numpy as np
import pytest

from llmforge import native
from llmforge.base.errors import UsageError
from llmforge.ir.interface import mass_blocks
from llmforge.native import sampling as kernels
from llmforge.runtime.sampling import distribution_numpy
from llmforge.runtime.sampling.distribution import record

from ..runtime.test_heads import SAMPLINGS, V, adversarial, heads_of, sampled
from . import heads_in_numpy

pytestmark = pytest.mark.skipif(native.library() is None, reason="the CPU kernels are not compiled here")
DRAWN = [sampling for sampling in SAMPLINGS if sampling.temperature]


@pytest.fixture(params=native.INSTRUCTION_SETS)
def instructions(request: pytest.FixtureRequest) -> Iterator[str]:
    """Draw with the kernels of one instruction set."""
    try:
        yield native.instruction_set(request.param)
    except UsageError:
        pytest.skip("this processor cannot run them")
    finally:
        native.instruction_set()


def rows(count: int, vocabulary: int = V) -> np.ndarray:
    return adversarial(np.random.default_rng(7), count, vocabulary)


def test_whole_rows_give_the_tokens_of_numpy(instructions):
    uniforms = np.random.default_rng(8).random(780)
    differing = 0
    for i, (logits, uniform) in enumerate(zip(rows(780), uniforms.tolist(), strict=True)):
        how = record(DRAWN[i % len(DRAWN)], uniform)
        block = mass_blocks(V)[1]
        differing += kernels.draw_row(logits, block, how) != distribution_numpy.draw_row(logits, block, how)
    assert differing <= 2  # whose random number points at a border


def test_heads_give_the_tokens_and_blocks_of_numpy(instructions):
    logits, random = rows(780), np.random.default_rng(9)
    samplings = [DRAWN[i % len(DRAWN)] for i in range(len(logits))]
    draws = np.array([record(each, random.random()) for each in samplings], kernels.DRAW)
    heads = heads_of(logits, draws["temperature"], random)
    given = heads.logits, heads.ids, heads.masses, V, draws
    (tokens, blocks), wanted = kernels.draw_heads(*given), heads_in_numpy.draw_heads(*given)
    assert np.count_nonzero((tokens != wanted[0]) | (blocks != wanted[1])) <= 2
    assert min(np.count_nonzero(tokens >= 0), np.count_nonzero(blocks >= 0)) > 50


@pytest.mark.parametrize("top_p", [0.5, 0.9, 0.999])
def test_masses_of_a_device_save_sums_and_change_no_token_behind_a_head(instructions, top_p):
    random = np.random.default_rng(11)
    ranks = np.log(np.arange(1, V + 1))
    flat = [random.permutation(-random.uniform(0.2, 0.9) * ranks) for _ in range(300)]  # most stands behind the head
    logits = np.concatenate([np.stack(flat).astype(np.float32), rows(300)])
    heads, behind = heads_of(logits, np.ones(len(logits), np.float32), random), 0
    for row, each in enumerate(logits):
        how, head = record(dataclasses.replace(DRAWN[0], top_p=top_p), random.random()), heads.ids[row]
        token = kernels.draw_row(each, mass_blocks(V)[1], how)
        of_head = heads.logits[row], head, heads.masses[row]
        assert kernels.draw_row(each, mass_blocks(V)[1], how, of_head) == token
        behind += token not in head
    assert behind > 40


def test_a_head_gives_the_token_of_its_row(instructions):
    random = np.random.default_rng(10)
    samplings = [dataclasses.replace(SAMPLINGS[i % len(SAMPLINGS)], seed=i) for i in range(140)]
    _, blocks, whole = sampled(samplings, adversarial(random, 140, V), random)
    assert min(blocks, whole) > 0


@pytest.mark.parametrize("count", [1, 3, 50, 256, 300, 5000])
def test_the_largest_are_those_of_a_sort(instructions, count):
    for logits in rows(20, 5000):
        kept = np.flatnonzero(logits > -np.inf)
        wanted = kept[np.argsort(-logits[kept], kind="stable")][:count]
        assert kernels.largest(logits, count).tolist() == wanted.tolist()


def test_exponentials_are_summed(instructions):
    for logits in rows(30, 1511):
        best = logits.max()
        wanted = np.exp(np.subtract(logits, best, dtype=np.float64)).sum()
        assert kernels.sum_exponentials(logits, float(best)) == pytest.approx(wanted, rel=1e-6)


def test_a_block_with_a_number_that_is_none_gives_nothing(instructions):
    draw = np.array([record(DRAWN[0], 0.5)], kernels.DRAW)
    logits = np.zeros(70, np.float32)
    assert kernels.draw_block(logits, 1.0, 0.5, draw) >= 0
    for bad in (np.nan, np.inf):
        logits[69] = bad
        assert (kernels.draw_block(logits, 1.0, 0.5, draw) < 0) is bool(np.isnan(bad))  # above the least: not looked at
    assert kernels.draw_block(np.full(70, -np.inf, np.float32), 1.0, 0.5, draw) == -1
