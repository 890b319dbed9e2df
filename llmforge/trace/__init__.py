"""Frontend: a checkpoint's model, traced without weights to a graph of the canonical dialect (docs/dialect.md).

The model is built from its configuration with parameters that have no memory (`skeleton`). Attention, norms and
rotary embedding are substituted so that each arrives as one node (`attention`, `masks`, `norms`, `rotary`). One step
is exported and translated (`capture`), cleaned up (`cleanup`), and its initializers get the checkpoint's tensors,
lazily (`weights`). What the dialect's verifier then does not know is refused by name.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import onnx_ir as ir

from llmforge import dialect, interface
from llmforge.errors import UnsupportedError, VerificationError

if TYPE_CHECKING:
    from llmforge.checkpoint import Checkpoint

UNBOUNDED = 8192  # positions at which a model without a longest context (ALiBi) is looked at


def trace(checkpoint: Checkpoint) -> ir.Model:
    """Trace the model of `checkpoint` to the canonical dialect in fp32; its weights stay on disk until they are read.

    Raises:
        CheckpointError: a parameter has no tensor, or one of another shape.
        UnsupportedError: the architecture cannot be traced; the message names it and the reason.
    """
    config = checkpoint.config
    try:
        return _trace(checkpoint)
    except UnsupportedError as error:
        name = (config.architectures or [type(config).__name__])[0]
        raise UnsupportedError(f"architecture {name!r} cannot be compiled: {error.message}", hint=error.hint) from error


def _trace(checkpoint: Checkpoint) -> ir.Model:
    # here, because these import torch and transformers, which take seconds
    from llmforge.trace import capture, cleanup, internals, primitives, skeleton, weights
    from llmforge.trace.attention import Attention
    from llmforge.trace.primitives import OpenAttention

    geometry = checkpoint.geometry
    positions = UNBOUNDED if geometry.context is None else geometry.context
    open_code = not internals.takes_attention(checkpoint.config)
    attention = OpenAttention(positions) if open_code else Attention(positions)
    with internals.registered(attention.NAME, attention.attend, attention.describe):
        model, mode = skeleton.build(checkpoint.config, attention.NAME)
        sources = weights.plan(model, checkpoint)
        weights.untie(model, sources)
        graph = capture.capture(model, mode, attention, positions, geometry.layers)
    cleanup.name_dims(graph)
    weightless = {capture.MODEL + name for name in model.state_dict()}
    if open_code:
        primitives.recognize(graph, weightless, geometry.layers, positions)
    cleanup.canonicalize(graph)
    weights.attach(graph, capture.MODEL, model, checkpoint, sources)
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
