"""One answer of a model, as a client of a server would see it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

OWN, ENDS, CALLS, THOUGHTS, BRACKETS = "own", "ends", "calls", "thoughts", "brackets"  # kinds of tokens with odds


@dataclass(frozen=True)
class MadeCall:
    """A call of a tool that an answer makes; `arguments` are JSON, as the model wrote it."""

    name: str
    arguments: str


@dataclass(frozen=True)
class TokenOdds:
    """ln p/(1-p) of tokens of one kind along the baseline's answer: means over its places; None: there are none."""

    due: float | None  # where the baseline says such a token
    elsewhere: float | None


@dataclass(frozen=True)
class BehaviourAnswer:
    """An answer, taken apart.

    Args:
        text: outside of thoughts and calls.
        calls: of tools, in their order.
        reasoning: what was thought.
        reasoning_tokens: of thoughts and their tags; None: the model does not think.
        thinking_open: the answer ended before the thoughts did.
        finish_reason: as OpenAI's API has it; `length`: it was cut off.
        tokens: of the whole answer.
        margin: ln p(first opening) less ln p(second opening) of a document that names two; None: not measured.
        odds: how sure of the baseline's answer who made this one is: of its `OWN` tokens, and of those that end it,
            open a call, end thoughts, hold a bracket; as far as they were measured.
        accepted_length: tokens that a step gives where the artifact's drafts are verified; None: it drafts nothing.
    """

    text: str
    calls: tuple[MadeCall, ...] = ()
    reasoning: str = ""
    reasoning_tokens: int | None = None
    thinking_open: bool = False
    finish_reason: Literal["stop", "length", "tool_calls"] = "stop"
    tokens: int = 0
    margin: float | None = None
    odds: Mapping[str, TokenOdds] = field(default_factory=dict)
    accepted_length: float | None = None
