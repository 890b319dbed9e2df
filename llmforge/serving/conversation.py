"""A conversation in turns: what was said, and as much of it as the context of an artifact holds."""

from __future__ import annotations

from dataclasses import dataclass, field

from llmforge.base.errors import UsageError
from llmforge.serving.prompts import PromptEncoder

Message = dict[str, str]  # `role` and `content`


@dataclass
class Conversation:
    """What a user and the assistant said.

    Args:
        encoder: of the artifact that answers.
        answer_tokens: that the context keeps free for an answer, at most half of it.
        system: what stands before all that is said; None: nothing.
    """

    encoder: PromptEncoder
    answer_tokens: int
    system: str | None = None
    messages: list[Message] = field(default_factory=list)

    def check(self) -> None:
        """Return if the chat template renders a conversation with this system prompt.

        Raises:
            UsageError, InputError: as `PromptEncoder.encode_chat`.
        """
        self._prompt([{"role": "user", "content": "Hello"}])

    def ask(self, text: str) -> tuple[list[int], int]:
        """Add what the user says; return the prompt, and how many of the oldest messages no longer fit in front of it.

        Those are dropped: a question with its answer, as often as it takes. After an error nothing has been added.

        Raises:
            UsageError: the message alone is longer than the context.
            InputError: the chat template refuses the messages.
        """
        context = self.encoder.config.max_context
        most = context - min(self.answer_tokens, context // 2)
        kept = [*self.messages, {"role": "user", "content": text}]
        while len(ids := self._prompt(kept)) > most and len(kept) > 1:
            turns = [number for number, message in enumerate(kept) if message["role"] == "user"]
            kept = kept[turns[1] :]
        if len(ids) >= context:
            raise UsageError(
                f"the message takes {len(ids)} tokens, and the context holds {context}", hint="write a shorter one"
            )
        dropped = len(self.messages) + 1 - len(kept)
        self.messages = kept
        return ids, dropped

    def answer(self, text: str) -> None:
        """Add what the assistant said, as far as it came; where nothing came, what was asked is taken back."""
        if text:
            self.messages.append({"role": "assistant", "content": text})
        else:
            self.messages.pop()

    def reset(self) -> None:
        """Forget what was said, but for the system prompt."""
        self.messages = []

    def _prompt(self, messages: list[Message]) -> list[int]:
        system = [] if self.system is None else [{"role": "system", "content": self.system}]
        return self.encoder.encode_chat([*system, *messages])
