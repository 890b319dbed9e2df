"""Give the graph the inputs and outputs that onnxruntime-genai and ORTModelForCausalLM of optimum-onnx feed and read.

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

from typing import Annotated, ClassVar

import numpy as np
import onnx_ir as ir
from pydantic import Field
from pydantic.dataclasses import dataclass

from llmforge.base.errors import UnsupportedError
from llmforge.ir import graph, interface, logits_rows, operators
from llmforge.lowering.pass_base import Changes, Context, Numerics, Pass, Rewritten, Skipped

_ATTENTION = {("llmforge", "Attention"), ("llmforge", "GrowingAttention")}
_KEPT = (interface.INPUT_IDS, interface.POSITION_IDS, interface.LOGITS_ROWS)
_LENGTHS = (interface.SEQLENS_K, interface.TOTAL_SEQUENCE_LENGTH)


@dataclass(frozen=True)
class GenaiInterface(Pass):
    """Give the graph the inputs and outputs that onnxruntime-genai and ORTModelForCausalLM feed and read."""

    name: ClassVar[str] = "genai-interface"
    numerics: ClassVar[Numerics] = Numerics.EXACT
    requires: ClassVar[frozenset[str]] = frozenset({"gqa"})

    logits: Annotated[logits_rows.Logits, Field(description="logits of every token, or of the last one alone")] = "all"

    def run(self, model: ir.Model, context: Context) -> Changes:
        """Rewrite the interface of `model`.

        Raises:
            UnsupportedError: the target has no ONNX Runtime, or onnxruntime-genai cannot drive the graph.
        """
        context.require_onnxruntime(self.name, "onnxruntime-genai runs ONNX Runtime's engines")
        if any((node.domain, node.op_type) == ("llmforge", "CacheLengths") for node in model.graph):
            return Changes(skipped=[Skipped(interface.ATTENTION_MASK, "the graph has this interface already")])
        self._check(model)
        _, selection = logits_rows.find_selection(model)
        changes = Changes()
        mask = _read_attention_mask(model)
        what = f"{interface.SEQLENS_K} and {interface.TOTAL_SEQUENCE_LENGTH} follow from {interface.ATTENTION_MASK}"
        changes.rewritten.append(Rewritten("cache_lengths", what))
        back = _order_tokens(model, mask)
        changes.rewritten.append(Rewritten("token_order", "tokens of each row at its beginning, however it is padded"))
        if self.logits == "all":
            (hidden, *_) = selection.inputs
            assert hidden is not None
            selection.replace_input_with(0, _gather_tokens(selection, hidden, back))
        changes.rewritten.append(Rewritten(*logits_rows.offer(model, self.logits)))
        if self.logits == "last":
            _count_rows_from_the_end(model, selection, mask)
        model.opset_imports["llmforge"] = 1
        graph.drop_unused(model)
        return changes

    def _check(self, model: ir.Model) -> None:
        """Refuse what onnxruntime-genai cannot drive."""
        for node in model.graph:
            if operators.view(node).state:
                raise UnsupportedError(
                    f"{self.name}: node {node.name}, {node.op_type}, keeps a state of fixed size; decoders of "
                    "onnxruntime-genai cache keys and values",
                    hint=f"leave {self.name} out of the recipe",
                )
            if (node.domain, node.op_type) in _ATTENTION:
                raise UnsupportedError(
                    f"{self.name}: node {node.name}, {node.op_type}, was not lowered to GroupQueryAttention; "
                    "onnxruntime-genai gives the lengths of shared caches to no other attention",
                    hint=f"the report of flash-attention says why; leave {self.name} out of the recipe",
                )
        names = [str(value.name) for value in model.graph.inputs]
        if not set(_LENGTHS) <= set(names):
            raise UnsupportedError(
                f"{self.name}: the graph has no GroupQueryAttention; onnxruntime-genai would have nothing to share "
                "its caches with",
                hint="put flash-attention in front, and leave optimum-interface out",
            )
        for name in names:
            if name not in (*_KEPT, *_LENGTHS) and interface.present_of(name) == name:
                raise UnsupportedError(
                    f"{self.name}: the graph has the input {name}; onnxruntime-genai feeds input_ids, position_ids, "
                    "attention_mask and caches of keys and values",
                    hint=f"leave {self.name} out of the recipe",
                )


def _read_attention_mask(model: ir.Model) -> ir.Value:
    """Replace the inputs `seqlens_k` and `total_sequence_length` by `attention_mask`, and return it."""
    inputs = {str(value.name): value for value in model.graph.inputs}
    batch = inputs[interface.INPUT_IDS].shape
    assert batch is not None
    mask = ir.Value(
        name=interface.ATTENTION_MASK,
        shape=ir.Shape([batch[0], interface.TOTAL_SEQUENCE_LENGTH]),
        type=ir.TensorType(ir.DataType.INT64),
    )
    model.graph.inputs.append(mask)
    replaced = [inputs[name] for name in _LENGTHS]
    made = graph.insert(
        model.graph[0], "CacheLengths", [mask], domain="llmforge", outputs=len(replaced), name="cache_lengths"
    )
    for old, new in zip(replaced, made, strict=True):
        graph.replace(old, new)
        model.graph.inputs.remove(old)
        new.name = old.name
    return mask


def _order_tokens(model: ir.Model, mask: ir.Value) -> ir.Value:
    """Let the graph read each row's tokens from its beginning; return where they were, int64 [batch, sequence]."""
    inputs = {str(value.name): value for value in model.graph.inputs}
    fed = [inputs[name] for name in (interface.INPUT_IDS, interface.POSITION_IDS) if name in inputs]
    readers = {value: tuple(value.uses()) for value in fed}
    first = model.graph[0]
    order, back = graph.insert(first, "TokenOrder", [mask, fed[0]], domain="llmforge", outputs=2, name="token_order")
    for value in (order, back):
        value.type, value.shape = fed[0].type, fed[0].shape
    order.name, back.name = "token_order", "token_order.back"
    for value in fed:
        name = f"{value.name}.ordered"
        (moved,) = graph.insert(first, "GatherElements", [value, order], {"axis": 1}, name=name)
        moved.name, moved.type, moved.shape = name, value.type, value.shape
        for use in readers[value]:
            use.node.replace_input_with(use.idx, moved)
    return back


