"""Derived tensors: which stored tensors one is made of, row by row."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from llmforge.ir.derived import Derived, Stored, cast, side_by_side, stored_in

K = 320


def stored(rows: int, name: str) -> Stored:
    array = np.ones((rows, K), ml_dtypes.bfloat16)
    return Stored(lambda: [array], ir.DataType.FLOAT, ir.Shape((K, rows)), name, transposed=True, sources=((name,),))


def never() -> NDArray[Any]:
    raise AssertionError("it was read")


def test_sources_are_named_where_rows_lie_as_they_are_stored() -> None:
    two = Derived(side_by_side, [stored(2, "w0"), stored(3, "w1")], ir.DataType.FLOAT, ir.Shape((K, 5)), "packed")
    assert stored_in(two, transposed=True) == ("w0", "w1")
    assert stored_in(two, transposed=False) == ()
    assert stored_in(stored(2, "w"), transposed=False) == ()
    assert stored_in(cast(stored(2, "w"), ir.DataType.FLOAT16, "w"), transposed=True) == ()
    part = Stored(never, ir.DataType.FLOAT, ir.Shape((K, 2)), "w", transposed=True)
    mixed = Derived(side_by_side, [stored(2, "w"), part], ir.DataType.FLOAT, ir.Shape((K, 4)), "mixed")
    assert stored_in(mixed, transposed=True) == ()
