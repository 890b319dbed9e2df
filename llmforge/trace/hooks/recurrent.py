"""Layers with a recurrent state: causal convolutions and delta rules, recognized by computing.

transformers writes both as functions of a model's source file, with a fallback in plain torch; a trace of that
fallback would hold its chunks. They are called with what a layer's cache handed out, which tells whose state it is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from llmforge.base.errors import UnsupportedError
from llmforge.ir.operators import canonical
from llmforge.trace.hooks import internals, state_spaces
from llmforge.trace.hooks.attention import AttentionHook
from llmforge.trace.hooks.linear_attention import LinearAttentionInputs, bind, emit_linear_attention, owner
from llmforge.trace.hooks.norms import rms_norm
from llmforge.trace.hooks.symbolic import emit

TOLERANCE = 1e-4  # fp32, on values of order one; the chunked delta rule solves a triangular system
PROBED = 5  # tokens on which a function is probed
L2_EPSILON = 1e-6  # under the root of the norm of queries and keys, in every model that asks for it
CONVOLUTION = ("causal_conv1d_fn",)  # names of functions, as transformers gives them
DELTA_RULE = ("chunk_gated_delta_rule", "torch_chunk_gated_delta_rule", "chunk_kimi_delta_attention")


@contextmanager
def substituted(model: nn.Module, attention: AttentionHook) -> Iterator[None]:
    """Make the recurrent layers of `model` arrive as operators while the context lasts."""
    makers = {
        **dict.fromkeys(CONVOLUTION, _convolution),
        **dict.fromkeys(DELTA_RULE, _delta_rule),
        **dict.fromkeys(state_spaces.CHUNK_SCAN, state_spaces.chunk_scan),
        **dict.fromkeys(state_spaces.SELECTIVE_SCAN, state_spaces.selective_scan),
    }

    def replacement(name: str, function: internals.Function) -> internals.Function | None:
        return makers[name](function, attention) if name in makers else None

    with internals.functions_replaced(model, replacement):
        yield


def _convolution(original: Callable[..., Any], attention: AttentionHook) -> Callable[..., Tensor]:
    known: dict[object, str] = {}

    def causal_conv(*args: object, **kwargs: object) -> Tensor:
        given = bind(original, args, kwargs)
        x, weight, bias, activation = (given[name] for name in ("hidden_states", "weight", "bias", "activation"))
        layer = owner(attention, lambda layer: layer.convolved is x)
        (batch, channels, sequence), taps = x.shape, weight.shape[1]
        key = (given.unread, activation, bias is None, taps)
        if key not in known:
            with internals.real_tensors():
                known[key] = probe_convolution(given.probed, taps, bias is not None, activation)
        layer.shapes["conv"] = (taps - 1, channels)
        if layer.past is None:
            return torch.zeros_like(x)
        past = layer.past["conv"]
        inputs = {
            "x": x.transpose(1, 2),
            "weight": weight[:, None],
            "past": past,
            "past_lengths": attention.past_lengths,
            "lengths": attention.lengths,
            "bias": bias,
        }
        made = [(x.dtype, (batch, sequence, channels)), (x.dtype, past.shape)]
        y, layer.present["conv"] = emit(
            canonical.CausalConv, inputs, {"activation": known[key], "layer": layer.number}, made
        )
        return y.transpose(1, 2)

    return causal_conv


def _delta_rule(original: Callable[..., Any], attention: AttentionHook) -> Callable[..., tuple[Tensor, Tensor]]:
    known: set[object] = set()

    def linear_attention(*args: object, **kwargs: object) -> tuple[Tensor, Tensor]:
        given = bind(original, args, kwargs)
        q, k, v, decay, beta = (given[name] for name in ("query", "key", "value", "g", "beta"))
        normalized, past = bool(given["use_qk_l2norm_in_kernel"]), given["initial_state"]
        (batch, sequence, num_heads, width), (heads, value_width) = k.shape, v.shape[2:]
        by_channel = decay.dim() == 4
        shape = (*v.shape[:3], width) if by_channel else v.shape[:3]
        if q.shape != k.shape or decay.shape != shape or beta.shape != v.shape[:3]:
            raise UnsupportedError(f"{original.__name__} is called with a rate for each channel, which no operator has")
        if (key := (given.unread, num_heads, heads, width, value_width, normalized, by_channel)) not in known:
            with internals.real_tensors():
                probe_delta_rule(
                    given.probed, num_heads, heads, width, value_width, normalized=normalized, by_channel=by_channel
                )
            known.add(key)
        if normalized and not attention.dry:
            q, k = _normalize(q), _normalize(k)
        y, state = emit_linear_attention(
            attention,
            LinearAttentionInputs(
                q.reshape(batch, sequence, num_heads * width),
                k.reshape(batch, sequence, num_heads * width),
                v.reshape(batch, sequence, heads * value_width),
                decay.reshape(batch, sequence, heads * width) if by_channel else decay,
                beta,
                num_heads=num_heads,
                state=(heads, width, value_width),
                scale=width**-0.5,
            ),
            past,
        )
        return y.view(batch, sequence, heads, value_width), state

    return linear_attention


def _normalize(x: Tensor) -> Tensor:
    """Divide x [B, S, H, D] by √(Σx² + ε), written as an RMS norm: √(Σx² + ε) = √D · √(mean(x²) + ε/D)."""
    width = x.shape[3]
    return rms_norm(x, torch.full((width,), width**-0.5), L2_EPSILON / width)


def probe_convolution(original: Callable[..., Any], taps: int, biased: bool, activation: str | None) -> str:
    """Find the activation behind the causal convolution that `original` computes, by calling it on numbers.

    Raises:
        UnsupportedError: it computes something else.
    """
    generator = torch.Generator().manual_seed(0)
    x, weight = torch.randn(2, 3, PROBED, generator=generator), torch.randn(3, taps, generator=generator)
    bias = torch.randn(3, generator=generator) if biased else None
    y = original(x.clone(), weight, bias, activation=activation)
    plain = functional.conv1d(functional.pad(x, (taps - 1, 0)), weight[:, None], bias, groups=3)
    for name, expected in (("none", plain), ("silu", functional.silu(plain))):
        if isinstance(y, Tensor) and y.shape == x.shape and torch.allclose(y, expected, rtol=0, atol=TOLERANCE):
            return name
    raise UnsupportedError(f"{original.__name__} is no causal convolution with {activation!r} behind it")


def probe_delta_rule(
    original: Callable[..., Any],
    num_heads: int,
    heads: int,
    width: int,
    value_width: int,
    *,
    normalized: bool,
    by_channel: bool = False,
) -> None:
    """Return if `original` computes the gated delta rule as `llmforge::LinearAttention` does.

    It decays by head, or, where `by_channel`, each channel of the keys by itself.

    Raises:
        UnsupportedError: it computes something else.
    """
    generator = torch.Generator().manual_seed(0)

    def draw(*dims: int) -> Tensor:
        return torch.randn(*dims, generator=generator)

    q, k = draw(2, PROBED, num_heads, width), draw(2, PROBED, num_heads, width)
    if not normalized:  # keys of unit length, or the state grows without bound
        k = k / k.norm(dim=-1, keepdim=True)
    v, state = draw(2, PROBED, heads, value_width), draw(2, heads, width, value_width)
    decay = -draw(2, PROBED, heads, *([width] if by_channel else [])).abs()
    beta = torch.sigmoid(draw(2, PROBED, heads))
    y, after = original(
        q.clone(),
        k.clone(),
        v.clone(),
        g=decay.clone(),
        beta=beta.clone(),
        initial_state=state.clone(),
        output_final_state=True,
        use_qk_l2norm_in_kernel=normalized,
    )
    if normalized:
        q, k = (x * torch.rsqrt(x.square().sum(-1, keepdim=True) + L2_EPSILON) for x in (q, k))
    q, k = (x.repeat_interleave(heads // num_heads, 2) for x in (q, k))
    kept = decay.exp()[..., None] if by_channel else decay.exp()[..., None, None]
    rows = []
    for s in range(PROBED):
        state = state * kept[:, s]
        missing = (v[:, s] - torch.einsum("bhd,bhde->bhe", k[:, s], state)) * beta[:, s, :, None]
        state = state + torch.einsum("bhd,bhe->bhde", k[:, s], missing)
        rows.append(torch.einsum("bhd,bhde->bhe", q[:, s], state) * width**-0.5)
    for found, expected in ((y, torch.stack(rows, 1)), (after, state)):
        if found.shape != expected.shape or not torch.allclose(found, expected, rtol=TOLERANCE, atol=TOLERANCE):
            raise UnsupportedError(f"{original.__name__} does not compute the gated delta rule")
