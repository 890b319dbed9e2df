"""Cases for kernels_driver.c, which runs the kernels without ONNX Runtime, and what plain arithmetic gives."""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from llmforge.quantization import cpu_layout, grids, kv_cache
from llmforge.quantization.formats import SlotFormat
from llmforge.quantization.grid import Grid
from llmforge.quantization.grids import QuantizedMatrix
from llmforge.quantization.initializers import arrange
from llmforge.rewrite.cpu_linear import SCALES

Array = NDArray[Any]
LINEAR, EMBEDDING, ATTENTION, ROUND, PACK, SLOTS = range(6)
STORED = (np.dtype(np.float32), np.dtype(np.float16), np.dtype(ml_dtypes.bfloat16))

SLOT_FORMATS = (
    SlotFormat("int8", "channel"),
    SlotFormat("int8", "tensor"),
    SlotFormat("int8", "token"),
    SlotFormat("int8", "token", hadamard=True),
    SlotFormat("int4", "token"),
    SlotFormat("int4", "token", hadamard=True),
)
KV_FORMATS = tuple(
    (keys, values)
    for keys in SLOT_FORMATS
    for values in SLOT_FORMATS
    if not (keys.portable and values.portable) and {keys.scale, values.scale} != {"channel", "tensor"}
)


def slot_number(form: SlotFormat) -> int:
    """SLOT_* of native/kernels.h."""
    return 0 if form.portable else 2 if form.dtype == "int4" else 1


FORMATS = tuple(
    Grid(bits, block_size, symmetric, scale, trellis)
    for bits in (3, 4, 5, 6, 8)
    for block_size in (32, 128)
    for symmetric in (True, False)
    for scale in ("fp32", "fp16", "int8")
    for trellis in (False, True)
    if not trellis or (bits in (4, 5) and symmetric)
) + tuple(
    Grid(bits, block_size, symmetric, scale, minimums=not symmetric)
    for bits in (3, 4, 5, 6, 8)
    for block_size in (16, 32, 128)
    for scale in ("fp32", "fp16", "int8")
    for symmetric in (True, False)
    if (symmetric and block_size == 16) or not (symmetric or scale == "int8")
)  # fmt: skip


@dataclass(frozen=True, eq=False)
class Case:
    """One run of a kernel: `wanted` are its results, and how far another may be from them, in their deviations.

    tolerance: 0: each result has these bits.  exact: every instruction set gives the bits of plain C.
    """

    name: str
    kind: int
    numbers: Sequence[int]
    arrays: Sequence[Array | None]
    wanted: Sequence[Array]
    tolerance: float
    exact: bool


def write(cases: Sequence[Case], path: Path) -> None:
    """Write what kernels_driver.c reads."""
    with path.open("wb") as file:
        for case in cases:
            file.write(struct.pack(f"<qq{len(case.numbers)}q", case.kind, len(case.numbers), *case.numbers))
            file.write(struct.pack("<q", len(case.arrays)))
            for array in case.arrays:
                file.write(struct.pack("<q", -1 if array is None else array.nbytes))
                file.write(b"" if array is None else array.tobytes())


def read(cases: Sequence[Case], path: Path) -> Iterator[list[Array]]:
    """Read what kernels_driver.c wrote: the results of each case, of the dtypes and shapes of those wanted."""
    data, at = path.read_bytes(), 0
    for case in cases:
        results = []
        for wanted in case.wanted:
            [size] = struct.unpack_from("<q", data, at)
            assert size == wanted.nbytes, case.name
            results.append(np.frombuffer(data[at + 8 : at + 8 + size], wanted.dtype).reshape(wanted.shape))
            at += 8 + size
        yield results
    assert at == len(data)


