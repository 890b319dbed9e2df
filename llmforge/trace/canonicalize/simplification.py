"""Bring a raw translation to the canonical dialect: what only carries shapes goes, names become the checkpoint's.

Shapes that torch.export recorded on every value decide; no value of a weight is read.
"""

from __future__ import annotations

import ast
import hashlib
import itertools
import math
import re
from collections import Counter
from collections.abc import Callable, Collection, Mapping

import numpy as np
import onnx_ir as ir
import onnxscript.optimizer
from onnx_ir.passes.common import (
    CommonSubexpressionEliminationPass,
    IdentityEliminationPass,
    LiftConstantsToInitializersPass,
)

from llmforge.ir import graph as g
from llmforge.ir import interface
from llmforge.trace.canonicalize import hoisting, row_axes, rules, token_axes

SCOPES = "pkg.torch.onnx.name_scopes"  # torch's record of the modules that a node comes from, outermost first
NUMBERED = re.compile(r"val_\d+|constant_\d+|(.*\.)?lifted_tensor_\d+")  # how torch's translation calls what it makes
FOLDED = 1024  # elements: constants up to this size are folded; shapes and scalars are, tables and weights are not
DIMS = {
    interface.INPUT_IDS: ("batch", "sequence"),
    interface.LOGITS_ROWS: ("rows",),
}
CACHE_DIMS = ("batch", None, "capacity", None)  # of keys and values


def canonicalize(model: ir.Model, *, weights: Collection[str] | None = None) -> None:
    """Rewrite `model` in place until only operators of the dialect and the model's own arithmetic are left.

    With `weights`, the names of what has no numbers yet, it is a graph of the model's own attention: tokens stay in one
    axis where the model lays them so, as does the computation of shapes that goes with it.
    """
    name_dims(model)
    simplify(model)
    onnxscript.optimizer.fold_constants(
        model, input_size_limit=FOLDED, output_size_limit=FOLDED, should_fold=lambda node: _reads_no_weight(node)
    )
    simplify(model)
    row_axes.unflatten(model)
    simplify(model)
    if weights is None:
        token_axes.restore(model)
        simplify(model)
    LiftConstantsToInitializersPass(lift_all_constants=True, size_limit=0)(model)
    if weights is not None:
        name_constants(model)  # once, so that layers read the same ones
        hoisting.gather(model, weights, SCOPES)
    CommonSubexpressionEliminationPass()(model)
    IdentityEliminationPass()(model)
    g.drop_unused(model)
    name_constants(model)
    name_nodes(model)


def name_dims(model: ir.Model) -> None:
    """Replace torch's names of dynamic dimensions by the dialect's in every shape of the graph."""
    names: dict[str, str] = {}
    for value in model.graph.inputs:
        cached = interface.present_of(value.name or "") != value.name and not interface.is_state(value.name or "")
        known = CACHE_DIMS if cached else DIMS.get(value.name or "", ())
        for dim, name in zip(g.dims(value) or (), known, strict=False):
            if isinstance(dim, str) and name is not None:
                names[dim] = name
    values = [*model.graph.inputs, *(value for node in model.graph for value in node.outputs)]
    for value in values:
        dims = g.dims(value)
        if dims is not None:
            value.shape = ir.Shape([names.get(dim, dim) if isinstance(dim, str) else dim for dim in dims])


def simplify(model: ir.Model) -> None:
    """Remove nodes that move no data, and state the targets of reshapes as constants; until nothing changes."""
    simplifications: Mapping[str, Callable[[ir.Model, ir.Node], bool]] = {
        "Cast": _cast_to_same,
        "CastLike": _cast_like,
        "Expand": _expand,
        "Reshape": _reshape,
        "Shape": _shape,
        "Slice": _slice_of_all,
        "Squeeze": _as_reshape,
        "Transpose": _transpose_pair,
        "Unsqueeze": _as_reshape,
    }
    changed = True
    while changed:
        changed = False
        for node in list(model.graph):
            own = (simplifications[node.op_type],) if node.op_type in simplifications else ()
            for rule in (*own, *rules.RULES.get(node.op_type, ())):
                if node.domain == "" and any(value.uses() for value in node.outputs) and rule(model, node):
                    changed = True
                    break
        g.drop_unused(model)


def _cast_to_same(model: ir.Model, node: ir.Node) -> bool:
    x = node.inputs[0]
    if x is None or x.dtype is None:
        return False
    to = ir.DataType(node.attributes["to"].as_int())
    return rules.bypass(node) if x.dtype == to else _cast_integer(model, node, x, to)


