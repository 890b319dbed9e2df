"""Names of a canonical graph: of dynamic dimensions, constants, nodes and values."""

from __future__ import annotations

import ast
import itertools
import re
from collections import Counter
from collections.abc import Mapping

import onnx_ir as ir

from llmforge.ir import graph, interface

SCOPES = "pkg.torch.onnx.name_scopes"  # torch's record of the modules that a node comes from, outermost first
NUMBERED = re.compile(r"val_\d+|constant_\d+|(.*\.)?lifted_tensor_\d+")  # how torch's translation calls what it makes
DIMS = {
    interface.INPUT_IDS: ("batch", "sequence"),
    interface.LOGITS_ROWS: ("rows",),
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
            value.shape = ir.Shape([names.get(dim, dim) if isinstance(dim, str) else dim for dim in dims])


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
