"""Frontend: a checkpoint's model, traced without weights to a graph of the canonical dialect (docs/dialect.md).

The model is built from its configuration with parameters that have no memory (`skeleton`). Attention, norms and
rotary embedding are substituted so that each arrives as one node (`attention`, `masks`, `norms`, `rotary`), and so are
experts (`experts`). One step is exported and translated (`capture`), with as many layers as show how they repeat
(`depth`), brought to the dialect (`canonicalize`), grown to its depth (`replicate_layers`), and its initializers get
the checkpoint's tensors, lazily (`weights`). Where a substitution fails, the model's own attention is traced
(`fallback`). What the dialect's verifier then does not know is refused by name. `reference` is what a graph is held
against (`llmforge.verification.trace_verifier`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np
import onnx_ir as ir

from llmforge.base.errors import ForgeError, NotADecoder, UnsupportedError, VerificationError
from llmforge.ir import dialect, interface
from llmforge.trace.export import pattern, replicate_layers
from llmforge.trace.export.pattern import Irregular, Pattern

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from llmforge.checkpoint import Checkpoint
    from llmforge.trace.export import weights

REFUSALS = (UnsupportedError, VerificationError)  # the latter of a graph that the dialect or its operators refuse
UNBOUNDED = 8192  # positions at which a model is looked at whose configuration does not say how many it has


def trace(checkpoint: Checkpoint, *, shorten: bool = True) -> ir.Model:
    """Trace the model of `checkpoint` to the canonical dialect in fp32; its weights stay on disk until they are read.

    Where its layers provably repeat, a few are traced and copied, unless `shorten` is off; the graph is the same, and
    says in its metadata (`pattern.LAYERS`) what was done.

    Where attention, masks or positions cannot be hooked, the model's own attention is traced (`fallback`), and the
    metadata `interface.FALLBACK` of the graph says why. Such a graph is a candidate:
    `verification.trace_verifier` proves or refuses it.

    Raises:
        CheckpointError: a parameter has no tensor, or one of another shape.
        UnsupportedError: the architecture cannot be traced; the message names it and the reason.
    """
    irregular = None if shorten else Irregular("all layers were asked for")
    try:
        try:
            return _hooked(checkpoint, irregular)
        except NotADecoder:
            raise
        except REFUSALS as error:
            return _fallen_back(checkpoint, irregular, error)
    except REFUSALS as error:
        kind = type(error) if isinstance(error, UnsupportedError) else UnsupportedError
        raise kind(
            f"architecture {checkpoint.architecture!r} cannot be compiled: {error.message}", hint=error.hint
        ) from error


def _hooked(checkpoint: Checkpoint, irregular: Irregular | None) -> ir.Model:
    """Trace with attention, masks and rotary embedding substituted; all layers, where they are `irregular`."""
    # here, because these import torch and transformers, which take seconds
    from llmforge.trace.canonicalize import attention_recognition, naming, simplification, tokenwise
    from llmforge.trace.canonicalize.attention_recognition import OpenAttention
    from llmforge.trace.export import capture, skeleton, weights
    from llmforge.trace.hooks import experts, internals
    from llmforge.trace.hooks.attention import Attention

    geometry = checkpoint.geometry
    positions = UNBOUNDED if geometry.context is None else geometry.context
    open_code = not internals.takes_attention(checkpoint.config)
    attention = OpenAttention(positions) if open_code else Attention(positions)
    with (
        internals.registered(attention.NAME, attention.attend, attention.describe),
        internals.registered_experts(experts.NAME, experts.Experts()),
    ):
        model, mode = skeleton.build(checkpoint.config, attention.NAME)
        model.set_experts_implementation(experts.NAME)
        sources = weights.plan(model, checkpoint)
        weights.untie(model, sources)
        graph, repetition = capture.capture(
            model, mode, attention, positions, geometry.layers, shorten=irregular is None
        )
    naming.name_dims(graph)
    if open_code:
        weightless = {capture.MODEL + name for name in model.state_dict()}
        attention_recognition.recognize(graph, weightless, positions)
    if geometry.context is None and any(name.startswith("rotary.") for name in graph.graph.initializers):
        raise UnsupportedError("its configuration has no max_position_embeddings, the length of its rotary tables")
    simplification.canonicalize(graph)
    tokenwise.check(graph)
    if isinstance(repetition, Pattern):
        try:
            replicate_layers.stamp(graph, repetition)
        except Irregular as reason:
            return _hooked(checkpoint, reason)
    return _finished(graph, model, checkpoint, sources, irregular or repetition)


def _fallen_back(checkpoint: Checkpoint, irregular: Irregular | None, reason: ForgeError) -> ir.Model:
    """Trace the model's own attention, because of `reason`.

    Raises:
        UnsupportedError: `reason`, where this way fails too, and why it does.
    """
    from llmforge.trace.export import fallback

    try:
        fallback.refuse_unprovable(checkpoint)
        return _own(checkpoint, irregular, reason.message)
    except NotADecoder:
        raise
    except REFUSALS as error:
        fallback.refuse_encoders(checkpoint)
        if error.message == reason.message:
            raise reason from error
        raise UnsupportedError(
            f"{reason.message}; with the attention of its own code: {error.message}", hint=reason.hint
        ) from error


def _own(checkpoint: Checkpoint, irregular: Irregular | None, reason: str) -> ir.Model:
    """Trace the model's own attention, because of `reason`; all layers, where they are `irregular`."""
    from llmforge.trace.canonicalize import simplification
    from llmforge.trace.export import capture, fallback, skeleton, weights
    from llmforge.trace.hooks import experts, internals, rotary

    geometry = checkpoint.geometry
    positions = UNBOUNDED if geometry.context is None else geometry.context
    attention = fallback.OwnAttention(positions)
    with fallback.eager(attention), internals.registered_experts(experts.NAME, experts.Experts()):
        model, mode = skeleton.build(checkpoint.config, attention.NAME)
        model.set_experts_implementation(experts.NAME)
        sources = weights.plan(model, checkpoint)
        weights.untie(model, sources)
        graph, repetition = capture.capture(
            model,
            mode,
            attention,
            positions,
            geometry.layers,
            shorten=irregular is None,
            substituted=rotary.untouched,
        )
    simplification.canonicalize(graph, weights={capture.MODEL + name for name in model.state_dict()})
    if isinstance(repetition, Pattern):
        try:
            replicate_layers.stamp(graph, repetition)
        except Irregular as again:
            return _own(checkpoint, again, reason)
    graph.metadata_props[interface.FALLBACK] = reason
    return _finished(graph, model, checkpoint, sources, irregular or repetition)


def _finished(
    graph: ir.Model,
    model: PreTrainedModel,
    checkpoint: Checkpoint,
    sources: Mapping[str, weights.Source],
    repetition: Pattern | Irregular,
) -> ir.Model:
    """Attach the weights of a clean graph, and check it."""
    from llmforge.trace.export import capture, weights

    weights.attach(graph, capture.MODEL, model, checkpoint, sources)
    pattern.record(graph, repetition)
    _default_rows(graph)
    dialect.check(graph)
    return graph


def _default_rows(graph: ir.Model) -> None:
    """Give `logits_rows` its default, the last row."""
    rows = next(value for value in graph.graph.inputs if value.name == interface.LOGITS_ROWS)
    rows.const_value = ir.Tensor(np.array([-1], np.int64), name=interface.LOGITS_ROWS)
    graph.graph.register_initializer(rows)
