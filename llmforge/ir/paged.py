"""The reference of `com.microsoft::PagedAttention`: a function in standard ONNX, which any CPU runs.

No CPU kernel of the operator exists. This is how graphs that have it are proven: `expand` writes it out, and every
query is multiplied with the keys of all rows of the step under a mask that leaves it those of its own text. It is slow,
and reads and writes blocks by the same tables as the kernel. Sources: the operator's schema in onnxruntime 1.31, and
contrib_ops/cuda/bert/paged_attention.cc.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from llmforge.base.errors import UnsupportedError
from llmforge.ir import graph, interface, query_key_norms
from llmforge.ir.builder import GraphBuilder, shared
from llmforge.ir.operators.contrib import PagedAttention

_HIDDEN = np.float32(np.finfo(np.float32).min)  # a score that softmax makes 0 of
_INT64, _FLOAT = int(ir.DataType.INT64), int(ir.DataType.FLOAT)


def expand(model: ir.Model) -> ir.Model:
    """Clone `model` with every PagedAttention written as standard ONNX; tensors are shared.

    Raises:
        UnsupportedError: a node has a slot mapping, which the reference lacks.
    """
    clone = model.clone()
    expansion = _PagedExpansion(clone)
    for layer in PagedAttention.all(clone):
        expansion.expand(layer)
    graph.drop_unused(clone)
    return clone


@dataclass
class _PagedExpansion(GraphBuilder):
    """The expansion of all layers; T, B, M = tokens, rows, blocks of a row; L = M · block_size slots of a row."""

    def expand(self, layer: PagedAttention) -> None:
        """Replace one layer; comments give shapes: H, K, D = heads, KV heads, channels of a head."""
        if layer.slot_mapping is not None:
            raise UnsupportedError(f"{layer.name}: the reference of PagedAttention has no slot_mapping")
        node, heads, kv_heads = layer.node, layer.num_heads, layer.kv_num_heads
        block, head_dim = graph.static(layer.key_cache)[1], graph.static(layer.key_cache)[3]
        group, dtype = heads // kv_heads, layer.query.dtype or ir.DataType.FLOAT
        query_key_norms.write_out(layer, head_dim)
        q, k, v = self._projections(layer, heads, kv_heads, head_dim)  # [T, H·D], [T, K·D], [T, K·D]
        if layer.do_rotary:
            q, k = (self._rotate(layer, x, count) for x, count in ((q, heads), (k, kv_heads)))
        places = layer.cumulative_sequence_length, layer.past_seqlens, layer.block_table
        slots = self._slots(*places, block)  # [T, 2]
        by_head = self._constant(f"paged.kv_{kv_heads}_{head_dim}", [-1, kv_heads, head_dim])
        caches, dense = [], []
        for cache, new, scale in ((layer.key_cache, k, layer.k_scale), (layer.value_cache, v, layer.v_scale)):
            by_slot = self._quantized(node, self._add(node, "Reshape", [new, by_head]), scale, dtype)
            written = self._add(node, "ScatterND", [cache, slots, by_slot])
            written.type, written.shape = cache.type, cache.shape
            of_rows = self._add(node, "Gather", [written, self._cast(layer.block_table)], {"axis": 0})
            caches.append(written)
            read = self._float(node, self._add(node, "Reshape", [of_rows, by_head]), cache.dtype or dtype)
            dense.append(read if scale is None else self._add(node, "Mul", [read, self._by_head(scale)]))  # [B·L, K, D]
        keys = self._add(node, "Transpose", [dense[0]], {"perm": [1, 2, 0]})  # [K, D, B·L]
        values = self._add(node, "Transpose", [dense[1]], {"perm": [1, 0, 2]})  # [K, B·L, D]
        factor = layer.scale if layer.scale else head_dim**-0.5
        q = self._add(node, "Mul", [self._float(node, q, dtype), self._number(factor)])
        q = self._add(
            node, "Reshape", [q, self._constant(f"paged.q_{kv_heads}_{group}", [-1, kv_heads, group, head_dim])]
        )
        q = self._add(node, "Transpose", [q], {"perm": [1, 2, 0, 3]})  # [K, G, T, D]
        keys, values = (self._add(node, "Unsqueeze", [x, self._constant("paged.axis_1", [1])]) for x in (keys, values))
        scores = self._add(node, "MatMul", [q, keys])  # [K, G, T, B·L]
        if layer.softcap:
            capped = self._add(node, "Tanh", [self._add(node, "Div", [scores, self._number(layer.softcap)])])
            scores = self._add(node, "Mul", [capped, self._number(layer.softcap)])
        mask = self._mask(*places, block, layer.local_window_size)  # [T, B·L]
        scores = self._add(node, "Where", [mask, scores, self._constant("paged.hidden", _HIDDEN)])
        weights = self._softmax(node, scores, layer.head_sink, kv_heads, group)
        y = self._add(node, "MatMul", [weights, values])  # [K, G, T, D]
        y = self._add(node, "Transpose", [y], {"perm": [2, 0, 1, 3]})
        y = self._add(node, "Reshape", [y, self._constant(f"paged.out_{heads * head_dim}", [-1, heads * head_dim])])
        if dtype != ir.DataType.FLOAT:
            y = self._add(node, "Cast", [y], {"to": int(dtype)})
        graph.replace_outputs(node, (y, *caches))

    def _projections(self, layer: PagedAttention, heads: int, kv_heads: int, head_dim: int) -> list[ir.Value]:
        if len(layer.projections) == 3:
            return list(layer.projections)
        sizes = [heads * head_dim, kv_heads * head_dim, kv_heads * head_dim]
        parts = self._constant(f"paged.parts_{heads}_{kv_heads}_{head_dim}", sizes)
        return graph.insert(layer.node, "Split", [layer.query, parts], {"axis": 1}, outputs=3)

    def _rotate(self, layer: PagedAttention, x: ir.Value, heads: int) -> ir.Value:
        """[T, heads·D], turned by each token's place in its text."""
        assert layer.cos_cache is not None
        assert layer.sin_cache is not None
        node, axis = layer.node, self._constant("paged.axis_0", [0])
        _, _, own = self._tokens(layer.cumulative_sequence_length, layer.past_seqlens)
        places = self._first("Unsqueeze", [own, axis])
        attributes = {"num_heads": heads, "interleaved": layer.rotary_interleaved}
        batch = self._add(node, "Unsqueeze", [x, axis])
        turned = self._add(node, "RotaryEmbedding", [batch, layer.cos_cache, layer.sin_cache, places], attributes)
        return self._add(node, "Squeeze", [turned, axis])

    def _tokens(self, ends: ir.Value, past: ir.Value) -> tuple[ir.Value, ir.Value, ir.Value]:
        """Number the tokens of the step [T], and give the row of each, and its place in the row's text: int64 [T]."""
        ids = graph.input_named(self.model, interface.INPUT_IDS)  # [1, T]
        return self._number_tokens(ids), self._row(ends, ids), self._own(ends, past, ids)

    @shared
    def _number_tokens(self, ids: ir.Value) -> ir.Value:
        return self._count_along(ids, 1)

    @shared
    def _row(self, ends: ir.Value, ids: ir.Value) -> ir.Value:
        """Count, for each token, the rows that end before it or at it."""
        last = self._constant("paged.to_end", [np.iinfo(np.int64).max])
        one, axis = self._constant("paged.slice_1", [1]), self._constant("paged.axis_0", [0])
        stops = self._first("Unsqueeze", [self._first("Slice", [self._cast(ends), one, last]), axis])  # [1, B]
        tokens = self._first("Unsqueeze", [self._number_tokens(ids), self._constant("paged.axis_1", [1])])
        behind = self._first("Cast", [self._first("GreaterOrEqual", [tokens, stops])], {"to": _INT64})
        return self._first("ReduceSum", [behind, self._constant("paged.axis_1", [1])], {"keepdims": 0})

    @shared
    def _own(self, ends: ir.Value, past: ir.Value, ids: ir.Value) -> ir.Value:
        row = self._row(ends, ids)
        before = self._first("Gather", [self._cast(past), row])
        begin = self._first("Gather", [self._cast(ends), row])
        return self._first("Add", [before, self._first("Sub", [self._number_tokens(ids), begin])])

    @shared
    def _slots(self, ends: ir.Value, past: ir.Value, table: ir.Value, block: int) -> ir.Value:
        """Block and offset that each token is written to: int64 [T, 2]."""
        _, row, own = self._tokens(ends, past)
        size, axis = self._constant(f"paged.block_{block}", block), self._constant("paged.axis_1", [1])
        which = self._first("Unsqueeze", [self._first("Div", [own, size]), axis])
        at = self._first("Concat", [self._first("Unsqueeze", [row, axis]), which], {"axis": 1})
        number = self._first("GatherND", [self._cast(table), at])
        offset = self._first("Mod", [own, size])
        return self._first("Concat", [self._first("Unsqueeze", [each, axis]) for each in (number, offset)], {"axis": 1})

    @shared
    def _mask(self, ends: ir.Value, past: ir.Value, table: ir.Value, block: int, window: int) -> ir.Value:
        """Say which slots of all rows each token sees: bool [T, B·L]."""
        _, row, own = self._tokens(ends, past)
        axis = self._constant("paged.axis_1", [1])
        row, own = (self._first("Unsqueeze", [x, axis]) for x in (row, own))
        rows, blocks = self._extent(table, 0), self._extent(table, 1)
        length = self._first("Mul", [blocks, self._constant(f"paged.block_{block}", block)])
        zero, one = self._constant("zero", 0), self._constant("one", 1)
        slots = self._first("Range", [zero, self._first("Mul", [rows, length]), one])  # [B·L]
        mine = self._first("Equal", [self._first("Div", [slots, length]), row])
        place = self._first("Mod", [slots, length])
        seen = self._first("And", [mine, self._first("LessOrEqual", [place, own])])
        if window > 0:
            start = self._first("Sub", [own, self._constant(f"paged.window_{window}", window)])
            seen = self._first("And", [seen, self._first("Greater", [place, start])])
        return seen

    def _softmax(self, node: ir.Node, scores: ir.Value, sinks: ir.Value | None, kv_heads: int, group: int) -> ir.Value:
        """Over the last axis of [K, G, T, B·L]; a sink is one more score of its head, whose weight goes nowhere."""
        if sinks is None:
            return self._add(node, "Softmax", [scores], {"axis": -1})
        sinks = self._float(node, sinks, sinks.dtype or ir.DataType.FLOAT)
        column = self._constant(f"paged.sinks_{kv_heads}_{group}", [kv_heads, group, 1, 1])
        begin, one, end, last = (self._constant(f"paged.at_{place}", [place]) for place in (0, 1, -1, 3))
        like = self._add(node, "Shape", [self._add(node, "Slice", [scores, begin, one, last])])
        beside = self._add(node, "Expand", [self._add(node, "Reshape", [sinks, column]), like])
        weights = self._add(node, "Softmax", [self._add(node, "Concat", [scores, beside], {"axis": 3})], {"axis": -1})
        return self._add(node, "Slice", [weights, begin, end, last])

    def _quantized(self, node: ir.Node, x: ir.Value, scale: ir.Value | None, dtype: ir.DataType) -> ir.Value:
        """Round [T, K, D] to int8 codes, half to even, as `scale` says: none, [1] or [K, 1, D]."""
        if scale is None:
            return x
        codes = self._add(node, "Round", [self._add(node, "Div", [self._float(node, x, dtype), self._by_head(scale)])])
        least, most = self._number(-128), self._number(127)
        return self._add(node, "Cast", [self._add(node, "Clip", [codes, least, most])], {"to": int(ir.DataType.INT8)})

    @shared
    def _by_head(self, scale: ir.Value) -> ir.Value:
        """Give scales [1] or [K, 1, D] the shape of what is in slots: [1, 1, 1] or [1, K, D]."""
        if len(graph.static(scale)) == 1:
            return self._first("Reshape", [scale, self._constant("paged.scale", [1, 1, 1])])
        return self._first("Transpose", [scale], {"perm": [1, 0, 2]})

    @shared
    def _cast(self, value: ir.Value) -> ir.Value:
        return self._first("Cast", [value], {"to": _INT64})

    def _float(self, node: ir.Node, value: ir.Value, dtype: ir.DataType) -> ir.Value:
        return value if dtype == ir.DataType.FLOAT else self._add(node, "Cast", [value], {"to": _FLOAT})

    def _number(self, value: float) -> ir.Value:
        return self._constant(f"paged.number_{value}", np.asarray(value, np.float32))
