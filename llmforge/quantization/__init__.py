"""Numerics of quantization, with no graph: formats, grids, methods, and what a method asks of calibration."""
