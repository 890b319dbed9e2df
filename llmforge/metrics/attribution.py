"""Where quality went and what it bought: each lossy pass with its cost, its bytes and the time of a decode step.

Every figure follows from raw values beside it: divergences from sums over documents, bytes from groups of tensors,
times from those bytes and what the memory gives. `recomputed` and `miscounted` hold a record to that.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import pairwise

import numpy as np
from pydantic import Field

from llmforge.metrics.intervals import Estimate
from llmforge.metrics.quality import MOST_DOCUMENTS
from llmforge.metrics.record import ReportRecord
from llmforge.metrics.studentized import bounds, studentized
from llmforge.metrics.tokens import Floats

MOST_STEPS = 257  # the traced graph, and after it the passes that a recipe may have
MOST_LAYERS = 65_536
MEASURED = "the read bandwidth measured in the same run"
_AT_ONCE = 256  # columns of sums


class LayerCost(ReportRecord):
    """What keeping a layer as it was before the pass would gain: mean KLD, in nats a token, of the pass alone."""

    name: str
    gain: Estimate
    gained: tuple[float, ...] = Field(max_length=MOST_DOCUMENTS)  # sum over each document, nats


class ReadWeights(ReportRecord):
    """Tensors of the graph after a pass that have one name but for the numbers in it."""

    name: str  # "model.layers.*.mlp.down_proj.weight"
    dtype: str
    tensors: int = Field(gt=0)
    size_bytes: int = Field(ge=0)
    read_bytes: int = Field(ge=0)  # by a decode step at batch 1: of a table nothing, of experts the chosen ones


class ReadCaches(ReportRecord):
    """Caches of the graph after a pass that have one name but for the numbers in it."""

    name: str  # "past_key_values.*.key"
    dtype: str
    tensors: int = Field(gt=0)
    token_bytes: int = Field(ge=0)  # of a token of context, in all of them


class StepBandwidth(ReportRecord):
    """What a predicted time is made of."""

    source: str  # whose bandwidth, as text; `MEASURED`: that of the timings beside it
    bytes_per_second: float = Field(gt=0)  # by the data sheet, or as measured
    share: float = Field(gt=0)  # of it that a decode step reaches
    fixed_us: float = Field(ge=0)  # of a step, in all its layers

    def step_ms(self, size_bytes: float) -> float:
        """Predict a decode step that reads `size_bytes`."""
        return 1e3 * size_bytes / (self.bytes_per_second * self.share) + 1e-3 * self.fixed_us


class AttributedStep(ReportRecord):
    """The graph after a lossy pass; the first one is the graph as it was traced, before any."""

    name: str
    kld_mean: Estimate  # from the traced graph, nats a token
    added: Estimate  # to that of the step before, on the same documents
    weight_bytes: int  # that a decode step reads: the sum of `weights`
    kv_bytes_per_token: int  # the sum of `caches`
    step_ms: float | None  # predicted, of a decode step at batch 1; None: no bandwidth is known
    weights: tuple[ReadWeights, ...] = Field(max_length=MOST_LAYERS)
    caches: tuple[ReadCaches, ...] = Field(max_length=MOST_LAYERS)
    reached: tuple[float, ...] = Field(max_length=MOST_DOCUMENTS)  # KLD, summed over each document
    layers: tuple[LayerCost, ...] = Field(default=(), max_length=MOST_LAYERS)  # of a pass that has them
    no_layers: str | None = None  # why there are none, as text


class Attribution(ReportRecord):
    """The steps of a build, on documents of the evaluation text with the cache in use."""

    documents: int
    tokens: int
    document_tokens: tuple[int, ...] = Field(max_length=MOST_DOCUMENTS)
    context: int  # tokens in the cache of the decode step that is predicted
    memory: StepBandwidth | None  # None: no bandwidth is known
    steps: tuple[AttributedStep, ...] = Field(max_length=MOST_STEPS)


def estimates(sums: Floats, tokens: Floats) -> list[Estimate]:
    """Make the mean over tokens of each column of sums over documents [D, F], with its interval over documents."""
    found = []
    for at in range(0, sums.shape[1], _AT_ONCE):
        some = sums[:, at : at + _AT_ONCE]
        for mean in studentized(np.column_stack([tokens, some]), lambda totals: totals[:, 1:] / totals[:, :1]):
            low, high = bounds(mean) or (None, None)
            found.append(Estimate(value=mean.value, low=low, high=high, samples=len(tokens)))
    return found


def estimate(sums: Floats, tokens: Floats) -> Estimate:
    """Make the mean over tokens of sums over documents [D], with its interval over documents."""
    return estimates(sums[:, None], tokens)[0]


def miscounted(said: Attribution) -> Iterator[str]:
    """Name the bytes of steps, and their predicted times, that groups of tensors and the memory do not give."""
    for step in said.steps:
        weights, caches = sum(each.read_bytes for each in step.weights), sum(each.token_bytes for each in step.caches)
        if step.weight_bytes != weights or any(each.read_bytes > each.size_bytes for each in step.weights):
            yield f"weight_bytes of step {step.name[:40]}"
        if step.kv_bytes_per_token != caches:
            yield f"kv_bytes_per_token of step {step.name[:40]}"
        made = None if said.memory is None else said.memory.step_ms(weights + said.context * caches)
        same = step.step_ms is made if step.step_ms is None or made is None else math.isclose(step.step_ms, made)
        if not same:
            yield f"step_ms of step {step.name[:40]}"


def recomputed(said: Attribution) -> Iterator[tuple[str, Estimate, Estimate]]:
    """Make every figure of divergence again from the sums over documents: what it is, as said, and as made.

    Raises:
        ValueError: there are no steps, or other documents than counted; sums are not of each document.
    """
    tokens = np.array(said.document_tokens, np.float64)
    if not said.steps or not len(tokens) or (said.documents, said.tokens) != (len(tokens), int(tokens.sum())):
        raise ValueError("attribution: documents or tokens")
    if (tokens < 1).any():
        raise ValueError("attribution: a document without tokens")
    figures: list[tuple[str, Estimate, tuple[float, ...] | Floats]] = []
    for step in said.steps:
        figures.append((f"kld_mean of step {step.name[:40]}", step.kld_mean, step.reached))
        figures += [
            (f"gain of {layer.name[:40]} in step {step.name[:40]}", layer.gain, layer.gained) for layer in step.layers
        ]
    if any(len(sums) != len(tokens) for _, _, sums in figures):
        raise ValueError("attribution: sums of other documents")
    first = said.steps[0]
    figures.append((f"added of step {first.name[:40]}", first.added, first.reached))
    for before, step in pairwise(said.steps):
        added = np.array(step.reached) - np.array(before.reached)
        figures.append((f"added of step {step.name[:40]}", step.added, added))
    made = estimates(np.array([sums for _, _, sums in figures], np.float64).T, tokens)
    yield from ((what, figure, again) for (what, figure, _), again in zip(figures, made, strict=True))
