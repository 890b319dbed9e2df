"""A comparison of artifacts, and the history of a name, as text for a terminal."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from llmforge.gates.comparison import ArtifactComparison, Change, HistoryEntry
from llmforge.metrics import catalog, units

_MOST = 12  # differences of recipes that `text` writes


def text(found: ArtifactComparison, *, every: bool = False) -> list[str]:
    """Write a comparison for people, metrics first; without `every` a long list of what differs is cut."""
    lines = [f"A {found.a.reference} ({found.verdicts[0]})", f"B {found.b.reference} ({found.verdicts[1]})"]
    if found.a.content == found.b.content:
        lines.append("content: the same")
    if found.checkpoints[0] != found.checkpoints[1]:
        lines.append(f"checkpoint: {found.checkpoints[0]} → {found.checkpoints[1]}")
    lines += [f"note: {note}" for note in found.notes]
    lines += [f"{letter}: {line}" for letter, held in zip("AB", found.retreats, strict=True) for line in held]
    incomparable: dict[str, list[str]] = {}  # metrics that are not compared, by why not
    for change in found.metrics:
        write = catalog.named(change.metric).unit.write
        if change.a is None and change.b is None:
            continue
        sides = " → ".join("–" if side is None else write(side.value) for side in (change.a, change.b))
        lines.append(f"{change.metric}: {sides}{_difference(change)}")
        if change.why_not is not None:
            incomparable.setdefault(change.why_not, []).append(change.metric)
    lines += [f"not compared: {', '.join(names)}: {why}" for why, names in incomparable.items()]
    lines.append(f"documents measured of both: {found.paired_documents}")
    a, b = found.size_bytes
    share = f" ({100 * (b - a) / a:+.1f} %)" if a else ""
    lines.append(f"size: {units.size(a)} → {units.size(b)}{share}")
    changed = [f"recipe: {key}: {_short(a)} → {_short(b)}" for key, (a, b) in found.recipe.items()] or ["recipe: same"]
    if not every and len(changed) > _MOST:
        changed[_MOST:] = [f"recipe: {len(changed) - _MOST} more differences: --all"]
    return [*lines, *changed]


def history_rows(entries: Sequence[HistoryEntry], metrics: Sequence[str]) -> list[tuple[str, ...]]:
    """Write a history as rows: a regression has a `▼`."""
    shown = [
        name for i, name in enumerate(metrics) if any(entry.metrics[i].b is not None for entry in entries)
    ]  # what was never measured has no column
    rows = [("VERSION", "MEASURED (UTC)", "GATES", *(name.upper() for name in shown))]
    for entry in entries:
        cells = []
        for change in entry.metrics:
            if change.metric in shown:
                write = catalog.named(change.metric).unit.write
                cells.append("–" if change.b is None else write(change.b.value) + (" ▼" if change.worse else ""))
        rows.append((entry.side.version, entry.side.created[:16].replace("T", " "), entry.verdict, *cells))
    return rows


def _difference(change: Change) -> str:
    found = change.difference
    if found is None:
        return ""
    mark = "; worse" if change.worse else ""
    if found.is_exact:
        return f" (change {found.value:+.5g}{mark})"
    if found.low is None or found.high is None:
        return f" (change {found.value:+.5g}, no interval: only {found.samples} {found.of})"
    return f" (change {found.value:+.5g}, 95% interval {found.low:.5g} to {found.high:.5g}{mark})"


def _short(value: Any) -> str:
    if value is None:
        return "–"
    written = json.dumps(value, ensure_ascii=False)
    return written if len(written) <= 80 else f"{written[:77]}…"
