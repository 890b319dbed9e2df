"""Rules of the clean-up that bring detours of model code to the one form of the dialect; none changes a number.

Each rule looks at one node and says whether it rewrote something. Shapes that torch.export recorded decide.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np
import onnx_ir as ir

from llmforge.ir import graph as g

Rule = Callable[[ir.Model, ir.Node], bool]
Dims = Sequence[int | str | None]

POINTWISE = frozenset({"Add", "Sub", "Mul", "Div", "Pow", "Relu", "Gelu", "Tanh", "Sigmoid", "Erf", "Neg"})
NORMS = frozenset({"LayerNormalization", "RMSNormalization"})


def bypass(node: ir.Node) -> bool:
    """Let the readers of `node` read its first input; not where that would rename a graph input or weight."""
    (old,), new = node.outputs, node.inputs[0]
    assert new is not None
    if old.is_graph_output():
        return False
    g.replace_uses(old, new)
    return True


def _constant(value: ir.Value | None) -> list[int] | None:
    """Read a small constant of integers."""
    tensor = None if value is None else ir.convenience.get_const_tensor(value)
    if tensor is None or not tensor.dtype.is_integer():
        return None
    return [int(x) for x in tensor.numpy().reshape(-1)]


def _insert(
    at: ir.Node,
    op_type: str,
    inputs: Sequence[ir.Value | None],
    dims: Dims,
    like: ir.Value,
    attributes: Mapping[str, g.Attribute] | None = None,
) -> ir.Value:
    """Insert a node in front of `at`, of the same module, whose output has the type of `like`."""
    (value,) = g.insert(at, op_type, inputs, attributes)
    value.type, value.shape = like.type, ir.Shape(dims)
    node = value.producer()
    assert node is not None
    node.metadata_props.update(at.metadata_props)
    return value


def _target(model: ir.Model, wanted: Sequence[int]) -> ir.Value:
    name = "shape_" + "_".join("n" if dim == -1 else str(dim) for dim in wanted)
    return g.initializer(model, name, np.array(wanted, np.int64))


def _reshaped(model: ir.Model, at: ir.Node, x: ir.Value, dims: Dims) -> ir.Value | None:
    """Reshape `x` to `dims`, of which every symbol but one stands where it stood in x."""
    wanted = restated(model, g.dims(x) or (), dims)
    return None if wanted is None else _insert(at, "Reshape", [x, wanted], dims, x)


def restated(model: ir.Model, before: Dims, after: Dims) -> ir.Value | None:
    """State the target of a reshape from `before` to `after` as a constant; None where it cannot be."""
    wanted = [
        dim if isinstance(dim, int) else 0 if axis < len(before) and before[axis] == dim else -1
        for axis, dim in enumerate(after)
    ]
    return None if wanted.count(-1) > 1 or None in after or 0 in after else _target(model, wanted)


def _perm(node: ir.Node | None) -> list[int] | None:
    return list(node.attributes["perm"].as_ints()) if node is not None and node.op_type == "Transpose" else None


# Indexing and broadcasting -----------------------------------------------------------------------------------------


def single(model: ir.Model, node: ir.Node) -> bool:
    """Max(x) = x."""
    return len(node.inputs) == 1 and bypass(node)


def expand(model: ir.Model, node: ir.Node) -> bool:
    """Drop an Expand to the shape of its own input, or in front of arithmetic that broadcasts itself.

    The target of one that stays is stated as a constant.
    """
    x, shape = node.inputs[0], node.inputs[1]
    assert x is not None
    source = None if shape is None else shape.producer()
    if source is not None and source.op_type == "Shape" and source.inputs[0] is x:
        whole = not source.attributes.get_int("start", 0) and "end" not in source.attributes
        if whole and bypass(node):
            return True
    (y,) = node.outputs
    before, after = g.dims(x), g.dims(y)
    if before is None or after is None or None in before or None in after or y.is_graph_output():
        return False
    readers = [reader for reader, _ in y.uses()]
    if all(reader.op_type in POINTWISE and _broadcasts(reader, y, after) for reader in readers):
        return bypass(node)
    if len(before) != len(after) or shape is None or ir.convenience.get_const_tensor(shape) is not None:
        return False
    wanted = [1 if b == a else a for b, a in zip(before, after, strict=True)]
    target = [dim for dim in wanted if isinstance(dim, int)]
    if len(target) != len(wanted):
        return False
    node.replace_input_with(1, _target(model, target))
    return True


def _broadcasts(reader: ir.Node, expanded: ir.Value, dims: Dims) -> bool:
    """Say whether another operand of `reader` has all of `dims`."""
    others = [x for x in reader.inputs if x is not None and x is not expanded]
    return any(tuple(g.dims(x) or ()) == tuple(dims) for x in others)


def gather_nd(model: ir.Model, node: ir.Node) -> bool:
    """GatherND with indices of one axis is Gather: torch's index_put and advanced indexing."""
    data, indices = node.inputs[:2]
    if indices is None or node.attributes.get_int("batch_dims", 0) != 0:
        return False
    constant, unsqueeze = ir.convenience.get_const_tensor(indices), indices.producer()
    if constant is not None and len(constant.shape) == 2 and constant.shape[1] == 1 and constant.dtype.is_integer():
        places = constant.numpy().reshape(-1).astype(np.int64)
        one_axis: ir.Value | None = g.initializer(model, "places_" + "_".join(map(str, places)), places)
    elif unsqueeze is not None and unsqueeze.op_type == "Unsqueeze" and _constant(unsqueeze.inputs[1]) == [-1]:
        one_axis = unsqueeze.inputs[0]
    else:
        return False
    (y,) = g.insert(node, "Gather", [data, one_axis], {"axis": 0})
    made = y.producer()
    assert made is not None
    made.metadata_props.update(node.metadata_props)
    y.type, y.shape = node.outputs[0].type, node.outputs[0].shape
    g.replace_uses(node.outputs[0], y)
    return True


