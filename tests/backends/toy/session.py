"""Loads what `builder` wrote."""

from __future__ import annotations

from pathlib import Path

from llmforge.backends.onnxruntime.session import Session
from llmforge.runtime.config import RuntimeConfig
from llmforge.runtime.device.cuda import CudaDevice


class ToySession(Session):
    """The session of the toy, to be told from ONNX Runtime's."""


def open_engine(file: Path, config: RuntimeConfig, threads: int | None, gpu: CudaDevice | None) -> ToySession:
    """Open the graph in `file`."""
    return ToySession(file, config.session.resolve(threads), own_kernels=config.kernels is not None)
