"""What a recipe asks a build to compute, in tokens."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from llmforge import recipes
from llmforge.base.errors import DataError
from llmforge.checkpoint import documents
from llmforge.planning.building import BuildWork
from llmforge.quantization.statistics import RecoveryDemand, WeightDemand
from llmforge.recipe import CalibrationSpec, LatencySpec, QualitySpec, Recipe
from llmforge.recipe.latency import WorkloadSpec
from llmforge.rewrite.pass_base import Numerics, Pass

BYTES_PER_TOKEN = 4  # of text
ANSWER_TOKENS, ANSWER_BATCH = 48, 64  # `MOST_TOKENS` and `BATCH` of llmforge.measure.chat_answers
TEMPLATE_TOKENS = 32  # that a chat template writes around a question: SmolLM2's, with its system prompt
MOST_WINDOWS = 24  # of a budget: `BUDGET_WINDOWS` of llmforge.compile.texts
SMALL = 50_000_000  # parameters, up to which a recipe that `init` writes evaluates more text: it takes seconds


def of_recipe(recipe: Recipe, steps: Sequence[Pass]) -> BuildWork:
    """Count it; `steps` are the recipe's passes. Tasks, other runtimes and layers that retreat are not counted."""
    calibration, quality, latency = recipe.calibration, recipe.validation.quality, recipe.validation.latency
    demands = [demand for step in steps for demand in step.demands()]
    tokens = 0 if calibration is None or not demands else calibration.samples * calibration.length
    chosen = any(isinstance(demand, WeightDemand) for demand in demands)
    length = quality.context if quality is not None else 0 if calibration is None else calibration.length
    windows = MOST_WINDOWS if quality is not None or calibration is None else min(MOST_WINDOWS, calibration.samples)
    budget = windows * length // 3  # which decide where the figure is far from its limit
    read = [*_files(quality), *(_files(calibration) if demands or quality is None else ())]
    asked, answered = _answered(read)
    prompts, decoded = (0, 0) if latency is None else _timed(latency)
    return BuildWork(
        calibration_tokens=tokens if chosen else 0,
        observed_tokens=0 if chosen else tokens,
        budget_tokens=budget if any(step.numerics is Numerics.LOSSY for step in steps) else 0,
        asked_tokens=asked,
        answered_tokens=answered,
        quality_tokens=0 if quality is None else _evaluated(quality),
        prompt_tokens=prompts,
        timed_steps=decoded,
        chooses_formats=any(isinstance(demand, WeightDemand) and demand.is_limited for demand in demands),
        trained_tokens=sum(demand.tokens for demand in demands if isinstance(demand, RecoveryDemand)),
    )


def evaluated_of_start(parameters: int) -> int:
    """Count the tokens of evaluation text that a recipe which `init` writes for a model of so many `parameters` reads.

    SmolLM2-135M on 30,720: 135 of the build's 218 s of CPU time, and an interval of 4 % for the mean KLD.
    """
    return 30_720 if parameters <= SMALL else 15_360


def of_start(parameters: int, calibration_tokens: int, observed_tokens: int = 0, *, has_chats: bool) -> BuildWork:
    """Count what a recipe that `init` writes asks for (`planning.starting`), with so many tokens that choose codes.

    `observed_tokens` of documentation are read once, forwards. The recipe is for a model of so many `parameters`;
    `has_chats`: the chats that ship are among its texts.
    """
    windows, prompts, answer, repetitions = 512, (32, 512), 32, 6
    names = ["evaluation", "calibration"][: 2 if calibration_tokens else 1] if has_chats else []
    asked, answered = _answered([recipes.TEXT / f"chat-{name}.jsonl" for name in names])
    return BuildWork(
        calibration_tokens=calibration_tokens,
        observed_tokens=observed_tokens,
        budget_tokens=MOST_WINDOWS * windows // 3,
        asked_tokens=asked,
        answered_tokens=answered,
        quality_tokens=evaluated_of_start(parameters),
        prompt_tokens=repetitions * sum(prompts),
        timed_steps=repetitions * answer * len(prompts),
    )


def _files(spec: CalibrationSpec | QualitySpec | None) -> tuple[Path, ...]:
    """List the files of a text."""
    given: Any = () if spec is None else spec.data
    return given if isinstance(given, tuple) else (given,)


def _answered(files: Sequence[Path]) -> tuple[int, int]:
    """Count the tokens of the chats that the checkpoint answers, filled up to the longest of a batch, and its answers.

    What cannot be read is not counted: the build itself says what is wrong with it.
    """
    lengths = sorted(itertools.chain(*map(_prompts, files)))
    batches = [lengths[at : at + ANSWER_BATCH] for at in range(0, len(lengths), ANSWER_BATCH)]
    return sum(len(batch) * batch[-1] for batch in batches), ANSWER_TOKENS * len(lengths)


def _prompts(file: Path) -> Iterator[int]:
    """Give the tokens of each chat of a file that is not answered yet, by its bytes."""
    try:
        read = documents.read_documents(file)
    except DataError:
        return
    for document in read:
        if document.is_unanswered:
            yield TEMPLATE_TOKENS + len(document.text.encode()) // BYTES_PER_TOKEN


def _evaluated(spec: QualitySpec) -> int:
    """Count the tokens that are evaluated; of files of unknown length by their bytes, as far as they are there."""
    files = _files(spec)
    whole = sum(file.stat().st_size for file in files if file.is_file()) // BYTES_PER_TOKEN + _answered(files)[1]
    return whole if spec.max_tokens is None else min(spec.max_tokens, whole or spec.max_tokens)


def _timed(spec: LatencySpec) -> tuple[int, int]:
    """Count the tokens of the prompts that are timed, and the steps of decoding."""
    prompts = spec.repetitions * sum(spec.prompt_tokens)
    steps = spec.repetitions * spec.output_tokens * len(spec.prompt_tokens)
    if (surface := spec.surface) is not None:
        shapes = len(surface.batches) * surface.repetitions
        prompts += shapes * sum(surface.prompt_tokens) * len(surface.output_tokens)
        steps += shapes * sum(surface.output_tokens) * len(surface.prompt_tokens)
    for _, load in () if spec.workloads is None else spec.workloads:
        if isinstance(load, WorkloadSpec):
            prompts += load.runs * load.requests * load.prompt_tokens
            steps += load.runs * load.requests * load.output_tokens
    return prompts, steps
