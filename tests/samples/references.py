"""What operators of llmforge compute, token by token in numpy, as docs/dialect.md defines it.

That of `llmforge::Attention` is `llmforge.ir.dialect.attention`: the frontend holds code of models against it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from llmforge.ir import dialect

_Floats = NDArray[np.float32]
_Lengths = NDArray[np.int32]


def causal_conv(
    x: _Floats,
    weight: _Floats,
    past: _Floats,
    past_lengths: _Lengths,
    lengths: _Lengths,
    bias: _Floats | None = None,
    *,
    activation: str,
) -> tuple[_Floats, _Floats]:
    """Compute `llmforge::CausalConv` token by token.

    x [B, S, C], weight [C, 1, K], past [B, K-1, C], past_lengths and lengths int32 [B], bias [C] → y [B, S, C], of
    which rows beyond `lengths` are zeros here, and present [B, K-1, C].
    """
    y, present = np.zeros_like(x), past.copy()
    for b in range(len(x)):
        if past_lengths[b] == 0:
            present[b] = 0
        for s in range(lengths[b]):
            window = np.concatenate([present[b], x[b, s : s + 1]])  # [K, C]
            total = (window * weight[:, 0].T).sum(0) + (0 if bias is None else bias)
            y[b, s] = total / (1 + np.exp(-total)) if activation == "silu" else total
            present[b] = window[1:]
    return y, present


def linear_attention(
    q: _Floats,
    k: _Floats,
    v: _Floats,
    decay: _Floats,
    past: _Floats,
    past_lengths: _Lengths,
    lengths: _Lengths,
    beta: _Floats | None = None,
    *,
    num_heads: int,
    scale: float,
) -> tuple[_Floats, _Floats]:
    """Compute `llmforge::LinearAttention` token by token.

    q, k [B, S, num_heads·D], v [B, S, H·Dv], decay [B, S, H] or [B, S, H·D], past [B, H, D, Dv], past_lengths and
    lengths int32 [B], beta [B, S, H] of the delta rule → y [B, S, H·Dv], of which rows beyond `lengths` are zeros here,
    and present [B, H, D, Dv].
    """
    batch, heads, width, value_width = past.shape
    present = past.astype(np.float64)
    y = np.zeros(v.shape, np.float64)
    for b in range(batch):
        if past_lengths[b] == 0:
            present[b] = 0
        for s in range(lengths[b]):
            for h in range(heads):
                at = h // (heads // num_heads)
                query, key = (x[b, s, at * width : (at + 1) * width].astype(np.float64) for x in (q, k))
                columns = slice(h * value_width, (h + 1) * value_width)
                kept = np.exp(decay[b, s].reshape(heads, -1)[h])  # [1] or [D]
                state = present[b, h] * kept[:, None]
                value = v[b, s, columns]
                state += np.outer(key, value if beta is None else beta[b, s, h] * (value - key @ state))
                present[b, h] = state
                y[b, s, columns] = scale * (query @ state)
    return y.astype(np.float32), present.astype(np.float32)


def moe(
    x: NDArray[np.float32],
    expert_ids: NDArray[np.int64],
    expert_weights: NDArray[np.float32],
    up: NDArray[np.float32],
    down: NDArray[np.float32],
    up_bias: NDArray[np.float32] | None = None,
    down_bias: NDArray[np.float32] | None = None,
    *,
    activation: str,
    gated: int,
    interleaved: int,
    alpha: float,
    beta: float,
    limit: float,
) -> NDArray[np.float32]:
    """Compute `llmforge::MoE` token by token in fp64.

    x [..., H], expert_ids and expert_weights [..., top_k], up [E, H, 2·I] (I where not gated), down [E, I, H],
    up_bias [E, 2·I or I], down_bias [E, H] → y [..., H].
    """
    y = np.zeros(x.shape, np.float64)
    for token in np.ndindex(x.shape[:-1]):
        for expert, weight in zip(expert_ids[token], expert_weights[token], strict=True):
            h = x[token].astype(np.float64) @ up[expert]
            h = h if up_bias is None else h + up_bias[expert]
            if gated:
                gate, linear = (h[0::2], h[1::2]) if interleaved else np.split(h, 2)
                if limit:
                    gate, linear = np.minimum(gate, limit), np.clip(linear, -limit, limit)
                h = activate(gate, activation, alpha) * (linear + beta)
            else:
                h = activate(h, activation, alpha)
            out = h @ down[expert]
            y[token] += weight * (out if down_bias is None else out + down_bias[expert])
    return y.astype(np.float32)


def activate(x: NDArray[np.float64], activation: str, alpha: float) -> NDArray[np.float64]:
    """Apply an activation of `llmforge::MoE` to x [I]."""
    positive: NDArray[np.float64] = np.maximum(x, 0)
    cubic = math.sqrt(2 / math.pi) * (x + 0.044715 * x * x * x)  # ONNX Gelu-20's approximation
    known: Mapping[str, NDArray[np.float64]] = {
        "silu": x * (1 + np.tanh(alpha * x / 2)) / 2,  # x·sigmoid(alpha·x), without overflow
        "gelu": np.array([0.5 * v * (1 + math.erf(v / math.sqrt(2))) for v in x]),
        "gelu_tanh": 0.5 * x * (1 + np.tanh(cubic)),
        "relu": positive,
        "relu2": positive * positive,
    }
    return known[activation]


def latent_attention(
    q: NDArray[np.float32],
    latent: NDArray[np.float32],
    up: NDArray[np.float32],
    past: NDArray[np.float32],
    past_lengths: NDArray[np.int32],
    sinks: NDArray[np.float32] | None = None,
    *,
    form: dialect.AttentionForm,
) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """Compute `llmforge::LatentAttention` as docs/dialect.md defines it, with keys and values of every head made.

    In `form` there are as many KV heads as heads.

    q [B, S, num_heads·(N+R)], latent [B, S, L+R], up [num_heads·(N+Dv), L], past [B, 1, C, L+R], past_lengths int32
    [B], sinks [num_heads] → y [B, S, num_heads·Dv], present.
    """
    (batch, sequence, width), rank, num_heads = q.shape, up.shape[1], form.num_heads
    rotary = latent.shape[2] - rank
    plain = width // num_heads - rotary

    def by_head(latents: NDArray[np.float32]) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
        """[B, T, L+R] → keys [B, T, H, N+R] and values [B, T, H, Dv]."""
        made = (latents[..., :rank].astype(np.float64) @ up.T.astype(np.float64)).astype(np.float32)
        made = made.reshape(*latents.shape[:2], num_heads, -1)
        turned = np.broadcast_to(latents[:, :, None, rank:], (*made.shape[:3], rotary))
        return np.concatenate([made[..., :plain], turned], -1), made[..., plain:]

    (keys, values), (past_keys, past_values) = by_head(latent), by_head(past[:, 0])
    y, _, _ = dialect.attention(
        q,
        keys.reshape(batch, sequence, -1),
        values.reshape(batch, sequence, -1),
        past_keys.transpose(0, 2, 1, 3),
        past_values.transpose(0, 2, 1, 3),
        past_lengths,
        sinks,
        form=form,
    )
    present = past.copy()
    for b in range(batch):
        present[b, 0, past_lengths[b] : past_lengths[b] + sequence] = latent[b]
    return y, present
