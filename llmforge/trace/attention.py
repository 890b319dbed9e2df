"""Attention and its cache as transformers sees them during a trace: one `llmforge::Attention` node a layer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache, CacheLayerMixin

from llmforge.errors import UnsupportedError
from llmforge.trace import masks
from llmforge.trace.ones import Ones

UNBOUNDED = 8192  # positions at which the masks of a model are looked at that does not say how many it has
# Keyword arguments of attention functions that change nothing in what a decoder computes at inference.
INERT = frozenset(
    {
        "is_causal",
        "logits_to_keep",  # what a model takes for its head and hands down unread
        "output_attentions",
        "output_hidden_states",
        "output_router_logits",
        "position_ids",
        "return_dict",
        "use_cache",
    }
)


@dataclass(frozen=True)
class CacheShape:
    """Shape of one layer's cache, without batch and capacity."""

    kv_heads: int
    key_dim: int
    value_dim: int


class Layer(CacheLayerMixin):  # type: ignore[no-untyped-call]  # transformers is untyped in parts
    """The cache of one layer: hands new keys and values on untouched and remembers which tensors they were."""

    is_sliding = False
    is_compileable = False

    def __init__(self, past: tuple[Tensor, Tensor] | None = None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.past = past  # None in a dry run
        self.new: tuple[Tensor, Tensor] | None = None
        self.present: tuple[Tensor, Tensor] | None = None

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: object, **kwargs: object
    ) -> tuple[Tensor, Tensor]:
        """Remember the step's keys and values [B, kv_heads, S, D] and return them."""
        if self.new is not None:
            raise UnsupportedError("a layer updates its cache twice in one step")
        self.new = (key_states, value_states)
        return self.new

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Do nothing: the buffers are inputs of the graph."""

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Return any length: a mask is described, not built (`masks`)."""
        return query_length, 0

    def get_seq_length(self) -> int:
        """Return the capacity of the cache, which is not what the model asks for.

        Rows of a batch have different pasts, so a model that computes with one length for all cannot be right. What
        it computes from the capacity leaves a Shape of the cache in the graph, which the dialect does not have.
        """
        return 1 if self.past is None else self.past[0].shape[2]

    def get_max_length(self) -> int:
        """Return -1, transformers' sign for no limit."""
        return -1

    def shape(self) -> CacheShape:
        """Return the shape of what a dry run cached."""
        if self.new is None:
            raise UnsupportedError("a layer caches no keys and values (another kind of layer than attention)")
        key, value = self.new
        return CacheShape(kv_heads=key.shape[1], key_dim=key.shape[3], value_dim=value.shape[3])


class Attention:
    """What transformers calls for the attention and the masks of a model, under a name in its registries."""

    NAME = "llmforge"

    def __init__(self, context: int | None) -> None:
        self._positions = UNBOUNDED if context is None else context
        self.ones = Ones()
        self.layers: Sequence[Layer] = []
        self._past_lengths: Tensor | None = None

    def step(self, past: Sequence[tuple[Tensor, Tensor] | None], past_lengths: Tensor) -> Cache:
        """Begin one run of the model: make its cache from the graph inputs of each layer (None: a dry run)."""
        self.layers = [Layer(pair) for pair in past]
        self._past_lengths = past_lengths
        return Cache(layers=[*self.layers])

    def mask(self, *, mask_function: masks.MaskFunction, attention_mask: object = None, **kwargs: Any) -> masks.Mask:
        """Describe the mask that transformers asks for, instead of building it."""
        self.refuse_padding(attention_mask)
        local = int(kwargs.get("local_size") or 0)  # window or chunk: look further than it reaches
        mask = masks.classify(mask_function, max(self._positions, 2 * local + 2))
        return masks.Mask(0) if mask.window >= self._positions else mask  # a window that no query reaches beyond

    def refuse_padding(self, attention_mask: object) -> None:
        """Refuse a padding mask, unless it is the model's own and says that nothing is padded."""
        if attention_mask is not None and attention_mask not in self.ones:
            raise UnsupportedError("the model makes a padding mask of its own")

    def attend(
        self,
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: object,
        *,
        scaling: float | None = None,
        dropout: float = 0.0,
        softcap: float | None = None,
        sliding_window: int | None = None,
        s_aux: Tensor | None = None,
        **kwargs: object,
    ) -> tuple[Tensor, None]:
        """Emit `llmforge::Attention`: query [B, H, S, D], key and value [B, kv_heads, S, D] → [B, S, H, Dv].

        `sliding_window` repeats for kernels without a mask what `attention_mask` says, and is not read.

        Raises:
            UnsupportedError: the layer's attention does something that the operator cannot say.
        """
        where = type(module).__name__
        unknown = sorted(name for name, given in kwargs.items() if given is not None and name not in INERT)
        if unknown:
            raise UnsupportedError(f"{where} gives attention {', '.join(unknown)}, which llmforge::Attention lacks")
        if attention_mask is None:
            raise UnsupportedError(f"{where} gives attention no mask: its model does not build it with transformers'")
        if not isinstance(attention_mask, masks.Mask):
            raise UnsupportedError(f"{where} gives attention a mask of its own making")
        if dropout:
            raise UnsupportedError(f"{where} drops out attention weights at inference")
        index = self._layer_of(key, value)
        layer = self.layers[index]
        (batch, num_heads, sequence, key_dim), value_dim = query.shape, value.shape[3]
        if layer.past is None or self._past_lengths is None:
            return query.new_zeros(batch, sequence, num_heads, value_dim), None
        inputs = [_rows(query), _rows(key), _rows(value), *layer.past, self._past_lengths]
        y, present_key, present_value = torch.onnx.ops.symbolic_multi_out(
            "llmforge::Attention",
            inputs if s_aux is None else [*inputs, s_aux],
            {
                "num_heads": num_heads,
                "kv_num_heads": key.shape[1],
                "scale": float(key_dim**-0.5 if scaling is None else scaling),
                "softcap": float(softcap or 0.0),
                "window": attention_mask.window,
                "layer": index,
            },
            dtypes=[query.dtype, key.dtype, value.dtype],
            shapes=[(batch, sequence, num_heads * value_dim), layer.past[0].shape, layer.past[1].shape],
            version=1,
        )
        layer.present = (present_key, present_value)
        return y.view(batch, sequence, num_heads, value_dim), None

    def _layer_of(self, key: Tensor, value: Tensor) -> int:
        """Find the layer whose cache update returned exactly these tensors."""
        for index, layer in enumerate(self.layers):
            if layer.new is not None and key is layer.new[0] and value is layer.new[1]:
                return index
        raise UnsupportedError("attention reads other keys and values than its layer caches (latent or shared cache)")


def _rows(x: Tensor) -> Tensor:
    """Lay heads side by side: [B, H, S, D] → [B, S, H·D]."""
    batch, count, sequence, dim = x.shape
    return x.transpose(1, 2).reshape(batch, sequence, count * dim)
