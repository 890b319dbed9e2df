"""Tools that a request offers to the model, in the shape of OpenAI's. No HTTP here.

Shapes: https://platform.openai.com/docs/api-reference/chat/create (`tools`, `tool_choice`, `parallel_tool_calls`).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from tokenizers import Tokenizer

from llmforge.base.errors import UsageError
from llmforge.runtime.sampling.constraints import Constraint
from llmforge.serving.prompts import PromptEncoder
from llmforge.serving.protocol.tool_calls import CallParser
from llmforge.serving.protocol.tool_format import ToolFormat
from llmforge.serving.request import Request

FIELDS = frozenset({"tools", "tool_choice", "parallel_tool_calls"})
MOST_TOOLS = 128  # OpenAI's own bound
_NAME = re.compile("[A-Za-z0-9_-]{1,64}")
_CHOICES = 'none, auto, required or {"type": "function", "function": {"name": …}}'


@dataclass(frozen=True)
class ToolUse:
    """What an answer may call.

    Args:
        tools: as the template is shown them.
        parallel: whether it may call several at once.
        format: how the checkpoint writes calls.
        special_tokens: that calls are written with.
        constraint: what an answer has to match: from its beginning where it must call, else from where it calls.
    """

    tools: tuple[Mapping[str, Any], ...]
    parallel: bool
    format: ToolFormat
    special_tokens: frozenset[int]
    constraint: Constraint | None

    def applied(self, request: Request) -> Request:
        """Ask for calls as well.

        Raises:
            UsageError: the request's answers have a form already.
        """
        if request.sampling.constraint is not None:
            raise UsageError("tools cannot be used with a form of answers", hint="set tool_choice: none")
        sampling = replace(request.sampling, constraint=self.constraint)
        return replace(request, sampling=sampling, special_tokens=self.special_tokens)

    def parser(self) -> CallParser:
        """Make what finds the calls in one answer."""
        schemas = _schemas(self.tools)
        return CallParser(self.format.markup, set(schemas), schemas=schemas, parallel=self.parallel)


def read(fields: Mapping[str, Any], encoder: PromptEncoder) -> ToolUse | None:
    """Read the tools of a call; None where it has none, or may not use them.

    Raises:
        UsageError: they make no sense, or the chat template has no calls that can be read.
        EnvironmentLacks: no process can be started to render the template.
    """
    given, choice = fields.get("tools"), fields.get("tool_choice")
    parallel = True if fields.get("parallel_tool_calls") is None else fields["parallel_tool_calls"]
    if not isinstance(parallel, bool):
        raise UsageError(f"parallel_tool_calls {parallel!r}: expected true or false")
    tools = _tools([] if given is None else given)
    schemas = _schemas(tools)
    required = _required(choice, tuple(schemas))
    if not tools or choice == "none":
        return None
    format_ = encoder.tool_format
    if format_ is None or not format_.shows_tools:
        why = "cannot be read from answers" if format_ is None else "are not shown to the model"
        raise UsageError(
            f"tools: under the chat template they {why}",
            hint="leave tools out, or let the server add the default tool prompt: `llmforge serve --tool-prompt`, "
            "`llmforge triton --tool-prompt`, or `tool_prompt: default` in the recipe",
        )
    tokenizer: Tokenizer = encoder.tokenizer
    constraint = None
    strict = [bool(tool["function"].get("strict")) for tool in given or ()]
    if required is not None or any(strict):
        held = {name: schemas[name] for name in required or ()}
        if required is None:
            held = {name: schemas[name] if holds else {} for name, holds in zip(schemas, strict, strict=True)}
        constraint = format_.constraint(
            held,
            parallel=parallel and not isinstance(choice, dict),
            tokenizer=tokenizer,
            eos=encoder.config.eos_token_ids,
            required=required is not None,
        )
    return ToolUse(tools, parallel, format_, format_.special_tokens(tokenizer), constraint)


def _tools(value: Any) -> tuple[Mapping[str, Any], ...]:
    if not isinstance(value, list) or len(value) > MOST_TOOLS:
        raise UsageError(f"tools: expected a list of at most {MOST_TOOLS} functions")
    tools = tuple(_tool(each, f"tools[{i}]") for i, each in enumerate(value))
    if len(_schemas(tools)) < len(tools):
        raise UsageError("tools: two functions have the same name")
    return tools


def _tool(value: Any, where: str) -> dict[str, Any]:
    function = value.get("function") if isinstance(value, dict) and value.get("type") == "function" else None
    if not isinstance(function, dict):
        raise UsageError(f'{where}: expected {{"type": "function", "function": {{"name": …, "parameters": …}}}}')
    name, description = function.get("name"), function.get("description")
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise UsageError(f"{where}.function.name: expected 1 to 64 letters, digits, _ or -")
    if not isinstance(description, str | None):
        raise UsageError(f"{where}.function.description: expected a string")
    parameters = function.get("parameters")
    if parameters is None:
        parameters = {"type": "object", "properties": {}, "additionalProperties": False}
    if not isinstance(parameters, dict) or parameters.get("type", "object") != "object":
        raise UsageError(f"{where}.function.parameters: expected the JSON schema of an object")
    if not isinstance(function.get("strict"), bool | None):
        raise UsageError(f"{where}.function.strict: expected true or false")
    return {
        "type": "function",
        "function": {"name": name, "description": description or "", "parameters": parameters},
    }


def _schemas(tools: tuple[Mapping[str, Any], ...]) -> dict[str, Mapping[str, Any]]:
    """Give the schemas of arguments by the names of functions."""
    return {tool["function"]["name"]: tool["function"]["parameters"] for tool in tools}


def _required(choice: Any, names: tuple[str, ...]) -> tuple[str, ...] | None:
    if choice in (None, "none", "auto"):
        return None
    named = None
    if choice != "required":
        function = choice.get("function") if isinstance(choice, dict) and choice.get("type") == "function" else None
        named = function.get("name") if isinstance(function, dict) else None
        if not isinstance(named, str):
            raise UsageError(f"tool_choice: expected {_CHOICES}")
    if not names:
        raise UsageError(
            "tool_choice: asks for a call, but the request has no `tools`", hint="add `tools`, or leave out tool_choice"
        )
    if named is not None and named not in names:
        raise UsageError(f"tool_choice: there is no tool {named[:64]!r}", hint=f"tools: {', '.join(names)[:300]}")
    return names if named is None else (named,)
