"""The internals of transformers and torch that llmforge relies on: each name, what for, and how it is called.

A release that moves one of these is told by its name (`lost`), before anything fails in some other way. Of functions
and classes of transformers there is a digest of the source (`digests`), by which a release that changed one is told
from those that llmforge was proven with: `releases.json` has theirs. `python -m llmforge.trace.hooks.table` prints
those of the installed release.
"""

from __future__ import annotations

import functools
import hashlib
import importlib
import inspect
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from ruamel.yaml import YAML

RELEASES = Path(__file__).with_name("releases.json")


@dataclass(frozen=True)
class Hook:
    """One name, the module of llmforge that relies on it, and what would be lost; `takes` are parameters we name."""

    name: str  # module:attribute.attribute
    user: str
    purpose: str
    takes: tuple[str, ...] = ()


HOOKS = [
    Hook(name, user, of["for"], tuple(of.get("takes", ())))
    for user, hooks in YAML(typ="safe", pure=True).load(Path(__file__).with_name("hooks.yaml")).items()
    for name, of in hooks.items()
]


def find(hook: Hook) -> object:
    """Import what a hook names (ImportError, AttributeError: it is gone)."""
    module, _, path = hook.name.partition(":")
    return functools.reduce(getattr, path.split("."), importlib.import_module(module))


def lost(hook: Hook) -> str | None:
    """Say what the installed releases lack of a hook; None: nothing."""
    what = f"{hook.name} is what llmforge.{hook.user} relies on ({hook.purpose})"
    try:
        found = find(hook)
    except (ImportError, AttributeError) as error:
        return f"{what}, and is gone: {error}"
    if not hook.takes:
        return None
    if not callable(found):
        return f"{what}, and can no longer be called"
    parameters = inspect.signature(found).parameters
    anything = any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters.values())
    if anything and hook.takes[0] not in parameters:
        return None
    missing = [name for name in hook.takes if name not in parameters]
    return f"{what}; it no longer takes {', '.join(missing)}, but {', '.join(parameters)}" if missing else None


def digests() -> dict[str, str]:
    """Digest the source of the functions and classes of transformers among `HOOKS`, by their names; SHA-256, 16 digits.

    Raises:
        ImportError, AttributeError: one is gone.
    """
    found = {}
    for hook in HOOKS:
        if hook.name.startswith("transformers"):
            what = find(hook)
            if inspect.isroutine(what) or inspect.isclass(what):
                source = inspect.getsource(inspect.unwrap(what) if inspect.isroutine(what) else what)
                found[hook.name] = hashlib.sha256(inspect.cleandoc(source).encode()).hexdigest()[:16]
    return found


def releases() -> Mapping[str, Mapping[str, str]]:
    """Return the digests of each release that llmforge was proven with."""
    found: dict[str, dict[str, str]] = json.loads(RELEASES.read_text(encoding="utf-8"))
    return found


def changed(own: Mapping[str, str], known: Mapping[str, Mapping[str, str]]) -> list[str]:
    """Name the hooks whose source is that of none of the `known` releases."""
    return [name for name, digest in own.items() if all(each.get(name) != digest for each in known.values())]


if __name__ == "__main__":
    print(json.dumps(digests(), indent=1, sort_keys=True))
