"""Conversations as clients send them, in OpenAI's shape: checked, then written by the chat template."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

from llmforge.base.errors import InputError, UsageError
from llmforge.serving.prompts import PromptEncoder


def encode_messages(
    value: Any,
    encoder: PromptEncoder,
    shown: Sequence[Mapping[str, Any]] = (),
    variables: Mapping[str, Any] = MappingProxyType({}),
) -> list[int]:
    """Make the prompt of a conversation, in which the model is shown tools; parts of text are joined by line breaks.

    `variables` are the chat template's own.

    Raises:
        UsageError: the messages are no list of objects with `role` and `content`, hold something other than text, or
            the chat template refuses them.
    """
    if not isinstance(value, list) or not value:
        raise UsageError('messages: expected a list of {"role": …, "content": …}, not empty')
    messages = [_message(each, f"messages[{i}]") for i, each in enumerate(value)]
    try:
        return encoder.encode_chat(messages, shown, variables)
    except InputError as error:  # of the template, on these messages: the caller's fault
        raise UsageError(error.message, hint=error.hint) from error


def _message(value: Any, where: str) -> dict[str, Any]:
    if not isinstance(value, dict) or not isinstance(value.get("role"), str):
        raise UsageError(f'{where}: expected an object {{"role": …, "content": …}}')
    content = value.get("content")
    if content is None and value["role"] == "assistant" and _has_calls(value.get("tool_calls"), where):
        content = ""
    if isinstance(content, list):
        parts = [
            part.get("text") if isinstance(part, dict) and part.get("type") == "text" else None for part in content
        ]
        if not all(isinstance(part, str) for part in parts):
            raise UsageError(f"{where}: content parts must be text")
        content = "\n".join(map(str, parts))
    if not isinstance(content, str):
        raise UsageError(f"{where}: content is {type(content).__name__}; expected a string, or a list of text parts")
    return {**value, "content": content}


def _has_calls(value: Any, where: str) -> bool:
    """Whether an assistant's message calls tools, as OpenAI writes it; templates show them as they can.

    Raises:
        UsageError: `tool_calls` is something else.
    """
    if value is None:
        return False
    calls = value if isinstance(value, list) else [None]
    for call in calls:
        function = call.get("function") if isinstance(call, dict) else None
        if not (isinstance(function, dict) and isinstance(function.get("name"), str)):
            raise UsageError(f'{where}.tool_calls: expected a list of {{"function": {{"name": …, "arguments": …}}}}')
    return bool(calls)
