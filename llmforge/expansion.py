"""Write `llmforge::` operators as standard ONNX (opset 24), so that any runtime of it runs a canonical graph.

`llmforge::Attention` becomes two TensorScatter, which write the step's keys and values into the cache, and one
Attention over the whole buffer under a boolean mask [batch, 1, sequence, capacity], built once for every window.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import onnx_ir as ir

from llmforge import graph as g
from llmforge import interface

PREFIX = "expand"  # of the names of nodes and constants made here
HIDDEN_SLOT = np.float32(np.finfo(np.float32).min)  # added to a masked score: exp of it is 0, and it makes no NaN


def expand(model: ir.Model) -> ir.Model:
    """Clone `model` with every `llmforge` operator written as standard ONNX; tensors are shared, not copied."""
    clone = model.clone()
    expansion = _Expansion(clone)
    for node in list(clone.graph):
        if (node.domain, node.op_type) == ("llmforge", "Attention"):
            expansion.attention(node)
    g.drop_unused(clone)
    return clone


@dataclass
class _Expansion:
    """One expansion: the graph, and what its attention layers share."""

    model: ir.Model
    _lengths: ir.Value | None = None
    _counted: tuple[ir.Value, ir.Value] | None = None
    _masks: dict[int, ir.Value] = field(default_factory=dict)
    _biases: dict[tuple[int, ir.Value], ir.Value] = field(default_factory=dict)

    def attention(self, node: ir.Node) -> None:
        """Replace one `llmforge::Attention`; comments give shapes: B, S, C = batch, sequence, capacity."""
        q, k, v, past_key, past_value, lengths = (_present(node, index) for index in range(6))
        sinks = node.inputs[6] if len(node.inputs) > 6 else None
        slopes = node.inputs[7] if len(node.inputs) > 7 else None
        numbers = {name: attribute.value for name, attribute in node.attributes.items()}
        heads, kv_heads = numbers["num_heads"], numbers["kv_num_heads"]
        window = numbers["window"]
        write = self._write_indices(lengths)
        keys = self._scatter(node, past_key, self._split(node, k, kv_heads), write)
        values = self._scatter(node, past_value, self._split(node, v, kv_heads), write)
        present_keys, present_values = keys, values
        mask = self._mask(window, past_key, lengths)  # bool [B, 1, S, C]
        if slopes is not None:
            mask = self._with_slopes(mask, slopes, window, past_key, lengths, heads)  # fp32 [B, H, S, C]
        if sinks is not None:
            keys, values, mask = self._with_sinks(node, keys, values, mask, sinks, heads, slopes is not None)
        attributes = {"scale": numbers["scale"], "softcap": numbers["softcap"], "softmax_precision": 1}  # 1: fp32
        y = self._add(node, "Attention", [self._split(node, q, heads), keys, values, mask], attributes)  # [B, H, S, Dv]
        y = self._add(node, "Transpose", [y], {"perm": [0, 2, 1, 3]})
        y = self._add(node, "Reshape", [y, self._constant("rows", [0, 0, -1])])  # [B, S, H·Dv]
        for old, new in zip(node.outputs, (y, present_keys, present_values), strict=True):
            g.supersede(old, new)

    def _split(self, node: ir.Node, x: ir.Value, heads: int) -> ir.Value:
        """[B, S, H·D] → [B, H, S, D]."""
        split = self._add(node, "Reshape", [x, self._constant(f"heads_{heads}", [0, 0, heads, -1])])
        return self._add(node, "Transpose", [split], {"perm": [0, 2, 1, 3]})

    def _scatter(self, node: ir.Node, past: ir.Value, new: ir.Value, write: ir.Value) -> ir.Value:
        """Write [B, kv_heads, S, D] into the slots of [B, kv_heads, C, D] from each row's length on."""
        return self._add(node, "TensorScatter", [past, new, write], {"axis": -2})

    def _write_indices(self, lengths: ir.Value) -> ir.Value:
        """int64 [B], as TensorScatter wants them."""
        if self._lengths is None:
            self._lengths = self._first("Cast", [lengths], {"to": int(ir.DataType.INT64)})
        return self._lengths

    def _mask(self, window: int, past_key: ir.Value, lengths: ir.Value) -> ir.Value:
        """bool [B, 1, S, C]: slot t for the query at position p where t ≤ p, and t > p - window where there is one."""
        if window in self._masks:
            return self._masks[window]
        slots, positions = self._places(past_key, lengths)
        allowed = self._first("LessOrEqual", [slots, positions])
        if window:
            start = self._first("Sub", [positions, self._constant(f"window_{window}", window)])
            allowed = self._first("And", [allowed, self._first("Greater", [slots, start])])
        self._masks[window] = self._first("Unsqueeze", [allowed, self._constant("axis_1", [1])])
        return self._masks[window]

    def _places(self, past_key: ir.Value, lengths: ir.Value) -> tuple[ir.Value, ir.Value]:
        """Slots int64 [C], against the positions of queries [B, S, 1]."""
        if self._counted is None:
            ids = next(value for value in self.model.graph.inputs if value.name == interface.INPUT_IDS)
            zero, one = self._constant("zero", 0), self._constant("one", 1)

            def count(size: ir.Value, axis: int) -> ir.Value:
                """0, 1, … up to the size of `axis`."""
                extent = self._first("Shape", [size], {"start": axis, "end": axis + 1})
                return self._first("Range", [zero, self._first("Squeeze", [extent]), one])

            rows = self._first("Unsqueeze", [self._write_indices(lengths), self._constant("axes_1_2", [1, 2])])
            within = self._first("Unsqueeze", [count(ids, 1), self._constant("axis_1", [1])])
            self._counted = (count(past_key, 2), self._first("Add", [rows, within]))
        return self._counted

    def _with_slopes(
        self, mask: ir.Value, slopes: ir.Value, window: int, past_key: ir.Value, lengths: ir.Value, heads: int
    ) -> ir.Value:
        """Write the mask as a bias, slope·(slot - position) where a slot is seen; layers of one window share it."""
        if (window, slopes) not in self._biases:
            slots, positions = self._places(past_key, lengths)
            away = self._first("Cast", [self._first("Sub", [slots, positions])], {"to": int(ir.DataType.FLOAT)})
            away = self._first("Unsqueeze", [away, self._constant("axis_1", [1])])  # [B, 1, S, C]
            column = self._first("Reshape", [slopes, self._constant(f"column_{heads}", [1, heads, 1, 1])])
            bias = self._first("Mul", [column, away])
            hidden = self._constant("hidden", HIDDEN_SLOT)
            self._biases[(window, slopes)] = self._first("Where", [mask, bias, hidden])
        return self._biases[(window, slopes)]

    def _with_sinks(
        self, node: ir.Node, keys: ir.Value, values: ir.Value, mask: ir.Value, sinks: ir.Value, heads: int, biased: bool
    ) -> tuple[ir.Value, ir.Value, ir.Value]:
        """Add one slot of zeros, whose score is 0, and bias it by each head's sink: exact, and it adds no value."""

        def grow(x: ir.Value) -> ir.Value:
            return self._add(node, "Pad", [x, self._constant("one_slot", [0, 0, 0, 0, 0, 0, 1, 0])])

        by_head = mask
        if not biased:
            none, hidden = self._constant("visible", np.float32(0)), self._constant("hidden", HIDDEN_SLOT)
            bias = self._add(node, "Where", [mask, none, hidden])  # [B, 1, S, C]
            by_head = self._add(node, "Expand", [bias, self._constant(f"by_head_{heads}", [1, heads, 1, 1])])
        column = self._add(node, "Reshape", [sinks, self._constant(f"column_{heads}", [1, heads, 1, 1])])
        start, end = self._constant("slice_0", [0]), self._constant("slice_1", [1])
        like = self._add(node, "Slice", [by_head, start, end, self._constant("axis_3", [3])])  # [B, H, S, 1]
        shape = self._add(node, "Shape", [like])
        sink = self._add(node, "Expand", [column, shape])
        return grow(keys), grow(values), self._add(node, "Concat", [by_head, sink], {"axis": 3})

    def _constant(self, name: str, value: int | list[int] | np.generic) -> ir.Value:
        array = np.array(value, np.int64) if isinstance(value, int | list) else np.asarray(value)
        return g.initializer(self.model, f"{PREFIX}.{name}", array)

    def _add(
        self, node: ir.Node, op_type: str, inputs: list[ir.Value], attributes: dict[str, g.Attribute] | None = None
    ) -> ir.Value:
        return g.insert(node, op_type, list(inputs), attributes)[0]

    def _first(
        self, op_type: str, inputs: list[ir.Value], attributes: dict[str, g.Attribute] | None = None
    ) -> ir.Value:
        """Add a node that every layer may read: behind the last of its inputs, else at the head of the graph."""
        producers = [producer for value in inputs if (producer := value.producer()) is not None]
        node = ir.Node("", op_type, inputs, ir.convenience.convert_attributes(attributes or {}))
        if producers:
            order = {member: index for index, member in enumerate(self.model.graph)}
            self.model.graph.insert_after(max(producers, key=order.__getitem__), node)
        else:
            self.model.graph.insert_before(self.model.graph[0], node)
        return node.outputs[0]


def _present(node: ir.Node, index: int) -> ir.Value:
    value = node.inputs[index]
    assert value is not None, f"{node.name}: input {index} of Attention is absent"
    return value
