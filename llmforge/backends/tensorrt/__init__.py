"""Engines for TensorRT and TensorRT-RTX: one lowering and one builder for both, whose Python modules are alike."""
