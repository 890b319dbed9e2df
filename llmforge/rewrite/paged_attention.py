"""GroupQueryAttention over rows of a cache becomes PagedAttention over blocks of a pool, for the whole graph at once.

`input_ids` [batch, sequence] becomes [1, tokens], all rows' tokens one behind the other and none of them padding, so
that reading prompts and decoding go together in one step; caches [batch, kv_heads, capacity, head_dim] become
[blocks, block_size, kv_heads, head_dim]; `seqlens_k` and `total_sequence_length` give way to
`cumulative_sequence_length`, `past_seqlens`, `block_table` and `attention_metadata`; logits are [1, rows, vocabulary],
`logits_rows` counts tokens of the step. All other nodes compute token by token, which is why only what attention reads
changes: a graph with an input or a cache that another operator reads is left alone, with the reason.

PagedAttention of ONNX Runtime 1.31 (its schema; contrib_ops/cuda/bert/paged_attention.cc): a window of n tokens has
the token itself in it, as in GroupQueryAttention; blocks are of a power of two of tokens, 16 or more; FlashAttention
reads blocks of a multiple of `PagedBlocks.block_tokens`; others are gathered into a dense buffer first. Over int8
blocks a step of one token a row reads them in place (XQA), and a longer one gathers all its texts in 16 bits first.
"""

from __future__ import annotations

import onnx_ir as ir

from llmforge.ir import graph, interface
from llmforge.ir.operators import contrib
from llmforge.rewrite.pass_base import Rewritten

_INPUTS = {interface.INPUT_IDS, interface.POSITION_IDS, interface.LOGITS_ROWS}
_LENGTHS = {interface.SEQLENS_K, interface.TOTAL_SEQUENCE_LENGTH}
TOKENS, BLOCKS, ROWS, ROW_ENDS, ROW_BLOCKS = "tokens", "blocks", "batch", "batch_plus_1", "blocks_of_a_row"


def reason_against(model: ir.Model) -> str | None:
    """Say why `model` cannot read blocks of a pool; None where it can."""
    layers = contrib.GroupQueryAttention.all(model)
    if not layers:
        return "it has no GroupQueryAttention: flash-attention is not among the passes, or left its attention alone"
    if not any(value.name == interface.LOGITS_ROWS for value in model.graph.inputs):
        return f"it gives every token logits, and takes no {interface.LOGITS_ROWS}"
    read = {value for layer in layers for value in (layer.past_key, layer.past_value)}
    for value in model.graph.inputs:
        name = str(value.name)
        if interface.present_of(name) != name:
            if value not in read or len(value.uses()) > 1:
                return f"{name} is not the cache of one GroupQueryAttention"
        elif name in _LENGTHS:
            others = [use.node for use in value.uses() if not contrib.GroupQueryAttention.matches(use.node)]
            if others:
                return f"{others[0].op_type} {others[0].name} reads {name}"
        elif name not in _INPUTS:
            return f"it takes {name}, which is given by row"
    return next((f"{layer.name}: {reason}" for layer in layers if (reason := _layer_reason(layer)) is not None), None)


def _layer_reason(layer: contrib.GroupQueryAttention) -> str | None:
    head_dim = graph.static(layer.past_key)[3]
    if layer.attention_bias is not None or layer.position_ids is not None:
        return "PagedAttention takes neither biases nor positions of its own"
    if layer.smooth_softmax == 1 or layer.causal != 1 or layer.sliding_window_cache:
        return "PagedAttention has no smooth softmax without sinks, no attention both ways and no rolling cache"
    if layer.past_key.dtype == ir.DataType.UINT8:
        return "blocks of int4 are not written"
    if layer.cos_cache is not None and graph.width(layer.cos_cache) * 2 != head_dim:
        return f"only {graph.width(layer.cos_cache) * 2} of {head_dim} channels of a head are rotated"
    return None


