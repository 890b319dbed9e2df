"""Canonicalization rules for what looks up, cuts and joins; none changes a number."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from llmforge.ir import graph
from llmforge.ir.operators import standard
from llmforge.trace.canonicalize.rewriting import insert, insert_changed, integers, lay_out, replace, swap_heads, target


def gather_nd_of_one_axis(model: ir.Model, lookup: standard.GatherND) -> bool:
    """GatherND(x, indices [..., 1]) → Gather(x, indices [...]): torch's index_put and advanced indexing."""
    indices = lookup.indices
    constant, unsqueeze = ir.convenience.get_const_tensor(indices), standard.Unsqueeze.made(indices)
    if lookup.batch_dims != 0:
        return False
    if constant is not None and len(constant.shape) == 2 and constant.shape[1] == 1 and constant.dtype.is_integer():
        places = constant.numpy().reshape(-1).astype(np.int64)
        one_axis = graph.initializer(model, "places_" + "_".join(map(str, places)), places)
    elif unsqueeze is not None and integers(unsqueeze.axes) == [-1]:
        one_axis = unsqueeze.x
    else:
        return False
    return replace(lookup, standard.Gather, {"data": lookup.data, "indices": one_axis}, {"axis": 0})


def gather_by_flat_indices(model: ir.Model, lookup: standard.Gather) -> bool:
    """Gather(table, Reshape(ids) [n]) → Reshape(Gather(table, ids [batch, sequence]))."""
    flat, y = standard.Reshape.made(lookup.indices), lookup.output
    before, after = (() if flat is None else graph.dims(flat.x) or ()), graph.dims(y) or ()
    if (
        flat is None
        or len(graph.dims(lookup.indices) or ()) != 1
        or len(before) != 2
        or len(after) != 2
        or None in before
    ):
        return False
    _, width = after
    if lookup.axis != 0 or not isinstance(width, int):
        return False
    inputs, dims = {"data": lookup.data, "indices": flat.x}, (*before, width)
    rows = insert(lookup.node, standard.Gather, inputs, {"axis": 0}, dims=dims, dtype=y.dtype)
    return replace(lookup, standard.Reshape, {"x": rows, "shape": target(model, [-1, width])})


def gather_between_transposes(model: ir.Model, back: standard.Transpose) -> bool:
    """Transpose(Gather(Transpose(x), constant)) → Gather(x, constant) on the axis that was moved to the front."""
    lookup, perm = standard.Gather.made(back.x), list(back.perm)
    there = None if lookup is None or lookup.axis != 0 else standard.Transpose.made(lookup.data)
    if lookup is None or there is None or integers(lookup.indices) is None:
        return False
    front, *_ = moved = list(there.perm)
    if [moved[axis] for axis in perm] != sorted(moved):
        return False
    return replace(back, standard.Gather, {"data": there.x, "indices": lookup.indices}, {"axis": front})


def _channels_of_slice(cut: standard.Slice | None) -> tuple[ir.Value, int, int] | None:
    """Read a Slice of step one of the last axis: (x, start, end)."""
    dims = () if cut is None else graph.dims(cut.x) or ()
    width = dims[-1] if dims else None
    if cut is None or not isinstance(width, int):
        return None
    starts, ends, axes = map(integers, (cut.starts, cut.ends, cut.axes))
    if starts is None or ends is None or axes not in ([-1], [len(dims) - 1]):
        return None
    if cut.steps is not None and integers(cut.steps) != [1]:
        return None
    start, end = (min(max(at + width if at < 0 else at, 0), width) for at in (starts[0], ends[0]))
    return cut.x, start, end


