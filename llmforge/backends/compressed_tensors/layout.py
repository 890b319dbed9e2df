"""How a quantized matrix stands in a file of compressed-tensors: its tensors, written, read back and compared."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, BinaryIO, Literal

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from llmforge.backends.compressed_tensors import modelopt
from llmforge.backends.exported_parameters import Blocks, CacheScales, Quantized
from llmforge.backends.low_precision_matrices import ChannelMatrix, Fp4Matrix, MxMatrix
from llmforge.base.errors import VerificationError
from llmforge.checkpoint.safetensors_file import DTYPES
from llmforge.ir import graph, mx
from llmforge.ir.fp4 import BLOCK
from llmforge.quantization import nvfp4
from llmforge.quantization.grid import Scale
from llmforge.quantization.grids import pack_bits, unpack_bits
from llmforge.quantization.initializers import SCALES

WORD_BITS = 32
# Layers that servers put on top of each other, and that must have one format.
TOGETHER = (frozenset({"q_proj", "k_proj", "v_proj"}), frozenset({"gate_proj", "up_proj"}))
HALVES: Mapping[Scale, str] = {"fp16": "F16", "bf16": "BF16"}  # of scales of packed codes, as safetensors names them
_CODES = {"int8": "I8", "fp8": "F8_E4M3"}
NAMES: Mapping[ir.DataType, str] = {ir.DataType[dtype]: name for name, dtype in DTYPES.items()}
ITEM_BYTES: Mapping[str, int] = {name: math.ceil(dtype.itemsize) for dtype, name in NAMES.items()}


@dataclass(frozen=True)
class StoredTensor:
    """A tensor of a file, by the name that safetensors has for its dtype."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def size_bytes(self) -> int:
        """The bytes that it takes."""
        return math.prod(self.shape) * ITEM_BYTES[self.dtype]


QuantMethod = Literal["compressed-tensors", "modelopt"]  # the second: NVFP4 alone


