"""How retrieval is written: a row of each figure."""

from __future__ import annotations

from functools import partial

from llmforge.metrics import catalog, units
from llmforge.metrics.retrieval.results import RetrievalResult

Row = tuple[str, ...]

TITLES: Row = ("FIGURE", "CHECKPOINT", "ARTIFACT", "95 % INTERVAL", "DIFFERENCE", "95 % INTERVAL OF IT")


def rows(found: RetrievalResult) -> list[Row]:
    """Write every figure as a row, the titles first."""
    made = [TITLES]
    for name, figures in found.metrics.items():
        metric = catalog.named(name)
        write, moved = metric.unit.write, figures.difference
        signed = partial(units.signed, write=write)
        change = ("–", "–") if moved is None else (signed(moved.value), units.interval(moved, signed))
        baseline = "–" if figures.baseline is None else write(figures.baseline.value)
        own = units.interval(figures.artifact, write)
        made.append((metric.title, baseline, write(figures.artifact.value), own, *change))
    return made


def summary(found: RetrievalResult) -> str:
    """Say what was asked."""
    asked = f"{units.count(found.queries)} queries"
    if found.kind == "embedder":
        return f"Artifact and checkpoint embedded the same {asked} and {units.count(found.passages)} passages."
    return (
        f"Artifact and checkpoint scored the same candidates of {asked} out of {units.count(found.passages)} passages."
    )
