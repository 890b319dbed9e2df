"""Weights that a graph slices, turns and puts together before it reads them: made once, when they are written.

Some models hold the experts of a layer otherwise than kernels read them: as rows of one matrix (DBRX), or with rows
that belong to none (LongCat). Nothing is read here, and no number is changed.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from llmforge.ir import graph, operators
from llmforge.ir.derived import computed
from llmforge.ir.operators import standard
from llmforge.ir.operators.record import Operator

_Read = Callable[[], NDArray[Any]]


def held(value: ir.Value) -> tuple[ir.LazyTensor, list[str]] | None:
    """Return what `value`, of a fixed shape, holds, and the parameters that it comes from.

    None: it is an initializer, or not made of initializers alone by Reshape, Transpose, Concat and Slice.
    """
    if value.is_initializer() or value.dtype is None or not (shape := graph.static(value)) or 0 in shape:
        return None
    read = _reader(value)
    if read is None:
        return None
    name, dtype = f"{value.name}.moved", value.dtype

    def made() -> NDArray[Any]:
        array = read()
        assert array.shape == shape, f"{name} is {array.shape}, its graph says {shape}"
        return np.ascontiguousarray(array)

    return computed(made, dtype, shape, name), list(dict.fromkeys(_sources(value)))


def _reader(value: ir.Value) -> _Read | None:
    """Return what computes `value`, whatever becomes of its graph."""
    if graph.is_constant(value):
        return graph.tensor(value).numpy
    node = value.producer()
    if node is None or len(node.outputs) != 1:
        return None
    view = operators.view(node)
    if not isinstance(view, standard.Reshape | standard.Transpose | standard.Concat | standard.Slice):
        return None
    given = [None if each is None else _reader(each) for each in node.inputs]
    reads = [each for each in given if each is not None]
    if len(reads) < sum(each is not None for each in node.inputs):
        return None
    match view:
        case standard.Concat():
            axis = view.axis
            return lambda: np.concatenate([read() for read in reads], axis)
        case standard.Transpose():
            perm = view.perm
            return lambda: reads[0]().transpose(perm)
        case standard.Reshape() if not view.allowzero:
            return lambda: _reshaped(reads[0](), reads[1]())
        case standard.Slice():
            return lambda: _sliced(reads[0](), *(None if read is None else read() for read in given[1:]))
    return None


def _reshaped(array: NDArray[Any], shape: NDArray[Any]) -> NDArray[Any]:
    return array.reshape([array.shape[at] if size == 0 else int(size) for at, size in enumerate(shape)])


def _sliced(
    array: NDArray[Any],
    starts: NDArray[Any] | None = None,
    ends: NDArray[Any] | None = None,
    axes: NDArray[Any] | None = None,
    steps: NDArray[Any] | None = None,
) -> NDArray[Any]:
    """Slice as ONNX does, whose steps here are positive: bounds beyond an axis end at it."""
    assert starts is not None
    assert ends is not None
    places = [slice(None)] * array.ndim
    for at, (start, end) in enumerate(zip(starts.tolist(), ends.tolist(), strict=True)):
        axis = at if axes is None else int(axes[at])
        step = 1 if steps is None else int(steps[at])
        assert step > 0, "a weight is read backwards"
        places[axis] = slice(start, end, step)
    return array[tuple(places)]


def _sources(value: ir.Value) -> Iterator[str]:
    """Name the parameters behind `value`, in the order in which they are read."""
    node = value.producer()
    if node is None:
        yield from graph.sources(value)
        return
    for each in node.inputs:
        if each is not None:
            yield from _sources(each)


LARGEST = 1 << 16  # elements of a result: vectors of norms and biases, no matrix, whose bytes would be stored twice
OPERATIONS: Mapping[type[Operator], np.ufunc] = {
    standard.Add: np.add,
    standard.Mul: np.multiply,
    standard.Sub: np.subtract,
}


def fold_constants(model: ir.Model) -> list[str]:
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
