"""Rotary embedding: tables of the model's own numbers, and the functions that apply them, recognized by computing."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from llmforge.base.errors import UnsupportedError
from llmforge.ir.operators import standard
from llmforge.trace.hooks import internals
from llmforge.trace.hooks.symbolic import emit

CHUNK = 8192  # positions computed at a time: bounds the memory of long contexts
TOLERANCE = 1e-5  # fp32, on values of order one


class TraceInputs:
    """What the run under way was given; apart from modules, whose attributes torch.export does not let a trace set."""

    position_ids: Tensor  # the graph's own [B, S]
    text_lengths: Tensor  # [B]


class Tables(nn.Module):
    """The rotary tables of a model: buffers `cos`, `sin` (then `cos_1`, …), fp32 [positions, rotary_dim / 2].

    They are numbered in the order in which the layers first apply them: transformers computes them in the order of a
    Python set, which PYTHONHASHSEED decides.
    """

    def __init__(self, positions: int) -> None:
        super().__init__()
        self.positions = positions
        self.step = TraceInputs()
        self.computed: list[tuple[Tensor, Tensor]] = []  # cos and sin, which become buffers as they are applied
        self.applied: dict[int, int] = {}  # index of a table → its number among the buffers
        self.samples: list[tuple[Tensor, Tensor]] = []  # [1, PROBED, width], as the model's module has them
        self.as_complex: list[bool] = []  # whether the model's module gives cos + i·sin as one tensor
        self.switches: list[int] = []  # positions from which the long half of a table counts; 0: there is one half

    def add(self, module: nn.Module, original: Callable[[Tensor], Any]) -> int:
        """Evaluate `original` (position ids [1, n] → cos, sin [1, n, width]) and keep the table; return its index.

        `original` may also give one complex tensor, cos + i·sin.

        Raises:
            UnsupportedError: what it computes for a position depends on how long the sequence is, in another way
                than by one switch (`find_switch`).
        """

        def forward(ids: Tensor) -> tuple[Tensor, Tensor]:
            angles = original(ids)
            return (angles.real, angles.imag) if isinstance(angles, Tensor) else angles

        probed = torch.arange(min(PROBED, self.positions))[None]
        far = torch.tensor([[self.positions - 1]])
        samples = forward(probed)
        beside_far = forward(torch.cat([probed, far], 1))
        switch = 0
        if any(not torch.equal(a, b[:, : a.shape[1]]) for a, b in zip(samples, beside_far, strict=True)):
            switch = find_switch(type(module).__name__, forward, self.positions)
        chunks = table_rows(forward, self.positions, switch, CHUNK)
        index = len(self.samples)
        self.samples.append(samples)
        self.as_complex.append(isinstance(original(probed), Tensor))
        self.switches.append(switch)
        cos, sin = (torch.cat([_half(chunk[part][0]) for chunk in chunks]) for part in (0, 1))
        self.computed.append((cos, sin))
        return index

    def sample(self, angles: Angles) -> Tensor:
        """Return what `angles` stand for, at the probed positions."""
        cos, sin = self.samples[angles.table]
        return (cos, sin, torch.complex(cos, sin))[angles.part]

    def table(self, index: int) -> tuple[Tensor, Tensor]:
        """Return the cos and sin of one table, as the trace sees them."""
        number = self.applied.setdefault(index, len(self.applied))
        names = _buffer(number, 0), _buffer(number, 1)
        if not hasattr(self, names[0]):
            for name, tensor in zip(names, self.computed[index], strict=True):
                self.register_buffer(name, tensor, persistent=False)
        return self.get_buffer(names[0]), self.get_buffer(names[1])


@dataclass(frozen=True, eq=False)
class Angles:
    """Stands in for the cos or sin [B, S, width] that a rotary module would compute; computing with it fails."""

    table: int
    part: int  # 0: cos, 1: sin, 2: cos + i·sin
    position_ids: Tensor

    def to(self, *args: object, **kwargs: object) -> Angles:
        """Stay where it is: a trace has one device."""
        return self


@dataclass(frozen=True)
class RotaryLayout:
    """How a function applies rotary embedding."""

    heads_last: bool  # [B, S, H, D] instead of [B, H, S, D]
    interleaved: bool  # pairs (0, 1), (2, 3), … instead of (0, D/2), (1, D/2 + 1), …
    regroups: bool = False  # takes the former and hands out the latter


@contextmanager
def substituted(model: nn.Module, positions: int) -> Iterator[Tables]:
    """Make rotary embedding arrive as RotaryEmbedding nodes while the context lasts.

    Modules that own rotary frequencies (transformers: a buffer `inv_freq`) hand out `Angles`; the functions of
    their source files that transformers calls `apply_rotary*` take them.
    """
    tables = Tables(positions)
    for module in model.modules():
        if any(name.endswith("inv_freq") for name, _ in module.named_buffers(recurse=False)):
            module.forward = _angles(module, module.forward, tables)

    def applier(name: str, function: internals.Function) -> internals.Function | None:
        return _applier(function, tables) if name.startswith("apply_rotary") else None

    with internals.functions_replaced(model, applier):
        yield tables


def _angles(module: nn.Module, original: Callable[..., Any], tables: Tables) -> Callable[..., Any]:
    """Make the forward of a rotary module that computes a table once and hands out `Angles`."""
    known: dict[tuple[object, ...], int] = {}

    def forward(x: Tensor, position_ids: Tensor, *args: object, **kwargs: object) -> Angles | tuple[Angles, Angles]:
        axes = position_ids.shape[:-2]
        if axes:
            position_ids = _one_axis(module, position_ids, tables.step.position_ids)
        key = (*args, *sorted(kwargs.items()))
        if key not in known:
            with internals.real_tensors():
                known[key] = tables.add(
                    module, lambda ids: original(torch.zeros(1), ids.expand(*axes, -1, -1), *args, **kwargs)
                )
        places = position_ids
        if switch := tables.switches[known[key]]:
            places = switched(position_ids, tables.step.text_lengths, switch)
        if tables.as_complex[known[key]]:
            return Angles(known[key], 2, places)
        return Angles(known[key], 0, places), Angles(known[key], 1, places)

    return forward


def _one_axis(module: nn.Module, position_ids: Tensor, given: Tensor) -> Tensor:
    """Take positions [axes, B, S] (time, height, width) for the text's own [B, S] where all axes are views of it."""
    if position_ids.dim() == 3 and _place(position_ids) == (*_place(given)[:2], (0, *given.stride())):
        return given
    raise UnsupportedError(f"{type(module).__name__} takes positions of more than one axis")


