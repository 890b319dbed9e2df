"""Numbers of tokens that a configuration names, from which on a model computes differently."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

# How configurations name them; "max_window_layers" counts layers, and "chunk_size_feed_forward" is 0.
NAMED = re.compile(r"^(?!.*layers).*(window|chunk|block|local|bucket|distance|span|original_max_position)")


def named(settings: Mapping[str, Any]) -> Iterator[tuple[str, int]]:
    """List the fields of a configuration that state such a number: name and tokens."""
    for name, value in settings.items():
        if isinstance(value, Mapping):
            yield from named(value)
        elif NAMED.search(str(name)):
            numbers = [x for x in (value if isinstance(value, list | tuple) else [value]) if type(x) is int]
            yield from ((name, x) for x in numbers if x > 0)
