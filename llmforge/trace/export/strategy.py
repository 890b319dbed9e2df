"""Two ways in which attention gets into a trace: substituted, one node each, or as the model's own code computes it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import onnx_ir as ir
from transformers import PretrainedConfig, PreTrainedModel

from llmforge.base.errors import UnsupportedError
from llmforge.checkpoint import Checkpoint
from llmforge.ir import interface
from llmforge.trace.canonicalize import attention_recognition, simplification, tokenwise
from llmforge.trace.canonicalize.attention_recognition import OpenAttention
from llmforge.trace.export import capture, fallback, pattern, replicate_layers, skeleton, weights
from llmforge.trace.export.pattern import Irregular, Pattern
from llmforge.trace.hooks import experts, internals
from llmforge.trace.hooks.attention import AttentionHook

UNBOUNDED = 8192  # positions at which a model is looked at whose configuration does not say how many it has


@dataclass(frozen=True, eq=False)
class Strategy:
    """How attention gets into a trace.

    `attention` is what transformers calls for it, and `canonicalize` brings the raw graph to the dialect, given the
    names of its initializers that have no numbers.
    """

    attention: AttentionHook
    canonicalize: Callable[[ir.Model, set[str]], None]

    @contextmanager
    def model(
        self, config: PretrainedConfig, compute: Callable[..., object]
    ) -> Iterator[tuple[PreTrainedModel, internals.FakeTensorMode]]:
        """Build the model of `config` without weights, for as long as this attention and `compute` for experts are its.

        Raises:
            UnsupportedError: see `skeleton.build`.
        """
        with self.attention.registered(), internals.registered_experts(experts.NAME, compute):
            model, mode = skeleton.build(config, self.attention.NAME)
            model.set_experts_implementation(experts.NAME)
            yield model, mode


def substituted(config: PretrainedConfig, context: int | None) -> Strategy:
    """Substitute attention, masks and rotary embedding of a model of `context` tokens (None: not bounded)."""
    positions = UNBOUNDED if context is None else context
    open_code = not internals.takes_attention(config)
    attention = OpenAttention(positions) if open_code else AttentionHook(positions)

    def canonicalize(graph: ir.Model, weightless: set[str]) -> None:
        simplification.name_dims(graph)
        if open_code:
            attention_recognition.recognize(graph, weightless, positions)
        if context is None and any(name.startswith("rotary.") for name in graph.graph.initializers):
            raise UnsupportedError("its configuration has no max_position_embeddings, the length of its rotary tables")
        simplification.canonicalize(graph)
        tokenwise.check(graph)

    return Strategy(attention, canonicalize)


def own(context: int | None, reason: str) -> Strategy:
    """Leave the model, of `context` tokens (None: not bounded), its own attention, because of `reason`."""

    def canonicalize(graph: ir.Model, weightless: set[str]) -> None:
        simplification.canonicalize(graph, weights=weightless)
        graph.metadata_props[interface.FALLBACK] = reason

    return Strategy(fallback.OwnAttention(UNBOUNDED if context is None else context), canonicalize)


def export(checkpoint: Checkpoint, choose: Callable[[], Strategy], irregular: Irregular | None) -> ir.Model:
    """Trace the model of `checkpoint` as `choose` says, and attach its weights; all layers, where they are `irregular`.

    Raises:
        CheckpointError: a parameter has no tensor, or one of another shape.
        UnsupportedError: it cannot be traced so.
    """
    strategy = choose()
    # One thread: where vectors of a table that torch computes end would move with their number, and the last bits too.
    with internals.torch_threads(1), strategy.model(checkpoint.config, experts.ExpertsHook()) as (model, mode):
        sources = weights.plan(model, checkpoint)
        weights.untie(model, sources)
        graph, repetition = capture.capture(
            model, mode, strategy.attention, checkpoint.geometry.layers, shorten=irregular is None
        )
    strategy.canonicalize(graph, {capture.MODEL + name for name in model.state_dict()})
    if isinstance(repetition, Pattern):
        try:
            replicate_layers.replicate(graph, repetition)
        except Irregular as reason:
            return export(checkpoint, choose, reason)
    weights.attach(graph, capture.MODEL, model, checkpoint, sources)
    pattern.record(graph, irregular or repetition)
    if (limit := strategy.attention.limit.limit) is not None:
        interface.record_limit(graph, limit)
    return graph
