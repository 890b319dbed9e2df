"""Numerics of quantization, with no graph: formats, grids, methods, and what a method asks of calibration."""

from llmforge.quantization.grids import (
    SMALLEST_BLOCK,
    Float32,
    Grid,
    Packed,
    QuantizedMatrix,
    dequantize,
    pack,
    reordered,
    round_to_nearest,
    rows,
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
    "round_to_nearest",
    "rows",
    "stack",
    "unpack",
    "unpack_bits",
]
