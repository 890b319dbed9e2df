"""Prompts of an artifact: what turns texts and conversations into token ids. No engine."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

from tokenizers import Encoding, Tokenizer

from llmforge.base import small_file
from llmforge.base.errors import InputError, UsageError
from llmforge.runtime.config import DAMAGED, FILE, RuntimeConfig
from llmforge.serving.chat import ChatTemplate
from llmforge.serving.protocol.tool_format import ToolFormat

TOKENIZER_BYTES = 64 << 20  # the largest that are known have 35 MB
LEAST_PROMPT_BYTES = 64 << 10  # that every model takes: tokenized in some tenths of a second at worst


class TextEncoder:
    """A tokenizer and a chat template: what turns texts and conversations into token ids.

    One for serving, for lm-eval's tasks, and for the text that calibration and evaluation read.
    """

    def __init__(self, tokenizer: Tokenizer, template: ChatTemplate | None) -> None:
        self.tokenizer = tokenizer
        self.template = template

    def encode(self, text: str) -> list[int]:
        """Tokenize a plain prompt; the tokenizer adds what it puts before every text (BOS), if anything.

        Raises:
            UsageError: the text holds halves of characters (surrogates), which no encoding has.
        """
        return list(self.tokenized([text], special=True)[0].ids)

    @functools.cached_property
    def tool_format(self) -> ToolFormat | None:
        """How calls of tools are written; None where the template writes none that could be read."""
        return None if self.template is None else ToolFormat.find(self.template)

    def encode_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] = (),
        variables: Mapping[str, Any] = MappingProxyType({}),
    ) -> list[int]:
        """Tokenize a conversation with the chat template, up to where the assistant speaks.

        `tools` and calls of tools in the conversation are in OpenAI's shape; `variables` are others of the template's.

        Raises:
            UsageError: there is no chat template, arguments of a call are no JSON, or as `encode`.
            InputError: the template refuses the messages.
        """
        return list(self.tokenized([self.render(messages, tools, variables=variables)], special=False)[0].ids)

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] = (),
        *,
        add_generation_prompt: bool = True,
        variables: Mapping[str, Any] = MappingProxyType({}),
    ) -> str:
        """Write a conversation with the chat template.

        Raises:
            UsageError, InputError: as `encode_chat`.
        """
        return self._template.render(
            self._as_written(messages),
            tools=tools,
            add_generation_prompt=add_generation_prompt,
            variables=variables,
        )

    def render_generations(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] = ()
    ) -> tuple[str, list[tuple[int, int]]]:
        """Write a whole conversation, and say which characters of it stand in `{% generation %}` blocks.

        Raises:
            UsageError, InputError: as `encode_chat`.
        """
        return self._template.render_generations(self._as_written(messages), tools)

    @property
    def _template(self) -> ChatTemplate:
        if self.template is None:
            raise UsageError(
                "the artifact has no chat template", hint="use a plain prompt, or give one: --chat-template FILE"
            )
        return self.template

    def _as_written(self, messages: Sequence[Mapping[str, Any]]) -> Sequence[Mapping[str, Any]]:
        """Write calls of tools as the template wants them."""
        called = any(message.get("tool_calls") for message in messages)
        return messages if not called or self.tool_format is None else self.tool_format.messages(messages)

    def tokenized(self, texts: Sequence[str], *, special: bool) -> list[Encoding]:
        """Tokenize texts; `special`: with what the tokenizer adds to a text, which a chat template has written.

        Raises:
            UsageError: as `encode`.
        """
        for text in texts:
            check_unicode(text)
        # The tokenizer lets other threads run while it works on a batch, and no thread while it works on a text.
        found: list[Encoding] = self.tokenizer.encode_batch(list(texts), add_special_tokens=special)
        return found


class PromptEncoder(TextEncoder):
    """The configuration, tokenizer and chat template of an artifact."""

    def __init__(self, config: RuntimeConfig, tokenizer: Tokenizer, template: ChatTemplate | None) -> None:
        super().__init__(tokenizer, template)
        self.config = config

    @functools.cached_property
    def most_bytes(self) -> int:
        """How long a text may be, in bytes of UTF-8: no context holds more, were all of its tokens the longest."""
        longest = max((len(token.encode("utf-8", "surrogatepass")) for token in self.tokenizer.get_vocab()), default=1)
        return max(LEAST_PROMPT_BYTES, self.config.max_context * longest)

    @classmethod
    def read(cls, artifact: Path, template: ChatTemplate | None = None) -> PromptEncoder:
        """Read them from an artifact's folder; a `template` that is given stands in place of the artifact's.

        Raises:
            InputError: the folder is not an artifact, or a file is damaged.
        """
        folder = artifact / "tokenizer"
        config = RuntimeConfig.read(artifact / "engine" / FILE)
        return cls(config, read_tokenizer(folder / "tokenizer.json"), template or ChatTemplate.read(folder))

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] = (),
        *,
        add_generation_prompt: bool = True,
        variables: Mapping[str, Any] = MappingProxyType({}),
    ) -> str:
        """Write a conversation with the chat template.

        Raises:
            UsageError: there are more messages than tokens of context, or as `TextEncoder.render`.
            InputError: the template refuses the messages.
        """
        if len(messages) > self.config.max_context:
            raise UsageError(f"{len(messages):,} messages; the context holds {self.config.max_context:,} tokens")
        return super().render(messages, tools, add_generation_prompt=add_generation_prompt, variables=variables)

    def tokenized(self, texts: Sequence[str], *, special: bool) -> list[Encoding]:
        """Tokenize texts.

        Raises:
            UsageError: one is longer than `most_bytes`, or as `TextEncoder.tokenized`.
        """
        for text in texts:
            if len(text) > self.most_bytes or len(check_unicode(text)) > self.most_bytes:
                raise UsageError(
                    f"the prompt has {len(text):,} characters; {self.config.max_context:,} tokens of context hold at "
                    f"most {self.most_bytes:,} bytes"
                )
        return super().tokenized(texts, special=special)


def check_unicode(text: str, what: str = "the prompt") -> bytes:
    """Encode `text`.

    Raises:
        UsageError: it holds halves of characters, which bytes that are no UTF-8 and JSON's escapes can leave.
    """
    try:
        return text.encode()
    except UnicodeEncodeError as error:
        raise UsageError(
            f"{what}: character {error.start} is an unpaired surrogate", hint="use valid UTF-8 text"
        ) from error


def read_tokenizer(path: Path) -> Tokenizer:
    """Read a `tokenizer.json`; truncation and padding, which it may ask for, are switched off.

    Raises:
        InputError: the file is missing or is not a tokenizer.
    """
    if not path.exists():
        raise InputError(f"{path} is missing", hint=DAMAGED)
    data = small_file.read(path, TOKENIZER_BYTES, hint=DAMAGED)
    try:
        tokenizer = Tokenizer.from_buffer(data)
    except Exception as error:  # the class that tokenizers raises
        raise InputError(f"{path}: not a tokenizer: {error}", hint=DAMAGED) from error
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer
