"""Adapt inputs and outputs to onnxruntime-genai and optimum-onnx (ORTModelForCausalLM).

    inputs seqlens_k int32 [batch] and total_sequence_length int32 [] become
    seqlens_k, total_sequence_length = llmforge::CacheLengths(attention_mask)

with the input `attention_mask` int64 [batch, total]: 1 where a row has a token, 0 where it has padding. A runtime with
one buffer that past and present share (onnxruntime-genai, which is told `past_present_share_buffer`) and one whose
caches grow (optimum-onnx) are both served: GroupQueryAttention does either, by what it is given.

onnxruntime-genai pads on the right, transformers on the left, which GroupQueryAttention cannot say. So each row's
tokens are moved to its beginning first, and the logits go to where their tokens were:

    input_ids' = GatherElements(input_ids, order), order, back = llmforge::TokenOrder(attention_mask, input_ids)

and the same for `position_ids`, where something reads them.

With `logits: last` the selection of rows stays, and `logits_rows` counts from the end of each row's tokens:
GatherND(hidden, llmforge::RowPlaces(logits_rows, attention_mask, input_ids)). The output is declared [batch, 1,
vocabulary], from which onnxruntime-genai knows that it gets the last token's logits alone. With `logits: all` the
selection goes, and with it the input `logits_rows`: logits [batch, sequence, vocabulary], what speculation and scores
of prompts want; a prompt pays the vocabulary for each of its tokens.

Fires for a graph whose every attention is GroupQueryAttention, with caches of fp32 or int8; it is refused where another
attention is left, and where the selection of rows is not one Gather.

Numerics: exact, the same kernels get the same numbers.
"""

from __future__ import annotations

from typing import Annotated, ClassVar, NoReturn

import numpy as np
import onnx_ir as ir
from pydantic import Field
from pydantic.dataclasses import dataclass

from llmforge.base.errors import UnsupportedError
from llmforge.ir import graph, interface, logits_rows, operators
from llmforge.ir.operators import canonical, cpu
from llmforge.ir.operators.standard import Gather
from llmforge.rewrite.pass_base import Changes, Context, Numerics, Pass, Rewritten, Skipped

_KEPT = (interface.INPUT_IDS, interface.POSITION_IDS, interface.LOGITS_ROWS)
_LENGTHS = (interface.SEQLENS_K, interface.TOTAL_SEQUENCE_LENGTH)


@dataclass(frozen=True)
class GenaiInterface(Pass):
    """Adapt inputs and outputs to onnxruntime-genai and optimum-onnx (ORTModelForCausalLM)."""

    name: ClassVar[str] = "genai-interface"
    numerics: ClassVar[Numerics] = Numerics.EXACT
    requires: ClassVar[frozenset[str]] = frozenset({"gqa"})
    loads_in: ClassVar[frozenset[str]] = frozenset({"onnxruntime-genai", "optimum"})

    logits: Annotated[logits_rows.Logits, Field(description="return logits of all tokens, or of the last one only")] = (
        "all"
    )

    def run(self, model: ir.Model, context: Context) -> Changes:
        """Rewrite the interface of `model`.

        Raises:
            UnsupportedError: the target has no ONNX Runtime, or onnxruntime-genai cannot drive the graph.
        """
        context.require_onnxruntime(self.name, "onnxruntime-genai runs ONNX Runtime's engines")
        if canonical.CacheLengths.all(model):
            return Changes(skipped=[Skipped(interface.ATTENTION_MASK, "the graph already has this interface")])
        self._check(model)
        _, selection = logits_rows.find_selection(model)
        changes = Changes()
        mask = _read_attention_mask(model)
        what = f"{interface.SEQLENS_K} and {interface.TOTAL_SEQUENCE_LENGTH} computed from {interface.ATTENTION_MASK}"
        changes.rewritten.append(Rewritten("cache_lengths", what))
        back = _order_tokens(model, mask)
        changes.rewritten.append(Rewritten("token_order", "padded rows aligned to the left"))
        if self.logits == "all":
            selection.data = _gather_tokens(model, selection.node, selection.data, back)
        changes.rewritten.append(Rewritten(*logits_rows.offer(model, self.logits)))
        if self.logits == "last":
            _count_rows_from_the_end(model, selection, mask)
        graph.drop_unused(model)
        return changes

    def _check(self, model: ir.Model) -> None:
        """Refuse what onnxruntime-genai cannot drive."""

        def refuse(what: str, hint: str = f"leave {self.name} out of the recipe") -> NoReturn:
            raise UnsupportedError(f"{self.name}: {what}", hint=hint)

        for node in model.graph:
            where = f"node {node.name}, {node.op_type},"
            if operators.view(node).state:
                refuse(f"{where} keeps a state of fixed size; decoders of onnxruntime-genai cache keys and values")
            if canonical.LatentAttention.matches(node):
                refuse(f"{where} caches latents; decoders of onnxruntime-genai cache keys and values")
            if operators.is_a(node, canonical.Attention, canonical.GrowingAttention):
                refuse(
                    f"{where} was not lowered to GroupQueryAttention; onnxruntime-genai gives the lengths of shared "
                    "caches to no other attention",
                    f"the report of flash-attention says why; leave {self.name} out of the recipe",
                )
        cpu.require_none(model)  # some of which need no lengths
        names = [str(value.name) for value in model.graph.inputs]
        if not set(_LENGTHS) <= set(names):
            refuse(
                "the graph has no GroupQueryAttention; onnxruntime-genai shares its caches only with that",
                "put flash-attention before it, and remove optimum-interface",
            )
        for name in names:
            if name not in (*_KEPT, *_LENGTHS) and interface.present_of(name) == name:
                refuse(
                    f"the graph has the input {name}; onnxruntime-genai feeds input_ids, position_ids, attention_mask "
                    "and caches of keys and values"
                )


