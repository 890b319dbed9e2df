"""The prefixes of a recipe: their keys and values are computed by the engine that was built, and ship in its folder."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from llmforge.backends import BACKENDS
from llmforge.base.errors import ForgeError, InputError, UnsupportedError
from llmforge.recipe import Recipe, ServingSpec
from llmforge.targets import Target

if TYPE_CHECKING:
    from llmforge.serving.prefix_cache import Prefix
    from llmforge.serving.saved_prefixes import PrefixStore


def check(recipe: Recipe) -> None:
    """Refuse prefixes for an engine that servers of others load.

    Raises:
        UnsupportedError: it is one.
    """
    if recipe.serving.prefixes and BACKENDS[recipe.engine.backend].export_format is not None:
        raise UnsupportedError(
            f"{recipe.where('serving', 'prefixes')}: prefixes ship with an engine of llmforge's own; those of "
            f"{recipe.engine.backend} are loaded by servers of others",
            hint="remove `prefixes`, or choose another backend",
        )


def write(artifact: Path, serving: ServingSpec, target: Target) -> tuple[str, ...]:
    """Put the prefixes of `serving` into the engine of `artifact`, which is whole; return what is to be said of them.

    Where this machine does not run the engine, or its cache holds prefixes in no arrays of their own, the tokens ship
    alone, and each server computes their keys and values when it starts.

    Raises:
        InputError: a prefix holds nothing that prompts begin with, no block, or more than the context.
        UnsupportedError: the model generates nothing, or the chat template writes the day.
    """
    if not serving.prefixes:
        return ()
    from llmforge.backends import engines  # both bring ONNX Runtime
    from llmforge.serving import saved_prefixes

    found = _prefixes(artifact, serving)
    shipped = saved_prefixes.write_index(artifact, found)
    assert shipped.store is not None
    why = engines.why_not_run(target) or _compute(artifact, found, shipped.store)
    notes = [f"prefix {each.name}: {len(each.ids)} tokens" for each in found]
    return (*notes, *([f"prefixes: keys and values are computed at each start: {why}"] if why else []))


def _prefixes(artifact: Path, serving: ServingSpec) -> tuple[Prefix, ...]:
    """Tokenize the prefixes with what the artifact tokenizes prompts with."""
    from llmforge.serving import saved_prefixes
    from llmforge.serving.prefix_cache import BLOCK, Prefix
    from llmforge.serving.prompts import PromptEncoder

    encoder, found = PromptEncoder.read(artifact), list[Prefix]()
    if encoder.config.encoder is not None:
        raise UnsupportedError(
            "serving.prefixes: an embedder or a reranker keeps nothing of what texts begin with",
            hint="remove `prefixes`",
        )
    if encoder.template is not None and "strftime_now" in encoder.template.source:
        raise UnsupportedError(
            "serving.prefixes: the chat template writes the day, and prompts of another day would begin otherwise",
            hint="give another with `chat_template: FILE`, or give prefixes when you serve: `serve --prefixes`",
        )
    longest = encoder.config.max_context - 2  # a token of a prompt, and one of its answer
    for name, given in serving.named_prefixes.items():
        try:
            ids = tuple(saved_prefixes.prefix_ids(given, encoder))
        except ForgeError as error:
            raise InputError(f"serving.prefixes.{name}: {error.message}", hint=error.hint) from error
        if not BLOCK <= len(ids) <= longest:
            raise InputError(f"serving.prefixes.{name}: {len(ids)} tokens; expected {BLOCK} to {longest}")
        found.append(Prefix(name, ids))
    return tuple(found)


def _compute(artifact: Path, prefixes: tuple[Prefix, ...], store: PrefixStore) -> str | None:
    """Write the files of prefixes; return why there are none."""
    from llmforge.serving import Engine, EngineOptions, load
    from llmforge.serving.prefix_cache import BLOCK

    runner = load(artifact)
    blocks = sum(len(each.ids) // BLOCK for each in prefixes)
    room = runner.session.allocate(1, BLOCK).size_bytes * blocks
    with Engine(runner, EngineOptions(prefix_cache_bytes=room, speculation="off", prefixes=prefixes), store=store):
        pass
    written = all(store.file(each.ids[: len(each.ids) // BLOCK * BLOCK]).is_file() for each in prefixes)
    return None if written else "the engine's cache holds none apart from running sequences"
