"""What is measured of answers, kind by kind."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import jsonschema
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from llmforge.metrics.behaviour import json_schema, results
from llmforge.metrics.behaviour.answer import BehaviourAnswer, MadeCall, TokenOdds
from llmforge.metrics.behaviour.document import BehaviourDocument
from llmforge.metrics.behaviour.instructions import Instructions
from llmforge.metrics.behaviour.languages import language_of
from llmforge.metrics.behaviour.outcomes import OUTCOMES, repeats, values

TOOL = {
    "type": "function",
    "function": {
        "name": "set_timer",
        "parameters": {
            "type": "object",
            "properties": {"minutes": {"type": "integer", "minimum": 1}},
            "required": ["minutes"],
        },
    },
}
CALLS = BehaviourAnswer("", (MadeCall("set_timer", '{"minutes": 5}'),), tokens=20)
NONE = BehaviourAnswer("It is five.", tokens=4)


def document(**more: Any) -> BehaviourDocument:
    return BehaviourDocument.model_validate(
        {"id": "a", "messages": [{"role": "user", "content": "?"}], "max_tokens": 64, **more}
    )


def ours(asked: BehaviourDocument, answer: BehaviourAnswer, theirs: BehaviourAnswer | None = NONE) -> dict[str, float]:
    return {name: here for name, (here, _) in values(asked, answer, theirs).items()}


@pytest.mark.parametrize(
    ("arguments", "valid", "equal"),
    [
        ('{"minutes": 5}', 1, 1), ('{"minutes": 5.0}', 1, 1), ('{"minutes": 6}', 1, 0), ('{"minutes": 0}', 0, 0),
        ('{"minutes": "5"}', 0, 0), ('{"minutes": 5', 0, 0), ("[]", 0, 0), ("{}", 0, 0),
    ],
)  # fmt: skip
def test_arguments_are_held_to_the_schema_and_to_what_is_expected(arguments: str, valid: int, equal: int) -> None:
    asked = document(tools=[TOOL], expected=[{"name": "set_timer", "arguments": {"minutes": 5}}])
    answer = BehaviourAnswer("", (MadeCall("set_timer", arguments),))
    found = ours(asked, answer)
    assert found["tool_decision"] == found["tool_choice"] == 1
    assert (found["tool_arguments_valid"], found["tool_arguments"]) == (valid, equal)
    asked_for = results.measured([asked], [answer], [NONE], engine="", baseline="")
    assert asked_for.outcomes["checks"].artifact == (1, 1, valid, equal)
    assert asked_for.outcomes["checks"].documents == (0, 0, 0, 0)


def test_a_call_that_is_missing_and_one_too_many_are_wrong() -> None:
    wanted = document(tools=[TOOL], expected=[{"name": "set_timer"}])
    assert {ours(wanted, NONE)[name] for name in ("tool_decision", "tool_choice", "tool_arguments_valid")} == {0}
    none = document(tools=[TOOL], expected=[])
    assert ours(none, NONE)["tool_decision"] == 1
    assert ours(none, CALLS)["tool_decision"] == 0
    assert "tool_choice" not in ours(none, CALLS)


def test_what_a_document_leaves_open_is_what_the_baseline_does() -> None:
    asked = document(tools=[TOOL])
    assert ours(asked, CALLS, CALLS)["tool_arguments"] == 1
    assert ours(asked, NONE, CALLS)["tool_arguments"] == 0
    assert ours(asked, CALLS, NONE)["tool_decision"] == 0
    assert "tool_decision" not in ours(asked, CALLS, None)
    named = document(tools=[TOOL], expected=[{"name": "set_timer"}])
    assert ours(named, CALLS, CALLS)["tool_arguments"] == 1
    assert "tool_arguments" not in ours(named, CALLS, None)


@pytest.mark.parametrize(
    ("text", "right"),
    [('{"a": 1}', 1), ('```json\n{"a": 1}\n```', 1), ('Here: {"a": 1}', 0), ('{"a": "1"}', 0), ('{"a": NaN}', 0)],
)
def test_json_of_a_schema(text: str, right: int) -> None:
    asked = document(schema={"type": "object", "properties": {"a": {"type": "number"}}, "required": ["a"]})
    assert ours(asked, BehaviourAnswer(text))["json_schema"] == right


def test_refusals_by_patterns_and_by_the_margin_of_two_openings() -> None:
    refusal = {"expected": True, "patterns": [r"\bcan't\b"], "openings": ["I can't", "Sure"]}
    refused, answered = BehaviourAnswer("I can’t do that.", margin=2.0), BehaviourAnswer("Sure, …", margin=-1.0)
    asked = document(refusal=refusal)
    assert [ours(asked, each)["refusal"] for each in (refused, answered)] == [1, 0]
    assert ours(asked, refused, answered)["refusal_margin"] == 2
    harmless = document(refusal={**refusal, "expected": False})
    assert ours(harmless, refused, answered)["refusal"] == 0
    assert ours(harmless, refused, answered)["refusal_margin"] == -2
    as_before = document(refusal={**refusal, "expected": None})
    assert values(as_before, answered, refused)["refusal"] == (0, 1)
    assert values(as_before, answered, refused)["refusal_margin"] == (-1, 2)


def test_thoughts_have_to_end_within_their_tokens() -> None:
    asked = document(thinking=10)
    short, long = BehaviourAnswer("4", reasoning_tokens=10), BehaviourAnswer("4", reasoning_tokens=11)
    never = BehaviourAnswer("", reasoning="hm", reasoning_tokens=8, thinking_open=True, finish_reason="length")
    assert [values(asked, each, short)["thinking_left"][0] for each in (short, long, never)] == [1, 0, 0]
    assert values(asked, long, short)["thinking_tokens"] == (11, 10)
    assert "thinking_left" not in ours(asked, NONE)  # a model that does not think


def test_loops_are_texts_that_repeat_themselves() -> None:
    assert repeats("the sea is blue and " * 12)
    assert repeats("海" * 300)
    assert not repeats("the sea is blue and " * 3)  # too short to tell
    assert not repeats(" ".join(f"word{i} of many" for i in range(60)))
    looping = BehaviourAnswer("fine", reasoning="and again " * 30)
    assert ours(document(), looping)["loops"] == 1
    assert ours(document(), NONE)["loops"] == 0


def test_odds_move_where_a_token_is_due_or_elsewhere() -> None:
    theirs = replace(
        NONE, odds={"own": TokenOdds(5.0, None), "ends": TokenOdds(9.0, -8.0), "calls": TokenOdds(None, -9.0)}
    )
    here = replace(
        NONE, odds={"own": TokenOdds(4.0, None), "ends": TokenOdds(9.5, -5.0), "calls": TokenOdds(None, -11.0)}
    )
    found = values(document(), here, theirs)
    assert found["answer_odds"] == (4, 5)
    assert (found["end_shift"], found["call_shift"]) == ((3, 0), (2, 0))
    assert not {"thinking_shift", "bracket_shift"} & set(found)
    assert not {"answer_odds", "end_shift"} & set(values(document(), here, NONE))
    assert "end_shift" not in values(document(), here, None)


def test_length_and_end_are_of_both_sides() -> None:
    long = BehaviourAnswer("x", finish_reason="length", tokens=9)
    found = values(document(), long, NONE)
    assert found["ended"] == (0, 1)
    assert found["length_change"] == (pytest.approx(0.6931, abs=1e-3), 0)
    assert values(document(), NONE, long)["length_change"][0] == pytest.approx(0.6931, abs=1e-3)


@pytest.mark.parametrize(
    ("text", "language"),
    [
        ("The house is on the hill, and it was built by my grandfather.", "en"),
        ("La maison est sur la colline et elle a été construite par mon père.", "fr"),
        ("Das Haus steht auf dem Berg und ist von meinem Vater.", "de"),
        ("La casa está en la colina y es de mi padre, pero no es muy grande.", "es"),
        ("La casa è sulla collina e non è molto grande, ma ci sono degli alberi.", "it"),
        ("A casa não é muito grande, mas é do meu pai e está no monte.", "pt"),
        ("Het huis staat op een berg en is niet van mijn vader.", "nl"),
        ("Дом стоит на холме.", "ru"), ("家は丘の上にあります。", "ja"),
        ("房子在山上，很大。", "zh"), ("집은 언덕 위에 있다", "ko"),
        ("42", None), ("ok", None),
    ],
)  # fmt: skip
def test_languages_are_told_by_script_and_function_words(text: str, language: str | None) -> None:
    assert language_of(text) == language


@pytest.mark.parametrize(
    ("asked", "right", "wrong"),
    [
        ({"words": {"max": 3}}, "one two three", "one two three four"),
        ({"sentences": {"min": 2, "max": 2}}, "One. Two!", "One."),
        ({"paragraphs": {"min": 2}}, "One.\n\nTwo.", "One.\nTwo."),
        ({"lines": {"min": 2, "max": 2}}, "a\nb", "a\nb\nc"),
        ({"bullets": {"min": 2, "max": 2}}, "- a\n* b", "- a"),
        ({"numbered": {"min": 2}}, "1. a\n2) b", "1. a"),
        ({"commas": {"max": 0}}, "a b", "a, b"),
        ({"numbers": {"min": 2}}, "3 and 4.5", "3"),
        ({"placeholders": {"min": 1}}, "Dear [name]", "Dear you"),
        ({"highlights": {"min": 1}}, "a *b* c", "a b c"),
        ({"capitals": {"min": 1}}, "so BIG", "so big"),
        ({"contains": ["cat"]}, "The Cat.", "The category."),
        ({"excludes": ["cat"]}, "The category.", "The Cat."),
        ({"starts": "sure"}, "Sure thing", "Well, sure"),
        ({"ends": "done."}, "All Done.", "Done. Bye"),
        ({"case": "upper"}, "ALL 3", "All 3"),
        ({"case": "lower"}, "all 3", "All 3"),
        ({"title": True}, "<<A>> b", "A b"),
        ({"quoted": True}, '"a"', 'a "b"'),
        ({"fenced": True}, "```\na\n```", "a"),
    ],
)
def test_each_kind_of_instruction(asked: dict[str, Any], right: str, wrong: str) -> None:
    instructions = Instructions.model_validate(asked)
    assert instructions.followed(right)
    assert not instructions.followed(wrong)
    assert not instructions.followed(" ")


def test_every_outcome_has_a_name_of_its_own() -> None:
    assert len({outcome.name for outcome in OUTCOMES} | {"checks"}) == len(OUTCOMES) + 1


_SCALARS = st.none() | st.booleans() | st.integers(-3, 3) | st.sampled_from(["", "a", "abc", "1"]) | st.just(1.0)
_VALUES = st.recursive(
    _SCALARS, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from("ab"), inner, max_size=2)
)
_PLAIN = st.fixed_dictionaries(
    {},
    optional={
        "type": st.sampled_from(
            ["object", "array", "string", "number", "integer", "boolean", "null", ["string", "null"]]
        ),
        "enum": st.lists(_SCALARS, min_size=1, max_size=3), "const": _SCALARS, "minimum": st.integers(-2, 2),
        "exclusiveMaximum": st.integers(-2, 2), "multipleOf": st.integers(1, 3), "minLength": st.integers(0, 2),
        "maxLength": st.integers(0, 2), "pattern": st.sampled_from(["^a", "b"]), "maxItems": st.integers(0, 2),
        "minItems": st.integers(0, 2), "uniqueItems": st.booleans(),
        "required": st.lists(st.sampled_from("ab"), max_size=2, unique=True), "description": st.just("said"),
    },
)  # fmt: skip
_SCHEMAS = st.recursive(
    _PLAIN,
    lambda inner: st.one_of(
        st.fixed_dictionaries({"items": inner}),
        st.fixed_dictionaries({"properties": st.dictionaries(st.sampled_from("ab"), inner, max_size=2)}),
        st.fixed_dictionaries({"additionalProperties": inner | st.booleans(), "properties": st.just({"a": {}})}),
        *(st.fixed_dictionaries({key: st.lists(inner, min_size=1, max_size=2)}) for key in ("anyOf", "oneOf", "allOf")),
    ),
    max_leaves=4,
)


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(_VALUES, _SCHEMAS)
def test_json_is_held_to_a_schema_as_the_reference_does(value: Any, schema: Any) -> None:
    assert json_schema.unknown(schema) is None
    assert json_schema.valid(value, schema) is jsonschema.Draft202012Validator(schema).is_valid(value)


@pytest.mark.parametrize(
    "schema", [{"$ref": "#/x"}, {"type": "any"}, {"items": {"dependentRequired": {}}}, 3, {"properties": {"a": []}}]
)
def test_what_of_a_schema_is_not_understood_is_refused(schema: Any) -> None:
    assert json_schema.unknown(schema) is not None


def test_a_schema_that_goes_on_without_end_is_refused() -> None:
    deep: Any = {}
    for _ in range(40):
        deep = {"items": deep}
    assert json_schema.unknown(deep) is not None
    with pytest.raises(ValueError, match="deep"):
        json_schema.read("[" * 100_000 + "]" * 100_000)
    assert json.loads("1") == 1
