"""The part that all layers with a recurrent state share: calls of their functions, whose state it is, and the node."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from llmforge.base.errors import UnsupportedError
from llmforge.ir.operators import canonical
from llmforge.trace.hooks.attention import INERT, AttentionHook, CacheLayer
from llmforge.trace.hooks.symbolic import emit


class _Unread:
    """What a probed function gets for an argument that must not matter: whatever is computed with it fails."""

    __slots__ = ()


@dataclass(frozen=True)
class FunctionCall:
    """A call of a function: its arguments by name, and how to call it on numbers in the same way."""

    original: Callable[..., Any]
    arguments: Mapping[str, Any]
    unread: tuple[str, ...]  # arguments that it has no name for; a probe shows that it does not read them

    def __getitem__(self, name: str) -> Any:
        return self.arguments[name]

    @property
    def probed(self) -> Callable[..., Any]:
        """The function, for a probe: what it is not to read is given as something that cannot be computed with."""

        @functools.wraps(self.original)
        def call(*args: object, **kwargs: object) -> Any:
            try:
                return self.original(*args, **kwargs, **dict.fromkeys(self.unread, _Unread()))
            except (AttributeError, IndexError, RuntimeError, TypeError, ValueError) as error:
                what = f"is called with {', '.join(self.unread)} and " if self.unread else ""
                raise UnsupportedError(f"{self.original.__name__} {what}cannot be probed: {error}") from error

        return call


def bind(original: Callable[..., Any], args: tuple[object, ...], kwargs: dict[str, object]) -> FunctionCall:
    """Name the arguments of a call; those that are not among the function's own must be left unread."""
    bound = inspect.signature(original).bind(*args, **kwargs)
    bound.apply_defaults()
    arguments: dict[str, Any] = dict(bound.arguments)
    rest = arguments.pop("kwargs", {})
    unread = sorted(name for name, given in rest.items() if given is not None and name not in INERT)
    return FunctionCall(original, arguments, tuple(unread))


def owner(attention: AttentionHook, owns: Callable[[CacheLayer], bool]) -> CacheLayer:
    """Find the one layer that `owns` what a function was called with.

    Raises:
        UnsupportedError: none does, or several do.
    """
    found = [layer for layer in attention.layers if owns(layer)]
    if len(found) != 1:
        raise UnsupportedError("a recurrent layer computes with something else than its own cache handed out")
    return found[0]


@dataclass(frozen=True, eq=False)
class LinearAttentionInputs:
    """Inputs of `llmforge::LinearAttention`: gated where there is no `beta`, else by the gated delta rule."""

    q: Tensor  # [B, S, num_heads·D]
    k: Tensor
    v: Tensor  # [B, S, H·Dv]
    decay: Tensor  # [B, S, H] or [B, S, H·D]
    beta: Tensor | None  # [B, S, H]
    num_heads: int
    state: tuple[int, int, int]  # H, D, Dv
    scale: float = 1.0


def emit_linear_attention(
    attention: AttentionHook, step: LinearAttentionInputs, past: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Emit `llmforge::LinearAttention` → y [B, S, H·Dv], state.

    Which layer it is tells `past`, what its cache handed out; a model that hands over none updates the state of the
    layer whose convolution it has just read (transformers' kernels of Mamba begin with zeros).
    """
    v, beta = step.v, step.beta
    if attention.dry:
        # A dry run has no states yet; the cache takes this one back under the index of its layer.
        attention.unclaimed = torch.zeros(v.shape[0], *step.state)
        return torch.zeros_like(v), attention.unclaimed
    if past is None:
        layer = owner(attention, lambda one: "conv" in one.present and one.recurrent is None)
        past = (layer.past or {}).get("recurrent")
    else:
        layer = owner(attention, lambda one: (one.past or {}).get("recurrent") is past)
    if past is None:
        raise UnsupportedError("a recurrent layer computes with a state that its cache does not hold")
    inputs = {
        "q": step.q,
        "k": step.k,
        "v": v,
        "decay": step.decay,
        "past": past,
        "past_lengths": attention.past_lengths,
        "lengths": attention.lengths,
        "beta": beta,
    }
    rule = "gated" if beta is None else "gated_delta"
    attributes = {"num_heads": step.num_heads, "update_rule": rule, "scale": step.scale, "layer": layer.number}
    made = [(v.dtype, v.shape), (past.dtype, past.shape)]
    y, attention.unclaimed = emit(canonical.LinearAttention, inputs, attributes, made)
    return y, attention.unclaimed
