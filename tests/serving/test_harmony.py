"""Channels of gpt-oss: thoughts, text and calls, however an answer is cut."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from llmforge.serving.protocol.answer import AnswerReader, call_deltas, text_of, thoughts_of
from llmforge.serving.protocol.harmony import HarmonyParser
from llmforge.serving.protocol.tool_calls import CallParser
from llmforge.serving.protocol.tool_markups import MARKUPS

HARMONY = next(markup for markup in MARKUPS if markup.name == "Harmony")
ANALYSIS, FINAL = "<|channel|>analysis<|message|>", "<|channel|>final<|message|>"
CALL = ' to=functions.add <|constrain|>json<|message|>{"a": 1}'


def read(pieces: Sequence[str], *, calls: bool, header: str = "") -> tuple[str, str, list[tuple[str, str]]]:
    """Return thoughts, text, and calls by names and arguments."""
    reader = AnswerReader(CallParser(HARMONY, {"add"}) if calls else None, HarmonyParser(header))
    found = []
    for number, piece in enumerate(pieces):
        found += reader.read(piece, "stop" if number == len(pieces) - 1 else None)[0]
    made = [(call["function"]["name"], call["function"]["arguments"]) for call in call_deltas(found)]
    return thoughts_of(found), text_of(found), made


@pytest.mark.parametrize(
    ("answer", "thoughts", "text", "calls"),
    [
        (f"{ANALYSIS}Hm <b>.<|end|><|start|>assistant{FINAL}Yes < no.<|return|>", "Hm <b>.", "Yes < no.", False),
        (f"{ANALYSIS}A<|end|><|start|>assistant{ANALYSIS}B<|end|><|start|>assistant{FINAL}C", "AB", "C", False),
        (f"{FINAL}C", "", "C", False),
        ("plain", "", "plain", False),
        ("", "", "", False),
        (f"{ANALYSIS}cut", "cut", "", False),
        ("<|channel|>ana", "", "", False),
        ("<|start|>assistant", "", "", False),
        (f"<|channel|>commentary<|message|>I look.<|end|><|start|>assistant{FINAL}B", "", "I look.B", False),
        (f"{ANALYSIS}A<|end|><|start|>assistant<|channel|>commentary{CALL}<|call|>", "A", "", True),
        (f"{ANALYSIS}A<|end|><|start|>assistant{CALL}", "A", "", True),
        (" to=functions.add<|channel|>commentary json<|message|>{\"a\": 1}<|call|>", "", "", True),
        ("to be", "", "to be", False),
        (" to=nowhere", "", " to=nowhere", False),
    ],
)  # fmt: skip
def test_however_an_answer_is_cut_it_adds_up_to_the_same(answer: str, thoughts: str, text: str, calls: bool) -> None:
    expected = thoughts, text, [("add", '{"a": 1}')] if calls else []
    assert read([answer], calls=True) == expected
    assert read(list(answer) or [""], calls=True) == expected
    for cut in range(len(answer) + 1):
        assert read([answer[:cut], answer[cut:]], calls=True) == expected
    if not calls:
        assert read(list(answer) or [""], calls=False) == expected


def test_a_prompt_may_end_with_the_header() -> None:
    assert read(["A<|end|>", f"<|start|>assistant{FINAL}B"], calls=False, header=f"<|start|>assistant{ANALYSIS}") == (
        "A", "B", [],
    )  # fmt: skip


def test_what_is_no_header_is_text() -> None:
    assert read(["<|start|>" + "x" * 300], calls=False)[1] == "<|start|>" + "x" * 300
