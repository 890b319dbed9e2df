"""Attention of an encoder that is traced from the model's own code: what this code gets wrong side by side, set right.

Sequences stand side by side in a trace, and code that is written for one of them alone would mix them. So a softmax of
scores [..., T, T] becomes one `llmforge::SequenceSoftmax`, under which a token sees its own sequence alone; and where
the code counts tokens from 0, it gets the positions that are inputs of the graph. Products of what such a softmax gives
with values, and biases of scores by the places of two tokens, are then right as they are.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from llmforge.base.errors import UnsupportedError
from llmforge.ir.operators import canonical
from llmforge.trace.hooks import indexers, internals, rotary
from llmforge.trace.hooks.encoder_attention import EncoderAttentionHook, Reach
from llmforge.trace.hooks.symbolic import emit

EAGER = "eager"  # transformers' name of attention in a model's own code
# Functions of the distance of two tokens alone, by logarithms, whose last bits would choose another bucket in another
# runtime: methods and functions of transformers, each with the distances as its first argument.
BUCKETS = ("make_log_bucket_position", "_relative_position_bucket", "relative_position_bucket")
_NEGATIONS = frozenset({torch.neg, Tensor.neg, Tensor.__neg__})
_SOFTMAXES = frozenset({torch.softmax, nn.functional.softmax, Tensor.softmax})


class OwnEncoderAttention(EncoderAttentionHook):
    """What a model that reads whole sequences gets from transformers where its own code computes attention."""

    NAME = EAGER

    def registered(self) -> AbstractContextManager[None]:
        """Make the masks of eager attention for a while."""
        return internals.mask_replaced(EAGER, self.describe)

    def describe(self, **kwargs: Any) -> Any:
        """Return the mask that is added to scores: nothing is hidden within a sequence.

        Raises:
            UnsupportedError: something is.
        """
        described = self.mask(**kwargs)
        if described != Reach(-1, -1):
            raise UnsupportedError(f"its own code hides keys from queries: {described}")
        return torch.zeros(1, 1, 1, 1)

    def choose(self, model: nn.Module, tables: rotary.Tables) -> None:
        """Refuse a model that has indexers."""
        indexers.refuse(model)

    @contextmanager
    def tables(self, model: nn.Module) -> Iterator[rotary.Tables]:
        """Leave rotary embedding to the model, and read buckets of distances off tables."""
        self._tables = rotary.Tables(self.positions)
        self._buckets: dict[tuple[object, ...], str] = {}  # by function and options, the name of the table
        with internals.functions_replaced(model, self._tabled):
            for module in model.modules():
                for name in BUCKETS:
                    if callable(function := getattr(module, name, None)):
                        setattr(module, name, functools.partial(self._bucket, function))
            yield self._tables

    @property
    def reads_distances(self) -> bool:
        """Whether tables of distances bound the length of a text to `positions`."""
        return bool(self._buckets)

    def watching(self, position_ids: Tensor) -> AbstractContextManager[object]:
        """Set right what the code computes, as long as this lasts."""
        stack = ExitStack()
        stack.enter_context(super().watching(position_ids))
        stack.enter_context(_SideBySide(self, position_ids))
        return stack

    def softmax(self, scores: Tensor) -> Tensor:
        """Normalize scores [..., T, T] over the keys of each query's sequence."""
        self.attentions += 1
        if self.learns:
            return scores
        inputs = {"x": scores, "sequence_starts": self.sequence_starts}
        [y] = emit(canonical.SequenceSoftmax, inputs, {}, [(scores.dtype, scores.shape)])
        return y

    def _tabled(self, name: str, function: Callable[..., Tensor]) -> Callable[..., Tensor] | None:
        return functools.partial(self._bucket, function) if name in BUCKETS else None

    def _bucket(self, function: Callable[..., Tensor], distances: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """Read what `function` makes of distances off a table of all that there are, -`positions` to `positions`."""
        key = (getattr(function, "__qualname__", ""), args, tuple(sorted(kwargs.items())))
        if key not in self._buckets:
            with internals.real_tensors():
                reach = torch.arange(-self.positions, self.positions + 1)
                table = function(reach, *args, **kwargs).to(torch.int64)
            self._buckets[key] = name = f"buckets_{len(self._buckets)}"
            self._tables.register_buffer(name, table, persistent=False)
        found: Tensor = self._tables.get_buffer(self._buckets[key])[distances + self.positions]
        return found


class _SideBySide(TorchFunctionMode):
    """Finds softmaxes over tokens, and where a model counts tokens."""

    def __init__(self, hook: OwnEncoderAttention, position_ids: Tensor) -> None:
        super().__init__()
        self._hook, self._positions, self._tokens = hook, position_ids, position_ids.shape[1]

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Run `func`, or what is right in its place."""
        kwargs = dict(kwargs or {})
        if func in _SOFTMAXES and self._over_tokens(*args, **kwargs):
            return self._hook.softmax(args[0])
        if func is torch.arange and (first := self._counts(args)) is not None:
            counted = self._positions[0] + first if type(first) is not int or first else self._positions[0]
            return counted.to(kwargs["dtype"]) if kwargs.get("dtype") is not None else counted
        if func is Tensor.item and not args[0].is_floating_point():
            return self._tokens  # of an assertion about the lengths of texts: of the one that there is (XLM)
        if func in _NEGATIONS and not args[0].is_floating_point():
            return args[0] * -1  # the dialect's Neg has floats alone
        if func is Tensor.__getitem__ and (axes := self._first_tokens(*args)):
            return functools.reduce(lambda x, axis: x.index_select(axis, self._positions[0]), axes, args[0])
        if func in (torch.cumsum, Tensor.cumsum) and self._is_mask(args[0]):
            return (self._positions + 1).to(args[0].dtype)
        return func(*args, **kwargs)

    def _over_tokens(self, x: Tensor, dim: int | None = None, *args: object, **kwargs: object) -> bool:
        axis = x.dim() - 1
        over_last = dim is not None and dim % x.dim() == axis
        return over_last and axis > 0 and all(_same(size, self._tokens) for size in x.shape[-2:])

    def _counts(self, args: Sequence[Any]) -> Any:
        """Return the first number where an arange counts all tokens; None: it counts something else."""
        first, end = (0, args[0]) if len(args) == 1 else args[:2]
        if len(args) > 3 or (len(args) == 3 and args[2] != 1):
            return None
        return first if _same(end - first, self._tokens) else None

    def _first_tokens(self, table: Tensor, index: Any) -> list[int]:
        """Return the axes along which a table of places [..., N] is cut to as many as there are tokens (OpenAI GPT)."""
        given = index if isinstance(index, tuple) else (index,)
        if len(given) > table.dim() or not all(isinstance(each, slice) for each in given):
            return []
        return [axis for axis, each in enumerate(given) if self._is_cut(each) and type(table.shape[axis]) is int]

    def _is_cut(self, of: slice) -> bool:
        """Say whether a slice takes as many as there are tokens, from the first on; others may be told by tensors."""
        begins = of.start is None or (type(of.start) is int and of.start == 0)
        by_one = of.step is None or (type(of.step) is int and of.step == 1)
        return begins and by_one and isinstance(of.stop, int | torch.SymInt) and _same(of.stop, self._tokens)

    def _is_mask(self, x: Tensor) -> bool:
        """Say whether a cumulative sum of x [1, T], 1 for each token that is no padding, counts tokens."""
        return not x.is_floating_point() and x.dim() == 2 and _same(x.shape[1], self._tokens)


def _same(size: Any, tokens: Any) -> bool:
    """Say whether two sizes are one number, or one symbol of a trace."""
    if isinstance(size, torch.SymInt) != isinstance(tokens, torch.SymInt):
        return False
    return bool(size.node.expr == tokens.node.expr) if isinstance(size, torch.SymInt) else size == tokens
