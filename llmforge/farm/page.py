"""One page about a matrix: verdicts, every build, and quality against speed, size and cost."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cache
from typing import Any

import jinja2

from llmforge.base import remote_files, wording
from llmforge.farm import pareto, store
from llmforge.farm.pareto import ParetoPoint, Plot
from llmforge.farm.rows import Row, worst
from llmforge.metrics import catalog, units
from llmforge.report.render import environment_of

SHOWN = (pareto.QUALITY, *pareto.AGAINST)
_MARKS = {"pass": "✓", "fail": "✗", "inconclusive": "?", "pending": "…", "error": "!", "none": "–"}
_WORDS = {name: "NO GATES" if name == "none" else name.upper() for name in _MARKS}
# Which of several verdicts stands for all, by the class of its color.
CLASSES = {"pending": "inconclusive", "error": "fail"}


@dataclass(frozen=True)
class BuildGroup:
    """The builds of one target."""

    name: str
    number: int
    verdict: str
    rows: Sequence[tuple[int, Row]]  # with their numbers on the page


def verdict(rows: Sequence[Row]) -> str:
    """Give the worst verdict of some builds, by the order of exit codes; those without gates count as none."""
    codes = {row.exit_code: row.verdict for row in rows}
    found = codes[worst(codes)]
    return "pass" if found == "none" and any(row.verdict == "pass" for row in rows) else found


@dataclass(frozen=True)
class MatrixPage:
    """What a page is about."""

    name: str
    rows: Sequence[Row]
    nodes: Mapping[str, str]  # by name: why it is out, or nothing
    seconds: float
    jobs: int | None


def of_matrix(made: MatrixPage) -> str:
    """Write the page of a matrix."""
    rows = made.rows
    numbered = list(enumerate(rows, 1))
    names = list(dict.fromkeys(row.build.target for row in rows))
    groups = [
        BuildGroup(each, number, verdict(of), [pair for pair in numbered if pair[1].build.target == each])
        for number, each in enumerate(names)
        for of in [[row for row in rows if row.build.target == each]]
    ]
    models = list(dict.fromkeys(row.build.model for row in rows))
    plots = {model: _plots([pair for pair in numbered if pair[1].build.model == model], names) for model in models}
    return render(
        "matrix.html.jinja",
        name=made.name,
        created=datetime.now(UTC).replace(microsecond=0).isoformat(),
        groups=groups,
        plots=plots,
        verdict=verdict(rows),
        rows=rows,
        nodes=made.nodes,
        seconds=made.seconds,
        shared=made.jobs is not None and made.jobs > 1 and any("tpot_p50_ms" in _figures(row) for row in rows),
    )


def archive(row: Row) -> str | None:
    """Give the URL of a build's archive in the store; None: it is in none."""
    if row.job is None or row.job.needs.store is None or row.outcome is None or row.outcome.artifact is None:
        return None
    return remote_files.without_login(store.archive_of(row.outcome.artifact, row.job.needs.store))


def data(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """Write rows as plain data."""
    return [
        {
            "model": row.build.model,
            "target": row.build.target,
            "variant": row.build.variant,
            "verdict": row.verdict,
            "exit_code": row.exit_code,
            "artifact": None if row.outcome is None or row.outcome.artifact is None else str(row.outcome.artifact),
            "archive": archive(row),
            "node": row.node,
            "waited_s": round(row.waited_s, 3),
            "seconds": round(row.seconds, 3),
            "waits_for": row.waits_for or None,
            "figures": {
                key: {"value": each.value, "low": each.low, "high": each.high} for key, each in _figures(row).items()
            },
            "reused": list(row.reused),
            "computed": list(row.computed),
            "error": None if row.outcome is None else row.outcome.message,
            "hint": None if row.outcome is None else row.outcome.hint,
            "gates": [] if row.outcome is None else list(row.outcome.gates),
            "notes": list(row.notes),
        }
        for row in rows
    ]


def figure(row: Row, name: str) -> str:
    """Write a figure of a build, or a dash."""
    found = _figures(row).get(name)
    return "–" if found is None else catalog.named(name).unit.write(found.value)


def _figures(row: Row) -> Mapping[str, Any]:
    return {} if row.outcome is None else row.outcome.figures


def _plots(rows: Sequence[tuple[int, Row]], targets: Sequence[str]) -> list[Plot]:
    points = [
        ParetoPoint(str(number), f"{number}: {row.build.title}", targets.index(row.build.target), _figures(row))
        for number, row in rows
    ]
    made = (pareto.plot(points, x, pareto.QUALITY) for x in pareto.AGAINST)
    return [each for each in made if each is not None]


def render(template: str, **facts: Any) -> str:
    """Fill a template of this room."""
    return _environment().get_template(template).render(metrics=catalog.deciding(), **facts).strip() + "\n"


@cache
def _environment() -> jinja2.Environment:
    environment = environment_of(
        "llmforge.farm", "llmforge.report",
        finalize=lambda value: wording.plain_text(value) if type(value) is str else value,
    )  # fmt: skip
    environment.filters.update(duration=units.duration, figure=figure, size=units.size, archive=archive)
    environment.globals.update(
        shown=SHOWN, marks=_MARKS, words=_WORDS, classes=CLASSES, width=pareto.WIDTH, height=pareto.HEIGHT, bottom=46
    )
    return environment