def _channels(value: ir.Value | None) -> tuple[ir.Value, int, int] | None:
    """Read which channels of which value `value` holds, made by a Slice or a Split: (x, start, end)."""
    split = standard.Split.made(value)
    if value is None or split is None:
        return _channels_of_slice(standard.Slice.made(value))
    sizes, rank = integers(split.split), len(graph.dims(split.x) or ())
    if sizes is None or split.axis not in (-1, rank - 1):
        return None
    index = list(split.node.outputs).index(value)
    return split.x, sum(sizes[:index]), sum(sizes[: index + 1])


def slices_are_split(model: ir.Model, cut: standard.Slice) -> bool:
    """x[..., :a], x[..., a:b], x[..., b:] → Split(x): slices of the last axis without gap or overlap."""
    if _channels_of_slice(cut) is None:
        return False
    x, parts = cut.x, []
    for reader, _ in x.uses():
        channels = _channels_of_slice(standard.Slice.of(reader))
        if channels is not None:
            parts.append((*channels[1:], reader))
        elif not standard.OnnxShape.matches(reader):
            return False
    parts.sort(key=lambda part: part[:2])
    bounds = [0, *(end for _, end, _ in parts)]
    if len(parts) < 2 or [start for start, _, _ in parts] != bounds[:-1] or bounds[-1] != (graph.dims(x) or ())[-1]:
        return False
    pieces = [standard.Slice(reader).output for _, _, reader in parts]
    if any(piece.is_graph_output() for piece in pieces):
        return False
    sizes = [end - start for start, end, _ in parts]
    first = min((reader for _, _, reader in parts), key=list(model.graph).index)
    given = graph.initializer(model, "split_" + "_".join(map(str, sizes)), np.array(sizes, np.int64))
    split = standard.Split.insert(first, {"x": x, "split": given}, {"axis": -1}, outputs=len(parts))
    split.node.metadata_props.update(first.metadata_props)
    for output, piece in zip(split.node.outputs, pieces, strict=True):
        graph.replace_uses(piece, output)
    return True


def partial_rotary(model: ir.Model, join: standard.Concat) -> bool:
    """Rotate the first channels of a head in place, where code takes them out, rotates them and joins the rest.

    Concat(RotaryEmbedding(x[..., :r]), x[..., r:]) → RotaryEmbedding(x) with rotary_embedding_dim r.
    """
    y = join.output
    dims = graph.dims(y) or ()
    if len(join.node.inputs) != 2 or len(dims) != 4 or join.axis not in (-1, 3):
        return False
    turned, rest = join.node.inputs
    behind, into = _through_layout(turned)
    rotary = standard.RotaryEmbedding.made(behind)
    if rotary is None or rotary.rotary_embedding_dim or rest is None:
        return False
    taken, out_of = _through_layout(rotary.x)
    first, second = _channels(taken), _channels(rest)
    if into != out_of or first is None or second is None or first[0] is not second[0]:
        return False
    (x, start, count), (*_, width) = first, dims
    heads_first = into == [0, 2, 1, 3]
    heads = dims[1] if heads_first else dims[2]
    if (start, *second[1:]) != (0, count, width) or graph.dims(x) != dims:
        return False
    if heads != rotary.num_heads or not isinstance(width, int):
        return False
    at = join.node
    by_row = swap_heads(at, x) if heads_first else x
    flat = lay_out(model, at, by_row, rotary.num_heads * width)
    new = insert_changed(at, rotary, {"x": flat}, {"rotary_embedding_dim": count}, graph.dims(flat) or ())
    new = lay_out(model, at, new, rotary.num_heads, width)
    graph.replace_uses(y, swap_heads(at, new) if heads_first else new)
    return True


def _through_layout(value: ir.Value | None) -> tuple[ir.Value | None, list[int] | None]:
    """Walk up through Reshape and at most one Transpose: the value behind, and the permutation."""
    perm: list[int] | None = None
    while True:
        if (reshaped := standard.Reshape.made(value)) is not None:
            value = reshaped.x
        elif perm is None and (transposed := standard.Transpose.made(value)) is not None:
            value, perm = transposed.x, list(transposed.perm)
        else:
            return value, perm
