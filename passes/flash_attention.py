"""Lower attention to ONNX Runtime's GroupQueryAttention over a KV buffer that past and present share.

    q = RotaryEmbedding(q', cos, sin, position_ids); k = RotaryEmbedding(k', cos, sin, position_ids)
    y, present_key, present_value = llmforge::Attention(q, k, v, past_key, past_value, past_lengths[, sinks])
    becomes
    y, present_key, present_value = com.microsoft::GroupQueryAttention(
        q', k', v, past_key, past_value, seqlens_k, total_sequence_length, cos, sin, , , sinks)

`q` is [batch, sequence, num_heads·D], `k` and `v` are [batch, sequence, kv_num_heads·D], the caches
[batch, kv_num_heads, capacity, D]. Attributes: `num_heads`, `kv_num_heads`, `scale` and `softcap` are the same,
`window` becomes `local_window_size` (0: left out), rotary embedding `do_rotary` and `rotary_interleaved`.
Inputs of the graph: `seqlens_k` and `total_sequence_length` are added; `past_lengths` and `position_ids` go where
nothing reads them any more.

Fires for every `llmforge::Attention` where
- keys and values have one head size, a multiple of 8,
- kv_num_heads divides num_heads,
- sinks, if there are any, are [num_heads],
- there are no ALiBi slopes, and no chunks.
`llmforge::LatentAttention` has no keys and values for it, and stays.

Rotary embedding is folded in where query and key have the same caches, layout and the graph's `position_ids`, the head
size is a multiple of 16 and the caches have a multiple of 8 columns, at most half a head; else it stays in front.
A query, key and value that come, in this order, from one Split of three are passed unsplit, as a packed query.

These conditions are those of the kernel (onnxruntime 1.31, contrib_ops/cpu/bert/group_query_attention_helper.h), which
checks them when it runs.

Numerics: the same sums in another order (the kernel works through the cache block by block).
"""

from __future__ import annotations

from typing import ClassVar, NamedTuple

import onnx_ir as ir
from pydantic.dataclasses import dataclass

from llmforge.ir import graph, interface
from llmforge.ir.operators import canonical, contrib
from llmforge.ir.operators.standard import RotaryEmbedding, Split
from llmforge.rewrite.declared import FlashAttentionTraits
from llmforge.rewrite.pass_base import Changes, Context, Numerics, Pass, Skipped
from llmforge.rewrite.patterns import rewrite_each, skip_if

_HEAD_MULTIPLE = 8
_HEAD_MULTIPLE_WITH_ROTARY = 16
_ROTARY_COLUMNS_MULTIPLE = 8


_LATENTS = "it caches latents, and GroupQueryAttention reads keys and values"


class _Operands(NamedTuple):
    """Query, key and value of GroupQueryAttention, and its rotary embedding."""

    query: ir.Value
    key: ir.Value | None  # None: packed into the query
    value: ir.Value | None
    cos: ir.Value | None = None  # None: rotary embedding stays in front, or there is none
    sin: ir.Value | None = None
    interleaved: int = 0


@dataclass(frozen=True)
class FlashAttention(FlashAttentionTraits, Pass):
    """Lower attention to ONNX Runtime's GroupQueryAttention over a shared KV buffer."""

    numerics: ClassVar[Numerics] = Numerics.ROUNDING
    keeps_parameters: ClassVar[bool] = True
    provides: ClassVar[frozenset[str]] = frozenset({"gqa"})

    def run(self, model: ir.Model, context: Context) -> Changes:
        """Rewrite every attention of `model`.

        Raises:
            UnsupportedError: the target has no ONNX Runtime, whose operator this is.
        """
        context.require_onnxruntime(self.name, "GroupQueryAttention is an operator of ONNX Runtime")
        changes = Changes()
        for latent in canonical.LatentAttention.all(model):
            changes.skipped.append(Skipped(latent.name, _LATENTS))

        def lower(attention: canonical.Attention) -> str:
            skip_if(_reason(attention))
            operands = _unsplit(_fold_rotary(attention, changes))
            _lower(model, attention, operands)
            packed = ", packed query, key and value" * (operands.key is None)
            return f"GroupQueryAttention{packed}" + ", rotary embedding inside" * (operands.cos is not None)

        if rewrite_each(canonical.Attention.all(model), lower, changes):
            graph.drop_unused(model)
        return changes


def _reason(attention: canonical.Attention) -> str | None:
    """Say why GroupQueryAttention cannot do what `attention` does; None where it can."""
    heads, kv_heads = attention.num_heads, attention.kv_num_heads
    if heads % kv_heads:
        return f"{heads} query heads are not a multiple of {kv_heads} KV heads"
    key, value = _head_size(attention.past_key), _head_size(attention.past_value)
    if key is None or value is None:
        return "the head size of the cache is unknown"
    if key != value:
        return f"key heads have {key} channels and value heads {value}; GroupQueryAttention needs the same size"
    if key % _HEAD_MULTIPLE:
        return f"heads have {key} channels; GroupQueryAttention needs a multiple of {_HEAD_MULTIPLE}"
    if attention.alibi_slopes is not None:
        return "attention has a position bias (ALiBi), which GroupQueryAttention takes only as a full tensor"
    if attention.chunk:
        return f"attention reads chunks of {attention.chunk} tokens; GroupQueryAttention knows windows"
    if attention.sinks is not None and graph.dims(attention.sinks) != (heads,):
        return f"sinks have shape {graph.dims(attention.sinks)}; GroupQueryAttention needs ({heads},)"
    return None


