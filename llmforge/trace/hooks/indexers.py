"""Sparse attention by an indexer: modules that choose, for each query, which of the cached tokens it reads.

An indexer that chooses k tokens chooses all of them in texts of up to k: there attention reads every token, as
`llmforge::Attention` does, and neither the indexer nor its cache is needed. That this is so, and what k is, is found by
running the module on random numbers. Graphs made so say how long a text they are right for (`ir.interface`), also
where that is the whole context.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache

from llmforge.base.errors import UnsupportedError
from llmforge.ir.interface import TextLimit
from llmforge.trace.hooks import internals, masks, miniature, rotary

CACHES = ("update_indexer", "indexer_position_ids")  # what an indexer asks transformers' cache for
QUERIES = 2  # of a probe


@dataclass(frozen=True)
class AllTokens:
    """Stands in for the indices of chosen tokens where an indexer chooses all of them; computing with it fails."""

    of: str  # class of the indexer


@dataclass
class Shortest:
    """Of the longest texts in which indexers of a model choose every token, the shortest; None: there is no indexer."""

    limit: TextLimit | None = None

    def lower(self, tokens: int, module: nn.Module, positions: int) -> None:
        """Take `tokens` of `module`, of the `positions` that were looked at, where no other allows fewer."""
        if self.limit is None or tokens < self.limit.tokens:
            name = type(module).__name__
            beyond = f"{name} chooses {tokens} of the tokens that a query reads, and in a longer text not all"
            whole = f"{name} chooses every token of those, and is left out"
            self.limit = TextLimit(tokens, beyond if tokens < positions else whole)


def modules(model: nn.Module) -> list[nn.Module]:
    """List the modules of `model` that cache keys of an indexer."""
    return [module for module in model.modules() if _caches(type(module))]


def _caches(kind: type[nn.Module]) -> bool:
    code = getattr(inspect.unwrap(kind.forward), "__code__", None)
    return code is not None and any(name in code.co_names for name in CACHES)


def refuse(model: nn.Module) -> None:
    """Refuse a model that caches keys of an indexer.

    Raises:
        UnsupportedError: it does; the message says how many tokens a query reads, where the configuration does.
    """
    for module in modules(model):
        raise _refusal(module)


def _refusal(module: nn.Module) -> UnsupportedError:
    chosen = {name: x for name, x in vars(module).items() if "topk" in name and type(x) is int}
    count = ", ".join(f"{name} is {x}" for name, x in sorted(chosen.items()))
    return UnsupportedError(
        f"{type(module).__name__} chooses which cached tokens each query reads"
        + (f" ({count})" if count else "")
        + ", by keys of its own that it caches: llmforge::Attention reads all of them",
        hint="needed: a cache for the keys of the indexer, and an operator of attention over chosen tokens",
    )


def substitute(model: nn.Module, tables: rotary.Tables, limit: Shortest) -> None:
    """Let each indexer of `model` choose all tokens, and note in `limit` up to which length it does.

    Raises:
        UnsupportedError: when it runs: it was called with something unknown, or does not choose all tokens of a text
            however short.
    """
    known: dict[tuple[object, ...], int] = {}
    for module in modules(model):
        module.forward = _chooser(module, module.forward, tables, limit, known)


def _chooser(
    module: nn.Module,
    original: Callable[..., Any],
    tables: rotary.Tables,
    limit: Shortest,
    known: dict[tuple[object, ...], int],
) -> Callable[..., AllTokens]:
    shapes = tuple((name, tuple(tensor.shape)) for name, tensor in module.named_parameters())
    numbers = tuple(sorted((name, x) for name, x in vars(module).items() if type(x) in (int, float) and name[0] != "_"))

    def forward(*args: object, **kwargs: object) -> AllTokens:
        bound = inspect.signature(original).bind(*args, **kwargs)
        key = (type(module), shapes, tuple(each for each in numbers if "idx" not in each[0]))
        if key not in known:
            with internals.real_tensors():
                known[key] = longest(module, bound, tables)
        limit.lower(known[key], module, tables.positions)
        return AllTokens(type(module).__name__)

    return forward


def longest(module: nn.Module, bound: inspect.BoundArguments, tables: rotary.Tables) -> int:
    """Find the longest text, up to the positions of `tables`, of which `module` chooses every token.

    It is called as `bound` says, on random numbers, a cache of random keys behind them.

    Raises:
        UnsupportedError: there is none, or it gives something else than indices of tokens.
    """
    chosen, tokens = 0, QUERIES
    while True:
        chosen = _chosen(module, bound, tables, tokens)
        if chosen < tokens or tokens == tables.positions:
            break
        tokens = min(2 * tokens, tables.positions)
    others = {chosen // 3, 3 * chosen // 4, chosen - 1, chosen, min(chosen + 1, tables.positions)}
    if chosen < QUERIES or any(
        _chosen(module, bound, tables, length) != min(length, chosen) for length in others if length >= QUERIES
    ):
        raise _refusal(module)
    return chosen


def _chosen(module: nn.Module, bound: inspect.BoundArguments, tables: rotary.Tables, tokens: int) -> int:
    """Count the tokens that a text's last queries choose among `tokens`; each must choose different ones."""
    generator = torch.Generator().manual_seed(0)
    given = {name: _stand_in(value, tables, tokens, generator) for name, value in bound.arguments.items()}
    arguments = inspect.BoundArguments(bound.signature, given)
    try:
        indices = type(module).forward(miniature.copied(module, {}, generator), *arguments.args, **arguments.kwargs)
    except (AttributeError, IndexError, KeyError, RuntimeError, TypeError, ValueError) as error:
        raise _refusal(module) from error
    if not isinstance(indices, Tensor) or indices.is_floating_point() or indices.shape[:-1] != (1, QUERIES):
        raise _refusal(module)
    count = indices.shape[-1]
    ascending = indices.sort(-1).values
    distinct = bool((ascending[..., 1:] > ascending[..., :-1]).all())
    if not distinct or int(ascending.min()) < 0 or int(ascending.max()) >= tokens:
        raise _refusal(module)
    return count


