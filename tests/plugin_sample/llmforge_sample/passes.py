"""Set the smallest weights of every linear layer to 0.

    y = x·W   becomes   y = x·W', W'[k, n] = W[k, n], or 0 where |W[k, n]| is below the quantile `share` of |W|

`W` is an fp32 initializer [K, N] that nothing else reads. The new one is a lazy tensor: computed when it is read.

Numerics: lossy, within the budget of the recipe.
"""

from __future__ import annotations

from functools import partial
from typing import Annotated, ClassVar

import numpy as np
import onnx_ir as ir
from pydantic import Field
from pydantic.dataclasses import dataclass

from llmforge.ir import graph
from llmforge.ir.operators.standard import MatMul
from llmforge.rewrite.pass_base import Budget, Changes, Context, Numerics, Pass, Rewritten, Skipped

_THINNED = ".thinned"  # ends the name of a weight that was done


@dataclass(frozen=True)
class ZeroSmallWeights(Pass):
    """Set the smallest weights of every linear layer to 0."""

    name: ClassVar[str] = "zero-small-weights"
    numerics: ClassVar[Numerics] = Numerics.LOSSY

    budget: Annotated[Budget, Field(description="quality budget of the pass")]
    share: Annotated[float, Field(gt=0, lt=1, description="share of the weights of each layer")] = 0.05

    def run(self, model: ir.Model, context: Context) -> Changes:
        """Rewrite every linear layer of `model`."""
        changes = Changes()
        for product in list(MatMul.all(model)):
            weight = product.w
            if not graph.is_constant(weight) or weight.dtype != ir.DataType.FLOAT:
                continue
            if len(weight.uses()) > 1:
                changes.skipped.append(Skipped(product.name, f"{weight.name} has other readers"))
                continue
            if str(weight.name).endswith(_THINNED):
                changes.skipped.append(Skipped(product.name, "it is done already"))
                continue
            name, tensor = f"{weight.name}{_THINNED}", graph.tensor(weight)
            read = partial(_thinned, tensor, self.share, name)
            lazy = ir.LazyTensor(read, tensor.dtype, tensor.shape, name=name)
            product.w = graph.initializer(model, name, lazy, graph.sources(weight))
            changes.rewritten.append(Rewritten(product.name, f"{self.share:.0%} of the weights set to 0"))
        if changes:
            graph.drop_unused(model)
        return changes


def _thinned(tensor: ir.TensorProtocol, share: float, name: str) -> ir.Tensor:
    weight = tensor.numpy()
    magnitude = np.abs(weight)
    return ir.Tensor(np.where(magnitude < np.quantile(magnitude, share), np.float32(0), weight), name=name)
