"""FP8 blocks, MXFP4 and bitsandbytes against loops by hand and, where it is installed, against transformers."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from transformers.integrations.finegrained_fp8 import Fp8Dequantize
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from llmforge.checkpoint.quantized import bitsandbytes, fp8_blocks, mxfp4

F = np.float32


def rng() -> np.random.Generator:
    return np.random.default_rng(11)


# MXFP4 and what NVFP4 has in common with it


def test_two_numbers_a_byte_the_first_in_the_low_half() -> None:
    assert mxfp4.unpack_e2m1(np.array([[0x21, 0xF7]], np.uint8)).tolist() == [[0.5, 1.0, 6.0, -6.0]]
    assert np.signbit(mxfp4.unpack_e2m1(np.array([0x08], np.uint8))[0])


def test_scales_are_powers_of_two_and_255_is_nan() -> None:
    made = mxfp4.e8m0(np.array([0, 1, 127, 130, 254, 255], np.uint8))
    assert made[:5].tolist() == [2.0**-127, 2.0**-126, 1.0, 8.0, 2.0**127]
    assert np.isnan(made[5])


def test_mxfp4_is_what_a_loop_makes_of_it() -> None:
    blocks = rng().integers(0, 256, (2, 3, 2, 16), np.uint8)
    scales = rng().integers(100, 140, (2, 3, 2), np.uint8)
    made = mxfp4.dequantize_mxfp4(blocks, scales).astype(F)
    values = [0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6]
    assert made.shape == (2, 64, 3)
    for e, n, g, i in np.ndindex(*blocks.shape):
        for half in (0, 1):
            code = int(blocks[e, n, g, i]) >> 4 * half & 15
            assert made[e, 32 * g + 2 * i + half, n] == values[code] * 2.0 ** (int(scales[e, n, g]) - 127)


def test_mxfp4_is_bit_equal_to_transformers() -> None:
    blocks = rng().integers(0, 256, (3, 7, 4, 16), np.uint8)
    scales = rng().integers(0, 255, (3, 7, 4), np.uint8)  # the whole range but NaN, infinities of bf16 included
    theirs = convert_moe_packed_tensors(torch.from_numpy(blocks), torch.from_numpy(scales))
    ours = mxfp4.dequantize_mxfp4(blocks, scales)
    assert (ours.view(np.uint16) == theirs.view(torch.uint16).numpy()).all()


def test_mxfp4_of_parts_that_do_not_fit_is_refused() -> None:
    with pytest.raises(ValueError, match="blocks of shape"):
        mxfp4.dequantize_mxfp4(np.zeros((1, 2, 3, 16), np.uint8), np.zeros((1, 2, 2), np.uint8))


# FP8


def fp8(shape: tuple[int, ...]) -> NDArray[Any]:
    """Codes of every kind but NaN."""
    codes = rng().integers(0, 256, shape, np.uint8)
    return np.where(codes & 0x7F == 0x7F, 0, codes).astype(np.uint8).view(ml_dtypes.float8_e4m3fn)


@pytest.mark.parametrize("shape", [(4, 6), (5, 7), (3, 2), (1, 9)])
def test_fp8_blocks_are_what_a_loop_makes_of_them_at_edges_too(shape: tuple[int, int]) -> None:
    weight, rows, columns = fp8(shape), 2, 3
    scales = rng().standard_normal((-(-shape[0] // rows), -(-shape[1] // columns))).astype(F)
    made = fp8_blocks.dequantize(weight, scales, (rows, columns))
    for n, k in np.ndindex(*shape):
        assert made[n, k] == F(weight[n, k]) * scales[n // rows, k // columns]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("stacked", [False, True])
def test_fp8_blocks_are_bit_equal_to_transformers(dtype: torch.dtype, stacked: bool) -> None:
    shape, blocks = ((3, 256, 384), (3, 2, 3)) if stacked else ((256, 384), (2, 3))
    weight, scales = fp8(shape), (rng().random(blocks) * 1e-3).astype(F)
    theirs = Fp8Dequantize(None)._dequantize_one(
        torch.from_numpy(weight.view(np.uint8)).view(torch.float8_e4m3fn), torch.from_numpy(scales), dtype
    )
    ours = torch.from_numpy(fp8_blocks.dequantize(weight, scales, (128, 128))).to(dtype)
    assert torch.equal(ours, theirs)


def test_fp8_scales_may_be_exponents_alone() -> None:
    weight = fp8((4, 4))
    powers = np.array([[120, 130], [127, 90]], np.uint8)
    wanted = fp8_blocks.dequantize(weight, np.ldexp(F(1), powers.astype(np.int32) - 127).astype(F), (2, 2))
    for scales in (powers, powers.view(ml_dtypes.float8_e8m0fnu)):
        assert (fp8_blocks.dequantize(weight, scales, (2, 2)) == wanted).all()


@pytest.mark.parametrize("shape", [(), (1,), (1, 1)])
def test_fp8_may_have_one_scale(shape: tuple[int, ...]) -> None:
    weight = fp8((3, 5))
    made = fp8_blocks.dequantize(weight, np.full(shape, 0.25, F), None)
    assert (made == weight.astype(F) * F(0.25)).all()


def test_fp8_of_scales_that_do_not_fit_is_refused() -> None:
    with pytest.raises(ValueError, match=r"scales of shape \[2, 3\] are expected, they are \[2, 2\]"):
        fp8_blocks.dequantize(fp8((4, 9)), np.ones((2, 2), F), (2, 3))


# bitsandbytes


def state(**changes: Any) -> bitsandbytes.State:
    given = {"quant_type": "nf4", "blocksize": 32, "dtype": "bfloat16", "shape": [5, 13]}
    return bitsandbytes.State.of(given | changes)


@pytest.mark.parametrize("kind", ["nf4", "fp4"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_four_bits_are_what_a_loop_makes_of_them(kind: str, dtype: str) -> None:
    """65 numbers in blocks of 32: half a byte is left over, and the last block holds one number."""
    made_of = state(quant_type=kind, dtype=dtype)
    packed, scales = rng().integers(0, 256, (33, 1), np.uint8), rng().random(3).astype(F)
    made = bitsandbytes.dequantize_4bit(packed, scales, made_of)
    table = bitsandbytes.TABLES[kind]
    assert made.dtype == np.dtype(dtype)
    for at, number in enumerate(made.reshape(-1)):
        byte = int(packed[at // 2, 0])
        code = byte >> 4 if at % 2 == 0 else byte & 15  # the first in the high half
        assert number == np.asarray(table[code] * scales[at // 32]).astype(made.dtype)


def test_scales_may_be_quantized_themselves() -> None:
    made_of = state(nested_blocksize=2, nested_offset=0.5)
    table, codes, own = rng().random(256).astype(F), np.array([3, 255, 0], np.uint8), np.array([2.0, 4.0], F)
    made = bitsandbytes.nested_scales(codes, own, table, made_of)
    assert made.tolist() == [table[3] * F(2) + F(0.5), table[255] * F(2) + F(0.5), table[0] * F(4) + F(0.5)]


def test_eight_bits_are_rows_times_their_maximum() -> None:
    codes, maxima = rng().integers(-128, 128, (3, 4), np.int8), rng().random(3).astype(F)
    made = bitsandbytes.dequantize_int8(codes, maxima)
    for n, k in np.ndindex(3, 4):
        assert made[n, k] == F(codes[n, k]) * maxima[n] * F(7.874015718698502e-3)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"quant_type": "nf5"}, "quant_type is 'nf5'; known are nf4, fp4"),
        ({"dtype": "int8"}, "dtype is 'int8'"),
        ({"blocksize": 7}, "blocksize is 7"),
        ({"blocksize": True}, "blocksize is True"),
        ({"shape": [0, 4]}, "shape is"),
        ({"shape": "5x13"}, "shape is"),
        ({"shape": [1] * 9}, "shape is"),
        ({"nested_blocksize": 0}, "nested_blocksize is 0"),
        ({"nested_offset": float("nan")}, "nested_offset is nan"),
    ],
)
def test_a_state_that_bitsandbytes_does_not_write_is_refused(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        state(**changes)


def test_parts_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ValueError, match=r"32 bytes and 3 scales do not make shape \[5, 13\]"):
        bitsandbytes.dequantize_4bit(np.zeros(32, np.uint8), np.ones(3, F), state())
    with pytest.raises(ValueError, match="do not fit"):
        bitsandbytes.nested_scales(np.zeros(3, np.uint8), np.ones(5, F), np.ones(256, F), state(nested_blocksize=2))
