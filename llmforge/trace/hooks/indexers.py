"""Sparse attention by an indexer: modules that choose, for each query, which of the cached tokens it reads."""

from __future__ import annotations

import inspect

from torch import nn

from llmforge.base.errors import UnsupportedError

CACHES = ("update_indexer", "indexer_position_ids")  # what an indexer asks transformers' cache for


def refuse(model: nn.Module) -> None:
    """Refuse a model that caches keys of an indexer.

    Raises:
        UnsupportedError: it does; the message says how many tokens a query reads, where the configuration does.
    """
    for module in model.modules():
        code = getattr(inspect.unwrap(type(module).forward), "__code__", None)
        if code is not None and any(name in code.co_names for name in CACHES):
            chosen = {name: x for name, x in vars(module).items() if "topk" in name and type(x) is int}
            count = ", ".join(f"{name} is {x}" for name, x in sorted(chosen.items()))
            raise UnsupportedError(
                f"{type(module).__name__} chooses which cached tokens each query reads"
                + (f" ({count})" if count else "")
                + ", by keys of its own that it caches: llmforge::Attention reads all of them",
                hint="needed: a cache for the keys of the indexer, and an operator of attention over chosen tokens",
            )
