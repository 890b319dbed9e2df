"""Nodes that compute with small constants alone, computed when the engine is written instead of in every step.

The weight of a norm that multiplies by 1 + w is one: `Add(w, 1)` becomes the initializer that it makes. It stays lazy:
nothing is read here. numpy and ONNX Runtime round such an operation alike (IEEE 754), so that no bit changes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import onnx_ir as ir

from llmforge.ir import graph as g

LARGEST = 1 << 16  # elements of a result: vectors of norms and biases, no matrix, whose bytes would be stored twice
OPERATIONS = {"Add": np.add, "Mul": np.multiply, "Sub": np.subtract}


def fold(model: ir.Model) -> list[str]:
    """Replace every such node of `model`, fp32; return their names."""
    folded = []
    for node in list(model.graph):
        tensors = _constants(node)
        if tensors is None or node.outputs[0].is_graph_output():
            continue
        shape = np.broadcast_shapes(*(tensor.shape.numpy() for tensor in tensors))
        if np.prod(shape) > LARGEST:
            continue
        (old,) = node.outputs
        name = str(old.name)
        old.name = f"{name}.computed"
        read = _reader(OPERATIONS[node.op_type], tensors, name)
        lazy = ir.LazyTensor(read, dtype=ir.DataType.FLOAT, shape=ir.Shape(shape), name=name)
        g.replace_uses(old, g.initializer(model, name, lazy))
        model.graph.remove(node, safe=True)
        folded.append(str(node.name))
    if folded:
        g.drop_unused(model)
    return folded


def _constants(node: ir.Node) -> list[ir.TensorProtocol] | None:
    """Return the tensors that `node` computes with; None where it is not one that is folded."""
    if node.domain or node.op_type not in OPERATIONS:
        return None
    tensors = []
    for value in node.inputs:
        if value is None or not value.is_initializer() or value.is_graph_input() or value.const_value is None:
            return None
        if value.const_value.dtype != ir.DataType.FLOAT:
            return None
        tensors.append(value.const_value)
    return tensors


def _reader(
    operation: Callable[..., object], tensors: Sequence[ir.TensorProtocol], name: str
) -> Callable[[], ir.TensorProtocol]:
    def read() -> ir.TensorProtocol:
        return ir.Tensor(np.asarray(operation(*(tensor.numpy() for tensor in tensors)), np.float32), name=name)

    return read
