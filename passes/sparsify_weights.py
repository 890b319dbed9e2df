"""Prune linear layers to 2:4: of every 4 neighbours along the input features, 2 become 0, and others make up for it.

    y = x·W + b                     becomes  y = x·W' + b,  W' fp32 [K, N], of which 2 of W'[4i … 4i + 3, n] are 0

by SparseGPT (arXiv 2301.00774): which go, and what the others become, follows from the inputs of the layer on
calibration text, behind layers that are pruned already. TensorRT multiplies such weights on sparse tensor cores where
it finds that faster; put `quantize-channels` behind for int8 or fp8 as well, whose codes keep the zeros.

Fires for every MatMul whose second input is an fp32 initializer [K, N] of linears of the decoder that calibration
pruned: not embedding, head, routers and experts, nor what `exclude` names.

Numerics: lossy, within the budget of the recipe. Refused on devices that multiply such matrices as dense ones.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Annotated, ClassVar

import onnx_ir as ir
from pydantic import Field
from pydantic.dataclasses import dataclass

from llmforge.ir import graph
from llmforge.ir.derived import computed
from llmforge.ir.operators.standard import MatMul
from llmforge.quantization import sparsity
from llmforge.quantization.grids import Float32
from llmforge.quantization.sparsity import SparseMatrix
from llmforge.quantization.statistics import Demand, SparsityDemand
from llmforge.rewrite.pass_base import Budget, Changes, Context, Numerics, Pass
from llmforge.rewrite.patterns import rewrite_each, skip_if


@dataclass(frozen=True)
class Sparsify(Pass):
    """Prune linear layers to 2:4, by SparseGPT."""

    name: ClassVar[str] = "sparsify-weights"
    numerics: ClassVar[Numerics] = Numerics.LOSSY

    budget: Annotated[Budget, Field(description="quality budget of the pass")]
    damping: Annotated[
        float, Field(gt=0, le=1, description="fraction of the mean diagonal of the inputs' moments added to it")
    ] = 0.01
    exclude: Annotated[tuple[str, ...], Field(description="globs of checkpoint parameter names to skip")] = ()

    def demands(self) -> tuple[Demand, ...]:
        """Ask calibration for pruned linear layers."""
        return (SparsityDemand(self.damping, self.exclude),)

    def run(self, model: ir.Model, context: Context) -> Changes:
        """Rewrite every linear layer of `model` that was pruned.

        Raises:
            UnsupportedError: the target multiplies such matrices as dense ones.
        """
        context.require_sparse(self.name)
        pruned = {} if context.statistics is None else context.statistics.sparse

        def sparsify(product: MatMul) -> str | None:
            weight = product.w
            if not graph.is_constant(weight) or len(graph.dims(weight) or ()) != 2:
                return None
            names = graph.sources(weight)
            skip_if(_reason(weight, names, pruned))
            tensor, name = graph.tensor(weight), f"{weight.name}.2to4"
            read = partial(_stacked, pruned, names)
            lazy = computed(read, ir.DataType.FLOAT, tensor.shape.numpy(), name)
            product.w = graph.initializer(model, name, lazy, names)
            lost = pruned[names[0]].lost
            return "2:4, by sparsegpt" + ("" if lost is None else f", output error {lost:.2g}")

        changes = rewrite_each(MatMul.all(model), sparsify, Changes())
        if changes:
            model.metadata_props[graph.SPARSITY] = "2:4"
            graph.drop_unused(model)
        return changes


def _reason(weight: ir.Value, names: Sequence[str], pruned: Mapping[str, SparseMatrix]) -> str | None:
    """Say why a weight stays as it is; None where calibration pruned all of it."""
    if weight.dtype != ir.DataType.FLOAT:
        return f"{weight.name} is {weight.dtype}; expected an fp32 matrix"
    if weight.is_graph_output() or len(weight.uses()) > 1:
        return f"{weight.name} has other readers"
    if str(weight.name).endswith(".2to4"):
        return "it is pruned already"
    unseen = [name for name in names if name not in pruned]
    if not names or unseen:
        return f"calibration did not prune {unseen[0] if unseen else weight.name}"
    return None


def _stacked(pruned: Mapping[str, SparseMatrix], names: Sequence[str]) -> Float32:
    return sparsity.stacked([pruned[each] for each in names])
