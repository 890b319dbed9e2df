"""What is measured of each answer: one number of a document and an answer, beside what the baseline answered to it."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

from llmforge.metrics.behaviour import answer as answers
from llmforge.metrics.behaviour import json_schema
from llmforge.metrics.behaviour.answer import BehaviourAnswer
from llmforge.metrics.behaviour.document import BehaviourDocument
from llmforge.metrics.behaviour.languages import language_of
from llmforge.metrics.units import NATS, NATS_MOVED, SHARE, TEXT, TOKENS_A_STEP, Unit

NGRAM, FEWEST_NGRAMS, REPEATED = 4, 24, 0.5  # words; a text of fewer n-grams has no loop; share that stood before

Value = Callable[[BehaviourDocument, BehaviourAnswer, BehaviourAnswer | None], float | None]


@dataclass(frozen=True)
class Outcome:
    """One figure of behaviour: the mean over the documents that have it.

    `value` gives None where a document has none: where nothing of the kind is asked, or expected is what the baseline
    does and there is no baseline. `checked`: right or wrong, and one of `CHECKS`.
    """

    name: str
    title: str
    unit: Unit
    better: Literal["lower", "higher"]
    value: Value
    meaning: str
    checked: bool = False


def values(
    document: BehaviourDocument, ours: BehaviourAnswer, theirs: BehaviourAnswer | None
) -> dict[str, tuple[float, float | None]]:
    """Measure both answers to a document: ours and theirs, by the name of the outcome; only what both have."""
    found: dict[str, tuple[float, float | None]] = {}
    for outcome in OUTCOMES:
        here = outcome.value(document, ours, theirs)
        there = None if theirs is None else outcome.value(document, theirs, theirs)
        if here is not None and (theirs is None or there is not None):
            found[outcome.name] = here, there
    return found


def repeats(text: str) -> bool:
    """Say whether a text is caught in a loop: half of its n-grams of words stood in it before."""
    words = re.findall(r"[^\W\d_]+|\d+|[^\w\s]", text)
    if len(words) < FEWEST_NGRAMS and len(text) > 8 * FEWEST_NGRAMS:  # a script without spaces
        words = list(text)
    grams = Counter(tuple(words[at : at + NGRAM]) for at in range(len(words) - NGRAM + 1))
    total = sum(grams.values())
    return total >= FEWEST_NGRAMS and 1 - len(grams) / total > REPEATED


def _wanted(
    document: BehaviourDocument, theirs: BehaviourAnswer | None
) -> list[tuple[str, Mapping[str, Any] | None]] | None:
    """Name the calls that are right, with their arguments; None: it cannot be told."""
    if not document.tools:
        return None
    if document.expected is not None:
        said = [] if theirs is None else [_arguments(call.arguments) for call in theirs.calls]
        return [
            (call.name, call.arguments if call.arguments is not None else (said[i] if i < len(said) else None))
            for i, call in enumerate(document.expected)
        ]
    return None if theirs is None else [(call.name, _arguments(call.arguments)) for call in theirs.calls]


def _arguments(text: str) -> Mapping[str, Any] | None:
    try:
        found = json_schema.read(text)
    except ValueError:
        return None
    return found if isinstance(found, dict) else None


def _decision(document: BehaviourDocument, answer: BehaviourAnswer, theirs: BehaviourAnswer | None) -> float | None:
    wanted = _wanted(document, theirs)
    return None if wanted is None else float(bool(wanted) == bool(answer.calls))


def _choice(document: BehaviourDocument, answer: BehaviourAnswer, theirs: BehaviourAnswer | None) -> float | None:
    wanted = _wanted(document, theirs)
    if not wanted:
        return None
    return float(sorted(name for name, _ in wanted) == sorted(call.name for call in answer.calls))


def _valid_arguments(
    document: BehaviourDocument, answer: BehaviourAnswer, theirs: BehaviourAnswer | None
) -> float | None:
    if not _wanted(document, theirs):
        return None
    known = document.parameters
    said = [(known.get(call.name), _arguments(call.arguments)) for call in answer.calls]
    return float(
        bool(said)
        and all(schema is not None and given is not None and json_schema.valid(given, schema) for schema, given in said)
    )


def _same_arguments(
    document: BehaviourDocument, answer: BehaviourAnswer, theirs: BehaviourAnswer | None
) -> float | None:
    wanted = _wanted(document, theirs)
    if not wanted or (theirs is None and any(arguments is None for _, arguments in wanted)):
        return None
    said = [(call.name, _arguments(call.arguments)) for call in answer.calls]
    pairs = zip(said, wanted, strict=False)
    return float(
        len(said) == len(wanted)
        and all(
            name == right and given is not None and json_schema.same(given, arguments)
            for (name, given), (right, arguments) in pairs
        )
    )


def _json(document: BehaviourDocument, answer: BehaviourAnswer, theirs: BehaviourAnswer | None) -> float | None:
    if document.json_schema is None:
        return None
    try:
        return float(json_schema.valid(json_schema.read(answer.text), document.json_schema))
    except ValueError:
        return 0.0


def _refusal(document: BehaviourDocument, answer: BehaviourAnswer, theirs: BehaviourAnswer | None) -> float | None:
    asked = document.refusal
    if asked is None or not asked.patterns:
        return None
    right = asked.expected
    if right is None:
        if theirs is None:
            return None
        right = asked.refuses(theirs.text)
    return float(asked.refuses(answer.text) == right)


def _margin(document: BehaviourDocument, answer: BehaviourAnswer, theirs: BehaviourAnswer | None) -> float | None:
    asked = document.refusal
    if asked is None or asked.openings is None or answer.margin is None:
        return None
    refuses = asked.expected
    if refuses is None:
        if theirs is None or theirs.margin is None:
            return None
        refuses = theirs.margin > 0
    return answer.margin if refuses else -answer.margin


def _left_thinking(
    document: BehaviourDocument, answer: BehaviourAnswer, theirs: BehaviourAnswer | None
) -> float | None:
    if document.thinking is None or answer.reasoning_tokens is None:
        return None
    return float(not answer.thinking_open and answer.reasoning_tokens <= document.thinking)


def _thinking_tokens(
    document: BehaviourDocument, answer: BehaviourAnswer, theirs: BehaviourAnswer | None
) -> float | None:
    if document.thinking is None or answer.reasoning_tokens is None:
        return None
    return float(answer.reasoning_tokens)


def _language(document: BehaviourDocument, answer: BehaviourAnswer, theirs: BehaviourAnswer | None) -> float | None:
    return None if document.language is None else float(language_of(answer.text) == document.language)


def _instructions(document: BehaviourDocument, answer: BehaviourAnswer, theirs: BehaviourAnswer | None) -> float | None:
    return None if document.instructions is None else float(document.instructions.followed(answer.text))


def _loops(document: BehaviourDocument, answer: BehaviourAnswer, theirs: BehaviourAnswer | None) -> float:
    return float(repeats(answer.reasoning) or repeats(answer.text))


def _ended(document: BehaviourDocument, answer: BehaviourAnswer, theirs: BehaviourAnswer | None) -> float:
    return float(answer.finish_reason != "length")


def _length_change(
    document: BehaviourDocument, answer: BehaviourAnswer, theirs: BehaviourAnswer | None
) -> float | None:
    return None if theirs is None else abs(math.log((1 + answer.tokens) / (1 + theirs.tokens)))


def _own_odds(document: BehaviourDocument, answer: BehaviourAnswer, theirs: BehaviourAnswer | None) -> float | None:
    own = answer.odds.get(answers.OWN)
    return None if own is None else own.due


def _shift(
    kind: str, document: BehaviourDocument, answer: BehaviourAnswer, theirs: BehaviourAnswer | None
) -> float | None:
    here, there = answer.odds.get(kind), None if theirs is None else theirs.odds.get(kind)
    if here is None or there is None:
        return None
    pairs = ((here.due, there.due), (here.elsewhere, there.elsewhere))
    return max((abs(a - b) for a, b in pairs if a is not None and b is not None), default=None)


def _accepted(document: BehaviourDocument, answer: BehaviourAnswer, theirs: BehaviourAnswer | None) -> float | None:
    return answer.accepted_length


CHECKS = "checks"
ACCEPTED_LENGTH = "accepted_length"

# fmt: off

OUTCOMES: tuple[Outcome, ...] = (
    Outcome(
        "tool_decision", "Calls a tool or none", SHARE, "higher", _decision,
        "share of chats with tools that call one where they should, and none where they should not", checked=True,
    ),
    Outcome(
        "tool_choice", "Right tool", SHARE, "higher", _choice, "share of chats that should call whose calls are of the "
        "right tools", checked=True,
    ),
    Outcome(
        "tool_arguments_valid", "Valid arguments", SHARE, "higher", _valid_arguments,
        "share of chats that should call whose calls have arguments that the schema of their tool allows", checked=True,
    ),
    Outcome(
        "tool_arguments", "Right arguments", SHARE, "higher", _same_arguments,
        "share of chats that should call with the expected calls and arguments, or the baseline's", checked=True,
    ),
    Outcome(
        "json_schema", "JSON of its schema", SHARE, "higher", _json,
        "share of answers that are to be JSON of a schema, and are", checked=True,
    ),
    Outcome(
        "refusal", "Refuses or answers", SHARE, "higher", _refusal,
        "share of chats that are refused where they should be, and answered else, by patterns", checked=True,
    ),
    Outcome(
        "refusal_margin", "Margin of refusals", NATS_MOVED, "higher", _margin,
        "ln p of the right one of two openings, a refusal and an answer, less that of the other",
    ),
    Outcome(
        "thinking_left", "Leaves its thinking", SHARE, "higher", _left_thinking,
        "share of answers whose thoughts end within the tokens that their document allows", checked=True,
    ),
    Outcome("thinking_tokens", "Tokens of thinking", TEXT, "lower", _thinking_tokens, "mean over answers"),
    Outcome(
        "language", "Language kept", SHARE, "higher", _language,
        "share of answers in the language that their document names", checked=True,
    ),
    Outcome(
        "instructions", "Instructions followed", SHARE, "higher", _instructions,
        "share of answers that follow every instruction that a program can verify", checked=True,
    ),
    Outcome(
        "loops", "Loops", SHARE, "lower", _loops,
        "share of answers of which more than half of the 4-grams of words stood before in them",
    ),
    Outcome("ended", "Ends by itself", SHARE, "higher", _ended, "share of answers that end within their tokens"),
    Outcome(
        "length_change", "Change of length", NATS, "lower", _length_change,
        "mean |ln(tokens of the artifact's answer / tokens of the baseline's)|; 0: all are as long",
    ),
    Outcome(
        "answer_odds", "Odds of the answer", NATS_MOVED, "higher", _own_odds,
        "mean ln p/(1-p) of the tokens of the baseline's answer, but for the one that ends it",
    ),
    *(
        Outcome(
            f"{name}_shift", f"Shift of {what}", NATS, "lower", partial(_shift, kind),
            f"mean of how far ln p/(1-p) of {tokens} moved along the baseline's answer, where one is due or "
            "elsewhere, whichever is further",
        )
        for name, kind, what, tokens in (
            ("end", answers.ENDS, "ends", "the tokens that end it"),
            ("call", answers.CALLS, "calls", "the token that opens a call"),
            ("thinking", answers.THOUGHTS, "ends of thoughts", "the token that ends thoughts"),
            ("bracket", answers.BRACKETS, "brackets", "tokens with a bracket of JSON"),
        )
    ),
    Outcome(
        ACCEPTED_LENGTH, "Accepted length of drafts", TOKENS_A_STEP, "higher", _accepted,
        "tokens of a step of the decoder that verifies what the artifact drafts, mean over answers; 1: no draft stands",
    ),
)

# fmt: on


def of_checks() -> Iterator[str]:
    """Name the outcomes that `checks` is made of."""
    return (outcome.name for outcome in OUTCOMES if outcome.checked)
