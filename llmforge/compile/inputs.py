"""Where the inputs of builds lie on this machine: an artifact names them by their digests, and holds no paths."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from llmforge.base.remembered import RememberedTexts
from llmforge.checkpoint import Checkpoint
from llmforge.recipe import Recipe

_PATHS = RememberedTexts("inputs.json", 1024)  # by digest and name: copies may have others


def remember(recipe: Recipe, resolved: Mapping[str, Any], checkpoint: Checkpoint) -> None:
    """Remember where the checkpoint and the files of `recipe` lie, for commands that are given its artifact alone.

    Where that cannot be written, those commands ask for the recipe.
    """
    here = dict(files(resolved, recipe.model_dump(mode="json", by_alias=True)))
    _PATHS.add({_key(checkpoint.digest, resolved["checkpoint"]): str(checkpoint.path.absolute()), **here})


def find(digest: str, name: str) -> Path | None:
    """Say where the input of this digest and name lay, as far as that is known, and something is there."""
    known = _PATHS.read().get(_key(digest, name))
    return Path(known) if known is not None and Path(known).exists() else None


def files(resolved: Any, written: Any) -> Iterator[tuple[str, str]]:
    """Pair the keys of files in a `resolved` recipe with what the recipe says in their places."""
    if is_content(resolved):
        yield _key(resolved["sha256"], resolved["name"]), str(written)
    elif isinstance(resolved, Mapping):
        for key, value in resolved.items():
            if isinstance(written, Mapping) and key in written:
                yield from files(value, written[key])
    elif isinstance(resolved, list | tuple) and isinstance(written, list | tuple):
        for value, other in zip(resolved, written, strict=False):
            yield from files(value, other)


def is_content(value: Any) -> bool:
    """Say if `value` is what a resolved recipe has in the place of a file."""
    return isinstance(value, Mapping) and value.keys() == {"name", "sha256"}


def _key(digest: str, name: str) -> str:
    return f"{digest} {name}"