def lower(model: ir.Model, tokens: int) -> list[Rewritten]:
    """Rewrite `model` in place to blocks of `tokens`; `reason_against` has no objection. List what changed."""
    ids = graph.input_named(model, interface.INPUT_IDS)
    batch, sequence = ids.shape or (None, None)
    made: dict[str, list[int | str | None]] = {
        interface.CUMULATIVE_LENGTHS: [ROW_ENDS],
        interface.PAST_SEQLENS: [ROWS],
        interface.BLOCK_TABLE: [ROWS, ROW_BLOCKS],
        interface.ATTENTION_METADATA: [3],
    }
    places = {name: ir.val(name, ir.DataType.INT32, shape) for name, shape in made.items()}
    model.graph.inputs.extend(places.values())
    rewritten = [_lower(layer, places, tokens) for layer in contrib.GroupQueryAttention.all(model)]
    for value in (*model.graph.inputs, *model.graph.outputs, *(v for node in model.graph for v in node.outputs)):
        if value.shape is not None and value.name not in places:
            dims = [1 if dim == batch else TOKENS if dim == sequence else dim for dim in value.shape]
            value.shape = ir.Shape(dims)
    graph.drop_unused(model)
    return rewritten


def _lower(layer: contrib.GroupQueryAttention, places: dict[str, ir.Value], tokens: int) -> Rewritten:
    """Put Squeeze, PagedAttention and Unsqueeze in the place of one layer."""
    node = layer.node
    model_graph = graph.owner(node)
    axis = graph.initializer(model_graph, "paged.axis_0", ir.tensor([0], ir.DataType.INT64, name="paged.axis_0"))

    def packed(value: ir.Value | None) -> ir.Value | None:
        if value is None:
            return None
        [flat] = graph.insert(node, "Squeeze", [value, axis], name=f"{node.name}/{value.name}.packed")
        flat.type = value.type
        return flat

    _, heads, _, channels = graph.static(layer.past_key)
    for cache in (layer.past_key, layer.past_value):
        cache.shape = ir.Shape([BLOCKS, tokens, heads, channels])
    inputs: dict[str, ir.Value | None] = {
        "query": packed(layer.query),
        "key": packed(layer.key),
        "value": packed(layer.value),
        "key_cache": layer.past_key,
        "value_cache": layer.past_value,
        **places,
        "cos_cache": layer.cos_cache,
        "sin_cache": layer.sin_cache,
        "head_sink": layer.head_sink,
        "q_norm_weight": layer.q_norm_weight,
        "k_norm_weight": layer.k_norm_weight,
        "k_scale": _scales(model_graph, layer.k_scale),
        "v_scale": _scales(model_graph, layer.v_scale),
    }
    kept = (
        "num_heads",
        "kv_num_heads",
        "scale",
        "softcap",
        "local_window_size",
        "do_rotary",
        "rotary_interleaved",
        "qk_norm_epsilon",
        "k_quant_type",
        "v_quant_type",
    )
    attributes = {name: node.attributes[name].value for name in kept if name in node.attributes}
    made = contrib.PagedAttention.insert(node, inputs, attributes, outputs=3, name=node.name)
    flat, *presents = made.node.outputs
    flat.type = node.outputs[0].type
    [result] = graph.insert(node, "Unsqueeze", [flat, axis], name=f"{node.name}/output.packed")
    for present, old, cache in zip(presents, node.outputs[1:], (layer.past_key, layer.past_value), strict=True):
        present.type, present.shape, old.shape = cache.type, cache.shape, cache.shape
    graph.replace_outputs(node, (result, *presents))
    model_graph.remove(node, safe=True)
    return Rewritten(str(made.name), f"PagedAttention over blocks of {tokens} tokens")


def _scales(place: ir.Graph, scales: ir.Value | None) -> ir.Value | None:
    """Give scales of channels [1, kv_heads, 1, head_dim] the shape that blocks have: [kv_heads, 1, head_dim]."""
    if scales is None or len(graph.static(scales)) == 1:
        return scales
    return graph.initializer(place, f"{scales.name}.blocks", graph.tensor(scales).numpy()[0])
