"""What is quantized ahead: the bits that a pass would make, for exactly what was expected, within a limit."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import ml_dtypes
import numpy as np
import onnx_ir as ir
import pytest
from numpy.typing import NDArray

from llmforge.base.errors import CheckpointError
from llmforge.ir import graph
from llmforge.ir.derived import Derived, Stored, cast, side_by_side, stored_in
from llmforge.quantization import initializers, methods
from llmforge.quantization.ahead import Ahead, Task
from llmforge.quantization.grids import Grid

from ..models import graphs

K = 320  # the last block of 128 is cut
GRIDS = [Grid(4, 128, True, "fp32"), Grid(4, 64, False, "fp16"), Grid(8, 32, False, "fp32")]
RTN = methods.PLAIN()


def weight(rows: int, seed: int) -> NDArray[Any]:
    return np.random.default_rng(seed).standard_normal((rows, K)).astype(ml_dtypes.bfloat16)


def tensor(array: NDArray[Any], name: str, *, transposed: bool = True) -> Stored:
    shape = ir.Shape(array.shape[::-1] if transposed else array.shape)
    return Stored(lambda: array, ir.DataType.FLOAT, shape, name, transposed=transposed, source=name)


def packed(*arrays: NDArray[Any]) -> ir.TensorProtocol:
    operands = [tensor(array, f"w{at}") for at, array in enumerate(arrays)]
    shape = ir.Shape((K, sum(map(len, arrays))))
    return Derived(side_by_side, operands, ir.DataType.FLOAT, shape, "packed")


def parts(of: ir.TensorProtocol, grid: Grid, ahead: Ahead | None, *, transposed: bool = True) -> dict[str, bytes]:
    model = graphs.llama(graphs.Llama(layers=1))
    value = graph.initializer(model, "w", of)
    matrix = initializers.quantized(value, RTN, grid, transposed=transposed, ahead=ahead)
    return {part: matrix.take(part).tobytes() for part, _, _ in matrix.parts()}


def never() -> NDArray[Any]:
    raise AssertionError("it was made already")


@pytest.mark.parametrize("grid", GRIDS, ids=str)
def test_the_bits_are_those_of_the_pass(grid: Grid) -> None:
    arrays = [weight(4000, 1), weight(7, 2), weight(64, 3)]  # the first is made in tiles
    with Ahead() as ahead:
        ahead.begin({f"w{at}": Task(lambda array=array: array, RTN, grid) for at, array in enumerate(arrays)})  # type: ignore[misc]
        assert parts(packed(*arrays), grid, ahead) == parts(packed(*arrays), grid, None)
        assert ahead.take(["w0"], RTN, grid) is None, "it is given once"
        ahead.begin({"table": Task(lambda: arrays[0], RTN, grid)})
        table = tensor(arrays[0], "table", transposed=False)
        assert parts(table, grid, ahead, transposed=False) == parts(table, grid, None, transposed=False)


def test_it_is_taken_from_there() -> None:
    array, grid = weight(8, 1), GRIDS[0]
    wanted = parts(tensor(array, "w"), grid, None)
    with Ahead() as ahead:
        ahead.begin({"w": Task(lambda: array, RTN, grid)})
        unread = Stored(never, ir.DataType.FLOAT, ir.Shape((K, 8)), "w", transposed=True, source="w")
        assert parts(unread, grid, ahead) == wanted


def test_what_was_not_expected_is_computed() -> None:
    array, other = weight(8, 1), weight(8, 2)
    with Ahead() as ahead:
        ahead.begin({"w": Task(lambda: other, RTN, GRIDS[0])})
        assert ahead.take(["w"], RTN, GRIDS[1]) is None
        assert ahead.take(["w", "v"], RTN, GRIDS[0]) is None
        for of in (cast(tensor(array, "w"), ir.DataType.FLOAT16, "w"), ir.Tensor(array.astype(np.float32).T)):
            assert parts(of, GRIDS[0], ahead) == parts(of, GRIDS[0], None)
        ahead.drop()
        assert ahead.take(["w"], RTN, GRIDS[0]) is None


def test_a_trellis_and_kernels_of_our_own_are_left_to_the_pass() -> None:
    array = weight(64, 1)
    with Ahead() as ahead:
        for grid in (Grid(4, 32, True, "fp32", True), Grid(3, 32, True, "fp32"), Grid(4, 32, True, "int8")):
            ahead.begin({"w": Task(lambda: array, RTN, grid)})
            assert ahead.take(["w"], RTN, grid) is None


def test_what_its_turn_has_not_come_for_is_made_where_it_is_asked_for() -> None:
    array, grid, go = weight(8, 1), GRIDS[0], threading.Event()

    def slow() -> NDArray[Any]:
        assert go.wait(10)
        return array

    with Ahead() as ahead:
        ahead.begin({"first": Task(slow, RTN, grid), "w": Task(lambda: array, RTN, grid)})
        assert parts(tensor(array, "w"), grid, ahead) == parts(tensor(array, "w"), grid, None)
        go.set()


def test_results_that_wait_are_limited() -> None:
    array, grid, read = weight(8, 1), GRIDS[0], list[str]()

    def reading(name: str) -> Callable[[], NDArray[Any]]:
        def read_it() -> NDArray[Any]:
            read.append(name)
            return array

        return read_it

    with Ahead(limit_bytes=1) as ahead:
        ahead.begin({name: Task(reading(name), RTN, grid) for name in ("a", "b", "c")})
        ahead.begin({"end": Task(reading("end"), RTN, grid)})
        ahead._tasks["end"][1].result()
        assert read == ["a"]
        assert parts(tensor(array, "b"), grid, ahead) == parts(tensor(array, "a"), grid, ahead)
        assert read == ["a", "b"]


def test_numbers_that_are_refused_are_refused_by_the_pass() -> None:
    array = weight(8, 1)
    array[3, 5] = np.nan
    with Ahead() as ahead:
        ahead.begin({"w": Task(lambda: array, RTN, GRIDS[0])})
        with pytest.raises(CheckpointError, match="parameter w cannot be quantized"):
            parts(tensor(array, "w"), GRIDS[0], ahead)


def test_sources_are_named_where_rows_lie_as_they_are_stored() -> None:
    two = packed(weight(2, 1), weight(3, 2))
    assert stored_in(two, transposed=True) == ("w0", "w1")
    assert stored_in(two, transposed=False) == ()
    assert stored_in(tensor(weight(2, 1), "w"), transposed=False) == ()
    assert stored_in(cast(tensor(weight(2, 1), "w"), ir.DataType.FLOAT16, "w"), transposed=True) == ()
    part = Stored(never, ir.DataType.FLOAT, ir.Shape((K, 2)), "w", transposed=True)
    mixed = Derived(side_by_side, [tensor(weight(2, 1), "w"), part], ir.DataType.FLOAT, ir.Shape((K, 4)), "mixed")
    assert stored_in(mixed, transposed=True) == ()


def test_it_begins_when_what_is_before_it_has_ended() -> None:
    array, grid = weight(8, 1), GRIDS[0]
    begun, ended = threading.Event(), Future[str]()

    def read() -> NDArray[Any]:
        begun.set()
        return array

    with Ahead() as ahead:
        ahead.begin({"w": Task(read, RTN, grid)}, behind=ended)
        assert not begun.wait(0.2)
        ended.set_result("")
        assert begun.wait(10)
