"""Dtypes of the values that a pass left untyped: every operator of the dialect says what it makes of what it reads."""

from __future__ import annotations

import onnx_ir as ir

from llmforge.ir import operators


def complete(model: ir.Model) -> None:
    """Give every value of `model` that has no dtype the one that its operator makes, where that is known.

    Shapes are left alone. Graphs inside of nodes are not looked at.
    """
    for node in model.graph:
        view = operators.view(node)
        for index, value in enumerate(node.outputs):
            untyped = value.dtype is None and value.name != ""
            if untyped and (dtype := view.output_dtype(index)) is not None:
                value.type = ir.TensorType(dtype)
