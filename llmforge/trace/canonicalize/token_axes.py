"""Undo the flattening of tokens: what a model computes on [batch·sequence, …] becomes [batch, sequence, …].

Layers of experts and their routers flatten batch and sequence, and go back with a shape that they compute. Their
operators act on each token alone, so that they do the same with two axes in front, and nothing computes with shapes. An
operator that does not act on each token alone is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np
import onnx_ir as ir

from llmforge.base.errors import UnsupportedError
from llmforge.ir import graph as g

BATCH, SEQUENCE = "batch", "sequence"
Rule = Callable[[ir.Model, ir.Node, str], None]

POINTWISE = frozenset(
    {
        "Abs",
        "Add",
        "And",
        "Cast",
        "Clip",
        "Div",
        "Equal",
        "Erf",
        "Exp",
        "Gelu",
        "Greater",
        "GreaterOrEqual",
        "Identity",
        "Less",
        "LessOrEqual",
        "Log",
        "Max",
        "Min",
        "Mul",
        "Neg",
        "Not",
        "Or",
        "Pow",
        "Relu",
        "Sigmoid",
        "Softplus",
        "Sqrt",
        "Sub",
        "Tanh",
        "Where",
    }
)
TRUTHS = frozenset({"And", "Equal", "Greater", "GreaterOrEqual", "Less", "LessOrEqual", "Not", "Or"})
REDUCTIONS = frozenset(["ReduceMax", "ReduceMean", "ReduceMin", "ReduceSum"])


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
        if node.op_type == "ScatterElements" and node.domain == "":
            _mark(model, node)
        elif node.op_type == "Gemm" and node.domain == "":
            _matmul(node)
        elif node.op_type == "Squeeze" and node.domain == "":
            _name_axes(model, node)
    g.drop_unused(model)
    for node in model.graph:
        if any(_flat(value, tokens) for value in (*node.inputs, *node.outputs)):
            rule = _keep if node.domain == "llmforge" else RULES.get(node.op_type)
            if rule is None:
                raise _refused(node, "whose operator is not known to act on each token alone")
            rule(model, node, tokens)
            _check_outputs(node, tokens)
    for node in model.graph:
        for value in node.outputs:
            if _flat(value, tokens):
                value.shape = ir.Shape([BATCH, SEQUENCE, *_dims(node, value)[1:]])


def _check_outputs(node: ir.Node, tokens: str) -> None:
    """Refuse a result that is not known to have the tokens in front: what reads it would be left as it is."""
    for value in node.outputs:
        if value.uses() and not _flat(value, tokens) and _dims(node, value)[:2] != (BATCH, SEQUENCE):
            raise _refused(node, "which moves the axis of tokens")


def _know_shapes(model: ir.Model) -> None:
    """Note the shapes and dtypes of pointwise results for which the translation to ONNX left none."""
    for node in model.graph:
        (*_, y) = node.outputs
        if node.op_type in (*POINTWISE, "Softmax") and node.domain == "" and y.shape is None:
            known = [value.shape for value in node.inputs if value is not None]
            longest = max((tuple(shape) for shape in known if shape is not None), key=len, default=())
            full = [tuple(shape) for shape in known if shape is not None and len(shape) == len(longest)]
            if None not in known and all(1 not in shape for shape in full):
                y.shape = ir.Shape(longest)
        if y.dtype is None and y.shape is not None and node.op_type in TRUTHS:
            y.dtype = ir.DataType.BOOL
        elif y.dtype is None and y.shape is not None and node.op_type in (*POINTWISE, "Softmax"):
            operand = node.inputs[-1]  # the last: the first of Where is bool
            if node.op_type != "Cast" and operand is not None and operand.dtype is not None:
                y.dtype = operand.dtype


def _flattened(model: ir.Model) -> str | None:
    """Find the name of the flattened axis: the first of what a reshape makes of [batch, sequence, …]."""
    for node in model.graph:
        if (node.domain, node.op_type) == ("", "Reshape") and node.inputs[0] is not None:
            before, after = g.dims(node.inputs[0]) or (), g.dims(node.outputs[0]) or ()
            if before[:2] == (BATCH, SEQUENCE) and before[2:] == after[1:] and after and isinstance(after[0], str):
                return after[0]
    return None


def _matmul(node: ir.Node) -> None:
    """Write x·Wᵀ + b as the dialect writes a linear layer."""
    numbers = {name: attribute.value for name, attribute in node.attributes.items()}
    if numbers.get("transA", 0) or numbers.get("alpha", 1.0) != 1.0 or numbers.get("beta", 1.0) != 1.0:
        raise _refused(node, "which is no linear layer")
    x, weight, *bias = node.inputs
    if numbers.get("transB", 0):
        assert weight is not None
        weight = _insert(node, "Transpose", [weight], {"perm": [1, 0]}, None, weight.dtype)
    (y,) = node.outputs
    product = _insert(node, "MatMul", [x, weight], {}, y.shape, y.dtype)
    if bias and bias[0] is not None:
        product = _insert(node, "Add", [product, bias[0]], {}, y.shape, y.dtype)
    g.replace_uses(y, product)


def _name_axes(model: ir.Model, node: ir.Node) -> None:
    """Say which axes a Squeeze without axes removes, where all are of known size."""
    dims = None if node.inputs[0] is None else g.dims(node.inputs[0])
    if len(node.inputs) == 1 and dims is not None and all(isinstance(dim, int) for dim in dims):
        axes = [axis for axis, dim in enumerate(dims) if dim == 1]
        name = "experts.axes_" + "_".join(map(str, axes))
        node.resize_inputs(2)
        node.replace_input_with(1, g.initializer(model, name, np.array(axes, np.int64)))


def _mark(model: ir.Model, node: ir.Node) -> None:
    """Write a scatter of one number into the last axis [n] as a comparison with 0 … n - 1: [.., k] → [.., n].

    Scatters into a filled tensor, as masks of chosen groups are made, have a shape to compute; this has none.
    """
    data, index, updates = node.inputs
    (y,) = node.outputs
    dims = _dims(node, y)
    new, old, width = _filling(updates), _filling(data), dims[-1]
    last = node.attributes.get_int("axis", 0) in (-1, len(dims) - 1)
    if (
        new is None
        or not last
        or node.attributes.get_string("reduction", "none") != "none"
        or index is None
        or not isinstance(width, int)
    ):
        return  # refused where it touches tokens
    numbers = g.initializer(model, f"experts.range_{width}", np.arange(width, dtype=np.int64))
    axis = g.initializer(model, "experts.axis_last", np.array([-1], np.int64))
    across = g.initializer(model, "experts.axis_before_last", np.array([-2], np.int64))
    chosen = _dims(node, index)
    boolean = ir.DataType.BOOL
    each = _insert(node, "Unsqueeze", [index, axis], {}, ir.Shape([*chosen, 1]), index.dtype)
    equal = _insert(node, "Equal", [each, numbers], {}, ir.Shape([*chosen, dims[-1]]), boolean)
    hit = _insert(node, "ReduceMax", [equal, across], {"keepdims": 0}, ir.Shape(dims), boolean)
    if old is not None:
        data = g.initializer(model, f"experts.fill_{old}", np.array(old, np.float32))
    value = g.initializer(model, f"experts.fill_{new}", np.array(new, np.float32))
    g.replace_uses(y, _insert(node, "Where", [hit, value, data], {}, ir.Shape(dims), y.dtype))


def _filling(value: ir.Value | None) -> float | None:
    """Return the number that `value`, fp32, holds everywhere; None: it is not known to hold one."""
    node = None if value is None else value.producer()
    if node is None or value is None or value.dtype not in (None, ir.DataType.FLOAT):
        return None
    if node.op_type == "ConstantOfShape":
        attribute = node.attributes.get("value")
        tensor = None if attribute is None else attribute.as_tensor()
    elif node.op_type == "Expand" and node.inputs[0] is not None:
        tensor = ir.convenience.get_const_tensor(node.inputs[0])
        if tensor is None:
            return None
    else:
        return None
    if tensor is None:
        return 0.0  # the default of ConstantOfShape
    return float(tensor.numpy().item()) if tensor.dtype == ir.DataType.FLOAT and tensor.size == 1 else None


# Rules: each puts one more axis in front of a node's tokens, or refuses ----------------------------------------------


def _keep(model: ir.Model, node: ir.Node, tokens: str) -> None:
    """Leave as it is what reads its last axes only."""


def _pointwise(model: ir.Model, node: ir.Node, tokens: str) -> None:
    rank = len(_dims(node, node.outputs[0]))
    for value in node.inputs:
        if value is None:
            continue
        dims = _dims(node, value)
        if len(dims) == rank and dims[0] not in (tokens, 1):
            raise _refused(node, f"which aligns tokens with an axis of {dims[0]}")
        if len(dims) < rank and _flat(value, tokens):
            raise _refused(node, "which aligns tokens with another axis")


def _normalization(model: ir.Model, node: ir.Node, tokens: str) -> None:
    if node.attributes.get_int("axis", -1) != -1:
        raise _refused(node, "which normalizes more than the last axis")


def _matrix(model: ir.Model, node: ir.Node, tokens: str) -> None:
    x, w = node.inputs
    assert w is not None
    if _flat(w, tokens) or not _flat(x, tokens) or len(_dims(node, node.outputs[0])) < 2:
        raise _refused(node, "which multiplies tokens with each other")


def _axis(default: int, *, all_inputs: bool = True) -> Rule:
    def rule(model: ir.Model, node: ir.Node, tokens: str) -> None:
        data = node.inputs[0]
        if not all_inputs and not _flat(data, tokens):
            return  # rows chosen by tokens
        given = node.inputs if all_inputs and node.op_type != "TopK" else node.inputs[:1]
        if any(value is not None and not _flat(value, tokens) for value in given):
            raise _refused(node, "which reads tokens and something else along one axis")
        if not all_inputs and _flat(node.inputs[1], tokens):
            raise _refused(node, "which chooses tokens by tokens")
        assert data is not None
        axis = _shifted(node, node.attributes.get_int("axis", default), len(_dims(node, data)))
        node.attributes["axis"] = ir.AttrInt64("axis", axis)

    return rule


def _split(model: ir.Model, node: ir.Node, tokens: str) -> None:
    axis = _shifted(node, node.attributes.get_int("axis", 0), len(_dims(node, node.inputs[0])))
    node.attributes["axis"] = ir.AttrInt64("axis", axis)


def _axes(position: int, *, of_output: bool = False) -> Rule:
    def rule(model: ir.Model, node: ir.Node, tokens: str) -> None:
        given = node.inputs[position] if len(node.inputs) > position else None
        constant = None if given is None else ir.convenience.get_const_tensor(given)
        if constant is None:
            raise _refused(node, "whose axes are not constant")
        rank = len(_dims(node, node.outputs[0] if of_output else node.inputs[0]))
        axes = [_shifted(node, int(axis), rank) for axis in constant.numpy().reshape(-1)]
        name = "axes_" + "_".join(str(axis) for axis in axes)
        node.replace_input_with(position, g.initializer(model, f"experts.{name}", np.array(axes, np.int64)))

    return rule


def _transpose(model: ir.Model, node: ir.Node, tokens: str) -> None:
    first, *rest = node.attributes["perm"].as_ints()
    if first != 0:
        raise _refused(node, "which moves the axis of tokens")
    node.attributes["perm"] = ir.AttrInt64s("perm", [0, 1, *(axis + 1 for axis in rest)])


def _reshape(model: ir.Model, node: ir.Node, tokens: str) -> None:
    (y,) = node.outputs
    for value in (node.inputs[0], y):
        if not _flat(value, tokens) and _dims(node, value)[:2] != (BATCH, SEQUENCE):
            raise _refused(node, "which lays tokens out anew")
    rest = _dims(node, y)[1 if _flat(y, tokens) else 2 :]
    if not all(isinstance(dim, int) for dim in rest):
        raise _refused(node, "which lays tokens out anew")
    name = "shape_" + "_".join(map(str, (0, 0, *rest)))
    node.replace_input_with(1, g.initializer(model, name, np.array([0, 0, *rest], np.int64)))
    node.attributes.pop("allowzero", None)


def _expand(model: ir.Model, node: ir.Node, tokens: str) -> None:
    if not _flat(node.inputs[0], tokens):
        raise _refused(node, "which makes tokens of a constant")
    target = [1, 1, *_dims(node, node.outputs[0])[1:]]
    if not all(isinstance(dim, int) for dim in target):
        raise _refused(node, "which repeats tokens")
    name = "experts.expanded_" + "_".join(map(str, target))
    node.replace_input_with(1, g.initializer(model, name, np.array(target, np.int64)))


RULES: Mapping[str, Rule] = {
    **dict.fromkeys(POINTWISE, _pointwise),
    **dict.fromkeys(REDUCTIONS, _axes(1)),
    "RMSNormalization": _normalization,
    "LayerNormalization": _normalization,
    "MatMul": _matrix,
    "Softmax": _axis(-1),
    "ArgMax": _axis(0),
    "TopK": _axis(-1),
    "GatherElements": _axis(0),
    "Concat": _axis(0),
    "Gather": _axis(0, all_inputs=False),
    "Split": _split,
    "Slice": _axes(3),
    "Squeeze": _axes(1),
    "Unsqueeze": _axes(1, of_output=True),
    "Transpose": _transpose,
    "Reshape": _reshape,
    "Expand": _expand,
}


def _shifted(node: ir.Node, axis: int, rank: int) -> int:
    """Move an axis one back, and refuse the axis of tokens; an axis counted from the end stays."""
    if axis in (0, -rank):
        raise _refused(node, "which mixes the tokens of a batch")
    return axis + 1 if axis > 0 else axis


def _flat(value: ir.Value | None, tokens: str) -> bool:
    dims = None if value is None else g.dims(value)
    return bool(dims) and dims is not None and dims[0] == tokens


def _dims(node: ir.Node, value: ir.Value | None) -> tuple[int | str | None, ...]:
    dims = None if value is None else g.dims(value)
    if dims is None:
        raise _refused(node, f"whose {'input' if value is None else value.name!r} has no known shape")
    return dims


def _insert(
    before: ir.Node,
    op_type: str,
    inputs: list[ir.Value | None],
    attributes: Mapping[str, g.Attribute],
    shape: ir.Shape | None,
    dtype: ir.DataType | None,
) -> ir.Value:
    (y,) = g.insert(before, op_type, inputs, attributes)
    y.shape = shape
    if dtype is not None:
        y.dtype = dtype
    node = y.producer()
    assert node is not None
    node.metadata_props.update(before.metadata_props)  # the module that it comes from
    return y


def _refused(node: ir.Node, reason: str) -> UnsupportedError:
    return UnsupportedError(f"tokens of all rows are laid in one axis and go through a {node.op_type}, {reason}")
