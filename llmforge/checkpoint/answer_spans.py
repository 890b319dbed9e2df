"""Where the answers stand in a chat as its template writes it: what the model would have generated, and nothing else.

Where the template marks them (`{% generation %}`, as transformers' `return_assistant_tokens_mask` reads it), there.
Elsewhere an answer begins where the prompt ends that the template writes before it, and ends with the turn.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray
from tokenizers import Encoding

from llmforge.checkpoint.documents import Document

Span = tuple[int, int]  # characters: the first, and the one after the last


class ChatRenderer(Protocol):
    """What writes conversations as a model was trained to read them."""

    template: Any  # None: there is none

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] = (),
        *,
        add_generation_prompt: bool = True,
    ) -> str:
        """Write a conversation; with a generation prompt, up to where the assistant speaks."""

    def render_generations(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] = ()
    ) -> tuple[str, list[Span]]:
        """Write a whole conversation, and say where the `{% generation %}` blocks of the template stand."""


def find(document: Document, encoder: ChatRenderer) -> tuple[str, list[Span]]:
    """Write an answered chat with its template, and find the characters of its answers.

    A template may write an earlier turn otherwise once another follows (reasoning is left out): what stands there is
    not what the model said, and no answer.

    Raises:
        InputError, UsageError: the template refuses the messages.
    """
    text, spans = encoder.render_generations(document.messages, document.tools)
    if spans:
        return text, spans
    for number in document.answers:
        before, turn = document.messages[:number], document.messages[: number + 1]
        prompt = encoder.render(before, document.tools) if before else ""
        said = encoder.render(turn, document.tools, add_generation_prompt=False)
        # A generation prompt may open a thought that the template leaves out of the turn: both begin the same then.
        begin, end = _shared(prompt, said), len(said.rstrip())
        if text.startswith(said) and begin < end:
            spans.append((begin, end))
    return text, spans


def _shared(one: str, other: str) -> int:
    """Count the characters that two texts begin with alike."""
    most = min(len(one), len(other))
    return next((at for at in range(most) if one[at] != other[at]), most)


def tokens_of(span: Span, encoding: Encoding, ends: Collection[int]) -> NDArray[np.bool_]:
    """Say which tokens [S] of the text that was encoded stand in an answer.

    It ends with the first of the tokens that end one (`ends`), if any: what follows it in the turn is the template's.
    """
    inside = np.zeros(len(encoding.ids), bool)
    for place, (begin, end) in enumerate(encoding.offsets):
        inside[place] = begin >= span[0] and end <= span[1] and begin < end
    places = np.flatnonzero(inside)
    ending = [int(place) for place in places if encoding.ids[place] in ends]
    if ending:
        inside[ending[0] + 1 :] = False
    return inside
