"""Blocks of ggml against loops that follow its C code, number by number (`ggml-quants.c`: dequantize_row_*)."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from numpy.typing import NDArray

from llmforge.checkpoint.gguf import blocks

Block = NDArray[np.uint8]
F = np.float32
COUNT = 40
BY_NAME = {kind.name: kind for kind in blocks.TYPES.values()}


def half(block: Block, at: int) -> np.float32:
    return F(block[at : at + 2].copy().view(np.float16)[0])


def nibble(block: Block, start: int, j: int) -> int:
    """Number j of 32 in 16 bytes: the first half of them in the low nibbles."""
    return int(block[start + j] & 15 if j < 16 else block[start + j - 16] >> 4)


def q4_0(b: Block) -> list[np.float32]:
    return [half(b, 0) * F(nibble(b, 2, j) - 8) for j in range(32)]


def q4_1(b: Block) -> list[np.float32]:
    return [F(half(b, 0) * F(nibble(b, 4, j))) + half(b, 2) for j in range(32)]


def fifth(b: Block, at: int, j: int) -> int:
    return (int.from_bytes(b[at : at + 4].tobytes(), "little") >> j & 1) << 4


def q5_0(b: Block) -> list[np.float32]:
    return [half(b, 0) * F((nibble(b, 6, j) | fifth(b, 2, j)) - 16) for j in range(32)]


def q5_1(b: Block) -> list[np.float32]:
    return [F(half(b, 0) * F(nibble(b, 8, j) | fifth(b, 4, j))) + half(b, 2) for j in range(32)]


def q8_0(b: Block) -> list[np.float32]:
    return [half(b, 0) * F(b[2 + j].astype(np.int8)) for j in range(32)]


def iq4_nl(b: Block) -> list[np.float32]:
    levels = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
    return [half(b, 0) * F(levels[nibble(b, 2, j)]) for j in range(32)]


def iq4_xs(b: Block) -> list[np.float32]:
    levels = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
    made, high = [], int(b[2]) | int(b[3]) << 8
    for part in range(8):
        scale = (int(b[4 + part // 2]) >> 4 * (part % 2) & 15) | (high >> 2 * part & 3) << 4
        dl = half(b, 0) * F(scale - 32)
        made += [F(dl * F(levels[nibble(b, 8 + 16 * part, j)])) for j in range(32)]
    return made


def q2_k(b: Block) -> list[np.float32]:
    made, scale = [], 0
    for n in (0, 32):  # 128 numbers at a time
        for shift in (0, 2, 4, 6):
            for first in (0, 16):
                dl, ml = half(b, 80) * F(b[scale] & 15), half(b, 82) * F(b[scale] >> 4)
                scale += 1
                made += [F(dl * F(b[16 + n + first + j] >> shift & 3)) - ml for j in range(16)]
    return made


def q3_k(b: Block) -> list[np.float32]:
    low = [int(x) for x in b[96:108]]
    scales = [
        (low[j] & 15 if j < 8 else low[j - 8] >> 4) | (low[8 + j % 4] >> 2 * (j // 4) & 3) << 4 for j in range(16)
    ]
    made, at, mask = [], 0, 1
    for n in (0, 32):
        for shift in (0, 2, 4, 6):
            for first in (0, 16):
                dl = half(b, 108) * F(scales[at] - 32)
                at += 1
                for j in range(first, first + 16):
                    made.append(dl * F(int(b[32 + n + j] >> shift & 3) - (0 if b[j] & mask else 4)))
            mask <<= 1
    return made


def scale_min(b: Block, j: int) -> tuple[int, int]:
    """get_scale_min_k4."""
    q = [int(x) for x in b[4:16]]
    if j < 4:
        return q[j] & 63, q[j + 4] & 63
    return (q[j + 4] & 15) | (q[j - 4] >> 6) << 4, (q[j + 4] >> 4) | (q[j] >> 6) << 4


def q4_k(b: Block) -> list[np.float32]:
    made = []
    for part in range(8):
        scale, least = scale_min(b, part)
        d, m = half(b, 0) * F(scale), half(b, 2) * F(least)
        start = 16 + part // 2 * 32
        made += [F(d * F(b[start + j] >> 4 * (part % 2) & 15)) - m for j in range(32)]
    return made


def q5_k(b: Block) -> list[np.float32]:
    made = []
    for part in range(8):
        scale, least = scale_min(b, part)
        d, m = half(b, 0) * F(scale), half(b, 2) * F(least)
        start = 48 + part // 2 * 32
        for j in range(32):
            code = int(b[start + j] >> 4 * (part % 2) & 15) + (16 if b[16 + j] >> part & 1 else 0)
            made.append(F(d * F(code)) - m)
    return made


def q6_k(b: Block) -> list[np.float32]:
    made = [F(0)] * 256
    for n in (0, 1):
        ql, qh, scales = b[64 * n :], b[128 + 32 * n :], b[192 + 8 * n :].astype(np.int8)
        for j in range(32):
            for part, (low, shift) in enumerate(
                ((ql[j] & 15, 0), (ql[j + 32] & 15, 2), (ql[j] >> 4, 4), (ql[j + 32] >> 4, 6))
            ):
                code = int(low | (qh[j] >> shift & 3) << 4) - 32
                made[128 * n + 32 * part + j] = F(half(b, 208) * F(scales[j // 16 + 2 * part])) * F(code)
    return made


LOOPS: dict[str, Callable[[Block], list[np.float32]]] = {
    "Q4_0": q4_0, "Q4_1": q4_1, "Q5_0": q5_0, "Q5_1": q5_1, "Q8_0": q8_0, "IQ4_NL": iq4_nl,
    "Q2_K": q2_k, "Q3_K": q3_k, "Q4_K": q4_k, "Q5_K": q5_k, "Q6_K": q6_k, "IQ4_XS": iq4_xs,
}  # fmt: skip
HALVES = {
    "Q2_K": (80, 82),
    "Q3_K": (108,),
    "Q4_K": (0, 2),
    "Q5_K": (0, 2),
    "Q6_K": (208,),
    "Q4_1": (0, 2),
    "Q5_1": (0, 2),
}


def drawn(name: str) -> Block:
    """Blocks of random bits, the first of them with the scales that fp16 ends at: 0, -0, the least, the largest."""
    kind = BY_NAME[name]
    data = np.random.default_rng(7).integers(0, 256, (COUNT, kind.size_bytes), np.uint8)
    extremes = np.array([0x0000, 0x8000, 0x0001, 0x8001, 0x7BFF, 0xFBFF], np.uint16)
    for at in HALVES.get(name, (0,)):
        data[:, at + 1] &= 0xFB  # no NaN, no infinity
        data[: len(extremes), at : at + 2] = extremes.view(np.uint8).reshape(-1, 2)
    return data


def same_bits(left: NDArray[np.float32], right: NDArray[np.float32]) -> bool:
    return left.shape == right.shape and bool((left.view(np.uint32) == right.view(np.uint32)).all())


def test_every_quantized_type_has_a_loop() -> None:
    assert set(LOOPS) == {kind.name for kind in blocks.TYPES.values() if kind.quantized}
    assert not set(blocks.TYPES) & set(blocks.OTHER_TYPES)


@pytest.mark.parametrize("name", LOOPS)
def test_numbers_are_those_of_the_loop(name: str) -> None:
    data = drawn(name)
    made = blocks.dequantize(data.reshape(-1), BY_NAME[name], (COUNT, BY_NAME[name].elements))
    assert same_bits(made, np.array([LOOPS[name](block) for block in data], F))


@pytest.mark.parametrize("name", LOOPS)
def test_codes_stand_for_the_same_numbers(name: str) -> None:
    kind, data = BY_NAME[name], drawn(name).reshape(-1)
    shape = (COUNT // 4, 4 * kind.elements)
    held = blocks.codes(data, kind, shape)
    assert held is not None
    assert (held.minimums is not None) == (name in blocks.MINIMA)
    assert int(held.codes.max()) < 1 << held.bits
    centred = held.codes.astype(F) - F(0 if held.minimums is not None else 1 << (held.bits - 1))
    numbers = centred.reshape(*held.scales.shape, held.block_size) * held.scales[..., None]
    if held.minimums is not None:
        numbers = numbers + held.minimums[..., None]
    assert same_bits(numbers.reshape(shape), blocks.dequantize(data, kind, shape))


def test_plain_numbers_are_as_they_are() -> None:
    numbers = np.array([[1.5, -2.0], [0.1, 3e4]], np.float16)
    assert blocks.dequantize(numbers.view(np.uint8).reshape(-1), BY_NAME["F16"], (2, 2)).tolist() == numbers.tolist()
    assert blocks.dequantize(np.array([0x80, 0x3F], np.uint8), BY_NAME["BF16"], (1,)).astype(F).tolist() == [1.0]


def test_much_is_read_in_parts() -> None:
    """More than one chunk: nothing is lost between them."""
    kind = BY_NAME["Q4_0"]
    data = np.tile(drawn("Q4_0")[6:], (3000, 1))
    made = blocks.dequantize(data.reshape(-1), kind, (len(data), 32))
    assert data.nbytes > 1 << 20
    assert same_bits(made, np.tile(made[: COUNT - 6], (3000, 1)))