def _place(x: Tensor) -> tuple[int, object, tuple[int, ...]]:
    """Say which tensor `x` is a view of, from where on, and with which strides."""
    return id(x if x._base is None else x._base), x.storage_offset(), x.stride()


def _applier(original: Callable[..., Any], tables: Tables) -> Callable[..., Any]:
    """Make a function that does with `Angles` what `original` does with cos and sin."""
    signature = inspect.signature(original)
    layouts: dict[tuple[object, ...], RotaryLayout] = {}

    def apply(*args: object, **kwargs: object) -> object:
        bound = signature.bind(*args, **kwargs)
        angles = [value for value in bound.arguments.values() if isinstance(value, Angles)]
        if not angles:
            return original(*args, **kwargs)
        tensors = {name: value for name, value in bound.arguments.items() if isinstance(value, Tensor)}
        if [angle.part for angle in angles] not in ([0, 1], [2]) or len({angle.table for angle in angles}) != 1:
            raise UnsupportedError(f"{original.__name__} takes rotary angles in an unknown form")
        first = angles[0]
        key = (first.table, *((name, x.shape[-1]) for name, x in tensors.items()))
        if key not in layouts:
            with internals.real_tensors():
                layouts[key] = probe(original, bound, tables)
        outputs = tuple(_emit(x, first.position_ids, tables.table(first.table), layouts[key]) for x in tensors.values())
        return outputs if len(outputs) > 1 else outputs[0]

    return apply


def probe(original: Callable[..., Any], bound: inspect.BoundArguments, tables: Tables) -> RotaryLayout:
    """Find the layout in which `original` rotates, by calling it on numbers.

    Raises:
        UnsupportedError: it does something else.
    """
    generator = torch.Generator().manual_seed(0)
    index = next(value.table for value in bound.arguments.values() if isinstance(value, Angles))
    cos, sin = (part[: tables.samples[index][0].shape[1]] for part in tables.table(index))
    for heads_last in (False, True):
        arguments, rotated = dict(bound.arguments), []
        for name, value in bound.arguments.items():
            if isinstance(value, Angles):
                arguments[name] = tables.sample(value)
            elif isinstance(value, Tensor):
                shape = (1, len(cos), 3, value.shape[-1]) if heads_last else (1, 3, len(cos), value.shape[-1])
                arguments[name] = torch.randn(shape, generator=generator)
                rotated.append(arguments[name])
        try:
            outputs = original(*inspect.BoundArguments(bound.signature, arguments).args)
        except RuntimeError:  # shapes that do not broadcast: not this layout
            continue
        outputs = outputs if isinstance(outputs, tuple) else (outputs,)
        if len(outputs) != len(rotated):
            continue
        for interleaved, regroups in ((False, False), (True, False), (False, True)):
            layout = RotaryLayout(heads_last, interleaved, regroups)
            expected = [_rotate(x, cos, sin, layout) for x in rotated]
            if all(
                y.shape == e.shape and torch.allclose(y, e, rtol=0, atol=TOLERANCE)
                for y, e in zip(outputs, expected, strict=True)
            ):
                return layout
    raise UnsupportedError(f"{original.__module__.rpartition('.')[2]}.{original.__name__} is no rotary embedding")


