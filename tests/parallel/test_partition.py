"""Partitions: ranges of ranks, and the lazy tensors that hold them, against plain slices of numpy."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import onnx_ir as ir
import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmforge.ir.derived import Derived, Stored, cast, side_by_side
from llmforge.parallel.partition import Partition, even, nibbles, shard, spread, take
from llmforge.quantization.grid import Grid
from llmforge.quantization.grids import pack, round_to_nearest

MATRIX = np.arange(48, dtype=np.float32).reshape(6, 8)


def lazy(array: np.ndarray, reads: list[int] | None = None) -> ir.LazyTensor:
    def read() -> ir.TensorProtocol:
        if reads is not None:
            reads.append(1)
        return ir.Tensor(array, name="lazy")

    return ir.LazyTensor(read, ir.DataType.from_numpy(array.dtype), ir.Shape(array.shape), name="lazy")


def stored(array: np.ndarray, *, transposed: bool) -> Stored:
    """A matrix `array` that is stored, perhaps as its transpose."""
    kept = np.ascontiguousarray(array.T if transposed else array)

    class Part(Stored):
        def _read(self) -> ir.TensorProtocol:
            raise AssertionError("the whole matrix was read")

    return Part(lambda: [kept], ir.DataType.FLOAT, ir.Shape(array.shape), "stored", transposed=transposed)


@given(size=st.integers(1, 64), degree=st.integers(1, 9))
def test_even_parts_cover_an_axis_once(size: int, degree: int) -> None:
    cut = even(size, degree, 0)
    held = [place for ranges in cut.ranks for start, stop in ranges for place in range(start, stop)]
    assert held == list(range(size))
    sizes = [cut.size(rank) for rank in range(degree)]
    assert max(sizes) - min(sizes) <= 1


def test_neighbours_share_what_is_spread() -> None:
    assert spread(2, 4, 1) == Partition(1, (((0, 1),), ((0, 1),), ((1, 2),), ((1, 2),)))


def test_partitions_of_packed_sections() -> None:
    q, k = even(4, 2, 2).scaled(3), even(2, 2, 2).scaled(3)
    packed = q.beside(k.shifted(12))
    assert packed.ranks == (((0, 6), (12, 15)), ((6, 12), (15, 18)))
    assert packed.divided(3) == Partition(2, (((0, 2), (4, 5)), ((2, 4), (5, 6))))
    assert packed.divided(2) is None
    assert packed.size(1) == 9
    assert packed.on(0).axis == 0


@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("ranges", [((1, 3),), ((0, 2), (4, 5))])
def test_shards_hold_their_ranges(axis: int, ranges: tuple[tuple[int, int], ...]) -> None:
    wanted = np.concatenate([MATRIX[a:b] if axis == 0 else MATRIX[:, a:b] for a, b in ranges], axis)
    np.testing.assert_array_equal(take(MATRIX, axis, ranges), wanted)
    packed = Derived(
        side_by_side,
        [lazy(MATRIX[:, :3]), stored(MATRIX[:, 3:], transposed=True)],
        ir.DataType.FLOAT,
        ir.Shape(MATRIX.shape),
        "packed",
    )
    for tensor in (
        ir.Tensor(MATRIX, name="held"),
        lazy(MATRIX),
        stored(MATRIX, transposed=True),
        stored(MATRIX, transposed=False),
        packed,
        cast(packed, ir.DataType.BFLOAT16, "half"),
        cast(lazy(MATRIX), ir.DataType.FLOAT16, "half"),
    ):
        own = shard(tensor, axis, ranges, "own")
        assert own.dtype == tensor.dtype
        assert tuple(own.shape.numpy()) == wanted.shape
        np.testing.assert_array_equal(own.numpy().astype(np.float32), wanted.astype(ml_dtypes.bfloat16))


def test_nothing_is_read_before_a_shard_is() -> None:
    reads: list[int] = []
    own = shard(lazy(MATRIX, reads), 0, ((1, 2),), "own")
    assert not reads
    own.numpy()
    assert len(reads) == 1


@given(blocks=st.integers(2, 9), data=st.data())
def test_zero_points_of_4_bits_are_cut_within_bytes(blocks: int, data: st.DataObject) -> None:
    start = data.draw(st.integers(0, blocks - 1))
    stop = data.draw(st.integers(start + 1, blocks))
    weights = np.random.default_rng(blocks).standard_normal((3, blocks * 32), np.float32)
    grid = Grid(4, 32, False)
    whole, part = (
        pack(round_to_nearest(weights, grid)),
        pack(round_to_nearest(weights[:, start * 32 : stop * 32], grid)),
    )
    assert whole.zero_points is not None
    own = nibbles(ir.Tensor(whole.zero_points, name="zeros"), ((start, stop),), "own")
    np.testing.assert_array_equal(own.numpy(), part.zero_points)
    np.testing.assert_array_equal(take(whole.codes, 1, ((start, stop),)), part.codes)
