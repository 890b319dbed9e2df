"""Tokens drawn by the compiled kernels (`llmforge.runtime.sampling.distribution`).

They take 0.01 to 0.1 ms and keep the interpreter meanwhile: whoever gives it up for so short a time waits for as long
as another thread may keep it then, which is ten times that in the engine's process.
"""

from __future__ import annotations

import ctypes
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from llmforge import native

# kernels.h, `Draw`: how a token is drawn.
DRAW = np.dtype([("uniform", "f8"), ("top_p", "f8"), ("top_k", "i8"), ("temperature", "f4"), ("min_p", "f4")])


class _Heads(ctypes.Structure):
    """kernels.h, `Heads`."""

    _fields_ = [
        ("rows", ctypes.c_int64),
        ("width", ctypes.c_int64),
        ("vocabulary", ctypes.c_int64),
        ("blocks", ctypes.c_int64),
        ("logits", ctypes.c_void_p),
        ("ids", ctypes.c_void_p),
        ("masses", ctypes.c_void_p),
        ("draws", ctypes.c_void_p),
        ("tokens", ctypes.c_void_p),
        ("chosen", ctypes.c_void_p),
    ]


class _Row(ctypes.Structure):
    """kernels.h, `LogitRow`."""

    _fields_ = [
        ("vocabulary", ctypes.c_int64),
        ("block", ctypes.c_int64),
        ("logits", ctypes.c_void_p),
        ("head_logits", ctypes.c_void_p),
        ("head_ids", ctypes.c_void_p),
        ("masses", ctypes.c_void_p),
        ("uniform", ctypes.c_double),
        ("top_p", ctypes.c_double),
        ("top_k", ctypes.c_int64),
        ("temperature", ctypes.c_float),
        ("min_p", ctypes.c_float),
    ]


@cache
def _library() -> ctypes.PyDLL | None:
    pointer, integer, number = ctypes.c_void_p, ctypes.c_int64, ctypes.c_float
    signatures: dict[str, tuple[list[Any], Any]] = {
        "draw_heads": ([ctypes.POINTER(_Heads)], None),
        "draw_block": ([pointer, integer, number, number, pointer], integer),
        "draw_row": ([ctypes.POINTER(_Row)], integer),
        "largest": ([pointer, integer, integer, pointer], integer),
        "sum_exponentials": ([pointer, integer, number], ctypes.c_double),
    }
    return native.functions(signatures, ctypes.PyDLL)


def available() -> bool:
    """Say whether there are kernels here."""
    return _library() is not None


def draw_heads(
    logits: NDArray[np.float32],
    ids: NDArray[np.int32],
    masses: NDArray[np.float32],
    vocabulary: int,
    draws: NDArray[np.void],
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Draw a token from each of some heads (`llmforge.ir.interface.TopLogits`) as `draws` [B] of `DRAW` say.

    Returns:
        Tokens [B], and blocks [B] that they stand in where those are -1; -1 in both: the whole row must decide.
    """
    rows, width = logits.shape
    found = np.empty((2, rows), np.int64)
    arrays = [np.ascontiguousarray(each) for each in (logits, ids, masses, draws)]
    addresses = [each.ctypes.data for each in (*arrays, found[0], found[1])]
    _require().llmforge_draw_heads(ctypes.byref(_Heads(rows, width, vocabulary, masses.shape[1], *addresses)))
    return found[0], found[1]


def draw_block(logits: NDArray[np.float32], best: float, least: float, draw: NDArray[np.void]) -> int:
    """Draw one of `logits` [n] that are at most `least`: its number; -1: one is NaN, or none has any weight.

    `best`: the largest of the row; `draw`: [1] of `DRAW`, with the token's first random number.
    """
    values = np.ascontiguousarray(logits)
    return int(_require().llmforge_draw_block(values.ctypes.data, len(values), best, least, draw.ctypes.data))


def draw_row(
    logits: NDArray[np.float32],
    block: int,
    draw: tuple[float, float, int, float, float],
    head: tuple[NDArray[np.float32], NDArray[np.int32], NDArray[np.float32]] | None = None,
) -> int:
    """Draw a token from `logits` [V], summed in blocks of `block`, which are finite or -inf, not all of them -inf.

    `draw`: the fields of `DRAW`; `head`: logits and ids, [256] each, of the row's head, and its masses [blocks].

    Raises:
        MemoryError: there is none for a copy of the row.
    """
    values = np.ascontiguousarray(logits)
    parts = [np.ascontiguousarray(each) for each in head or ()]
    addresses: list[int | None] = [each.ctypes.data for each in parts] or [None, None, None]
    token = int(
        _require().llmforge_draw_row(ctypes.byref(_Row(len(values), block, values.ctypes.data, *addresses, *draw)))
    )
    if token < 0:
        raise MemoryError(f"a row of {len(values)} logits")
    return token


def largest(values: NDArray[np.float32], count: int) -> NDArray[np.int64]:
    """Give the indices of the `count` largest of `values` [n], largest first, lower indices first among equals.

    There are fewer where fewer are above -inf.

    Raises:
        MemoryError: there is none for a copy of the values.
    """
    taken, found = np.ascontiguousarray(values), np.empty(min(count, len(values)), np.int64)
    number = _require().llmforge_largest(taken.ctypes.data, len(taken), len(found), found.ctypes.data)
    if number < 0:
        raise MemoryError(f"a row of {len(taken)} numbers")
    return found[:number]


def sum_exponentials(values: NDArray[np.float32], best: float) -> float:
    """Sum e^(x - best) over `values` [n], of which `best` is the largest."""
    taken = np.ascontiguousarray(values)
    return float(_require().llmforge_sum_exponentials(taken.ctypes.data, len(taken), best))


def _require() -> ctypes.PyDLL:
    library = _library()
    assert library is not None, "the kernels are not compiled here"
    return library
