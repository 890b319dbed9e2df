"""Whether nodes treat each token by itself, as ONNX and ONNX Runtime define their operators.

What such nodes make of a token does not depend on the step that it is in: how many others, how many rows, at what
places. llmforge's own kernels are not taken at their word, nor is any node that reads places or caches.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

import onnx_ir as ir

from llmforge.ir import graph, interface, operators
from llmforge.ir.graph import is_constant
from llmforge.ir.operators.contrib import (
    FusedMatMul,
    GatherBlockQuantized,
    MatMulNBits,
    SkipLayerNormalization,
    SkipSimplifiedLayerNormalization,
)
from llmforge.ir.operators.standard import (
    Gather,
    LayerNormalization,
    MatMul,
    RMSNormalization,
    SimplifiedLayerNormalization,
    Split,
)

AXES = (("batch", "sequence"), ("batch", "rows"))  # with which a value begins that has numbers for each token
_NORMS = (RMSNormalization, LayerNormalization, SimplifiedLayerNormalization)
_SKIP_NORMS = (SkipSimplifiedLayerNormalization, SkipLayerNormalization)


def holds(nodes: Iterable[ir.Node], constant: Collection[ir.Value]) -> bool:
    """Say whether each of `nodes` treats tokens by themselves; `constant` values follow from initializers alone."""
    return all(_treats_alone(node, constant) for node in nodes if not all(value in constant for value in node.outputs))


def _treats_alone(node: ir.Node, constant: Collection[ir.Value]) -> bool:
    view, given = operators.view(node), [value for value in node.inputs if value is not None]
    fixed = [value for value in given if is_constant(value) or value in constant]
    read = [value for value in given if value not in fixed]
    if isinstance(view, Gather | GatherBlockQuantized):
        indices = node.inputs[1]
        name = None if indices is None else indices.name
        by_id = name == interface.INPUT_IDS and read == [indices]
        by_row = isinstance(view, Gather) and view.axis == 1 and name == interface.LOGITS_ROWS
        return by_id or by_row
    if any(value.is_graph_input() for value in read) or len(node.outputs[0].shape or ()) < len(AXES[0]) + 1:
        return False
    if isinstance(view, MatMul | FusedMatMul | MatMulNBits):
        return read == given[:1] and all(len(graph.dims(value) or ()) <= 3 for value in fixed) and _is_flat(view)
    if isinstance(view, (*_NORMS, *_SKIP_NORMS)):
        return node.attributes.get_int("axis", -1) == -1 and all(_width_alone(value) for value in fixed)
    if isinstance(view, Split):
        return view.axis == -1
    return view.pointwise and all(_width_alone(value) for value in fixed)


def _is_flat(view: operators.Operator) -> bool:
    """Say whether a product is with one matrix, and transposes none of what tokens have."""
    if isinstance(view, MatMulNBits):
        return True
    turned = isinstance(view, FusedMatMul) and (view.transA or view.transBatchA or view.transBatchB)
    return not turned and len(graph.dims(view.node.inputs[1]) or ()) == 2  # type: ignore[arg-type]


def _width_alone(value: ir.Value) -> bool:
    """Say whether a constant has one size, that of the last axis, so that all tokens meet the same numbers."""
    dims = graph.dims(value)
    return dims is not None and all(dim == 1 for dim in dims[:-1])
