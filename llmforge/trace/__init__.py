"""Frontend: a checkpoint's model, traced without weights to a graph of the canonical dialect (docs/dialect.md).

The model is built from its configuration with parameters that have no memory (`skeleton`). Attention, norms and
rotary embedding are substituted so that each arrives as one node (`attention`, `masks`, `norms`, `rotary`), and so are
experts (`experts`, `rows`). One step is exported and translated (`capture`), with as many layers as show how they
repeat (`depth`), cleaned up (`cleanup`), grown to its depth (`stamp`), and its initializers get the checkpoint's
tensors, lazily (`weights`). What the dialect's verifier then does not know is refused by name. `reference` is what a
graph is held against (`llmforge.verify_trace`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import onnx_ir as ir

from llmforge import dialect, interface
from llmforge.errors import UnsupportedError, VerificationError
from llmforge.trace import pattern, stamp
from llmforge.trace.pattern import Irregular, Pattern

if TYPE_CHECKING:
    from llmforge.checkpoint import Checkpoint

UNBOUNDED = 8192  # positions at which a model without a longest context (ALiBi) is looked at


def trace(checkpoint: Checkpoint, *, shorten: bool = True) -> ir.Model:
    """Trace the model of `checkpoint` to the canonical dialect in fp32; its weights stay on disk until they are read.

    Where its layers provably repeat, a few are traced and copied, unless `shorten` is off; the graph is the same, and
    says in its metadata (`pattern.LAYERS`) what was done.

    Raises:
        CheckpointError: a parameter has no tensor, or one of another shape.
        UnsupportedError: the architecture cannot be traced; the message names it and the reason.
    """
    config = checkpoint.config
    try:
        return _trace(checkpoint, None if shorten else Irregular("all layers were asked for"))
    except UnsupportedError as error:
        name = (config.architectures or [type(config).__name__])[0]
        raise UnsupportedError(f"architecture {name!r} cannot be compiled: {error.message}", hint=error.hint) from error


def _trace(checkpoint: Checkpoint, irregular: Irregular | None) -> ir.Model:
    """Trace; all layers, where it is known that they are `irregular`."""
    # here, because these import torch and transformers, which take seconds
    from llmforge.trace import capture, cleanup, experts, internals, primitives, skeleton, tokenwise, weights
    from llmforge.trace.attention import Attention
    from llmforge.trace.primitives import OpenAttention

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
    cleanup.name_dims(graph)
    if open_code:
        weightless = {capture.MODEL + name for name in model.state_dict()}
        primitives.recognize(graph, weightless, positions)
    cleanup.canonicalize(graph)
    tokenwise.check(graph)
    if isinstance(repetition, Pattern):
        try:
            stamp.stamp(graph, repetition)
        except Irregular as reason:
            return _trace(checkpoint, reason)
    weights.attach(graph, capture.MODEL, model, checkpoint, sources)
    pattern.record(graph, irregular or repetition)
    _default_rows(graph)
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
