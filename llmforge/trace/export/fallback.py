"""A model's own attention, traced as it is: for architectures whose attention, masks or positions cannot be hooked.

The model runs its eager attention over a cache that writes into the preallocated buffers (TensorScatter), under the
mask that transformers describes, evaluated for every row's own positions. Rotary embedding is the model's own. The
graph is larger than one of `llmforge::Attention`, and what a model does beside transformers' interfaces is unknown.
So it is taken only where the other way is refused, and is no more than a candidate until its numbers were compared
with the model's (`verification.trace_verifier`), on texts longer than whatever may change with the length of a text
(`refuse_unprovable`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache

from llmforge.base.errors import ForgeError, NotADecoder, UnsupportedError
from llmforge.checkpoint import Checkpoint
from llmforge.ir.operators import standard
from llmforge.trace.export import limits
from llmforge.trace.export.reference import EAGER, ReferenceModel
from llmforge.trace.hooks import attention, indexers, internals, masks, rotary
from llmforge.trace.hooks.symbolic import emit

LOOK_AHEAD = 1e-3  # of a logit, in standard deviations, when what follows its token is left out: beyond rounding
READ_AHEAD = 24  # tokens of which that is asked
FP32_BYTES = 4


def refused_too(reason: ForgeError, error: ForgeError) -> ForgeError:
    """Return what refuses a model whose attention was not substituted, for `reason`, and not traced as it is either."""
    if error.message == reason.message:
        return reason
    return UnsupportedError(
        f"{reason.message}; tracing the attention from its own code failed too: {error.message}", hint=reason.hint
    )


class OwnCache(attention.CacheLayer):  # type: ignore[no-untyped-call]  # transformers is untyped in parts
    """The cache of one layer: hands on the whole buffer, with new keys and values written into it."""

    def __init__(self, past: Mapping[str, Tensor] | None, run: OwnAttention) -> None:
        super().__init__(past, run)
        self._own = run

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: object, **kwargs: object
    ) -> tuple[Tensor, Tensor]:
        """Write keys and values [B, kv_heads, S, D] behind each row's past; return the buffers [B, kv_heads, C, D]."""
        self.keys, self.values = self.read = super().update(key_states, value_states)
        for part, new in zip(("key", "value"), self.read, strict=True):
            self.shapes[part] = (new.shape[1], new.shape[3])
            if self.past is not None:
                self.present[part] = _written(self.past[part], new, self._own.slots)
        if self.past is not None:
            self.keys, self.values = self.present["key"], self.present["value"]
        return self.keys, self.values

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Return how many slots a query meets, and the first of them."""
        return (query_length if self.past is None else self.get_seq_length()), 0


def _written(past: Tensor, new: Tensor, slots: Tensor) -> Tensor:
    if new.dtype != past.dtype:
        raise UnsupportedError(f"a layer caches {new.dtype}")
    inputs = {"past": past, "new": new.contiguous(), "past_lengths": slots}
    (present,) = emit(standard.TensorScatter, inputs, {"axis": 2}, [(past.dtype, past.shape)], version=24)
    return present


class OwnAttention(attention.AttentionHook):
    """What a model with its own attention gets from transformers: the cache, and masks as numbers."""

    NAME = EAGER  # attention in a model's own code
    LAYER = OwnCache

    slots: Tensor  # int64 [B]: the first slot that a step writes in each row

    def step(self, past: Sequence[Mapping[str, Tensor] | None], past_lengths: Tensor, lengths: Tensor) -> Cache:
        """Begin one run of the model."""
        self.slots = past_lengths.to(torch.int64)
        return super().step(past, past_lengths, lengths)

    def registered(self) -> AbstractContextManager[None]:
        """Make the masks of eager attention for a while."""
        return internals.mask_replaced(EAGER, self.numbers)

    def tables(self, model: nn.Module) -> AbstractContextManager[rotary.Tables]:
        """Leave rotary embedding to the model."""
        return nullcontext(rotary.Tables(self.positions))

    def choose(self, model: nn.Module, tables: rotary.Tables) -> None:
        """Refuse a model that has indexers: its own code computes with the masks that they choose among."""
        indexers.refuse(model)

    def numbers(
        self,
        *,
        q_length: int,
        mask_function: masks.MaskFunction,
        attention_mask: object = None,
        dtype: torch.dtype = torch.float32,
        **kwargs: Any,
    ) -> Tensor:
        """Compute the mask [B, 1, S, C] that transformers asks for: 0 where a query sees a slot, else the lowest.

        Raises:
            UnsupportedError: it hides something only in texts that are too long to prove it.
        """
        self.refuse_padding(attention_mask)
        mask_function = self.uniform.resolved(mask_function)
        masks.refuse_encoders(mask_function)
        hidden = masks.hides_from(mask_function, self.positions)
        if hidden is not None:
            _require_provable("an attention mask hides tokens", hidden)
        caches = (layer for layer in self.layers if layer.past is None or "key" in layer.past)  # of tokens, not states
        slots, _ = next(caches).get_mask_sizes(q_length)
        queries = (self.slots[:, None] + torch.arange(q_length))[:, None, :, None]
        keys, zero = torch.arange(slots)[None, None, None, :], torch.zeros(1, 1, 1, 1, dtype=torch.int64)
        seen = mask_function(zero, zero, queries, keys).expand(self.slots.shape[0], 1, q_length, slots)
        return torch.where(seen, torch.zeros((), dtype=dtype), torch.finfo(dtype).min)


def refuse_unprovable(checkpoint: Checkpoint) -> None:
    """Refuse a model whose configuration names a length beyond which no proof runs, of a window for one.

    Raises:
        UnsupportedError: it does.
    """
    context = checkpoint.geometry.context
    for name, tokens in checkpoint.configuration.lengths:
        if context is None or tokens < context:
            _require_provable(f"its {name} may change what it computes", tokens)


def _require_provable(what: str, tokens: int) -> None:
    if tokens > limits.LONGEST - limits.TAIL:
        raise UnsupportedError(
            f"{what} from token {tokens} on; its own attention is only compiled where a text that is longer can be "
            f"run to prove it, up to {limits.LONGEST} tokens"
        )


def refuse_encoders(checkpoint: Checkpoint) -> None:
    """Refuse a model that is an encoder by what it computes, unless it is too large to run.

    For models that cannot be traced: that they are encoders is the plainer reason.

    Raises:
        NotADecoder: it is one.
    """
    if checkpoint.parameters * FP32_BYTES > limits.WHOLE_BYTES:
        return
    ids = np.random.default_rng(0).integers(0, checkpoint.geometry.vocabulary, READ_AHEAD)
    half = READ_AHEAD // 2
    try:
        reference = ReferenceModel(checkpoint)
        whole, part = reference.run(ids, READ_AHEAD).logits[:half], reference.run(ids[:half], half).logits
    except UnsupportedError:  # transformers cannot run it: no plainer reason
        return
    if not np.abs(whole - part).max() <= LOOK_AHEAD * whole.std():
        raise NotADecoder(
            "the logits of a token change with later tokens: it is an encoder, not a decoder",
            hint="needed: to embed or score with it, as a recipe of `llmforge init` does (docs/retrieval.md)",
        )