def _gather_tokens(before: ir.Node, x: ir.Value, places: ir.Value) -> ir.Value:
    """Insert y[b, r] = x[b, places[b, r]]: x [batch, sequence, hidden], places and y [batch, rows(, hidden)]."""
    assert before.graph is not None
    axis = graph.initializer(before.graph, "token_places.axes", np.array([2], np.int64))
    (indices,) = graph.insert(before, "Unsqueeze", [places, axis], name="token_places")
    (y,) = graph.insert(before, "GatherND", [x, indices], {"batch_dims": 1}, name="tokens")
    y.type = x.type
    if x.shape is not None and places.shape is not None:
        y.shape = ir.Shape([*places.shape, x.shape[2]])
    indices.name, y.name = "token_places", "tokens"
    return y


def _count_rows_from_the_end(model: ir.Model, selection: ir.Node, mask: ir.Value) -> None:
    """Let `logits_rows` count from the end of each row's tokens, not of the longest row's."""
    hidden, rows = selection.inputs
    assert hidden is not None
    assert rows is not None
    ids = next(value for value in model.graph.inputs if value.name == interface.INPUT_IDS)
    (places,) = graph.insert(selection, "RowPlaces", [rows, mask, ids], domain="llmforge", name="row_places")
    assert mask.shape is not None
    assert rows.shape is not None
    places.name, places.type, places.shape = "row_places", rows.type, ir.Shape([mask.shape[0], rows.shape[0]])
    graph.supersede(selection.outputs[0], _gather_tokens(selection, hidden, places))
    model.graph.remove(selection, safe=True)
