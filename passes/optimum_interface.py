"""Adapt inputs and outputs to optimum-onnx (ORTModelForCausalLM), without GroupQueryAttention.

    y, present_key, present_value = llmforge::Attention(q, k, v, past_key, past_value, past_lengths[, …])
    becomes
    y, present_key, present_value = llmforge::GrowingAttention(q, k, v, past_key, past_value, attention_mask[, …])

with the same attributes and optional inputs (sinks, slopes of ALiBi). The caches hold the past alone, [batch,
kv_heads, past, head_dim], of any length, 0 included; the presents hold `sequence` slots more. `attention_mask` is int64
[batch, past + sequence], 0 where a slot is padding: transformers pads on the left. `position_ids` stays an input where
something reads it, and transformers feeds it.

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
from llmforge.ir.operators.canonical import Attention, GrowingAttention, LatentAttention
from llmforge.rewrite.pass_base import Changes, Context, Numerics, Pass, Rewritten, Skipped

_PAST_SLOTS = "past_sequence_length"  # names of dimensions, as optimum's exporters spell them
_PRESENT_SLOTS = "past_sequence_length + sequence_length"


@dataclass(frozen=True)
class OptimumInterface(Pass):
    """Adapt inputs and outputs to optimum-onnx (ORTModelForCausalLM), without GroupQueryAttention."""

    name: ClassVar[str] = "optimum-interface"
    numerics: ClassVar[Numerics] = Numerics.ROUNDING
    loads_in: ClassVar[frozenset[str]] = frozenset({"optimum"})

    logits: Annotated[logits_rows.Logits, Field(description="return logits of all tokens, or of the last one only")] = (
        "all"
    )

    def run(self, model: ir.Model, context: Context) -> Changes:
        """Rewrite the interface of `model`.

        Raises:
            UnsupportedError: the target has no ONNX Runtime, or the graph keeps state in another way.
        """
        context.require_onnxruntime(self.name, "ORTModelForCausalLM runs ONNX Runtime's engines")
        if GrowingAttention.all(model):
            return Changes(skipped=[Skipped(interface.ATTENTION_MASK, "the graph already has this interface")])
        attentions = Attention.all(model)
        self._check(model, attentions)
        changes = Changes([Rewritten(*logits_rows.offer(model, self.logits))])
        mask = _attention_mask(model)
        for attention in attentions:
            changes.rewritten.append(Rewritten(attention.name, "growing KV cache, masked by attention_mask"))
            _grow(model, attention, mask)
        graph.drop_unused(model)
        return changes

    def _check(self, model: ir.Model, attentions: list[Attention]) -> None:
        """Refuse a graph with other state than the caches of `attentions`."""
        for attention in attentions:
            if attention.chunk:
                raise UnsupportedError(
                    f"{self.name}: node {attention.name} reads chunks of {attention.chunk} tokens, counted from the "
                    "beginning of a text; ORTModelForCausalLM pads texts on the left",
                    hint="leave this pass out of the recipe",
                )
        served = {cache for attention in attentions for cache in (attention.past_key, attention.past_value)}
        for value in sorted(model.graph.inputs, key=lambda value: not interface.is_state(str(value.name))):
            name = str(value.name)
            known = name in (interface.INPUT_IDS, interface.POSITION_IDS, interface.LOGITS_ROWS)
            if known or value in served:
                continue
            others = [use.node for use in value.uses() if not Attention.matches(use.node)]
            if not others:
                continue
            where, hint = (
                f"{self.name}: node {others[0].name}, {others[0].op_type},",
                "leave this pass out of the recipe",
            )
            if interface.is_state(name):
                what = "keeps a state of fixed size; ORTModelForCausalLM feeds caches of keys and values"
            elif LatentAttention.matches(others[0]):
                what = "caches latents; ORTModelForCausalLM feeds caches of keys and values"
            else:
                what = (
                    f"reads {name}; ORTModelForCausalLM feeds input_ids, attention_mask, position_ids and caches of "
                    "llmforge::Attention"
                )
                hint = "leave flash-attention out of the recipe, or this pass"
            raise UnsupportedError(f"{where} {what}", hint=hint)


def _attention_mask(model: ir.Model) -> ir.Value:
    """Add the input `attention_mask` [batch, past + sequence]."""
    ids = graph.input_named(model, interface.INPUT_IDS)
    batch, *_ = graph.dims(ids) or (None,)
    mask = ir.val(interface.ATTENTION_MASK, ir.DataType.INT64, [batch, _PRESENT_SLOTS])
    model.graph.inputs.insert(1, mask)
    return mask


def _grow(model: ir.Model, attention: Attention, mask: ir.Value) -> None:
    """Turn Attention into GrowingAttention, and let the shapes of its caches say so."""
    node = attention.node
    inputs = {field.name: attention.operand(field) for field in Attention.inputs} | {"attention_mask": mask}
    del inputs[Attention.past_lengths.name]
    grown = GrowingAttention.insert(node, inputs, outputs=len(node.outputs), name=attention.name)
    grown.node.attributes.update(node.attributes)
    graph.replace_outputs(node, grown.node.outputs)
    for cache, slots in (
        (attention.past_key, _PAST_SLOTS),
        (attention.past_value, _PAST_SLOTS),
        (grown.present_key, _PRESENT_SLOTS),
        (grown.present_value, _PRESENT_SLOTS),
    ):
        batch, heads, _, channels = graph.dims(cache) or (None,) * 4
        cache.shape = ir.Shape([batch, heads, slots, channels])
    model.graph.remove(node, safe=True)
