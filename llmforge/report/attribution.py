"""Where quality went and what it bought: each lossy pass with its cost, its bytes and the time of a decode step."""

from __future__ import annotations

from pydantic import Field

from llmforge.metrics.intervals import Estimate
from llmforge.metrics.record import Record

MOST_STEPS = 257  # the traced graph, and behind it the passes that a recipe may have
MOST_LAYERS = 65_536


class LayerCost(Record):
    """What keeping a layer as it was before the pass would gain: mean KLD, in nats a token, of the pass alone."""

    name: str
    gain: Estimate


class AttributedStep(Record):
    """The graph behind a lossy pass; the first one is the graph as it was traced, before any."""

    name: str
    kld_mean: Estimate  # from the traced graph, nats a token
    added: Estimate  # to that of the step before, on the same documents
    weight_bytes: int  # that a decode step reads
    kv_bytes_per_token: int
    step_ms: float | None  # predicted, of a decode step at batch 1; None: no bandwidth is known
    layers: tuple[LayerCost, ...] = Field(default=(), max_length=MOST_LAYERS)  # of a pass that has them


class Attribution(Record):
    """The steps of a build, on documents of the evaluation text with the cache in use."""

    documents: int
    tokens: int
    context: int  # tokens in the cache of the decode step that is predicted
    predicted_by: str | None  # whose bandwidth, in words
    steps: tuple[AttributedStep, ...] = Field(max_length=MOST_STEPS)
