"""Operators in the place of what a model computes: nodes that a trace takes up as they are."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from llmforge.ir.operators.record import Operator


def emit(
    operator: type[Operator],
    inputs: Mapping[str, Tensor | None],
    attributes: Mapping[str, Any],
    outputs: Sequence[tuple[torch.dtype, Sequence[int]]],
    *,
    version: int = 1,
) -> Sequence[Tensor]:
    """Emit a node of `operator`, as its `version` has it, and return its outputs, of these dtypes and shapes."""
    name = f"{operator.domain}::{operator.op_type}".removeprefix("::")
    dtypes, shapes = zip(*outputs, strict=True)
    return torch.onnx.ops.symbolic_multi_out(
        name, operator.ordered(inputs), dict(attributes), dtypes=dtypes, shapes=shapes, version=version
    )
