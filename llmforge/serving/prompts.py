"""Prompts of an artifact: what turns texts and conversations into token ids. No engine."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from llmforge.base import small_file
from llmforge.base.errors import InputError, UsageError
from llmforge.runtime.config import DAMAGED, FILE, RuntimeConfig
from llmforge.serving.chat import ChatTemplate
from llmforge.serving.protocol.tool_format import ToolFormat

TOKENIZER_BYTES = 64 << 20  # the largest that are known have 35 MB
LEAST_PROMPT_BYTES = 64 << 10  # that every model takes: tokenized in some tenths of a second at worst


class PromptEncoder:
    """The configuration, tokenizer and chat template of an artifact."""

    def __init__(self, config: RuntimeConfig, tokenizer: Tokenizer, template: ChatTemplate | None) -> None:
        self.config = config
        self.tokenizer = tokenizer
        self.template = template

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

    def encode(self, text: str) -> list[int]:
        """Tokenize a plain prompt; the tokenizer adds what it puts before every text (BOS), if anything.

        Raises:
            UsageError: the text is longer than `most_bytes`, or holds halves of characters (surrogates), which no
                encoding has.
        """
        return self._encode(text, special=True)

    @functools.cached_property
    def tool_format(self) -> ToolFormat | None:
        """How calls of tools are written; None where the template writes none that could be read."""
        return None if self.template is None else ToolFormat.find(self.template)

    def encode_chat(self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] = ()) -> list[int]:
        """Tokenize a conversation with the chat template, up to where the assistant speaks.

        `tools` and calls of tools in the conversation are in OpenAI's shape.

        Raises:
            UsageError: the artifact has no chat template, there are more messages than tokens of context, arguments of
                a call are no JSON, or as `encode`.
            InputError: the template refuses the messages.
        """
        if len(messages) > self.config.max_context:
            raise UsageError(f"{len(messages):,} messages; the context holds {self.config.max_context:,} tokens")
        if self.template is None:
            raise UsageError(
                "the artifact has no chat template", hint="use a plain prompt, or give one: --chat-template FILE"
            )
        if any(message.get("tool_calls") for message in messages) and (format_ := self.tool_format) is not None:
            messages = format_.messages(messages)
        return self._encode(self.template.render(messages, tools=tools), special=False)

    def _encode(self, text: str, *, special: bool) -> list[int]:
        if len(text) > self.most_bytes or len(_unicode(text)) > self.most_bytes:
            raise UsageError(
                f"the prompt has {len(text):,} characters; {self.config.max_context:,} tokens of context hold at most "
                f"{self.most_bytes:,} bytes"
            )
        # The tokenizer lets other threads run while it works on a batch, and no thread while it works on a text.
        (encoding,) = self.tokenizer.encode_batch([text], add_special_tokens=special)
        return list(encoding.ids)


def _unicode(text: str) -> bytes:
    """Encode `text`, or refuse halves of characters, which bytes that are no UTF-8 and JSON's escapes can leave."""
    try:
        return text.encode()
    except UnicodeEncodeError as error:
        raise UsageError(
            f"the prompt: character {error.start} is an unpaired surrogate", hint="use valid UTF-8 text"
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
