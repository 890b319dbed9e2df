"""Requests of clients of Triton, read from tensors and parameters."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from llmforge.base.errors import UsageError
from llmforge.runtime.sampling.parameters import sampling_of
from llmforge.serving.prompts import PromptEncoder
from llmforge.serving.protocol import client_json, tools
from llmforge.serving.protocol.client_json import JsonLimits
from llmforge.serving.protocol.messages import encode_messages
from llmforge.serving.protocol.tool_calls import CallParser
from llmforge.serving.protocol.tools import ToolUse
from llmforge.serving.request import Request, adapter_number, check_tokens
from llmforge.triton.backend import signature
from llmforge.triton.backend.signature import TensorSpec

# Parameters of a request that Triton and its clients use between themselves.
_TRITON_PREFIX = "triton_"
# Deadlines as parameters, for `generate` has no other place: name → its unit, and how many of it make a second.
# `timeout` is that of Triton's `infer` (docs/protocol/extension_parameters.md of its server).
_DEADLINES: Mapping[str, tuple[str, float]] = {"timeout": ("microseconds", 1e6), "timeout_ms": ("milliseconds", 1e3)}
_LONGEST_S = 1e9
_ADAPTER = ("adapter", "lora_name")  # the latter is what Triton's vLLM backend calls it

Tensors = Mapping[str, NDArray[Any]]


@dataclass(frozen=True)
class InferenceRequest:
    """A client's request: what the engine is asked, and how the output is wanted.

    `echo` stands before the output. `omitted` tensors are not sent. `parser` finds calls of tools in the output; None:
    none are looked for.
    """

    request: Request
    stream: bool
    echo: str
    omitted: frozenset[str]
    parser: CallParser | None = None


def read(
    tensors: Tensors, parameters: str, timeout_s: float | None, encoder: PromptEncoder, limits: JsonLimits
) -> InferenceRequest:
    """Read a request: `tensors` by name, [1, n] each, and its `parameters`, a JSON object.

    `timeout_s` is the deadline that the request has for Triton, if any; `limits` bound what of it is JSON.

    Raises:
        UsageError, InputError: the request makes no sense; says which input is wrong.
    """
    stream = bool(_one(tensors, signature.STREAM, default=False))
    switches = (signature.RETURN_INPUT_TOKENS, signature.RETURN_OUTPUT_TOKENS, signature.RETURN_FINISH_REASON)
    omitted = {spec.name.removeprefix("return_") for spec in switches if not _one(tensors, spec, default=True)}
    given = _json(parameters, "the parameters", limits)
    deadline_s = _deadline(given, timeout_s)
    gathered = _sampling(tensors, given, limits)
    adapter, priority = _adapter(gathered), gathered.pop("priority", 0)
    sampling = sampling_of({name: value for name, value in gathered.items() if name not in tools.FIELDS})
    if gathered.get("tools") and signature.MESSAGES.name not in tensors:
        raise UsageError("tools: the model is shown them with messages alone")
    use = _tools(gathered, encoder, limits)
    prompt = _prompt(tensors, encoder, limits, () if use is None else use.tools)  # what takes time comes last
    echo = _echo(tensors, stream=stream)
    adapter_number(adapter, encoder.config.adapters)
    request = Request(tuple(prompt), sampling, deadline_s, adapter=adapter, priority=priority)
    if use is None:
        return InferenceRequest(request, stream, echo, frozenset(omitted))
    return InferenceRequest(use.applied(request), stream, echo, frozenset(omitted), use.parser())


def _adapter(gathered: dict[str, Any]) -> str:
    """Take the name of an adapter out of the parameters; "": none.

    Raises:
        UsageError: it is no text, or there are two.
    """
    given = {name: value for name in _ADAPTER if (value := gathered.pop(name, None)) is not None}
    for name, value in given.items():
        if not isinstance(value, str):
            raise UsageError(f"{name} {str(value)[:40]}: expected the name of an adapter")
    if len(set(given.values())) > 1:
        raise UsageError(f"{' and '.join(given)} contradict each other", hint="use only one of them")
    return next(iter(given.values()), "")


def _tools(given: Mapping[str, Any], encoder: PromptEncoder, limits: JsonLimits) -> ToolUse | None:
    """Read tools, whose parameters may be JSON or the text of it: parameters of Triton's requests are no objects."""
    fields = {name: value for name, value in given.items() if name in tools.FIELDS}
    for name, value in fields.items():
        if isinstance(value, str) and (name != "tool_choice" or value.lstrip().startswith("{")):
            fields[name] = _json(value, name, limits)
    return tools.read(fields, encoder)


