"""Requests of OpenAI's Responses API, read as chats. Stateless: nothing is stored, all input comes with the request.

Shapes: https://platform.openai.com/docs/api-reference/responses, as of 2026. Parameters that OpenAI does not know have
vLLM's names, as in chats.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from llmforge.base.errors import UsageError
from llmforge.base.wording import quoted
from llmforge.runtime.sampling.parameters import NAMES
from llmforge.serving.http.completion_call import IGNORED, TEMPERATURE, CompletionCall, chat_call, require_harmless
from llmforge.serving.prompts import PromptEncoder
from llmforge.serving.protocol.reasoning import BUDGET

# What OpenAI knows and this server does not do, by the values that ask for nothing.
_HARMLESS: Mapping[str, tuple[Any, ...]] = {
    "background": (False,),
    "context_management": (),
    "conversation": (),
    "include": ([], ["reasoning.encrypted_content"]),  # thoughts come as they are
    "max_tool_calls": (),
    "previous_response_id": (),
    "prompt": (),
    "stream_options": ({}, {"include_obfuscation": False}),
    "top_logprobs": (0,),
    "truncation": ("disabled",),
}
_READ = frozenset({
    "model", "input", "instructions", "max_output_tokens", "temperature", "top_p", "stream", "tools", "tool_choice",
    "parallel_tool_calls", "text", "reasoning", "chat_template_kwargs", "priority", BUDGET,
})  # fmt: skip
_OF_CHATS = frozenset({"n", "logprobs", "top_logprobs", "max_tokens", "max_completion_tokens", "response_format"})
_PASSED = frozenset(NAMES) - _OF_CHATS - _READ
PARAMETERS = frozenset({*_READ, *_HARMLESS, *_PASSED, *IGNORED})
_TEXTS = ("input_text", "output_text", "text", "reasoning_text", "summary_text", "refusal")  # types of parts
# Names in errors of chats, as they are called here.
_RENAMED = {
    "messages": "input", "max_tokens": "max_output_tokens", "response_format": "text.format",
    "reasoning_effort": "reasoning.effort",
}  # fmt: skip
_CHAT_NAME = re.compile(rf"({'|'.join(_RENAMED)})\b")


@dataclass(frozen=True)
class ResponsesCall:
    """One call of /v1/responses: the chat that answers it, and what the response repeats of the request."""

    call: CompletionCall
    id: str
    echoed: Mapping[str, Any]


def read(body: Any, encoder: PromptEncoder, model: str) -> ResponsesCall:
    """Read the body of a call to /v1/responses.

    Raises:
        UsageError: the body makes no sense; says what, and what is allowed.
    """
    if not isinstance(body, dict):
        raise UsageError("the body is not a JSON object")
    fields = {name: value for name, value in body.items() if value is not None}
    for name in fields:
        if name not in PARAMETERS:
            raise UsageError(f"{name}: unknown parameter", hint=f"known: {', '.join(sorted(PARAMETERS - _PASSED))}")
    require_harmless(fields, _HARMLESS)
    chat = {name: fields[name] for name in _PASSED if name in fields}
    chat |= {name: fields[name] for name in ("model", "temperature", "top_p", "stream") if name in fields}
    chat |= {
        name: fields[name]
        for name in ("parallel_tool_calls", "chat_template_kwargs", "priority", BUDGET)
        if name in fields
    }
    chat["messages"] = _messages(fields.get("input"), fields.get("instructions"))
    if "max_output_tokens" in fields:
        chat["max_completion_tokens"] = fields["max_output_tokens"]
    if "tools" in fields:
        chat["tools"] = _tools(fields["tools"])
    if "tool_choice" in fields:
        chat["tool_choice"] = _choice(fields["tool_choice"])
    chat |= _form(fields.get("text", {})) | _effort(fields.get("reasoning", {}))
    try:
        call = chat_call(chat, encoder, model)
    except UsageError as error:
        error.message = _CHAT_NAME.sub(lambda found: _RENAMED[found[1]], error.message, count=1)
        raise
    return ResponsesCall(call, f"resp_{secrets.token_hex(24)}", _echoed(fields, call))


def _echoed(fields: Mapping[str, Any], call: CompletionCall) -> dict[str, Any]:
    """Say what a response repeats, with defaults."""
    return {
        "model": call.model,
        "instructions": fields.get("instructions"),
        "max_output_tokens": fields.get("max_output_tokens"),
        "metadata": fields.get("metadata", {}),
        "parallel_tool_calls": fields.get("parallel_tool_calls", True),
        "previous_response_id": None,
        "reasoning": {"effort": fields.get("reasoning", {}).get("effort"), "summary": None},
        "store": False,
        "temperature": fields.get("temperature", TEMPERATURE),
        "text": {"format": fields.get("text", {}).get("format") or {"type": "text"}},
        "tool_choice": fields.get("tool_choice", "auto"),
        "tools": fields.get("tools", []),
        "top_p": fields.get("top_p", 1.0),
        "truncation": "disabled",
    }


def _messages(given: Any, instructions: Any) -> list[dict[str, Any]]:
    """Write input items as messages: calls, and thoughts before them, belong to the assistant's message."""
    if instructions is not None and not isinstance(instructions, str):
        raise UsageError("instructions: expected a string")
    messages: list[dict[str, Any]] = [] if instructions is None else [{"role": "system", "content": instructions}]
    if isinstance(given, str):
        return [*messages, {"role": "user", "content": given}]
    if not isinstance(given, list) or not given:
        raise UsageError("input: expected a string, or a list of items, not empty")
    thoughts: str | None = None
    for number, item in enumerate(given):
        where = f"input[{number}]"
        kind = item.get("type", "message") if isinstance(item, dict) else None
        if kind == "message":
            role = item.get("role")
            if role not in ("user", "assistant", "system", "developer"):
                raise UsageError(f"{where}.role: expected user, assistant, system or developer")
            message = {"role": "system" if role == "developer" else role, "content": _text(item.get("content"), where)}
            messages.append(_with_thoughts(message, thoughts))
        elif kind == "function_call":
            call = {name: item.get(name) for name in ("name", "arguments")}
            last = messages[-1] if messages else {}
            if last.get("role") != "assistant" or thoughts is not None:
                messages.append(_with_thoughts({"role": "assistant", "content": ""}, thoughts))
            messages[-1].setdefault("tool_calls", []).append(
                {"id": item.get("call_id"), "type": "function", "function": call}
            )
        elif kind == "function_call_output":
            output = {"tool_call_id": item.get("call_id"), "content": _text(item.get("output"), where)}
            messages.append({"role": "tool", **output})
        elif kind == "reasoning":
            thoughts = _text(item.get("content") or item.get("summary") or [], where)
            continue
        else:
            expected = "message, function_call, function_call_output or reasoning"
            raise UsageError(f"{where}: expected an object of type {expected}")
        thoughts = None
    return messages


