"""Write what encoders compute with several tokens as standard ONNX: attention of sequences to themselves, and pooling.

`llmforge::EncoderAttention` becomes one Attention over all tokens, under a boolean mask [T, T] that keeps sequences
apart and is built once for every reach. That takes quadratic memory of all tokens together: such a graph reads one
sequence at a time (`llmforge.backends.onnxruntime.encoder`). `llmforge::PoolSequences` becomes a Gather, a
ScatterND, or a product with a matrix of means, `llmforge::SequenceSoftmax` a Softmax under the same mask.
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from llmforge.ir import graph, interface
from llmforge.ir.builder import GraphBuilder, shared
from llmforge.ir.operators import canonical


class EncoderExpansion(GraphBuilder):
    """The expansion of an encoder. Comments give shapes: T tokens, of N sequences."""

    def attention(self, layer: canonical.EncoderAttention) -> None:
        """Replace one `llmforge::EncoderAttention`."""
        attributes = {
            "q_num_heads": layer.num_heads,
            "kv_num_heads": layer.kv_num_heads,
            "scale": layer.scale,
            "softcap": layer.softcap,
            "softmax_precision": 1,  # fp32
        }
        mask = self._mask(layer.left, layer.right, layer.sequence_starts)
        y = self._add(layer.node, "Attention", [layer.q, layer.k, layer.v, mask], attributes)
        graph.replace_outputs(layer.node, [y])

    def softmax(self, layer: canonical.SequenceSoftmax) -> None:
        """Replace one `llmforge::SequenceSoftmax`: a key of another sequence gets the lowest score that there is."""
        dtype = layer.x.dtype or ir.DataType.FLOAT
        lowest = self._constant("lowest", np.array(-np.inf, dtype.numpy()))
        own = self._add(layer.node, "Where", [self._mask(-1, -1, layer.sequence_starts), layer.x, lowest])
        graph.replace_outputs(layer.node, [self._add(layer.node, "Softmax", [own], {"axis": -1})])

    def pool(self, pooling: canonical.PoolSequences) -> None:
        """Replace one `llmforge::PoolSequences`: x [1, T, H] → [N, H]."""
        node, starts = pooling.node, pooling.sequence_starts
        x = self._add(node, "Squeeze", [pooling.x, self._constant("axis_0", [0])])
        if pooling.mode in ("cls", "last"):
            rows = self._starts(starts) if pooling.mode == "cls" else self._last(starts)
            y = self._add(node, "Gather", [x, rows], {"axis": 0})
        elif pooling.mode == "max":
            first = self._add(node, "Gather", [x, self._starts(starts)], {"axis": 0})
            number = self._first("Unsqueeze", [self._numbers(starts), self._constant("axis_1", [1])])
            y = self._add(node, "ScatterND", [first, number, x], {"reduction": "max"})
        else:
            y = self._add(node, "MatMul", [self._means(pooling.mode, starts, pooling.x.dtype or ir.DataType.FLOAT), x])
        graph.replace_outputs(node, [y])

    @shared
    def _places(self) -> ir.Value:
        """Number the tokens: int64 [T]."""
        return self._count_along(graph.input_named(self.model, interface.INPUT_IDS), 1)

    @shared
    def _starts(self, starts: ir.Value) -> ir.Value:
        """Where sequences begin: int64 [N]."""
        return self._part(starts, 0, -1)

    @shared
    def _ends(self, starts: ir.Value) -> ir.Value:
        """Where they end: int64 [N]."""
        return self._part(starts, 1, np.iinfo(np.int32).max)

    @shared
    def _last(self, starts: ir.Value) -> ir.Value:
        return self._first("Sub", [self._ends(starts), self._constant("one", 1)])

    def _part(self, starts: ir.Value, first: int, last: int) -> ir.Value:
        ends = [self._constant(f"at_{place}", [place]) for place in (first, last, 0)]
        return self._first("Slice", [self._first("Cast", [starts], {"to": int(ir.DataType.INT64)}), *ends])

    @shared
    def _within(self, starts: ir.Value) -> ir.Value:
        """Say which tokens are of which sequence: bool [N, T]."""
        column = self._constant("axis_1", [1])
        first, end = (self._first("Unsqueeze", [x, column]) for x in (self._starts(starts), self._ends(starts)))
        places = self._places()
        return self._first("And", [self._first("GreaterOrEqual", [places, first]), self._first("Less", [places, end])])

    @shared
    def _means(self, mode: str, starts: ir.Value, dtype: ir.DataType) -> ir.Value:
        """A row for each sequence, where its tokens are what each counts in the mean: [N, T]."""
        column = self._constant("axis_1", [1])
        weights = self._first("Cast", [self._within(starts)], {"to": int(dtype)})
        if mode == "weightedmean":
            begin = self._first("Unsqueeze", [self._starts(starts), column])
            place = self._first("Add", [self._first("Sub", [self._places(), begin]), self._constant("one", 1)])
            weights = self._first("Mul", [weights, self._first("Cast", [place], {"to": int(dtype)})])
        divisor = self._first("ReduceSum", [weights, column], {"keepdims": 1})
        if mode == "mean_sqrt_len":
            divisor = self._first("Sqrt", [divisor])
        return self._first("Div", [weights, divisor])

    @shared
    def _numbers(self, starts: ir.Value) -> ir.Value:
        """Say of each token of which sequence it is: int64 [T]."""
        column = self._constant("axis_1", [1])
        behind = self._first(
            "GreaterOrEqual", [self._first("Unsqueeze", [self._places(), column]), self._ends(starts)]
        )  # [T, N]
        number = self._first("Cast", [behind], {"to": int(ir.DataType.INT64)})
        return self._first("ReduceSum", [number, column], {"keepdims": 0})

    @shared
    def _mask(self, left: int, right: int, starts: ir.Value) -> ir.Value:
        """Say which keys a query sees: bool [T, T]."""
        column, row = self._constant("axis_1", [1]), self._constant("axis_0", [0])
        places, number = self._places(), self._numbers(starts)
        of_query, of_key = self._first("Unsqueeze", [number, column]), self._first("Unsqueeze", [number, row])
        seen = self._first("Equal", [of_query, of_key])
        if left >= 0 or right >= 0:
            away = self._first(
                "Sub", [self._first("Unsqueeze", [places, column]), self._first("Unsqueeze", [places, row])]
            )  # how far a key stands before its query
            if left >= 0:
                near = self._first("LessOrEqual", [away, self._constant(f"left_{left}", left)])
                seen = self._first("And", [seen, near])
            if right >= 0:
                near = self._first("GreaterOrEqual", [away, self._constant(f"right_{right}", -right)])
                seen = self._first("And", [seen, near])
        return seen