def _deadline(parameters: Mapping[str, Any], timeout_s: float | None) -> float | None:
    """Give a request's deadline in s: the one that it has for Triton, or that of a parameter; 0 is none, as in Triton.

    Raises:
        UsageError: there are two, or one is no time.
    """
    found = {} if timeout_s is None else {"the request's timeout": timeout_s}
    for name, (unit, per_s) in _DEADLINES.items():
        if (value := parameters.get(name)) is None:
            continue
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= _LONGEST_S * per_s:
            raise UsageError(f"{name} {str(value)[:40]}: expected a number of {unit}; 0 is none")
        found[name] = value / per_s
    if len(found) > 1:
        raise UsageError(f"{' and '.join(found)}: a request has one deadline", hint="use only one of them")
    return next((seconds for seconds in found.values() if seconds), None)


def _prompt(
    tensors: Tensors, encoder: PromptEncoder, limits: JsonLimits, shown: Sequence[Mapping[str, Any]]
) -> list[int]:
    kinds = (signature.TEXT_INPUT, signature.MESSAGES, signature.INPUT_IDS)
    given = [spec for spec in kinds if spec.name in tensors]
    if len(given) != 1:
        names = ", ".join(spec.name for spec in kinds)
        raise UsageError(
            f"a request needs exactly one of {names}; this one has {', '.join(s.name for s in given) or 'none'}"
        )
    (spec,) = given
    if spec is signature.TEXT_INPUT:
        return encoder.encode(_text(tensors, spec))
    if spec is signature.MESSAGES:
        return encode_messages(_json(_text(tensors, spec), spec.name, limits), encoder, shown)
    flat = tensors[spec.name].reshape(-1)
    check_tokens(flat, encoder.config.max_context - 1, encoder.config.vocabulary)  # before there is a list of them
    ids: list[int] = flat.tolist()
    return ids


def _echo(tensors: Tensors, *, stream: bool) -> str:
    """Give what stands before the output: nothing, unless the client wants its own text to be repeated there."""
    if _one(tensors, signature.EXCLUDE_INPUT, default=True):
        return ""
    if stream or signature.TEXT_INPUT.name not in tensors:
        raise UsageError("exclude_input_in_output: false requires text_input and no streaming")
    return _text(tensors, signature.TEXT_INPUT)


def _sampling(tensors: Tensors, parameters: Mapping[str, Any], limits: JsonLimits) -> dict[str, Any]:
    """Gather parameters of sampling from the three places where clients put them; each may be given once."""
    gathered: dict[str, Any] = {}
    own = {
        name: value
        for name, value in parameters.items()
        if not name.startswith(_TRITON_PREFIX) and name not in _DEADLINES
    }
    for place, values in (
        ("an input", dict(_sampling_tensors(tensors))),
        (signature.SAMPLING_PARAMETERS.name, _sampling_parameters(tensors, limits)),
        ("a parameter", own),
    ):
        if twice := sorted(gathered.keys() & values.keys()):
            raise UsageError(f"{', '.join(twice)}: given twice, also as {place}")
        gathered |= values
    return gathered


def _sampling_tensors(tensors: Tensors) -> Iterator[tuple[str, Any]]:
    for spec in signature.SAMPLING:
        if spec.name not in tensors:
            continue
        if spec.length == -1:
            yield spec.name, [_decoded(value, spec) for value in tensors[spec.name].reshape(-1).tolist()]
            continue
        value = _one(tensors, spec)
        # 0.7 arrives as the fp32 number next to it; what the client wrote is the shortest decimal that stands for it.
        yield spec.name, float(str(value)) if isinstance(value, np.float32) else value.item()


def _sampling_parameters(tensors: Tensors, limits: JsonLimits) -> dict[str, Any]:
    if signature.SAMPLING_PARAMETERS.name not in tensors:
        return {}
    name = signature.SAMPLING_PARAMETERS.name
    values = _json(_text(tensors, signature.SAMPLING_PARAMETERS), name, limits)
    if not isinstance(values, dict):
        raise UsageError(f"{name}: expected a JSON object of names and values")
    return values


def _json(text: str, what: str, limits: JsonLimits) -> Any:
    return client_json.parse(text.encode("utf-8", "surrogatepass"), limits, what)


def _text(tensors: Tensors, spec: TensorSpec) -> str:
    return _decoded(_one(tensors, spec), spec)


def _decoded(value: Any, spec: TensorSpec) -> str:
    """Read a string of Triton, which is bytes."""
    try:
        return str(value) if isinstance(value, str) else bytes(value).decode("utf-8")
    except UnicodeDecodeError as error:
        raise UsageError(f"{spec.name}: byte {error.start} is not UTF-8") from error


def _one(tensors: Tensors, spec: TensorSpec, default: Any = None) -> Any:
    """Give the only element of a tensor, or `default` where the client did not send it."""
    if spec.name not in tensors:
        return default
    flat = tensors[spec.name].reshape(-1)
    if len(flat) != 1:
        raise UsageError(f"{spec.name}: {len(flat)} values; expected one")
    return flat[0]
