"""Causal attention of a layer that multiplies in bf16: what torch would compute in fp32 is the compiled loops'."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from llmforge.quantization.rounding import attention, products

_ATTENTION = torch.nn.functional.scaled_dot_product_attention  # as transformers calls it


@contextmanager
def narrowed_attention(module: torch.nn.Module) -> Iterator[None]:
    """Let causal attention in `module` multiply in bf16, forwards and backwards; what goes in and comes out is fp32.

    Softmax and sums are fp32. Attention with a mask, and that of tensors elsewhere than on the CPU, is left alone, as is
    all of it where the processor multiplies no bf16.
    """
    if not products.has_bf16():
        yield
        return
    plain, own = module.forward, vars(module).get("forward")

    def forward(*args: Any, **kwargs: Any) -> Any:
        with _Narrowed():
            return plain(*args, **kwargs)

    module.forward = forward  # type: ignore[method-assign]
    try:
        yield
    finally:
        if own is None:
            del module.forward
        else:
            module.forward = own  # type: ignore[method-assign]


class _Narrowed(TorchFunctionMode):
    """Answers calls of torch's attention on the thread that enters it."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is _ATTENTION:
            made = _attended(*args, **(kwargs or {}))
            if made is not None:
                return made
        return func(*args, **(kwargs or {}))


def _attended(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor | None:
    """Return what torch's function of these parameters returns, [1, heads, tokens, channels]; None: left to torch."""
    given = query, key, value
    if attn_mask is not None or dropout_p or not is_causal or query.shape[2] != key.shape[2]:
        return None
    if any(x.shape[0] != 1 or x.ndim != 4 or x.dtype != torch.float32 or not x.is_cpu for x in given):
        return None
    made: torch.Tensor = _Attention.apply(*given, query.shape[-1] ** -0.5 if scale is None else scale)
    return made


class _Attention(torch.autograd.Function):
    """The compiled loops, as torch differentiates."""

    @staticmethod
    def forward(ctx: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float) -> torch.Tensor:
        given = [_dense(x) for x in (q, k, v)]
        found = attention.attend(*(x[0].numpy() for x in given), scale)
        out, lse = map(torch.from_numpy, found)
        ctx.scale = scale
        ctx.save_for_backward(*given, out, lse)
        return out[None]

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        q, k, v, out, lse = ctx.saved_tensors
        found, gradient = attention.Attended(out.numpy(), lse.numpy()), _dense(gradients[0])
        given = (x[0].numpy() for x in (q, k, v))
        made = attention.attend_backwards(*given, found, ctx.scale, gradient[0].numpy())
        return *(torch.from_numpy(each)[None] for each in made), None


def _dense(x: torch.Tensor) -> torch.Tensor:
    """Return x with its channels next to each other."""
    held = x.detach()
    return held if held.stride(-1) == 1 else held.contiguous()
