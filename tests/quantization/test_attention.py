"""Causal attention by the compiled loops against torch's in fp64."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch

from llmforge.quantization.rounding import attention, products

pytestmark = pytest.mark.skipif(not attention.is_compiled(), reason="needs AVX-512")
# heads, KV heads, tokens, channels of queries and keys, of values
SHAPES = [(4, 2, 1, 16, 16), (4, 2, 7, 16, 16), (6, 2, 65, 96, 96), (3, 3, 130, 80, 48), (2, 1, 64, 5, 3)]
needs_bf16 = pytest.mark.skipif(not products.has_bf16(), reason="needs AVX512-BF16")
Arrays = tuple[np.ndarray, ...]


def drawn(shape: tuple[int, ...], seed: int = 0) -> tuple[Arrays, np.ndarray]:
    """Draw queries, keys and values, and a gradient of what they make."""
    heads, kv_heads, tokens, width, v_width = shape
    rng = np.random.default_rng(seed)

    def draw(count: int, channels: int) -> np.ndarray:  # as transformers hands it over: heads of a token side by side
        return rng.standard_normal((tokens, count, channels)).astype(np.float32).transpose(1, 0, 2)

    return (draw(heads, width), draw(kv_heads, width), draw(kv_heads, v_width)), draw(heads, v_width)


@pytest.mark.parametrize("shape", SHAPES)
def test_attention_and_its_gradients_are_those_of_torch(shape: tuple[int, ...]) -> None:
    (given, gradient), scale = drawn(shape), 0.7
    q, k, v = (torch.from_numpy(x).double()[None].requires_grad_() for x in given)
    wanted = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=True)
    wanted.backward(torch.from_numpy(gradient).double()[None])
    found = attention.attend(*given, scale)
    np.testing.assert_allclose(found.out, wanted.detach()[0], atol=1e-5)
    for own, of in zip(attention.attend_backwards(*given, found, scale, gradient), (q, k, v), strict=True):
        assert of.grad is not None
        np.testing.assert_allclose(own, of.grad[0], atol=5e-5)


def rounded(x: torch.Tensor) -> torch.Tensor:
    return x.float().bfloat16().double()


def of_rounded_factors(given: Arrays, scale: float, gradient: np.ndarray) -> list[torch.Tensor]:
    """Return what attention makes, and gradients in q, k and v, in fp64, of factors rounded to bf16."""
    (q, k, v), g = map(torch.from_numpy, given), torch.from_numpy(gradient)
    group, logs = len(q) // len(k), torch.from_numpy(given[0] * (np.float32(scale) * np.float32(1.44269504)))
    keys, values = (rounded(x).repeat_interleave(group, 0) for x in (k, v))
    scores = rounded(logs) @ keys.mT
    scores = scores.masked_fill(torch.ones(scores.shape[1:]).triu(1).bool(), -torch.inf)
    most = scores.amax(-1, keepdim=True)
    total = (scores - most).exp2().sum(-1, keepdim=True)
    out = rounded((scores - most).exp2()) @ values / total
    shares = (scores - most - total.log2()).exp2()
    of_scores = rounded((rounded(g) @ values.mT - (rounded(g) * out).sum(-1, keepdim=True)) * shares * scale)
    d_k, d_v = of_scores.mT @ rounded(q), rounded(shares).mT @ rounded(g)
    return [out, of_scores @ keys, *(x.unflatten(0, (-1, group)).sum(1) for x in (d_k, d_v))]


@needs_bf16
@pytest.mark.parametrize("shape", [*SHAPES, (3, 1, 193, 65, 7)])
def test_attention_in_bf16_rounds_factors_of_products_alone(shape: tuple[int, ...]) -> None:
    """Beyond last bits of sums, by which few factors are rounded another way than in fp64: less than 0.1 % here."""
    (given, gradient), scale = drawn(shape), 0.2
    found = attention.attend(*given, scale, bf16=True)
    made = [found.out, *attention.attend_backwards(*given, found, scale, gradient, bf16=True)]
    precise = attention.attend(*given, scale)
    wide = [precise.out, *attention.attend_backwards(*given, precise, scale, gradient)]
    for own, expected, other in zip(made, of_rounded_factors(given, scale, gradient), wide, strict=True):
        size = np.abs(other).max() + 1e-6
        np.testing.assert_allclose(own, expected, rtol=0, atol=2**-8 * size)
        off, lost = (np.linalg.norm(own - x) / size for x in (expected.numpy(), other))
        assert off <= 0.1 * lost or lost < 1e-6, (off, lost)


@needs_bf16
def test_attention_in_bf16_does_not_depend_on_other_threads() -> None:
    windows = [drawn((4, 2, tokens, 48, 80), tokens) for tokens in (70, 1, 129, 64, 33, 128)]

    def run(window: tuple[Arrays, np.ndarray]) -> Arrays:
        found = attention.attend(*window[0], 0.3, bf16=True)
        return *found, *attention.attend_backwards(*window[0], found, 0.3, window[1], bf16=True)

    expected = [run(window) for window in windows]
    with ThreadPoolExecutor(2) as threads:
        for one, other in zip(threads.map(run, windows * 4), expected * 4, strict=True):
            for a, b in zip(one, other, strict=True):
                np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("bf16", [False, pytest.param(True, marks=needs_bf16)])
def test_no_token_sees_a_later_one(bf16: bool) -> None:
    rng = np.random.default_rng(1)
    q, k, v = (rng.standard_normal((2, 151, 32)).astype(np.float32) for _ in range(3))
    before = attention.attend(q, k, v, 0.2, bf16=bf16).out
    k[:, 100:], v[:, 100:] = 50.0, -7.0
    after = attention.attend(q, k, v, 0.2, bf16=bf16).out
    np.testing.assert_array_equal(after[:, :100], before[:, :100])
    assert not np.array_equal(after[:, 100:], before[:, 100:])


@pytest.mark.parametrize("bf16", [False, pytest.param(True, marks=needs_bf16)])
def test_scores_far_apart_overflow_nowhere(bf16: bool) -> None:
    q = np.full((1, 3, 16), 100.0, np.float32)
    k = np.stack([np.full(16, x, np.float32) for x in (-100.0, 100.0, 0.0)])[None]
    v = np.stack([np.full(16, x, np.float32) for x in (1.0, 2.0, 3.0)])[None]
    found = attention.attend(q, k, v, 1.0, bf16=bf16)
    np.testing.assert_array_equal(found.out[0, :, 0], [1, 2, 2])
    assert np.isfinite(np.stack(attention.attend_backwards(q, k, v, found, 1.0, v, bf16=bf16))).all()
