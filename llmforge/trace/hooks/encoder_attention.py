"""Attention of an encoder as transformers sees it during a trace: one `llmforge::EncoderAttention` node a layer."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from llmforge.base.errors import UnsupportedError
from llmforge.ir.operators import canonical
from llmforge.trace.hooks import internals, masks
from llmforge.trace.hooks.attention import INERT, AttentionHook, rows
from llmforge.trace.hooks.symbolic import emit

_KNOWN = INERT | {
    "deterministic",
    "dropout",
    "sliding_window",
    "cu_seq_lens_q",
    "cu_seq_lens_k",
    "max_length_q",
    "max_length_k",
}


@dataclass(frozen=True)
class Reach:
    """A mask: a query sees `left` keys before its own place and `right` after it; -1: all that there are."""

    left: int
    right: int


class EncoderAttentionHook(AttentionHook):
    """What transformers calls for attention and masks of a model that reads whole sequences, without a cache."""

    NAME = "llmforge-encoder"
    sequence_starts: Tensor  # int32 [sequences + 1], of the run under way
    learns: bool  # whether that run only learns what the model calls, and makes no nodes

    def begin(self, sequence_starts: Tensor, *, learns: bool) -> None:
        """Begin one run of the model, over sequences that begin at these tokens."""
        self.sequence_starts, self.learns = sequence_starts, learns
        self.attentions = 0  # that have run

    def watching(self, position_ids: Tensor) -> AbstractContextManager[object]:
        """Follow what the model computes, in a run with these positions [1, T]."""
        return self.uniform

    def mask(self, *, mask_function: masks.MaskFunction, attention_mask: object = None, **kwargs: Any) -> Any:
        """Describe the mask that transformers asks for, instead of building it."""
        self.refuse_padding(attention_mask)
        local = int(kwargs.get("local_size") or 0)
        positions = max(self.positions, 2 * local + 2)
        return reach(self.uniform.resolved(mask_function), positions)

    def attend(
        self,
        module: torch.nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: object,
        *,
        scaling: float | None = None,
        softcap: float | None = None,
        s_aux: Tensor | None = None,
        **kwargs: object,
    ) -> tuple[Tensor, None]:
        """Emit the node: query [1, H, T, D], key and value [1, kv_heads, T, D or Dv] → [1, T, H, Dv].

        Raises:
            UnsupportedError: the layer's attention does something that the operator cannot say.
        """
        seen = _reach(type(module).__name__, attention_mask, {**kwargs, "s_aux": s_aux})
        (batch, num_heads, tokens, key_dim), value_dim = query.shape, value.shape[3]
        attributes: dict[str, int | float] = {
            "num_heads": num_heads,
            "kv_num_heads": key.shape[1],
            "scale": float(key_dim**-0.5 if scaling is None else scaling),
            "softcap": float(softcap or 0.0),
            "left": seen.left,
            "right": seen.right,
        }
        inputs = {"q": rows(query), "k": rows(key), "v": rows(value), "sequence_starts": self.sequence_starts}
        self.attentions += 1
        if self.learns:
            return query.new_zeros(batch, tokens, num_heads, value_dim), None
        made = (query.dtype, (batch, tokens, num_heads * value_dim))
        [y] = emit(canonical.EncoderAttention, inputs, attributes, [made])
        return y.view(batch, tokens, num_heads, value_dim), None


def reach(function: masks.MaskFunction, positions: int) -> Reach:
    """Find the `Reach` that `function` computes for queries and keys in [0, positions).

    The middle query tells both sides; a spread of others must agree.

    Raises:
        UnsupportedError: what a query sees is not one block around it, of one size for all.
    """
    with internals.real_tensors():
        middle = positions // 2
        shown = masks.row(function, middle, positions).nonzero().flatten().tolist()
        if not shown or middle not in shown:
            raise UnsupportedError("an attention mask hides a token from itself")
        left = -1 if shown[0] == 0 else middle - shown[0]
        right = -1 if shown[-1] == positions - 1 else shown[-1] - middle
        found, keys = Reach(left, right), torch.arange(positions)
        steps = {abs(side) + by for side in (left, right) for by in (-1, 0, 1)}
        queries = {0, 1, middle, positions - 1} | steps | {positions - 1 - step for step in steps}
        for query in sorted(query for query in queries if 0 <= query < positions):
            first = 0 if left < 0 else query - left
            last = positions if right < 0 else query + right
            if not torch.equal(masks.row(function, query, positions), (keys >= first) & (keys <= last)):
                raise UnsupportedError(
                    f"an attention mask is not one block of keys around each query: see query {query}",
                    hint="needed: an attribute of llmforge::EncoderAttention for this mask (docs/new-architecture.md)",
                )
        return found


def _reach(where: str, mask: object, options: Mapping[str, object]) -> Reach:
    """Return what the queries of an attention see that does nothing besides which the operator cannot say."""
    if unknown := sorted(name for name, given in options.items() if given is not None and name not in _KNOWN):
        raise UnsupportedError(
            f"{where} gives attention {', '.join(unknown)}, which llmforge::EncoderAttention lacks",
            hint="needed: an input or attribute of llmforge::EncoderAttention for it (docs/new-architecture.md)",
        )
    if not isinstance(mask, Reach):
        kind = "no mask" if mask is None else "a mask of its own making"
        raise UnsupportedError(f"{where} gives attention {kind}: its model does not build it with transformers'")
    if options.get("dropout"):
        raise UnsupportedError(f"{where} drops out attention weights at inference")
    return mask