def _cast_integer(model: ir.Model, node: ir.Node, x: ir.Value, to: ir.DataType) -> bool:
    """Cast a small integer constant now; such a constant is no weight."""
    tensor = x.const_value
    if tensor is None or not x.is_initializer() or x.dtype not in (ir.DataType.INT32, ir.DataType.INT64):
        return False
    if tensor.size > FOLDED or x.is_graph_input() or node.outputs[0].is_graph_output():
        return False
    name = f"{x.name}.{to.name.lower()}"
    g.replace_uses(node.outputs[0], g.initializer(model, name, tensor.numpy().astype(to.numpy())))
    return True


def _same_shape(model: ir.Model, node: ir.Node) -> bool:
    x, (y,) = node.inputs[0], node.outputs
    return x is not None and _known(x) and g.dims(x) == g.dims(y) and rules.bypass(node)


def _expand(model: ir.Model, node: ir.Node) -> bool:
    """Drop what changes nothing; write a small constant out."""
    x, (y,) = node.inputs[0], node.outputs
    tensor = None if x is None or x.is_initializer() else ir.convenience.get_const_tensor(x)
    shape = [dim for dim in g.dims(y) or () if isinstance(dim, int)]
    whole = g.dims(y) is not None and len(shape) == len(g.dims(y) or ())
    if tensor is None or not whole or math.prod(shape) > FOLDED or y.is_graph_output():
        return _same_shape(model, node)
    array = np.ascontiguousarray(np.broadcast_to(tensor.numpy(), shape))
    digest = hashlib.sha256(array.tobytes()).hexdigest()[:8]
    name = f"constant_{'_'.join(map(str, shape))}_{digest}"
    g.replace_uses(y, g.initializer(model, name, array))
    return True


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
    g.replace_uses(node.outputs[0], source)
    return True


def _reshape(model: ir.Model, node: ir.Node) -> bool:
    """Read through a reshape in front, drop what changes nothing, state the target as a constant."""
    x, target, (y,) = node.inputs[0], node.inputs[1], node.outputs
    assert x is not None
    assert target is not None
    first = x.producer()
    constant = ir.convenience.get_const_tensor(target)
    if first is not None and first.op_type == "Reshape" and first.domain == "" and _known(y):
        source = first.inputs[0]
        assert source is not None
        # A 0 of a constant target copies a dimension of what the node read before.
        restated = rules.restated(model, g.dims(source) or (), g.dims(y) or ()) if _known(source) else None
        if restated is not None or constant is None or 0 not in constant.numpy():
            node.replace_input_with(0, source)
            if restated is not None:
                node.replace_input_with(1, restated)
                node.attributes.pop("allowzero", None)
            return True
    if constant is not None and constant.numpy().tolist() == [-1] and len(g.dims(x) or ()) == 1:
        return rules.bypass(node)
    if not (_known(x) and _known(y)):
        return False
    if g.dims(x) == g.dims(y) and rules.bypass(node):
        return True
    if constant is not None:
        return False
    wanted = rules.restated(model, g.dims(x) or (), g.dims(y) or ())
    if wanted is None:
        return False
    node.replace_input_with(1, wanted)
    node.attributes.pop("allowzero", None)
    return True


def _as_reshape(model: ir.Model, node: ir.Node) -> bool:
    """Write a Squeeze or Unsqueeze as the Reshape that it is, so that it joins others."""
    x, (y,) = node.inputs[0], node.outputs
    if x is None or not (_known(x) and _known(y)):
        return False
    wanted = rules.restated(model, g.dims(x) or (), g.dims(y) or ())
    if wanted is None:
        return False
    (reshaped,) = g.insert(node, "Reshape", [x, wanted])
    made = reshaped.producer()
    assert made is not None
    made.metadata_props.update(node.metadata_props)
    g.replace_uses(y, reshaped)
    return True


