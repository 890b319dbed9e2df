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
    from llmforge.trace import capture, cleanup, internals, skeleton, tokenwise, weights
    from llmforge.trace.attention import Attention

    geometry = checkpoint.geometry
    if geometry.context is None:
        raise UnsupportedError("its configuration has no max_position_embeddings, the length of its rotary tables")
    attention = Attention(geometry.context)
    with internals.registered(Attention.NAME, attention.attend, attention.mask):
        model, mode = skeleton.build(checkpoint.config, Attention.NAME)
        sources = weights.plan(model, checkpoint)
        weights.untie(model, sources)
        graph = capture.capture(model, mode, attention, geometry.context, geometry.layers)
    cleanup.canonicalize(graph)
    tokenwise.check(graph)
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
