"""Canonicalization rules for what moves or copies data, or only says its shape or dtype; none changes a number.

Shapes that torch.export recorded decide.
"""

from __future__ import annotations

import hashlib
import math

import numpy as np
import onnx_ir as ir

from llmforge.ir import graph, operators
from llmforge.ir.operators import standard
from llmforge.trace.canonicalize import rewriting
from llmforge.trace.canonicalize.rewriting import bypass, constant_target, insert_changed, integers, known, replace

FOLDED = 1024  # elements: constants up to this size are folded; shapes and scalars are, tables and weights are not


# Casts -------------------------------------------------------------------------------------------------------------


def cast_to_own_dtype(model: ir.Model, cast: standard.Cast) -> bool:
    """Cast(x) → x."""
    return cast.x.dtype == cast.to and bypass(cast, cast.x)


def cast_of_constant(model: ir.Model, cast: standard.Cast) -> bool:
    """Cast(integers) → integers of that dtype, where they are few; such a constant is no weight."""
    x, tensor, to = cast.x, cast.x.const_value, ir.DataType(cast.to)
    if tensor is None or not x.is_initializer() or x.dtype not in (ir.DataType.INT32, ir.DataType.INT64):
        return False
    if x.dtype == to or tensor.size > FOLDED or x.is_graph_input() or cast.output.is_graph_output():
        return False
    name = f"{x.name}.{to.name.lower()}"
    graph.replace_uses(cast.output, graph.initializer(model, name, tensor.numpy().astype(to.numpy())))
    return True


def cast_like(model: ir.Model, cast: standard.CastLike) -> bool:
    """CastLike(x, like) → Cast(x), or x."""
    to = cast.like.dtype
    if to is None:
        return False
    if cast.x.dtype == to:
        return bypass(cast, cast.x)
    graph.replace_uses(cast.output, standard.Cast.insert(cast.node, {"x": cast.x}, {"to": int(to)}).output)
    return True


# Copies ------------------------------------------------------------------------------------------------------------


def extremum_of_one(model: ir.Model, extremum: standard.Max) -> bool:
    """Max(x) → x."""
    return len(extremum.node.inputs) == 1 and bypass(extremum, extremum.x)


def to_own_shape(model: ir.Model, copy: standard.Expand | standard.Slice) -> bool:
    """Expand(x), Slice(x) → x where the result has the shape of x."""
    return known(copy.x) and graph.dims(copy.x) == graph.dims(copy.output) and bypass(copy, copy.x)


def slice_of_all(model: ir.Model, cut: standard.Slice) -> bool:
    """Slice(x) → x where it keeps everything, in order."""
    forward = cut.steps is None or set(integers(cut.steps) or ()) == {1}
    return forward and to_own_shape(model, cut)


def expand_of_constant(model: ir.Model, expand: standard.Expand) -> bool:
    """Expand(constant) → a constant, where it is small."""
    x, y = expand.x, expand.output
    tensor = None if x.is_initializer() else ir.convenience.get_const_tensor(x)
    dims = graph.dims(y)
    shape = [dim for dim in dims or () if isinstance(dim, int)]
    if tensor is None or dims is None or len(shape) != len(dims):
        return False
    if math.prod(shape) > FOLDED or y.is_graph_output():
        return False
    array = np.ascontiguousarray(np.broadcast_to(tensor.numpy(), shape))
    digest = hashlib.sha256(array.tobytes()).hexdigest()[:8]
    graph.replace_uses(y, graph.initializer(model, f"constant_{'_'.join(map(str, shape))}_{digest}", array))
    return True


def expand_to_shape_of_x(model: ir.Model, expand: standard.Expand) -> bool:
    """Expand(x, Shape(x)) → x."""
    shape = standard.OnnxShape.made(expand.shape)
    whole = shape is not None and shape.x is expand.x and not shape.start and shape.end is None
    return whole and bypass(expand, expand.x)


def expand_in_front_of_arithmetic(model: ir.Model, expand: standard.Expand) -> bool:
    """Add(Expand(x), y) → Add(x, y), as y has that shape; so for each operator that computes number by number."""
    y = expand.output
    dims = graph.dims(y)
    if not known(expand.x) or not known(y):
        return False
    for reader, _ in y.uses():
        others = [value for value in reader.inputs if value is not None and value is not y]
        if not operators.view(reader).pointwise or not any((graph.dims(other) or ()) == dims for other in others):
            return False
    return bypass(expand, expand.x)


def expand_to_constant_target(model: ir.Model, expand: standard.Expand) -> bool:
    """Expand(x, computed) → Expand(x, constant) where the sizes of what x repeats are known."""
    x, y = expand.x, expand.output
    before, after = graph.dims(x) or (), graph.dims(y) or ()
    if not known(x) or not known(y) or y.is_graph_output() or len(before) != len(after):
        return False
    target = [1 if b == a else a for b, a in zip(before, after, strict=True)]
    sizes = [dim for dim in target if isinstance(dim, int)]
    if ir.convenience.get_const_tensor(expand.shape) is not None or len(sizes) != len(target):
        return False
    expand.shape = rewriting.target(model, sizes)
    return True


# Reshapes ----------------------------------------------------------------------------------------------------------


