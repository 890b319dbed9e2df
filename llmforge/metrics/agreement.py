"""How far another runtime, which loads the same artifact, gives the same tokens and logits as llmforge's own."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median
from typing import Annotated, Literal, Self, get_args

import numpy as np
from pydantic import Field, model_validator

from llmforge.metrics.intervals import SMALLEST_SAMPLE, Estimate, quantile_interval, share_interval
from llmforge.metrics.quality import PROMPT_TOKENS
from llmforge.metrics.record import ReportRecord
from llmforge.metrics.studentized import bounds, studentized

RuntimeName = Literal["onnxruntime-genai", "optimum", "transformers", "vllm", "llama-cpp"]
RUNTIMES: tuple[RuntimeName, ...] = get_args(RuntimeName)
DISTRIBUTIONS: dict[RuntimeName, str] = {
    "onnxruntime-genai": "onnxruntime-genai",
    "optimum": "optimum-onnx",
    "transformers": "transformers",
    "vllm": "vllm",
    "llama-cpp": "llama-cpp-python",
}
PROMPTS, TOKENS = 16, 64  # beginnings of documents, and tokens of an answer
PROMPT_AND_ANSWER = PROMPT_TOKENS + TOKENS
MOST_PROMPTS, MOST_TOKENS = 32, 128  # that a record may have: as many are bounded in half a second

Token = Annotated[int, Field(ge=0)]
Tokens = Annotated[tuple[Token, ...], Field(max_length=MOST_TOKENS)]
Floats = Annotated[tuple[float, ...], Field(max_length=MOST_TOKENS)]


class ComparedPrompt(ReportRecord):
    """What both runtimes make of one prompt.

    Both answer it greedily. Then both read our answer token by token, so that at each of its places, in front of its
    tokens, the logits of both have the same text before them.
    """

    document: str
    prompt_tokens: int
    ours: Tokens = Field(min_length=1)  # greedy answers, the end of the text included
    theirs: Tokens
    our_top: Tokens  # most likely token at each place of `ours`
    their_top: Tokens
    kld: Floats  # KL(ours ‖ theirs) there, nats
    difference_mean: Floats  # of the logits there: mean |Δ| over the vocabulary
    difference_max: Floats
    margin: float | None = None  # of our logit over theirs, in ours, where answers differ first; None: they do not

    @model_validator(mode="after")
    def _of_the_same_places(self) -> Self:
        lengths = {len(each) for each in (self.our_top, self.their_top, self.kld, self.difference_mean)}
        if lengths != {len(self.ours)} or len(self.difference_max) != len(self.ours):
            raise ValueError(f"{self.document}: values of {len(self.ours)} places are not as many")
        return self

    @property
    def first_difference(self) -> int | None:
        """How many tokens of the greedy answers are equal before the first that is not; None: the answers are equal."""
        if self.ours == self.theirs:
            return None
        pairs = enumerate(zip(self.ours, self.theirs, strict=False))
        return next((at for at, (a, b) in pairs if a != b), min(len(self.ours), len(self.theirs)))

    @property
    def agreeing(self) -> int:
        """At how many places of our answer the most likely token is the same."""
        return sum(a == b for a, b in zip(self.our_top, self.their_top, strict=True))


class Agreement(ReportRecord):
    """Figures of all prompts; intervals are over prompts."""

    agreement: Estimate  # share of places with the same most likely token
    same_answers: Estimate  # share of prompts with equal greedy answers
    equal_tokens: Estimate  # of greedy answers before their first difference, median
    kld_mean: Estimate  # nats per token
    kld_max: float
    logit_difference_mean: float
    logit_difference_max: float


class RuntimeRun(ReportRecord):
    """One run of the artifact in another runtime, in a process of its own."""

    runtime: RuntimeName
    versions: dict[str, str]  # of its packages and its Python
    asked: int = Field(ge=1, le=MOST_PROMPTS)  # prompts
    seconds: float
    failure: str | None = None  # how it ended before it had answered all of them
    figures: Agreement | None = None  # None: it failed
    prompts: tuple[ComparedPrompt, ...] = Field(default=(), max_length=MOST_PROMPTS)

    @property
    def title(self) -> str:
        """Its name and version."""
        name = DISTRIBUTIONS[self.runtime]
        return f"{name} {self.versions[name]}" if name in self.versions else name

    @property
    def near_ties(self) -> int:
        """How many answers differ first where our logits of both tokens lie closer than rounding moves logits anyway.

        That is the largest |Δlogit| of a place, median over all places that were compared.
        """
        if not self.prompts:
            return 0
        moved = median(each for prompt in self.prompts for each in prompt.difference_max)
        return sum(prompt.margin is not None and prompt.margin <= moved for prompt in self.prompts)


def made_of(run: RuntimeRun) -> Agreement | None:
    """Make the figures of what was compared; None where the run did not come to its end.

    The interval of `agreement` is the wider of two: that over prompts, since places of one prompt depend on one
    another, and the exact one of independent places, since prompts that all agree do not differ.

    Raises:
        ValueError: the prompts are not those that were asked.
    """
    if run.failure is not None:
        return None
    prompts = run.prompts
    if len(prompts) != run.asked:
        raise ValueError(f"{run.runtime}: {len(prompts)} of {run.asked} prompts, and no failure")
    places = np.array([len(each.ours) for each in prompts], np.float64)
    same = np.array([each.agreeing for each in prompts], np.float64)
    kld = np.array([np.sum(each.kld) for each in prompts], np.float64)
    sums = np.stack([places, same, kld], 1)
    of_share, of_kld = (bounds(each) for each in studentized(sums, lambda totals: totals[:, 1:] / totals[:, :1]))
    share = float(same.sum() / places.sum())
    exact = share_interval(int(same.sum()), int(places.sum()))
    wider = None if of_share is None else (max(0.0, min(of_share[0], exact[0])), min(1.0, max(of_share[1], exact[1])))
    firsts = [len(each.ours) if each.first_difference is None else each.first_difference for each in prompts]
    equal = sum(each.first_difference is None for each in prompts)
    return Agreement(
        agreement=_estimate(share, wider, prompts),
        same_answers=_estimate(equal / len(prompts), share_interval(equal, len(prompts)), prompts),
        equal_tokens=_estimate(float(median(firsts)), quantile_interval(np.array(firsts, np.float64), 0.5), prompts),
        kld_mean=_estimate(
            float(kld.sum() / places.sum()), None if of_kld is None else (max(0.0, of_kld[0]), of_kld[1]), prompts
        ),
        kld_max=max(max(each.kld) for each in prompts),
        logit_difference_mean=float(sum(np.sum(each.difference_mean) for each in prompts) / places.sum()),
        logit_difference_max=max(max(each.difference_max) for each in prompts),
    )


def _estimate(value: float, bounds: tuple[float, float] | None, prompts: Sequence[ComparedPrompt]) -> Estimate:
    if bounds is None or len(prompts) < SMALLEST_SAMPLE:
        return Estimate(value=value, low=None, high=None, samples=len(prompts), of="prompts")
    low, high = min(value, float(bounds[0])), max(value, float(bounds[1]))
    return Estimate(value=value, low=low, high=high, samples=len(prompts), of="prompts")
