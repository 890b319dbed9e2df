"""Measure where quality went: the divergence after each lossy pass, and what bytes and time it bought."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from llmforge.base.errors import DataError
from llmforge.base.progress import Progress
from llmforge.checkpoint.text import TokenWindow
from llmforge.compile import lossy_parts
from llmforge.compile.lossy_parts import LossyPart, LossyStep
from llmforge.ir import graph
from llmforge.measure import footprint
from llmforge.metrics import units
from llmforge.metrics.attribution import (
    MEASURED,
    AttributedStep,
    Attribution,
    LayerCost,
    ReadCaches,
    ReadWeights,
    StepBandwidth,
    estimate,
    estimates,
)
from llmforge.metrics.intervals import SMALLEST_SAMPLE
from llmforge.metrics.latency import Latency
from llmforge.metrics.tokens import Floats
from llmforge.targets import Target
from llmforge.verification.divergence import Divergence

DOCUMENTS, TOKENS = 24, 64  # a graph of the sample runs in half a second; more of both is `llmforge bisect`
SHARE_DOCUMENTS, SHARE_TOKENS = 8, 32  # of `layer_shares`
TRACED = "traced"  # name of the first step
STREAMED_BYTES = 1 << 28  # of logits of all documents, for a graph that is streamed
STREAMED_TOKENS = 32


def choose_texts(
    windows: Sequence[TokenWindow], model_bytes: int, vocabulary: int, documents: int, tokens: int, whole_bytes: int
) -> list[NDArray[np.int64]]:
    """Spread the documents to run over all of them, and cut each; fewer where the model is streamed.

    Raises:
        DataError: there are fewer than an interval needs.
    """
    if model_bytes > whole_bytes:
        tokens = min(tokens, STREAMED_TOKENS)
        documents = min(documents, max(SMALLEST_SAMPLE, STREAMED_BYTES // (4 * tokens * vocabulary)))
    if len(windows) < SMALLEST_SAMPLE:
        raise DataError(
            f"the text has {len(windows)} documents; bisecting needs {SMALLEST_SAMPLE} or more",
            hint="give validation.quality.data more documents",
        )
    picked = np.linspace(0, len(windows) - 1, min(documents, len(windows))).round().astype(int)
    return [np.asarray(windows[i].ids[:tokens], np.int64) for i in picked]


def measure(
    traced: ir.Model,
    lossy: Sequence[LossyStep],
    windows: Sequence[TokenWindow],
    progress: Progress,
    *,
    memory: StepBandwidth | None,
    context: int,
    threads: int,
    vocabulary: int,
) -> Attribution:
    """Run the traced graph and the one after each lossy pass on `windows`, one of each document.

    `context` is what a cache holds in the decode step whose time is predicted from `memory`; None: none is.

    Raises:
        DataError: the text has too few documents.
        VerificationError: a logit is NaN or infinite.
    """
    progress.stage("Attribute the loss")
    with TemporaryDirectory() as folder:
        divergence = Divergence([], Path(folder), threads)
        held = graph.weight_bytes(traced)
        divergence.texts = choose_texts(windows, held, vocabulary, DOCUMENTS, TOKENS, divergence.whole_bytes)
        tokens = divergence.tokens
        reached: list[Floats] = [np.zeros(len(tokens))]
        divergence.hold_against(traced)
        for done, each in enumerate(lossy):
            progress.advance(done, 2 * len(lossy))
            reached.append(divergence.of(each.after))
        steps = [_step(TRACED, traced, reached[0], reached[0], tokens, memory, context)]
        for number, each in enumerate(lossy):
            progress.advance(len(lossy) + number, 2 * len(lossy))
            layers, why = _layers(each, divergence)
            now, before = reached[number + 1], reached[number]
            step = _step(each.step.name, each.after, now, now - before, tokens, memory, context)
            steps.append(step.model_copy(update={"layers": layers, "no_layers": why}))
    return Attribution(
        documents=len(tokens),
        tokens=int(tokens.sum()),
        document_tokens=tuple(int(count) for count in tokens),
        context=context,
        memory=memory,
        steps=tuple(steps),
    )


@dataclass(frozen=True)
class LayerShare:
    """A layer, and the share of what its pass cost that keeping it would gain."""

    name: str
    share: float
    part: LossyPart


def layer_shares(
    lossy: LossyStep, windows: Sequence[TokenWindow], progress: Progress, *, threads: int
) -> tuple[LayerShare, ...]:
    """Tell which layers a pass lost most in, the largest first, on little text, for nothing is decided by it.

    () where the pass has no layers, its graph is too large to run whole, or there is no text.
    """
    with TemporaryDirectory() as folder:
        texts = [np.asarray(window.ids[:SHARE_TOKENS], np.int64) for window in windows[:SHARE_DOCUMENTS]]
        divergence = Divergence(texts, Path(folder), threads)
        loss = lossy_parts.of_pass(lossy, divergence)
        if loss is None or not texts or divergence.streams(lossy.before):
            return ()
        divergence.hold_against(lossy.before, loss.watch)
        total, shares = float(loss.of().sum()), []
        for done, part in enumerate(loss.parts):
            progress.advance(done, len(loss.parts))
            shares.append(LayerShare(part.name.partition(", ")[0], 1 - float(loss.of(part.leaves).sum()) / total, part))
    return tuple(sorted(shares, key=lambda each: -each.share))


def _step(
    name: str,
    model: ir.Model,
    reached: Floats,
    added: Floats,
    tokens: Floats,
    memory: StepBandwidth | None,
    context: int,
) -> AttributedStep:
    weights, caches, read = footprint.reads(model), footprint.caches(model), footprint.count(model)
    return AttributedStep(
        name=name,
        kld_mean=estimate(reached, tokens),
        added=estimate(added, tokens),
        reached=tuple(reached.tolist()),
        weight_bytes=read.weights,
        kv_bytes_per_token=read.kv,
        step_ms=None if memory is None else memory.step_ms(read.weights + context * read.kv),
        weights=tuple(ReadWeights.model_validate(each, from_attributes=True) for each in weights),
        caches=tuple(ReadCaches.model_validate(each, from_attributes=True) for each in caches),
    )


def _layers(lossy: LossyStep, divergence: Divergence) -> tuple[tuple[LayerCost, ...], str | None]:
    """Measure what keeping each layer gains, against the graph before the pass; else say why that is not measured."""
    if divergence.streams(lossy.before):
        held = units.size(graph.weight_bytes(lossy.before))
        return (), f"a graph of {held} runs block by block, which takes long for each layer; `llmforge bisect` does it"
    loss = lossy_parts.of_pass(lossy, divergence)
    if loss is None:
        return (), "no layer of it can be kept as it was before"
    divergence.hold_against(lossy.before, loss.watch)
    total, tokens = loss.of(), divergence.tokens
    if not loss.parts:
        return (), "it has no layers"
    gained = np.stack([total - loss.of(part.leaves) for part in loss.parts], 1)
    costs = tuple(
        LayerCost(name=part.name, gain=gain, gained=tuple(sums.tolist()))
        for part, gain, sums in zip(loss.parts, estimates(gained, tokens), gained.T, strict=True)
    )
    return costs, None


def memory_of(target: Target, latency: Latency | None, depth: int, ranks: int) -> StepBandwidth | None:
    """Find what a decode step through `depth` layers gets of the memory, and say whose figure it is."""
    fixed_us = depth * target.share("layer_us").value
    if target.bandwidth_gbs is not None:
        source, share = f"the memory bandwidth of {target.title}", target.share("bandwidth").value
        rate = ranks * target.bandwidth_gbs.value * 1e9
        return StepBandwidth(source=source, bytes_per_second=rate, share=share, fixed_us=fixed_us)
    if latency is not None and latency.bandwidth is not None:
        rate = latency.bandwidth.working_set_bytes_per_second
        return StepBandwidth(source=MEASURED, bytes_per_second=rate, share=1.0, fixed_us=fixed_us)
    return None
