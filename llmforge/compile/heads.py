"""An EAGLE-3 head of a checkpoint of its own: traced, proven, quantized by the recipe, built into `engine/draft`.

A head has no text of its own to be measured on: what it reads, its target computes. So its graph is held to its model
in torch, each pass that declares no loss to the graph before it, and the engine to the last graph, all on hidden
states of every size that are drawn at random. What a lossy pass costs, answers never show: it shortens drafts.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from llmforge import passes, targets
from llmforge.backends import engines, loading
from llmforge.backends.engines import BuildRequest
from llmforge.base.errors import ForgeError, UnsupportedError, VerificationError
from llmforge.checkpoint import Checkpoint
from llmforge.checkpoint.eagle3 import Eagle3Head
from llmforge.ir import dialect, hidden_states, logits_rows
from llmforge.ir.scratch import Scratch
from llmforge.quantization.methods import PLAIN
from llmforge.recipe import Recipe
from llmforge.rewrite import pass_base
from llmforge.rewrite.pass_base import Context, Numerics
from llmforge.runtime.config import DRAFT_FOLDER, FILE, RuntimeConfig, physical_cores
from llmforge.runtime.interface import Decoder, StepInputs
from llmforge.verification import probe
from llmforge.verification.verifier import TOLERANCE

_STEPS = (1, 6, 1, 3, 1, 1)  # tokens of the steps of a run
_DRAFTED = 2  # the last ones, whose states are the head's own
_SCALES = (0.01, 1.0, 100.0)  # of hidden states, a text each: residual streams grow along a model
_HINT = "this is a bug in llmforge, or something else wrote to the files; nothing was published"
# Largest root of the mean squared difference, in standard deviations. Of a lossy pass: int4 of the sample's head costs
# .1; what has nothing to do with the head, 1.4. Of the engine: its kernels round activations to int8 where weights are
# integers.
_MOST_LOSSY = 0.7
_MOST_OF_ENGINE = 0.1


Outcome = tuple[NDArray[np.float32], NDArray[np.float32]]  # logits [S, vocabulary] and next states [S, hidden]


@dataclass(frozen=True)
class Head:
    """A head that was built: its engine, and what must be known of it."""

    engine: Path
    layers: tuple[int, ...]  # of the target, whose inputs it reads
    note: str

    def copy_into(self, staging: Path) -> None:
        """Put its engine into that of the artifact in `staging`."""
        shutil.copytree(self.engine, staging / "engine" / DRAFT_FOLDER)


@dataclass(frozen=True, eq=False)
class _Text:
    """A text that graphs are compared on: ids int64 [S], states fp32 [S, width] and [S, hidden]."""

    ids: NDArray[np.int64]
    hidden: NDArray[np.float32]
    own: NDArray[np.float32]


def build(recipe: Recipe, folder: Path) -> Head:
    """Build the head that `recipe` names into `folder`.

    Raises:
        CheckpointError, UnsupportedError: it is not a head of the recipe's checkpoint, or cannot be compiled.
        VerificationError: a graph or the engine computes something else than the head.
    """
    spec = recipe.serving.draft
    assert spec is not None
    assert spec.checkpoint is not None
    by = recipe if spec.recipe is None else Recipe.load(spec.recipe)
    target, threads = targets.find(recipe.target), recipe.engine.threads or physical_cores()
    checkpoint = Checkpoint.open(*recipe.origin())
    head = Eagle3Head.open(spec.checkpoint, checkpoint)
    digest = head.checkpoint.verify()  # which refuses numbers that are none
    model = _traced(head, recipe.engine.max_context)
    texts = _texts(head)
    _hold_to_torch(head, model, texts, threads)
    _run_passes(by, model, texts, Context(target, scratch=Scratch(folder)), threads)
    engine = engines.for_target(recipe.engine.backend, target)
    lowered, _ = engine.lower(model, target, recipe.engine)
    ids = None if head.target_ids is None else head.target_ids.tolist()
    if ids is not None:
        hidden_states.spread_logits(lowered, ids, checkpoint.geometry.vocabulary)
    ends = checkpoint.eos_token_ids, checkpoint.bos_token_id
    engine.build(BuildRequest(lowered, folder / "engine", recipe.engine, target, *ends))
    _hold_engine(model, folder / "engine", ids, texts, threads)
    return Head(
        folder / "engine",
        head.layers,
        f"speculation: EAGLE-3 head {head.checkpoint.path.name} ({digest}), {head.draft_vocabulary} tokens, reads what "
        f"enters layers {', '.join(map(str, head.layers))}",
    )


def _traced(head: Eagle3Head, positions: int) -> ir.Model:
    """Trace a head, and give `logits_rows` its default."""
    from llmforge.trace.export import eagle3  # imports torch

    model = eagle3.trace(head, positions)
    logits_rows.default_to_last(model)
    dialect.check(model)
    return model


def _texts(head: Eagle3Head) -> list[_Text]:
    """Draw texts whose last tokens are of a draft: they have no states of the target."""
    random, size = np.random.default_rng(0), sum(_STEPS)
    geometry, made = head.checkpoint.geometry, []
    for scale in _SCALES:
        hidden = scale * random.standard_normal((size, len(head.layers) * head.target_hidden), np.float32)
        own = scale * random.standard_normal((size, geometry.hidden), np.float32)
        hidden[-_DRAFTED:], own[:-_DRAFTED] = 0, 0
        ids = random.integers(0, geometry.vocabulary, size, np.int64)
        made.append(_Text(ids, hidden.astype(np.float32), own.astype(np.float32)))
    return made


def _run(session: Decoder[Any], text: _Text) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """Run a text in steps over a cache: logits [S, vocabulary] and the next states [S, hidden]."""
    cache, past = session.allocate(1, len(text.ids)), 0
    logits, states = [], []
    for count in _STEPS:
        at = slice(past, past + count)
        inputs = StepInputs(
            text.ids[None, at],
            np.array([past], np.int32),
            np.arange(count),
            hidden_states=text.hidden[None, at],
            draft_states=text.own[None, at],
        )
        logits.append(session.step(inputs, cache)[0])
        assert session.hidden_states is not None
        states.append(session.hidden_states[0].copy())
        past += count
    return np.concatenate(logits), np.concatenate(states)


def _outcomes(model: ir.Model, texts: Sequence[_Text], threads: int) -> list[Outcome]:
    session = probe.open_session(model, probe.InitializerArrays(), threads)
    return [_run(session, text) for text in texts]


def _hold_to_torch(head: Eagle3Head, model: ir.Model, texts: Sequence[_Text], threads: int) -> None:
    """Hold the traced graph to the head's model in torch, whose numbers were read apart from the graph's."""
    from llmforge.trace.export.eagle3 import HeadReference  # imports torch

    reference = HeadReference(head)
    expected = [reference.run(text.ids, text.hidden, text.own) for text in texts]
    made, allowed = _outcomes(model, texts, threads), TOLERANCE[ir.DataType.FLOAT]
    if (found := _largest(expected, made)) > allowed:
        raise VerificationError(
            f"the graph of the head in {head.checkpoint.path} does not compute what its model computes in torch: it is "
            f"{found:.3g} standard deviations off, allowed are {allowed:g}",
            hint=_HINT,
        )


def _run_passes(by: Recipe, model: ir.Model, texts: Sequence[_Text], context: Context, threads: int) -> None:
    """Run the passes of the recipe `by` over the graph of a head, and hold each to what it declares."""
    steps = by.instantiate(passes.ALL)
    if calibrated := [step.name for step in steps if step.demands()]:
        raise UnsupportedError(
            f"{by.where('passes')}: {', '.join(dict.fromkeys(calibrated))} would calibrate the EAGLE-3 head, and a "
            "head has no text to calibrate on",
            hint="name another recipe for the head, with a method that reads no text: "
            f"`{{method: {PLAIN.name}}}` in `speculation: {{method: eagle3, checkpoint: …, recipe: head.yaml}}`",
        )
    before = _outcomes(model, texts, threads)
    for step in steps:
        try:
            changes = pass_base.run(step, model, context)
        except ForgeError as error:
            error.message = f"EAGLE-3 head: {error.message}"
            raise
        if not changes:
            continue
        dialect.check(model)
        after = _outcomes(model, texts, threads)
        lossy = step.numerics is Numerics.LOSSY
        found = (_mean if lossy else _largest)(before, after)
        allowed = _MOST_LOSSY if lossy else TOLERANCE[ir.DataType.FLOAT]
        if not found <= allowed:
            raise VerificationError(
                f"pass {step.name} changed what the EAGLE-3 head computes: by {found:.3g} standard deviations, allowed "
                f"are {allowed:g} of a {step.numerics.value} pass"
            )
        before = after


def _hold_engine(
    model: ir.Model, folder: Path, ids: Sequence[int] | None, texts: Sequence[_Text], threads: int
) -> None:
    """Hold the engine in `folder` to the last graph, whose logits are of the tokens `ids` (None: of all)."""
    session = loading.open_engine(folder, RuntimeConfig.read(folder / FILE), threads)
    made = [_run(session, text) for text in texts]
    if ids is not None:
        made = [(logits[:, ids], states) for logits, states in made]
    if not (found := _mean(_outcomes(model, texts, threads), made)) <= _MOST_OF_ENGINE:
        raise VerificationError(
            f"the engine of the EAGLE-3 head does not compute what was proven: it is {found:.3g} standard deviations "
            f"off, allowed are {_MOST_OF_ENGINE:g}",
            hint=_HINT,
        )


def _largest(expected: Sequence[Outcome], made: Sequence[Outcome]) -> float:
    """Return the largest difference of logits or states, in standard deviations of what is expected in a text."""
    return max(float(np.abs(given - wanted).max() / wanted.std()) for wanted, given in _arrays(expected, made))


def _mean(expected: Sequence[Outcome], made: Sequence[Outcome]) -> float:
    """Return the root of the mean squared difference, likewise."""
    pairs = _arrays(expected, made)
    return max(float(np.sqrt(np.square(given - wanted).mean()) / wanted.std()) for wanted, given in pairs)


def _arrays(expected: Sequence[Outcome], made: Sequence[Outcome]) -> Iterator[Outcome]:
    """Pair what is expected of each text, logits and states, with what was made."""
    for one, other in zip(expected, made, strict=True):
        yield from zip(one, other, strict=True)
