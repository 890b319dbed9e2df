"""Multiply linear layers in NVFP4: weights and activations of 4 bits in blocks of 16, with a scale in fp8 each.

    y = x·W + b                     becomes  y = llmforge::Fp4Linear(x, codes, scales, weight_scale, input_scale) + b

`x` is [batch, sequence, K], `W` fp32 [K, N]; `codes` are e2m1 [K, N], `scales` float8e4m3fn [K / 16, N], both scales of
tensors fp32 numbers (`llmforge.quantization.nvfp4`). Blocks of `x` get their scales as it is read, in units of
`input_scale`, which is the largest |x| of the calibration text over 6·448: 4.5 bits a weight, and products of 4 bits.
Matrices that read one `x` share both scales of tensors, for servers multiply by them as one.

Fires for every MatMul whose second input is an fp32 initializer [K, N], K a multiple of 16, that nothing else reads,
and whose input calibration measured: linear layers of the decoder. Head, embedding, routers and what `exclude` names
stay; a budget may need `exclude: ['*.down_proj.*']`. TensorRT dequantizes such weights into memory where x stays in 16
bits, so that there is no form of weights alone.

With `method: stored`, codes, scales and ranges are those of a checkpoint that comes in NVFP4 with ranges of what layers
read (compressed-tensors); nothing is calibrated. Its global scales are divisors, of which the reciprocals are stored.
Of matrices that are packed, whose tensors need one scale, the largest range is that of all.

Numerics: lossy, within the budget of the recipe. Refused on targets without products in fp4, or no faster ones, and
where the checkpoint stores no codes that `method: stored` takes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Annotated, Any, ClassVar, Literal

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray
from pydantic import Field
from pydantic.dataclasses import dataclass

from llmforge.base.errors import DataError
from llmforge.ir import graph, logits_rows, routing
from llmforge.ir.derived import Derived, computed, stored_in
from llmforge.ir.fp4 import BLOCK
from llmforge.ir.operators.canonical import Fp4Linear
from llmforge.ir.operators.standard import MatMul
from llmforge.quantization import methods, nvfp4
from llmforge.quantization.grid import Grid
from llmforge.quantization.statistics import Demand, InputRange, InputRangeDemand, exclusion
from llmforge.quantization.stored import (
    QuantizedSource,
    SkippedCodes,
    StoredFp4,
    UnrepresentableCodes,
    require,
    stack_fp4,
)
from llmforge.rewrite.declared import QuantizeFp4Traits
from llmforge.rewrite.pass_base import Budget, Changes, Context, Numerics, Pass
from llmforge.rewrite.patterns import NotApplicable, rewrite_each, skip_if
from llmforge.rewrite.traits import Storage

_FP4, _FP8, _FP32 = ir.DataType.FLOAT4E2M1, ir.DataType.FLOAT8E4M3FN, ir.DataType.FLOAT


@dataclass(frozen=True)
class QuantizeFp4(QuantizeFp4Traits, Pass):
    """Multiply linear layers in NVFP4: weights and activations of 4 bits in blocks of 16."""

    numerics: ClassVar[Numerics] = Numerics.LOSSY

    budget: Annotated[Budget, Field(description="quality budget of the pass")]
    method: Annotated[
        Literal["rtn", "stored"],
        Field(description="rtn: round to nearest; stored: take the codes of a checkpoint that comes quantized"),
    ] = "rtn"
    exclude: Annotated[tuple[str, ...], Field(description="globs of checkpoint parameter names to skip")] = ()

    @property
    def takes_stored(self) -> bool:
        """Whether codes are those of the checkpoint."""
        return self.method == methods.STORED

    @property
    def server_format(self) -> str | None:
        """Name the format of linear layers."""
        return "nvfp4"

    def stores(self, stored: Grid | None) -> Storage:
        """Say the dtype of weights and products."""
        return Storage(weights="fp4", product="fp4")

    def demands(self) -> tuple[Demand, ...]:
        """Ask calibration for the ranges of what linears read."""
        return () if self.takes_stored else (InputRangeDemand(),)

    def run(self, model: ir.Model, context: Context) -> Changes:
        """Rewrite every linear layer of `model`.

        Raises:
            UnsupportedError: the target does not compute in fp4, or no faster than in 16 bits; `method` is stored, and
                the checkpoint has no codes that can be taken.
            DataError: what a layer reads has no range on the calibration text.
        """
        context.refuse_cpu(f"{self.name}: no CPU multiplies fp4", "use quantize-weights or quantize-channels")
        context.require_dtype(self.name, "fp4", ", or use quantize-weights or quantize-channels")
        context.require_faster(self.name, "fp4", "use quantize-weights")
        routers, heads = routing.routers(model), logits_rows.readers(model)
        ranges = {} if context.statistics is None else context.statistics.inputs
        source = require(context.stored, self.name) if self.takes_stored else None
        skipped = SkippedCodes(self.name)
        chosen = dict[ir.Node, StoredFp4 | None]()  # codes of the checkpoint
        peaks = dict[ir.Value, float]()  # how far what is read ranges

        def choose(product: MatMul) -> None:
            if not product.w.is_initializer() or len(graph.dims(product.w) or ()) != 2:
                return
            names = graph.sources(product.w) or [str(product.w.name)]
            measured = [ranges[name] for name in names if name in ranges]
            if product.node in heads:
                raise NotApplicable("output head")
            if (experts := routers.get(product.node)) is not None:
                raise NotApplicable(f"router of {experts.name}")
            skip_if(_reason(product) or exclusion(names, self.exclude))
            if source is not None:
                try:
                    chosen[product.node] = _stored(source, product)
                except UnrepresentableCodes as why:
                    skipped.add(names, why)
                    raise NotApplicable(f"its codes {why}") from why
                return
            if not measured:
                raise NotApplicable("calibration did not see what it reads")
            peak = self._peak(product, measured, names[0])
            chosen[product.node], peaks[product.x] = None, max(peak, peaks.get(product.x, 0.0))

        changes = rewrite_each(MatMul.all(model), choose, Changes())
        products = [product for product in MatMul.all(model) if product.node in chosen]
        shared = {x: _shared_scale(model, [each for each in products if each.x is x]) for x in peaks}

        def quantize(product: MatMul) -> str:
            if (stored := chosen[product.node]) is not None:
                _rewrite(model, product, stored, None)
                return "NVFP4, stored, blocks of 16, inputs too"
            _rewrite(model, product, peaks[product.x], shared[product.x])
            return "NVFP4, blocks of 16, inputs too"

        rewrite_each(products, quantize, changes)
        if not changes:
            skipped.refuse()
        changes.notes += skipped.notes()
        if changes:
            graph.drop_unused(model)
        return changes

    def _peak(self, product: MatMul, measured: Sequence[InputRange], name: str) -> float:
        """Return the largest magnitude of what `product`, by the parameter `name`, reads."""
        peak = float(np.max([each.peaks.max() for each in measured]))
        if not 0 < peak < math.inf:
            raise DataError(
                f"{self.name}: what {product.name} reads ranges to {peak:g} on the calibration text, so that it has no "
                "scale",
                hint=f"use more calibration text, or exclude {name}",
            )
        return peak


def _stored(source: QuantizedSource, product: MatMul) -> StoredFp4:
    """Return the codes of the weight of `product`, with the range of what it reads."""
    tensors = stored_in(graph.tensor(product.w), transposed=True)
    if not tensors:
        raise UnrepresentableCodes(
            "are not those of the checkpoint any more; put quantize-fp4 further in front", is_plain=True
        )
    found = stack_fp4([source.fp4(name) for name in tensors])
    if found.input_scale is None:
        raise UnrepresentableCodes(
            "come without a range of what is read (input_global_scale), which products of fp4 need"
        )
    return found


def _reason(product: MatMul) -> str | None:
    """Say why the weight of `product` stays; None where it can be stored."""
    weight = product.w
    if weight.dtype != _FP32:
        return f"{weight.name} is {weight.dtype}; expected an fp32 matrix"
    if weight.is_graph_input() or weight.is_graph_output() or len(weight.uses()) > 1:
        return f"{weight.name} has other readers"
    k = graph.static(weight)[0]
    return f"its {k} input features are not a multiple of {BLOCK}" if k % BLOCK else None


def _shared_scale(model: ir.Model, products: Sequence[MatMul]) -> ir.Value:
    """Make the scale that the weights of `products` share."""
    name = f"{products[0].w.name}.fp4.scale"
    weights = [graph.tensor(product.w) for product in products]
    return graph.initializer(model, name, Derived(nvfp4.scale, weights, _FP32, ir.Shape([]), name))


def _rewrite(model: ir.Model, product: MatMul, given: float | StoredFp4, weight_scale: ir.Value | None) -> None:
    """Put Fp4Linear in the place of `product`.

    It has `given` codes, or is rounded under `weight_scale` over an input that ranges so far.
    """
    name, sources = f"{product.w.name}.fp4", graph.sources(product.w)
    k, n = graph.static(product.w)
    if isinstance(given, StoredFp4):
        codes, scales = _lazy(given, k, n, name)
        whole = ir.Tensor(np.asarray(given.scale), name=f"{name}.scale")
        weight_scale, step = graph.initializer(model, f"{name}.scale", whole), given.input_scale
        assert step is not None
    else:
        assert weight_scale is not None
        parts = [graph.tensor(product.w), graph.tensor(weight_scale)]
        codes = Derived(nvfp4.codes, parts, _FP4, ir.Shape([k, n]), name)
        scales = Derived(nvfp4.block_scales, parts, _FP8, ir.Shape([k // BLOCK, n]), f"{name}.scales")
        step = nvfp4.tensor_scale(given)
    operands = {
        "codes": graph.initializer(model, name, codes, sources),
        "scales": graph.initializer(model, f"{name}.scales", scales),
        "weight_scale": weight_scale,
        "input_scale": graph.initializer(model, f"{product.x.name}.fp4.scale", step),
    }
    made = Fp4Linear.insert(product.node, {"x": product.x, **operands}, name=product.name)
    graph.replace_value(product.output, made.output)


def _lazy(stored: StoredFp4, k: int, n: int, name: str) -> tuple[ir.LazyTensor, ir.LazyTensor]:
    """Return codes and block scales of a checkpoint, turned as they are written, and read then."""

    def turned(read: Callable[[], NDArray[Any]], dtype: ir.DataType, rows: int, name: str) -> ir.LazyTensor:
        return computed(lambda: np.ascontiguousarray(read().T), dtype, (rows, n), name)

    return turned(stored.codes, _FP4, k, name), turned(stored.scales, _FP8, k // BLOCK, f"{name}.scales")
