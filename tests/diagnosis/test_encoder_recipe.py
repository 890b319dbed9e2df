"""What an embedder's artifact records of its queries, and what is not told apart in it."""

from __future__ import annotations

from pathlib import Path

import pytest

from llmforge import recipes
from llmforge.base.errors import UnsupportedError, UsageError
from llmforge.base.progress import Silent
from llmforge.diagnosis import rebuilding, reproducing
from llmforge.recipe import Recipe, RetrievalSpec

ASKED = {"queries": 5, "passages": 20}


def test_queries_that_ship_are_known_by_their_digest() -> None:
    recorded = {**ASKED, "data": RetrievalSpec(**ASKED).digest}
    assert reproducing._queries(Path("a"), recorded) == "default"
    with pytest.raises(UsageError, match="queries and passages of a folder that nothing names") as refused:
        reproducing._queries(Path("a"), {**recorded, "queries": 6})
    assert refused.value.hint == "give the recipe with --recipe"


def test_bisecting_an_embedder_is_refused_before_it_is_traced() -> None:
    recipe = Recipe.load(recipes.FOLDER / "embedder.yaml")
    with (
        pytest.raises(UnsupportedError, match="is an embedder: what its layers lose is not told apart") as refused,
        rebuilding.rebuilt(recipe, None, Silent()),
    ):
        pass
    assert "llmforge diff A B" in str(refused.value.hint)
