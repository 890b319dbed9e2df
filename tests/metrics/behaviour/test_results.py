"""Documents of behaviour, paired results, their figures, and the gates that decide on them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from llmforge import recipes
from llmforge.base.errors import DataError
from llmforge.gates import decision
from llmforge.gates.decision import GateResult, Verdict
from llmforge.metrics import catalog
from llmforge.metrics.behaviour import results
from llmforge.metrics.behaviour.answer import OWN, BehaviourAnswer, TokenOdds
from llmforge.metrics.behaviour.document import FEWEST_OF_A_SLICE, BehaviourDocument, quick, read_documents
from llmforge.metrics.behaviour.outcomes import OUTCOMES
from llmforge.metrics.behaviour.results import BehaviourResult
from llmforge.metrics.metric import Measured
from llmforge.recipe import GateSpec

RIGHT, WRONG = BehaviourAnswer("yes", tokens=3), BehaviourAnswer("no", tokens=3)


def document(number: int, part: str = "yes", **more: Any) -> BehaviourDocument:
    return BehaviourDocument.model_validate(
        {
            "id": f"{part}-{number}", "slice": part, "messages": [{"role": "user", "content": "Say yes."}],
            "instructions": {"contains": ["yes"]}, **more,
        }
    )  # fmt: skip


def result(lost: int, documents: int = 200, **parts: int) -> BehaviourResult:
    """Make a result: the artifact loses the last `lost` documents, the checkpoint none."""
    asked = [document(i) for i in range(documents)]
    for name, count in parts.items():
        asked += [document(i, name) for i in range(count)]
    ours = [RIGHT] * (len(asked) - lost) + [WRONG] * lost
    return results.measured(asked, ours, [RIGHT] * len(asked), engine="engine", baseline="checkpoint")


def judge(found: BehaviourResult | None, metric: str, **limits: float) -> GateResult:
    measured = Measured(behaviour=found)
    (made,) = decision.judge(
        {metric: GateSpec.model_validate(limits)},
        catalog.estimates(measured),
        original=decision.checkpoint(measured),
    )
    return made


def test_a_drop_is_decided_against_the_checkpoint_document_by_document() -> None:
    assert judge(result(0), "behaviour.instructions", drop_max=0.05).verdict is Verdict.PASS
    assert judge(result(60), "behaviour.instructions", drop_max=0.05).verdict is Verdict.FAIL
    assert judge(result(10), "behaviour.instructions", drop_max=0.05).verdict is Verdict.INCONCLUSIVE
    assert judge(result(60), "behaviour.checks", drop_max=0.05).verdict is Verdict.FAIL
    assert judge(None, "behaviour.checks", drop_max=0.05).verdict is Verdict.FAIL
    assert judge(result(0), "behaviour.length_change", max=0.1).verdict is Verdict.PASS


def test_a_slice_has_its_figures_and_decides_from_a_hundred_documents_on() -> None:
    found = result(30, documents=200, other=99)
    assert found.outcomes["instructions"].slices["other"].artifact.value == pytest.approx(69 / 99)
    small = judge(found, "behaviour.instructions.other", drop_max=0.05)
    assert small.verdict is Verdict.INCONCLUSIVE
    assert small.underpowered
    assert small.samples_needed == 100
    assert "interval needs 100" in small.explanation
    enough = judge(result(60, documents=100, other=100), "behaviour.instructions.other", drop_max=0.05)
    assert enough.verdict is Verdict.FAIL
    assert judge(found, "behaviour.instructions.none", drop_max=0.05).verdict is Verdict.FAIL


def test_metrics_of_the_catalog_are_the_outcomes() -> None:
    named = {name for name in catalog.deciding() if name.startswith("behaviour.")}
    assert named == {"behaviour.checks", *(f"behaviour.{outcome.name}" for outcome in OUTCOMES)}
    assert catalog.find("behaviour.none") is None
    assert catalog.find("behaviour.none.code") is None
    assert "behaviour.checks.other" in catalog.names(Measured(behaviour=result(0, other=3)))


def test_two_artifacts_are_compared_where_they_were_asked_the_same() -> None:
    moved = results.between(result(40), result(10), "behaviour.instructions")
    assert not isinstance(moved, str)
    assert moved.value == pytest.approx(-0.15)
    assert isinstance(results.between(result(0), result(0, documents=50), "behaviour.instructions"), str)
    assert isinstance(results.between(result(0), None, "behaviour.instructions"), str)
    assert isinstance(results.between(result(0), result(0), "behaviour.json_schema"), str)


def test_figures_follow_from_values_and_a_record_that_is_not_whole_is_refused() -> None:
    found = result(10, other=120)
    assert BehaviourResult.model_validate_json(found.to_json()) == found
    assert found.again() == found.outcomes
    outcome = found.outcomes["instructions"]
    for change in (
        {"documents": found.documents[1:]},
        {"documents": (found.documents[1], *found.documents[1:])},
        {"outcomes": {"instructions": outcome.model_copy(update={"artifact": outcome.artifact[1:]})}},
        {"outcomes": {"instructions": outcome.model_copy(update={"documents": outcome.documents[::-1]})}},
    ):
        with pytest.raises(ValueError, match=r"behaviour|outcome"):
            BehaviourResult.model_validate({**found.model_dump(), **change})


def test_chats_of_the_page_are_of_different_slices_and_changed_ones_first() -> None:
    asked = [document(i, f"part{i % 7}") for i in range(21)]
    ours = [RIGHT] * 21
    ours[9] = WRONG  # of part2
    found = results.measured(asked, ours, [RIGHT] * 21, engine="engine", baseline="checkpoint")
    assert len(found.chats) == 5
    assert len({chat.slice for chat in found.chats}) == 5
    first = found.chats[0]
    assert (first.document, first.changed) == ("part2-9", ("instructions",))
    assert (first.shared, first.baseline, first.artifact) == ("", "yes", "no")


def test_without_a_baseline_only_what_documents_expect_is_measured() -> None:
    found = results.measured([document(i) for i in range(9)], [RIGHT] * 9, None, engine="engine", baseline=None)
    assert set(found.outcomes) == {"checks", "instructions", "loops", "ended"}
    assert found.outcomes["instructions"].figures.difference is None
    assert judge(found, "behaviour.instructions", drop_max=0.05).verdict is Verdict.INCONCLUSIVE


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("{", "no JSON"),
        ("[]", "valid dictionary"),
        ('{"messages": []}', "messages"),
        ('{"messages": [{}], "language": "xx"}', "language"),
        ('{"messages": [{}], "schema": {"$ref": "#"}}', "not understood"),
        ('{"messages": [{}], "refusal": {"patterns": ["("]}}', "regular expression"),
        ('{"messages": [{}], "tools": [{}]}', "tools"),
        ('{"messages": [{}], "expected": [{"name": "f"}]}', "none of its tools"),
        ('{"messages": [{}], "instructions": {}}', "nothing"),
        ('{"messages": [{}], "instructions": {"words": {"min": 2, "max": 1}}}', "below min"),
        ('{"messages": [{}], "slice": "a b"}', "slice"),
        ("", "0 documents"),
    ],
)
def test_a_document_that_makes_no_sense_is_refused_with_its_line(tmp_path: Path, line: str, said: str) -> None:
    file = tmp_path / "chats.jsonl"
    file.write_text(f"{line}\n")
    with pytest.raises(DataError, match=said):
        read_documents(file)


def test_an_id_stands_once(tmp_path: Path) -> None:
    file = tmp_path / "chats.jsonl"
    file.write_text('{"id": "a", "messages": [{}]}\n' * 2)
    with pytest.raises(DataError, match="2: the id 'a' is already used"):
        read_documents(file)


def test_the_suite_that_ships_has_ten_slices_of_twenty_and_fits_its_promise() -> None:
    suite = read_documents(recipes.TEXT / "behaviour.jsonl")
    counts = {part: sum(each.slice == part for each in suite) for part in {each.slice for each in suite}}
    assert len(suite) >= 200
    assert len(counts) == 10
    assert min(counts.values()) >= 20
    assert counts["languages"] > FEWEST_OF_A_SLICE
    assert len({json.dumps(each.messages[-1]["content"]) for each in suite}) == len(suite)
    assert all(each.instructions or each.tools or each.json_schema or each.refusal or each.language for each in suite)
    assert len(quick(suite, 3)) == 30
    long = read_documents(recipes.TEXT / "behaviour-long.jsonl")
    assert [each.max_tokens for each in long] == [4096] * 10


@pytest.mark.parametrize(("lost", "verdict"), [("fr", Verdict.FAIL), (None, Verdict.PASS)])
def test_a_language_that_is_lost_is_seen_in_the_slice_that_ships_and_not_in_all_chats(
    lost: str | None, verdict: Verdict
) -> None:
    suite = read_documents(recipes.TEXT / "behaviour.jsonl")

    def answer(sure: float) -> BehaviourAnswer:
        return BehaviourAnswer("yes", tokens=3, odds={OWN: TokenOdds(sure, None)})

    theirs = [answer(number % 7 - 1) for number in range(len(suite))]
    ours = [
        answer(number % 7 - 1 - (1 + number % 2 if each.language is not None and each.language == lost else 0))
        for number, each in enumerate(suite)
    ]
    found = results.measured(suite, ours, theirs, engine="engine", baseline="checkpoint")
    assert judge(found, "behaviour.answer_odds", drop_max=0.5).verdict is Verdict.PASS
    assert judge(found, "behaviour.answer_odds.languages", drop_max=0.2).verdict is verdict