def _with_thoughts(message: dict[str, Any], thoughts: str | None) -> dict[str, Any]:
    return message if thoughts is None else {**message, "reasoning_content": thoughts}


def _text(content: Any, where: str) -> str:
    """Join the parts of a content."""
    if isinstance(content, str):
        return content
    texts = []
    for part in content if isinstance(content, list) else [None]:
        text = part.get("text", part.get("refusal")) if isinstance(part, dict) and part.get("type") in _TEXTS else None
        if not isinstance(text, str):
            raise UsageError(f"{where}: expected a string, or a list of parts of text")
        texts.append(text)
    return "\n".join(texts)


def _tools(given: Any) -> list[dict[str, Any]]:
    """Write functions as chats have them."""
    if not isinstance(given, list):
        raise UsageError("tools: expected a list of functions")
    tools = []
    for number, tool in enumerate(given):
        if not isinstance(tool, dict) or tool.get("type") != "function":
            kind = quoted(str(tool.get("type"))) if isinstance(tool, dict) else "something else"
            raise UsageError(f"tools[{number}]: {kind} is not supported; expected a function")
        tools.append({"type": "function", "function": {name: tool[name] for name in tool if name != "type"}})
    return tools


def _choice(given: Any) -> Any:
    if isinstance(given, dict) and given.get("type") == "function":
        return {"type": "function", "function": {"name": given.get("name")}}
    return given


def _form(text: Any) -> dict[str, Any]:
    """Read the form that an answer must have."""
    form = text.get("format") if isinstance(text, dict) else None
    if not isinstance(text, dict) or not text.keys() <= {"format", "verbosity"} or not isinstance(form, dict | None):
        raise UsageError("text: expected an object with format")
    if text.get("verbosity") not in (None, "medium"):
        raise UsageError("text: this server does not support verbosity", hint="leave verbosity out")
    if form is None or form.get("type") != "json_schema":
        return {} if form is None else {"response_format": form}
    return {"response_format": {"type": "json_schema", "json_schema": {n: form[n] for n in form if n != "type"}}}


def _effort(given: Any) -> dict[str, Any]:
    if not isinstance(given, dict) or not given.keys() <= {"effort", "summary", "generate_summary"}:
        raise UsageError("reasoning: expected an object with effort")
    return {} if given.get("effort") is None else {"reasoning_effort": given["effort"]}