def any_matrix(rng: np.random.Generator, n: int, k: int, grid: Grid) -> QuantizedMatrix:
    """Make a matrix with codes, scales and zero points of all kinds; a row of the largest codes, one of the least."""
    codes = rng.integers(0, 1 << grid.bits, (n, k)).astype(np.uint8)
    codes[0], codes[1] = grid.top, 0
    scales = grids.stored(rng.standard_normal((n, k // grid.block_size)).astype(np.float32) / 8, grid)
    if grid.minimums:  # of 17 bits of mantissa at most, as in GGUF files: products with codes are exact
        narrow = replace(grid, scale="fp16")
        times = np.float32(1 if grid.scale == "fp16" else 37)
        scales, minima = (
            times * grids.stored(rng.standard_normal(scales.shape).astype(np.float32) / size, narrow) for size in (8, 2)
        )
        return QuantizedMatrix(grid, codes, scales, None, minima)
    points = None if grid.symmetric else rng.integers(0, 1 << grid.bits, scales.shape).astype(np.uint8)
    return QuantizedMatrix(grid, codes, scales, points)


def _weights(matrix: QuantizedMatrix, order: Array | None = None) -> tuple[list[int], Array]:
    (n, k), grid = matrix.shape, matrix.grid
    of = matrix if order is None else grids.rows(matrix, order)
    kinds = [int(grid.zero_points), SCALES[grid.scale], int(grid.trellis), int(grid.minimums)]
    numbers = [n, k, grid.block_size, grid.bits, *kinds]
    return numbers, arrange(of)


def _rounded(x: NDArray[np.float32], block: int) -> NDArray[np.float64]:
    """Round rows to int8 in blocks as the kernels do, to the bit, and back."""
    blocks = x.reshape(len(x), -1, block)
    most = np.abs(blocks).max(-1, keepdims=True)
    inverse = np.divide(np.float32(127), most, out=np.zeros_like(most), where=most > 1e-36)
    values = np.rint(blocks * inverse).astype(np.float64) * (most / np.float32(127))
    return np.asarray(values.reshape(x.shape))


def rounded_twice(x: NDArray[np.float32], block: int) -> NDArray[np.float64]:
    """Round rows to two terms of int8 in blocks as the kernels do, to the bit, and back."""
    blocks = x.reshape(len(x), -1, block)
    most = np.abs(blocks).max(-1, keepdims=True)
    inverse = np.divide(np.float32(127), most, out=np.zeros_like(most), where=most > 1e-36)
    scale = ((most / np.float32(127)).view(np.uint32) & np.uint32(0xFFFFFF00)).view(np.float32)
    first = (np.rint(blocks * inverse) * scale).reshape(x.shape)
    return first.astype(np.float64) + _rounded(x - first, block)


def _read(x: NDArray[np.float32], block: int, terms: int, outliers: float) -> NDArray[np.float64]:
    """Round rows to one term of int8, or to two; with `outliers`, blocks so many times larger than the mean to two."""
    if terms == 2 or outliers == 0:
        return (_rounded if terms == 1 else rounded_twice)(x, block)
    most = np.abs(x.reshape(len(x), -1, block)).max(-1)
    mean = np.cumsum(np.nan_to_num(most), axis=1, dtype=np.float32)[:, -1:] / np.float32(most.shape[1])
    twice = np.repeat(most > np.float32(outliers) * mean, block, axis=1)
    return np.where(twice, rounded_twice(x, block), _rounded(x, block))


def _activations(rng: np.random.Generator, rows: int, k: int) -> NDArray[np.float32]:
    """Rows of normal numbers; the first all alike, so that every product is the largest, the third zeros."""
    x = rng.standard_normal((rows, k)).astype(np.float32)
    x[0] = -3
    x[2:3] = 0
    x[:, 70] *= 20  # an outlier
    return x


def linear(grid: Grid, n: int, k: int, rows: int, pieces: int = 1, terms: int = 1, outliers: float = 0.0) -> Case:
    """A product alone, which every instruction set gives to the bit."""
    rng = np.random.default_rng([n, k, rows])
    matrix, x = any_matrix(rng, n, k, grid), _activations(rng, rows, k)
    numbers, weights = _weights(matrix)
    y = _read(x, grid.block_size, terms, outliers) @ grids.dequantize(matrix).astype(np.float64).T
    arrays = [weights, x, None, None, None, np.array([0, outliers], np.float32)]
    name = f"linear {grid} [{n}, {k}], {rows} rows, {pieces} pieces, {terms} terms, outliers {outliers}"
    return Case(name, LINEAR, [*numbers, 0, rows, pieces, terms], arrays, [y.astype(np.float32)], 2e-6, exact=True)


def spoilt(grid: Grid, k: int = 128, terms: int = 1, outliers: float = 0.0) -> Case:
    """A NaN and an infinity, each of which spoils its row alone; and numbers so small that 127 by them is infinite."""
    rng = np.random.default_rng(11)
    matrix, x = any_matrix(rng, 20, k, grid), rng.standard_normal((9, k)).astype(np.float32)
    x[1, 40], x[7, 3] = np.nan, np.inf
    x[3], x[4] = 1e-38, 1e-37
    x[4, :: grid.block_size] = 127  # whose rest is what is left of the others
    numbers, weights = _weights(matrix)
    with np.errstate(invalid="ignore"):
        y = _read(x, grid.block_size, terms, outliers) @ grids.dequantize(matrix).astype(np.float64).T
    y[[1, 7]] = np.nan
    arrays = [weights, x, None, None, None, np.array([0, outliers], np.float32)]
    name = f"linear of NaN and infinity {grid}, {terms} terms, outliers {outliers}"
    return Case(name, LINEAR, [*numbers, 0, 9, 2, terms], arrays, [y.astype(np.float32)], 2e-6, exact=True)


def layer(grid: Grid, activation: int, rows: int, terms: int = 1, outliers: float = 0.0) -> Case:
    """A layer with all that it takes over: norm, bias, activation, residual."""
    n, k, epsilon = 96, 256, 1e-5
    rng = np.random.default_rng([activation, rows])
    matrix, x = any_matrix(rng, n, k, grid), _activations(rng, rows, k)
    gamma, bias = (1 + rng.standard_normal(k) / 5).astype(np.float32), rng.standard_normal(n).astype(np.float32)
    residual = rng.standard_normal((rows, n // 2 if activation else n)).astype(np.float32)
    normed = x / np.sqrt((x.astype(np.float64) ** 2).mean(-1, keepdims=True) + epsilon) * gamma
    y = (
        _read(normed.astype(np.float32), grid.block_size, terms, outliers)
        @ grids.dequantize(matrix).astype(np.float64).T
        + bias
    )
    order = cpu_layout.alternating(n) if activation else np.arange(n)
    if activation:
        gate, up = np.split(y, 2, axis=1)
        argument = gate if activation == 1 else 2 * np.sqrt(2 / np.pi) * (gate + 0.044715 * gate**3)
        y = gate / (1 + np.exp(-np.clip(argument, -87, 88))) * up
    numbers, weights = _weights(matrix, order)
    arrays = [weights, x, gamma, bias[order], residual, np.array([epsilon, outliers], np.float32)]
    wanted = (y + residual).astype(np.float32)
    name = f"layer {grid}, activation {activation}, {rows} rows, {terms} terms, outliers {outliers}"
    # A value on the border between two integers may be rounded to either: 1 % of a deviation.
    return Case(name, LINEAR, [*numbers, activation, rows, 3, terms], arrays, [wanted], 1e-2, exact=False)


def embedding(grid: Grid, n: int, k: int) -> Case:
    """All rows of a matrix."""
    matrix = any_matrix(np.random.default_rng([n, k]), n, k, grid)
    numbers, weights = _weights(matrix)
    return Case(f"embedding {grid}", EMBEDDING, numbers, [weights], [grids.dequantize(matrix)], 0, exact=True)


def attention(
    heads: int, kv_heads: int, dim: int, sequence: int, pasts: Sequence[int], *, int8: bool = False,
    per_channel: bool = False, rotary: bool = True, interleaved: bool = False, window: int = 0, softcap: float = 0.0,
    sink: bool = False, norms: bool = False, spare: int = 0, piece: int = 64, full: bool = False, wrong: float = 1.0,
) -> Case:  # fmt: skip
    """A step of `sequence` tokens behind `pasts` in each row; `spare` tokens of the cache stay empty.

    `full`: all queries are alike, all keys and values at their least, so that sums of products are as large as can be.
    One number of the first query is `wrong`.
    """
    rng = np.random.default_rng([heads, dim, sequence])
    batch, capacity, epsilon = len(pasts), max(pasts) + sequence + spare, 1e-5
    qkv = rng.standard_normal((batch, sequence, (heads + 2 * kv_heads) * dim)).astype(np.float32)
    angles = np.arange(capacity)[:, None] / 10000 ** (np.arange(dim // 2) / (dim // 2))
    cosine, sine = (np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)) if rotary else (None, None)
    shape = (kv_heads, dim) if per_channel else (1, 1)
    of_keys, of_values = ((rng.random(shape) * 0.01 + 0.02).astype(np.float32) for _ in range(2))
    cache = rng.standard_normal((2, batch, kv_heads, capacity, dim))
    cache = np.clip(np.rint(cache * 40), -128, 127).astype(np.int8) if int8 else cache.astype(np.float32)
    if full:
        qkv[..., : heads * dim], qkv[..., heads * dim :], cache[:] = 1, -10, -128
    qkv[0, 0, 1] = wrong
    gammas = [(1 + rng.standard_normal(dim) / 5).astype(np.float32) if norms else None for _ in range(2)]
    sinks = rng.standard_normal(heads).astype(np.float32) if sink else None
    constants = np.array([epsilon, dim**-0.5, softcap], np.float32)

    def normed(x: Array, gamma: Array | None) -> Array:
        if gamma is None:
            return x
        return np.asarray(x / np.sqrt((x**2).mean(-1, keepdims=True) + np.float64(epsilon)) * gamma)

    def rotated(x: Array, positions: Array) -> Array:
        if cosine is None or sine is None:
            return x
        c, s = cosine[positions][:, None], sine[positions][:, None]
        left, right = (x[..., ::2], x[..., 1::2]) if interleaved else np.split(x, 2, axis=-1)
        turned = (left * c - right * s, left * s + right * c)
        return np.stack(turned, -1).reshape(x.shape) if interleaved else np.concatenate(turned, -1)

    def stored(x: Array, scale: Array) -> Array:
        return np.clip(np.rint(x / scale[None]), -128, 127) if int8 else x

    y, kept = np.empty((batch, sequence, heads, dim)), cache.copy()
    for row, past in enumerate(pasts):
        positions = np.arange(past, past + sequence)
        of_row = qkv[row].reshape(sequence, -1, dim).astype(np.float64)
        query, key, value = np.split(of_row, [heads, heads + kv_heads], axis=1)
        query = rotated(normed(query, gammas[0]), positions)
        key = stored(rotated(normed(key, gammas[1]), positions), of_keys)
        kept[0, row, :, positions] = key
        kept[1, row, :, positions] = stored(value, of_values)
        for head in range(heads):
            of = head * kv_heads // heads
            scales = [np.broadcast_to(s, (kv_heads, dim))[of].astype(np.float64) for s in (of_keys, of_values)]
            keys, values = (kept[i, row, of, : past + sequence] * (scales[i] if int8 else 1.0) for i in range(2))
            scores = query[:, head] @ keys.T * float(constants[1])
            scores = np.tanh(scores / softcap) * softcap if softcap else scores
            distance = positions[:, None] - np.arange(past + sequence)
            scores[(distance < 0) | ((window > 0) & (distance >= window))] = -np.inf
            most = scores.max(-1, keepdims=True)
            with np.errstate(invalid="ignore"):  # infinity less infinity
                weights = np.exp(scores - most)
            total = weights.sum(-1, keepdims=True) + (np.exp(sinks[head] - most) if sinks is not None else 0)
            y[row, :, head] = weights / total @ values
    numbers = [batch, sequence, heads, kv_heads, dim, capacity, int8, dim if rotary else 0, interleaved, per_channel]
    lengths = (np.array(pasts) + sequence - 1).astype(np.int32)
    scales8 = [of_keys, of_values] if int8 else [None, None]
    arrays = [qkv, lengths, cache[0], cache[1], cosine, sine, *scales8, *gammas, sinks, constants]
    name = f"attention {heads}/{kv_heads} of {dim}, {sequence} behind {list(pasts)}, int8 {int8}, window {window}"
    wanted = [y.astype(np.float32), kept[0], kept[1]]
    # An int8 key on the border between two integers may be rounded to either.
    return Case(
        name, ATTENTION, [*map(int, numbers), window, piece], arrays, wanted, 1e-3 if int8 else 5e-5, exact=False
    )


def slots(
    keys: SlotFormat, values: SlotFormat, heads: int, kv_heads: int, dim: int, sequence: int, pasts: Sequence[int], *,
    window: int = 0, softcap: float = 0.0, sink: bool = False, piece: int = 64, caches: bool = False,
) -> Case:  # fmt: skip
    """A step over caches of slots; `caches`: what it writes there, which every instruction set gives to the bit."""
    rng = np.random.default_rng([heads, dim, sequence])
    batch, capacity = len(pasts), max(pasts) + sequence + 3
    qkv = rng.standard_normal((batch, sequence, heads + 2 * kv_heads, dim)).astype(np.float32)
    if caches:
        qkv[:, ::3] *= np.float32(1e-3)
        qkv[:, 1::5, :, : dim // 8] *= np.float32(40)
        qkv[:, 2::7, heads:] = 0
    shape = (kv_heads, 1, dim) if "channel" in (keys.scale, values.scale) else (1, 1, 1)
    static = [(rng.random(shape) * 0.01 + 0.03).astype(np.float32) if own.portable else None for own in (keys, values)]
    made = rng.standard_normal((2, batch, kv_heads, capacity, dim)).astype(np.float32)
    stored = [kv_cache.write(made[i], form, static[i]) for i, form in enumerate((keys, values))]
    before = [cache.copy() for cache in stored]
    sinks = rng.standard_normal(heads).astype(np.float32) if sink else None
    constants = np.array([0, dim**-0.5, softcap], np.float32)
    y = np.empty((batch, sequence, heads, dim))
    for row, past in enumerate(pasts):
        new = np.split(qkv[row].transpose(1, 0, 2), [heads, heads + kv_heads])
        read = []
        for i, form in enumerate((keys, values)):
            stored[i][row, :, past : past + sequence] = kv_cache.write(new[1 + i], form, static[i])
            held = kv_cache.read(stored[i][row, :, : past + sequence], form, dim, static[i])
            read.append(held.astype(np.float64))
        distance = np.arange(past, past + sequence)[:, None] - np.arange(past + sequence)
        for head in range(heads):
            of = head * kv_heads // heads
            scores = new[0][head].astype(np.float64) @ read[0][of].T * float(constants[1])
            scores = np.tanh(scores / softcap) * softcap if softcap else scores
            scores[(distance < 0) | ((window > 0) & (distance >= window))] = -np.inf
            most = scores.max(-1, keepdims=True)
            weights = np.exp(scores - most)
            total = weights.sum(-1, keepdims=True) + (np.exp(sinks[head] - most) if sinks is not None else 0)
            y[row, :, head] = weights / total @ read[1][of]
    numbers = [
        batch,
        sequence,
        heads,
        kv_heads,
        dim,
        capacity,
        1,
        0,
        0,
        "channel" in (keys.scale, values.scale),
        window,
    ]
    numbers += [piece, slot_number(keys), slot_number(values), keys.hadamard, values.hadamard, caches]
    lengths = (np.array(pasts) + sequence - 1).astype(np.int32)
    arrays = [qkv, lengths, *before, None, None, *static, None, None, sinks, constants]
    wanted = stored if caches else [y.astype(np.float32)]
    name = f"slots {keys.name} {values.name} {heads}/{kv_heads} of {dim}, {sequence} behind {list(pasts)}"
    tolerance = 0 if caches else 1e-4
    return Case(name, SLOTS, [*map(int, numbers)], arrays, wanted, tolerance, exact=caches)


def rounding(dtype: np.dtype[Any], grid: Grid, n: int, k: int) -> Case:
    """Rounding to the nearest, of numbers of all magnitudes, ties and zeros of both signs."""
    rng = np.random.default_rng([n, k])
    weight = rng.integers(0, 1 << 8 * dtype.itemsize, (n, k), np.uint64).astype(f"u{dtype.itemsize}").view(dtype)
    weight[~np.isfinite(weight.astype(np.float32))] = 0
    weight[::4] = rng.standard_normal((n, k))[::4].astype(dtype)
    weight[1::8] = rng.choice([-1.0, 1.0, -0.0, 0.0, 0.5], (n, k))[1::8].astype(dtype)
    weight[2::8] = (rng.integers(-15, 16, (n, k))[2::8] / 2).astype(dtype)
    matrix = grids._round_in_numpy(weight, grid)
    zeros = np.zeros(0, np.uint8) if matrix.zero_points is None else matrix.zero_points
    numbers = [n, k, grid.block_size, STORED.index(dtype), grid.bits, int(not grid.symmetric)]
    wanted = [np.ones(1, np.uint8), matrix.codes, matrix.scales, zeros]
    return Case(f"rounding {dtype} {grid} [{n}, {k}]", ROUND, numbers, [weight], wanted, 0, exact=True)


def not_finite(dtype: np.dtype[Any], wrong: float) -> Case:
    """A matrix that rounding refuses."""
    weight = np.zeros((3, 37), dtype)
    weight[2, 36] = wrong
    empty = np.zeros(0, np.uint8)
    wanted = [np.zeros(1, np.uint8), empty, empty, empty]
    return Case(f"rounding {wrong}", ROUND, [3, 37, 32, STORED.index(dtype), 4, 0], [weight], wanted, 0, exact=True)


def packing(count: int) -> Case:
    """Pairs of codes in bytes."""
    codes = np.random.default_rng(count).integers(0, 16, 2 * count, np.uint8)
    return Case(f"packing {count}", PACK, [], [codes], [codes[::2] | codes[1::2] << np.uint8(4)], 0, exact=True)


def every(rows: Sequence[int]) -> list[Case]:
    """All cases; the products of each format with each number of `rows`."""
    cases = [linear(grid, 35, 384, m) for grid in FORMATS for m in rows]  # 35, 384: neither group nor superblock full
    cases += [linear(grid, 100, 640, 7, pieces=3) for grid in FORMATS[::5]]
    cases += [linear(Grid(bits, 32, False, "int8"), 1 + bits, 32 * bits, 13) for bits in (3, 5)]
    cases += [linear(grid, 35, 384, m, terms=2) for grid in FORMATS[::4] for m in (1, 5, 13)]
    cases += [linear(grid, 100, 640, 7, pieces=3, terms=2) for grid in FORMATS[::9]]
    cases += [spoilt(grid) for grid in FORMATS[::7]] + [spoilt(FORMATS[1], terms=2)]
    cases += [layer(FORMATS[0], a, m, terms=2) for a, m in ((0, 1), (1, 9), (2, 15))]
    cases += [linear(grid, 35, 384, m, outliers=1.5) for grid in FORMATS[::3] for m in (1, 5, 13)]
    cases += [linear(grid, 100, 4096, 7, pieces=3, outliers=1.05) for grid in FORMATS[::9]]  # more than 64 blocks
    cases += [spoilt(FORMATS[1], outliers=1.2), layer(FORMATS[0], 1, 9, outliers=1.5)]
    cases += [layer(grid, a, m) for grid in FORMATS[::9] for a, m in ((0, 1), (1, 2), (1, 9), (2, 1), (2, 15))]
    cases += [embedding(grid, 35, 384) for grid in FORMATS]
    for int8 in (False, True):
        cases += [
            attention(4, 2, 32, 1, [0, 5, 130], int8=int8, per_channel=True),
            attention(6, 2, 48, 9, [40], int8=int8, window=40, norms=True),
            attention(4, 4, 64, 3, [7], int8=int8, interleaved=True, spare=3),
            attention(8, 2, 128, 70, [150, 3], int8=int8, per_channel=True, spare=1, norms=True),
            attention(8, 1, 64, 40, [0], int8=int8, rotary=False, softcap=20.0, sink=True, piece=17),
            attention(5, 1, 80, 12, [250], int8=int8, sink=True, window=60),
            attention(5, 1, 80, 1, [250], int8=int8, sink=True, window=60),
        ]
    for keys, values in KV_FORMATS:
        cases += [
            slots(keys, values, 4, 2, 32, 1, [0, 5, 130]),
            slots(keys, values, 6, 2, 64, 9, [40], window=30),
            slots(keys, values, 5, 1, 128, 70, [150], piece=17, sink=True),
        ]
    cases += [slots(k, v, 3, 3, 96, m, [7], softcap=20.0) for k, v in KV_FORMATS for m in (1, 20)]
    cases += [slots(k, v, 2, 2, dim, 33, [2, 0], caches=True) for k, v in KV_FORMATS for dim in (32, 256)]
    cases += [
        attention(6, 2, 96, 2, [1025, 600], int8=True, per_channel=True, norms=True),
        attention(16, 8, 128, 1, [700] * 3, int8=True, per_channel=True),
        attention(4, 1, 512, 1, [1100], int8=True, rotary=False, full=True),
        attention(3, 1, 1024, 1, [512], int8=True, rotary=False, full=True),
        attention(4, 1, 64, 1, [30], int8=True, rotary=False, wrong=np.nan),
        attention(4, 1, 64, 1, [30], int8=True, rotary=False, wrong=np.inf),
    ]
    grids_of = [
        Grid(bits, size, symmetric) for bits in (3, 4, 5, 6, 8) for size in (16, 64) for symmetric in (True, False)
    ]
    cases += [rounding(t, grid, 24, k) for t in STORED for grid in grids_of for k in (1, 131)]
    cases += [not_finite(t, wrong) for t in STORED for wrong in (np.nan, -np.inf)]
    return cases + [packing(count) for count in (1, 31, 64, 131)]
