"""How canonicalization rules rewrite a graph: nodes in the place of others, with shapes, and targets as constants."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import onnx_ir as ir

from llmforge.ir import graph
from llmforge.ir.operators import standard
from llmforge.ir.operators.record import Operator

Dims = Sequence[int | str | None]


def insert(
    at: ir.Node,
    operator: type[Operator],
    inputs: Mapping[str, ir.Value | None],
    attributes: Mapping[str, graph.Attribute] | None = None,
    *,
    dims: Dims | None,
    dtype: ir.DataType | None,
) -> ir.Value:
    """Insert a node in front of `at`, of the same module, and return its output."""
    made = operator.insert(at, inputs, attributes)
    made.node.metadata_props.update(at.metadata_props)
    y = made.output
    y.type = None if dtype is None else ir.TensorType(dtype)
    y.shape = None if dims is None else ir.Shape(dims)
    return y


def insert_changed(
    at: ir.Node,
    operator: Operator,
    inputs: Mapping[str, ir.Value],
    attributes: Mapping[str, graph.Attribute],
    dims: Dims,
) -> ir.Value:
    """Insert what `operator` computes, with other `inputs` and `attributes` in the place of some of its own."""
    given = {**{field.name: operator.operand(field) for field in operator.inputs}, **inputs}
    said = {**{name: attribute.value for name, attribute in operator.node.attributes.items()}, **attributes}
    return insert(at, type(operator), given, said, dims=dims, dtype=operator.output.dtype)


def bypass(operator: Operator, x: ir.Value) -> bool:
    """Let the readers of `operator` read `x`, which holds the same; not where that would rename an input or weight."""
    if operator.output.is_graph_output():
        return False
    graph.replace_uses(operator.output, x)
    return True


def replace(
    operator: Operator,
    by: type[Operator],
    inputs: Mapping[str, ir.Value | None],
    attributes: Mapping[str, graph.Attribute] | None = None,
) -> bool:
    """Let the readers of `operator` read a node `by` in its place, which makes the same."""
    y = operator.output
    graph.replace_uses(y, insert(operator.node, by, inputs, attributes, dims=graph.dims(y), dtype=y.dtype))
    return True


def reshape(model: ir.Model, operator: Operator, x: ir.Value) -> bool:
    """Replace `operator`, which keeps the numbers of `x` in order, by a Reshape; not where its target is computed."""
    dims = graph.dims(operator.output) or ()
    if (wanted := constant_target(model, graph.dims(x) or (), dims)) is None:
        return False
    made = insert(operator.node, standard.Reshape, {"x": x, "shape": wanted}, dims=dims, dtype=x.dtype)
    graph.replace_uses(operator.output, made)
    return True


def lay_out(model: ir.Model, at: ir.Node, x: ir.Value, *sizes: int) -> ir.Value:
    """Reshape `x` [batch, sequence, …] to [batch, sequence, *sizes] in front of `at`."""
    wanted, dims = target(model, [0, 0, *sizes]), [*(graph.dims(x) or ())[:2], *sizes]
    return insert(at, standard.Reshape, {"x": x, "shape": wanted}, dims=dims, dtype=x.dtype)


def swap_heads(at: ir.Node, x: ir.Value) -> ir.Value:
    """Transpose `x` [batch, heads, sequence, D] to [batch, sequence, heads, D] in front of `at`, or back."""
    first, second, third, fourth = graph.dims(x) or (None,) * 4
    dims = (first, third, second, fourth)
    return insert(at, standard.Transpose, {"x": x}, {"perm": [0, 2, 1, 3]}, dims=dims, dtype=x.dtype)


def constant_target(model: ir.Model, before: Dims, after: Dims) -> ir.Value | None:
    """State the target of a reshape from `before` to `after` as a constant; None where it cannot be.

    It can where every symbol of `after` but one stands where it stood in `before`.
    """
    wanted = [
        dim if isinstance(dim, int) else 0 if axis < len(before) and before[axis] == dim else -1
        for axis, dim in enumerate(after)
    ]
    return None if wanted.count(-1) > 1 or None in after or 0 in after else target(model, wanted)


def target(model: ir.Model, wanted: Sequence[int]) -> ir.Value:
    """Make the constant target of a Reshape or Expand."""
    name = "shape_" + "_".join("n" if dim == -1 else str(dim) for dim in wanted)
    return graph.initializer(model, name, np.array(wanted, np.int64))


def set_target(reshape: standard.Reshape, wanted: ir.Value) -> None:
    """Give a Reshape another target, of which a 0 copies a dimension."""
    reshape.shape = wanted
    reshape.node.attributes.pop("allowzero", None)


def integers(value: ir.Value | None) -> list[int] | None:
    """Read a small constant of integers; None: it is none."""
    tensor = None if value is None else ir.convenience.get_const_tensor(value)
    if tensor is None or not tensor.dtype.is_integer():
        return None
    return [int(x) for x in tensor.numpy().reshape(-1)]


def known(value: ir.Value) -> bool:
    """Say whether every dimension of `value` has a size or a name."""
    dims = graph.dims(value)
    return dims is not None and None not in dims
