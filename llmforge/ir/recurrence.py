"""Layers that carry a state of fixed size from token to token, written in standard ONNX.

`llmforge::CausalConv` becomes one depthwise Conv over the state and the step's tokens; `llmforge::LinearAttention`
becomes a Scan over tokens, in which a padded token has a decay of exp(0) and an update rate of 0 (a value of 0, where
the rule has no rate) and so changes nothing. For ONNX Runtime there is a kernel of the same rules, which needs the same
treatment of padding.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from llmforge.ir import graph, interface
from llmforge.ir.builder import GraphBuilder, shared
from llmforge.ir.operators import canonical, contrib


@dataclass
class Recurrence(GraphBuilder):
    """The expansion of layers with a state; comments give shapes: B, S = batch, sequence."""

    def causal_conv(self, layer: canonical.CausalConv) -> None:
        """Replace one `llmforge::CausalConv`: C channels, a kernel of K taps."""
        node, bias = layer.node, layer.bias
        channels, _, taps = graph.static(layer.weight)
        start = self._start(layer, 3)
        whole = self._add(node, "Concat", [start, layer.x], {"axis": 1})  # [B, K-1+S, C]
        turned = self._add(node, "Transpose", [whole], {"perm": [0, 2, 1]})
        inputs = [turned, layer.weight] if bias is None else [turned, layer.weight, bias]
        y = self._add(node, "Conv", inputs, {"group": channels, "kernel_shape": [taps]})  # [B, C, S]
        if layer.activation == "silu":
            y = self._add(node, "Mul", [y, self._add(node, "Sigmoid", [y])])
        y = self._add(node, "Transpose", [y], {"perm": [0, 2, 1]})
        # The last K-1 rows that are real stand in rows lengths[b] … lengths[b] + K-2 of `whole`.
        column = self._column(layer.lengths)
        rows = self._add(node, "Add", [column, self._constant(f"taps_{taps - 1}", [*range(taps - 1)])])
        rows = self._add(node, "Unsqueeze", [rows, self._constant("axis_2", [2])])  # [B, K-1, 1]
        present = self._add(node, "GatherND", [whole, rows], {"batch_dims": 1})
        graph.replace_outputs(node, (y, present))

    def linear_attention(self, layer: canonical.LinearAttention) -> None:
        """Replace one `llmforge::LinearAttention`: H heads of values, D channels of keys and Dv of values."""
        node = layer.node
        _, heads, width, value_width = graph.static(layer.past)
        start = self._start(layer, 4)
        decay, rate, value = self._without_padding(layer)
        kept = self._add(node, "Exp", [decay])  # [B, S, H], or [B, S, H·D]
        by_channel = _width(layer.decay) != heads
        if by_channel:
            kept = self._by_head(node, kept, heads, heads, width)
        scale = self._constant(f"scale_{layer.scale}", np.float32(layer.scale))
        scaled = self._add(node, "Mul", [layer.q, scale])
        query, key = (self._by_head(node, x, layer.num_heads, heads, width) for x in (scaled, layer.k))
        value = self._add(node, "Reshape", [value, self._constant(f"split_{heads}", [0, 0, heads, -1])])
        scanned = [query, key, value, kept, *([] if rate is None else [rate])]
        count = len(scanned)
        body = _one_token(heads, width, value_width, by_channel=by_channel, delta=rate is not None)
        attributes = [
            ir.AttrGraph("body", body),
            ir.AttrInt64("num_scan_inputs", count),
            ir.AttrInt64s("scan_input_axes", [1] * count),
            ir.AttrInt64s("scan_output_axes", [1]),
        ]
        scan = ir.Node("", "Scan", [start, *scanned], attributes, num_outputs=2)
        self.model.graph.insert_before(node, scan)
        present, y = scan.outputs
        y = self._add(node, "Reshape", [y, self._constant("rows", [0, 0, -1])])  # [B, S, H·Dv]
        graph.replace_outputs(node, (y, present))

    def call_kernel(self, layer: canonical.LinearAttention) -> None:
        """Replace one `llmforge::LinearAttention` by ONNX Runtime's own, which knows no padding and no fresh rows."""
        start = self._start(layer, 4)
        decay, beta, value = self._without_padding(layer)
        _, heads, _, _ = graph.static(layer.past)
        own = contrib.ContribLinearAttention.insert(
            layer.node,
            {"query": layer.q, "key": layer.k, "value": value, "past_state": start, "decay": decay, "beta": beta},
            {
                "q_num_heads": layer.num_heads,
                "kv_num_heads": heads,
                "scale": layer.scale,
                "update_rule": layer.update_rule,
            },
            outputs=2,
            name=layer.name,
        )
        layer.node.name = f"{layer.name}.replaced"
        graph.replace_outputs(layer.node, own.node.outputs)

    def _without_padding(self, layer: canonical.LinearAttention) -> tuple[ir.Value, ir.Value | None, ir.Value]:
        """Let a padded token keep the state as it is: decay exp(0), and rate or else value 0."""

        def where_real(x: ir.Value) -> ir.Value:
            return self._add(layer.node, "Where", [self._real(layer.lengths), x, self._zero(x)])

        decay = where_real(layer.decay)
        if layer.beta is None:
            return decay, None, where_real(layer.v)
        return decay, where_real(self._rate(layer.node, layer.beta)), layer.v

    def _rate(self, node: ir.Node, beta: ir.Value) -> ir.Value:
        """Write a rate that a Sigmoid makes as 1 / (1 + exp(-x)).

        ONNX Runtime's Sigmoid is off by 1e-7 of 1, whatever its result. A rate of 1e-6 would be off by a tenth, and so
        would what the norm behind the layer makes of an output that is as small, as of the first tokens of a text.
        """
        made = beta.producer()
        if made is None or (made.domain, made.op_type) != ("", "Sigmoid"):
            return beta
        x = made.inputs[0]
        assert x is not None
        above = self._add(
            node, "Add", [self._add(node, "Exp", [self._add(node, "Neg", [x])]), self._scalar("one", 1, x)]
        )
        return self._add(node, "Reciprocal", [above])

    def _start(self, layer: canonical.CausalConv | canonical.LinearAttention, rank: int) -> ir.Value:
        """Take the state where a row has a past; else zeros, whatever the buffer holds."""
        some = self._some(layer.past_lengths, rank)
        return self._add(layer.node, "Where", [some, layer.past, self._zero(layer.past)])

    @shared
    def _some(self, past_lengths: ir.Value, rank: int) -> ir.Value:
        """bool [B, 1, …] of `rank` axes: the rows that have a past."""
        some = self._first("Greater", [past_lengths, self._constant("none", np.int32(0))])
        return self._first("Unsqueeze", [some, self._constant(f"axes_to_{rank - 1}", [*range(1, rank)])])

    def _zero(self, like: ir.Value) -> ir.Value:
        """0, a scalar of the dtype of `like`."""
        return self._scalar("zero", 0, like)

    def _scalar(self, name: str, number: int, like: ir.Value) -> ir.Value:
        dtype = like.dtype or ir.DataType.FLOAT
        return self._constant(f"{name}_{dtype.name.lower()}", dtype.numpy().type(number))

    @shared
    def _column(self, lengths: ir.Value) -> ir.Value:
        """int64 [B, 1]: the real tokens of each row."""
        counts = self._first("Cast", [lengths], {"to": int(ir.DataType.INT64)})
        return self._first("Unsqueeze", [counts, self._constant("axis_1", [1])])

    @shared
    def _real(self, lengths: ir.Value) -> ir.Value:
        """bool [B, S, 1]: the tokens that are no padding."""
        steps = self._count_along(graph.input_named(self.model, interface.INPUT_IDS), 1)
        real = self._first("Less", [steps, self._column(lengths)])
        return self._first("Unsqueeze", [real, self._constant("axis_2", [2])])

    def _by_head(self, node: ir.Node, x: ir.Value, num_heads: int, heads: int, width: int) -> ir.Value:
        """[B, S, num_heads·D] → [B, S, H, D]; each of `num_heads` heads serves H / num_heads neighbours."""
        if num_heads == heads:
            return self._add(node, "Reshape", [x, self._constant(f"split_{heads}", [0, 0, heads, -1])])
        shape = [0, 0, num_heads, 1, width]
        x = self._add(node, "Reshape", [x, self._constant(f"apart_{num_heads}_{width}", shape)])
        times = heads // num_heads
        x = self._add(node, "Expand", [x, self._constant(f"repeat_{times}", [1, 1, 1, times, 1])])
        return self._add(node, "Reshape", [x, self._constant(f"heads_{heads}_{width}", [0, 0, heads, width])])


