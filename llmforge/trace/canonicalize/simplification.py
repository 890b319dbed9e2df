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
from typing import Any

import onnx_ir as ir
import onnxscript.optimizer
from onnx_ir.passes.common import (
    CommonSubexpressionEliminationPass,
    IdentityEliminationPass,
    LiftConstantsToInitializersPass,
)

from llmforge.ir import graph, interface, operators
from llmforge.ir.operators import standard
from llmforge.ir.operators.record import STANDARD, Operator
from llmforge.ir.subgraph import behind
from llmforge.trace.canonicalize import indexing_rules, layout_rules, token_axes
from llmforge.trace.canonicalize.rewriting import Dims, set_target, target

Rule = Callable[[ir.Model, Any], bool]  # takes a node that it is listed for; says whether it rewrote something

RULES: Mapping[type[Operator], tuple[Rule, ...]] = {
    standard.Cast: (layout_rules.cast_to_own_dtype, layout_rules.cast_of_constant),
    standard.CastLike: (layout_rules.cast_like,),
    standard.Concat: (indexing_rules.partial_rotary,),
    standard.Expand: (
        layout_rules.expand_of_constant,
        layout_rules.to_own_shape,
        layout_rules.expand_to_shape_of_x,
        layout_rules.expand_in_front_of_arithmetic,
        layout_rules.expand_to_constant_target,
    ),
    standard.Gather: (indexing_rules.gather_by_flat_indices,),
    standard.GatherND: (indexing_rules.gather_nd_of_one_axis,),
    standard.LayerNormalization: (layout_rules.norm_of_transpose,),
    standard.Max: (layout_rules.extremum_of_one,),
    standard.RMSNormalization: (layout_rules.norm_of_transpose,),
    standard.Reshape: (
        layout_rules.reshape_of_reshape,
        layout_rules.reshape_to_own_shape,
        layout_rules.reshape_to_constant_target,
    ),
    standard.OnnxShape: (layout_rules.shape_of_inputs,),
    standard.Slice: (layout_rules.slice_of_all, indexing_rules.slices_are_split),
    standard.Squeeze: (layout_rules.as_reshape,),
    standard.Transpose: (
        layout_rules.transpose_of_transpose,
        layout_rules.transpose_of_nothing,
        indexing_rules.gather_between_transposes,
        layout_rules.transpose_of_ones,
    ),
    standard.Unsqueeze: (layout_rules.as_reshape,),
}


def canonicalize(model: ir.Model, *, weights: Collection[str] | None = None) -> None:
    """Rewrite `model` in place until only operators of the dialect and the model's own arithmetic are left.

    With `weights`, the names of what has no numbers yet, it is a graph of the model's own attention: tokens stay in one
    axis where the model lays them so, as does the computation of shapes that goes with it.
    """
    name_dims(model)
    simplify(model)
    onnxscript.optimizer.fold_constants(
        model, input_size_limit=layout_rules.FOLDED, output_size_limit=layout_rules.FOLDED, should_fold=_reads_no_weight
    )
    simplify(model)
    restore(model)
    simplify(model)
    if weights is None:
        token_axes.restore(model)
        simplify(model)
    LiftConstantsToInitializersPass(lift_all_constants=True, size_limit=0)(model)
    if weights is not None:
        name_constants(model)  # once, so that layers read the same ones
        hoist(model, weights, SCOPES)
    CommonSubexpressionEliminationPass()(model)
    IdentityEliminationPass()(model)
    graph.drop_unused(model)
    name_constants(model)
    name_nodes(model)


def simplify(model: ir.Model) -> None:
    """Apply `RULES` until nothing changes."""
    changed = True
    while changed:
        changed = False
        for node in list(model.graph):
            operator = operators.view(node)
            for rule in RULES.get(type(operator), ()):
                if any(value.uses() for value in node.outputs) and rule(model, operator):
                    changed = True
                    break
        graph.drop_unused(model)


def _reads_no_weight(node: ir.Node) -> bool | None:
    """Forbid folding what reads a number of the model (False); leave the rest to the folder's limits (None).

    Integers are sizes and indices that torch lifted out of the code.
    """
    read = [value for value in node.inputs if value is not None and value.is_initializer()]
    return None if all(value.dtype is not None and value.dtype.is_integer() for value in read) else False


def hoist(model: ir.Model, weights: Collection[str], scope: str) -> None:
    """Move to the front, in order, every node of `model` that no weight, token or state of a layer has a part in.

    Tables that each layer keeps for itself, all of one content, become one.

    `weights` names what has no numbers yet. What moves loses the module that it comes from: `scope`, a key of the
    nodes' metadata, names none.
    """
    _merge(model, weights)
    free = {value for value in model.graph.inputs if _is_free(value)}
    free |= {value for value in model.graph.initializers.values() if value.name not in weights}
    moved: list[ir.Node] = []
    for node in model.graph:
        shape = standard.OnnxShape.of(node)
        sized = shape is not None and shape.x in model.graph.inputs
        if node.domain == STANDARD and (sized or all(value is None or value in free for value in node.inputs)):
            free.update(node.outputs)
            moved.append(node)
    if not moved:
        return
    for node in moved:
        node.metadata_props[scope] = "['', '']"
    model.graph.remove(moved)
    model.graph.insert_before(model.graph[0], moved)


def _merge(model: ir.Model, weights: Collection[str]) -> None:
    """Keep one of the initializers that hold the same numbers, under a name that is of no layer."""
    alike: dict[tuple[object, ...], list[ir.Value]] = {}
    for name, value in model.graph.initializers.items():
        if name not in weights and value.const_value is not None:
            digest = hashlib.sha256(value.const_value.tobytes()).digest()
            alike.setdefault((value.dtype, graph.dims(value), digest), []).append(value)
    for index, (first, *others) in enumerate(values for values in alike.values() if len(values) > 1):
        for value in (first, *others):
            model.graph.initializers.pop(str(value.name))
        for value in others:
            value.replace_all_uses_with(first)
        first.name = f"shared_{index}"
        model.graph.register_initializer(first)


