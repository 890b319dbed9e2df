"""What commands write to standard output: data."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from rich.console import RenderableType

    from llmforge.report.model import Report

_PLAIN_WIDTH = 200  # columns of a table where there is no terminal; rich would break lines at 80
_SUMMARY_WIDTH = 120  # … of the summary of a report


def write_json(value: Any) -> None:
    """Write a value as indented JSON."""
    click.echo(json.dumps(value, indent=1, ensure_ascii=False))


def write_columns(rows: Sequence[tuple[str, ...]]) -> None:
    """Write rows of equal length, their cells below one another."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    for row in rows:
        click.echo("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())


def write_summary(report: Report) -> None:
    """Write the summary of a report."""
    from llmforge.report.render import summary

    write(summary(report), _SUMMARY_WIDTH)


def write(content: RenderableType, plain_width: int = _PLAIN_WIDTH) -> None:
    """Write tables and text as wide as the terminal, or `plain_width` columns where there is none."""
    from rich.console import Console

    Console(highlight=False, width=None if sys.stdout.isatty() else plain_width).print(content)
