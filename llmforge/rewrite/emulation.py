"""Run half precision where there are no kernels for it: fp32 arithmetic that rounds where the graph would.

ONNX Runtime has no bf16 MatMul, Mul or Sigmoid on a CPU, and no fp16 ones for every operator. `emulate` makes a twin
of a graph in which every fp16 or bf16 number is held in fp32: weights and caches hold the rounded numbers, and what an
operator makes goes through two Casts, to the dtype and back. So an operator sums in fp32 and rounds its result once,
as kernels for GPUs do. A number beyond the largest of fp16 becomes infinite in the twin as it would there.
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from llmforge.ir import graph, operators
from llmforge.ir.derived import Derived, to_fp32
from llmforge.ir.operators.standard import Cast

FLOAT = ir.DataType.FLOAT
HALVES = frozenset({ir.DataType.FLOAT16, ir.DataType.BFLOAT16})
_SMALL_BYTES = 1024


def is_half(model: ir.Model) -> bool:
    """Say whether `model` holds or computes numbers in half precision."""
    held = [*model.graph.inputs, *model.graph.initializers.values()]
    return any(value.dtype in HALVES for value in held) or any(_casts_down(node) for node in model.graph)


def emulate(model: ir.Model) -> ir.Model:
    """Return the fp32 twin of `model`, a graph of the dialect; `model` itself where nothing of it is in half precision.

    Values keep their names: the twin's hold the same numbers in fp32. Tensors stay lazy.
    """
    if not is_half(model):
        return model
    twin = model.clone()
    operators.complete_dtypes(twin)
    for name, value in twin.graph.initializers.items():
        if value.dtype in HALVES and value.const_value is not None:
            value.const_value = widened(value.const_value, name)
            value.type = ir.TensorType(FLOAT)
    for value in twin.graph.inputs:
        if value.dtype in HALVES:
            value.type = ir.TensorType(FLOAT)
    for node in list(twin.graph):
        _emulate(node)
        _give_constants(node)
    return twin


def _give_constants(node: ir.Node) -> None:
    """Let `node` read a weight itself, not a Cast of it to fp32, which it is in already.

    ONNX Runtime's MatMulNBits, at accuracy_level 4, needs constant scales: it takes others for 0 (1.31), and nothing
    is folded where its optimizations are off.
    """
    if not operators.view(node).prepacked:
        return
    for index, value in enumerate(node.inputs):
        cast = Cast.made(value)
        if cast is not None and cast.to == FLOAT and cast.x.is_initializer() and cast.x.dtype == FLOAT:
            node.replace_input_with(index, cast.x)


def _emulate(node: ir.Node) -> None:
    """Let `node` compute in fp32, and round what it makes to the dtype that it had."""
    halves = [(value, graph.dtype(value)) for value in node.outputs if value.dtype in HALVES and value.name]
    for value, _ in halves:
        value.type = ir.TensorType(FLOAT)
    if _casts_down(node):
        Cast(node).to = int(FLOAT)
    if operators.view(node).moves:
        return
    for value, dtype in halves:
        _round(value, dtype)


def _round(value: ir.Value, dtype: ir.DataType) -> None:
    """Give `value` over to two Casts; what they make stands in its place, under its name."""
    down = ir.Node("", "Cast", [value], [ir.AttrInt64("to", int(dtype))], name=f"{value.name}/round")
    back = ir.Node("", "Cast", [down.outputs[0]], [ir.AttrInt64("to", int(FLOAT))], name=f"{value.name}/rounded")
    half = Cast(down).output
    half.name, half.type, half.shape = f"{value.name}.half", ir.TensorType(dtype), value.shape
    graph.insert_behind(value, [down, back], "exact")


def widened(tensor: ir.TensorProtocol, name: str) -> ir.TensorProtocol:
    """Hold the numbers of `tensor` in fp32: lazily, but for small constants, which ONNX Runtime wants to see."""
    if tensor.nbytes < _SMALL_BYTES and not isinstance(tensor, ir.LazyTensor | ir.ExternalTensor):
        return ir.Tensor(tensor.numpy().astype(np.float32), name=name)
    return Derived(to_fp32, [tensor], FLOAT, ir.Shape(tensor.shape.numpy()), name)


def origin(tensor: ir.TensorProtocol) -> ir.TensorProtocol:
    """Return what was `widened` to `tensor`, or `tensor` itself: one object however often a graph is emulated."""
    return tensor.operands[0] if isinstance(tensor, Derived) and tensor.function is to_fp32 else tensor


def _casts_down(node: ir.Node) -> bool:
    cast = Cast.of(node)
    return cast is not None and ir.DataType(cast.to) in HALVES