def _head_size(cache: ir.Value) -> int | None:
    """Read the channels of a head off a cache, [batch, heads, capacity, channels]."""
    shape = graph.dims(cache)
    return shape[3] if shape is not None and len(shape) == 4 and isinstance(shape[3], int) else None


def _fold_rotary(attention: canonical.Attention, changes: Changes) -> _Operands:
    """Return the operands with rotary embedding folded in where the kernel can do it; record it where it cannot."""
    of_query, of_key = RotaryEmbedding.made(attention.q), RotaryEmbedding.made(attention.k)
    if of_query is None or of_key is None:
        reason = "only one of query and key has rotary embedding"
    elif (found := _rotary_reason(of_query, of_key, _head_size(attention.past_key) or 0)) is not None:
        reason = found
    else:
        return _Operands(of_query.x, of_key.x, attention.v, of_query.cos, of_query.sin, of_query.interleaved)
    changes.skipped.extend(Skipped(each.name, reason) for each in (of_query, of_key) if each is not None)
    return _Operands(attention.q, attention.k, attention.v)


def _rotary_reason(of_query: RotaryEmbedding, of_key: RotaryEmbedding, head_size: int) -> str | None:
    """Say why the rotary embeddings of a query and a key stay outside; None where they can be folded in."""
    positions = of_query.position_ids
    if (of_query.cos, of_query.sin, positions) != (of_key.cos, of_key.sin, of_key.position_ids):
        return "query and key have different rotary caches or positions"
    if positions.name != interface.POSITION_IDS or not positions.is_graph_input():
        return f"the positions are not the graph's {interface.POSITION_IDS}"
    if of_query.interleaved != of_key.interleaved:
        return "one of query and key is interleaved and the other is not"
    if head_size % _HEAD_MULTIPLE_WITH_ROTARY:
        return (
            f"heads have {head_size} channels; with rotary the kernel needs a multiple of {_HEAD_MULTIPLE_WITH_ROTARY}"
        )
    if of_query.rotary_embedding_dim != of_key.rotary_embedding_dim:
        return "query and key rotate different numbers of channels"
    for shape in (graph.dims(of_query.cos), graph.dims(of_query.sin)):
        columns = shape[1] if shape is not None and len(shape) == 2 else None
        if not isinstance(columns, int) or columns % _ROTARY_COLUMNS_MULTIPLE or columns > head_size // 2:
            return (
                f"a rotary cache is {shape}; the kernel needs a multiple of {_ROTARY_COLUMNS_MULTIPLE} columns, "
                f"at most {head_size // 2}"
            )
    return None


def _unsplit(operands: _Operands) -> _Operands:
    """Pass query, key and value as one packed query where one Split makes the three of them, in this order."""
    split = Split.made(operands.query)
    if split is None or list(split.node.outputs) != [operands.query, operands.key, operands.value]:
        return operands
    last = split.axis == -1 or (split.x.shape is not None and split.axis == len(split.x.shape) - 1)
    return operands._replace(query=split.x, key=None, value=None) if last else operands


def _lower(model: ir.Model, attention: canonical.Attention, operands: _Operands) -> None:
    """Put GroupQueryAttention in the place of `attention`."""
    attributes: dict[str, int | float] = {
        "num_heads": attention.num_heads,
        "kv_num_heads": attention.kv_num_heads,
        "scale": attention.scale,
    }
    if attention.softcap:
        attributes["softcap"] = attention.softcap
    if attention.window:
        attributes["local_window_size"] = attention.window
    if operands.cos is not None:
        attributes["do_rotary"] = 1
        attributes["rotary_interleaved"] = operands.interleaved
    # `position_ids` and `attention_bias` stay empty: the positions follow from seqlens_k.
    made = contrib.GroupQueryAttention.insert(
        attention.node,
        {
            "query": operands.query,
            "key": operands.key,
            "value": operands.value,
            "past_key": attention.past_key,
            "past_value": attention.past_value,
            "seqlens_k": _length_input(model, interface.SEQLENS_K, attention.past_lengths.shape),
            "total_sequence_length": _length_input(model, interface.TOTAL_SEQUENCE_LENGTH, ir.Shape([])),
            "cos_cache": operands.cos,
            "sin_cache": operands.sin,
            "head_sink": attention.sinks,
        },
        attributes,
        outputs=3,
        name=attention.name,
    )
    graph.replace_outputs(attention.node, made.node.outputs)
    model.graph.remove(attention.node, safe=True)


def _length_input(model: ir.Model, name: str, shape: ir.Shape | None) -> ir.Value:
    """Return the int32 graph input `name`, a new one if there is none."""
    known = next((value for value in model.graph.inputs if value.name == name), None)
    if known is not None:
        return known
    model.graph.inputs.append(ir.val(name, ir.DataType.INT32, shape))
    return model.graph.inputs[-1]