def layout(tensor: str, matrix: Quantized, method: QuantMethod) -> list[StoredTensor]:
    """Name what stands in place of a weight."""
    layer = tensor.removesuffix(".weight")
    if isinstance(matrix, MxMatrix):
        is_fp4 = matrix.dtype == "fp4"
        codes = StoredTensor(f"{layer}.weight_packed", "U8", (matrix.n, matrix.k // 2))
        return [
            codes if is_fp4 else StoredTensor(tensor, "F8_E4M3", (matrix.n, matrix.k)),
            StoredTensor(f"{layer}.weight_scale", "U8", (matrix.n, matrix.k // mx.BLOCK)),
        ]
    if isinstance(matrix, Fp4Matrix) and method == modelopt.NAME:
        return [
            StoredTensor(tensor, "U8", (matrix.n, matrix.k // 2)),
            StoredTensor(f"{layer}.weight_scale", "F8_E4M3", (matrix.n, matrix.k // BLOCK)),
            StoredTensor(f"{layer}.weight_scale_2", "F32", ()),
            StoredTensor(f"{layer}.input_scale", "F32", ()),
        ]
    if isinstance(matrix, Fp4Matrix):
        return [
            StoredTensor(f"{layer}.weight_packed", "U8", (matrix.n, matrix.k // 2)),
            StoredTensor(f"{layer}.weight_scale", "F8_E4M3", (matrix.n, matrix.k // BLOCK)),
            StoredTensor(f"{layer}.weight_global_scale", "F32", (1,)),
            StoredTensor(f"{layer}.input_global_scale", "F32", (1,)),
        ]
    if isinstance(matrix, ChannelMatrix):
        square = matrix.square
        by_modelopt, one = method == modelopt.NAME, () if method == modelopt.NAME else (1,)
        by: tuple[int, ...] = (matrix.n,) if by_modelopt else (matrix.n, 1)
        if square is not None:
            by = (math.ceil(matrix.n / square), matrix.k // square)
        parts = [
            StoredTensor(tensor, _CODES[matrix.dtype], (matrix.n, matrix.k)),
            StoredTensor(f"{layer}.weight_scale", "F32", one if matrix.whole else by),
        ]
        return parts if matrix.input_scale is None else [*parts, StoredTensor(f"{layer}.input_scale", "F32", one)]
    assert isinstance(matrix, Blocks)
    if method == modelopt.NAME:
        scales = HALVES[matrix.stored_scales]
        parts = [
            StoredTensor(tensor, "U8", (matrix.n // 2, matrix.k)),
            StoredTensor(f"{layer}.weight_scale", scales, (matrix.n, matrix.k // matrix.block_size)),
        ]
        alone = layer.rpartition(".")[2] not in frozenset().union(*TOGETHER)
        return [*parts, StoredTensor(f"{layer}.pre_quant_scale", scales, (matrix.k,))] if alone else parts
    blocks, a_word = matrix.k // matrix.block_size, WORD_BITS // matrix.bits
    parts = [
        StoredTensor(f"{layer}.weight_packed", "I32", (matrix.n, matrix.k // a_word)),
        StoredTensor(f"{layer}.weight_scale", HALVES[matrix.stored_scales], (matrix.n, blocks)),
        StoredTensor(f"{layer}.weight_shape", "I64", (2,)),
    ]
    return (
        parts
        if matrix.symmetric
        else [*parts, StoredTensor(f"{layer}.weight_zero_point", "I32", (matrix.n // a_word, blocks))]
    )


def write(stream: BinaryIO, places: Mapping[str, int], tensor: str, matrix: Quantized, method: QuantMethod) -> None:
    """Write codes and scales, read them back, and hold them against those of the graph.

    Raises:
        VerificationError: they differ.
    """
    parts = {part.name: part for part in layout(tensor, matrix, method)}
    file = _Parts(stream, places, parts, tensor.removesuffix(".weight"))
    match matrix:
        case Fp4Matrix():
            same = _write_fp4(file, matrix, method)
        case MxMatrix():
            same = _write_mx(file, matrix)
        case ChannelMatrix():
            same = _write_channels(file, matrix)
        case Blocks() if method == modelopt.NAME:
            same = _write_int4(file, matrix)
        case Blocks():
            same = _write_blocks(file, matrix)
    if not same:
        raise VerificationError(f"{tensor} was not written as it was quantized")


@dataclass(frozen=True)
class _Parts:
    """The tensors of one layer in a file, where each begins."""

    stream: BinaryIO
    places: Mapping[str, int]
    parts: Mapping[str, StoredTensor]
    layer: str

    def put(self, part: str, array: NDArray[Any]) -> None:
        """Write one of them."""
        name, data = f"{self.layer}.{part}", np.asarray(array, order="C")
        known = self.parts[name]
        assert (data.shape, data.nbytes) == (known.shape, known.size_bytes), name
        self.stream.seek(self.places[name])
        self.stream.write(data.tobytes())

    def get(self, part: str, dtype: Any) -> NDArray[Any]:
        """Read one of them back."""
        name = f"{self.layer}.{part}"
        self.stream.seek(self.places[name])
        known = self.parts[name]
        return np.frombuffer(self.stream.read(known.size_bytes), dtype).reshape(known.shape)


def _write_fp4(file: _Parts, matrix: Fp4Matrix, method: QuantMethod) -> bool:
    codes, scales = matrix.codes_by_output.view(np.uint8), matrix.scales_by_output
    step = np.float32(graph.tensor(matrix.input_scale).numpy())
    packed = "weight" if method == modelopt.NAME else "weight_packed"
    file.put(packed, pack_bits(codes, 4))
    file.put("weight_scale", scales)
    same = np.array_equal(unpack_bits(file.get(packed, np.uint8), 4, matrix.k), codes)
    same &= np.array_equal(file.get("weight_scale", np.uint8), scales.view(np.uint8))
    if method == modelopt.NAME:
        for part, scale in (("weight_scale_2", matrix.whole_scale), ("input_scale", step)):
            file.put(part, np.asarray(scale))
            same &= np.array_equal(file.get(part, "<f4"), scale)
        return same
    for name, scale in (("weight", matrix.whole_scale), ("input", step)):
        file.put(f"{name}_global_scale", nvfp4.divisor(scale).reshape(1))
        same &= bool(np.float32(1) / file.get(f"{name}_global_scale", "<f4")[0] == scale)
    return same


def _write_mx(file: _Parts, matrix: MxMatrix) -> bool:
    codes, scales = matrix.codes_by_output.view(np.uint8), matrix.scales_by_output
    is_fp4 = matrix.dtype == "fp4"
    name = "weight_packed" if is_fp4 else "weight"
    file.put(name, pack_bits(codes, 4) if is_fp4 else codes)
    file.put("weight_scale", scales)
    held = file.get(name, np.uint8)
    same = np.array_equal(unpack_bits(held, 4, matrix.k) if is_fp4 else held, codes)
    return same and np.array_equal(file.get("weight_scale", np.uint8), scales)


def _write_int4(file: _Parts, matrix: Blocks) -> bool:
    """Write W4A16_AWQ: two output features of one column in a byte."""
    read, stored = matrix.read(), SCALES[matrix.stored_scales].numpy()
    signed = read.codes ^ np.uint8(8)  # around 0, in the lower four bits
    file.put("weight", signed[0::2] | signed[1::2] << 4)
    file.put("weight_scale", read.scales.astype(stored))
    if f"{file.layer}.pre_quant_scale" in file.parts:
        file.put("pre_quant_scale", np.ones(matrix.k, stored))
    held = file.get("weight", np.uint8)
    codes = np.stack([held & 15, held >> 4], 1).reshape(matrix.n, matrix.k) ^ np.uint8(8)
    return np.array_equal(codes, read.codes) and np.array_equal(
        file.get("weight_scale", stored).astype(np.float32), read.scales
    )


def write_caches(
    stream: BinaryIO, places: Mapping[str, int], module: str, scales: CacheScales, method: QuantMethod
) -> None:
    """Write by what keys and values that `module` makes are divided, and read it back.

    Raises:
        VerificationError: it differs.
    """
    for part, scale in zip(cache_layout(module, method), (scales.key, scales.value), strict=True):
        stream.seek(places[part.name])
        stream.write(scale.tobytes())
        stream.seek(places[part.name])
        if stream.read(part.size_bytes) != scale.tobytes():
            raise VerificationError(f"{part.name} was not written as it was calibrated")


def cache_layout(module: str, method: QuantMethod) -> list[StoredTensor]:
    """Name what says how keys and values of a module are cached: fp32 scales."""
    if method == modelopt.NAME:
        return [StoredTensor(f"{module}.{part}_proj.{part}_scale", "F32", ()) for part in "kv"]
    return [StoredTensor(f"{module}.{part}_scale", "F32", (1,)) for part in "kv"]


def _write_channels(file: _Parts, matrix: ChannelMatrix) -> bool:
    codes, scales = matrix.by_output, matrix.scales_by_output
    file.put("weight", codes)
    scales = scales.reshape(file.parts[f"{file.layer}.weight_scale"].shape)
    file.put("weight_scale", scales)
    same = np.array_equal(file.get("weight", np.uint8), codes.view(np.uint8))
    same &= np.array_equal(file.get("weight_scale", "<f4"), scales)
    if matrix.input_scale is not None:
        scale = graph.tensor(matrix.input_scale).numpy().reshape(file.parts[f"{file.layer}.input_scale"].shape)
        file.put("input_scale", scale)
        same &= np.array_equal(file.get("input_scale", "<f4"), scale)
    return same


def _write_blocks(file: _Parts, matrix: Blocks) -> bool:
    read, stored = matrix.read(), SCALES[matrix.stored_scales].numpy()
    file.put("weight_packed", _words(read.codes, matrix.bits))
    file.put("weight_scale", read.scales.astype(stored))
    file.put("weight_shape", np.array([matrix.n, matrix.k], np.int64))
    same = np.array_equal(unpacked(file.get("weight_packed", "<i4"), matrix.bits), read.codes)
    same &= np.array_equal(file.get("weight_scale", stored).astype(np.float32), read.scales)
    if read.zero_points is not None:
        file.put("weight_zero_point", _words(read.zero_points.T, matrix.bits).T)
        points = file.get("weight_zero_point", "<i4")
        same &= np.array_equal(unpacked(points.T, matrix.bits).T, read.zero_points)
    return same


def _words(codes: NDArray[np.uint8], bits: int) -> NDArray[np.int32]:
    """Pack codes [N, C] into words [N, C·bits/32], the first in the lowest bits."""
    return np.ascontiguousarray(pack_bits(np.ascontiguousarray(codes), bits)).view("<i4")


def unpacked(words: NDArray[np.int32], bits: int) -> NDArray[np.uint8]:
    """Read codes [N, C], from 0 on, of words [N, C·bits/32]."""
    places = np.arange(WORD_BITS // bits, dtype=np.uint32) * np.uint32(bits)
    each = words.astype(np.int64)[..., None].astype(np.uint32) >> places & np.uint32(2**bits - 1)
    return each.reshape(len(words), -1).astype(np.uint8)
