"""Builds engines that ONNX Runtime runs as they are written."""

from __future__ import annotations

from dataclasses import replace

from llmforge.backends.engines import BuildRequest, BuiltEngine
from llmforge.backends.onnxruntime import builder
from llmforge.backends.onnxruntime.builder import lower, require_host
from llmforge.runtime.config import FILE

__all__ = ["build", "lower", "require_host"]


def build(request: BuildRequest) -> BuiltEngine:
    """Write the engine, and prove that it runs."""
    built = builder.build(request)
    config = replace(built.config, provider="toy", session=replace(built.config.session, optimize=False))
    (request.folder / FILE).write_text(config.to_json(), encoding="utf-8")
    return replace(built, config=config)
