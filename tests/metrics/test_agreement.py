"""Figures of what another runtime made of the same artifact, from hand-made prompts."""

from __future__ import annotations

import math
import time

import pytest

from llmforge.metrics import agreement, catalog
from llmforge.metrics.agreement import ComparedPrompt, RuntimeRun
from llmforge.metrics.metric import Measured


def prompt(name: str, *, wrong: tuple[int, ...] = (), answer: tuple[int, ...] | None = None) -> ComparedPrompt:
    """Make a prompt whose answer has 10 tokens; at the places `wrong` the other runtime's most likely one differs."""
    ours = tuple(range(10, 20))
    return ComparedPrompt(
        document=name,
        prompt_tokens=4,
        ours=ours,
        theirs=ours if answer is None else answer,
        our_top=ours,
        their_top=tuple(0 if at in wrong else token for at, token in enumerate(ours)),
        kld=tuple(0.5 if at in wrong else 0.0 for at in range(10)),
        difference_mean=tuple(0.25 if at in wrong else 0.0 for at in range(10)),
        difference_max=tuple(2.0 if at in wrong else 0.125 for at in range(10)),
    )


def run(*prompts: ComparedPrompt, **changes: object) -> RuntimeRun:
    fields = {"runtime": "optimum", "versions": {}, "asked": len(prompts), "seconds": 1.0, "prompts": prompts}
    return RuntimeRun.model_validate({**fields, **changes})


def test_figures_of_prompts() -> None:
    prompts = [prompt(f"{i}") for i in range(9)] + [prompt("odd", wrong=(3, 7), answer=(10, 11, 12, 9))]
    found = agreement.made_of(run(*prompts))
    assert found is not None
    assert found.agreement.value == pytest.approx(98 / 100)
    assert found.agreement.samples == 10
    assert found.agreement.of == "prompts"
    assert found.agreement.low < 0.95  # both of the wrong ones are of one prompt: as independent, 0.9296 … 0.9976
    assert found.same_answers.value == pytest.approx(0.9)
    assert found.equal_tokens.value == 10
    assert found.kld_mean.value == pytest.approx(0.01)
    assert found.kld_max == 0.5
    assert found.logit_difference_mean == pytest.approx(0.005)
    assert found.logit_difference_max == 2.0
    assert prompts[-1].first_difference == 3
    assert prompts[0].first_difference is None


def test_a_near_tie_is_closer_than_logits_move_at_most_places() -> None:
    """0.125 at most places; where they moved by 2, a margin of 1 is no tie, however well that would explain it."""
    margins = (0.12, 0.13, 1.0)
    odd = [prompt(f"{at}", wrong=(2,), answer=(10, 11, 9)) for at in range(3)]
    prompts = [each.model_copy(update={"margin": margin}) for each, margin in zip(odd, margins, strict=True)]
    assert run(*prompts, *(prompt(f"even {i}") for i in range(5))).near_ties == 1
    assert run(prompt("equal")).near_ties == 0


def test_an_answer_that_ends_early_differs_where_it_ends() -> None:
    assert prompt("short", answer=(10, 11)).first_difference == 2
    assert prompt("long", answer=(*range(10, 20), 5)).first_difference == 10


def test_agreement_everywhere_is_not_taken_for_certainty() -> None:
    found = agreement.made_of(run(*(prompt(f"{i}") for i in range(8))))
    assert found is not None
    assert found.agreement.value == found.agreement.high == 1.0
    assert found.agreement.low == pytest.approx(0.025 ** (1 / 80), abs=1e-9)  # Clopper-Pearson of 80 of 80


def test_few_prompts_have_no_interval() -> None:
    found = agreement.made_of(run(*(prompt(f"{i}") for i in range(7))))
    assert found is not None
    for estimate in (found.agreement, found.same_answers, found.equal_tokens, found.kld_mean):
        assert (estimate.low, estimate.high) == (None, None)


def test_a_run_that_failed_has_no_figures() -> None:
    failed = run(prompt("0"), asked=3, failure="ended by SIGSEGV, after 1 of 3 prompts")
    assert agreement.made_of(failed) is None
    with pytest.raises(ValueError, match="optimum: 1 of 3 prompts, and no failure"):
        agreement.made_of(run(prompt("0"), asked=3))


def test_values_of_places_must_be_as_many() -> None:
    fields = prompt("0").model_dump()
    with pytest.raises(ValueError, match="values of 10 places are not as many"):
        ComparedPrompt.model_validate({**fields, "kld": (0.0,)})


def test_the_largest_record_is_bounded_in_little_time() -> None:
    """A stranger's record must not keep `verify` busy."""
    places = agreement.MOST_TOKENS
    ids, zeros = tuple(range(places)), (0.0,) * places
    long = ComparedPrompt(
        document="0", prompt_tokens=1, ours=ids, theirs=ids, our_top=ids, their_top=(places, *ids[1:]), kld=zeros,
        difference_mean=zeros, difference_max=zeros,
    )  # fmt: skip
    began = time.process_time()
    assert agreement.made_of(run(*[long] * agreement.MOST_PROMPTS)) is not None
    assert time.process_time() - began < 10
    with pytest.raises(ValueError, match="at most 32 items"):
        run(*[long] * (agreement.MOST_PROMPTS + 1), asked=1)


@pytest.mark.parametrize("name", agreement.RUNTIMES)
def test_gates_can_hold_them(name: str) -> None:
    metric = catalog.deciding()[f"runtime.{name}.agreement"]
    made = run(*(prompt(f"{i}") for i in range(8)), runtime=name)
    measured = Measured(runtimes=(made.model_copy(update={"figures": agreement.made_of(made)}),))
    estimate = metric.estimate(measured)
    assert estimate is not None
    assert estimate.value == 1.0
    assert metric.estimate(Measured(runtimes=(made,))) is None  # as of one that failed
    assert metric.estimate(Measured()) is None
    assert not math.isinf(metric.unit.highest)