def _rotate(x: Tensor, cos: Tensor, sin: Tensor, layout: RotaryLayout) -> Tensor:
    """Compute RotaryEmbedding-23 on x [1, S, H, D] or [1, H, S, D] with cos and sin [S, rotary_dim / 2]."""
    by_row = x if layout.heads_last else x.transpose(1, 2)
    half = cos.shape[1]
    cos, sin = cos[:, None], sin[:, None]
    turning, rest = by_row[..., : 2 * half], by_row[..., 2 * half :]
    if layout.regroups:
        turning = torch.cat([turning[..., 0::2], turning[..., 1::2]], -1)
    if layout.interleaved:
        a, b = turning[..., 0::2], turning[..., 1::2]
        turned = torch.stack([a * cos - b * sin, b * cos + a * sin], -1).flatten(-2)
    else:
        a, b = turning[..., :half], turning[..., half:]
        turned = torch.cat([a * cos - b * sin, b * cos + a * sin], -1)
    y = torch.cat([turned, rest], -1)
    return y if layout.heads_last else y.transpose(1, 2)


def _emit(x: Tensor, position_ids: Tensor, table: tuple[Tensor, Tensor], layout: RotaryLayout) -> Tensor:
    """Emit RotaryEmbedding-23 for x, laid out as `layout` says."""
    by_row = x if layout.heads_last else x.transpose(1, 2)
    batch, sequence, count, dim = by_row.shape
    rotary_dim = 2 * table[0].shape[1]
    attributes: dict[str, Any] = {"num_heads": count, "interleaved": int(layout.interleaved)}
    if rotary_dim != dim:
        attributes["rotary_embedding_dim"] = rotary_dim
    if layout.regroups:
        if rotary_dim != dim:
            raise UnsupportedError("rotary embedding regroups the pairs of a part of each head")
        by_row = by_row.reshape(batch, sequence, count, dim // 2, 2).transpose(3, 4)
    flat = by_row.reshape(batch, sequence, count * dim)
    cos, sin = table
    inputs = {"x": flat, "cos": cos, "sin": sin, "position_ids": position_ids}
    (y,) = emit(standard.RotaryEmbedding, inputs, attributes, [(x.dtype, flat.shape)], version=23)
    y = y.view(batch, sequence, count, dim)
    return y if layout.heads_last else y.transpose(1, 2)


def _half(full: Tensor) -> Tensor:
    """Take one number a rotated pair from cos or sin [n, width] that may hold each twice."""
    half = full.shape[1] // 2
    if full.shape[1] % 2 == 0 and torch.equal(full[:, :half], full[:, half:]):
        return full[:, :half].contiguous()
    if full.shape[1] % 2 == 0 and torch.equal(full[:, 0::2], full[:, 1::2]):
        return full[:, 0::2].contiguous()
    return full


def _buffer(index: int, part: int) -> str:
    return ("cos", "sin")[part] + (f"_{index}" if index else "")


PROBED = 8  # positions at which angles are compared
Forward = Callable[[Tensor], tuple[Tensor, Tensor]]  # position ids [1, n] → cos, sin [1, n, width]


def find_switch(name: str, forward: Forward, positions: int) -> int:
    """Find the length T: texts of up to T tokens have one set of angles, longer ones another.

    Raises:
        UnsupportedError: the angles change more than once (dynamic scaling).
    """
    short, long = _beside(forward, PROBED - 1), _beside(forward, positions - 1)
    low, high = PROBED - 1, positions - 1  # last positions: `low` is short, `high` is long
    while high - low > 1:
        middle = (low + high) // 2
        if _same(_beside(forward, middle), short):
            low = middle
        else:
            high = middle
    for last in {(PROBED - 1 + low) // 2, low, high, (high + positions - 1) // 2, positions - 2}:
        if last >= PROBED - 1 and not _same(_beside(forward, last), short if last <= low else long):
            raise UnsupportedError(
                f"{name}: the angles of a position change with the length of the sequence more than once "
                "(dynamic rope scaling), which a table cannot hold"
            )
    return high


def table_rows(forward: Forward, positions: int, length: int, chunk: int) -> Sequence[tuple[Tensor, Tensor]]:
    """Compute a table by chunks: positions up to `length` of a short text, if it is not 0, then all of a long one."""
    short = [forward(ids[None]) for ids in torch.split(torch.arange(length), chunk)] if length else []
    if not length:
        return [forward(ids[None]) for ids in torch.split(torch.arange(positions), chunk)]
    last = torch.tensor([positions - 1])
    long = [forward(torch.cat([ids, last])[None]) for ids in torch.split(torch.arange(positions), chunk)]
    return [*short, *((cos[:, :-1], sin[:, :-1]) for cos, sin in long)]


def switched(position_ids: Tensor, text_lengths: Tensor, length: int) -> Tensor:
    """Return the rows of the table for positions int64 [B, S] of texts of `text_lengths` tokens, int64 [B]."""
    return position_ids + ((text_lengths - length).clamp(0, 1) * length)[:, None]


def _beside(forward: Forward, last: int) -> tuple[Tensor, ...]:
    """Compute the angles of the first positions in a text whose last position is `last`."""
    cos, sin = forward(torch.cat([torch.arange(PROBED), torch.tensor([last])])[None])
    return cos[:, :PROBED], sin[:, :PROBED]


def _same(a: Sequence[Tensor], b: Sequence[Tensor]) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))
