"""The section `passes` of a recipe: its entries, and their order."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from pydantic import Field, JsonValue

from llmforge.base.located_yaml import Source
from llmforge.recipe.errors import Problem, collect
from llmforge.recipe.section import Section
from llmforge.rewrite.pass_base import Numerics, Pass

MOST_PASSES = 256


class PassSpec(Section):
    """One entry of `passes`, as written: a bare name, or a name with options."""

    name: str
    options: dict[str, JsonValue] = Field(default_factory=dict)
    where: str  # file:line:column of the entry

    def problem(self, what: str, hint: str | None) -> Problem:
        """Say what is wrong with the pass."""
        return Problem(self.where, f"passes.{self.name}", what, hint)


def entries(source: Source) -> list[Any]:
    """Bring each entry of `passes`, a bare name or `{name: {options}}`, to the form of `PassSpec`.

    Raises:
        RecipeError: `passes` is no list, or an entry has another form.
    """
    written = source.mapping["passes"]
    if not isinstance(written, list):
        raise collect([Problem(source.where(("passes",)), "passes", "must be a list of passes")])
    if len(written) > MOST_PASSES:
        what = f"{len(written)} passes; at most {MOST_PASSES} are allowed"
        raise collect([Problem(source.where(("passes",)), "passes", what)])
    read, problems = [], []
    for index, entry in enumerate(written):
        where = source.where(("passes", index))
        ((name, values),) = entry.items() if isinstance(entry, dict) and len(entry) == 1 else [(entry, None)]
        if isinstance(name, str) and isinstance(values, dict | None):
            read.append({"name": name, "options": values or {}, "where": where})
        else:
            what = "a pass must be a name or a name with options: `- name` or `- name: {option: value}`"
            problems.append(Problem(where, f"passes.{index}", what))
    if problems:
        raise collect(problems)
    return read


def misplaced(
    spec: PassSpec, cls: type[Pass], facts: frozenset[str], registry: Sequence[type[Pass]]
) -> Iterator[Problem]:
    """Refuse passes before one that they need, and those proven in fp32 behind the one that leaves it."""
    for fact in sorted(cls.requires - facts):
        providers = [other.name for other in registry if fact in other.provides]
        yield spec.problem(
            f"requires {fact!r}, which no earlier pass provides",
            f"put {' or '.join(providers)} before it" if providers else None,
        )
    if "precision" in facts and cls.numerics is not Numerics.EXACT:
        yield spec.problem(
            "follows a pass that lowers the precision, but is verified on fp32 graphs", "put it before that pass"
        )
