"""Give the graph the inputs and outputs that ORTModelForCausalLM of optimum-onnx feeds and reads.

    y, present_key, present_value = llmforge::Attention(q, k, v, past_key, past_value, past_lengths[, sinks])
    becomes
    y, present_key, present_value = llmforge::GrowingAttention(q, k, v, past_key, past_value, attention_mask[, sinks])

with the same attributes. The caches hold the past alone, [batch, kv_heads, past, head_dim], of any length, 0 included;
the presents hold `sequence` slots more. `attention_mask` is int64 [batch, past + sequence], 0 where a slot is padding:
transformers pads on the left. `position_ids` stays an input where something reads it, and transformers feeds it.

With `logits: all` the Gather that selects rows goes, and with it the input `logits_rows`: logits [batch, sequence,
vocabulary], as transformers' own models give them. With `logits: last` the selection stays, and the output is declared
[batch, 1, vocabulary]: enough to generate, with left padding, and a prompt does not pay the vocabulary for its tokens.

Fires for every `llmforge::Attention`; the graph is refused where something else keeps state or reads `past_lengths`:
GroupQueryAttention, which has no place for padding on the left, so flash-attention stays out of the recipe.

Numerics: rounding, the same attention over other slots.
"""

from __future__ import annotations

from typing import Annotated, ClassVar

import onnx_ir as ir
from pydantic import Field
from pydantic.dataclasses import dataclass

from llmforge.base.errors import UnsupportedError
from llmforge.ir import graph, interface, logits_rows
from llmforge.lowering.pass_base import Changes, Context, Numerics, Pass, Rewritten, Skipped

_PAST = (3, 4)  # inputs of Attention: past_key, past_value
_PRESENT = (1, 2)  # outputs: present_key, present_value
_LENGTHS = 5  # input: past_lengths, and attention_mask in its place
_PAST_SLOTS = "past_sequence_length"  # names of dimensions, as optimum's exporters spell them
_PRESENT_SLOTS = "past_sequence_length + sequence_length"


@dataclass(frozen=True)
class OptimumInterface(Pass):
    """Give the graph the inputs and outputs that ORTModelForCausalLM of optimum-onnx feeds and reads."""

    name: ClassVar[str] = "optimum-interface"
    numerics: ClassVar[Numerics] = Numerics.ROUNDING

    logits: Annotated[logits_rows.Logits, Field(description="logits of every token, or of the last one alone")] = "all"

    def run(self, model: ir.Model, context: Context) -> Changes:
        """Rewrite the interface of `model`.

        Raises:
            UnsupportedError: the target has no ONNX Runtime, or the graph keeps state in another way.
        """
        context.require_onnxruntime(self.name, "ORTModelForCausalLM runs ONNX Runtime's engines")
        if any((node.domain, node.op_type) == ("llmforge", "GrowingAttention") for node in model.graph):
            return Changes(skipped=[Skipped(interface.ATTENTION_MASK, "the graph has this interface already")])
        attentions = [node for node in model.graph if (node.domain, node.op_type) == ("llmforge", "Attention")]
        self._check(model, attentions)
        changes = Changes([Rewritten(*logits_rows.offer(model, self.logits))])
        mask = _attention_mask(model)
        for node in attentions:
            changes.rewritten.append(Rewritten(str(node.name), "caches that grow, under attention_mask"))
            _grow(node, mask)
        graph.drop_unused(model)
        return changes

    def _check(self, model: ir.Model, attentions: list[ir.Node]) -> None:
        """Refuse a graph with other state than the caches of `attentions`."""
        served = {id(node.inputs[index]) for node in attentions for index in _PAST}
        for value in sorted(model.graph.inputs, key=lambda value: not interface.is_state(str(value.name))):
            name = str(value.name)
            known = name in (interface.INPUT_IDS, interface.POSITION_IDS, interface.LOGITS_ROWS)
            if known or id(value) in served:
                continue
            others = [use.node for use in value.uses() if use.node not in attentions]
            if others and interface.is_state(name):
                raise UnsupportedError(
                    f"{self.name}: node {others[0].name}, {others[0].op_type}, keeps a state of fixed size; "
                    "ORTModelForCausalLM feeds caches of keys and values",
                    hint="leave this pass out of the recipe",
                )
            if others:
                raise UnsupportedError(
                    f"{self.name}: node {others[0].name}, {others[0].op_type}, reads {name}; ORTModelForCausalLM "
                    "feeds input_ids, attention_mask, position_ids and caches of llmforge::Attention",
                    hint="leave flash-attention out of the recipe, or this pass",
                )


def _attention_mask(model: ir.Model) -> ir.Value:
    """Add the input `attention_mask` [batch, past + sequence]."""
    ids = next(value for value in model.graph.inputs if value.name == interface.INPUT_IDS)
    assert ids.shape is not None
    mask = ir.Value(
        name=interface.ATTENTION_MASK,
        shape=ir.Shape([ids.shape[0], _PRESENT_SLOTS]),
        type=ir.TensorType(ir.DataType.INT64),
    )
    model.graph.inputs.insert(1, mask)
    return mask


def _grow(node: ir.Node, mask: ir.Value) -> None:
    """Turn Attention into GrowingAttention, and let the shapes of its caches say so."""
    inputs = list(node.inputs)
    inputs[_LENGTHS] = mask
    outputs = graph.insert(
        node, "GrowingAttention", inputs, domain="llmforge", outputs=len(node.outputs), name=node.name
    )
    grown = outputs[0].producer()
    assert grown is not None
    grown.attributes.update(node.attributes)
    for old, new in zip(node.outputs, outputs, strict=True):
        graph.replace_value(old, new)
    for values, indices, slots in ((node.inputs, _PAST, _PAST_SLOTS), (grown.outputs, _PRESENT, _PRESENT_SLOTS)):
        for index in indices:
            cache = values[index]
            assert cache is not None
            assert cache.shape is not None
            cache.shape = ir.Shape([*cache.shape[:2], slots, cache.shape[3]])
    owner = node.graph
    assert owner is not None
    owner.remove(node, safe=True)
