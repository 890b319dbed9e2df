"""Matrices of integer codes in groups of input features: GPTQ, AWQ and compressed-tensors, each packed its own way.

    weight[n, k] = (code[n, k] - zero_point[n, g]) · scale[n, g],  g the group of input feature k

Tools compute the difference in integers, or in a float dtype that holds it, and round the product to the dtype of the
scales: fp32 in between gives the same bits.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from llmforge.base.errors import CheckpointError
from llmforge.base.wording import shown
from llmforge.checkpoint.quantized.layout import CHUNK_BYTES, QuantizedTensor
from llmforge.checkpoint.safetensors_file import DAMAGED, TensorEntry, damaged
from llmforge.quantization.grid import SMALLEST_BLOCK, Grid, Scale
from llmforge.quantization.grids import QuantizedMatrix, unpack_bits
from llmforge.quantization.stored import StoredChannels, UnrepresentableCodes

WORD_BITS = 32
INPUT_SCALE = "input_scale"  # role of the static step of what a layer reads
LARGEST_BLOCK = 128  # of input features: a larger group is held as several blocks with one scale
_HELD = {2: 4, 7: 8}  # bits for which there is no grid, and those that hold the same codes
FLOATS = ("FLOAT", "FLOAT16", "BFLOAT16")  # of scales


@dataclass(frozen=True, eq=False)
class Integers(QuantizedTensor):
    """A matrix [N, K] of codes of `bits` bits, as a subclass unpacks them."""

    bits: int
    groups: int  # of input features, that share a scale of each output feature

    @abstractmethod
    def unpacked(self, rows: slice) -> NDArray[np.uint8]:
        """Return the codes of some output features, [n, K]; `rows` begins at a multiple of 32."""

    @abstractmethod
    def scales(self) -> NDArray[Any]:
        """Return the scales [N, groups], in `dtype`."""

    @abstractmethod
    def zero_points(self) -> NDArray[np.uint8] | None:
        """Return the zero points [N, groups]; None: all are 2**(bits - 1)."""

    def group_of(self) -> NDArray[np.intp]:
        """Return the group of each input feature, [K]; here: neighbours, as many in each, perhaps fewer in the last."""
        k = self.shape[1]
        return np.arange(k) // self.group_size

    def _named_groups(self, groups: NDArray[np.intp]) -> NDArray[np.intp]:
        """Return what stands in g_idx, if all of that are groups."""
        wrong = np.flatnonzero((groups < 0) | (groups >= self.groups))
        if wrong.size:
            raise self.damaged("g_idx", f"names group {groups[wrong[0]]} at {wrong[0]}; there are {self.groups}")
        return groups

    @property
    def group_size(self) -> int:
        """The input features of a group, as many as the groups take where nothing else is said."""
        return -(-self.shape[1] // self.groups)

    @property
    def format(self) -> str:
        """Bits and groups."""
        kind = "" if "g_idx" not in self.parts else ", with g_idx"
        return f"int{self.bits} {'by channel' if self.groups == 1 else f'in groups of {self.group_size}'}{kind}"

    def dequantize(self) -> NDArray[Any]:
        """Return the weights [N, K]."""
        n, k = self.shape
        scales, zeros = self.scales(), self.zero_points()
        spread = self._spread()
        made = np.empty((n, k), self.dtype.numpy())
        middle = np.float32(1 << (self.bits - 1))
        some = max(1, CHUNK_BYTES // (4 * k * WORD_BITS)) * WORD_BITS
        with np.errstate(over="ignore", invalid="ignore"):
            for at in range(0, n, some):
                part = slice(at, min(at + some, n))
                wide = self.unpacked(part).astype(np.float32)
                by_group = wide if spread is not None else wide.reshape(len(wide), self.groups, -1)
                by_group -= middle if zeros is None else _of(zeros[part], spread)
                by_group *= _of(scales[part], spread)
                made[part] = wide
        role = "scales" if "scales" in self.parts else "weight_scale"
        return self.finite(made, role, f"makes weights of {self.name!r} that are not finite")

    def _spread(self) -> NDArray[np.intp] | None:
        """Return the group of each input feature; None where they are neighbours, as many in each."""
        group_of = self.group_of()
        size, rest = divmod(len(group_of), self.groups)
        in_order = not rest and np.array_equal(group_of, np.arange(len(group_of)) // max(size, 1))
        return None if in_order else group_of

    def grid(self) -> Grid:
        """Return the grid of the codes as they are, symmetric where all zero points are in the middle."""
        return self._grid(self._sorted(), self.zero_points())

    def codes(self) -> QuantizedMatrix:
        """Return codes, scales and zero points; a scale of 0, which no grid has, is 1 over codes at the zero point."""
        groups, zeros = self._sorted(), self.zero_points()
        grid = self._grid(groups, zeros)
        n, k = self.shape
        of_block = groups[:: grid.block_size]
        codes = np.empty((n, k), np.uint8)
        columns = self.columns()
        some = max(1, CHUNK_BYTES // (4 * k * WORD_BITS)) * WORD_BITS
        for at in range(0, n, some):
            part = slice(at, min(at + some, n))
            codes[part] = self.unpacked(part) if columns is None else self.unpacked(part)[:, columns]
        scales = self.scales().astype(np.float32)[:, of_block]
        points = np.full(scales.shape, 1 << (self.bits - 1), np.uint8) if zeros is None else zeros[:, of_block]
        if (scales == 0).any():
            nothing = np.repeat(scales == 0, grid.block_size, axis=1)[:, :k]
            codes = np.where(nothing, np.repeat(points, grid.block_size, axis=1)[:, :k], codes)
            scales = np.where(scales == 0, np.float32(1), scales)
        return QuantizedMatrix(grid, codes, np.ascontiguousarray(scales), None if grid.symmetric else points)

    def channels(self) -> StoredChannels:
        """Return codes of 8 bits by channel, around 0 where all zero points are in the middle."""
        zeros, middle = self.zero_points(), 1 << (self.bits - 1)
        if self.bits != 8 or self.groups != 1:
            return super().channels()
        if zeros is not None and not (zeros == middle).all():
            raise UnrepresentableCodes("have zero points")

        def codes() -> NDArray[np.int8]:
            around = self.unpacked(slice(0, self.shape[0])) ^ np.uint8(middle)
            return around.view(np.int8)

        scales = self.scales().astype(np.float32).reshape(self.shape[0])
        return self.in_channels("int8", codes, scales, self.number(INPUT_SCALE))

    def columns(self) -> NDArray[np.intp] | None:
        """Return the input features group by group; None where they are so already."""
        group_of = self.group_of()
        if (np.diff(group_of) >= 0).all():
            return None
        return np.argsort(group_of, kind="stable")

    def _sorted(self) -> NDArray[np.intp]:
        return np.sort(self.group_of())

    def _grid(self, groups: NDArray[np.intp], zeros: NDArray[np.uint8] | None) -> Grid:
        """Find the largest block that no border between `groups` [K], which are sorted, divides."""
        bits = _HELD.get(self.bits, self.bits)
        borders = (np.flatnonzero(np.diff(groups)) + 1).tolist()
        k = self.shape[1]
        block = math.gcd(LARGEST_BLOCK, *borders) if borders else math.gcd(LARGEST_BLOCK, k)
        if not borders and block < SMALLEST_BLOCK:
            block = min(LARGEST_BLOCK, max(SMALLEST_BLOCK, 1 << (k - 1).bit_length()))
        if block < SMALLEST_BLOCK:
            raise UnrepresentableCodes(
                f"are {self.format}, whose groups do not begin at multiples of {SMALLEST_BLOCK}, the smallest block"
            )
        middle = zeros is None or bool((zeros == 1 << (self.bits - 1)).all())
        scale: Scale = "fp16" if self.dtype.name == "FLOAT16" else "fp32"
        return Grid(bits, block, middle and bits == self.bits, scale)


def _of(groups: NDArray[Any], spread: NDArray[np.intp] | None) -> NDArray[np.float32]:
    """Give what groups [n, groups] have to each input feature [n, K], or to broadcast along those of each group."""
    wide = groups.astype(np.float32)
    return wide[..., None] if spread is None else wide[:, spread]


def grid_of(bits: int, group_size: int, *, symmetric: bool) -> Grid | None:
    """Guess the grid of codes in groups, -1: by channel, that lie in order; None: no grid holds them."""
    block = LARGEST_BLOCK if group_size == -1 else math.gcd(LARGEST_BLOCK, group_size)
    held = _HELD.get(bits, bits)
    return None if block < SMALLEST_BLOCK else Grid(held, block, symmetric and held == bits, "fp16")


def said_groups(config: Mapping[str, Any], otherwise: int, where: Path) -> str:
    """Say how input features are grouped: by `group_size`, or `otherwise`.

    Raises:
        CheckpointError: that is no size.
    """
    size = config.get("group_size", otherwise)
    if type(size) is not int or (size < 1 and size != -1):
        raise CheckpointError(
            f"{where}: quantization_config.group_size is {shown(size)}; it must be -1 or at least 1", hint=DAMAGED
        )
    return "by channel" if size == -1 else f"in groups of {size}"


def along_rows(words: NDArray[np.int32], bits: int, count: int) -> NDArray[np.uint8]:
    """Unpack rows of 32-bit words [N, W] to `count` codes each, the first in the lowest bits; codes may span words."""
    return unpack_bits(np.ascontiguousarray(words, "<i4").view(np.uint8), bits, count)


def along_columns(words: NDArray[np.int32], bits: int, count: int) -> NDArray[np.uint8]:
    """Unpack columns of 32-bit words [W, N] to `count` codes each: [N, count]."""
    return along_rows(np.ascontiguousarray(words.T), bits, count)


def modules(stored: Mapping[str, TensorEntry], suffix: str) -> list[str]:
    """Name the modules that have a tensor called `suffix`."""
    end = f".{suffix}"
    return [name.removesuffix(end) for name in stored if name.endswith(end)]


def part(stored: Mapping[str, TensorEntry], name: str, dtypes: Sequence[str], rank: int = 2) -> TensorEntry:
    """Return a tensor that a layout needs.

    Raises:
        CheckpointError: there is none, or one of another dtype or rank, or an empty one.
    """
    entry = stored.get(name)
    if entry is None:
        near = next((other.file for key, other in stored.items() if key.rpartition(".")[0] == name.rpartition(".")[0]))
        raise CheckpointError(
            f"{near}: {name!r} is missing, which belongs to {name.rpartition('.')[0]!r}", hint=DAMAGED
        )
    where = f"{entry.file}: tensor {name!r}"
    if entry.dtype.name not in dtypes:
        raise CheckpointError(f"{where} is {entry.dtype.name}; it must be {' or '.join(dtypes)}", hint=DAMAGED)
    if len(entry.shape) != rank or 0 in entry.shape:
        raise CheckpointError(f"{where} has shape {list(entry.shape)}; it must have {rank} axes", hint=DAMAGED)
    return entry


def require_shape(entry: TensorEntry, shape: tuple[int, ...], because: str) -> None:
    """Return if a part has the shape that others demand.

    Raises:
        CheckpointError: it has another.
    """
    if entry.shape != shape:
        raise damaged(entry, f"has shape {list(entry.shape)}; {because} make it {list(shape)}")