def _shape(model: ir.Model, node: ir.Node) -> bool:
    """Read sizes from the graph inputs that bring them, one by one; those that are fixed become constants.

    In front of everything, because layers that share what one of them computed cannot be told apart
    (`export.replicate_layers`).
    """
    x, (y,) = node.inputs[0], node.outputs
    dims = None if x is None else g.dims(x)
    if x is None or dims is None or y.is_graph_output():
        return False
    wanted = dims[slice(node.attributes.get_int("start", 0), node.attributes.get_int("end", len(dims)))]
    brought: dict[int | str | None, tuple[ir.Value, int]] = {}
    for value in model.graph.inputs:
        for axis, dim in enumerate(g.dims(value) or ()):
            brought.setdefault(dim, (value, axis))
    if not wanted or any(not isinstance(dim, int) and (dim is None or dim not in brought) for dim in wanted):
        return False
    if len(wanted) == 1 and wanted[0] in brought and brought[wanted[0]][0] is x:
        return False
    front, sizes = model.graph[0], list[ir.Value]()
    for dim in wanted:
        if isinstance(dim, int):
            sizes.append(g.initializer(model, f"size_{dim}", np.array([dim], np.int64)))
            continue
        value, axis = brought[dim]
        sizes += g.insert(front, "Shape", [value], {"start": axis, "end": axis + 1})
        sizes[-1].type, sizes[-1].shape = ir.TensorType(ir.DataType.INT64), ir.Shape([1])
    whole = sizes[0] if len(sizes) == 1 else g.insert(front, "Concat", sizes, {"axis": 0})[0]
    g.replace_uses(y, whole)
    return True


def _cast_like(model: ir.Model, node: ir.Node) -> bool:
    """Write out the dtype that CastLike takes from its second input."""
    x, like, (y,) = node.inputs[0], node.inputs[1], node.outputs
    if x is None or like is None or like.dtype is None:
        return False
    if x.dtype == like.dtype:
        return rules.bypass(node)
    (cast,) = g.insert(node, "Cast", [x], {"to": int(like.dtype)})
    g.replace_uses(y, cast)
    return True


def _known(value: ir.Value) -> bool:
    dims = g.dims(value)
    return dims is not None and None not in dims


def _reads_no_weight(node: ir.Node) -> bool | None:
    """Forbid folding what reads a number of the model (False); leave the rest to the folder's limits (None).

    Integers are sizes and indices that torch lifted out of the code.
    """
    read = [value for value in node.inputs if value is not None and value.is_initializer()]
    return None if all(value.dtype is not None and value.dtype.is_integer() for value in read) else False


def name_constants(model: ir.Model) -> None:
    """Merge equal constants that the translation numbered, and number them anew by the order in which they are read."""
    kept: dict[tuple[object, ...], ir.Value] = {}
    for node in model.graph:
        for value in node.inputs:
            if value is None or not value.is_initializer() or not NUMBERED.fullmatch(value.name or ""):
                continue
            tensor = value.const_value
            assert tensor is not None
            content = (tensor.dtype, tuple(tensor.shape.numpy()), tensor.tobytes())
            first = kept.setdefault(content, value)
            if first is not value:
                value.replace_all_uses_with(first)
    for value in kept.values():
        model.graph.initializers.pop(value.name or "")
    for index, value in enumerate(kept.values()):
        value.name = f"constant_{index}"
        model.graph.register_initializer(value)
    g.drop_unused(model)


def name_nodes(model: ir.Model) -> None:
    """Name nodes by the module that they come from, and values by their node; drop torch's notes.

    The notes hold stack traces with the paths of this machine.
    """
    taken: Counter[str] = Counter()
    scopes = {node: _scope(node) for node in model.graph}
    for node in model.graph:
        name = f"{_scope_among(node, scopes)}/{node.op_type}".lstrip("/")
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


def _scope(node: ir.Node) -> str | None:
    """Return the module that torch says `node` comes from, "" for none; None where it says nothing."""
    if SCOPES not in node.metadata_props:
        return None
    scopes = [str(scope) for scope in ast.literal_eval(node.metadata_props[SCOPES])[:-1]]
    return scopes[-1].removeprefix("model.") if scopes and not scopes[-1].startswith("_") else ""


def _scope_among(node: ir.Node, scopes: Mapping[ir.Node, str | None]) -> str:
    """Return the module of `node`; of one that a rewriter made, the innermost that holds all its neighbors."""
    own = scopes[node]
    if own is not None:
        return own
    makers = [value.producer() for value in node.inputs if value is not None]
    readers = [reader for value in node.outputs for reader, _ in value.uses()]
    around = [scope.split(".") for each in (*makers, *readers) if each is not None and (scope := scopes.get(each))]
    shared = itertools.takewhile(lambda parts: len(set(parts)) == 1, zip(*around, strict=False))
    return ".".join(parts[0] for parts in shared)
