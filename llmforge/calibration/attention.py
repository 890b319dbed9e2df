"""Causal attention while a layer runs: what torch would compute is the compiled loops'."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from llmforge.quantization.rounding import attention, products

_ATTENTION = torch.nn.functional.scaled_dot_product_attention  # as transformers calls it


def compiled_attention(narrow: bool) -> AbstractContextManager[object]:
    """Make a context in which causal attention on this thread is the compiled loops', and differentiable.

    `narrow`: it multiplies in bf16, forwards and backwards, with fp32 sums, where the processor does. Attention with a
    mask, and that of tensors elsewhere than on the CPU, is torch's, as is all of it where the processor has not their
    instructions.
    """
    return _Compiled(narrow and products.has_bf16()) if attention.is_compiled() else nullcontext()


class _Compiled(TorchFunctionMode):
    """Answers calls of torch's attention on the thread that enters it; `bf16`: in products of bf16."""

    def __init__(self, bf16: bool) -> None:
        super().__init__()
        self.bf16 = bf16

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is _ATTENTION:
            made = _attended(self.bf16, *args, **(kwargs or {}))
            if made is not None:
                return made
        return func(*args, **(kwargs or {}))


def _attended(
    bf16: bool,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor | None:
    """Return what torch's function of the parameters after `bf16` returns, [1, heads, tokens, channels].

    None: it is left to torch.
    """
    given = query, key, value
    if attn_mask is not None or dropout_p or not is_causal or query.shape[2] != key.shape[2]:
        return None
    if any(x.shape[0] != 1 or x.ndim != 4 or x.dtype != torch.float32 or not x.is_cpu for x in given):
        return None
    made: torch.Tensor = _Attention.apply(  # type: ignore[no-untyped-call]
        *given, query.shape[-1] ** -0.5 if scale is None else scale, bf16
    )
    return made


class _Attention(torch.autograd.Function):
    """The compiled loops, as torch differentiates."""

    @staticmethod
    def forward(ctx: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, bf16: bool) -> torch.Tensor:
        q, k, v = _dense(q), _dense(k), _dense(v)
        made = attention.attend(q[0].numpy(), k[0].numpy(), v[0].numpy(), scale, bf16=bf16)
        out, lse = map(torch.from_numpy, made)
        ctx.scale, ctx.bf16 = scale, bf16
        ctx.save_for_backward(q, k, v, out, lse)
        return out[None]

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        q, k, v, out, lse = ctx.saved_tensors
        found, gradient = attention.Attended(out.numpy(), lse.numpy()), _dense(gradients[0])
        read = q[0].numpy(), k[0].numpy(), v[0].numpy()
        made = attention.attend_backwards(*read, found, ctx.scale, gradient[0].numpy(), bf16=ctx.bf16)
        return *(torch.from_numpy(each)[None] for each in made), None, None


def _dense(x: torch.Tensor) -> torch.Tensor:
    """Return x with its channels next to each other."""
    held = x.detach()
    return held if held.stride(-1) == 1 else held.contiguous()
