"""Keys and values in slots: what they hold, against naive loops."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays
from numpy.typing import NDArray

from llmforge.quantization import kv_cache
from llmforge.quantization.formats import SLOTS4_KV, KvFormat, SlotFormat

INT8, INT4 = SlotFormat("int8", "token"), SlotFormat("int4", "token")
TURNED = {form: SlotFormat(form.dtype, "token", hadamard=True) for form in (INT8, INT4)}
NUMBERS = arrays.arrays(
    np.float32, (3, 32), elements=st.floats(-1e4, 1e4, width=32, allow_nan=False, allow_subnormal=False)
)


def held(x: NDArray[np.float32], form: SlotFormat) -> NDArray[np.float32]:
    slots = kv_cache.write(x, form)
    assert slots.dtype == np.uint8
    assert slots.shape == (*x.shape[:-1], form.bytes_per_slot(x.shape[-1]))
    return kv_cache.read(slots, form, x.shape[-1])


def bf16(slots: NDArray[np.uint8]) -> float:
    return float(slots.copy().view(ml_dtypes.bfloat16)[0])


@given(NUMBERS)
def test_a_slot_of_8_bits_is_the_nearest_multiple_of_its_scale(x: NDArray[np.float32]) -> None:
    slots = kv_cache.write(x, INT8)
    for row, slot in zip(x, slots, strict=True):
        scale, largest = bf16(slot[32:]), float(np.abs(row).max())
        assert largest / 127 <= scale * (1 + 1e-6)  # nothing is clipped
        assert scale <= largest / 127 * (1 + 2**-6) + 2.0**-133  # the smallest number of bf16
        for number, code in zip(row.astype(float), slot[:32].view(np.int8).astype(float), strict=True):
            assert abs(number - code * scale) <= scale * 0.50001


@given(NUMBERS)
def test_a_slot_of_4_bits_is_the_nearest_of_16_levels_that_fit(x: NDArray[np.float32]) -> None:
    slots = kv_cache.write(x, INT4)
    read = kv_cache.read(slots, INT4, 32)
    for row, slot, got in zip(x.astype(float), slots, read.astype(float), strict=True):
        scale, low = bf16(slot[16:18]), bf16(slot[18:])
        codes = [int(byte) & 15 for byte in slot[:16]] + [int(byte) >> 4 for byte in slot[:16]]
        levels = low + scale * np.arange(16)
        np.testing.assert_allclose(got, levels[codes], rtol=1e-6, atol=1e-6 * max(1.0, abs(low)))
        nearest = np.abs(row[:, None] - levels).min(1)
        assert (np.abs(row - levels[codes]) <= nearest + 1e-5 * scale + 1e-6 * np.abs(row)).all()
        span = row.max() - row.min()
        plain = np.rint((row - row.min()) / (span / 15)) * (span / 15) + row.min() if span > 0 else row
        error, usual = np.square(row - got).sum(), np.square(row - plain).sum()
        # bf16 may move all of a token that stands far from 0 beside what it spans
        assert error <= 1.5 * usual + 32 * (2**-8 * np.abs(row).max()) ** 2


def test_4_bits_lose_less_than_the_range_alone_gives() -> None:
    x = np.random.default_rng(0).standard_normal((500, 64)).astype(np.float32)
    span = np.ptp(x, axis=1, keepdims=True) / 15
    low = x.min(1, keepdims=True)
    plain = np.square(np.rint((x - low) / span) * span + low - x).mean()
    assert np.square(held(x, INT4) - x).mean() < 0.9 * plain


@pytest.mark.parametrize("dim", [32, 64, 1024])
def test_the_hadamard_matrix_is_sylvesters(dim: int) -> None:
    matrix = np.array([[1.0]])
    while len(matrix) < dim:
        matrix = np.kron([[1, 1], [1, -1]], matrix)
    x = np.random.default_rng(dim).integers(-50, 50, (3, dim)).astype(np.float32)
    np.testing.assert_array_equal(kv_cache.hadamard(x), x @ matrix)
    np.testing.assert_array_equal(kv_cache.hadamard(kv_cache.hadamard(x)), dim * x)
    wide = np.concatenate([x, 2 * x, 3 * x], axis=-1)  # three blocks: a head is no power of two
    np.testing.assert_array_equal(
        kv_cache.hadamard(wide), np.concatenate([x @ matrix, 2 * x @ matrix, 3 * x @ matrix], -1)
    )


@pytest.mark.parametrize("form", [INT8, INT4])
def test_an_outlier_costs_less_where_it_is_turned(form: SlotFormat) -> None:
    x = np.random.default_rng(1).standard_normal((200, 128)).astype(np.float32)
    x[:, 5] += 60
    lost, turned = (np.square(held(x, each) - x).mean() for each in (form, TURNED[form]))
    assert turned < lost / 8
    np.testing.assert_allclose(held(x, TURNED[INT8]), x, atol=0.6)


@pytest.mark.parametrize("form", [INT8, INT4, *TURNED.values()])
def test_zeros_stay_and_what_is_not_finite_spoils_its_token_alone(form: SlotFormat) -> None:
    x = np.random.default_rng(2).standard_normal((6, 64)).astype(np.float32)
    x[0], x[1], x[2, 7], x[3, 9], x[4, 1] = 0, -0.0, np.nan, np.inf, -np.inf
    got = held(x, form)
    assert not got[:2].any()
    assert not np.signbit(kv_cache.write(x[:2], form).view(np.int8)).any()  # a slot of zeros is the same everywhere
    assert not np.isfinite(got[2:5]).any(axis=1).all()
    assert np.isnan(got[2]).all()
    assert np.isfinite(got[5]).all()


def test_static_scales_are_what_they_were() -> None:
    form, scales = SlotFormat("int8", "channel"), np.array([[0.5, 2.0]], np.float32)
    x = np.array([[1.2, -500.0], [0.0, 3.1]], np.float32)
    slots = kv_cache.write(x, form, scales)
    assert slots.view(np.int8).tolist() == [[2, -128], [0, 2]]
    assert kv_cache.read(slots, form, 2, scales).tolist() == [[1.0, -256.0], [0.0, 4.0]]


def test_formats_have_names_and_count_what_a_slot_holds() -> None:
    assert [form.name for form in (INT8, TURNED[INT4])] == ["int8-token", "int4-token-hadamard"]
    assert (INT8.bytes_per_slot(128), INT4.bytes_per_slot(128)) == (130, 68)
    assert (INT8.bits_per_number(64), INT4.bits_per_number(64)) == (8.25, 4.5)
    assert SlotFormat("int8", "channel").bits_per_number(64) == 8
    mixed = KvFormat(INT8, INT4)
    assert mixed.name == "int8-token keys, int4-token values"
    assert mixed.bytes_per_token(128, 64) == 130 + 36
    assert SLOTS4_KV.name == "int4-token"
    assert not mixed.portable
    assert KvFormat(*[SlotFormat("int8", "tensor")] * 2).portable
    assert "multiple of 32" in str(INT4.reason_against(48))
    assert INT4.reason_against(96) is None
