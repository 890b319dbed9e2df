"""Weights as bitsandbytes stores them: NF4 and FP4 in blocks along the flattened matrix, and int8 by row.

Beside a weight `X.weight` of 4 bits, uint8 [ceil(N·K / 2), 1] with the first number in the high half of a byte, stand

* `X.weight.absmax`: the scale of each block, fp32, or uint8 where scales are quantized themselves;
* `X.weight.nested_absmax` and `X.weight.nested_quant_map`: scales and table of those scales, fp32;
* `X.weight.quant_state.bitsandbytes__nf4` (or fp4): uint8, the text of a JSON object with `quant_type`, `blocksize`,
  `dtype`, `shape`, and of nested scales `nested_blocksize` and `nested_offset`.

Beside a weight of 8 bits, int8 [N, K], stands `X.SCB`, the largest magnitude of each row, fp32 [N].
Sources: `QuantState.as_dict`, `backends/utils.py` and `int8_vectorwise_dequant` of bitsandbytes 0.50.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

NF4 = np.array(
    [
        -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635,
        -0.18477343022823334, -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725,
        0.24611230194568634, 0.33791524171829224, 0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
    ],
    np.float32,
)  # fmt: skip
FP4 = np.array(
    [0, 1 / 192, 2 / 3, 1, 1 / 3, 1 / 2, 1 / 6, 1 / 4, 0, -1 / 192, -2 / 3, -1, -1 / 3, -1 / 2, -1 / 6, -1 / 4],
    np.float32,
)  # as its C++ and CUDA kernels have it; its slow way in Python rounds to four digits
TABLES = {"nf4": NF4, "fp4": FP4}
DTYPES = {"float32": np.float32, "float16": np.float16, "bfloat16": ml_dtypes.bfloat16}
BLOCK_SIZES = (32, 64, 128, 256, 512, 1024, 2048, 4096)
_MOST_DIMENSIONS = 8
_ONE_127TH = np.float32(7.874015718698502e-3)  # as int8_vectorwise_dequant has it: 1 / 127 in fp32


@dataclass(frozen=True)
class State:
    """What `quant_state` of a weight of 4 bits says."""

    kind: str  # nf4 or fp4
    block_size: int
    dtype: str  # of the weight that was quantized
    shape: tuple[int, ...]
    nested_block_size: int | None  # None: scales are not quantized
    nested_offset: float

    @classmethod
    def of(cls, settings: dict[str, Any]) -> State:
        """Read the object that the JSON gives.

        Raises:
            ValueError: something in it is not what bitsandbytes writes; the message says what.
        """
        kind, dtype, size, shape = (settings.get(key) for key in ("quant_type", "dtype", "blocksize", "shape"))
        nested, offset = settings.get("nested_blocksize"), settings.get("nested_offset", 0.0)
        if kind not in TABLES:
            raise ValueError(f"quant_type is {kind!r}; known are {', '.join(TABLES)}")
        if dtype not in DTYPES:
            raise ValueError(f"dtype is {dtype!r}; known are {', '.join(DTYPES)}")
        if size not in BLOCK_SIZES or isinstance(size, bool):
            raise ValueError(f"blocksize is {size!r}; known are {', '.join(map(str, BLOCK_SIZES))}")
        counts = isinstance(shape, list) and 0 < len(shape) <= _MOST_DIMENSIONS
        if not counts or not all(type(side) is int and 0 < side < 1 << 40 for side in shape):
            raise ValueError(f"shape is {shape!r}; a list of sizes is expected")
        if nested is not None and (type(nested) is not int or not 0 < nested <= 1 << 20):
            raise ValueError(f"nested_blocksize is {nested!r}; a number of scales is expected")
        if not isinstance(offset, int | float) or not np.isfinite(offset):
            raise ValueError(f"nested_offset is {offset!r}; a finite number is expected")
        return cls(kind, size, dtype, tuple(shape), nested, float(offset))

    @property
    def blocks(self) -> int:
        """How many scales the weight has."""
        return -(-prod(self.shape) // self.block_size)


def nested_scales(
    absmax: NDArray[np.uint8], nested_absmax: NDArray[np.float32], table: NDArray[np.float32], state: State
) -> NDArray[np.float32]:
    """Return the fp32 scales that are quantized themselves: `table[absmax] · nested_absmax + offset`.

    Raises:
        ValueError: the parts do not belong together.
    """
    size = state.nested_block_size
    if size is None or table.shape != (256,) or nested_absmax.size != -(-absmax.size // size):
        raise ValueError(f"{absmax.size} quantized scales with {nested_absmax.size} scales of their own do not fit")
    spread = np.repeat(nested_absmax.astype(np.float32).reshape(-1), size)[: absmax.size]
    return table[absmax.reshape(-1)] * spread + np.float32(state.nested_offset)


def dequantize_4bit(packed: NDArray[np.uint8], scales: NDArray[np.float32], state: State) -> NDArray[Any]:
    """Return the weight in its own shape and dtype; products are rounded to fp32, then to that dtype.

    Raises:
        ValueError: the parts do not belong together.
    """
    count = prod(state.shape)
    codes = packed.reshape(-1)
    if codes.size != -(-count // 2) or scales.size != state.blocks:
        raise ValueError(f"{codes.size} bytes and {scales.size} scales do not make shape {list(state.shape)}")
    table = TABLES[state.kind]
    pairs = np.stack([table[np.arange(256) >> 4], table[np.arange(256) & 15]], axis=-1)
    values = pairs[codes].reshape(-1)[:count]
    result = np.empty(count, DTYPES[state.dtype])
    step = 4096 * state.block_size  # numbers at a time, in fp32
    for at in range(0, count, step):
        part = values[at : at + step]
        first = at // state.block_size
        spread = np.repeat(scales.reshape(-1)[first : first + 4096].astype(np.float32), state.block_size)[: part.size]
        result[at : at + step] = (part * spread).astype(result.dtype)
    return result.reshape(state.shape)


def dequantize_int8(codes: NDArray[np.int8], row_maxima: NDArray[np.float32]) -> NDArray[np.float32]:
    """Return the fp32 weights [N, K] of int8 codes and the largest magnitude of each row.

    Raises:
        ValueError: there is not one maximum a row.
    """
    if codes.ndim != 2 or row_maxima.size != codes.shape[0]:
        raise ValueError(f"{row_maxima.size} maxima of rows do not fit a matrix of shape {list(codes.shape)}")
    return codes.astype(np.float32) * row_maxima.astype(np.float32).reshape(-1, 1) * _ONE_127TH
