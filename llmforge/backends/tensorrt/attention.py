"""Attention of the canonical dialect as TensorRT's parser takes it.

    y, present_key, present_value = llmforge::Attention(q, k, v, past_key, past_value, past_lengths)
    becomes
    present_key   = TensorScatter(past_key, heads(k), past_lengths)      an IKVCacheUpdateLayer, in place
    present_value = TensorScatter(past_value, heads(v), past_lengths)
    y = rows(Attention(heads(q), present_key, present_value, mask))      an IAttention, which one kernel computes

`heads` is [B, S, H·D] → [B, H, S, D] and `rows` its inverse. The mask is bool [B, 1, S, C]: slot `t` for the query at
position `p` where `t ≤ p`, and `t > p - window` where there is a window, `t ≥ p - p mod chunk` where there are chunks;
with ALiBi it is additive, [B, H, S, C]. It is made once for every window, of `position_ids`, which becomes an input of
the graph where it was none, and of the constant slots 0 … C - 1: a Range over a dynamic size in its place made the
builder of TensorRT-RTX 1.7 fail.

Where no kernel computes an attention (`written_out`), it is written as two MatMul around a softmax in fp32.

`llmforge::LatentAttention` is written out, too, over one TensorScatter of its latents, the keys and values of one head:
the matrix that makes keys of them is multiplied with the queries, and the one that makes values with the sums.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
import onnx_ir as ir

from llmforge.backends.tensorrt import HEAD_DIMS
from llmforge.ir import graph, interface
from llmforge.ir.builder import GraphBuilder
from llmforge.ir.operators import canonical

# Added to a masked score: exp of the sum is 0, and fp16 holds it.
HIDDEN = -30000.0
_LOWEST = float(np.finfo(np.float32).min)  # in the place of a masked score in fp32


Attention = canonical.Attention | canonical.LatentAttention


def written_out(attention: canonical.Attention) -> str | None:
    """Say why no kernel of TensorRT computes `attention`; None where one does."""
    if attention.softcap:
        return "its scores are capped; the parser does not support softcap"
    if attention.sinks is not None:
        return "it has sinks, which IAttention does not support"
    key, value = graph.width(attention.past_key), graph.width(attention.past_value)
    if key != value:
        return f"its keys are {key} wide and its values {value}; IAttention needs the same width"
    if key not in HEAD_DIMS:
        kernels = f"{HEAD_DIMS.start} to {HEAD_DIMS[-1]}, in steps of {HEAD_DIMS.step}"
        return f"its heads are {key} wide; kernels are for {kernels}"
    return None


@dataclass
class Attentions(GraphBuilder):
    """Rewrites attentions of `model`; comments give shapes: B, S, C = batch, sequence, capacity."""

    capacity: int
    _lengths: ir.Value | None = None
    _masks: dict[tuple[int, int], ir.Value] = field(default_factory=dict)
    _biases: dict[tuple[ir.Value, ir.Value], ir.Value] = field(default_factory=dict)

    def rewrite(self, attention: canonical.Attention) -> str:
        """Replace one `llmforge::Attention`; say what it became."""
        node = attention.node
        keys = self._write(attention, attention.past_key, attention.k)
        values = self._write(attention, attention.past_value, attention.v)
        mask = self._mask(attention.window, attention.chunk)
        if (slopes := attention.alibi_slopes) is not None:
            mask = self._with_slopes(mask, slopes, graph.dtype(attention.q))
        q, reason = self._heads(node, attention.q, attention.num_heads), written_out(attention)
        if reason is None:
            scale = {"scale": attention.scale}
            y = graph.insert(node, "Attention", [q, keys, values, mask], scale, name=node.name)[0]
        else:
            y = self._plain(attention, q, keys, values, mask, biased=attention.alibi_slopes is not None)
        graph.replace_outputs(node, (self._rows(attention, y, graph.width(attention.past_value)), keys, values))
        return "Attention to TensorScatter and Attention" if reason is None else f"Attention written out: {reason}"

    def rewrite_latent(self, layer: canonical.LatentAttention) -> str:
        """Replace one `llmforge::LatentAttention`; say what it became."""
        node, heads, rank, plain = layer.node, layer.num_heads, layer.rank, layer.plain
        one_head = self._add(node, "Unsqueeze", [layer.latent, self._constant("axis_1", [1])])
        latents = self._scatter(layer, layer.past, one_head)
        sizes = self._constant(f"parts_{plain}_{layer.rotary}", [plain, layer.rotary])
        q = self._heads(node, layer.q, heads)
        unturned, turned = graph.insert(node, "Split", [q, sizes], {"axis": 3}, outputs=2)
        of_keys, of_values = self._up_by_head(layer)
        absorbed = self._add(node, "MatMul", [unturned, of_keys])
        q = self._add(node, "Concat", [absorbed, turned], {"axis": 3})  # [B, H, S, L+R]
        ends = [self._constant(f"end_{end}", [end]) for end in (0, rank, 3)]
        values = self._add(node, "Slice", [latents, *ends])
        values.type, values.shape = layer.past.type, ir.Shape([*(graph.dims(layer.past) or ())[:3], rank])
        y = self._plain(layer, q, latents, values, self._mask(layer.window, layer.chunk), biased=False)
        y = self._add(node, "MatMul", [y, of_values])  # [B, H, S, Dv]
        graph.replace_outputs(node, (self._rows(layer, y, layer.value_dim), latents))
        return "LatentAttention to TensorScatter, and attention over latents written out"

    def _write(self, attention: canonical.Attention, past: ir.Value, new: ir.Value) -> ir.Value:
        """Write the step into a cache: [B, kv_heads, C, D]."""
        return self._scatter(attention, past, self._heads(attention.node, new, attention.kv_num_heads))

    def _scatter(self, layer: Attention, past: ir.Value, new: ir.Value) -> ir.Value:
        """Write [B, kv_heads, S, D] into a cache [B, kv_heads, C, D]."""
        if self._lengths is None:
            self._lengths = self._first("Cast", [layer.past_lengths], {"to": int(ir.DataType.INT64)})
        present = self._add(layer.node, "TensorScatter", [past, new, self._lengths], {"axis": -2})
        present.type, present.shape = past.type, past.shape
        return present

    def _heads(self, node: ir.Node, x: ir.Value, heads: int) -> ir.Value:
        """[B, S, H·D] → [B, H, S, D]."""
        split = self._add(node, "Reshape", [x, self._constant(f"heads_{heads}", [0, 0, heads, -1])])
        return self._add(node, "Transpose", [split], {"perm": [0, 2, 1, 3]})

    def _rows(self, layer: Attention, y: ir.Value, width: int) -> ir.Value:
        """[B, H, S, Dv] → [B, S, H·Dv]."""
        y, width = self._add(layer.node, "Transpose", [y], {"perm": [0, 2, 1, 3]}), layer.num_heads * width
        return self._add(layer.node, "Reshape", [y, self._constant(f"rows_{width}", [0, 0, width])])

    def _plain(
        self, attention: Attention, q: ir.Value, keys: ir.Value, values: ir.Value, mask: ir.Value, *, biased: bool
    ) -> ir.Value:
        """Attention in plain operators, [B, H, S, Dv]; the G queries that share a key stand in one axis.

        So no key is repeated. `biased`: the mask is added.
        """
        node, heads, kv_heads = attention.node, attention.num_heads, graph.static(keys)[1]
        dtype, fp32, width = graph.dtype(attention.q), ir.DataType.FLOAT, graph.width(keys)
        grouped = self._constant(f"grouped_{kv_heads}_{width}", [0, kv_heads, -1, width])
        q = self._add(node, "Reshape", [q, grouped])  # [B, kv_heads, G·S, D]
        q = self._add(node, "Mul", [q, self._number(attention.scale, dtype)])
        keys = self._add(node, "Transpose", [keys], {"perm": [0, 1, 3, 2]})
        scores = self._add(node, "MatMul", [q, keys])
        by_head = self._constant(f"by_head_{heads}", [0, heads, -1, self.capacity])
        scores = self._cast(node, self._add(node, "Reshape", [scores, by_head]), dtype, fp32)  # [B, H, S, C]
        if cap := attention.softcap:
            scores = self._add(node, "Div", [scores, self._number(cap, fp32)])
            scores = self._add(node, "Mul", [self._add(node, "Tanh", [scores]), self._number(cap, fp32)])
        if biased:
            scores = self._add(node, "Add", [scores, self._cast(node, mask, dtype, fp32)])
        else:
            scores = self._add(node, "Where", [mask, scores, self._number(_LOWEST, fp32)])
        weights = self._cast(node, self._softmax(attention, scores), fp32, dtype)
        together = self._constant(f"together_{kv_heads}", [0, kv_heads, -1, self.capacity])
        y = self._add(node, "MatMul", [self._add(node, "Reshape", [weights, together]), values])
        width = graph.width(values)
        return self._add(node, "Reshape", [y, self._constant(f"heads_{heads}_{width}", [0, heads, -1, width])])

    def _softmax(self, attention: Attention, scores: ir.Value) -> ir.Value:
        """Over the last axis, fp32; a sink adds exp(sink) to the sum of its head."""
        node, sinks = attention.node, attention.sinks
        if sinks is None:
            return self._add(node, "Softmax", [scores], {"axis": -1})
        column = self._constant(f"column_{attention.num_heads}", [1, -1, 1, 1])
        sink = self._cast(node, self._add(node, "Reshape", [sinks, column]), graph.dtype(sinks), ir.DataType.FLOAT)
        last = self._constant("axis_last", [-1])
        top = self._add(node, "Max", [self._add(node, "ReduceMax", [scores, last]), sink])  # [B, H, S, 1]
        powers = self._add(node, "Exp", [self._add(node, "Sub", [scores, top])])
        beside = self._add(node, "Exp", [self._add(node, "Sub", [sink, top])])
        total = self._add(node, "Add", [self._add(node, "ReduceSum", [powers, last]), beside])
        return self._add(node, "Div", [powers, total])

    def _mask(self, window: int, chunk: int) -> ir.Value:
        """bool [B, 1, S, C]."""
        if (window, chunk) not in self._masks:
            slots = self._constant("slots", np.arange(self.capacity).reshape(1, 1, 1, -1))
            allowed = self._first("LessOrEqual", [slots, self._places])
            if window:
                start = self._first("Sub", [self._places, self._constant(f"window_{window}", window)])
                allowed = self._first("And", [allowed, self._first("Greater", [slots, start])])
            if chunk:
                size = self._constant(f"chunk_{chunk}", chunk)
                begun = self._first("Mul", [self._first("Div", [self._places, size]), size])
                allowed = self._first("And", [allowed, self._first("GreaterOrEqual", [slots, begun])])
            self._masks[window, chunk] = allowed
        return self._masks[window, chunk]

    @cached_property
    def _places(self) -> ir.Value:
        """Positions of the queries, int64 [B, 1, S, 1]."""
        return self._first("Unsqueeze", [position_ids(self.model), self._constant("axes_1_3", [1, 3])])

    def _with_slopes(self, mask: ir.Value, slopes: ir.Value, dtype: ir.DataType) -> ir.Value:
        """Write the mask as a bias in `dtype`, slope·(t - p) where slot t is seen from p: [B, H, S, C]."""
        if (mask, slopes) not in self._biases:
            slots = self._constant("slots", np.arange(self.capacity).reshape(1, 1, 1, -1))
            away = self._first("Cast", [self._first("Sub", [slots, self._places])], {"to": int(ir.DataType.FLOAT)})
            column = self._first("Reshape", [slopes, self._constant("column", [1, -1, 1, 1])])
            bias = self._first("Mul", [column, away])
            bias = self._first("Where", [mask, bias, self._number(HIDDEN, ir.DataType.FLOAT)])
            if dtype != ir.DataType.FLOAT:
                bias = self._first("Cast", [bias], {"to": int(dtype)})
            self._biases[(mask, slopes)] = bias
        return self._biases[(mask, slopes)]

    def _cast(self, node: ir.Node, x: ir.Value, given: ir.DataType, wanted: ir.DataType) -> ir.Value:
        return x if given == wanted else self._add(node, "Cast", [x], {"to": int(wanted)})

    def _number(self, value: float, dtype: ir.DataType) -> ir.Value:
        return self._constant(f"number_{value}_{dtype.name}", np.asarray(value, dtype.numpy()))


def position_ids(model: ir.Model) -> ir.Value:
    """Return the input of positions, int64 [batch, sequence], which is added where nothing read one."""
    inputs = model.graph.inputs
    found = next((value for value in inputs if value.name == interface.POSITION_IDS), None)
    if found is None:
        ids = graph.input_named(model, interface.INPUT_IDS)
        found = ir.Value(name=interface.POSITION_IDS, type=ir.TensorType(ir.DataType.INT64), shape=ids.shape)
        inputs.insert(1, found)
    return found
