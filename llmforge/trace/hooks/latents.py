"""Latent attention: modules that cache a latent of keys and values, and make those of it with one matrix.

transformers' modules of this kind (DeepSeek-V2, arXiv 2405.04434, section 2.1) hand their cache a latent [B, 1, S, L]
and rotary channels [B, 1, S, R] that all heads share, and expand what comes back: `expand_kv`. What that computes is
found by running it on numbers, not by its name.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn

from llmforge.trace.hooks import internals

_TOKENS = 2


class _Made(nn.Module):
    """In the place of a matrix: gives numbers that are all different, whatever it reads."""

    def __init__(self, features: int) -> None:
        super().__init__()
        self.features, self.calls = features, 0

    def forward(self, x: Tensor) -> Tensor:
        """[..., L] → [..., features]."""
        self.calls += 1
        shape = (*x.shape[:-1], self.features)
        return torch.arange(1, 1 + torch.Size(shape).numel(), dtype=torch.float32).view(shape)


def expansion(module: nn.Module, new: tuple[Tensor, Tensor], key: Tensor, value: Tensor) -> Tensor | None:
    """Find the matrix [H·(N+Dv), L] of which `module` makes `key` [B, H, S, N+R] and `value` [B, H, S, Dv].

    `new`, what it caches, is a latent [B, 1, S, L] and rotary channels [B, 1, S, R]. Of each head, the matrix has the
    rows of the key's first N channels, then those of the value; the key's last R channels are the rotary ones.
    None: `module` does something else, or caching keys and values takes no more memory.
    """
    latent, turned = new
    heads, rotary, rank = key.shape[1], turned.shape[3], latent.shape[3]
    plain, values = key.shape[3] - rotary, value.shape[3]
    expand: Any = getattr(module, "expand_kv", None)
    if expand is None or latent.shape[1] != 1 or turned.shape[1] != 1 or plain < 1:
        return None
    if rank + rotary >= heads * (plain + rotary + values):
        return None
    shape = (heads * (plain + values), rank)
    for name, child in module.named_children():
        if not isinstance(child, nn.Linear) or child._parameters["bias"] is not None:
            continue
        if tuple(child.weight.shape) == shape:
            with internals.real_tensors():
                if _makes(module, name, heads, plain, rotary, values, rank):
                    return child.weight
    return None


def _makes(module: nn.Module, name: str, heads: int, plain: int, rotary: int, values: int, rank: int) -> bool:
    """Say whether `module` lays out what its child `name` gives as `expansion` says."""
    made = _Made(heads * (plain + values))
    probed: Any = copy.copy(module)
    probed._modules = {**module._modules, name: made}
    turned = -torch.arange(1.0, 1 + _TOKENS * rotary).view(1, 1, _TOKENS, rotary)
    try:
        key, value = probed.expand_kv(torch.zeros(1, 1, _TOKENS, rank), turned)
    except (RuntimeError, TypeError, ValueError, AttributeError):  # of another kind than these
        return False
    if made.calls != 1:
        return False
    rows = made.forward(torch.zeros(1, _TOKENS, rank)).view(1, _TOKENS, heads, plain + values).transpose(1, 2)
    wanted = torch.cat([rows[..., :plain], turned.expand(1, heads, _TOKENS, rotary)], -1)
    return torch.equal(key, wanted) and torch.equal(value, rows[..., plain:])
