"""The channels that gpt-oss writes in: what it thinks in `analysis`, what it says in `final` and `commentary`.

Form: OpenAI's cookbook, "OpenAI Harmony Response Format": `<|start|>assistant<|channel|>NAME<|message|>TEXT<|end|>`. A
message to a function has its name in the header, and is left to what reads calls.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from llmforge.runtime.sampling.options import Sampling
from llmforge.serving.prompts import PromptEncoder
from llmforge.serving.protocol.pieces import PieceParser, held_back
from llmforge.serving.protocol.reasoning import Thought

_TOKENS = ("<|start|>", "<|channel|>", "<|message|>", "<|end|>", "<|call|>", "<|return|>", "<|constrain|>")
_NEEDED = _TOKENS[:4]
_MARKS = ("<|start|>", "<|channel|>", "<|end|>", "<|return|>")
_MARK = re.compile("|".join(map(re.escape, _MARKS)))
_MARK_OF_CALL = re.compile(r"<\|(?:start|end|return)\|>")
_MESSAGE, _TO = "<|message|>", "to="
_LONGEST_HEADER = 256  # characters
_TAIL_TOKENS = 16  # of a prompt, that may be the header of the answer


@dataclass(frozen=True)
class HarmonyChannels:
    """Knows that a tokenizer has the channels' tokens."""

    special_tokens: frozenset[int]

    @classmethod
    def find(cls, encoder: PromptEncoder) -> HarmonyChannels | None:
        """Find the tokens; None: a tokenizer lacks some."""
        tokens = {name: encoder.tokenizer.token_to_id(name) for name in _TOKENS}
        if any(tokens[name] is None for name in _NEEDED):
            return None
        return cls(frozenset(token for token in tokens.values() if token is not None))

    def parser(self, prompt: Sequence[int], encoder: PromptEncoder, sampling: Sampling) -> Callable[[], HarmonyParser]:
        """Make what reads the answers to a prompt, which may end within a header, or with one."""
        (tail,) = encoder.tokenizer.decode_batch([list(prompt[-_TAIL_TOKENS:])], skip_special_tokens=False)
        header = tail[tail.rfind("<|start|>") :] if "<|start|>" in tail else ""
        return lambda: HarmonyParser(header if header.endswith(_MESSAGE) else "")


class HarmonyParser(PieceParser[Thought | str]):
    """Takes thoughts and headers out of an answer in pieces; however it is cut, what comes out adds up to the same.

    Text that no header precedes is the answer's. `header`: what the prompt ended with.
    """

    def __init__(self, header: str = "") -> None:
        super().__init__(header)
        self.thinking = False  # at the end of what was pushed
        self._calls = False  # the message is one to a function
        self._state = self._at_start

    def _at_start(self, found: list[Thought | str], final: bool) -> bool:
        text = self._pending.lstrip()
        if _TO.startswith(text) and not final:  # where the prompt has begun the header
            return False
        self._state = self._in_header if text.startswith(_TO) else self._in_message
        return True

    def _in_message(self, found: list[Thought | str], final: bool) -> bool:
        text = self._pending
        mark = (_MARK_OF_CALL if self._calls else _MARK).search(text)
        kept = mark.start() if mark else len(text) if final else len(text) - held_back(text, _MARKS)
        if kept:
            found.append(Thought(text[:kept]) if self.thinking else text[:kept])
        self._pending = text[kept:]
        if mark is None:
            return False
        self.thinking = self._calls = False
        if mark[0] in ("<|end|>", "<|return|>"):
            self._pending = text[mark.end() :]
        else:
            self._state = self._in_header
        return True

    def _in_header(self, found: list[Thought | str], final: bool) -> bool:
        header, end, rest = self._pending.partition(_MESSAGE)
        if not end and len(header) <= _LONGEST_HEADER and not final:
            return False
        self._state = self._in_message
        if not end:  # none, or one that was cut off
            found += [header] if not final or not header.startswith("<|") else []
            self._pending = ""
            return False
        self._pending = rest
        self._calls = _TO in header
        self.thinking = not self._calls and "<|channel|>analysis" in header
        if self._calls:
            found.append(header + end)
        return True
