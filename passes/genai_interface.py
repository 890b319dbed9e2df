"""Give the graph the inputs and outputs that onnxruntime-genai feeds and reads.

    inputs seqlens_k int32 [batch] and total_sequence_length int32 [] become
    seqlens_k, total_sequence_length = llmforge::CacheLengths(attention_mask)

with the input `attention_mask` int64 [batch, total]: 1 where a row has a token, padded on the right; what the two were
before follows from it in integers. The caches stay one preallocated buffer that past and present share, for which
onnxruntime-genai is told `past_present_share_buffer`.

With `logits: all` the Gather that selects rows goes, and with it the input `logits_rows`: logits [batch, sequence,
vocabulary]. That is what onnxruntime-genai wants for batches of unequal prompts and for speculation; a prompt pays the
vocabulary for each of its tokens. With `logits: last` the selection stays, and the output is declared [batch, 1,
vocabulary], from which onnxruntime-genai knows that it gets the last token's logits alone. Prompts of a batch must then
be of one length: it cannot ask for another row.

Fires for a graph whose every attention is GroupQueryAttention, with caches of fp32 or int8; it is refused where another
attention is left, and where the selection of rows is not one such Gather.

Numerics: exact, the same kernels get the same numbers.
"""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

import onnx_ir as ir
from pydantic import Field
from pydantic.dataclasses import dataclass

from llmforge import graph, interface, logits_rows
from llmforge.dialect import STATE_OPERATORS
from llmforge.errors import UnsupportedError
from llmforge.transform import Changes, Context, Numerics, Pass, Rewritten, Skipped

_ATTENTION = {("llmforge", "Attention"), ("llmforge", "GrowingAttention")}
_KEPT = (interface.INPUT_IDS, interface.POSITION_IDS, interface.LOGITS_ROWS)


@dataclass(frozen=True)
class GenaiInterface(Pass):
    """Give the graph the inputs and outputs that onnxruntime-genai feeds and reads."""

    name: ClassVar[str] = "genai-interface"
    numerics: ClassVar[Numerics] = Numerics.EXACT
    requires: ClassVar[frozenset[str]] = frozenset({"gqa"})

    logits: Annotated[
        Literal["all", "last"],
        Field(description="logits of every token, or of the last one alone (prompts of a batch then have one length)"),
    ] = "all"

    def run(self, model: ir.Model, context: Context) -> Changes:
        """Rewrite the interface of `model`.

        Raises:
            UnsupportedError: the target has no ONNX Runtime, or onnxruntime-genai cannot drive the graph.
        """
        if "onnxruntime" not in context.target.engines:
            raise UnsupportedError(
                f"{self.name}: target {context.target.name} runs {', '.join(context.target.engines)}; "
                "onnxruntime-genai runs ONNX Runtime's engines",
                hint=f"leave {self.name} out of the recipe",
            )
        if any((node.domain, node.op_type) == ("llmforge", "CacheLengths") for node in model.graph):
            return Changes(skipped=[Skipped(interface.ATTENTION_MASK, "the graph has this interface already")])
        self._check(model)
        changes = Changes()
        if self.logits == "all":
            changes.rewritten.append(Rewritten(logits_rows.give_all(model), "logits of every token"))
        else:
            logits_rows.declare_last(model)
            changes.rewritten.append(Rewritten(interface.LOGITS, "declared as the last token's"))
        _read_attention_mask(model)
        what = f"{interface.SEQLENS_K} and {interface.TOTAL_SEQUENCE_LENGTH} follow from {interface.ATTENTION_MASK}"
        changes.rewritten.append(Rewritten("cache_lengths", what))
        model.opset_imports["llmforge"] = 1
        graph.drop_unused(model)
        return changes

    def _check(self, model: ir.Model) -> None:
        """Refuse what onnxruntime-genai cannot drive."""
        for node in model.graph:
            if (node.domain, node.op_type) in STATE_OPERATORS:
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
        if interface.SEQLENS_K not in names or interface.TOTAL_SEQUENCE_LENGTH not in names:
            raise UnsupportedError(
                f"{self.name}: the graph has no GroupQueryAttention; onnxruntime-genai would have nothing to share "
                "its caches with",
                hint="put flash-attention in front, and leave optimum-interface out",
            )
        known = {*_KEPT, interface.SEQLENS_K, interface.TOTAL_SEQUENCE_LENGTH}
        for name in names:
            if name not in known and interface.present_of(name) == name:
                raise UnsupportedError(
                    f"{self.name}: the graph has the input {name}; onnxruntime-genai feeds input_ids, position_ids, "
                    "attention_mask and caches of keys and values",
                    hint=f"leave {self.name} out of the recipe",
                )


def _read_attention_mask(model: ir.Model) -> None:
    """Replace the inputs `seqlens_k` and `total_sequence_length` by `attention_mask`."""
    inputs = {str(value.name): value for value in model.graph.inputs}
    batch = inputs[interface.INPUT_IDS].shape
    assert batch is not None
    mask = ir.Value(
        name=interface.ATTENTION_MASK,
        shape=ir.Shape([batch[0], interface.TOTAL_SEQUENCE_LENGTH]),
        type=ir.TensorType(ir.DataType.INT64),
    )
    model.graph.inputs.append(mask)
    replaced = [inputs[name] for name in (interface.SEQLENS_K, interface.TOTAL_SEQUENCE_LENGTH)]
    made = graph.insert(
        model.graph[0], "CacheLengths", [mask], domain="llmforge", outputs=len(replaced), name="cache_lengths"
    )
    for old, new in zip(replaced, made, strict=True):
        graph.replace(old, new)
        model.graph.inputs.remove(old)
        new.name = old.name
