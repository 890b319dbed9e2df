"""Builds engines that ONNX Runtime runs as they are written: to find out what its optimizations change."""

from __future__ import annotations

from dataclasses import replace

import onnx_ir as ir

from llmforge.backends.engines import BuildRequest, BuiltEngine
from llmforge.backends.onnxruntime import builder
from llmforge.recipe import EngineSpec
from llmforge.rewrite.pass_base import Changes
from llmforge.runtime.config import FILE
from llmforge.targets import Target


def require_host(target: Target, spec: EngineSpec) -> None:
    """Return if this machine runs what is built for `target`."""
    builder.require_host(target, spec)


def lower(model: ir.Model, target: Target, spec: EngineSpec) -> tuple[ir.Model, Changes]:
    """Rewrite what the passes left into operators that ONNX Runtime runs."""
    return builder.lower(model, target, spec)


def build(request: BuildRequest) -> BuiltEngine:
    """Write the engine, and prove that it runs."""
    built = builder.build(request)
    config = replace(built.config, session=replace(built.config.session, optimize=False))
    (request.folder / FILE).write_text(config.to_json(), encoding="utf-8")
    return replace(built, config=config)
