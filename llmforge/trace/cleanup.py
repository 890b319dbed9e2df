"""Bring a raw translation to the canonical dialect: what only carries shapes goes, names become the checkpoint's.

Shapes that torch.export recorded on every value decide; no value of a weight is read.
"""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Callable, Mapping

import numpy as np
import onnx_ir as ir
import onnxscript.optimizer
from onnx_ir.passes.common import (
    CommonSubexpressionEliminationPass,
    IdentityEliminationPass,
    LiftConstantsToInitializersPass,
)

from llmforge import graph as g
from llmforge import interface

SCOPES = "pkg.torch.onnx.name_scopes"  # torch's record of the modules that a node comes from, outermost first
FOLDED = 1024  # elements: constants up to this size are folded; shapes and scalars are, tables and weights are not
DIMS = {
    interface.INPUT_IDS: ("batch", "sequence"),
    interface.LOGITS_ROWS: ("rows",),
    interface.past_key(0): ("batch", None, "capacity", None),
}

SIZES = {  # of a step: dimension → the input and axis that bring it
    "batch": (interface.INPUT_IDS, 0),
    "sequence": (interface.INPUT_IDS, 1),
    "capacity": (interface.past_key(0), 2),
}


def canonicalize(model: ir.Model) -> None:
    """Rewrite `model` in place until only operators of the dialect and the model's own arithmetic are left."""
    name_dims(model)
    simplify(model)
    onnxscript.optimizer.fold_constants(
        model, input_size_limit=FOLDED, output_size_limit=FOLDED, should_fold=lambda node: _reads_no_weight(node)
    )
    simplify(model)
    LiftConstantsToInitializersPass(lift_all_constants=True, size_limit=0)(model)
    CommonSubexpressionEliminationPass()(model)
    IdentityEliminationPass()(model)
    g.drop_unused(model)
    name_nodes(model)


def name_dims(model: ir.Model) -> None:
    """Replace torch's names of dynamic dimensions by the dialect's in every shape of the graph."""
    names: dict[str, str] = {}
    for value in model.graph.inputs:
        for dim, name in zip(g.dims(value) or (), DIMS.get(value.name or "", ()), strict=False):
            if isinstance(dim, str) and name is not None:
                names[dim] = name
    values = [*model.graph.inputs, *(value for node in model.graph for value in node.outputs)]
    for value in values:
        dims = g.dims(value)
        if dims is not None:
            value.shape = ir.Shape([names.get(dim, dim) if isinstance(dim, str) else dim for dim in dims])


def simplify(model: ir.Model) -> None:
    """Remove nodes that move no data, and state the targets of reshapes as constants; until nothing changes."""
    rules: Mapping[str, Callable[[ir.Model, ir.Node], bool]] = {
        "Cast": _cast_to_same,
        "CastLike": _cast_like,
        "Expand": _same_shape,
        "Max": _one_of_one,
        "Reshape": _reshape,
        "Shape": _shape,
        "Slice": _slice_of_all,
        "Transpose": _transpose_pair,
    }
    changed = True
    while changed:
        changed = False
        for node in list(model.graph):
            rule = rules.get(node.op_type)
            if rule is not None and node.domain == "" and any(value.uses() for value in node.outputs):
                changed |= rule(model, node)
        g.drop_unused(model)


def _bypass(node: ir.Node) -> bool:
    """Let the readers of `node` read its first input; not where that would rename a graph input or weight."""
    (old,), new = node.outputs, node.inputs[0]
    assert new is not None
    if old.is_graph_output():
        return False
    g.replace(old, new)
    return True


def _cast_to_same(model: ir.Model, node: ir.Node) -> bool:
    x = node.inputs[0]
    return x is not None and x.dtype is not None and x.dtype.value == node.attributes.get_int("to") and _bypass(node)


def _same_shape(model: ir.Model, node: ir.Node) -> bool:
    x, (y,) = node.inputs[0], node.outputs
    return x is not None and _known(x) and g.dims(x) == g.dims(y) and _bypass(node)


def _one_of_one(model: ir.Model, node: ir.Node) -> bool:
    """Drop a Max over one tensor, which the translation of an index leaves."""
    return len(node.inputs) == 1 and _bypass(node)


def _slice_of_all(model: ir.Model, node: ir.Node) -> bool:
    steps = node.inputs[4] if len(node.inputs) > 4 else None
    if steps is not None:
        constant = ir.convenience.get_const_tensor(steps)
        if constant is None or bool((constant.numpy() != 1).any()):
            return False
    return _same_shape(model, node)


def _transpose_pair(model: ir.Model, node: ir.Node) -> bool:
    """Transpose(Transpose(x)) = x where the second undoes the first."""
    x = node.inputs[0]
    first = None if x is None else x.producer()
    if first is None or first.op_type != "Transpose" or first.domain != "":
        return False
    inner, outer = list(first.attributes["perm"].as_ints()), list(node.attributes["perm"].as_ints())
    source = first.inputs[0]
    if (
        source is None
        or [inner[axis] for axis in outer] != list(range(len(inner)))
        or node.outputs[0].is_graph_output()
    ):
        return False
    g.replace(node.outputs[0], source)
    return True


