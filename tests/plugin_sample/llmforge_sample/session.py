"""Loads what `builder` wrote: serving imports this, and none of the tools that build."""

from __future__ import annotations

from pathlib import Path

from llmforge.backends.onnxruntime.session import Session
from llmforge.runtime.config import RuntimeConfig
from llmforge.runtime.device.cuda import CudaDevice


def open_engine(file: Path, config: RuntimeConfig, threads: int | None, gpu: CudaDevice | None) -> Session:
    """Open `file`, the graph, on `threads` threads."""
    return Session(file, config.session.resolve(threads), own_kernels=config.kernels is not None)