def _width(x: ir.Value) -> int:
    width = (graph.dims(x) or (0,))[-1]
    assert isinstance(width, int), "the frontend knows the width of a decay"
    return width


def _one_token(heads: int, width: int, value_width: int, *, by_channel: bool, delta: bool) -> ir.Graph:
    """Make the body of the Scan, for one token of all rows.

    state [B, H, D, Dv], q, k [B, H, D], v [B, H, Dv], kept [B, H] or [B, H, D], rate [B, H] if `delta` → state, y
    [B, H, Dv].
    """

    def tensor(name: str, *dims: int | str) -> ir.Value:
        return ir.Value(name=name, type=ir.TensorType(ir.DataType.FLOAT), shape=ir.Shape(["batch", *dims]))

    state = tensor("state", heads, width, value_width)
    q, k, v = tensor("q", heads, width), tensor("k", heads, width), tensor("v", heads, value_width)
    kept = tensor("kept", heads, width) if by_channel else tensor("kept", heads)
    rate = tensor("rate", heads)
    nodes: list[ir.Node] = []

    def add(op_type: str, inputs: list[ir.Value], name: str) -> ir.Value:
        nodes.append(ir.Node("", op_type, inputs, outputs=[ir.Value(name=name)]))
        return nodes[-1].outputs[0]

    def constant(name: str, axes: list[int]) -> ir.Value:
        value = ir.Value(name=name)
        attributes = [ir.AttrTensor("value", ir.Tensor(np.array(axes, np.int64)))]
        nodes.append(ir.Node("", "Constant", [], attributes, outputs=[value]))
        return value

    row, column, cell = constant("row", [2]), constant("column", [3]), constant("cell", [2, 3])
    left = add("Mul", [state, add("Unsqueeze", [kept, column if by_channel else cell], "kept_cell")], "left")
    learned = add("Unsqueeze", [v, row], "value_row")  # [B, H, 1, Dv]
    if delta:
        key = add("Unsqueeze", [k, row], "key_row")  # [B, H, 1, D]
        known = add("MatMul", [key, left], "known")  # [B, H, 1, Dv]: what the state holds for the key already
        missing = add("Sub", [learned, known], "missing")
        learned = add("Mul", [missing, add("Unsqueeze", [rate, cell], "rate_cell")], "learned")
    update = add("Mul", [add("Unsqueeze", [k, column], "key_column"), learned], "update")  # [B, H, D, Dv]
    after = add("Add", [left, update], "after")
    y = add("Squeeze", [add("MatMul", [add("Unsqueeze", [q, row], "query_row"), after], "read"), row], "y")
    for value, like in ((after, state), (y, v)):
        value.type, value.shape = like.type, like.shape
    inputs = [state, q, k, v, kept, *([rate] if delta else [])]
    return ir.Graph(inputs, [after, y], nodes=nodes, name="one_token", opset_imports={"": 24})
