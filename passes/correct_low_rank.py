"""Correct what quantized linear layers lose by products of low rank, in the norm of what they read.

    y = MatMulNBits(x, codes, …)    becomes  y = MatMulNBits(x, codes, …) + (x·A)·B

`x` is [batch, sequence, K], `A` [K, r] and `B` [r, N]. W ≈ Q(W) + (A·B)ᵀ, with the A and B that leave the least
Σ |error·x|² over the calibration text (llmforge.quantization.low_rank: in closed form, by the inputs' moments; QERA,
arXiv 2410.06040). Layers that read the same tensor share A. r is the largest rank whose factors take at most `bits` for
each number of W. With `dtype: int8` factors are MatMulNBits of 8 bits in blocks of 32, r a multiple of 32; with `fp32`
they are MatMul, which `lower-precision` turns to 16 bits on GPUs. Calibration quantizes each layer behind corrected
ones.

Fires for every MatMulNBits, and llmforge.cpu::Linear with nothing in it but a product, whose codes are those of linears
that calibration corrected: put it right behind a `quantize-weights` whose method reads calibration text, before
`cpu-kernels`. Embedding, head and experts stay, and what `exclude` names.

The same bytes in the codes may buy more: the notes of the build say what both leave of the error. docs/compression.md
has what was measured.

Numerics: lossy, within the budget of the recipe, which is against the graph before: mostly a gain.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass as record
from dataclasses import field
from typing import Annotated, ClassVar

import numpy as np
import onnx_ir as ir
from pydantic import Field
from pydantic.dataclasses import dataclass

from llmforge.ir import graph
from llmforge.ir.operators import contrib, cpu
from llmforge.ir.operators.standard import Add, MatMul
from llmforge.quantization import initializers, low_rank
from llmforge.quantization.grids import Float32, QuantizedMatrix, round_to_nearest
from llmforge.quantization.initializers import LazyMatrix
from llmforge.quantization.low_rank import Dtype, LowRankCorrection
from llmforge.quantization.statistics import Demand, LowRankDemand
from llmforge.rewrite import cpu_linear
from llmforge.rewrite.pass_base import Budget, Changes, Context, Numerics, Pass
from llmforge.rewrite.patterns import rewrite_each, skip_if

_Layer = contrib.MatMulNBits | cpu.CpuLinear
_BEHIND = "low_rank"  # suffix of what a correction adds to a graph


@dataclass(frozen=True)
class CorrectLowRank(Pass):
    """Correct the error of quantized linear layers by products of low rank."""

    name: ClassVar[str] = "correct-low-rank"
    numerics: ClassVar[Numerics] = Numerics.LOSSY

    budget: Annotated[Budget, Field(description="quality budget of the pass")]
    bits: Annotated[
        float, Field(gt=0, le=16, description="what both factors may take, in bits for each number of the weight")
    ]
    dtype: Annotated[Dtype, Field(description="of the factors; int8: ranks are multiples of 32")] = "fp32"
    damping: Annotated[
        float, Field(gt=0, le=1, description="fraction of the mean diagonal of the inputs' moments added to it")
    ] = 0.01
    exclude: Annotated[tuple[str, ...], Field(description="globs of checkpoint parameter names to skip")] = ()

    def demands(self) -> tuple[Demand, ...]:
        """Ask calibration for corrections of the linears that it quantizes."""
        return (LowRankDemand(self.bits, self.dtype, self.damping, self.exclude),)

    def run(self, model: ir.Model, context: Context) -> Changes:
        """Add to every quantized layer of `model` what corrects it.

        Raises:
            UnsupportedError: the target has no ONNX Runtime, whose operators the quantized layers are.
        """
        context.require_onnxruntime(self.name, "it corrects MatMulNBits, an operator of ONNX Runtime")
        found = {} if context.statistics is None else context.statistics.low_rank
        rewriting = _Correction(self, model, context)
        layers: list[_Layer] = [*contrib.MatMulNBits.all(model)]
        layers += [layer for layer in cpu.CpuLinear.all(model) if cpu_linear.plain(layer)]

        def correct(layer: _Layer) -> str | None:
            names = cpu_linear.parameters(layer)
            if not names:
                return None
            skip_if(_reason(layer, names, found))
            return rewriting.correct(layer, [found[name] for name in names])

        changes = rewrite_each(layers, correct, Changes())
        changes.notes += rewriting.notes()
        return changes


def _reason(layer: _Layer, names: Sequence[str], found: Mapping[str, LowRankCorrection]) -> str | None:
    """Say why a layer stays as it is; None where calibration corrected all of it."""
    if any(str(reader.name).endswith(f"/{_BEHIND}") for reader, _ in layer.output.uses()):
        return "it is corrected already"
    if unseen := [name for name in names if name not in found]:
        return f"calibration did not correct {unseen[0]}: it is no linear layer of the decoder, or `bits` give no rank"
    if len({found[name].group for name in names}) > 1:
        return f"{', '.join(names)} are one matrix, and do not share a factor"
    return None


@record(eq=False)
class _Correction:
    """One run of the pass over one graph."""

    step: CorrectLowRank
    model: ir.Model
    context: Context
    products: dict[tuple[ir.Value, str], ir.Value] = field(default_factory=dict)  # x·A, by x and the group
    gains: dict[str, LowRankCorrection] = field(default_factory=dict)  # by the group
    numbers: dict[str, tuple[int, int]] = field(default_factory=dict)  # of weights, and of factors

    def correct(self, layer: _Layer, parts: Sequence[LowRankCorrection]) -> str:
        """Add to `layer` what corrects its parts, which are side by side; say what that leaves."""
        x = layer.a if isinstance(layer, contrib.MatMulNBits) else layer.x
        group, name, y, rank = parts[0].group, layer.name, layer.output, parts[0].rank
        prefix = group.removesuffix(".weight")
        if (x, group) not in self.products:
            inner = self._product(layer.node, x, parts[0].a, f"{prefix}.{_BEHIND}_a", f"{prefix}/{_BEHIND}_a")
            inner.shape = None if x.shape is None else ir.Shape([*x.shape[:-1], rank])
            self.products[x, group] = inner
        first = cpu_linear.parameters(layer)[0].removesuffix(".weight")
        b = np.concatenate([part.b for part in parts], axis=1)
        inner = self.products[x, group]
        outer = self._product(layer.node, inner, b, f"{first}.{_BEHIND}_b", f"{name}/{_BEHIND}_b")
        outer.shape = y.shape
        add = ir.Node("", Add.op_type, [y, outer], name=f"{name}/{_BEHIND}")
        graph.insert_behind(y, [add], "uncorrected")
        self.gains[group] = parts[0]
        weights, factors = self.numbers.get(group, (0, parts[0].a.size))
        self.numbers[group] = weights + layer.N * layer.K, factors + b.size
        left = parts[0].after / max(parts[0].before, 1e-30)
        return f"rank {rank}, {self.step.dtype}: {left:.0%} of the output error of the codes is left"

    def _product(self, before: ir.Node, x: ir.Value, factor: Float32, name: str, node: str) -> ir.Value:
        """Multiply `x` by a factor [K, N]."""
        if self.step.dtype == "fp32":
            operands = {"x": x, "w": graph.initializer(self.model, name, factor)}
            made = MatMul.insert(before, operands, name=node).output
        else:
            grid, (k, n) = low_rank.INT8, factor.shape

            def calculate() -> QuantizedMatrix:
                return round_to_nearest(np.ascontiguousarray(factor.T), grid)

            matrix = LazyMatrix(calculate, n, k, grid)
            codes = initializers.register(self.model, ir.val(name), matrix, scratch=self.context.scratch)
            attributes = {"K": k, "N": n, "bits": grid.bits, "block_size": grid.block_size}
            attributes["accuracy_level"] = contrib.INT8_ACTIVATIONS
            operands = {"a": x, "b": codes.codes, "scales": codes.scales}
            made = contrib.MatMulNBits.insert(before, operands, attributes, name=node).output
        made.name, made.type = node, x.type
        return made

    def notes(self) -> list[str]:
        """Say what the correction buys, beside what its bytes would buy in the codes."""
        if not self.gains:
            return []
        weights, factors = (sum(each) for each in zip(*self.numbers.values(), strict=True))
        bits = factors * low_rank.BITS[self.step.dtype] / weights
        gains = [each for each in self.gains.values() if each.before > 0]
        left = _mean([each.after / each.before for each in gains])
        said = f"{self.step.name}: {bits:.2g} bits a weight leave {left:.0%} of the output error of the codes"
        codes = [each.codes / each.before for each in gains if each.codes is not None]
        if not codes:
            return [said]
        other = _mean(codes)
        said += f"; as many bits more in the codes would leave about {other:.0%}"
        return [said if left < other else f"{said}: it does not pay, a larger format, or method: auto, does"]


def _mean(shares: Sequence[float]) -> float:
    """Return the geometric mean."""
    return float(np.exp(np.mean(np.log(np.maximum(shares, 1e-12))))) if shares else 1.0