def _read_attention_mask(model: ir.Model) -> ir.Value:
    """Replace the inputs `seqlens_k` and `total_sequence_length` by `attention_mask`, and return it."""
    inputs = {str(value.name): value for value in model.graph.inputs}
    batch, *_ = graph.dims(inputs[interface.INPUT_IDS]) or (None,)
    mask = ir.val(interface.ATTENTION_MASK, ir.DataType.INT64, [batch, interface.TOTAL_SEQUENCE_LENGTH])
    model.graph.inputs.append(mask)
    lengths = canonical.CacheLengths.insert(
        model.graph[0], {"attention_mask": mask}, outputs=len(_LENGTHS), name="cache_lengths"
    )
    for name, new in zip(_LENGTHS, lengths.node.outputs, strict=True):
        old = inputs[name]
        graph.replace_uses(old, new)
        model.graph.inputs.remove(old)
        new.name = old.name
    return mask


def _order_tokens(model: ir.Model, mask: ir.Value) -> ir.Value:
    """Let the graph read each row's tokens from its beginning; return where they were, int64 [batch, sequence]."""
    inputs = {str(value.name): value for value in model.graph.inputs}
    fed = [inputs[name] for name in (interface.INPUT_IDS, interface.POSITION_IDS) if name in inputs]
    readers = {value: tuple(value.uses()) for value in fed}
    first, ids = model.graph[0], inputs[interface.INPUT_IDS]
    tokens = canonical.TokenOrder.insert(
        first, {"attention_mask": mask, "input_ids": ids}, outputs=2, name="token_order"
    )
    order, back = tokens.order, tokens.inverse
    for value in (order, back):
        value.type, value.shape = ids.type, ids.shape
    order.name, back.name = "token_order", "token_order.back"
    for value in fed:
        name = f"{value.name}.ordered"
        [moved] = graph.insert(first, "GatherElements", [value, order], {"axis": 1}, name=name)
        moved.name, moved.type, moved.shape = name, value.type, value.shape
        for use in readers[value]:
            use.node.replace_input_with(use.idx, moved)
    return back


def _gather_tokens(model: ir.Model, before: ir.Node, x: ir.Value, places: ir.Value) -> ir.Value:
    """Insert y[b, r] = x[b, places[b, r]]: x [batch, sequence, hidden], places and y [batch, rows(, hidden)]."""
    axis = graph.initializer(model, "token_places.axes", np.array([2], np.int64))
    [indices] = graph.insert(before, "Unsqueeze", [places, axis], name="token_places")
    [y] = graph.insert(before, "GatherND", [x, indices], {"batch_dims": 1}, name="tokens")
    y.type = x.type
    if x.shape is not None and places.shape is not None:
        y.shape = ir.Shape([*places.shape, x.shape[2]])
    indices.name, y.name = "token_places", "tokens"
    return y


def _count_rows_from_the_end(model: ir.Model, selection: Gather, mask: ir.Value) -> None:
    """Let `logits_rows` count from the end of each row's tokens, not of the longest row's."""
    ids = graph.input_named(model, interface.INPUT_IDS)
    rows = selection.indices
    inputs = {"logits_rows": rows, "attention_mask": mask, "input_ids": ids}
    places = canonical.RowPlaces.insert(selection.node, inputs, name="row_places").y
    places.name, places.type = "row_places", rows.type
    places.shape = ir.Shape([dim for value in (mask, rows) for dim in (graph.dims(value) or (None,))[:1]])
    graph.replace_value(selection.output, _gather_tokens(model, selection.node, selection.data, places))
    model.graph.remove(selection.node, safe=True)
