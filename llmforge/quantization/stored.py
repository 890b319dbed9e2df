"""Matrices that a checkpoint stores as codes already: in which format, and how several become one without rounding."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from llmforge.base.errors import UnsupportedError
from llmforge.quantization.grid import Grid
from llmforge.quantization.grids import QuantizedMatrix, stack


class UnrepresentableCodes(Exception):
    """Why no format of ours holds the codes of a tensor exactly; reads on from "its codes …".

    `is_plain`: because it has none.
    """

    def __init__(self, reason: str, *, is_plain: bool = False) -> None:
        super().__init__(reason)
        self.is_plain = is_plain


@dataclass(frozen=True, eq=False)
class StoredCodes:
    """A matrix [N, K] of a checkpoint on `grid`, read when it is wanted.

    Column i of its codes is that of input feature `columns`[i]; None: they are in their order.
    """

    grid: Grid
    columns: NDArray[np.intp] | None
    read: Callable[[], QuantizedMatrix]


@dataclass(frozen=True, eq=False)
class StoredChannels:
    """A matrix [N, K] of a checkpoint in 8 bits with a scale an output feature, read when it is wanted."""

    dtype: Literal["int8", "fp8"]
    codes: Callable[[], NDArray[Any]]  # [N, K], int8 or float8e4m3fn
    scales: Callable[[], NDArray[np.float32]]  # [N]
    input_scale: float | None  # static step of what the layer reads; None: the checkpoint says none


@dataclass(frozen=True, eq=False)
class StoredFp4:
    """A matrix [N, K] of a checkpoint in NVFP4, read when it is wanted (llmforge.quantization.nvfp4)."""

    codes: Callable[[], NDArray[Any]]  # [N, K], e2m1
    scales: Callable[[], NDArray[Any]]  # of blocks: float8e4m3fn [N, K / 16]
    scale: np.float32  # of the tensor
    input_scale: np.float32 | None  # of what the layer reads; None: the checkpoint says none


class QuantizedSource(Protocol):
    """A checkpoint that comes quantized, by the names of its tensors.

    Each method raises UnrepresentableCodes where no such format is.
    """

    def codes(self, name: str) -> StoredCodes:
        """Return integer codes in blocks of input features."""
        ...

    def channels(self, name: str) -> StoredChannels:
        """Return codes of 8 bits with a scale an output feature."""
        ...

    def fp4(self, name: str) -> StoredFp4:
        """Return codes in NVFP4."""
        ...


@dataclass
class SkippedCodes:
    """Tensors whose codes the pass `step` does not take, by the reason."""

    step: str
    tensors: dict[str, list[str]] = field(default_factory=dict)

    def add(self, tensors: Sequence[str], reason: UnrepresentableCodes) -> None:
        """Note tensors that are one matrix, unless they are no codes."""
        if not reason.is_plain:
            self.tensors.setdefault(str(reason), []).append(", ".join(tensors))

    def notes(self) -> list[str]:
        """Say which there are, a sentence a reason."""
        return [f"{self.step}: {each}; the weights stay dequantized" for each in self._listed()]

    def refuse(self) -> None:
        """Return if there are none.

        Raises:
            UnsupportedError: there are some, and the pass has taken no others.
        """
        if self.tensors:
            raise UnsupportedError(
                f"{self.step}: method: stored can take no codes of this checkpoint: {'; '.join(self._listed())}",
                hint=f"leave {self.step} out, so that weights are dequantized, or quantize them anew with "
                "`requantize: true`",
            )

    def _listed(self) -> list[str]:
        return [
            f"{each[0] if len(each) == 1 else f'{each[0]} and {len(each) - 1} more'}: the codes {reason}"
            for reason, each in self.tensors.items()
        ]


def require(source: QuantizedSource | None, step: str) -> QuantizedSource:
    """Return a checkpoint that comes quantized, which the pass `step` wants.

    Raises:
        UnsupportedError: it does not.
    """
    if source is None:
        raise UnsupportedError(
            f"{step}: method: stored takes the codes of a quantized checkpoint; this one is not",
            hint=f"choose another method: see `llmforge passes {step}`",
        )
    return source


def stack_channels(parts: Sequence[StoredChannels]) -> StoredChannels:
    """Put matrices that read the same on top of each other; the largest step of what they read is that of all.

    Raises:
        UnrepresentableCodes: some are int8 and some fp8.
    """
    if len({part.dtype for part in parts}) > 1:
        raise UnrepresentableCodes("are int8 and fp8 in one matrix; leave out the pass that packs them")
    steps = [part.input_scale for part in parts if part.input_scale is not None]
    return StoredChannels(
        parts[0].dtype,
        lambda: np.concatenate([part.codes() for part in parts]),
        lambda: np.concatenate([part.scales() for part in parts]),
        max(steps) if len(steps) == len(parts) else None,
    )


def stack_fp4(parts: Sequence[StoredFp4]) -> StoredFp4:
    """Put matrices that read the same on top of each other; the largest scale of what they read is that of all.

    Raises:
        UnrepresentableCodes: their tensors have different scales.
    """
    if len({float(part.scale) for part in parts}) > 1:
        raise UnrepresentableCodes("have different scales of tensors in one matrix; leave out the pass that packs them")
    steps = [part.input_scale for part in parts if part.input_scale is not None]
    return StoredFp4(
        lambda: np.concatenate([part.codes() for part in parts]),
        lambda: np.concatenate([part.scales() for part in parts]),
        parts[0].scale,
        max(steps) if len(steps) == len(parts) else None,
    )


def stack_codes(parts: Sequence[StoredCodes]) -> StoredCodes:
    """Put matrices that read the same on top of each other, on the grid that holds the codes of all.

    That has the smallest of their blocks, zero points or minima where one has them, and fp32 scales where one has.
    Minima hold codes of fewer bits as well.

    Raises:
        UnrepresentableCodes: their codes have different bits, or their columns different orders.
    """
    first = parts[0]
    if any(not _same(part.columns, first.columns) for part in parts):
        raise UnrepresentableCodes(
            "have input features in different orders in one matrix; leave out the pass that packs them"
        )
    grid = common(*(part.grid for part in parts))
    return StoredCodes(grid, first.columns, lambda: stack([on_grid(part.read(), grid) for part in parts]))


def common(*grids: Grid) -> Grid:
    """Return the grid that holds what lies on any of `grids`.

    Raises:
        UnrepresentableCodes: they have different bits, and no minima.
    """
    bits, minimums = sorted({grid.bits for grid in grids}), any(grid.minimums for grid in grids)
    if len(bits) > 1 and not minimums:
        raise UnrepresentableCodes(
            f"have {' and '.join(map(str, bits))} bits in one matrix; leave out the pass that packs them"
        )
    return replace(
        grids[0],
        bits=bits[-1],
        block_size=min(grid.block_size for grid in grids),
        symmetric=all(grid.symmetric for grid in grids),
        scale="fp16" if all(grid.scale == "fp16" and grid.minimums == minimums for grid in grids) else "fp32",
        minimums=minimums,
    )


def on_grid(matrix: QuantizedMatrix, grid: Grid) -> QuantizedMatrix:
    """Give a matrix on a grid of blocks that divide its own, and perhaps with zero points, or minima and more bits."""
    times = matrix.grid.block_size // grid.block_size
    blocks = grid.blocks(matrix.shape[1])
    scales = np.repeat(matrix.scales, times, axis=1)[:, :blocks]
    points, minima = None, None
    if not grid.symmetric:
        own = matrix.zero_points
        middle = matrix.grid.middle
        points = np.full(scales.shape, middle, np.uint8) if own is None else np.repeat(own, times, 1)[:, :blocks]
    if grid.minimums and matrix.minimums is not None:
        minima = np.ascontiguousarray(np.repeat(matrix.minimums, times, 1)[:, :blocks])
    elif grid.minimums and points is not None:
        minima = -scales * points  # exact: a stored scale has at most 18 bits of mantissa
    points = points if grid.zero_points else None
    return QuantizedMatrix(grid, matrix.codes, np.ascontiguousarray(scales), points, minima)


def _same(one: NDArray[np.intp] | None, other: NDArray[np.intp] | None) -> bool:
    return np.array_equal(one, other) if one is not None and other is not None else one is other
