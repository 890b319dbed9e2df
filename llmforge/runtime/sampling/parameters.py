"""Parameters of requests as clients of language models name them: OpenAI's, vLLM's, and Triton's.

Triton's request parameters are often strings, so numbers, switches and JSON may come as text. null says nothing. Two
names of one thing may both be given where they agree. `n` aside, these are the fields of `Sampling`; what else an
endpoint takes (`stream`, `model`, …) it removes before.
"""

from __future__ import annotations

import difflib
import json
import secrets
from collections.abc import Callable, Mapping
from typing import Any

from llmforge.base.errors import UsageError
from llmforge.runtime.sampling.constraints import Constraint, Kind
from llmforge.runtime.sampling.options import Sampling

_SHOWN = 60  # characters of a wrong value


def sampling_of(parameters: Mapping[str, Any]) -> Sampling:
    """Read the parameters of a request for one sequence.

    Without a seed, one is drawn where tokens are sampled; it stands in what is returned.

    Raises:
        UsageError: a name is unknown, a value is of the wrong type or out of range, two names contradict each other,
            or `n` asks for more than one sequence.
    """
    samplings = samplings_of(parameters)
    if len(samplings) > 1:
        raise UsageError(
            f"n {len(samplings)}: only one answer per request is supported here", hint="send the request n times"
        )
    return samplings[0]


def samplings_of(parameters: Mapping[str, Any]) -> tuple[Sampling, ...]:
    """Read the parameters of a request: the sampling of each of its `n` sequences, with seeds of their own.

    Raises:
        UsageError: see `sampling_of`.
    """
    given = {name: value for name, value in parameters.items() if value is not None}
    for name in given:
        if name not in NAMES:
            close = difflib.get_close_matches(name, NAMES, n=1)
            hint = f"did you mean {close[0]!r}?" if close else f"known: {', '.join(NAMES)}"
            raise UsageError(f"unknown parameter {name!r}", hint=hint)
    fields: dict[str, Any] = {}
    names: dict[str, str] = {}  # of fields -> the parameter that set it
    for name, value in given.items():
        if name in _FIELDS:
            field, read = _FIELDS[name]
            _set(fields, names, field, read(name, value), name)
        elif name in _CONSTRAINTS and (constraint := _CONSTRAINTS[name](name, value)) is not None:
            _set(fields, names, "constraint", constraint, name)
    if (logprobs := _logprobs(given)) is not None:
        fields["logprobs"] = logprobs
    if fields.get("temperature", 0) > 0 and "seed" not in fields:
        fields["seed"] = secrets.randbits(63)
    return Sampling(**fields).repeated(_integer("n", given.get("n", 1)))


def _set(fields: dict[str, Any], names: dict[str, str], field: str, value: Any, name: str) -> None:
    if field in fields and fields[field] != value:
        raise UsageError(f"{names[field]} and {name} contradict each other", hint="use only one of them")
    fields[field], names[field] = value, name


def _logprobs(given: Mapping[str, Any]) -> int | None:
    """Read `logprobs`, a number (completions) or a switch that goes with `top_logprobs` (chat)."""
    value = given.get("logprobs", False)
    switch = value if isinstance(value, bool) else _SWITCHES.get(value.lower()) if isinstance(value, str) else None
    top = _integer("top_logprobs", given["top_logprobs"]) if "top_logprobs" in given else 0
    if switch is None:
        if "top_logprobs" in given:
            raise UsageError("top_logprobs cannot be used with a numeric logprobs", hint="set logprobs: true")
        return _integer("logprobs", value)
    if top and not switch:
        raise UsageError("top_logprobs requires logprobs", hint="set logprobs: true")
    return top if switch else None


