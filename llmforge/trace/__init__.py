"""Frontend: a checkpoint's model, traced without weights to a graph of the canonical dialect (docs/dialect.md).

The model is built from its configuration with parameters that have no memory (`export.skeleton`). Attention, norms,
rotary embedding and experts are substituted so that each arrives as one node (`hooks`). One step is exported and
translated (`export.capture`), with as many layers as show how they repeat (`export.depth`), brought to the dialect
(`canonicalize`), grown to its depth (`export.replicate_layers`), and its initializers get the checkpoint's tensors,
lazily (`export.weights`). Where a substitution fails, the model's own attention is traced (`export.fallback`). What the
dialect's verifier then does not know is refused by name. `export.reference` is what a graph is held against
(`llmforge.verification.trace_verifier`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import onnx_ir as ir

from llmforge.base.errors import ForgeError, NotADecoder, UnsupportedError, VerificationError
from llmforge.ir import dialect, logits_rows
from llmforge.trace.export.pattern import Irregular

if TYPE_CHECKING:
    from llmforge.checkpoint import Checkpoint, Encoding

# Of a refusal that does not say what it would take itself.
NEEDED = "needed: a hook that recognizes what the model computes there, or operators for it (docs/new-architecture.md)"
REFUSALS = (UnsupportedError, VerificationError)  # the latter of a graph that the dialect or its operators refuse


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
    from llmforge.trace.export import strategy  # here, because torch and transformers take seconds to import

    if checkpoint.encoding is not None:
        return _encoder(checkpoint, checkpoint.encoding)
    irregular = None if shorten else Irregular("all layers were asked for")
    context = checkpoint.geometry.context
    try:
        try:
            graph = strategy.export(checkpoint, lambda: strategy.substituted(checkpoint.config, context), irregular)
            return _checked(graph)
        except NotADecoder:
            raise
        except REFUSALS as error:
            return _fallen_back(checkpoint, irregular, error)
    except REFUSALS as error:
        kind = type(error) if isinstance(error, UnsupportedError) else UnsupportedError
        raise kind(
            f"architecture {checkpoint.architecture!r} cannot be compiled: {error.message}", hint=error.hint or NEEDED
        ) from error


def _encoder(checkpoint: Checkpoint, encoding: Encoding) -> ir.Model:
    """Trace a model that reads whole sequences."""
    from llmforge.trace.export import encoder

    try:
        return encoder.trace(checkpoint, encoding)
    except REFUSALS as error:
        raise UnsupportedError(
            f"architecture {checkpoint.architecture!r} cannot be compiled: {error.message}", hint=error.hint or NEEDED
        ) from error


def _fallen_back(checkpoint: Checkpoint, irregular: Irregular | None, reason: ForgeError) -> ir.Model:
    """Trace the model's own attention, because of `reason`; all layers, where they are `irregular`."""
    from llmforge.trace.export import fallback, strategy

    try:
        fallback.refuse_unprovable(checkpoint)
        context = checkpoint.geometry.context
        return _checked(strategy.export(checkpoint, lambda: strategy.own(context, reason.message), irregular))
    except NotADecoder:
        raise
    except REFUSALS as error:
        fallback.refuse_encoders(checkpoint)
        raise fallback.refused_too(reason, error) from error


def _checked(graph: ir.Model) -> ir.Model:
    """Give `logits_rows` its default, the last row, and refuse what the dialect does not know."""
    logits_rows.default_to_last(graph)
    dialect.check(graph)
    return graph
