"""Prompts of an artifact: what turns texts and conversations into token ids. No engine."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from llmforge.base import small_file
from llmforge.base.errors import InputError, UsageError
from llmforge.runtime.backends.config import DAMAGED, FILE, RuntimeConfig
from llmforge.runtime.serving.chat import ChatTemplate

TOKENIZER_BYTES = 64 << 20  # the largest that are known have 35 MB


class PromptEncoder:
    """The configuration, tokenizer and chat template of an artifact."""

    def __init__(self, config: RuntimeConfig, tokenizer: Tokenizer, template: ChatTemplate | None) -> None:
        self.config = config
        self.tokenizer = tokenizer
        self.template = template

    @classmethod
    def read(cls, artifact: Path) -> PromptEncoder:
        """Read them from an artifact's folder.

        Raises:
            InputError: the folder is not an artifact, or a file is damaged.
        """
        folder = artifact / "tokenizer"
        config = RuntimeConfig.read(artifact / "engine" / FILE)
        return cls(config, read_tokenizer(folder / "tokenizer.json"), ChatTemplate.read(folder))

    def encode(self, text: str) -> list[int]:
        """Tokenize a plain prompt; the tokenizer adds what it puts before every text (BOS), if anything.

        Raises:
            UsageError: the text holds halves of characters (surrogates), which no encoding has.
        """
        return list(self.tokenizer.encode(_unicode(text)).ids)

    def encode_chat(self, messages: Sequence[Mapping[str, Any]]) -> list[int]:
        """Tokenize a conversation with the chat template, up to where the assistant speaks.

        Raises:
            UsageError: the artifact has no chat template, or as `encode`.
            InputError: the template refuses the messages.
        """
        if self.template is None:
            raise UsageError("the artifact has no chat template", hint="use a plain prompt")
        return list(self.tokenizer.encode(_unicode(self.template.render(messages)), add_special_tokens=False).ids)


def _unicode(text: str) -> str:
    """Return `text`, or refuse halves of characters, which bytes that are no UTF-8 and JSON's escapes can leave."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise UsageError(
            f"the prompt: character {error.start} is an unpaired surrogate", hint="use valid UTF-8 text"
        ) from error
    return text


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
