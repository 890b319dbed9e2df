"""Attention and its cache as transformers sees them during a trace: one `llmforge::Attention` node a layer."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache, CacheLayerMixin, LinearAttentionCacheLayerMixin

from llmforge.base.errors import UnsupportedError
from llmforge.ir.operators import canonical
from llmforge.trace.hooks import indexers, internals, masks, rotary
from llmforge.trace.hooks.position_tracer import PositionTracer
from llmforge.trace.hooks.symbolic import emit
from llmforge.trace.hooks.uniform import Uniform

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


class CacheLayer(LinearAttentionCacheLayerMixin, CacheLayerMixin):  # type: ignore[no-untyped-call, override]
    """The cache of one layer: hands on what a step adds to it, and remembers which tensors they were.

    Parts have the names that they have in the graph: key and value [B, kv_heads, C, D], or a latent [B, 1, C, L+R] of
    both; conv [B, K-1, C], recurrent [B, H, D, Dv] (`states`). A dry run learns which parts there are.
    """

    is_sliding = False
    is_compileable = False

    def __init__(self, past: Mapping[str, Tensor] | None, run: AttentionHook) -> None:
        LinearAttentionCacheLayerMixin.__init__(self)
        CacheLayerMixin.__init__(self)  # type: ignore[no-untyped-call]
        self.past = past  # None in a dry run, empty where the layer caches nothing
        self.number = -1  # among the layers that cache something, which is how the graph counts them
        self._run = run
        if past is not None and "recurrent" in past:
            self.recurrent_states[0] = past["recurrent"]
            self.is_recurrent_states_initialized[0] = self.has_previous_state[0] = True
        self.shapes: dict[str, tuple[int, ...]] = {}  # by part, without batch and capacity; of a dry run
        self.present: dict[str, Tensor] = {}
        self.new: tuple[Tensor, Tensor] | None = None
        self.read: tuple[Tensor, Tensor] | None = None  # by attention: the same, or made of them
        self.convolved: Tensor | None = None  # [B, C, S], what a convolution is about to read
        self.recurrent: Tensor | None = None  # the state after the step

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: object, **kwargs: object
    ) -> tuple[Tensor, Tensor]:
        """Remember the step's keys and values [B, kv_heads, S, D] and return them."""
        if self.new is not None:
            raise UnsupportedError("a layer updates its cache twice in one step")
        self.new = (key_states, value_states)
        return self.new

    def lazy_initialization(self, *args: Any, **kwargs: Any) -> None:
        """Do nothing: the buffers are inputs of the graph."""

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Return any length: a mask is described, not built (`masks`)."""
        return query_length, 0

    def get_seq_length(self) -> int:
        """Return the capacity of the cache, which is not what the model asks for.

        Rows of a batch have different pasts, so a model that computes with one length for all cannot be right. Where
        it counts positions from it, it gets those of each row (`places`). What else it computes from the capacity
        leaves a Shape of the cache in the graph, which the dialect does not have.
        """
        slots = [cache.shape[2] for part, cache in (self.past or {}).items() if part in ("key", "latent")]
        return self._run.places.length(slots[0] if slots else 1)  # type: ignore[no-any-return]

    def get_max_length(self) -> int:
        """Return -1, transformers' sign for no limit."""
        return -1

    def update_conv_state(
        self, conv_states: Tensor, state_idx: int = 0, conv_kernel_size: int | None = None, **kwargs: object
    ) -> Tensor:
        """Remember the step's inputs [B, C, S] of a causal convolution and return them."""
        if self.convolved is not None or state_idx:
            raise UnsupportedError("a layer updates the state of a convolution twice in one step")
        self.convolved = conv_states
        return conv_states

    def update_recurrent_state(self, recurrent_states: Tensor, state_idx: int = 0, **kwargs: object) -> Tensor:
        """Take back the state that a linear attention computed.

        Raises:
            UnsupportedError: something else computed it (a state space model, for one).
        """
        if recurrent_states is not self._run.unclaimed or state_idx:
            raise UnsupportedError(
                "a layer keeps a recurrent state that no linear attention computed",
                hint="needed: an operator with this state, and a hook that finds it (docs/new-architecture.md)",
            )
        self._run.unclaimed, self.recurrent = None, recurrent_states
        self.shapes["recurrent"] = tuple(recurrent_states.shape[1:])
        self.present["recurrent"] = recurrent_states
        return recurrent_states

    def complete(self) -> None:
        """Return if all that the layer caches is read by an operator that can carry it on.

        Raises:
            UnsupportedError: the layer caches something that nothing known reads.
        """
        if self.new is not None and self.read is None:
            raise UnsupportedError("a layer caches keys and values that no attention reads")
        if self.convolved is not None and "conv" not in {**self.shapes, **self.present}:
            raise UnsupportedError("a layer keeps a state that no causal convolution reads")


