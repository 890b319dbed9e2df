"""Train the scales of quantized linear layers until the model's logits come nearer to the checkpoint's.

    y = MatMulNBits(x, codes, scales, …)      becomes  y = MatMulNBits(x, codes, scales', …)
    y = llmforge.cpu::Linear(x, groups)       becomes  y = llmforge.cpu::Linear(x, groups'), the same codes in them

`scales` are [N, blocks], in the dtype and on the grid that they had: size and speed stay. They are trained end to end
on `tokens` of the calibration text, against the checkpoint's logits (llmforge.calibration.recovery), which sees what a
method that looks at one layer after the other does not. An eighth of the text is held out; where the KLD there does not
fall by `least`, all scales stay as they are, and a note of the build has the figures.

Fires for every MatMulNBits, and llmforge.cpu::Linear with nothing in it but a product, whose codes calibration chose
and whose scales it trained: put it behind `quantize-weights` and `correct-low-rank`, before `cpu-kernels`. Embedding,
head, experts and norms stay, and what `exclude` names.

Numerics: lossy, within the budget of the recipe, which is against the graph before: mostly a gain.
"""

from __future__ import annotations

from typing import Annotated, ClassVar

import onnx_ir as ir
from pydantic import Field
from pydantic.dataclasses import dataclass

from llmforge.ir import graph
from llmforge.ir.derived import computed
from llmforge.ir.operators import contrib, cpu
from llmforge.ir.operators.standard import Cast
from llmforge.quantization import initializers
from llmforge.quantization.grids import QuantizedMatrix, stack
from llmforge.quantization.initializers import LazyMatrix
from llmforge.quantization.statistics import Demand, RecoveryDemand, Statistics
from llmforge.rewrite import cpu_linear
from llmforge.rewrite.pass_base import Budget, Changes, Context, Numerics, Pass
from llmforge.rewrite.patterns import rewrite_each, skip_if

_Layer = contrib.MatMulNBits | cpu.CpuLinear
_SUFFIX = "recovered"  # of the names of trained scales


@dataclass(frozen=True)
class RecoverScales(Pass):
    """Train the scales of quantized linear layers against the checkpoint's logits."""

    name: ClassVar[str] = "recover-scales"
    numerics: ClassVar[Numerics] = Numerics.LOSSY

    budget: Annotated[Budget, Field(description="quality budget of the pass")]
    tokens: Annotated[int, Field(gt=0, description="of calibration text to train on, read again where it is less")] = (
        65536
    )
    least: Annotated[
        float, Field(ge=0, lt=1, description="share by which the KLD of text held out must fall; else scales stay")
    ] = 0.05
    exclude: Annotated[tuple[str, ...], Field(description="globs of checkpoint parameter names to skip")] = ()

    def demands(self) -> tuple[Demand, ...]:
        """Ask calibration for trained scales of the linears that it quantizes."""
        return (RecoveryDemand(self.tokens, self.least, self.exclude),)

    def run(self, model: ir.Model, context: Context) -> Changes:
        """Give every quantized layer of `model` the scales that were trained.

        Raises:
            UnsupportedError: the target has no ONNX Runtime, whose operators the quantized layers are.
        """
        context.require_onnxruntime(self.name, "it trains scales of MatMulNBits, an operator of ONNX Runtime")
        statistics = context.statistics
        layers: list[_Layer] = [*contrib.MatMulNBits.all(model)]
        layers += [layer for layer in cpu.CpuLinear.all(model) if cpu_linear.plain(layer)]

        def recover(layer: _Layer) -> str | None:
            names = cpu_linear.parameters(layer)
            if not names or statistics is None:
                return None
            skip_if(_reason(layer, names, statistics))
            matrix = LazyMatrix(lambda: _stacked(statistics, names), layer.N, layer.K, statistics.grid(names[0]))
            if isinstance(layer, contrib.MatMulNBits):
                _set_scales(model, layer, matrix)
            else:
                weights = ir.val(_name(names))
                graph.set_sources(weights, names)
                layer.weights = initializers.register_groups(model, weights, matrix, context.scratch)
            return f"scales trained, {layer.N} × {matrix.grid.blocks(layer.K)}"

        if changes := rewrite_each(layers, recover, Changes()):
            graph.drop_unused(model)
        return changes


def _reason(layer: _Layer, names: list[str], statistics: Statistics) -> str | None:
    """Say why a layer keeps its scales; None where calibration trained all of them."""
    if unseen := [name for name in names if name not in statistics.recovered]:
        return f"calibration did not train {unseen[0]}: it is no linear layer of the decoder, or that does not pay"
    grids = {statistics.grid(name) for name in names}
    if len(grids) > 1:
        return f"{', '.join(names)} are one matrix, and have {len(grids)} formats"
    if str(_held(layer).name).startswith(f"{_name(names)}."):
        return "its scales are trained already"
    return None


def _held(layer: _Layer) -> ir.Value:
    """Return the initializer that holds the scales of a layer, behind a Cast where they are stored in fp16."""
    if isinstance(layer, cpu.CpuLinear):
        return layer.weights
    cast = Cast.made(layer.scales)
    return layer.scales if cast is None else cast.x


def _name(names: list[str]) -> str:
    return f"{names[0].removesuffix('.weight')}.{_SUFFIX}"


def _stacked(statistics: Statistics, names: list[str]) -> QuantizedMatrix:
    return stack([statistics.recovered[name] for name in names])


def _set_scales(model: ir.Model, layer: contrib.MatMulNBits, matrix: LazyMatrix) -> None:
    """Let a layer read the scales of `matrix`, in the dtype of those that it has."""
    [(dtype, shape)] = [(dtype, shape) for part, dtype, shape in matrix.parts() if part == "scales"]
    name = f"{_name(cpu_linear.parameters(layer))}.scales"
    scales = graph.initializer(
        model, name, computed(lambda: initializers.laid_out(matrix.calculate())["scales"], dtype, shape, name)
    )
    cast = Cast.made(layer.scales)
    if cast is None:
        layer.scales = scales
    else:
        cast.x = scales