def _reshape(model: ir.Model, node: ir.Node) -> bool:
    """Read through a reshape in front, drop what changes nothing, state the target as a constant."""
    x, target, (y,) = node.inputs[0], node.inputs[1], node.outputs
    assert x is not None
    assert target is not None
    first = x.producer()
    if first is not None and first.op_type == "Reshape" and first.domain == "" and _known(y):
        node.replace_input_with(0, first.inputs[0])
        return True
    constant = ir.convenience.get_const_tensor(target)
    if constant is not None and constant.numpy().tolist() == [-1] and len(g.dims(x) or ()) == 1:
        return _bypass(node)
    if not (_known(x) and _known(y)):
        return False
    if g.dims(x) == g.dims(y) and _bypass(node):
        return True
    if constant is not None:
        return False
    before, after = g.dims(x) or (), g.dims(y) or ()
    wanted: list[int] = []
    for axis, dim in enumerate(after):
        if isinstance(dim, int):
            wanted.append(dim)
        else:
            wanted.append(0 if axis < len(before) and before[axis] == dim else -1)
    if wanted.count(-1) > 1 or 0 in after:
        return False
    name = "shape_" + "_".join("n" if dim == -1 else str(dim) for dim in wanted)
    node.replace_input_with(1, g.initializer(model, name, np.array(wanted, np.int64)))
    node.attributes.pop("allowzero", None)
    return True


def _shape(model: ir.Model, node: ir.Node) -> bool:
    """Read sizes from the graph inputs that bring them, one by one; those that are fixed become constants."""
    x, (y,) = node.inputs[0], node.outputs
    dims = None if x is None else g.dims(x)
    if x is None or x.is_graph_input() or dims is None or y.is_graph_output():
        return False
    wanted = dims[slice(node.attributes.get_int("start", 0), node.attributes.get_int("end", len(dims)))]
    if not wanted or any(not isinstance(dim, int) and dim not in SIZES for dim in wanted):
        return False
    inputs, sizes = {value.name: value for value in model.graph.inputs}, list[ir.Value]()
    for dim in wanted:
        if isinstance(dim, int):
            sizes.append(g.initializer(model, f"size_{dim}", np.array([dim], np.int64)))
            continue
        name, axis = SIZES[str(dim)]
        sizes += g.insert(node, "Shape", [inputs[name]], {"start": axis, "end": axis + 1})
        sizes[-1].type, sizes[-1].shape = ir.TensorType(ir.DataType.INT64), ir.Shape([1])
    whole = sizes[0] if len(sizes) == 1 else g.insert(node, "Concat", sizes, {"axis": 0})[0]
    g.replace(y, whole)
    return True


def _cast_like(model: ir.Model, node: ir.Node) -> bool:
    """Write out the dtype that CastLike takes from its second input."""
    x, like, (y,) = node.inputs[0], node.inputs[1], node.outputs
    if x is None or like is None or like.dtype is None:
        return False
    if x.dtype == like.dtype:
        return _bypass(node)
    (cast,) = g.insert(node, "Cast", [x], {"to": int(like.dtype)})
    g.replace(y, cast)
    return True


def _known(value: ir.Value) -> bool:
    dims = g.dims(value)
    return dims is not None and None not in dims


def _reads_no_weight(node: ir.Node) -> bool | None:
    """Forbid folding what reads an initializer (False); leave the rest to the folder's limits (None)."""
    return False if any(value is not None and value.is_initializer() for value in node.inputs) else None


def name_nodes(model: ir.Model) -> None:
    """Name nodes by the module that they come from, and values by their node; drop torch's notes.

    The notes hold stack traces with the paths of this machine.
    """
    taken: Counter[str] = Counter()
    for node in model.graph:
        scopes = [str(scope) for scope in ast.literal_eval(node.metadata_props.get(SCOPES, "[]"))[:-1]]
        scope = scopes[-1].removeprefix("model.") if scopes and not scopes[-1].startswith("_") else ""
        name = f"{scope}/{node.op_type}".lstrip("/")
        taken[name] += 1
        node.name = name if taken[name] == 1 else f"{name}_{taken[name]}"
        node.metadata_props.clear()
        node.doc_string = None
        for index, value in enumerate(node.outputs):
            value.metadata_props.clear()
            if not value.is_graph_output():
                value.name = node.name if index == 0 else f"{node.name}:{index}"
    for value in (*model.graph.inputs, *model.graph.initializers.values()):
        value.metadata_props.clear()
        value.doc_string = None
    model.metadata_props.clear()
    model.graph.metadata_props.clear()
    model.graph.doc_string = model.doc_string = None
