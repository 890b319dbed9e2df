"""OpenAI's requests, read: from the body of a call to what the engine is asked. No HTTP here.

Shapes: https://platform.openai.com/docs/api-reference/chat and …/completions, as of 2026. Parameters that OpenAI does
not know (`top_k`, `min_p`, `ignore_eos`, …) have vLLM's names; `runtime.sampling.parameters` reads them.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from llmforge.base.errors import UsageError
from llmforge.runtime.sampling.parameters import NAMES, samplings_of
from llmforge.serving.prompts import PromptEncoder
from llmforge.serving.protocol import reasoning, tools
from llmforge.serving.protocol.answer import reasoning_of
from llmforge.serving.protocol.harmony import HarmonyParser
from llmforge.serving.protocol.messages import encode_messages
from llmforge.serving.protocol.reasoning import Reasoning, ReasoningParser
from llmforge.serving.protocol.tool_calls import CallParser
from llmforge.serving.request import Request

Kind = Literal["chat", "text"]

MAX_CHOICES = 128  # of one call, over all its prompts; OpenAI's own bound on `n`
TEXT_MAX_TOKENS = 16  # OpenAI's default of /v1/completions
TEMPERATURE = 1.0  # OpenAI's default, of both

# What clients send along that changes no output.
IGNORED = frozenset({"user", "metadata", "service_tier", "store", "safety_identifier", "prompt_cache_key"})
# What OpenAI knows and this server does not do, by the values that ask for nothing.
HARMLESS: Mapping[str, tuple[Any, ...]] = {
    "audio": (),
    "best_of": (1,),
    "chat_template_kwargs": ({},),
    "echo": (False,),
    "function_call": ("none",),
    "functions": ([],),
    "modalities": (["text"],),
    "parallel_tool_calls": (True, False),
    "prediction": (),
    "reasoning_effort": (),
    "suffix": ("",),
    "thinking_token_budget": (),
    "tool_choice": ("none", "auto"),
    "tools": ([],),
    "verbosity": ("medium",),
    "web_search_options": (),
}
OWN = frozenset({"model", "messages", "prompt", "stream", "stream_options", "priority"})
PARAMETERS = OWN | HARMLESS.keys() | frozenset(NAMES)  # that errors may be about


@dataclass(frozen=True)
class CompletionCall:
    """One call of /v1/chat/completions or /v1/completions.

    `requests` are what the engine is asked, the `n` choices of a prompt side by side; a request's index is that of its
    choice.
    """

    kind: Kind
    id: str
    created: int  # seconds since 1970
    model: str
    requests: tuple[Request, ...]
    n: int
    stream: bool
    include_usage: bool  # a stream ends with a chunk of token counts
    parser: Callable[[], CallParser] | None = None  # of calls in an answer, one for each; None: none are looked for
    reasoning: Callable[[], ReasoningParser | HarmonyParser] | None = None  # of thoughts in an answer, likewise

    @property
    def logprobs(self) -> bool:
        """Whether log probabilities were asked for."""
        return self.requests[0].sampling.logprobs is not None


class UnknownModel(UsageError):
    """A call names a model that is not served here."""


def chat_call(body: Any, encoder: PromptEncoder, model: str) -> CompletionCall:
    """Read the body of a call to /v1/chat/completions.

    Raises:
        UsageError: the body makes no sense; says what, and what is allowed.
    """
    fields = _fields(body, encoder, model, tools.FIELDS | reasoning.FIELDS)
    use, variables = tools.read(fields, encoder), reasoning.variables(fields, encoder.template)
    shown = () if use is None else use.tools
    adapter = adapter_of(fields["model"], model, encoder.config.adapters)

    def encode() -> list[list[int]]:
        return [encode_messages(fields.get("messages"), encoder, shown, variables)]

    call = _call("chat", fields, {}, 1, adapter, encode)
    if use is not None:
        call = replace(call, requests=tuple(use.applied(each) for each in call.requests), parser=use.parser)
    tags = reasoning_of(encoder)
    budget = fields.get(reasoning.BUDGET)
    if budget is not None and not isinstance(tags, Reasoning):
        raise UsageError(f"{reasoning.BUDGET}: the model has no tags of thoughts", hint=f"leave {reasoning.BUDGET} out")
    if tags is None:
        return call
    if isinstance(tags, Reasoning) and budget is not None:
        call = replace(call, requests=tuple(tags.limited(budget, each, encoder) for each in call.requests))
    first = call.requests[0]
    special = first.special_tokens | tags.special_tokens
    return replace(
        call,
        requests=tuple(replace(each, special_tokens=special) for each in call.requests),
        reasoning=tags.parser(first.prompt, encoder, first.sampling),
    )


def text_call(body: Any, encoder: PromptEncoder, model: str) -> CompletionCall:
    """Read the body of a call to /v1/completions.

    Raises:
        UsageError: the body makes no sense; says what, and what is allowed.
    """
    fields = _fields(body, encoder, model)
    given = texts(fields.get("prompt"))

    def encode() -> list[list[int]]:
        return [encoder.encode(each) if isinstance(each, str) else each for each in given]

    adapter = adapter_of(fields["model"], model, encoder.config.adapters)
    return _call("text", fields, {"max_tokens": TEXT_MAX_TOKENS}, len(given), adapter, encode)


def served(model: str, adapters: Sequence[str]) -> tuple[str, ...]:
    """Name the models of a server: `model`, and `model:ADAPTER` for each of its adapters."""
    return (model, *(f"{model}:{adapter}" for adapter in adapters))


def adapter_of(name: str, model: str, adapters: Sequence[str]) -> str:
    """Return which of `adapters` the model `name` has; "": none.

    Raises:
        UnknownModel: the server of `model` has no such one.
    """
    if name == model:
        return ""
    known = served(model, adapters)
    if name not in known:
        here = f"this is {model!r}" if len(known) == 1 else f"these are {', '.join(map(repr, known))}"
        raise UnknownModel(f"model {name!r} is not served here; {here}")
    return adapters[known.index(name) - 1]


def texts(value: Any) -> list[str | list[int]]:
    """Check `prompt`: a text, a list of texts, a list of token ids, or a list of such lists.

    Raises:
        UsageError: it is none of these.
    """
    if isinstance(value, str):
        return [value]
    if isinstance(value, list) and value:
        if _is_ids(value):
            return [value]
        if all(isinstance(each, str) or _is_ids(each) for each in value):
            return list(value)
    raise UsageError(
        "prompt: expected a string, a list of strings, a list of token ids, or a list of such lists, not empty"
    )


def _is_ids(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(type(token) is int for token in value)


def _fields(body: Any, encoder: PromptEncoder, model: str, reads: Collection[str] = ()) -> dict[str, Any]:
    """Take what a body says, less what is null (as if it were not there) or changes no output.

    What the caller `reads` may have values that ask for something.
    """
    if not isinstance(body, dict):
        raise UsageError("the body is not a JSON object")
    fields = {name: value for name, value in body.items() if value is not None and name not in IGNORED}
    named = fields.get("model", model)
    adapter_of(named, model, encoder.config.adapters)
    require_harmless({name: value for name, value in fields.items() if name not in reads}, HARMLESS)
    return {name: value for name, value in fields.items() if name in reads or name not in HARMLESS} | {"model": named}


def require_harmless(fields: Mapping[str, Any], harmless: Mapping[str, Sequence[Any]]) -> None:
    """Return if fields that are known and not supported have values that ask for nothing.

    Raises:
        UsageError: one asks for something.
    """
    for name in harmless.keys() & fields.keys():
        if not any(type(fields[name]) is type(each) and fields[name] == each for each in harmless[name]):
            raise UsageError(f"{name}: this server does not support it", hint=f"leave {name} out")


def _call(
    kind: Kind,
    fields: Mapping[str, Any],
    defaults: Mapping[str, Any],
    count: int,
    adapter: str,
    encode: Callable[[], Sequence[Sequence[int]]],
) -> CompletionCall:
    """Make a call of `count` prompts, which `encode` gives, of one adapter: what takes time comes last."""
    stream, include_usage = _stream(fields)
    given = {name: value for name, value in fields.items() if name not in OWN | tools.FIELDS | reasoning.FIELDS}
    samplings = samplings_of({"temperature": TEMPERATURE, **defaults, **given})
    if count * len(samplings) > MAX_CHOICES:
        raise UsageError(
            f"prompt: {count} prompts, n {len(samplings)}: expected at most {MAX_CHOICES} answers per call"
        )
    return CompletionCall(
        kind=kind,
        id=("chatcmpl-" if kind == "chat" else "cmpl-") + secrets.token_hex(12),
        created=int(time.time()),
        model=fields["model"],
        requests=tuple(
            Request(tuple(prompt), sampling, adapter=adapter, priority=fields.get("priority", 0))
            for prompt in encode()
            for sampling in samplings
        ),
        n=len(samplings),
        stream=stream,
        include_usage=include_usage,
    )


def _stream(fields: Mapping[str, Any]) -> tuple[bool, bool]:
    """Read whether to stream, and whether the stream ends with token counts."""
    stream, options = fields.get("stream", False), fields.get("stream_options", {})
    if not isinstance(stream, bool):
        raise UsageError(f"stream {stream!r}: expected true or false")
    if not isinstance(options, dict) or not options.keys() <= {"include_usage", "include_obfuscation"}:
        raise UsageError(f"stream_options {options!r}: expected an object with include_usage, or nothing")
    include_usage = options.get("include_usage", False)
    if not isinstance(include_usage, bool):
        raise UsageError(f"include_usage {include_usage!r}: expected true or false")
    if options and not stream:
        raise UsageError("stream_options requires stream", hint="set stream: true")
    return stream, include_usage
