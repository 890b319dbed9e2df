"""Parameters that several commands have in common, and how they become the records of lower rooms."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

import click
from click.core import ParameterSource

from llmforge.base.errors import UsageError

PATH = click.Path(path_type=Path)
NATURAL, POSITIVE = click.IntRange(min=0), click.IntRange(min=1)

Record = TypeVar("Record")


class Numbers(click.ParamType[Any]):
    """Numbers separated by commas."""

    name = "numbers"

    def __init__(self, kind: type[int] | type[float]) -> None:
        self._kind = kind

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[int | float, ...]:
        """Read `1,4,16`."""
        if isinstance(value, tuple):
            return value
        try:
            return tuple(self._kind(part) for part in value.split(","))
        except ValueError:
            self.fail(f"{value!r}: expected comma-separated numbers, such as 1,4,16", param, ctx)


def record(kind: type[Record], options: Mapping[str, Any], **more: Any) -> Record:
    """Make the dataclass `kind` of those `options` that are called as its fields are, and of `more`."""
    names = {field.name for field in dataclasses.fields(kind)}  # type: ignore[arg-type]
    return kind(**{name: value for name, value in options.items() if name in names}, **more)


def refuse_given(beside: str, *names: str) -> None:
    """Refuse parameters that were given and would say nothing beside the option `beside`."""
    context = click.get_current_context()
    for parameter in context.command.params:
        given = context.get_parameter_source(str(parameter.name)) is not ParameterSource.DEFAULT
        if parameter.name in names and given:
            raise UsageError(f"{parameter.opts[0]} cannot be used with {beside}", hint="remove one of them")