def reshape_of_reshape(model: ir.Model, second: standard.Reshape) -> bool:
    """Reshape(Reshape(x)) → Reshape(x)."""
    first = standard.Reshape.made(second.x)
    if first is None or not known(second.output):
        return False
    constant = integers(second.shape)
    wanted = (
        constant_target(model, graph.dims(first.x) or (), graph.dims(second.output) or ()) if known(first.x) else None
    )
    if wanted is not None:
        rewriting.set_target(second, wanted)
    elif constant is not None and 0 in constant:  # a 0 copies a dimension of what the node read before
        return False
    second.x = first.x
    return True


def reshape_to_own_shape(model: ir.Model, reshape: standard.Reshape) -> bool:
    """Reshape(x) → x."""
    before = graph.dims(reshape.x) or ()
    flat = len(before) == 1 and integers(reshape.shape) == [-1]
    same = known(reshape.x) and before == graph.dims(reshape.output)
    return (flat or same) and bypass(reshape, reshape.x)


def reshape_to_constant_target(model: ir.Model, reshape: standard.Reshape) -> bool:
    """Reshape(x, computed) → Reshape(x, constant)."""
    x, y = reshape.x, reshape.output
    if ir.convenience.get_const_tensor(reshape.shape) is not None or not (known(x) and known(y)):
        return False
    wanted = constant_target(model, graph.dims(x) or (), graph.dims(y) or ())
    if wanted is None:
        return False
    rewriting.set_target(reshape, wanted)
    return True


def as_reshape(model: ir.Model, squeeze: standard.Squeeze | standard.Unsqueeze) -> bool:
    """Squeeze(x), Unsqueeze(x) → Reshape(x), which joins others."""
    return known(squeeze.x) and known(squeeze.output) and rewriting.reshape(model, squeeze, squeeze.x)


# Transposes --------------------------------------------------------------------------------------------------------


def transpose_of_transpose(model: ir.Model, second: standard.Transpose) -> bool:
    """Transpose(Transpose(x)) → x where the second undoes the first."""
    first = standard.Transpose.made(second.x)
    if first is None or [first.perm[axis] for axis in second.perm] != sorted(first.perm):
        return False
    return bypass(second, first.x)


def transpose_of_nothing(model: ir.Model, transpose: standard.Transpose) -> bool:
    """Transpose(x) → x where every axis stays."""
    return list(transpose.perm) == sorted(transpose.perm) and bypass(transpose, transpose.x)


def transpose_of_ones(model: ir.Model, transpose: standard.Transpose) -> bool:
    """Transpose(x) → Reshape(x) where only dimensions of size one move; weights stay."""
    x, y, before = transpose.x, transpose.output, graph.dims(transpose.x) or ()
    if x.is_initializer() or not before or graph.dims(y) is None or y.is_graph_output():
        return False
    moving = [axis for axis in transpose.perm if before[axis] != 1]
    if len(moving) == len(before) or moving != sorted(moving):
        return False
    return rewriting.reshape(model, transpose, x)


def norm_of_transpose(model: ir.Model, norm: standard.LayerNormalization | standard.RMSNormalization) -> bool:
    """Norm(Transpose(x)) → Transpose(Norm(x)) where the last axis, which it normalizes, stays the last."""
    turned = standard.Transpose.made(norm.x)
    if turned is None or len(norm.node.outputs) != 1:
        return False
    *_, last = perm = list(turned.perm)
    if last != len(perm) - 1 or norm.axis not in (-1, last):
        return False
    if len(turned.x.uses()) > 1 and len(norm.x.uses()) > 1:
        return False
    new = insert_changed(norm.node, norm, {"x": turned.x}, {"axis": -1}, graph.dims(turned.x) or ())
    return replace(norm, standard.Transpose, {"x": new}, {"perm": perm})


# Sizes -------------------------------------------------------------------------------------------------------------


def shape_of_inputs(model: ir.Model, shape: standard.OnnxShape) -> bool:
    """Shape(x) → Concat(Shape(input), …, constant, …): sizes come from the graph inputs that bring them.

    In front of everything, because layers that share what one of them computed cannot be told apart
    (`export.replicate_layers`).
    """
    y, dims = shape.output, graph.dims(shape.x)
    if dims is None or y.is_graph_output():
        return False
    wanted = dims[slice(shape.start, shape.end)]
    sized: dict[int | str | None, tuple[ir.Value, int]] = {}
    for value in model.graph.inputs:
        for axis, dim in enumerate(graph.dims(value) or ()):
            sized.setdefault(dim, (value, axis))
    if not wanted or any(not isinstance(dim, int) and (dim is None or dim not in sized) for dim in wanted):
        return False
    if len(wanted) == 1 and wanted[0] in sized and sized[wanted[0]][0] is shape.x:
        return False
    front, sizes = model.graph[0], list[ir.Value]()
    for dim in wanted:
        if isinstance(dim, int):
            sizes.append(graph.initializer(model, f"size_{dim}", np.array([dim], np.int64)))
            continue
        value, axis = sized[dim]
        size = standard.OnnxShape.insert(front, {"x": value}, {"start": axis, "end": axis + 1}).output
        size.type, size.shape = ir.TensorType(ir.DataType.INT64), ir.Shape([1])
        sizes.append(size)
    whole = sizes[0] if len(sizes) == 1 else graph.insert(front, "Concat", sizes, {"axis": 0})[0]
    graph.replace_uses(y, whole)
    return True
