"""Write `llmforge::` operators as standard ONNX (opset 24), so that any runtime of it runs a canonical graph.

`llmforge::Attention` becomes two TensorScatter, which write the step's keys and values into the cache, and one
Attention over the whole buffer under a boolean mask [batch, 1, sequence, capacity], built once for every window, or an
additive one by head, where scores have a bias by position.
`llmforge::LatentAttention` becomes one TensorScatter, of latents, and products with the whole buffer around a softmax:
what makes keys of latents is multiplied with the queries instead, and what makes values with the sums (DeepSeek-V2,
appendix C).
`llmforge::Fp4Linear` and `llmforge::MxLinear` become a MatMul of rounded numbers (`fp4`, `mx`).
`llmforge::MoE` and `llmforge::LowPrecisionMoE` become a Loop over the experts that a step chooses (`moe`); how layers
with a recurrent state are written stands in `llmforge.ir.recurrence`.
`llmforge::GrowingAttention` becomes two Concat, of past and new, and the same Attention under a mask that the graph's
`attention_mask` narrows. What reads that mask in place of lengths stands in `MaskedStep`, and
`llmforge::LowRankAdapter` in `LowRankExpansion`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx_ir as ir

from llmforge.ir import graph, interface, operators
from llmforge.ir.builder import GraphBuilder, shared
from llmforge.ir.encoder_expansion import EncoderExpansion
from llmforge.ir.fp4 import Fp4Expansion
from llmforge.ir.moe import LowPrecisionMoEExpansion, MoEExpansion
from llmforge.ir.mx import MxExpansion
from llmforge.ir.operators import canonical
from llmforge.ir.operators.canonical import CacheLengths, RowPlaces, TokenOrder
from llmforge.ir.operators.record import CANONICAL, HALVES, Operator
from llmforge.ir.recurrence import Recurrence

SlotPositions = tuple[ir.Value, ir.Value]  # slots [T], and those of the queries [B, S, 1] or [S, 1]: int64

HIDDEN_SLOT = np.float32(np.finfo(np.float32).min)  # added to a masked score: exp of it is 0, and it makes no NaN


def expand(model: ir.Model) -> ir.Model:
    """Clone `model` with every `llmforge` operator written as standard ONNX; tensors are shared, not copied.

    Raises:
        UnsupportedError: it is the graph of one rank of several: standard ONNX has no collectives.
    """
    clone = model.clone()
    attention, recurrence, masked = _AttentionExpansion(clone), Recurrence(clone), MaskedStep(clone)
    encoder = EncoderExpansion(clone)
    rules: Mapping[type[Operator], Callable[[Any], None]] = {
        canonical.Attention: attention.attention,
        canonical.GrowingAttention: attention.growing_attention,
        canonical.LatentAttention: attention.latent_attention,
        canonical.EncoderAttention: encoder.attention,
        canonical.PoolSequences: encoder.pool,
        canonical.SequenceSoftmax: encoder.softmax,
        canonical.MoE: lambda experts: graph.replace_value(experts.output, MoEExpansion(clone, experts).result()),
        canonical.LowPrecisionMoE: lambda experts: graph.replace_value(
            experts.output, LowPrecisionMoEExpansion(clone, experts).result()
        ),
        canonical.Fp4Linear: Fp4Expansion(clone).expand,
        canonical.MxLinear: MxExpansion(clone).expand,
        canonical.CacheLengths: masked.cache_lengths,
        canonical.TokenOrder: masked.token_order,
        canonical.RowPlaces: masked.row_places,
        canonical.CausalConv: recurrence.causal_conv,
        canonical.LinearAttention: recurrence.linear_attention,
        canonical.LowRankAdapter: LowRankExpansion(clone).adapter,
    }
    for view in list(map(operators.view, clone.graph)):
        if type(view) in rules:
            rules[type(view)](view)
        elif view.domain == CANONICAL:
            view.expand(clone)
    graph.drop_unused(clone)
    return clone


@dataclass
class _AttentionExpansion(GraphBuilder):
    """The expansion of attention: what its layers share."""

    _slots: SlotPositions | None = None

    def attention(self, layer: canonical.Attention) -> None:
        """Replace one `llmforge::Attention`; comments give shapes: B, S, C = batch, sequence, capacity."""
        node, kv_heads = layer.node, layer.kv_num_heads
        write = self._write_indices(layer.past_lengths)
        keys = self._scatter(node, layer.past_key, self._split(node, layer.k, kv_heads), write)
        values = self._scatter(node, layer.past_value, self._split(node, layer.v, kv_heads), write)
        places = self._places(layer.past_key, layer.past_lengths)
        self._attend(layer, keys, values, places, self._mask(layer.window, layer.chunk, places, None))

    def growing_attention(self, layer: canonical.GrowingAttention) -> None:
        """Replace one `llmforge::GrowingAttention`; the caches hold P slots before the step, and P + S after it."""
        node, kv_heads, held = layer.node, layer.kv_num_heads, layer.attention_mask
        keys = self._add(node, "Concat", [layer.past_key, self._split(node, layer.k, kv_heads)], {"axis": 2})
        values = self._add(node, "Concat", [layer.past_value, self._split(node, layer.v, kv_heads)], {"axis": 2})
        places = self._growing_places(layer.past_key, held)
        self._attend(layer, keys, values, places, self._mask(layer.window, layer.chunk, places, held))

    def latent_attention(self, layer: canonical.LatentAttention) -> None:
        """Replace one `llmforge::LatentAttention`; no head has keys or values of its own.

        The cache is multiplied as it is, from the left and from the right: no part of it is copied.
        """
        node, heads, rank, plain = layer.node, layer.num_heads, layer.rank, layer.plain
        width, half = rank + layer.rotary, layer.q.dtype in HALVES
        one_head = self._add(node, "Unsqueeze", [layer.latent, self._constant("axis_1", [1])])
        cache = self._scatter(node, layer.past, one_head, self._write_indices(layer.past_lengths))  # [B, 1, C, L+R]
        sizes = self._constant(f"parts_{plain}_{layer.rotary}", [plain, layer.rotary])
        q = self._split(node, layer.q, heads)  # [B, H, S, N+R]
        unturned, turned = graph.insert(node, "Split", [q, sizes], {"axis": 3}, outputs=2)
        of_keys, of_values = self._up_by_head(layer)
        absorbed = self._add(node, "MatMul", [unturned, of_keys])  # [B, H, S, L]
        q = self._add(node, "Concat", [absorbed, turned], {"axis": 3})
        q = self._add(node, "Mul", [q, self._number(layer.scale, layer.q.dtype)])
        q = self._add(node, "Reshape", [q, self._constant(f"one_head_{width}", [0, 1, -1, width])])
        q = self._add(node, "Transpose", [q], {"perm": [0, 1, 3, 2]})  # [B, 1, L+R, H·S]
        scores = self._add(node, "MatMul", [cache, q])  # [B, 1, C, H·S]
        scores = self._add(node, "Transpose", [scores], {"perm": [0, 1, 3, 2]})
        scores = self._add(node, "Reshape", [scores, self._up_to_slots(heads)])  # [B, H, S, C]
        if half:
            scores = self._add(node, "Cast", [scores], {"to": int(ir.DataType.FLOAT)})
        if cap := layer.softcap:
            capped = self._add(node, "Div", [scores, self._number(cap)])
            scores = self._add(node, "Mul", [self._add(node, "Tanh", [capped]), self._number(cap)])
        mask = self._mask(layer.window, layer.chunk, self._places(layer.past, layer.past_lengths), None)
        scores = self._add(node, "Where", [mask, scores, self._constant("hidden", HIDDEN_SLOT)])
        weights = self._softmax(node, scores, layer.sinks, heads)
        if half:
            assert layer.q.dtype is not None
            weights = self._add(node, "Cast", [weights], {"to": int(layer.q.dtype)})
        weights = self._add(node, "Reshape", [weights, self._up_to_slots(1)])  # [B, 1, H·S, C]
        sums = self._add(node, "MatMul", [weights, cache])  # [B, 1, H·S, L+R]
        begin, end, last = (self._constant(f"at_{place}", [place]) for place in (0, rank, 3))
        sums = self._add(node, "Slice", [sums, begin, end, last])
        sums = self._add(node, "Reshape", [sums, self._constant(f"by_head_{heads}_{rank}", [0, heads, -1, rank])])
        y = self._add(node, "MatMul", [sums, of_values])  # [B, H, S, Dv]
        y = self._add(node, "Transpose", [y], {"perm": [0, 2, 1, 3]})
        y = self._add(node, "Reshape", [y, self._constant("rows", [0, 0, -1])])
        graph.replace_outputs(node, (y, cache))

    @shared
    def _up_to_slots(self, heads: int) -> ir.Value:
        """Make the target of a Reshape to [B, heads, …, C]."""
        cache = canonical.LatentAttention.all(self.model)[0].past
        slots = self._first("Shape", [cache], {"start": 2, "end": 3})
        return self._first("Concat", [self._constant(f"heads_of_{heads}", [0, heads, -1]), slots], {"axis": 0})

    def _number(self, value: float, dtype: ir.DataType | None = None) -> ir.Value:
        kind = dtype or ir.DataType.FLOAT
        return self._constant(f"number_{value}_{kind.name}", np.asarray(value, kind.numpy()))

    def _softmax(self, node: ir.Node, scores: ir.Value, sinks: ir.Value | None, heads: int) -> ir.Value:
        """Over the last axis of [B, H, S, C]; a sink is one more score of its head, whose weight goes nowhere."""
        if sinks is None:
            return self._add(node, "Softmax", [scores], {"axis": -1})
        if sinks.dtype != ir.DataType.FLOAT:
            sinks = self._add(node, "Cast", [sinks], {"to": int(ir.DataType.FLOAT)})
        column = self._add(node, "Reshape", [sinks, self._constant(f"column_{heads}", [1, heads, 1, 1])])
        begin, one, end, last = (self._constant(f"at_{place}", [place]) for place in (0, 1, -1, 3))
        like = self._add(node, "Shape", [self._add(node, "Slice", [scores, begin, one, last])])
        beside = self._add(node, "Expand", [column, like])  # [B, H, S, 1]
        weights = self._add(node, "Softmax", [self._add(node, "Concat", [scores, beside], {"axis": 3})], {"axis": -1})
        return self._add(node, "Slice", [weights, begin, end, last])

    def _attend(
        self,
        layer: canonical.Attention | canonical.GrowingAttention,
        keys: ir.Value,
        values: ir.Value,
        places: SlotPositions,
        mask: ir.Value,
    ) -> None:
        """Replace `layer` by Attention over `keys` and `values`, which are its presents, under `mask`."""
        node, heads, sinks, slopes = layer.node, layer.num_heads, layer.sinks, layer.alibi_slopes
        present_keys, present_values = keys, values
        if slopes is not None:
            mask = self._with_slopes(mask, slopes, places, heads)  # fp32 [B, H, S, C]
        if sinks is not None:
            keys, values, mask = self._with_sinks(node, keys, values, mask, sinks, heads, slopes is not None)
        attributes = {"scale": layer.scale, "softcap": layer.softcap, "softmax_precision": 1}  # 1: fp32
        q = self._split(node, layer.q, heads)
        y = self._add(node, "Attention", [q, keys, values, mask], attributes)  # [B, H, S, Dv]
        y = self._add(node, "Transpose", [y], {"perm": [0, 2, 1, 3]})
        y = self._add(node, "Reshape", [y, self._constant("rows", [0, 0, -1])])  # [B, S, H·Dv]
        graph.replace_outputs(node, (y, present_keys, present_values))

    def _split(self, node: ir.Node, x: ir.Value, heads: int) -> ir.Value:
        """[B, S, H·D] → [B, H, S, D]."""
        split = self._add(node, "Reshape", [x, self._constant(f"heads_{heads}", [0, 0, heads, -1])])
        return self._add(node, "Transpose", [split], {"perm": [0, 2, 1, 3]})

    def _scatter(self, node: ir.Node, past: ir.Value, new: ir.Value, write: ir.Value) -> ir.Value:
        """Write [B, kv_heads, S, D] into the slots of [B, kv_heads, C, D] from each row's length on."""
        return self._add(node, "TensorScatter", [past, new, write], {"axis": -2})

    @shared
    def _write_indices(self, lengths: ir.Value) -> ir.Value:
        """int64 [B], as TensorScatter wants them."""
        return self._first("Cast", [lengths], {"to": int(ir.DataType.INT64)})

    def _places(self, past_key: ir.Value, lengths: ir.Value) -> SlotPositions:
        """Slots int64 [C], and those of the queries [B, S, 1]."""
        if self._slots is None:
            rows = self._first("Unsqueeze", [self._write_indices(lengths), self._constant("axes_1_2", [1, 2])])
            steps = self._first("Unsqueeze", [self._count_along(self._ids(), 1), self._constant("axis_1", [1])])
            self._slots = self._count_along(past_key, 2), self._first("Add", [rows, steps])
        return self._slots

    def _growing_places(self, past_key: ir.Value, held: ir.Value) -> SlotPositions:
        """Slots int64 [P + S], and those of the queries [S, 1]."""
        if self._slots is None:
            past = self._extent(past_key, 2)
            own = self._first("Add", [self._count_along(self._ids(), 1), past])
            self._slots = self._count_along(held, 1), self._first("Unsqueeze", [own, self._constant("axis_1", [1])])
        return self._slots

    @shared
    def _mask(self, window: int, chunk: int, places: SlotPositions, held: ir.Value | None) -> ir.Value:
        """bool [B, 1, S, slots]: slot t for the query of slot p where t ≤ p, and t > p - window where there is one.

        In chunks, t / chunk and p / chunk are the same, rounded down: of caches whose slots are positions.

        `held` [B, slots] says which slots hold a token, where not all up to p do. A query always sees itself: padding
        that saw nothing would come out as NaN, and its value poison every sum.
        """
        slots, own = places
        allowed = self._first("LessOrEqual", [slots, own])
        if window:
            start = self._first("Sub", [own, self._constant(f"window_{window}", window)])
            allowed = self._first("And", [allowed, self._first("Greater", [slots, start])])
        if chunk:
            size = self._constant(f"chunk_{chunk}", chunk)
            of_slots, of_own = self._first("Div", [slots, size]), self._first("Div", [own, size])
            allowed = self._first("And", [allowed, self._first("Equal", [of_slots, of_own])])
        if held is None:
            return self._first("Unsqueeze", [allowed, self._constant("axis_1", [1])])
        tokens = self._first("Cast", [held], {"to": int(ir.DataType.BOOL)})
        tokens = self._first("Unsqueeze", [tokens, self._constant("axes_1_2", [1, 2])])  # [B, 1, 1, slots]
        allowed = self._first("And", [tokens, allowed])
        return self._first("Or", [allowed, self._first("Equal", [slots, own])])

    def _ids(self) -> ir.Value:
        return graph.input_named(self.model, interface.INPUT_IDS)

    @shared
    def _with_slopes(self, mask: ir.Value, slopes: ir.Value, places: SlotPositions, heads: int) -> ir.Value:
        """Write the mask as a bias, slope·(t - p) where slot t is seen from p; layers of one mask share it."""
        slots, own = places
        away = self._first("Cast", [self._first("Sub", [slots, own])], {"to": int(ir.DataType.FLOAT)})
        away = self._first("Unsqueeze", [away, self._constant("axis_before_2", [-3])])  # [B, 1, S, slots]
        column = self._first("Reshape", [slopes, self._constant(f"column_{heads}", [1, heads, 1, 1])])
        bias = self._first("Mul", [column, away])
        return self._first("Where", [mask, bias, self._constant("hidden", HIDDEN_SLOT)])  # [B, H, S, slots]

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
        if sinks.dtype != ir.DataType.FLOAT:  # masks are fp32, whatever attention computes in
            sinks = self._add(node, "Cast", [sinks], {"to": int(ir.DataType.FLOAT)})
        column = self._add(node, "Reshape", [sinks, self._constant(f"column_{heads}", [1, heads, 1, 1])])
        start, end = self._constant("slice_0", [0]), self._constant("slice_1", [1])
        like = self._add(node, "Slice", [by_head, start, end, self._constant("axis_3", [3])])  # [B, H, S, 1]
        shape = self._add(node, "Shape", [like])
        sink = self._add(node, "Expand", [column, shape])
        return grow(keys), grow(values), self._add(node, "Concat", [by_head, sink], {"axis": 3})


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