def _number(name: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        raise _wrong(name, value, "a number")
    try:
        return float(value)
    except ValueError as error:
        raise _wrong(name, value, "a number") from error
    except OverflowError as error:
        raise _wrong(name, value, "a number of 64 bits") from error


def _integer(name: str, value: Any) -> int:
    if isinstance(value, str):
        try:
            return int(value)
        except ValueError as error:
            raise _wrong(name, value, "an integer") from error
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if isinstance(value, bool) or not isinstance(value, int):
        raise _wrong(name, value, "an integer")
    return value


_SWITCHES = {"true": True, "false": False}


def _switch(name: str, value: Any) -> bool:
    if isinstance(value, str) and value.lower() in _SWITCHES:
        return _SWITCHES[value.lower()]
    if not isinstance(value, bool):
        raise _wrong(name, value, "true or false")
    return value


def _top_k(name: str, value: Any) -> int:
    """Read `top_k`: -1 is all, as 0 is (vLLM)."""
    top_k = _integer(name, value)
    return 0 if top_k == -1 else top_k


def _seed(name: str, value: Any) -> int:
    """Read a seed; OpenAI's may be negative, and are taken as unsigned 64-bit numbers."""
    seed = _integer(name, value)
    return seed % 2**64 if seed < 0 else seed


def _texts(name: str, value: Any) -> tuple[str, ...]:
    """Read one text or a list of them."""
    texts = (value,) if isinstance(value, str) else value
    if not isinstance(texts, list | tuple) or not all(isinstance(text, str) for text in texts):
        raise _wrong(name, value, "a string or a list of strings")
    return tuple(texts)


def _tokens(name: str, value: Any) -> tuple[int, ...]:
    tokens = _json(name, value)
    if not isinstance(tokens, list | tuple):
        raise _wrong(name, value, "a list of token ids")
    return tuple(_integer(name, token) for token in tokens)


def _bias(name: str, value: Any) -> tuple[tuple[int, float], ...]:
    bias = _json(name, value)
    if not isinstance(bias, Mapping):
        raise _wrong(name, value, "an object of token ids and numbers")
    return tuple((_integer(name, token), _number(name, number)) for token, number in bias.items())


def _json(name: str, value: Any) -> Any:
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except (ValueError, RecursionError) as error:
        raise _wrong(name, value, "JSON") from error


def _wrong(name: str, value: Any, wanted: str) -> UsageError:
    shown = repr(value)
    return UsageError(f"{name} {shown if len(shown) <= _SHOWN else shown[:_SHOWN] + '…'}: expected {wanted}")


def _schema(name: str, value: Any) -> Constraint:
    schema = _json(name, value)
    if not isinstance(schema, Mapping):
        raise _wrong(name, value, "a JSON schema")
    return Constraint.json_schema(schema)


def _written(name: str, value: Any, kind: Kind, wanted: str) -> Constraint:
    """Read a constraint that is a text."""
    if not isinstance(value, str):
        raise _wrong(name, value, wanted)
    return Constraint(kind, value)


def _response_format(name: str, value: Any) -> Constraint | None:
    """Read OpenAI's `response_format`."""
    form = _json(name, value)
    kind = form.get("type") if isinstance(form, Mapping) else None
    match kind:
        case "text":
            return None
        case "json_object":
            return Constraint.json_object()
        case "json_schema":
            inner = form.get("json_schema")
            if not isinstance(inner, Mapping) or "schema" not in inner:
                raise UsageError(f'{name}: expected {{"type": "json_schema", "json_schema": {{"schema": …}}}}')
            return _schema(f"{name}.json_schema.schema", inner["schema"])
    raise _wrong(name, value, 'an object whose "type" is "text", "json_object" or "json_schema"')


_STRUCTURES: Mapping[str, Callable[[str, Any], Constraint | None]] = {
    "json": _schema,
    "json_object": lambda name, value: Constraint.json_object() if _switch(name, value) else None,
    "regex": lambda name, value: _written(name, value, "regex", "a regular expression"),
    "choice": lambda name, value: Constraint.choice(_texts(name, _json(name, value))),
    "grammar": lambda name, value: _written(name, value, "grammar", "a grammar in Lark's syntax"),
}


def _structured_outputs(name: str, value: Any) -> Constraint | None:
    """Read vLLM's `structured_outputs`: an object with one entry."""
    form = _json(name, value)
    entries = {key: entry for key, entry in form.items() if entry is not None} if isinstance(form, Mapping) else {}
    if len(entries) != 1 or not entries.keys() <= _STRUCTURES.keys():
        raise _wrong(name, value, f"an object with one of {', '.join(_STRUCTURES)}")
    ((key, entry),) = entries.items()
    return _STRUCTURES[key](f"{name}.{key}", entry)


# Parameter -> the field of `Sampling` that it sets, and how its value is read.
_FIELDS: Mapping[str, tuple[str, Callable[[str, Any], Any]]] = {
    "max_tokens": ("max_tokens", _integer),
    "max_completion_tokens": ("max_tokens", _integer),
    "min_tokens": ("min_tokens", _integer),
    "temperature": ("temperature", _number),
    "top_p": ("top_p", _number),
    "top_k": ("top_k", _top_k),
    "min_p": ("min_p", _number),
    "seed": ("seed", _seed),
    "random_seed": ("seed", _seed),
    "repetition_penalty": ("repetition_penalty", _number),
    "presence_penalty": ("presence_penalty", _number),
    "frequency_penalty": ("frequency_penalty", _number),
    "logit_bias": ("logit_bias", _bias),
    "stop": ("stop", _texts),
    "stop_words": ("stop", _texts),
    "stop_token_ids": ("stop_token_ids", _tokens),
    "include_stop_str_in_output": ("include_stop", _switch),
    "ignore_eos": ("ignore_eos", _switch),
}
_CONSTRAINTS: Mapping[str, Callable[[str, Any], Constraint | None]] = {
    "response_format": _response_format,
    "structured_outputs": _structured_outputs,
    **{f"guided_{name}": read for name, read in _STRUCTURES.items()},
}
NAMES = (*_FIELDS, "logprobs", "top_logprobs", "n", *_CONSTRAINTS)
