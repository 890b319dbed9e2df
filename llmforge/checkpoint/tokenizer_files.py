"""The tokenizer of a checkpoint's folder, and what its files say of chats."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from llmforge.base.errors import CheckpointError
from llmforge.checkpoint.safetensors_file import read_small

TOKENIZER = "tokenizer.json"
TOKENIZER_CONFIG = "tokenizer_config.json"
CHAT_TEMPLATE = "chat_template.jinja"
SPECIAL_TOKENS = ("bos_token", "eos_token", "pad_token", "unk_token")  # what chat templates may name


def load(folder: Path) -> Tokenizer:
    """Load the tokenizer of a folder, which neither cuts nor fills texts up.

    Raises:
        CheckpointError: there is none, or it cannot be read.
    """
    file = folder / TOKENIZER
    if not file.exists() and not file.is_symlink():
        raise CheckpointError(
            f"{folder}: no {TOKENIZER}",
            hint="write it with transformers: AutoTokenizer.from_pretrained('FOLDER').save_pretrained('FOLDER')",
        )
    data = read_small(file)
    try:
        tokenizer = Tokenizer.from_buffer(data)
    except Exception as error:  # tokenizers raises nothing more specific
        raise CheckpointError(f"{file}: tokenizers cannot read it: {error}") from error
    tokenizer.no_truncation()  # which a file may ask for; serving does without, too
    tokenizer.no_padding()
    return tokenizer


def chat_template(folder: Path, tokenizer_settings: Mapping[str, Any]) -> str | None:
    """Find the chat template: its own file, or `chat_template` of the tokenizer configuration (one, or one by name).

    Raises:
        CheckpointError: it cannot be read, or is no text.
    """
    file = folder / CHAT_TEMPLATE
    if file.exists() or file.is_symlink():
        try:
            return read_small(file).decode("utf-8")
        except UnicodeDecodeError as error:
            raise CheckpointError(f"{file}: not UTF-8: {error}") from error
    template = tokenizer_settings.get("chat_template")
    if isinstance(template, list):
        named = {item.get("name"): item.get("template") for item in template if isinstance(item, dict)}
        template = named.get("default")
    if template is not None and not isinstance(template, str):
        raise CheckpointError(f"{folder / TOKENIZER_CONFIG}: chat_template must be text, is {type(template).__name__}")
    return template


def special_tokens(tokenizer_settings: Mapping[str, Any]) -> dict[str, str]:
    """Read the text of special tokens: each a string, or an object with its `content`."""
    tokens = {name: tokenizer_settings.get(name) for name in SPECIAL_TOKENS}
    texts = {name: token.get("content") if isinstance(token, dict) else token for name, token in tokens.items()}
    return {name: text for name, text in texts.items() if isinstance(text, str)}
