"""Bring a raw translation to the canonical dialect: what only carries shapes goes, names become the checkpoint's.

Shapes that torch.export recorded on every value decide; no value of a weight is read.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any

import onnx_ir as ir
import onnxscript.optimizer
from onnx_ir.passes.common import (
    CommonSubexpressionEliminationPass,
    IdentityEliminationPass,
    LiftConstantsToInitializersPass,
)

from llmforge.ir import graph, operators
from llmforge.ir.operators import standard
from llmforge.ir.operators.record import Operator
from llmforge.trace.canonicalize import hoisting, indexing_rules, layout_rules, naming, row_axes, token_axes

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
    naming.name_dims(model)
    simplify(model)
    onnxscript.optimizer.fold_constants(
        model, input_size_limit=layout_rules.FOLDED, output_size_limit=layout_rules.FOLDED, should_fold=_reads_no_weight
    )
    simplify(model)
    row_axes.restore(model)
    simplify(model)
    if weights is None:
        token_axes.restore(model)
        simplify(model)
    LiftConstantsToInitializersPass(lift_all_constants=True, size_limit=0)(model)
    if weights is not None:
        naming.name_constants(model)  # once, so that layers read the same ones
        hoisting.hoist(model, weights, naming.SCOPES)
    CommonSubexpressionEliminationPass()(model)
    IdentityEliminationPass()(model)
    graph.drop_unused(model)
    naming.name_constants(model)
    naming.name_nodes(model)


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
