"""Hidden states as an output of a decoder's graph, for a head that drafts by them."""

from __future__ import annotations

import re
from collections.abc import Sequence

import numpy as np
import onnx_ir as ir

from llmforge.base.errors import UnsupportedError
from llmforge.ir import graph, interface

_NORM = re.compile(r"(?:.*\.)?layers\.(\d+)\.input_layernorm\.weight")  # reads what enters a layer

_LEAST = -1e30  # far from what overflows when a logit is added


def expose(model: ir.Model, layers: Sequence[int]) -> None:
    """Let `model`, as it was traced, give what enters `layers`, side by side: fp32 [batch, sequence, layers · hidden].

    Raises:
        UnsupportedError: a layer does not begin with a norm by the name that transformers gives it.
    """
    entering: dict[int, ir.Value] = {}
    for name, value in model.graph.initializers.items():
        if (found := _NORM.fullmatch(name)) is not None and len(value.uses()) == 1:
            ((norm, index),) = value.uses()
            if index == 1 and norm.inputs[0] is not None:
                entering[int(found[1])] = norm.inputs[0]
    if missing := sorted(set(layers) - set(entering)):
        raise UnsupportedError(
            f"an EAGLE-3 head reads what enters layer {missing[0]}, and no input_layernorm is found there",
            hint="needed: a model whose layers begin with a norm of that name, as Llama's and Qwen's do",
        )
    given = [entering[layer] for layer in layers]
    if any(value.dtype != ir.DataType.FLOAT for value in given):
        raise UnsupportedError("an EAGLE-3 head reads hidden states in fp32")
    width = sum(graph.width(value) for value in given)
    made = ir.node("Concat", given, {"axis": -1}, name=interface.HIDDEN_STATES)
    model.graph.append(made)
    [states] = made.outputs
    states.name, states.type = interface.HIDDEN_STATES, ir.TensorType(ir.DataType.FLOAT)
    states.shape = ir.Shape([*(graph.dims(given[0]) or ())[:2], width])
    model.graph.outputs.append(states)


def spread_logits(model: ir.Model, ids: Sequence[int], vocabulary: int) -> None:
    """Let `model`, whose logits [batch, rows, n] are of the tokens `ids`, give those of all tokens of a vocabulary.

    Every other token gets a logit that no token of a draft has.
    """
    logits = graph.output_named(model, interface.LOGITS)
    dims = graph.dims(logits) or ()
    places, others = np.zeros(vocabulary, np.int64), np.full(vocabulary, _LEAST, np.float32)
    places[np.asarray(ids)], others[np.asarray(ids)] = np.arange(len(ids)), 0
    at = next(index for index, value in enumerate(model.graph.outputs) if value is logits)
    logits.name = "draft_logits"
    index = graph.initializer(model, "draft_logits.places", places)
    mask = graph.initializer(model, "draft_logits.others", others)
    gathered = ir.node("Gather", [logits, index], {"axis": 2}, name="draft_logits/Gather")
    masked = ir.node("Add", [gathered.outputs[0], mask], name="draft_logits/Add")
    model.graph.extend([gathered, masked])
    for node, name in ((gathered, "draft_logits/gathered"), (masked, interface.LOGITS)):
        [value] = node.outputs
        value.name, value.type = name, ir.TensorType(ir.DataType.FLOAT)
        value.shape = ir.Shape([*dims[:2], vocabulary])
    model.graph.outputs[at] = masked.outputs[0]
