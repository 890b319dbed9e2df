"""How long a text, and how large a model, a proof of a graph can run."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

LONGEST = 1536  # tokens: eager attention takes quadratic memory
TAIL = 16  # rows of a long prompt whose logits are compared
WHOLE_BYTES = 2**30  # of fp32 weights: up to here a model runs whole, twice over in memory

# How configurations name the number of tokens from which a model computes differently.
# "max_window_layers" counts layers, and "chunk_size_feed_forward" is 0.
NAMED = re.compile(r"^(?!.*layers).*(window|chunk|block|local|bucket|distance|span|original_max_position)")


def named(settings: Mapping[str, Any], context: int | None) -> Iterator[tuple[str, int]]:
    """List the fields of a configuration that state such a number, below `context`: name and tokens."""
    for name, value in settings.items():
        if isinstance(value, Mapping):
            yield from named(value, context)
        elif NAMED.search(str(name)):
            numbers = [x for x in (value if isinstance(value, list | tuple) else [value]) if type(x) is int]
            yield from ((name, x) for x in numbers if x > 0 and (context is None or x < context))
