"""Attention of the canonical dialect as TensorRT's parser takes it.

    y, present_key, present_value = llmforge::Attention(q, k, v, past_key, past_value, past_lengths)
    becomes
    present_key   = TensorScatter(past_key, heads(k), past_lengths)      an IKVCacheUpdateLayer, in place
    present_value = TensorScatter(past_value, heads(v), past_lengths)
    y = rows(Attention(heads(q), present_key, present_value, mask))      an IAttention, which one kernel computes

`heads` is [B, S, H·D] → [B, H, S, D] and `rows` its inverse. The mask is bool [B, 1, S, C]: slot `t` for the query at
position `p` where `t ≤ p`, and `t > p - window` where there is a window; with ALiBi it is additive, [B, H, S, C]. It is
made once for every window, of `position_ids`, which becomes an input of the graph where it was none, and of the
constant slots 0 … C - 1: a Range over a dynamic size in its place made the builder of TensorRT-RTX 1.7 fail.

Where no kernel computes an attention (`written_out`), it is written as two MatMul around a softmax in fp32.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import onnx_ir as ir

from llmforge.ir import graph as g
from llmforge.ir import interface
from llmforge.ir.builder import Builder

# Head dimensions for which TensorRT-RTX 1.7 has a kernel: 16, 24, 32, 48, 64, 80, 96, 128, 192 and 256 built on SM89;
# 8, 512 and 576 did not.
SMALLEST_HEAD, LARGEST_HEAD, HEAD_STEP = 16, 256, 8
# Added to a masked score: exp of the sum is 0, and fp16 holds it.
HIDDEN = -30000.0
_LOWEST = float(np.finfo(np.float32).min)  # in the place of a masked score in fp32
_SINKS, _SLOPES = 6, 7  # inputs of llmforge::Attention that may be left out


def written_out(node: ir.Node) -> str | None:
    """Say why no kernel of TensorRT computes the `llmforge::Attention` `node`; None where one does."""
    if node.attributes.get_float("softcap"):
        return "its scores are capped, and the parser takes no softcap"
    if g.operand(node, _SINKS) is not None:
        return "it has sinks, which IAttention has not"
    key, value = (_last_dim(_given(node, index)) for index in (3, 4))
    if key != value:
        return f"its keys are {key} wide and its values {value}; IAttention wants one width"
    if not SMALLEST_HEAD <= key <= LARGEST_HEAD or key % HEAD_STEP:
        return f"its heads are {key} wide; kernels are for {SMALLEST_HEAD} to {LARGEST_HEAD}, in steps of {HEAD_STEP}"
    return None


@dataclass
class Attentions(Builder):
    """Rewrites attentions of `model`; comments give shapes: B, S, C = batch, sequence, capacity."""

    capacity: int
    _write: ir.Value | None = None
    _own: ir.Value | None = None
    _masks: dict[int, ir.Value] = field(default_factory=dict)
    _biases: dict[tuple[ir.Value, ir.Value], ir.Value] = field(default_factory=dict)

    def rewrite(self, node: ir.Node) -> str:
        """Replace one `llmforge::Attention`; say what it became."""
        _, k, v, past_key, past_value, lengths = (_given(node, index) for index in range(6))
        kv_heads = node.attributes.get_int("kv_num_heads")
        if self._write is None:
            self._write = self._first("Cast", [lengths], {"to": int(ir.DataType.INT64)})
        keys, values = (
            self._add(node, "TensorScatter", [past, self._heads(node, new, kv_heads), self._write], {"axis": -2})
            for past, new in ((past_key, k), (past_value, v))
        )
        for present, past in ((keys, past_key), (values, past_value)):
            present.type, present.shape = past.type, past.shape  # [B, kv_heads, C, D]
        mask = self._mask(node.attributes.get_int("window"))
        if (slopes := g.operand(node, _SLOPES)) is not None:
            mask = self._with_slopes(mask, slopes, _dtype(node))
        reason = written_out(node)
        y = self._fused(node, keys, values, mask) if reason is None else self._plain(node, keys, values, mask)
        y = self._add(node, "Transpose", [y], {"perm": [0, 2, 1, 3]})
        width = node.attributes.get_int("num_heads") * _last_dim(past_value)
        y = self._add(node, "Reshape", [y, self._constant(f"rows_{width}", [0, 0, width])])  # [B, S, H·Dv]
        for old, new in zip(node.outputs, (y, keys, values), strict=True):
            g.replace_value(old, new)
        return "Attention to TensorScatter and Attention" if reason is None else f"Attention written out: {reason}"

    def _heads(self, node: ir.Node, x: ir.Value, heads: int) -> ir.Value:
        """[B, S, H·D] → [B, H, S, D]."""
        split = self._add(node, "Reshape", [x, self._constant(f"heads_{heads}", [0, 0, heads, -1])])
        return self._add(node, "Transpose", [split], {"perm": [0, 2, 1, 3]})

    def _fused(self, node: ir.Node, keys: ir.Value, values: ir.Value, mask: ir.Value) -> ir.Value:
        """One kernel: [B, H, S, Dv]."""
        q = self._heads(node, _given(node, 0), node.attributes.get_int("num_heads"))
        scale = {"scale": node.attributes.get_float("scale")}
        return g.insert(node, "Attention", [q, keys, values, mask], scale, name=node.name)[0]

    def _plain(self, node: ir.Node, keys: ir.Value, values: ir.Value, mask: ir.Value) -> ir.Value:
        """The same in plain operators; the G queries that share a key stand in one axis, and no key is repeated."""
        heads, kv_heads = (node.attributes.get_int(name) for name in ("num_heads", "kv_num_heads"))
        dtype, fp32 = _dtype(node), ir.DataType.FLOAT
        q = self._heads(node, _given(node, 0), heads)
        grouped = self._constant(f"grouped_{kv_heads}_{_last_dim(keys)}", [0, kv_heads, -1, _last_dim(keys)])
        q = self._add(node, "Reshape", [q, grouped])  # [B, kv_heads, G·S, D]
        q = self._add(node, "Mul", [q, self._number(node.attributes.get_float("scale"), dtype)])
        keys = self._add(node, "Transpose", [keys], {"perm": [0, 1, 3, 2]})
        scores = self._add(node, "MatMul", [q, keys])
        by_head = self._constant(f"by_head_{heads}", [0, heads, -1, self.capacity])
        scores = self._cast(node, self._add(node, "Reshape", [scores, by_head]), dtype, fp32)  # [B, H, S, C]
        if cap := node.attributes.get_float("softcap"):
            scores = self._add(node, "Div", [scores, self._number(cap, fp32)])
            scores = self._add(node, "Mul", [self._add(node, "Tanh", [scores]), self._number(cap, fp32)])
        if g.operand(node, _SLOPES) is not None:
            scores = self._add(node, "Add", [scores, self._cast(node, mask, dtype, fp32)])
        else:
            scores = self._add(node, "Where", [mask, scores, self._number(_LOWEST, fp32)])
        weights = self._cast(node, self._softmax(node, scores), fp32, dtype)
        together = self._constant(f"together_{kv_heads}", [0, kv_heads, -1, self.capacity])
        y = self._add(node, "MatMul", [self._add(node, "Reshape", [weights, together]), values])
        return self._add(
            node,
            "Reshape",
            [y, self._constant(f"heads_{heads}_{_last_dim(values)}", [0, heads, -1, _last_dim(values)])],
        )

    def _softmax(self, node: ir.Node, scores: ir.Value) -> ir.Value:
        """Over the last axis, fp32; a sink adds exp(sink) to the sum of its head."""
        sinks = g.operand(node, _SINKS)
        if sinks is None:
            return self._add(node, "Softmax", [scores], {"axis": -1})
        column = self._constant(f"column_{node.attributes.get_int('num_heads')}", [1, -1, 1, 1])
        sink = self._cast(node, self._add(node, "Reshape", [sinks, column]), _dtype_of(sinks), ir.DataType.FLOAT)
        last = self._constant("axis_last", [-1])
        top = self._add(node, "Max", [self._add(node, "ReduceMax", [scores, last]), sink])  # [B, H, S, 1]
        powers = self._add(node, "Exp", [self._add(node, "Sub", [scores, top])])
        beside = self._add(node, "Exp", [self._add(node, "Sub", [sink, top])])
        total = self._add(node, "Add", [self._add(node, "ReduceSum", [powers, last]), beside])
        return self._add(node, "Div", [powers, total])

    def _mask(self, window: int) -> ir.Value:
        """bool [B, 1, S, C]."""
        if window not in self._masks:
            slots = self._constant("slots", np.arange(self.capacity).reshape(1, 1, 1, -1))
            allowed = self._first("LessOrEqual", [slots, self._places()])
            if window:
                start = self._first("Sub", [self._places(), self._constant(f"window_{window}", window)])
                allowed = self._first("And", [allowed, self._first("Greater", [slots, start])])
            self._masks[window] = allowed
        return self._masks[window]

    def _places(self) -> ir.Value:
        """Positions of the queries, int64 [B, 1, S, 1]."""
        if self._own is None:
            positions = position_ids(self.model)
            self._own = self._first("Unsqueeze", [positions, self._constant("axes_1_3", [1, 3])])
        return self._own

    def _with_slopes(self, mask: ir.Value, slopes: ir.Value, dtype: ir.DataType) -> ir.Value:
        """Write the mask as a bias in `dtype`, slope·(t - p) where slot t is seen from p: [B, H, S, C]."""
        if (mask, slopes) not in self._biases:
            slots = self._constant("slots", np.arange(self.capacity).reshape(1, 1, 1, -1))
            away = self._first("Cast", [self._first("Sub", [slots, self._places()])], {"to": int(ir.DataType.FLOAT)})
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
    ids = next(value for value in inputs if value.name == interface.INPUT_IDS)
    found = next((value for value in inputs if value.name == interface.POSITION_IDS), None)
    if found is None:
        found = ir.Value(name=interface.POSITION_IDS, type=ir.TensorType(ir.DataType.INT64), shape=ids.shape)
        inputs.insert(1, found)
    return found


def _given(node: ir.Node, index: int) -> ir.Value:
    value = node.inputs[index]
    assert value is not None, f"{node.name}: input {index} of Attention is absent"
    return value


def _dtype(node: ir.Node) -> ir.DataType:
    """Return what an attention computes in."""
    return _dtype_of(_given(node, 0))


def _dtype_of(value: ir.Value) -> ir.DataType:
    assert value.dtype is not None, f"{value.name} has no dtype"
    return value.dtype


def _last_dim(value: ir.Value) -> int:
    dims = g.dims(value)
    assert dims, f"{value.name} has no shape"
    assert isinstance(dims[-1], int), f"{value.name} has a last axis of no known size"
    return dims[-1]
