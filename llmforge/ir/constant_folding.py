"""Nodes that compute with small constants alone, computed when the engine is written instead of in every step.

The weight of a norm that multiplies by 1 + w is one: `Add(w, 1)` becomes the initializer that it makes. It stays lazy:
nothing is read here. numpy and ONNX Runtime round such an operation alike (IEEE 754), so that no bit changes.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from llmforge.ir import graph, operators
from llmforge.ir.derived import computed
from llmforge.ir.operators import standard
from llmforge.ir.operators.record import Operator

LARGEST = 1 << 16  # elements of a result: vectors of norms and biases, no matrix, whose bytes would be stored twice
OPERATIONS: Mapping[type[Operator], np.ufunc] = {
    standard.Add: np.add,
    standard.Mul: np.multiply,
    standard.Sub: np.subtract,
}


def fold(model: ir.Model) -> list[str]:
    """Replace every such node of `model`, fp32; return their names."""
    folded = []
    for view in list(map(operators.view, model.graph)):
        operation, tensors, old = OPERATIONS.get(type(view)), _constants(view.node), view.output
        if operation is None or tensors is None or old.is_graph_output():
            continue
        shape = np.broadcast_shapes(*(tensor.shape.numpy() for tensor in tensors))
        if np.prod(shape) > LARGEST:
            continue
        name = str(old.name)
        old.name = f"{name}.computed"
        lazy = computed(functools.partial(_result, operation, tensors), ir.DataType.FLOAT, shape, name)
        graph.replace_uses(old, graph.initializer(model, name, lazy))
        model.graph.remove(view.node, safe=True)
        folded.append(view.name)
    if folded:
        graph.drop_unused(model)
    return folded


def _constants(node: ir.Node) -> list[ir.TensorProtocol] | None:
    """Return the fp32 tensors that `node` computes with; None where it reads anything else."""
    tensors = [value.const_value for value in node.inputs if value is not None and graph.is_constant(value)]
    held = [tensor for tensor in tensors if tensor is not None and tensor.dtype == ir.DataType.FLOAT]
    return held if len(held) == len(node.inputs) else None


def _result(operation: np.ufunc, tensors: Sequence[ir.TensorProtocol]) -> NDArray[np.float32]:
    return np.asarray(operation(*(tensor.numpy() for tensor in tensors)), np.float32)
