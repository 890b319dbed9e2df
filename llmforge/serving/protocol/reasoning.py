"""What a model thinks before it answers, in the text of its answers: `reasoning_content`, and the switch for it.

Names: `reasoning_content` is DeepSeek's (https://api-docs.deepseek.com/guides/reasoning_model), `chat_template_kwargs`
vLLM's and SGLang's, `reasoning_effort` OpenAI's.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from llmforge.base.errors import UsageError
from llmforge.base.wording import quoted
from llmforge.runtime.sampling.options import Sampling, ThinkingBudget
from llmforge.serving.chat import ChatTemplate
from llmforge.serving.prompts import PromptEncoder
from llmforge.serving.protocol.pieces import PieceParser, held_back
from llmforge.serving.request import Request

BUDGET = "thinking_token_budget"  # vLLM's name
FIELDS = frozenset({"chat_template_kwargs", "reasoning_effort", BUDGET})
EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh")  # OpenAI's
SWITCHES = ("enable_thinking", "thinking")  # variables of templates that are true or false: Qwen's, DeepSeek's
_GIVEN = frozenset({"messages", "tools", "documents", "add_generation_prompt"})  # what templates get of the request
_MOST_BYTES = 4096  # of the variables of a request, as JSON
_TAIL_TOKENS = 16  # of a prompt, that may be its opening tag and white space
# Tags that models were trained to think between: Qwen, DeepSeek, GLM, SmolLM3 and others; Mistral; Seed.
_TAGS = (("<think>", "</think>"), ("[THINK]", "[/THINK]"), ("<seed:think>", "</seed:think>"))


@dataclass(frozen=True)
class Reasoning:
    """How a checkpoint writes what it thinks: between two tags, before its answer."""

    begin: str
    end: str
    special_tokens: frozenset[int]  # that the tags are written with
    tokens: tuple[int, int] = (-1, -1)  # the tags

    @classmethod
    def find(cls, encoder: PromptEncoder) -> Reasoning | None:
        """Find the tags that are tokens of an artifact's tokenizer; None: it has none."""
        for begin, end in _TAGS:
            first, last = (encoder.tokenizer.token_to_id(tag) for tag in (begin, end))
            if first is not None and last is not None:
                return cls(begin, end, frozenset((first, last)), (first, last))
        return None

    def parser(
        self, prompt: Sequence[int], encoder: PromptEncoder, sampling: Sampling
    ) -> Callable[[], ReasoningParser]:
        """Make what reads the answers to a prompt, which may end with the opening tag.

        An answer that is held to a form from its first token on has no room for thoughts.
        """
        begun = self._begun(prompt, encoder) and not _is_held(sampling)
        return lambda: ReasoningParser(self, begun=begun)

    def limited(self, tokens: Any, request: Request, encoder: PromptEncoder) -> Request:
        """Let the answers to a request think for so many tokens at most.

        Raises:
            UsageError: the number makes no sense.
        """
        if type(tokens) is not int:
            raise UsageError(f"{BUDGET} {quoted(tokens)}: expected a number of tokens, 0 or more")
        if _is_held(request.sampling):
            return request
        budget = ThinkingBudget(tokens, *self.tokens, begun=self._begun(request.prompt, encoder))
        return replace(request, sampling=replace(request.sampling, thinking=budget))

    def _begun(self, prompt: Sequence[int], encoder: PromptEncoder) -> bool:
        """Say if a prompt ends with the opening tag."""
        (tail,) = encoder.tokenizer.decode_batch([list(prompt[-_TAIL_TOKENS:])], skip_special_tokens=False)
        return tail.rstrip().endswith(self.begin)


def _is_held(sampling: Sampling) -> bool:
    """Say if answers are held to a form from their first token on."""
    return sampling.constraint is not None and sampling.constraint.trigger is None


@dataclass(frozen=True)
class Thought:
    """A piece of what was thought."""

    text: str


class ReasoningParser(PieceParser[Thought | str]):
    """Takes thoughts out of an answer that arrives in pieces; however it is cut, what comes out adds up to the same.

    White space around the tags belongs to neither side. Only an answer that begins with the tag, or whose prompt ended
    with it (`begun`), has thoughts: later tags are text.
    """

    def __init__(self, tags: Reasoning, *, begun: bool) -> None:
        super().__init__()
        self._tags = tags
        self._state = self._in_thoughts if begun else self._at_start
        self.thinking = begun  # at the end of what was pushed
        self._said = False  # anything of the thoughts; then of the answer

    def _at_start(self, found: list[Thought | str], final: bool) -> bool:
        text, begin = self._pending.lstrip(), self._tags.begin
        if text.startswith(begin):
            self._pending, self._state, self.thinking = text[len(begin) :], self._in_thoughts, True
            return True
        if begin.startswith(text) and not final:
            return False
        self._state = self._in_answer
        self._said = True  # its white space is its own
        return True

    def _in_thoughts(self, found: list[Thought | str], final: bool) -> bool:
        thoughts, end, rest = self._pending.partition(self._tags.end)
        if end:
            self._pending, self._state, self.thinking = rest, self._in_answer, False
            self._think(found, thoughts.rstrip())
            self._said = False
            return True
        kept = len(thoughts) if final else len(thoughts) - held_back(thoughts, [self._tags.end])
        said = thoughts[:kept].rstrip()
        self._think(found, said)
        self._pending = "" if final else (thoughts[len(said) :] if self._said else thoughts[kept:])
        return False

    def _think(self, found: list[Thought | str], text: str) -> None:
        text = text if self._said else text.lstrip()
        if text:
            found.append(Thought(text))
            self._said = True

    def _in_answer(self, found: list[Thought | str], final: bool) -> bool:
        text = self._pending if self._said else self._pending.lstrip()
        self._pending = ""
        if text:
            found.append(text)
            self._said = True
        return False


def variables(fields: Mapping[str, Any], template: ChatTemplate | None) -> dict[str, Any]:
    """Read the variables that a request gives to the chat template.

    Raises:
        UsageError: they make no sense, or the template reads none of such a name.
    """
    given, effort = fields.get("chat_template_kwargs"), fields.get("reasoning_effort")
    if given is None and effort is None:
        return {}
    found = _object({} if given is None else given)
    known = frozenset() if template is None else template.variables - _GIVEN
    for name in found:
        if name not in known:
            reads = f"it reads {', '.join(sorted(known))[:300]}" if known else "it reads none"
            raise UsageError(f"chat_template_kwargs: the chat template has no variable {quoted(name)}", hint=reads)
    if effort is None:
        return found
    if effort not in EFFORTS:
        raise UsageError(f"reasoning_effort {effort!r}: expected {', '.join(EFFORTS)}"[:200])
    read = {name: effort != "none" for name in SWITCHES if name in known}
    if "reasoning_effort" in known:
        read["reasoning_effort"] = effort
    if not read:
        raise UsageError(
            "reasoning_effort: the chat template has no switch for thinking", hint="leave reasoning_effort out"
        )
    return read | found


def _object(value: Any) -> dict[str, Any]:
    if not isinstance(value, dict) or not all(name.isidentifier() for name in value):
        raise UsageError("chat_template_kwargs: expected an object of variables of the chat template")
    if taken := sorted(_GIVEN & value.keys()):
        raise UsageError(f"chat_template_kwargs: {taken[0]} is given by the request itself")
    if len(json.dumps(value)) > _MOST_BYTES:
        raise UsageError(f"chat_template_kwargs: larger than {_MOST_BYTES:,} bytes")
    return value
