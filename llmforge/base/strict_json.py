"""Reads JSON into dataclasses strictly: every field there, nothing else, and each of the type that it declares."""

from __future__ import annotations

import dataclasses
import functools
import types
import typing
from collections.abc import Mapping
from typing import Any, TypeVar

from llmforge.base.errors import InputError
from llmforge.base.wording import cut, shown

D = TypeVar("D")


@typing.runtime_checkable
class Choice(typing.Protocol):
    """Stands in `Annotated`, and says which values are allowed."""

    def allows(self, value: Any, /) -> bool:
        """Say whether `value` is."""

    def choices(self) -> list[str]:
        """List those that are known."""


class _Misfit(Exception):
    """A JSON value is not what a type stands for."""


def read(kind: type[D], data: Any, where: str) -> D:
    """Make a `kind`, a dataclass of JSON types, mappings of them, tuples and dataclasses, from a JSON object.

    Raises:
        InputError: `data` is no object, or has unknown, missing or wrong entries; says `where`, and which.
    """
    if not isinstance(data, dict):
        raise InputError(f"{where}: {type(data).__name__}; expected an object")
    hints, declared = _fields(kind)  # type: ignore[arg-type]
    if unknown := sorted(data.keys() - declared.keys()):
        raise InputError(f"{where}: unknown {', '.join(map(cut, unknown))}; known: {', '.join(declared)}")
    if missing := sorted(declared.keys() - data.keys()):
        raise InputError(f"{where}: {', '.join(missing)} missing")
    values = {}
    for name, annotation in declared.items():
        try:
            values[name] = _value(hints[name], data[name], _inside(where, name))
        except _Misfit:
            choices = _choices(hints[name])
            wanted = f"one of {', '.join(choices)}" if choices else annotation
            raise InputError(f"{where}: {name} is {shown(data[name])}; expected {wanted}") from None
    return kind(**values)


@functools.cache
def _fields(kind: type) -> tuple[dict[str, Any], dict[str, str]]:
    """Give the types of the fields of a dataclass, and how they are written."""
    return typing.get_type_hints(kind, include_extras=True), {
        field.name: str(field.type) for field in dataclasses.fields(kind)
    }


def _choices(hint: Any) -> typing.Sequence[str]:
    """List the values that a type allows; empty: it does not tell."""
    if typing.get_origin(hint) is typing.Annotated:
        return [choice for mark in hint.__metadata__ if isinstance(mark, Choice) for choice in mark.choices()]
    return typing.get_args(hint) if typing.get_origin(hint) is typing.Literal else ()


def _inside(where: str, name: str) -> str:
    """Name an entry of the object at `where`: "FILE: session", and below that "FILE: session.entries"."""
    return f"{where}.{name}" if ": " in where else f"{where}: {name}"


def _value(hint: Any, value: Any, where: str) -> Any:
    """Make what `hint` stands for of a JSON value."""
    if hint is Any:
        return value
    arguments, origin = typing.get_args(hint), typing.get_origin(hint)
    if dataclasses.is_dataclass(hint):
        if not isinstance(value, dict) and "[" not in where:  # an item of a list says more than its whole list
            raise _Misfit
        return read(hint, value, where)  # type: ignore[arg-type]
    if origin is typing.Annotated:
        made = _value(arguments[0], value, where)
        if not all(mark.allows(made) for mark in hint.__metadata__ if isinstance(mark, Choice)):
            raise _Misfit
        return made
    if origin in (typing.Union, types.UnionType):  # T | None
        (of,) = (each for each in arguments if each is not type(None))
        return None if value is None else _value(of, value, where)
    if origin is tuple and isinstance(value, list):
        return tuple(_value(arguments[0], item, f"{where}[{i}]") for i, item in enumerate(value))
    if origin is Mapping and isinstance(value, dict):
        return {key: _value(arguments[1], item, where) for key, item in value.items()}
    if origin is typing.Literal and value in arguments:
        return value
    if origin is None and type(value) is hint:  # not `isinstance`: Python counts bools among the integers
        return value
    raise _Misfit
