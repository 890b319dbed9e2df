"""State space models as gated linear attention: Mamba's and Mamba-2's scans, recognized by computing.

Mamba-2 (arXiv 2405.21060) keeps M [N, P] a head: M = exp(dt·A)·M + B ⊗ dt·x, y = Cᵀ·M + D·x, with B and C shared by
groups of heads. Mamba (arXiv 2312.00752) is the same with one head a channel (P = 1) and an A for each of the N numbers
of its state. So B is a key, C a query, dt·x a value, dt·A a decay: `llmforge::LinearAttention`; what makes dt, and what
is added or multiplied behind, is plain arithmetic.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from llmforge.base.errors import UnsupportedError
from llmforge.trace.hooks import internals
from llmforge.trace.hooks.attention import AttentionHook
from llmforge.trace.hooks.linear_attention import LinearAttentionInputs, bind, emit_linear_attention

TOLERANCE = 1e-4  # fp32, on values of order one
PROBED = 5  # tokens on which a function is probed
CHUNKS = 2  # tokens of a chunk, so that a probe has several, and a part of one
CHUNK_SCAN = ("mamba2_chunk_scan", "mamba_chunk_scan_combined")  # names of functions, as transformers gives them
SELECTIVE_SCAN = ("mamba_selective_scan", "selective_scan_fn")


def time_steps(dt: Tensor, bias: Tensor | None, *, softplus: bool, limit: tuple[float, float]) -> Tensor:
    """Compute Δ of `dt` [B, S, H]: biased, positive, within `limit`."""
    dt = dt if bias is None else dt + bias
    dt = functional.softplus(dt) if softplus else dt
    low, high = (float(end) for end in limit)
    least = None if low == -math.inf or (softplus and low <= 0) else low  # softplus is positive anyway
    most = None if high == math.inf else high
    return dt if least is None and most is None else dt.clamp(min=least, max=most)


def chunk_scan(original: Callable[..., Any], attention: AttentionHook) -> Callable[..., Any]:
    """Make what stands for `original`, the scan of Mamba-2: x [B, S, H, P], dt [B, S, H], A [H], B, C [B, S, G, N]."""
    known: set[object] = set()

    def scan(*args: object, **kwargs: object) -> Any:
        given = bind(original, args, kwargs)
        x, dt, rates, b, c = (given[name] for name in ("hidden_states", "dt", "A", "B", "C"))
        skip, bias, past = given["D"], given["dt_bias"], given["initial_states"]
        softplus, limit = bool(given["dt_softplus"]), (float(given["dt_limit"][0]), float(given["dt_limit"][1]))
        (batch, sequence, heads, value_width), (groups, width) = x.shape, b.shape[2:]
        fits = b.shape == c.shape and dt.shape == x.shape[:3] and rates.shape == (heads,)
        if not fits or any(one is not None and one.shape != (heads,) for one in (skip, bias)):
            raise UnsupportedError(f"{original.__name__} is called with other shapes than those of Mamba-2")
        if (
            key := (given.unread, heads // groups, given["chunk_size"], skip is None, bias is None, softplus, limit)
        ) not in known:
            with internals.real_tensors():
                probe_chunk_scan(
                    given.probed,
                    heads // groups,
                    given["chunk_size"],
                    skip=skip is not None,
                    bias=bias is not None,
                    softplus=softplus,
                    limit=limit,
                )
            known.add(key)
        dt = time_steps(dt.to(x.dtype), bias, softplus=softplus, limit=limit)
        y, state = emit_linear_attention(
            attention,
            LinearAttentionInputs(
                c.reshape(batch, sequence, groups * width),
                b.reshape(batch, sequence, groups * width),
                (x * dt.view(batch, sequence, heads, 1)).reshape(batch, sequence, heads * value_width),
                dt * rates,
                None,
                num_heads=groups,
                state=(heads, width, value_width),
            ),
            past,
        )
        y = y.view(batch, sequence, heads, value_width)
        y = y if skip is None else y + x * skip.view(heads, 1)
        return (y, state) if given["return_final_states"] else y

    return scan


def selective_scan(original: Callable[..., Any], attention: AttentionHook) -> Callable[..., Any]:
    """Make what stands for `original`, the scan of Mamba: x, dt, z [B, C, S], A [C, N], B, C [B, N, S], D [C]."""
    known: set[object] = set()

    def scan(*args: object, **kwargs: object) -> Any:
        given = bind(original, args, kwargs)
        x, dt, b, c = (given[name].transpose(1, 2) for name in ("hidden_states", "dt", "B", "C"))  # [B, S, …]
        rates, skip, bias = given["A"], given["D"], given["delta_bias"]
        gate, softplus = given["z"], bool(given["delta_softplus"])
        (batch, sequence, channels), width = x.shape, b.shape[2]
        fits = b.shape == c.shape and dt.shape == x.shape and rates.shape == (channels, width)
        if not fits or any(one is not None and one.shape != (channels,) for one in (skip, bias)):
            raise UnsupportedError(f"{original.__name__} is called with other shapes than those of Mamba")
        if (key := (given.unread, width, skip is None, bias is None, gate is None, softplus)) not in known:
            with internals.real_tensors():
                probe_selective_scan(
                    given.probed,
                    width,
                    skip=skip is not None,
                    bias=bias is not None,
                    gate=gate is not None,
                    softplus=softplus,
                )
            known.add(key)
        dt = time_steps(dt, bias, softplus=softplus, limit=(-math.inf, math.inf))
        decay = dt.reshape(batch, sequence, channels, 1) * rates  # [B, S, C, N]
        y, state = emit_linear_attention(
            attention,
            LinearAttentionInputs(
                c,
                b,
                x * dt,
                decay.reshape(batch, sequence, channels * width),
                None,
                num_heads=1,
                state=(channels, width, 1),
            ),
            None,
        )
        y = (y if skip is None else y + x * skip).transpose(1, 2)
        y = y if gate is None else y * functional.silu(gate)
        return (y, state) if given["return_last_state"] else y

    return scan


def _draw() -> Callable[..., Tensor]:
    generator = torch.Generator().manual_seed(0)
    return lambda *dims: torch.randn(*dims, generator=generator)


def probe_chunk_scan(
    original: Callable[..., Any],
    shared: int,
    chunk: int,
    *,
    skip: bool,
    bias: bool,
    softplus: bool,
    limit: tuple[float, float],
) -> None:
    """Return if `original` computes Mamba-2's scan, on two groups of at most `shared` heads, with a state behind it.

    `limit` is scaled down to what the numbers reach, so that a limit shows.

    Raises:
        UnsupportedError: it computes something else.
    """
    draw = _draw()
    groups, heads, width, value_width = 2, 2 * min(shared, 3), 4, 3
    x, dt = draw(2, PROBED, heads, value_width), draw(2, PROBED, heads)
    rates, state = -draw(heads).abs(), draw(2, heads, value_width, width)
    b, c = draw(2, PROBED, groups, width), draw(2, PROBED, groups, width)
    skips, biases = draw(heads) if skip else None, draw(heads) if bias else None
    if not softplus:
        dt = dt.abs()
    for size, ends in ((CHUNKS, limit), (chunk, limit), (CHUNKS, (0.3, 0.6))):
        y, after = original(
            x.clone(),
            dt.clone(),
            rates,
            b.clone(),
            c.clone(),
            chunk_size=size,
            D=skips,
            dt_bias=biases,
            initial_states=state.clone(),
            dt_softplus=softplus,
            dt_limit=ends,
            return_final_states=True,
        )
        steps = time_steps(dt, biases, softplus=softplus, limit=ends)
        keys, queries = (one.repeat_interleave(heads // groups, 2) for one in (b, c))
        kept, rows = state, []
        for s in range(PROBED):
            kept = kept * (steps[:, s] * rates).exp()[..., None, None]
            kept = kept + torch.einsum("bhp,bhn->bhpn", x[:, s] * steps[:, s, :, None], keys[:, s])
            rows.append(torch.einsum("bhpn,bhn->bhp", kept, queries[:, s]))
        expected = torch.stack(rows, 1)
        expected = expected if skips is None else expected + x * skips[:, None]
        _compare(original, ((y, expected), (after, kept)), "Mamba-2")


def probe_selective_scan(
    original: Callable[..., Any], width: int, *, skip: bool, bias: bool, gate: bool, softplus: bool
) -> None:
    """Return if `original` computes Mamba's scan, on states of `width` numbers that begin with zeros.

    Raises:
        UnsupportedError: it computes something else.
    """
    draw = _draw()
    channels = 3
    x, dt = draw(2, channels, PROBED), draw(2, channels, PROBED)
    rates, b, c = -draw(channels, width).abs(), draw(2, width, PROBED), draw(2, width, PROBED)
    skips, biases = draw(channels) if skip else None, draw(channels) if bias else None
    gates = draw(2, channels, PROBED) if gate else None
    if not softplus:
        dt = dt.abs()
    y, after = original(
        x.clone(),
        dt.clone(),
        rates,
        b.clone(),
        c.clone(),
        D=skips,
        z=gates,
        delta_bias=biases,
        delta_softplus=softplus,
        return_last_state=True,
    )
    steps = time_steps(dt.transpose(1, 2), biases, softplus=softplus, limit=(-math.inf, math.inf)).transpose(1, 2)
    state, rows = torch.zeros(2, channels, width), []
    for s in range(PROBED):
        state = state * (steps[:, :, s, None] * rates).exp()
        state = state + (steps[:, :, s] * x[:, :, s])[..., None] * b[:, None, :, s]
        rows.append((state * c[:, None, :, s]).sum(-1))
    expected = torch.stack(rows, 2)
    expected = expected if skips is None else expected + x * skips[:, None]
    expected = expected if gates is None else expected * functional.silu(gates)
    _compare(original, ((y, expected), (after, state)), "Mamba")


def _compare(original: Callable[..., Any], pairs: tuple[tuple[Tensor, Tensor], ...], name: str) -> None:
    for found, expected in pairs:
        if found.shape != expected.shape or not torch.allclose(found, expected, rtol=TOLERANCE, atol=TOLERANCE):
            raise UnsupportedError(f"{original.__name__} does not compute the scan of {name}")
