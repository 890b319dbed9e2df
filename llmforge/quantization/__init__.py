"""Numerics of quantization, with no graph: grids, methods, and what a method asks of calibration."""

from llmforge.quantization.grids import (
    SMALLEST_BLOCK,
    Float32,
    Grid,
    Packed,
    QuantizedMatrix,
    dequantize,
    pack,
    reordered,
    rows,
    rtn,
    stack,
    unpack,
    unpack_bits,
)

__all__ = [
    "SMALLEST_BLOCK",
    "Float32",
    "Grid",
    "Packed",
    "QuantizedMatrix",
    "dequantize",
    "pack",
    "reordered",
    "rows",
    "rtn",
    "stack",
    "unpack",
    "unpack_bits",
]
