"""The operators that a lowered graph may hold, with the dtypes that they are supported with.

The records of `llmforge.ir.operators` say it (`tensorrt`). Each was seen with TensorRT-RTX 1.7.1, ahead of time: tests
build each operator with each of its dtypes for SM75, 80, 86, 89 and 120, those aside that `refusals` keeps from one,
and the lowered graphs of the model zoo. What is not said there is refused at plan time, whether TensorRT might take it
or not.
"""

from __future__ import annotations

from collections.abc import Iterator

import onnx_ir as ir

from llmforge.base.errors import UnsupportedError
from llmforge.ir import operators


def check(model: ir.Model) -> None:
    """Return if every operator of a lowered `model` was seen to build with its dtypes.

    Raises:
        UnsupportedError: names those that were not, and a node of each.
    """
    unseen = dict(_unseen(model))
    if unseen:
        listed = ", ".join(f"{what}, node {node}" for what, node in reversed(unseen.items()))
        raise UnsupportedError(
            f"TensorRT is not known to build {listed}",
            hint="leave the pass that writes it out of the recipe, or choose `engine: {backend: onnxruntime}`",
        )


def _unseen(model: ir.Model) -> Iterator[tuple[str, str]]:
    """Find operators, the last first, that do not stand in the table, or not with one of their dtypes."""
    for node in reversed(list(model.graph.all_nodes())):
        operator = f"{node.domain}::{node.op_type}" if node.domain else node.op_type
        seen = operators.view(node).tensorrt
        if seen is None:
            yield operator, str(node.name)
            continue
        dtypes = {value.dtype for value in (*node.inputs, *node.outputs) if value is not None and value.dtype}
        if unseen := dtypes - seen.dtypes - seen.besides:
            yield f"{operator} of {', '.join(sorted(dtype.name for dtype in unseen))}", str(node.name)
