"""Causal attention by the compiled loops against torch's in fp64."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from llmforge.quantization.rounding import attention

pytestmark = pytest.mark.skipif(not attention.is_compiled(), reason="needs AVX-512")
# heads, KV heads, tokens, channels of queries and keys, of values
SHAPES = [(4, 2, 1, 16, 16), (4, 2, 7, 16, 16), (6, 2, 65, 96, 96), (3, 3, 130, 80, 48), (2, 1, 64, 5, 3)]


@pytest.mark.parametrize("shape", SHAPES)
def test_attention_and_its_gradients_are_those_of_torch(shape: tuple[int, ...]) -> None:
    heads, kv_heads, tokens, width, v_width = shape
    rng = np.random.default_rng(0)

    def drawn(count: int, channels: int) -> np.ndarray:  # as transformers hands it over: heads of a token side by side
        return rng.standard_normal((tokens, count, channels)).astype(np.float32).transpose(1, 0, 2)

    given = drawn(heads, width), drawn(kv_heads, width), drawn(kv_heads, v_width)
    gradient, scale = drawn(heads, v_width), 0.7
    q, k, v = (torch.from_numpy(x).double()[None].requires_grad_() for x in given)
    wanted = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=True)
    wanted.backward(torch.from_numpy(gradient).double()[None])
    found = attention.attend(*given, scale)
    np.testing.assert_allclose(found.out, wanted.detach()[0], atol=1e-5)
    for own, of in zip(attention.attend_backwards(*given, found, scale, gradient), (q, k, v), strict=True):
        assert of.grad is not None
        np.testing.assert_allclose(own, of.grad[0], atol=5e-5)


def test_no_token_sees_a_later_one() -> None:
    rng = np.random.default_rng(1)
    q, k, v = (rng.standard_normal((2, 150, 32)).astype(np.float32) for _ in range(3))
    before = attention.attend(q, k, v, 0.2).out
    k[:, 100:], v[:, 100:] = 50.0, -7.0
    after = attention.attend(q, k, v, 0.2).out
    np.testing.assert_array_equal(after[:, :100], before[:, :100])
    assert not np.array_equal(after[:, 100:], before[:, 100:])


def test_scores_far_apart_overflow_nowhere() -> None:
    q = np.full((1, 3, 16), 100.0, np.float32)
    k = np.stack([np.full(16, x, np.float32) for x in (-100.0, 100.0, 0.0)])[None]
    v = np.stack([np.full(16, x, np.float32) for x in (1.0, 2.0, 3.0)])[None]
    found = attention.attend(q, k, v, 1.0)
    np.testing.assert_array_equal(found.out[0, :, 0], [1, 2, 2])
    assert np.isfinite(np.stack(attention.attend_backwards(q, k, v, found, 1.0, v))).all()