class AttentionHook:
    """What transformers calls for the attention and the masks of a model, under a name in its registries."""

    NAME = "llmforge"
    LAYER: Callable[..., CacheLayer] = CacheLayer  # takes the graph inputs of a layer (None: a dry run), and this
    bounded = False  # code that indexes tables by its sizes is right up to the longest context, and torch says so

    latent = True  # cache latents where a model has them, and not the keys and values that are made of them

    past_lengths: Tensor  # int32 [B], of the run under way
    lengths: Tensor  # int32 [B]

    def __init__(self, positions: int) -> None:
        self.positions = positions  # of the longest context
        self.uniform, self.places = Uniform(), PositionTracer()
        self.limit = indexers.Shortest()
        self.layers: Sequence[CacheLayer] = []
        self.unclaimed: Tensor | None = None  # the recurrent state that was computed last

    def registered(self) -> AbstractContextManager[None]:
        """Let transformers call this for a while."""
        return internals.registered(self.NAME, self.attend, self.describe)

    def tables(self, model: nn.Module) -> AbstractContextManager[rotary.Tables]:
        """Substitute the rotary embedding of `model` for a while, by what reads these tables."""
        return rotary.substituted(model, self.positions)

    def choose(self, model: nn.Module, tables: rotary.Tables) -> None:
        """Let the indexers of `model` choose every token, as far as they do."""
        indexers.substitute(model, tables, self.limit)

    @property
    def dry(self) -> bool:
        """Whether the run under way only learns what the layers cache."""
        return all(layer.past is None for layer in self.layers)

    def step(self, past: Sequence[Mapping[str, Tensor] | None], past_lengths: Tensor, lengths: Tensor) -> Cache:
        """Begin one run of the model: make its cache from the graph inputs of each layer (None: a dry run)."""
        self.past_lengths, self.lengths = past_lengths, lengths
        self.layers = [self.LAYER(parts, self) for parts in past]
        for number, layer in enumerate(layer for layer in self.layers if layer.past):
            layer.number = number
        return Cache(layers=[*self.layers])

    def mask(self, *, mask_function: masks.MaskFunction, attention_mask: object = None, **kwargs: Any) -> Any:
        """Describe the mask that transformers asks for, instead of building it."""
        self.refuse_padding(attention_mask)
        local = int(kwargs.get("local_size") or 0)  # window or chunk: look further than it reaches
        mask = masks.classify(self.uniform.resolved(mask_function), max(self.positions, 2 * local + 2))
        if isinstance(mask, masks.MaskRows):
            return mask
        # A window or chunk that no query reaches beyond is none.
        return masks.Mask(0) if max(mask.window, mask.chunk) >= self.positions else mask

    def describe(self, **kwargs: Any) -> Any:
        """Answer transformers' call for a mask."""
        return self.mask(**kwargs)

    def refuse_padding(self, attention_mask: object) -> None:
        """Refuse a padding mask, unless it is the model's own and says that nothing is padded."""
        if attention_mask is not None and not self.uniform.holds(attention_mask):
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
        softcap: float | None = None,
        s_aux: Tensor | None = None,
        **kwargs: object,
    ) -> tuple[Tensor, None]:
        """Emit `llmforge::Attention`: query [B, H, S, D], key and value [B, kv_heads, S, D] → [B, S, H, Dv].

        Raises:
            UnsupportedError: the layer's attention does something that the operator cannot say.
        """
        mask = _mask(type(module).__name__, attention_mask, kwargs)
        layer = self.layers[self._layer_of(key, value)]
        layer.read = (key, value)
        matrix = None if mask.chunk else self._expansion(module, layer, key, value)
        (batch, num_heads, sequence, key_dim), value_dim = query.shape, value.shape[3]
        if matrix is None:
            layer.shapes |= {"key": (key.shape[1], key_dim), "value": (key.shape[1], value_dim)}
        else:
            layer.shapes["latent"] = (1, sum(part.shape[3] for part in layer.new or ()))
        if layer.past is None:
            return query.new_zeros(batch, sequence, num_heads, value_dim), None
        attributes: dict[str, int | float] = {
            "num_heads": num_heads,
            "scale": float(key_dim**-0.5 if scaling is None else scaling),
            "softcap": float(softcap or 0.0),
            "window": mask.window,
            "layer": layer.number,
        }
        inputs = {"q": rows(query), "past_lengths": self.past_lengths, "sinks": s_aux}
        made = (query.dtype, (batch, sequence, num_heads * value_dim))
        if matrix is not None:
            assert layer.new is not None
            past = layer.past["latent"]
            inputs |= {"latent": rows(torch.cat(layer.new, -1)), "up": matrix, "past": past}
            y, layer.present["latent"] = emit(
                canonical.LatentAttention, inputs, attributes, [made, (key.dtype, past.shape)]
            )
        else:
            past_key, past_value = layer.past["key"], layer.past["value"]
            inputs |= {"k": rows(key), "v": rows(value), "past_key": past_key, "past_value": past_value}
            attributes |= {"kv_num_heads": key.shape[1], **({"chunk": mask.chunk} if mask.chunk else {})}
            presents = [(key.dtype, past_key.shape), (value.dtype, past_value.shape)]
            y, layer.present["key"], layer.present["value"] = emit(
                canonical.Attention, inputs, attributes, [made, *presents]
            )
        return y.view(batch, sequence, num_heads, value_dim), None

    def _expansion(self, module: nn.Module, layer: CacheLayer, key: Tensor, value: Tensor) -> Tensor | None:
        """Find the matrix that makes keys and values of the latent that `layer` caches; None: it caches them."""
        if not self.latent or layer.new is None or (layer.new[0] is key and layer.new[1] is value):
            return None
        return expansion(module, layer.new, key, value)

    def _layer_of(self, key: Tensor, value: Tensor) -> int:
        """Find the layer whose cache update returned these tensors, or what these were made of.

        Latent attention caches something smaller and expands it after the update, token by token (`tokenwise` sees to
        it). Keys and values are of the one layer that was updated and has not been read.
        """
        if any(layer.read is not None and layer.read[0] is key and layer.read[1] is value for layer in self.layers):
            return self._sharing()
        unread = {index: layer.new for index, layer in enumerate(self.layers) if layer.new and layer.read is None}
        for index, (new_key, new_value) in unread.items():
            if key is new_key and value is new_value:
                return index
        if len(unread) != 1:
            raise UnsupportedError(
                "attention reads other keys and values than its layer caches (a shared cache, or one read twice)"
            )
        ((index, (new_key, _)),) = unread.items()
        if key.shape[2] != new_key.shape[2] or value.shape[2] != new_key.shape[2] or key.shape[1] != value.shape[1]:
            raise UnsupportedError("attention reads another number of keys and values than its layer caches")
        return index

    def _sharing(self) -> int:
        """Find the layer that reads what an earlier one has cached and read: it caches the same once more.

        Attention runs layer by layer, so it is the one behind the last that has read; it must not cache keys of its
        own. Windows of layers that share may differ, and each node keeps to its own.
        """
        index = 1 + max(index for index, layer in enumerate(self.layers) if layer.read is not None)
        if index >= len(self.layers) or self.layers[index].new is not None:
            raise UnsupportedError("attention reads keys and values of another layer, and which layer it is of is open")
        return index


def _mask(where: str, mask: object, options: Mapping[str, object]) -> masks.Mask:
    """Return the mask of an attention that does nothing besides which llmforge::Attention cannot say."""
    known = ("dropout", "sliding_window")  # the latter repeats for kernels without a mask what the mask says
    unknown = sorted(
        name
        for name, given in options.items()
        if given is not None and name not in {*INERT, *known} and not isinstance(given, indexers.AllTokens)
    )
    if unknown:
        raise UnsupportedError(
            f"{where} gives attention {', '.join(unknown)}, which llmforge::Attention lacks",
            hint="needed: an input or attribute of llmforge::Attention for it (docs/new-architecture.md)",
        )
    if mask is None:
        raise UnsupportedError(f"{where} gives attention no mask: its model does not build it with transformers'")
    if not isinstance(mask, masks.Mask):
        raise UnsupportedError(f"{where} gives attention a mask of its own making")
    if options.get("dropout"):
        raise UnsupportedError(f"{where} drops out attention weights at inference")
    return mask


def rows(x: Tensor) -> Tensor:
    """Lay heads side by side: [B, H, S, D] → [B, S, H·D]."""
    batch, count, sequence, dim = x.shape
    return x.transpose(1, 2).reshape(batch, sequence, count * dim)


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