@dataclass
class LowRankExpansion(GraphBuilder):
    """The expansion of all adapters of one graph."""

    def adapter(self, layer: canonical.LowRankAdapter) -> None:
        """Replace one `llmforge::LowRankAdapter`."""
        node, ids, widths = layer.node, layer.adapter_ids, list(layer.widths)
        hidden = self._add(node, "MatMul", [layer.x, self._add(node, "Gather", [layer.a, ids], {"axis": 0})])
        second = self._add(node, "Gather", [layer.b, ids], {"axis": 0})  # [B, R, N]
        if len(widths) == 1:
            delta = self._add(node, "MatMul", [hidden, second])
        else:
            ranks = self._split(node, hidden, [layer.rank] * len(widths))
            columns = self._split(node, second, widths)
            products = [self._add(node, "MatMul", [h, b]) for h, b in zip(ranks, columns, strict=True)]
            delta = self._add(node, "Concat", products, {"axis": -1})
        graph.replace_outputs(node, [self._add(node, "Add", [layer.base, delta])])

    def _split(self, node: ir.Node, value: ir.Value, sizes: list[int]) -> list[ir.Value]:
        lengths = self._constant(f"parts_{'_'.join(map(str, sizes))}", sizes)
        return graph.insert(node, "Split", [value, lengths], {"axis": -1}, outputs=len(sizes))