def _is_free(value: ir.Value) -> bool:
    name = value.name or ""
    return name != interface.INPUT_IDS and interface.present_of(name) == name


def restore(model: ir.Model) -> None:
    """Keep batch and sequence apart between a reshape to flat rows and the reshape back.

    Fires for a reshape [n, D] → [batch, sequence, …] of computed target where only operators that treat each row by
    itself lie between it and reshapes from [batch, sequence, …], and nothing else reads what they compute.
    """
    for reshape in standard.Reshape.all(model):
        if ir.convenience.get_const_tensor(reshape.shape) is None:
            _restore(model, reshape)


def _restore(model: ir.Model, back: standard.Reshape) -> None:
    flat, after = graph.dims(back.x) or (), graph.dims(back.output) or ()
    if len(flat) != 2 or len(after) < 3:
        return
    (_, width), (batch, sequence, *_) = flat, after
    if not isinstance(width, int):
        return
    region, entries = _region(back.x, (batch, sequence))
    if not entries:
        return
    inside = {value for node in region for value in node.outputs} | {entry.output for entry in entries}
    readers = {node for value in inside for node, _ in value.uses()}
    if not readers <= {*region, back.node} or any(value.is_graph_output() for value in inside):
        return
    wanted, rows = target(model, [0, 0, -1, width]), _rows_of_token(entries[0])
    for entry in entries:
        set_target(entry, wanted)
    for value in inside:
        if value.shape is not None:
            value.shape = ir.Shape([batch, sequence, rows, width])


def _rows_of_token(entry: standard.Reshape) -> int | None:
    """Count the rows that one token has: those of the input of `entry` [batch, sequence, …]."""
    _, _, *dims = graph.dims(entry.x) or (None, None, None)
    *_, width = graph.dims(entry.output) or (None,)
    sizes = [dim for dim in dims if isinstance(dim, int)]
    if len(sizes) != len(dims) or not isinstance(width, int):
        return None
    return math.prod(sizes) // width


def _region(last: ir.Value, leading: Dims) -> tuple[set[ir.Node], list[standard.Reshape]]:
    """Collect what computes `last` on flat rows, and the reshapes that feed it; nothing where something else does."""

    def broadcasts(value: ir.Value) -> bool:  # a vector or a scalar, with an axis more as before
        return (dims := graph.dims(value)) is not None and len(dims) < 2

    def is_edge(value: ir.Value) -> bool:
        node = value.producer()
        by_row = node is not None and (operators.view(node).pointwise or standard.RMSNormalization.matches(node))
        return broadcasts(value) or not by_row

    region, edge = behind([last], is_edge)
    entries = [standard.Reshape.made(value) for value in edge if not broadcasts(value)]
    from_tokens = [x for x in entries if x and (graph.dims(x.x) or ())[:2] == leading and _rows_of_token(x) is not None]
    return (set(region), from_tokens) if len(from_tokens) == len(entries) else (set(), [])


SCOPES = "pkg.torch.onnx.name_scopes"  # torch's record of the modules that a node comes from, outermost first
NUMBERED = re.compile(r"val_\d+|constant_\d+|(.*\.)?lifted_tensor_\d+")  # how torch's translation calls what it makes
DIMS = {
    interface.INPUT_IDS: ("batch", "sequence"),
    interface.LOGITS_ROWS: ("rows",),
    interface.SEQUENCE_STARTS: ("starts",),
}
CACHE_DIMS = ("batch", None, "capacity", None)  # of keys and values


def name_dims(model: ir.Model) -> None:
    """Replace torch's names of dynamic dimensions by the dialect's in every shape of the graph."""
    names: dict[str, str] = {}
    for value in model.graph.inputs:
        cached = interface.present_of(value.name or "") != value.name and not interface.is_state(value.name or "")
        known = CACHE_DIMS if cached else DIMS.get(value.name or "", ())
        for dim, name in zip(graph.dims(value) or (), known, strict=False):
            if isinstance(dim, str) and name is not None:
                names[dim] = name
    values = [*model.graph.inputs, *(value for node in model.graph for value in node.outputs)]
    for value in values:
        dims = graph.dims(value)
        if dims is not None:
            value.shape = ir.Shape([_renamed(dim, names) if isinstance(dim, str) else dim for dim in dims])


def _renamed(dim: str, names: Mapping[str, str]) -> str:
    """Rename a dimension, or the one that it is reckoned from: "s98 - 1"."""
    first, space, rest = dim.partition(" ")
    return f"{names.get(first, first)}{space}{rest}"


def name_constants(model: ir.Model) -> None:
    """Merge equal constants that the translation numbered, and number them anew by the order in which they are read."""
    kept: dict[tuple[object, ...], ir.Value] = {}
    read = dict.fromkeys(value for node in model.graph for value in node.inputs if value is not None)
    for value in read:
        tensor = value.const_value
        if tensor is None or not value.is_initializer() or not NUMBERED.fullmatch(value.name or ""):
            continue
        first = kept.setdefault((tensor.dtype, tuple(tensor.shape.numpy()), tensor.tobytes()), value)
        if first is not value:
            value.replace_all_uses_with(first)
    for value in kept.values():
        model.graph.initializers.pop(value.name or "")
    for index, value in enumerate(kept.values()):
        value.name = f"constant_{index}"
        model.graph.register_initializer(value)
    graph.drop_unused(model)


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
