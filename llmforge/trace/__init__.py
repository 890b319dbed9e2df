"""Frontend: a checkpoint's model, traced without weights to a graph of the canonical dialect (docs/dialect.md).

The model is built from its configuration with parameters that have no memory (`skeleton`). Attention, norms and
rotary embedding are substituted so that each arrives as one node (`attention`, `masks`, `norms`, `rotary`). One step
is exported and translated (`capture`), cleaned up (`cleanup`), and its initializers get the checkpoint's tensors,
lazily (`weights`). Where a substitution fails, the model's own attention is traced and proved (`fallback`). What the
dialect's verifier then does not know is refused by name.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np
import onnx_ir as ir

from llmforge import dialect, interface
from llmforge.errors import NotADecoder, UnsupportedError, VerificationError

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from llmforge.checkpoint import Checkpoint
    from llmforge.trace import weights


def trace(checkpoint: Checkpoint) -> ir.Model:
    """Trace the model of `checkpoint` to the canonical dialect in fp32; its weights stay on disk until they are read.

    Where attention, masks or positions cannot be hooked, the model's own attention is traced and proved with numbers
    (`fallback`); the metadata `interface.FALLBACK` of the graph then says why.

    Raises:
        CheckpointError: a parameter has no tensor, or one of another shape.
        UnsupportedError: the architecture cannot be traced; the message names it and the reason.
    """
    config = checkpoint.config
    try:
        try:
            return _hooked(checkpoint)
        except NotADecoder:
            raise
        except UnsupportedError as error:
            return _fallen_back(checkpoint, error)
    except UnsupportedError as error:
        name = (config.architectures or [type(config).__name__])[0]
        raise UnsupportedError(f"architecture {name!r} cannot be compiled: {error.message}", hint=error.hint) from error


def _hooked(checkpoint: Checkpoint) -> ir.Model:
    """Trace with attention, masks and rotary embedding substituted."""
    # here, because these import torch and transformers, which take seconds
    from llmforge.trace import capture, internals, skeleton, weights
    from llmforge.trace.attention import Attention

    geometry = checkpoint.geometry
    attention = Attention(geometry.context)
    with internals.registered(Attention.NAME, attention.attend, attention.mask):
        model, mode = skeleton.build(checkpoint.config, Attention.NAME)
        sources = weights.plan(model, checkpoint)
        weights.untie(model, sources)
        graph = capture.capture(model, mode, attention, geometry.context, geometry.layers)
    return _finished(graph, model, checkpoint, sources)


def _fallen_back(checkpoint: Checkpoint, reason: UnsupportedError) -> ir.Model:
    """Trace the model's own attention, because of `reason`, and prove it.

    Raises:
        UnsupportedError: `reason`, where this way fails too, and why it does.
    """
    from llmforge.trace import capture, fallback, rotary, skeleton, weights

    geometry = checkpoint.geometry
    attention = fallback.OwnAttention(geometry.context)
    try:
        with fallback.eager(attention):
            model, mode = skeleton.build(checkpoint.config, fallback.IMPLEMENTATION)
            sources = weights.plan(model, checkpoint)
            weights.untie(model, sources)
            fallback.choose_experts(model)
            graph = capture.capture(model, mode, attention, geometry.context, geometry.layers, rotary.untouched)
        finished = _finished(graph, model, checkpoint, sources, fallback=reason.message)
        fallback.prove(finished, checkpoint)
    except NotADecoder:
        raise
    except UnsupportedError as error:
        fallback.refuse_encoders(checkpoint)
        if error.message == reason.message:
            raise reason from error
        raise UnsupportedError(
            f"{reason.message}; with the attention of its own code: {error.message}", hint=reason.hint
        ) from error
    return finished


def _finished(
    graph: ir.Model,
    model: PreTrainedModel,
    checkpoint: Checkpoint,
    sources: Mapping[str, weights.Source],
    fallback: str | None = None,
) -> ir.Model:
    """Clean a raw graph up, attach its weights, and check it."""
    from llmforge.trace import capture, cleanup, weights

    cleanup.canonicalize(graph)
    weights.attach(graph, capture.MODEL, model, checkpoint, sources)
    _default_rows(graph)
    if fallback is not None:
        graph.metadata_props[interface.FALLBACK] = fallback
    try:
        dialect.check(graph)
    except VerificationError as error:
        raise UnsupportedError(error.message) from error
    return graph


def _default_rows(graph: ir.Model) -> None:
    """Give `logits_rows` its default, the last row."""
    rows = next(value for value in graph.graph.inputs if value.name == interface.LOGITS_ROWS)
    rows.const_value = ir.Tensor(np.array([-1], np.int64), name=interface.LOGITS_ROWS)
    graph.graph.register_initializer(rows)