def gather(model: ir.Model, node: ir.Node) -> bool:
    """Look up rows by indices [batch, sequence] instead of by the same laid out flat."""
    table, flat = node.inputs[:2]
    reshape = None if flat is None else flat.producer()
    source = None if reshape is None or reshape.op_type != "Reshape" else reshape.inputs[0]
    (y,) = node.outputs
    before, after = (() if value is None else g.dims(value) or () for value in (source, y))
    if flat is None or len(g.dims(flat) or ()) != 1 or len(before) != 2 or len(after) != 2 or None in before:
        return False
    if source is None or node.attributes.get_int("axis", 0) != 0 or not isinstance(after[1], int):
        return False
    new = _insert(node, "Gather", [table, source], (*before, after[1]), y, {"axis": 0})
    g.replace_uses(y, _insert(node, "Reshape", [new, _target(model, [-1, after[1]])], after, y))
    return True


def transpose(model: ir.Model, node: ir.Node) -> bool:
    """Drop a Transpose that keeps every axis; gather on another axis instead of moving it to the front and back.

    One that only moves dimensions of size one is a Reshape.
    """
    perm = _perm(node)
    assert perm is not None
    if perm == list(range(len(perm))):
        return bypass(node)
    x, (y,) = node.inputs[0], node.outputs
    gather = None if x is None else x.producer()
    if gather is not None and gather.op_type == "Gather" and gather.attributes.get_int("axis", 0) == 0:
        first = None if gather.inputs[0] is None else gather.inputs[0].producer()
        moved, indices = _perm(first), _constant(gather.inputs[1])
        if moved is not None and indices is not None and [moved[axis] for axis in perm] == sorted(moved):
            assert first is not None
            new = _insert(node, "Gather", [first.inputs[0], gather.inputs[1]], g.dims(y) or (), y, {"axis": moved[0]})
            g.replace_uses(y, new)
            return True
    before = () if x is None else g.dims(x) or ()
    after = g.dims(y)
    if x is not None and not x.is_initializer() and before and after is not None and not y.is_graph_output():
        moving = [axis for axis in perm if before[axis] != 1]
        if len(moving) < len(perm) and moving == sorted(moving):
            reshaped = _reshaped(model, node, x, after)
            if reshaped is not None:
                g.replace_uses(y, reshaped)
                return True
    return False


