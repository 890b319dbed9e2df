"""Immutable records, of which reports are made, and records of figures under the names of their metrics."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict


class ReportRecord(BaseModel):
    """A part of a report. It is written once and never edited."""

    # JSON has no NaN: they are written as strings and read back, for the report of a broken model must be readable too.
    model_config = ConfigDict(frozen=True, extra="forbid", ser_json_inf_nan="strings")

    def to_json(self) -> str:
        """Write the record as JSON, indented, with a final newline."""
        return self.model_dump_json(indent=1) + "\n"


class FiguresRecord(ReportRecord):
    """A record with what was measured beside its fields, by the names of the metrics, in the JSON as well.

    A subclass says with `__pydantic_extra__` of which type figures are. A report reads back without its catalog.
    """

    model_config = ConfigDict(extra="allow")

    @property
    def figures(self) -> dict[str, Any]:
        """What was measured, by the metric's name."""
        return self.__pydantic_extra__ or {}
