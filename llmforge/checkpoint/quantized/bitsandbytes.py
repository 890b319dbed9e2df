"""Weights as bitsandbytes stores them: NF4 and FP4 in blocks along the flattened matrix, and int8 by row.

Beside a weight `X.weight` of 4 bits, uint8 [ceil(N·K / 2), 1] with the first number in the high half of a byte, stand

* `X.weight.absmax`: the scale of each block, fp32, or uint8 where scales are quantized themselves;
* `X.weight.nested_absmax` and `X.weight.nested_quant_map`: scales and table of those scales, fp32;
* `X.weight.quant_state.bitsandbytes__nf4` (or fp4): uint8, the text of a JSON object with `quant_type`, `blocksize`,
  `dtype`, `shape`, and of nested scales `nested_blocksize` and `nested_offset`.

Beside a weight of 8 bits, int8 [N, K], stands `X.SCB`, the largest magnitude of each row, fp32 [N].
Sources: `QuantState.as_dict`, `QuantState.from_dict` and `int8_vectorwise_dequant` of bitsandbytes 0.50.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from llmforge.base.errors import CheckpointError, UnsupportedError
from llmforge.checkpoint.quantized.layout import Grouped, QuantizedLayout, QuantizedTensor
from llmforge.checkpoint.safetensors_file import DAMAGED, TensorEntry, damaged, data_type, external, parse_json
from llmforge.quantization.stored import UnrepresentableCodes

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
DTYPES = ("float32", "float16", "bfloat16")
BLOCK_SIZES = (32, 64, 128, 256, 512, 1024, 2048, 4096)
_MOST_DIMENSIONS = 8
_BLOCKS = 4096  # that are dequantized at a time
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
        if not isinstance(shape, list) or not 0 < len(shape) <= _MOST_DIMENSIONS or not all(map(_is_size, shape)):
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


def _is_size(value: object) -> bool:
    return type(value) is int and 0 < value < 1 << 40


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
    import ml_dtypes  # noqa: F401  by which numpy knows bfloat16; what serves has no such package

    result = np.empty(count, np.dtype(state.dtype))
    step = _BLOCKS * state.block_size  # numbers at a time, in fp32
    with np.errstate(over="ignore", invalid="ignore"):  # what is not finite is refused where it is used
        for at in range(0, count, step):
            part = pairs[codes[at // 2 : (at + step) // 2]].reshape(-1)[: count - at]
            some = scales.reshape(-1)[at // state.block_size :][:_BLOCKS].astype(np.float32)
            result[at : at + step] = (part * np.repeat(some, state.block_size)[: part.size]).astype(result.dtype)
    return result.reshape(state.shape)


def dequantize_int8(codes: NDArray[np.int8], row_maxima: NDArray[np.float32]) -> NDArray[np.float32]:
    """Return the fp32 weights [N, K] of int8 codes and the largest magnitude of each row.

    Raises:
        ValueError: there is not one maximum a row.
    """
    if codes.ndim != 2 or row_maxima.size != codes.shape[0]:
        raise ValueError(f"{row_maxima.size} maxima of rows do not fit a matrix of shape {list(codes.shape)}")
    values = codes.astype(np.float32)
    with np.errstate(over="ignore", invalid="ignore"):
        values *= row_maxima.astype(np.float32).reshape(-1, 1)
        values *= _ONE_127TH
    return values


_PACKED, _ABSMAX, _NESTED, _TABLE = "weight", "absmax", "nested_absmax", "nested_quant_map"
_STATE = ".quant_state.bitsandbytes__"
_STATE_BYTES = 4096  # of the JSON: some 200
_IR_DTYPES = {"float32": "FLOAT", "float16": "FLOAT16", "bfloat16": "BFLOAT16"}
_ROWS = 0  # `weight_format` of codes that lie row by row


@dataclass(frozen=True, eq=False)
class FourBitTensor(QuantizedTensor):
    """A parameter in NF4 or FP4."""

    state: State

    @property
    def format(self) -> str:
        """Name it, and whether its scales are quantized, too."""
        nested = "" if self.state.nested_block_size is None else ", scales quantized"
        return f"{self.state.kind.upper()} in blocks of {self.state.block_size}{nested}"

    def dequantize(self) -> NDArray[Any]:
        """Return its weights in the dtype that was quantized."""
        try:
            scales = self.read(_ABSMAX)
            if self.state.nested_block_size is not None:
                scales = nested_scales(scales, self.read(_NESTED), self.read(_TABLE), self.state)
            weights = dequantize_4bit(self.read(_PACKED).view(np.uint8), scales, self.state)
        except ValueError as error:
            raise self.damaged(_PACKED, f"does not fit what stands beside it: {error}") from error
        return self.finite(weights, _ABSMAX, "gives weights that are NaN or infinite")

    def grid(self) -> Any:
        """Refuse: no kernel reads levels that are not evenly spaced."""
        raise UnrepresentableCodes(f"are {self.state.kind.upper()}, whose levels are not evenly spaced")


@dataclass(frozen=True, eq=False)
class EightBitTensor(QuantizedTensor):
    """A parameter in int8, with the largest magnitude of each row."""

    @property
    def format(self) -> str:
        """Name it."""
        return "int8 by row"

    def dequantize(self) -> NDArray[np.float32]:
        """Return its weights, fp32."""
        weights = dequantize_int8(self.read(_PACKED), self.read(_ABSMAX))
        return self.finite(weights, _ABSMAX, "gives weights that are NaN or infinite")

    def grid(self) -> Any:
        """Refuse: the product of three numbers is rounded twice."""
        raise UnrepresentableCodes("are int8 by row, times a maximum and 1/127, which no scale stands for exactly")


class Bitsandbytes(QuantizedLayout):
    """bitsandbytes, as transformers saves it."""

    name: ClassVar[str] = "bitsandbytes"
    methods: ClassVar[tuple[str, ...]] = ("bitsandbytes",)

    def check(self, config: Mapping[str, Any], where: Path) -> str:
        """Return how many bits it has."""
        if config.get("load_in_8bit"):
            return "bitsandbytes int8"
        return f"bitsandbytes {config.get('bnb_4bit_quant_type', 'fp4')}".upper().replace("BITSANDBYTES", self.name)

    def group(self, settings: Mapping[str, Any], stored: Mapping[str, TensorEntry], folder: Path) -> Grouped:
        """Put weights, scales and states together; the states, some bytes each, are read."""
        plain = dict(stored)
        quantized: list[QuantizedTensor] = []
        for key in stored:
            name, found, kind = key.partition(_STATE)
            if found:
                quantized.append(_four_bits(name, kind, stored, plain))
            elif key.endswith(".SCB"):
                quantized.append(_eight_bits(key.removesuffix("SCB"), stored, plain))
        for entry in plain.values():
            if entry.dtype.name in ("UINT8", "INT8"):
                raise damaged(entry, f"is {entry.dtype.name}, without scales")
        return Grouped(quantized, plain)


def _four_bits(name: str, kind: str, stored: Mapping[str, TensorEntry], plain: dict[str, TensorEntry]) -> FourBitTensor:
    """Put the parts of parameter `name` together, and take them out of `plain`."""
    entry = stored[f"{name}{_STATE}{kind}"]
    where = f"{entry.file}: tensor {entry.name!r}"
    if entry.dtype.name != "UINT8" or entry.size_bytes > _STATE_BYTES:
        raise CheckpointError(f"{where} must be at most {_STATE_BYTES} bytes of JSON", hint=DAMAGED)
    try:
        state = State.of(parse_json(external(entry).numpy().tobytes(), where))
    except ValueError as error:
        raise CheckpointError(f"{where}: {error}", hint=DAMAGED) from error
    keys = {_PACKED: name, _ABSMAX: f"{name}.{_ABSMAX}"}
    if state.nested_block_size is not None:
        keys |= {role: f"{name}.{role}" for role in (_NESTED, _TABLE)}
    if missing := [key for key in keys.values() if key not in stored]:
        raise CheckpointError(f"{where} is there, and {missing[0]!r} is not", hint=DAMAGED)
    for key in (*keys.values(), entry.name, f"{name}.quant_map"):
        plain.pop(key, None)
    parts = {role: stored[key] for role, key in keys.items()}
    scales = "FLOAT" if state.nested_block_size is None else "UINT8"
    size = -(-prod(state.shape) // 2)
    if parts[_PACKED].size_bytes != size or prod(parts[_ABSMAX].shape) != state.blocks:
        raise CheckpointError(f"{where}: shape {list(state.shape)} does not fit {name!r} and its scales", hint=DAMAGED)
    if parts[_ABSMAX].dtype.name != scales or any(
        parts[role].dtype.name != "FLOAT" for role in keys.keys() & {_NESTED, _TABLE}
    ):
        raise CheckpointError(f"{where}: scales of {name!r} are of another dtype than {scales}", hint=DAMAGED)
    return FourBitTensor(name, state.shape, data_type(_IR_DTYPES[state.dtype]), parts, state)


def _eight_bits(prefix: str, stored: Mapping[str, TensorEntry], plain: dict[str, TensorEntry]) -> EightBitTensor:
    """Put the parts of the weight of module `prefix` together, and take them out of `plain`."""
    name, maxima = f"{prefix}weight", stored[f"{prefix}SCB"]
    weight, order = stored.get(name), stored.get(f"{prefix}weight_format")
    fits = weight is not None and weight.dtype.name == "INT8" and len(weight.shape) == 2
    if weight is None or not fits or maxima.dtype.name != "FLOAT" or prod(maxima.shape) != weight.shape[0]:
        raise damaged(maxima, f"needs an int8 matrix {name!r} of as many rows")
    if order is not None and (order.size_bytes != 1 or int(external(order).numpy().reshape(-1)[0]) != _ROWS):
        raise UnsupportedError(
            f"{order.file}: tensor {order.name!r} says that codes lie in tiles of a GPU; taken are those row by row",
            hint="save the model again with a current bitsandbytes",
        )
    for key in (name, maxima.name, f"{prefix}weight_format"):
        plain.pop(key, None)
    return EightBitTensor(name, weight.shape, data_type("FLOAT"), {_PACKED: weight, _ABSMAX: maxima})