def norm(model: ir.Model, node: ir.Node) -> bool:
    """Normalize the last axis in front of a Transpose that leaves it the last."""
    if len(node.outputs) != 1:
        return False
    x, (y,) = node.inputs[0], node.outputs
    before = None if x is None else x.producer()
    perm = _perm(before)
    if perm is None or perm[-1] != len(perm) - 1 or node.attributes.get_int("axis", -1) not in (-1, len(perm) - 1):
        return False
    assert before is not None
    source = before.inputs[0]
    assert source is not None
    if len(source.uses()) > 1 and len(x.uses() if x is not None else ()) > 1:
        return False
    attributes = {name: attribute.value for name, attribute in node.attributes.items()} | {"axis": -1}
    new = _insert(node, node.op_type, [source, *node.inputs[1:]], g.dims(source) or (), y, attributes)
    g.replace_uses(y, _insert(node, "Transpose", [new], g.dims(y) or (), y, {"perm": perm}))
    return True


# Slices ------------------------------------------------------------------------------------------------------------


def _last_axis(node: ir.Node) -> tuple[ir.Value, int, int] | None:
    """Read a Slice of step one of the last axis: (x, start, end)."""
    x = node.inputs[0]
    if node.op_type != "Slice" or x is None:
        return None
    starts, ends, axes = (_constant(value) for value in node.inputs[1:4]) if len(node.inputs) > 3 else (None,) * 3
    steps = _constant(node.inputs[4]) if len(node.inputs) > 4 else [1]
    dims = g.dims(x) or ()
    width = dims[-1] if dims else None
    if starts is None or ends is None or axes is None or len(axes) != 1 or steps != [1] or not isinstance(width, int):
        return None
    if axes[0] not in (-1, len(dims) - 1):
        return None
    start, end = (min(max(at + width if at < 0 else at, 0), width) for at in (starts[0], ends[0]))
    return x, start, end


def slices(model: ir.Model, node: ir.Node) -> bool:
    """Slices that part the last axis without gap or overlap are one Split."""
    this = _last_axis(node)
    if this is None:
        return False
    x, _, _ = this
    parts = []
    for reader, _ in x.uses():
        part = _last_axis(reader)
        if part is None:
            if reader.op_type == "Shape":
                continue
            return False
        parts.append((part[1], part[2], reader))
    parts.sort(key=lambda part: part[:2])
    bounds = [0, *(end for _, end, _ in parts)]
    if len(parts) < 2 or [start for start, _, _ in parts] != bounds[:-1] or bounds[-1] != (g.dims(x) or ())[-1]:
        return False
    if any(reader.outputs[0].is_graph_output() for _, _, reader in parts):
        return False
    sizes = [end - start for start, end, _ in parts]
    first = min((reader for _, _, reader in parts), key=list(model.graph).index)
    name = "split_" + "_".join(map(str, sizes))
    outputs = g.insert(
        first, "Split", [x, g.initializer(model, name, np.array(sizes, np.int64))], {"axis": -1}, outputs=len(parts)
    )
    made = outputs[0].producer()
    assert made is not None
    made.metadata_props.update(first.metadata_props)
    for output, (_, _, reader) in zip(outputs, parts, strict=True):
        output.type, output.shape = reader.outputs[0].type, reader.outputs[0].shape
        g.replace_uses(reader.outputs[0], output)
    return True