class _Keys(Cache):
    """A cache that hands an indexer its keys [B, S, D] behind random ones, `tokens` in all."""

    def __init__(self, tokens: int, generator: torch.Generator) -> None:
        self._tokens, self._generator = tokens, generator

    def update_indexer(self, indexer_key_states: Tensor, layer_idx: int) -> Tensor:
        """Return keys [B, tokens, D]."""
        batch, step, width = indexer_key_states.shape
        past = torch.randn(batch, self._tokens - step, width, generator=self._generator)
        return torch.cat([past, indexer_key_states], 1)


def _stand_in(value: object, tables: rotary.Tables, tokens: int, generator: torch.Generator) -> object:
    """Make of what an indexer is given in a trace something of the same kind with numbers, for `QUERIES` queries."""
    if isinstance(value, tuple):
        return tuple(_stand_in(each, tables, tokens, generator) for each in value)
    if isinstance(value, rotary.Angles):
        return tables.sample(value)[:, :QUERIES]
    if isinstance(value, masks.MaskRows):
        places = torch.arange(tokens - QUERIES, tokens)
        hidden = torch.arange(tokens)[None] > places[:, None]
        return torch.zeros(1, QUERIES, tokens).masked_fill(hidden, float("-inf"))
    if isinstance(value, Cache):
        return _Keys(tokens, generator)
    if isinstance(value, Tensor):
        if value.is_floating_point():
            return torch.randn(1, QUERIES, *value.shape[2:], generator=generator)
        return torch.arange(tokens - QUERIES, tokens)[None]
    return value


def parameters(model: nn.Module) -> set[str]:
    """Name the parameters of the indexers of `model`, which say nothing where every token is chosen."""
    names: set[str] = set()
    for name, module in model.named_modules():
        if _caches(type(module)):
            names |= {f"{name}.{each}" for each, _ in (*module.named_parameters(), *module.named_buffers())}
    return names
