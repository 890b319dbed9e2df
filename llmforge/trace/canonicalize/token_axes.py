"""Undo the flattening of tokens: what a model computes on [batch·sequence, …] becomes [batch, sequence, …].

Layers of experts and their routers flatten batch and sequence, and go back with a shape that they compute. Their
operators act on each token alone, so that they do the same with two axes in front, and nothing computes with shapes. An
operator that does not act on each token alone is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import onnx_ir as ir

from llmforge.base.errors import UnsupportedError
from llmforge.ir import graph, operators
from llmforge.ir.operators import canonical, standard
from llmforge.ir.operators.record import Operator, Reduction
from llmforge.trace.canonicalize import rewriting
from llmforge.trace.canonicalize.rewriting import Dims, insert, integers

BATCH, SEQUENCE = "batch", "sequence"
Rule = Callable[[ir.Model, Any, str], None]  # takes a node that it is listed for, and the name of the flattened axis


def restore(model: ir.Model) -> None:
    """Rewrite `model` in place so that no value has an axis of flattened tokens.

    Raises:
        UnsupportedError: a node mixes tokens, or its operator is not known to keep them apart.
    """
    _know_shapes(model)
    tokens = _flattened(model)
    if tokens is None:
        return
    for node in list(model.graph):
        match operators.view(node):
            case standard.ScatterElements() as scatter:
                _compare(model, scatter)
            case standard.Gemm() as gemm:
                multiply(gemm)
            case standard.Squeeze() as squeeze:
                _name_axes(model, squeeze)
    graph.drop_unused(model)
    for node in model.graph:
        if any(_flat(value, tokens) for value in (*node.inputs, *node.outputs)):
            operator = operators.view(node)
            rule = _pointwise if operator.pointwise else RULES.get(type(operator))
            if rule is None:
                raise _refused(operator, "whose operator is not known to act on each token alone")
            rule(model, operator, tokens)
            _check_outputs(operator, tokens)
    for node in model.graph:
        for value in node.outputs:
            if _flat(value, tokens):
                value.shape = ir.Shape([BATCH, SEQUENCE, *(graph.dims(value) or ())[1:]])


def _check_outputs(operator: Operator, tokens: str) -> None:
    """Refuse a result that is not known to have the tokens in front: what reads it would be left as it is."""
    for value in operator.node.outputs:
        if value.uses() and not _flat(value, tokens) and _dims(operator, value)[:2] != (BATCH, SEQUENCE):
            raise _refused(operator, "which moves the axis of tokens")


def _know_shapes(model: ir.Model) -> None:
    """Note the shapes and dtypes of pointwise results for which the translation to ONNX left none."""
    for node in model.graph:
        operator = operators.view(node)
        if not operator.pointwise and not isinstance(operator, standard.Softmax):
            continue
        y = operator.output
        if y.shape is None:
            known = [value.shape for value in node.inputs if value is not None]
            longest = max((tuple(shape) for shape in known if shape is not None), key=len, default=())
            full = [tuple(shape) for shape in known if shape is not None and len(shape) == len(longest)]
            if None not in known and all(1 not in shape for shape in full):
                y.shape = ir.Shape(longest)
        dtype = operator.output_dtype(0)
        if y.dtype is None and y.shape is not None and dtype is not None:
            y.dtype = dtype


def _flattened(model: ir.Model) -> str | None:
    """Find the name of the flattened axis: the first of what a reshape makes of [batch, sequence, …]."""
    for reshape in standard.Reshape.all(model):
        before, after = graph.dims(reshape.x) or (), graph.dims(reshape.output) or ()
        if before[:2] == (BATCH, SEQUENCE) and before[2:] == after[1:] and after and isinstance(after[0], str):
            return after[0]
    return None


def multiply(gemm: standard.Gemm) -> None:
    """Gemm(x, W, b) → Add(MatMul(x, Wᵀ), b), as the dialect writes a linear layer."""
    if gemm.transA or gemm.alpha != 1.0 or gemm.beta != 1.0:
        raise _refused(gemm, "which is no linear layer")
    at, y, weight = gemm.node, gemm.output, gemm.b
    if gemm.transB:
        weight = insert(at, standard.Transpose, {"x": weight}, {"perm": [1, 0]}, dims=None, dtype=weight.dtype)
    product = insert(at, standard.MatMul, {"x": gemm.a, "w": weight}, dims=graph.dims(y), dtype=y.dtype)
    if gemm.c is not None:
        product = insert(at, standard.Add, {"a": product, "b": gemm.c}, dims=graph.dims(y), dtype=y.dtype)
    graph.replace_uses(y, product)


def _name_axes(model: ir.Model, squeeze: standard.Squeeze) -> None:
    """Say which axes a Squeeze without axes removes, where all are of known size."""
    dims = graph.dims(squeeze.x)
    if squeeze.axes is None and dims is not None and all(isinstance(dim, int) for dim in dims):
        squeeze.axes = _axes_constant(model, [axis for axis, dim in enumerate(dims) if dim == 1])


def _compare(model: ir.Model, scatter: standard.ScatterElements) -> None:
    """Write a scatter of one number into the last axis [n] as a comparison with 0 … n - 1: [.., k] → [.., n].

    Scatters into a filled tensor, as masks of chosen groups are made, have a shape to compute; this has none.
    """
    y, at, index, data = scatter.output, scatter.node, scatter.indices, scatter.data
    dims = _dims(scatter, y)
    new, old, width = _filling(scatter.updates), _filling(data), dims[-1]
    last = scatter.axis in (-1, len(dims) - 1)
    if new is None or not last or scatter.reduction != "none" or not isinstance(width, int):
        return  # refused where it touches tokens
    numbers = graph.initializer(model, f"experts.range_{width}", np.arange(width, dtype=np.int64))
    axis = graph.initializer(model, "experts.axis_last", np.array([-1], np.int64))
    across = graph.initializer(model, "experts.axis_before_last", np.array([-2], np.int64))
    chosen, boolean = _dims(scatter, index), ir.DataType.BOOL
    each = insert(at, standard.Unsqueeze, {"x": index, "axes": axis}, dims=[*chosen, 1], dtype=index.dtype)
    equal = insert(at, standard.Equal, {"a": each, "b": numbers}, dims=[*chosen, width], dtype=boolean)
    hit = insert(at, standard.ReduceMax, {"x": equal, "axes": across}, {"keepdims": 0}, dims=dims, dtype=boolean)
    if old is not None:
        data = graph.initializer(model, f"experts.fill_{old}", np.array(old, np.float32))
    value = graph.initializer(model, f"experts.fill_{new}", np.array(new, np.float32))
    graph.replace_uses(
        y, insert(at, standard.Where, {"condition": hit, "x": value, "y": data}, dims=dims, dtype=y.dtype)
    )


def _filling(value: ir.Value) -> float | None:
    """Return the number that `value`, fp32, holds everywhere; None: it is not known to hold one."""
    if value.dtype not in (None, ir.DataType.FLOAT):
        return None
    fill, expand = standard.ConstantOfShape.made(value), standard.Expand.made(value)
    if fill is not None and fill.value is None:
        return 0.0  # the default of ConstantOfShape
    tensor = fill.value if fill is not None else None
    if expand is not None:
        tensor = ir.convenience.get_const_tensor(expand.x)
    if tensor is None or tensor.dtype != ir.DataType.FLOAT or tensor.size != 1:
        return None
    return float(tensor.numpy().item())


# Rules: each puts one more axis in front of a node's tokens, or refuses ----------------------------------------------


def _keep(model: ir.Model, operator: Operator, tokens: str) -> None:
    """Leave as it is what reads its last axes only."""


def _pointwise(model: ir.Model, operator: Operator, tokens: str) -> None:
    rank = len(_dims(operator, operator.output))
    for value in operator.node.inputs:
        if value is None:
            continue
        dims = _dims(operator, value)
        if len(dims) == rank and dims[0] not in (tokens, 1):
            raise _refused(operator, f"which aligns tokens with an axis of {dims[0]}")
        if len(dims) < rank and _flat(value, tokens):
            raise _refused(operator, "which aligns tokens with another axis")


def _normalization(model: ir.Model, norm: standard.RMSNormalization | standard.LayerNormalization, tokens: str) -> None:
    if norm.axis != -1:
        raise _refused(norm, "which normalizes more than the last axis")


def _matrix(model: ir.Model, product: standard.MatMul, tokens: str) -> None:
    if _flat(product.w, tokens) or not _flat(product.x, tokens) or len(_dims(product, product.output)) < 2:
        raise _refused(product, "which multiplies tokens with each other")


def _along_axis(
    model: ir.Model,
    operator: standard.ArgMax | standard.Concat | standard.GatherElements | standard.Softmax | standard.TopK,
    tokens: str,
) -> None:
    joined = isinstance(operator, standard.Concat | standard.GatherElements)
    read = operator.node.inputs if joined else [operator.first_input]
    if any(value is not None and not _flat(value, tokens) for value in read):
        raise _refused(operator, "which reads tokens and something else along one axis")
    operator.axis = _shifted(operator, operator.axis, operator.first_input)


def _gather(model: ir.Model, lookup: standard.Gather, tokens: str) -> None:
    if not _flat(lookup.data, tokens):
        return  # rows chosen by tokens
    if _flat(lookup.indices, tokens):
        raise _refused(lookup, "which chooses tokens by tokens")
    lookup.axis = _shifted(lookup, lookup.axis, lookup.data)


def _split(model: ir.Model, split: standard.Split, tokens: str) -> None:
    split.axis = _shifted(split, split.axis, split.x)


def _axes(
    model: ir.Model, operator: Reduction | standard.Slice | standard.Squeeze | standard.Unsqueeze, tokens: str
) -> None:
    axes = integers(operator.operand(type(operator).axes))
    if axes is None:
        raise _refused(operator, "whose axes are not constant")
    counted = operator.output if isinstance(operator, standard.Unsqueeze) else operator.x
    operator.axes = _axes_constant(model, [_shifted(operator, axis, counted) for axis in axes])


def _transpose(model: ir.Model, transpose: standard.Transpose, tokens: str) -> None:
    first, *rest = transpose.perm
    if first != 0:
        raise _refused(transpose, "which moves the axis of tokens")
    transpose.perm = [0, 1, *(axis + 1 for axis in rest)]


def _reshape(model: ir.Model, reshape: standard.Reshape, tokens: str) -> None:
    y = reshape.output
    for value in (reshape.x, y):
        if not _flat(value, tokens) and _dims(reshape, value)[:2] != (BATCH, SEQUENCE):
            raise _refused(reshape, "which lays tokens out anew")
    rest = _sizes(reshape, _dims(reshape, y)[1 if _flat(y, tokens) else 2 :], "which lays tokens out anew")
    rewriting.set_target(reshape, rewriting.target(model, [0, 0, *rest]))


def _expand(model: ir.Model, expand: standard.Expand, tokens: str) -> None:
    if not _flat(expand.x, tokens):
        raise _refused(expand, "which makes tokens of a constant")
    target = [1, 1, *_sizes(expand, _dims(expand, expand.output)[1:], "which repeats tokens")]
    name = "experts.expanded_" + "_".join(map(str, target))
    expand.shape = graph.initializer(model, name, np.array(target, np.int64))


RULES: Mapping[type[Operator], Rule] = {  # besides what is pointwise
    canonical.MoE: _keep,
    standard.ArgMax: _along_axis,
    standard.Concat: _along_axis,
    standard.Expand: _expand,
    standard.Gather: _gather,
    standard.GatherElements: _along_axis,
    standard.LayerNormalization: _normalization,
    standard.MatMul: _matrix,
    standard.RMSNormalization: _normalization,
    standard.ReduceMax: _axes,
    standard.ReduceMean: _axes,
    standard.ReduceMin: _axes,
    standard.ReduceSum: _axes,
    standard.Reshape: _reshape,
    standard.Slice: _axes,
    standard.Softmax: _along_axis,
    standard.Split: _split,
    standard.Squeeze: _axes,
    standard.TopK: _along_axis,
    standard.Transpose: _transpose,
    standard.Unsqueeze: _axes,
}


def _axes_constant(model: ir.Model, axes: list[int]) -> ir.Value:
    return graph.initializer(model, "experts.axes_" + "_".join(map(str, axes)), np.array(axes, np.int64))


def _sizes(operator: Operator, dims: Dims, reason: str) -> list[int]:
    """Return `dims` where all are numbers; refuse `operator` otherwise."""
    sizes = [dim for dim in dims if isinstance(dim, int)]
    if len(sizes) != len(dims):
        raise _refused(operator, reason)
    return sizes


def _shifted(operator: Operator, axis: int, counted: ir.Value) -> int:
    """Move an axis of `counted` one back, and refuse the axis of tokens; an axis counted from the end stays."""
    if axis in (0, -len(_dims(operator, counted))):
        raise _refused(operator, "which mixes the tokens of a batch")
    return axis + 1 if axis > 0 else axis


def _flat(value: ir.Value | None, tokens: str) -> bool:
    dims = None if value is None else graph.dims(value)
    return bool(dims) and dims is not None and dims[0] == tokens


def _dims(operator: Operator, value: ir.Value) -> tuple[int | str | None, ...]:
    dims = graph.dims(value)
    if dims is None:
        raise _refused(operator, f"whose {value.name!r} has no known shape")
    return dims


def _refused(operator: Operator, reason: str) -> UnsupportedError:
    name = operator.node.op_type
    return UnsupportedError(f"tokens of all rows are laid in one axis and go through a {name}, {reason}")