def partial_rotary(model: ir.Model, node: ir.Node) -> bool:
    """Rotate the first channels of a head in place, where code takes them out, rotates them and joins the rest.

    Concat(RotaryEmbedding(x[..., :r]), x[..., r:]) = RotaryEmbedding(x) with rotary_embedding_dim r.
    """
    (y,) = node.outputs
    dims = g.dims(y) or ()
    if len(node.inputs) != 2 or len(dims) != 4 or node.attributes.get_int("axis") not in (-1, 3):
        return False
    rotary, into = _through_layout(node.inputs[0])
    if rotary is None or rotary.op_type != "RotaryEmbedding" or "rotary_embedding_dim" in rotary.attributes:
        return False
    taken, out_of = _through_layout(rotary.inputs[0])
    rest = node.inputs[1].producer() if node.inputs[1] is not None else None
    if taken is None or rest is None or into != out_of:
        return False
    first, second = _part(taken, rotary.inputs[0], out_of), _part(rest, node.inputs[1], None)
    if first is None or second is None or first[0] is not second[0]:
        return False
    x, start, turned = first
    if (start, second[1], second[2]) != (0, turned, dims[3]) or g.dims(x) != tuple(dims):
        return False
    heads_first = into == [0, 2, 1, 3]
    heads = dims[1] if heads_first else dims[2]
    if not isinstance(heads, int) or heads != rotary.attributes.get_int("num_heads") or not isinstance(dims[3], int):
        return False
    rows = [dims[0], dims[2] if heads_first else dims[1], heads, dims[3]]
    by_row = _insert(node, "Transpose", [x], rows, y, {"perm": [0, 2, 1, 3]}) if heads_first else x
    flat = _insert(node, "Reshape", [by_row, _target(model, [0, 0, heads * dims[3]])], [*rows[:2], heads * dims[3]], y)
    attributes = {name: attribute.value for name, attribute in rotary.attributes.items()}
    turned_rows = _insert(
        node,
        "RotaryEmbedding",
        [flat, *rotary.inputs[1:]],
        [*rows[:2], heads * dims[3]],
        y,
        attributes | {"rotary_embedding_dim": turned},
    )
    new = _insert(node, "Reshape", [turned_rows, _target(model, [0, 0, heads, dims[3]])], rows, y)
    if heads_first:
        new = _insert(node, "Transpose", [new], dims, y, {"perm": [0, 2, 1, 3]})
    g.replace_uses(y, new)
    return True


def _through_layout(value: ir.Value | None) -> tuple[ir.Node | None, list[int] | None]:
    """Walk up through Reshape and at most one Transpose: the node behind, and the permutation."""
    perm: list[int] | None = None
    node = None if value is None else value.producer()
    while node is not None and (node.op_type == "Reshape" or (node.op_type == "Transpose" and perm is None)):
        perm = _perm(node) or perm
        node = node.inputs[0].producer() if node.inputs[0] is not None else None
    return node, perm


def _part(node: ir.Node, value: ir.Value | None, layout: object) -> tuple[ir.Value, int, int] | None:
    """Read which channels of which value a Slice or an output of Split holds."""
    if node.op_type == "Slice":
        return _last_axis(node)
    if node.op_type != "Split" or node.inputs[0] is None:
        return None
    sizes = _constant(node.inputs[1]) if len(node.inputs) > 1 else None
    rank = len(g.dims(node.inputs[0]) or ())
    if sizes is None or node.attributes.get_int("axis", 0) not in (-1, rank - 1):
        return None
    behind = value
    while behind is not None and behind.producer() is not node:
        above = behind.producer()
        behind = None if above is None else above.inputs[0]
    if behind is None:
        return None
    index = list(node.outputs).index(behind)
    return node.inputs[0], sum(sizes[:index]), sum(sizes[: index + 1])


RULES: Mapping[str, tuple[Rule, ...]] = {
    "Max": (single,),
    "Expand": (expand,),
    "Gather": (gather,),
    "GatherND": (gather_nd,),
    "Transpose": (transpose,),
    "Slice": (slices,),
    "Concat": (partial_rotary,),
    **dict.fromkeys(sorted(NORMS), (norm,)),
}
