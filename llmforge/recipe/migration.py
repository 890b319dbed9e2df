"""Recipes of earlier versions: what was renamed since, read as it is called now.

`Recipe.load` reads an older recipe and notes what it took for what; `llmforge migrate` rewrites the file. A recipe of
a newer schema is refused.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from llmforge.base.errors import RecipeError
from llmforge.base.located_yaml import Source

SCHEMA = 1  # of recipes, today
PASSES: Mapping[str, str] = {"sparsify": "sparsify-weights"}  # as a pass was called, and is called now


def migrate(source: Source) -> list[str]:
    """Bring what was read from a recipe to today's names, in place; return what was changed, a sentence each.

    Raises:
        RecipeError: the recipe is of a newer schema.
    """
    data = source.data
    assert isinstance(data, dict)
    written = data.get("schema")
    if type(written) is int and written > SCHEMA:
        raise RecipeError(
            f"{source.where(('schema',))}: schema {written} is newer than this llmforge, which reads schema {SCHEMA}",
            hint="update llmforge, or write the recipe again with `llmforge init`",
        )
    passes = data.get("passes")
    notes = []
    for index, entry in enumerate(passes if isinstance(passes, list) else []):
        name = next(iter(entry), None) if isinstance(entry, dict) and len(entry) == 1 else entry
        if not isinstance(name, str) or name not in PASSES:
            continue
        now = PASSES[name]
        _replace(passes, index, entry, name, now)
        for location in [each for each in source.places if each[:3] == ("passes", index, name)]:
            source.places[("passes", index, now, *location[3:])] = source.places[location]
        notes.append(f"{source.where(('passes', index))}: the pass {name} is called {now} now")
    return notes


def _replace(passes: Any, index: int, entry: Any, name: str, now: str) -> None:
    passes[index] = {now: entry[name]} if isinstance(entry, dict) else now


def rewrite(text: str) -> str:
    """Rename in the text of a recipe, with its comments, what `migrate` renames; the rest stays as it is.

    It stands as an entry of a list: `- NAME`, `- NAME: …` or `- {NAME: …}`, or in `[NAME, …]`.
    """
    for name, now in PASSES.items():
        text = re.sub(
            rf"^(\s*-\s+\{{?\s*['\"]?){re.escape(name)}(?=['\"]?\s*(?:[:}}#]|$))", rf"\1{now}", text, flags=re.M
        )
        text = re.sub(
            rf"^(passes:\s*\[[^#\n]*?)(?<![\w-]){re.escape(name)}(?![\w-])", rf"\1{now}", text, flags=re.M
        )  # fmt: skip
    return text
