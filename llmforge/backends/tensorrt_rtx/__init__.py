"""The record of TensorRT-RTX, which compiles plans for any GPU of a capability, as TensorRT does on its own."""

from __future__ import annotations

from dataclasses import replace

from llmforge.backends import tensorrt
from llmforge.backends.record import CUDA_BINDINGS

BACKEND = replace(
    tensorrt.BACKEND,
    name="tensorrt-rtx",
    title="TensorRT-RTX",
    module="tensorrt_rtx",
    providers=(
        replace(
            tensorrt.BACKEND.providers[0],
            name="tensorrt-rtx",
            package="tensorrt-rtx",
            requirements=("onnxruntime", "tensorrt-rtx=={version}", CUDA_BINDINGS),
            capabilities=("75", "80", "86", "89", "120"),
            uncovered="TensorRT-RTX 1.7 has no target SM {sm}",
            needs_device=None,
            index="",
            verified=True,
        ),
    ),
)
