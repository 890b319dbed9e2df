"""One checkpoint through the whole frontend, and its graph beside transformers."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import onnx_ir as ir
import onnxruntime as ort
import torch

from llmforge.base.errors import UnsupportedError
from llmforge.checkpoint import Checkpoint
from llmforge.ir import dialect
from llmforge.runtime.interface import StepInputs, feeds
from llmforge.trace import trace
from llmforge.verification.trace_verifier import prove_candidate

from ..models.zoo import standard_session
from . import shrink
from .reference import Logits, Reference, ReferenceFails

TOLERANCE = 1e-5  # fp32, on logits with a standard deviation of `shrink.SPREAD`
CAUSAL = 1e-4  # rounding stays below, looking ahead does not
FURTHER = (1, 1, 1, 1, 1, 3)  # five decode steps and a continuation
SCHEDULES: dict[str, Sequence[int]] = {  # prompt lengths of the rows of a batch
    "one": (12,),
    "two": (12, 12),
    "ragged": (9, 12, 5),
    "long": (40,),  # longer than every window, chunk and original context
}
CAPACITY = 64


@dataclass
class Outcome:
    """What became of one type."""

    model_type: str
    outcome: str  # right, refused, wrong, traceback, transformers-fails, crash, timeout
    kind: str = ""  # decoder, encoder-only, encoder-decoder
    reason: str = ""
    difference: float | None = None  # largest |Δlogit|, scaled to logits with a standard deviation of `shrink.SPREAD`
    differences: dict[str, float] = field(default_factory=dict)  # by schedule
    reference_difference: float | None = None  # transformers stepwise over its own cache beside all tokens at once
    rounding: float | None = None  # of transformers' fp32 beside its fp64, scaled as `difference`; where it decides
    spread: float | None = None  # standard deviation of logits
    nodes: int | None = None
    operators: dict[str, int] = field(default_factory=dict)
    parameters: int | None = None
    seconds: float | None = None
    where: str = ""  # where a traceback ends


Tracer = Callable[[Checkpoint], ir.Model]


def compare(model_type: str, folder: Path, tracer: Tracer = trace) -> Outcome:
    """Run the frontend on the checkpoint of `model_type` in `folder` and compare with transformers.

    What transformers raises on its own account is in the outcome. What the frontend raises besides a refusal
    propagates: to the driver it is a traceback.
    """
    outcome = Outcome(model_type, "transformers-fails")
    wanted = _reference(folder, outcome)
    try:
        checkpoint = Checkpoint.open(folder)
        outcome.parameters = checkpoint.parameters
        graph = tracer(checkpoint)
        dialect.check(graph)
        prove_candidate(checkpoint, graph)
    except UnsupportedError as error:
        if wanted is not None:
            outcome.outcome = "refused"
        needed = f"; {error.hint}" if (error.hint or "").startswith("needed: ") else ""
        outcome.reason = f"{outcome.reason}; refused: {error.message}{needed}".removeprefix("; refused: ")
        return outcome
    if wanted is None:
        return outcome
    outcome.nodes = len(graph.graph)
    outcome.operators = dict(Counter(f"{n.domain}::{n.op_type}".lstrip(":") for n in graph.graph).most_common())
    session = standard_session(dialect.expand(graph))
    assert outcome.spread is not None
    scale = shrink.SPREAD / outcome.spread
    for name, prompts in SCHEDULES.items():
        outcome.differences[name] = _largest(session, prompts, wanted[name]) * scale
    outcome.difference = max(outcome.differences.values())
    if outcome.difference > TOLERANCE:
        outcome.rounding = _rounding(folder, wanted) * scale
    outcome.outcome = "right" if outcome.difference <= max(TOLERANCE, outcome.rounding or 0.0) else "wrong"
    if outcome.difference > TOLERANCE:
        outcome.reason = "Δ " + ", ".join(f"{name} {value:.1e}" for name, value in outcome.differences.items())
        outcome.reason += f"; transformers' own rounding {outcome.rounding:.1e}"
    return outcome


def _rounding(folder: Path, whole: Mapping[str, Sequence[Logits]]) -> float:
    """Return the largest difference of transformers' fp32 logits, `whole`, from what it computes in fp64.

    Where that is beyond `TOLERANCE`, fp32 tells no more digits, and two right orders of sums differ by as much.
    """
    exact = Reference.load(folder, torch.float64)
    return max(
        float(np.abs(exact.whole(text) - row).max())
        for name, prompts in SCHEDULES.items()
        for text, row in zip(_texts(prompts), whole[name], strict=True)
    )


def _reference(folder: Path, outcome: Outcome) -> dict[str, list[Logits]] | None:
    """Run transformers; where it cannot, put the reason into `outcome` and return None."""
    try:
        reference = Reference.load(folder)
        outcome.kind = kind(reference, folder)
        return expected(reference, outcome)
    except Exception as error:  # noqa: BLE001  # whatever a model of transformers raises is a result of the sweep
        first = next(iter(str(error).strip().splitlines()), "no message")
        outcome.reason = f"{type(error).__name__}: {first[:300]}"
        return None


def kind(reference: Reference, folder: Path) -> str:
    if json.loads((folder / "config.json").read_text()).get("is_encoder_decoder"):
        return "encoder-decoder"
    return "decoder" if reference.look_ahead(_texts((24,))[0]) < CAUSAL else "encoder-only"


def expected(reference: Reference, outcome: Outcome) -> dict[str, list[Logits]]:
    """Compute the reference of every row of every schedule: all its tokens at once.

    What transformers makes of the same steps over its own cache is only measured: some of its caches forget.
    """
    rows: dict[str, list[Logits]] = {}
    apart: list[float] = []
    for name, prompts in SCHEDULES.items():
        rows[name] = [reference.whole(text) for text in _texts(prompts)]
        for text, prompt, whole in zip(_texts(prompts), prompts, rows[name], strict=True):
            stepwise = reference.stepwise(text, (prompt, *FURTHER))
            if stepwise is not None:
                apart.append(float(np.abs(whole - stepwise).max()))
    outcome.spread = float(np.concatenate([row for batch in rows.values() for row in batch]).std())
    outcome.reference_difference = max(apart, default=None)
    if not np.isfinite(outcome.spread) or outcome.spread == 0.0:
        raise ReferenceFails("logits are not finite, or all the same")
    return rows


def _texts(prompts: Sequence[int]) -> list[list[int]]:
    rng = np.random.default_rng(0)
    return [rng.integers(5, 250, prompt + sum(FURTHER)).tolist() for prompt in prompts]


def _largest(session: ort.InferenceSession, prompts: Sequence[int], expected: Sequence[Logits]) -> float:
    """Run a batch over its schedule and return the largest |Δlogit| over every valid row."""
    names = [value.name for value in session.get_inputs()]
    texts, batch = _texts(prompts), len(prompts)
    cache = {
        value.name: np.full((batch, *_cache_shape(value.shape[1:])), 7.0, np.float32)  # a slot never written is garbage
        for value in session.get_inputs()
        if value.name.startswith("past_key_values.")
    }
    past, worst = np.zeros(batch, np.int32), 0.0
    for step in (prompts, *((count,) * batch for count in FURTHER)):
        ids = np.zeros((batch, max(step)), np.int64)
        for row, count in enumerate(step):
            ids[row, :count] = texts[row][past[row] : past[row] + count]
        totals = np.array([len(text) for text in texts])
        fed = feeds(names, StepInputs(ids, past, np.arange(max(step)), np.array(step), totals))
        logits, *presents = session.run(None, {**fed, **cache})
        cache = dict(zip(cache, presents, strict=True))
        for row, count in enumerate(step):
            difference = np.abs(logits[row, :count] - expected[row][past[row] : past[row] + count]).max()
            worst = max(worst, float(difference)) if np.isfinite(difference) else math.inf
        past = past + np.array(step, np.int32)
    return worst


def _cache_shape(dims: Sequence[int | str]) -> tuple[int, ...]:
    return tuple(CAPACITY if isinstance(dim, str) else dim for dim in dims)
