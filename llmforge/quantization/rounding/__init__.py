"""The compiled loops that choose codes column by column (rounding.inc): errors moved on from one to the next,
coordinate descent, grids refitted between.

Rows are independent, so that codes depend neither on the number of threads nor on what else stands in the matrix.
"""

from __future__ import annotations

import ctypes
from functools import cache
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from llmforge.base.errors import EnvironmentLacks
from llmforge.quantization.formats import SUPERBLOCK
from llmforge.quantization.grid import Grid
from llmforge.quantization.grids import Float32, QuantizedMatrix, assemble

VERSION = 9  # of the functions and their arguments, as rounding.c says it
TILE = 32  # rows that are rounded side by side (rounding.h)
# as rounding.h counts them
_STORAGE = {"fp32": 0, "fp16": 1, "bf16": 2, "int8": 3, "int6-fp16": 4, "int8-fp16": 5, "int4-fp16": 6}
_INTEGERS = ("n", "k", "block", "superblock")
_NUMBERS = ("bits", "symmetric", "storage", "steps", "sweeps", "held", "trellis", "minima", "codebook")
_ARRAYS = (
    *("target", "order", "hessian", "lower", "mean", "feedback"),
    *("weight", "codes", "scales", "zeros", "minimums", "errors"),
)


class _RoundingJob(ctypes.Structure):
    """`Rounding` of rounding.h."""

    _fields_ = (
        *((name, ctypes.c_int64) for name in _INTEGERS),
        *((name, ctypes.c_int32) for name in _NUMBERS),
        *((name, ctypes.c_void_p) for name in (*_ARRAYS, "columns", "inner")),
    )


def place() -> Path | None:
    """Find the compiled loops; None: llmforge was installed without a C compiler."""
    folder = Path(__file__).parent
    return next((path for suffix in EXTENSION_SUFFIXES if (path := folder / f"_rounding{suffix}").exists()), None)


@cache
def _library() -> ctypes.CDLL:
    found = place()
    if found is None:
        raise EnvironmentLacks(
            "the loops that choose codes by calibration are not compiled in this installation",
            hint="install a C compiler (gcc or clang), then install llmforge again",
        )
    library = ctypes.CDLL(str(found))
    if getattr(library, "llmforge_rounding_version", int)() != VERSION:
        raise EnvironmentLacks(f"{found.name} was compiled from other sources", hint="install llmforge again")
    return library


def _zero(grid: Grid) -> int:
    """Return the zero point of codes that have none of their own; levels of a trellis or codebook are as they are."""
    return 0 if grid.trellis or grid.codebook else grid.middle


class OrderedColumns(NamedTuple):
    """The columns of a weight as they are rounded, and their curvature in that order."""

    order: NDArray[np.int32]  # [K]
    hessian: Float32  # [K, K]
    lower: Float32  # [K, K], the lower triangle Rᵀ with RᵀR = H⁻¹


class ChannelColumns(NamedTuple):
    """The columns of a weight as they are rounded, where of their curvature D + mean·meanᵀ is known, D diagonal."""

    order: NDArray[np.int32]  # [K]
    diagonal: Float32  # [K], of the whole, in that order as are those below
    mean: Float32  # [K]
    feedback: Float32  # [K]: by how much Σ mean·error of the columns before moves a column's target


def choose(
    target: Float32,
    columns: OrderedColumns | ChannelColumns,
    grid: Grid,
    *,
    steps: int,
    sweeps: int,
    start: QuantizedMatrix | None = None,
    with_errors: bool = False,
    threads: int = 1,
) -> tuple[QuantizedMatrix, Float32]:
    """Choose scales, zero points and codes for `target` [N, K]; return also the errors, `target` less its codes.

    `steps` ranges are tried for each block, from 1.1 to 0.5 of its own, with 5 bits and more from 1.05 to 0.75 (0: its
    own alone), weighted with the diagonal of the Hessian; then come `sweeps` of refitting scale and zero point of each
    block and of coordinate descent, none of which raises the error. Scales are such as the grid stores. With `start` no
    grid is searched: its scales and zero points are the first. Rows of a trellis are rounded by 16, from the first on.
    With `ChannelColumns` errors move by the mean alone, and there are no sweeps.
    Errors are [N, K], or [0, K] where they are not asked for.

    Raises:
        EnvironmentLacks: llmforge was installed without a C compiler.
        MemoryError: there is no memory for a tile of rows.
    """
    n, k = target.shape
    blocks = grid.blocks(k)
    weight = np.empty(k, np.float32)
    if isinstance(columns, OrderedColumns):
        square, channels = (k, k), (0,)
        weight[columns.order] = columns.hessian.diagonal()
    else:
        assert sweeps == 0
        square, channels = (0, 0), (k,)
        weight[columns.order] = columns.diagonal
    known = {name: np.ascontiguousarray(array, np.float32) for name, array in columns._asdict().items()}
    arrays: dict[str, NDArray[Any]] = {
        "target": np.ascontiguousarray(target, np.float32),
        "order": np.ascontiguousarray(columns.order, np.int32),
        "hessian": known.get("hessian", np.empty((0, 0), np.float32)),
        "lower": known.get("lower", np.empty((0, 0), np.float32)),
        "mean": known.get("mean", np.empty(0, np.float32)),
        "feedback": known.get("feedback", np.empty(0, np.float32)),
        "weight": weight,
        "codes": np.empty((n, k), np.uint8),
        "scales": np.empty((n, blocks), np.float32),
        "zeros": np.empty((n, blocks), np.uint8),
        "minimums": np.empty((n, blocks if grid.minimums else 0), np.float32),
        "errors": np.empty((n if with_errors else 0, k), np.float32),
    }
    if start is not None:
        assert start.grid == grid
        assert start.scales.shape == (n, blocks)
        arrays["scales"] = start.scales.copy()
        zeros = start.zero_points
        if start.minimums is not None:
            arrays["minimums"] = start.minimums.copy()
        arrays["zeros"] = np.full((n, blocks), _zero(grid), np.uint8) if zeros is None else zeros.copy()
    assert arrays["order"].shape == (k,)
    assert arrays["hessian"].shape == arrays["lower"].shape == square
    assert arrays["mean"].shape == arrays["feedback"].shape == channels
    numbers = (
        *(grid.bits, grid.symmetric, _STORAGE[grid.scale], steps, sweeps, start is not None),
        *(grid.trellis, grid.minimums, grid.codebook),
    )
    places = {name: array.ctypes.data if array.size else None for name, array in arrays.items()}
    job = _RoundingJob(n, k, grid.block_size, SUPERBLOCK, *numbers, *(places[name] for name in _ARRAYS))
    if _library().llmforge_round(ctypes.byref(job), threads):
        raise MemoryError(f"a weight [{n}, {k}] could not be rounded")
    if grid.minimums:
        return QuantizedMatrix(grid, arrays["codes"], arrays["scales"], None, arrays["minimums"]), arrays["errors"]
    matrix = assemble(grid, arrays["codes"], arrays["scales"], arrays["zeros"].astype(np.float32))
    return matrix, arrays["errors"]
