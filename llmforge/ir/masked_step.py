"""The operators that read `attention_mask` in place of lengths (docs/dialect.md), as standard ONNX.

A runtime that feeds a mask pads where it likes: onnxruntime-genai on the right, transformers on the left.
GroupQueryAttention knows padding on the right alone, so the tokens of a row are moved to its beginning. All of it is
integers, a few nodes for the whole graph.
"""

from __future__ import annotations

from dataclasses import dataclass

import onnx_ir as ir

from llmforge.ir import graph
from llmforge.ir.builder import GraphBuilder, shared
from llmforge.ir.operators.canonical import CacheLengths, RowPlaces, TokenOrder


@dataclass
class MaskedStep(GraphBuilder):
    """The expansion of `CacheLengths`, `TokenOrder` and `RowPlaces`; sizes and sums are shared.

    Comments give shapes: B, S, T = batch, tokens of the step, slots that the mask covers; R rows.
    """

    def cache_lengths(self, lengths: CacheLengths) -> None:
        """Replace `CacheLengths`: int64 [B, T] → int32 [B], the ones of each row less 1; int32 scalar T."""
        node, mask = lengths.node, lengths.attention_mask
        last = self._add(node, "Sub", [self._count(mask), self._constant("one", 1)])  # [B, 1]
        last = self._add(node, "Squeeze", [last, self._constant("axis_1", [1])])
        made = (self._add(node, "Cast", [new], {"to": int(ir.DataType.INT32)}) for new in (last, self._tokens(mask)))
        graph.replace_outputs(node, made)

    def token_order(self, order: TokenOrder) -> None:
        """Replace `TokenOrder`: (mask [B, T], ids [B, S]) → int64 [B, S], and its inverse where something reads it."""
        node, mask, ids = order.node, order.attention_mask, order.input_ids
        size, zero = self._size(ids), self._constant("zero", 0)
        first = self._add(node, "ArgMax", [mask], {"axis": 1, "keepdims": 1})  # [B, 1]
        alone = self._add(node, "Equal", [size, self._size(mask)])  # the mask covers this step and no past
        padding = self._add(node, "Where", [alone, first, zero])  # [B, 1]
        steps = self._add(node, "Range", [zero, self._tokens(ids), self._constant("one", 1)])  # [S]
        for old, turn in zip(node.outputs, ("Add", "Sub"), strict=False):
            if old.uses():
                moved = self._add(node, turn, [steps, padding])
                graph.replace_value(old, self._add(node, "Mod", [moved, size]))

    def row_places(self, places: RowPlaces) -> None:
        """Replace `RowPlaces`: (rows [R], mask [B, T], ids [B, S]) → int64 [B, R]."""
        node, mask = places.node, places.attention_mask
        # [B, 1]; at least 1, for a row of padding alone: its remainder would be a division by 0.
        tokens = self._add(node, "Clip", [self._count(mask), self._constant("one", 1), self._tokens(places.input_ids)])
        graph.replace_value(places.output, self._add(node, "Mod", [places.logits_rows, tokens]))

    @shared
    def _count(self, mask: ir.Value) -> ir.Value:
        """Sum the ones of each row: [B, T] → [B, 1]."""
        return self._first("ReduceSum", [mask, self._constant("axis_1", [1])], {"keepdims": 1})

    @shared
    def _size(self, x: ir.Value) -> ir.Value:
        """Read the size of axis 1: [1]."""
        return self._first("Shape", [x], {"start": 1, "end": 2})

    @shared
    def _tokens(self, x: ir.Value) -> ir.Value:
        """Read the size of axis 1 as a scalar."""
        return self._first("Squeeze", [self._size(x)])
