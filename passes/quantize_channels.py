"""Quantize the weights of linear layers and output head to int8 or fp8, with one scale per output feature.

    y = x·W + b                     becomes  y = x·DequantizeLinear(codes, scales) + b
    logits = x·Eᵀ  (tied head)      becomes  logits = x·DequantizeLinear(codes, scales), of codes of its own

`W` is fp32 [K, N], `E` [V, K]; `codes` int8 or float8e4m3fn [K, N], `scales` fp32 [N] on axis 1. The operators are
ONNX's own. TensorRT reads such weights as they are stored, in every multiplication, where it would first dequantize
blocks of 8 bits into memory; a table that is stored as [V, K] and transposed would be turned into 16 bits when the
engine is built, so a tied head gets a matrix of its own, [K, V], and the embedding stays.

    with `activations: static`, where calibration measured what the layer reads:
    y = x·W + b                     becomes  y = r·DequantizeLinear(codes, scales) + b,
                                             r = DequantizeLinear(QuantizeLinear(x, s), s)

and `s` is one number, the largest |x| of the calibration text over the largest code; layers that read one tensor share
`r`. So 8 bits are multiplied by 8 bits. What the head reads is not measured, and stays.

    with `activations: per_token`:
    y = x·W + b                     becomes  y = t·(r·DequantizeLinear(codes, scales)) + b,
                                             r = DequantizeLinear(QuantizeLinear(x / t, 1), 1)

and `t` [batch, sequence, 1] is the largest |x| of each token over the largest code.

Where activations are rounded, `smooth` first divides features of x with outliers by powers of two, s, in the weights
of the norm that makes x, or of the up projection behind a gate, and multiplies by them the rows of all matrices that
read x (llmforge.rewrite.smoothing): alone, that moves no bit. s_j = max|x_j|^α / max|W_j|^(1 - α), with the α that
leaves outputs of the layer the least error on calibration text, or the one that is given. What attention makes stays
as it is: its factors would stand in the cache.

Fires for every MatMul whose second input is an fp32 initializer [K, N] that nothing else reads, and with `head` also
for the head, which is the MatMul that works on the selected rows. Routers stay, unless `routers` says otherwise.

With `method: stored`, codes and scales are those of a checkpoint that comes quantized: int8 or fp8, as `dtype` says,
with one scale per output feature or per matrix. What it stores otherwise stays, the head too, and nothing is smoothed.
`activations: static` then takes the checkpoint's own scales, where it has them, and calibrates nothing; of layers that
are packed, the largest.

On CPUs products of int8 by int8 become MatMulIntegerToFloat; ONNX Runtime makes MatMulNBits of int8 weights alone. fp8
is multiplied as fp32 there.

Numerics: lossy, within the budget of the recipe. Refused where the target does not compute in the dtype, and, for
activations, where it does not multiply faster in it than in 16 bits; and where the checkpoint stores no codes that
`method: stored` takes.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass as record
from typing import Annotated, ClassVar, Literal, Self

import numpy as np
import onnx_ir as ir
from pydantic import Field, model_validator
from pydantic.dataclasses import dataclass

from llmforge.base.errors import DataError
from llmforge.ir import graph, logits_rows, routing
from llmforge.ir.derived import Derived, stored_in, swapped
from llmforge.ir.operators.standard import MatMul, Transpose
from llmforge.quantization import channels, methods
from llmforge.quantization.exclusion import exclusion
from llmforge.quantization.grids import Grid
from llmforge.quantization.statistics import Demand, InputRange, InputRangeDemand, Smoothed, Smoothing
from llmforge.quantization.stored import (
    QuantizedSource,
    SkippedCodes,
    StoredChannels,
    UnrepresentableCodes,
    require,
    stack_channels,
)
from llmforge.rewrite import smoothing
from llmforge.rewrite.pass_base import Budget, Changes, Context, Numerics, Pass, Rewritten, Skipped
from llmforge.rewrite.traits import Codes, Deployment, Prediction, Proposal, Storage

_JUDGED: tuple[Literal["int8", "fp8"], ...] = ("int8", "fp8")  # by `plan`
_LEAST = 2.0**-24  # scale of a token: the smallest number of fp16, so that a token of zeros has a scale


@dataclass(frozen=True)
class QuantizeChannels(Pass):
    """Quantize the weights of linear layers and output head to int8 or fp8, with one scale per output feature."""

    name: ClassVar[str] = "quantize-channels"
    numerics: ClassVar[Numerics] = Numerics.LOSSY
    writes_codes: ClassVar[Codes | None] = "channels"

    budget: Annotated[Budget, Field(description="quality budget of the pass")]
    dtype: Annotated[Literal["int8", "fp8"], Field(description="int8, or fp8 (e4m3)")]
    activations: Annotated[
        Literal["none", "static", "per_token"],
        Field(
            description="also round the inputs of the layers; static: by calibrated ranges (with `method: stored`, by "
            "those of the checkpoint), per_token: by the range of each token"
        ),
    ] = "none"
    method: Annotated[
        Literal["rtn", "stored"],
        Field(description="rtn: round to nearest; stored: take the codes of a checkpoint that comes quantized"),
    ] = "rtn"
    smooth: Annotated[
        bool, Field(description="move outliers of rounded activations into weights first, by calibrated factors")
    ] = True
    alpha: Annotated[
        float | None,
        Field(ge=0, le=1, description="share of outliers that weights take over; default: for each layer the best"),
    ] = None
    head: Annotated[bool, Field(description="also quantize the output head")] = True
    routers: Annotated[bool, Field(description="also quantize the routers of experts")] = False
    exclude: Annotated[tuple[str, ...], Field(description="globs of checkpoint parameter names to skip")] = ()

    @model_validator(mode="after")
    def _smooths(self) -> Self:
        if self.alpha is not None and (self.activations == "none" or not self.smooth):
            raise ValueError("alpha goes with smooth: true and activations: static or per_token")
        if self.alpha is not None and self.takes_stored:
            raise ValueError(f"method: {methods.STORED} keeps weights as they are, which alpha would move")
        return self

    @property
    def takes_stored(self) -> bool:
        """Whether codes are those of the checkpoint."""
        return self.method == methods.STORED

    @classmethod
    def predicts(cls, there: Deployment) -> Iterable[Prediction]:
        """Judge each dtype, of weights alone and of what they multiply, where such weights are read as they are."""
        if there.backend.scales == "channels":
            for dtype in _JUDGED:
                yield Prediction(f"{cls.name}, dtype: {dtype}", Storage(weights=dtype, block=0))
                both = Storage(weights=dtype, product=dtype, block=0)
                yield Prediction(f"{cls.name}, dtype: {dtype}, activations: static", both)

    @classmethod
    def proposes(cls, there: Deployment) -> Iterable[Proposal]:
        """Propose fp8 where it is judged."""
        if there.backend.scales == "channels" and not there.is_quantized:
            change, weights = f"{cls.name}, dtype: fp8", Storage(weights="fp8", block=0)
            yield Proposal("dtype: fp8, {budget}", 0.02, weights, change, near_lossless=True, bits=8)
            yield Proposal(
                "dtype: fp8, activations: static, {budget}",
                0.03,
                Storage(weights="fp8", product="fp8", block=0),
                f"{change}, activations: static",
                calibrated=True,
                bits=8,
            )

    def stores(self, stored: Grid | None) -> Storage:
        """Say the dtype of weights and head, and of products where activations are rounded, too."""
        product = self.dtype if self.activations != "none" else None
        return Storage(weights=self.dtype, product=product, head=self.dtype if self.head else None, block=0)

    def demands(self) -> tuple[Demand, ...]:
        """Ask calibration for the ranges of what linears read, and for factors."""
        per_token = self.activations == "per_token"
        if self.activations == "none" or self.takes_stored or (per_token and not self.smooth):
            return ()
        return (InputRangeDemand(Smoothing(self.dtype, per_token, self.alpha) if self.smooth else None),)

    def run(self, model: ir.Model, context: Context) -> Changes:
        """Rewrite every linear layer of `model`, and the head.

        Raises:
            UnsupportedError: the target does not compute in the dtype, or not faster than in 16 bits.
            DataError: what a layer reads has no range on the calibration text.
            UnsupportedError: `method` is stored, and the checkpoint has no codes that can be taken.
        """
        context.require_dtype(self.name, self.dtype, ", or use quantize-weights")
        if self.activations != "none":
            context.require_faster(self.name, self.dtype, "set `activations: none`")
        left_alone = {} if self.routers or self.takes_stored else routing.routers(model)
        heads = logits_rows.readers(model)
        changes, chosen = Changes(), list[MatMul]()
        codes = _Codes(self, require(context.stored, self.name)) if self.takes_stored else None
        for product in MatMul.all(model):
            node, weight = product.node, _weight(product)
            if weight is None:
                continue
            parameters = graph.sources(weight) or [str(weight.name)]
            reason = _reason(weight, weight is not product.w) or exclusion(parameters, self.exclude)
            if node in left_alone:
                reason = f"router of {left_alone[node].name}; `routers: true` quantizes it"
            elif node in heads and not self.head:
                reason = "output head, and `head` is false"
            elif reason is None and codes is not None:
                reason = codes.find(product, weight)
            if reason is not None:
                changes.skipped.append(Skipped(str(node.name), reason))
            else:
                chosen.append(product)
        inputs = {} if context.statistics is None else context.statistics.inputs
        found = {} if codes is None else codes.found
        rounding = _InputRounding(self, model, chosen, inputs, found)
        for product in chosen:
            done = rounding.round(product)
            self._store(model, product, rounding.sources[product.node], found.get(product.node))
            what = f"{self.dtype}{', stored' if found else ''}, one scale per output feature"
            changes.rewritten.append(Rewritten(str(product.node.name), what + (f", {done}" if done else "")))
        if codes is not None:
            changes.notes += codes.notes()
        if changes:
            graph.drop_unused(model)
        return changes

    def _store(self, model: ir.Model, product: MatMul, sources: Sequence[str], stored: StoredChannels | None) -> None:
        """Let `product` multiply by dequantized codes of its weight, [K, N], or [N, K] where that is transposed."""
        weight = _weight(product)
        assert weight is not None
        transposed = weight is not product.w
        dtype, tensor = channels.DTYPES[self.dtype], graph.tensor(weight)
        name, shape = f"{weight.name}.{self.dtype}", ir.Shape(graph.static(weight)[:: -1 if transposed else 1])
        if transposed:
            tensor = Derived(swapped, [tensor], tensor.dtype, shape, f"{weight.name}.transposed")
        steps: ir.LazyTensor
        rounded: ir.LazyTensor
        if stored is not None:
            rounded, steps = _lazy(stored, dtype, shape, name)
        else:
            rounded = Derived(channels.CODES[dtype], [tensor], dtype, shape, name)
            steps = Derived(channels.SCALES[dtype], [tensor], ir.DataType.FLOAT, ir.Shape(shape[1:]), f"{name}.scales")
        codes = graph.initializer(model, name, rounded, () if transposed else sources)  # a tied head's: the embedding's
        scales = graph.initializer(model, f"{name}.scales", steps)
        place = product.node
        [wide] = graph.insert(place, "DequantizeLinear", [codes, scales], {"axis": 1}, name=f"{product.name}/weight")
        wide.name, wide.type, wide.shape = f"{name}.dequantized", ir.TensorType(ir.DataType.FLOAT), codes.shape
        product.w = wide


def _lazy(
    stored: StoredChannels, dtype: ir.DataType, shape: ir.Shape, name: str
) -> tuple[ir.LazyTensor, ir.LazyTensor]:
    """Return codes [K, N] and scales [N] of a checkpoint, which are read when they are written."""

    def codes() -> ir.TensorProtocol:
        return ir.Tensor(np.ascontiguousarray(stored.codes().T), dtype=dtype, name=name)

    def scales() -> ir.TensorProtocol:
        return ir.Tensor(stored.scales(), name=f"{name}.scales")

    steps = ir.LazyTensor(scales, ir.DataType.FLOAT, ir.Shape(shape[1:]), name=f"{name}.scales")
    return ir.LazyTensor(codes, dtype, shape, name=name), steps


class _Codes:
    """Codes of the checkpoint: those that are `found`, by the product that multiplies by them."""

    def __init__(self, step: QuantizeChannels, source: QuantizedSource) -> None:
        self._step, self._source = step, source
        self.found: dict[ir.Node, StoredChannels] = {}
        self.untaken = SkippedCodes(step.name)

    def find(self, product: MatMul, weight: ir.Value) -> str | None:
        """Look for the codes of `weight`; say why there are none, None where there are."""
        tensors = stored_in(graph.tensor(weight), transposed=weight is product.w)
        if not tensors:
            return "its numbers are not those of the checkpoint any more; put quantize-channels further in front"
        try:
            codes = stack_channels([self._source.channels(name) for name in tensors])
            if codes.dtype != self._step.dtype:
                raise UnrepresentableCodes(f"are {codes.dtype}; `dtype` is {self._step.dtype}")
        except UnrepresentableCodes as reason:
            self.untaken.add(tensors, reason)
            return f"its codes {reason}" + ("" if reason.is_plain else "; it stays dequantized")
        self.found[product.node] = codes
        return None

    def notes(self) -> list[str]:
        """Say what of the checkpoint was not taken.

        Raises:
            UnsupportedError: no codes were, and there are some.
        """
        if not self.found:
            self.untaken.refuse()
        name, notes, count = self._step.name, self.untaken.notes(), len(self.found)
        scaled = sum(codes.input_scale is not None for codes in self.found.values())
        if self._step.activations == "static" and scaled < count:
            what = (
                f"{count - scaled} of {count} layers read 16 bits: the checkpoint has no static scale of what they read"
            )
            notes.append(f"{name}: {what}")
        if self._step.activations != "static" and scaled:
            what = f"static scales of what {scaled} layers read are dropped; `activations: static` takes them"
            notes.append(f"{name}: {what}")
        return notes


@record(eq=False)
class _Input:
    """What layers read, rounded: `values` in the units of `scale`, one for each token; None: in those of the layers."""

    values: ir.Value
    scale: ir.Value | None
    done: str


class _InputRounding:
    """Rounds what layers `chosen` read, smoothed where that is possible; `sources` are the parameters of each."""

    def __init__(
        self,
        step: QuantizeChannels,
        model: ir.Model,
        chosen: Sequence[MatMul],
        inputs: Mapping[str, InputRange],
        stored: Mapping[ir.Node, StoredChannels],
    ) -> None:
        self.step, self.model, self._stored = step, model, stored
        self.sources = {product.node: _sources(product) for product in chosen}
        self._ranges: dict[ir.Value, list[InputRange]] = {}
        self._made: dict[tuple[ir.Value, float | None], _Input] = {}
        for product in chosen:
            known = [inputs[name] for name in self.sources[product.node] if name in inputs]
            self._ranges.setdefault(product.x, []).extend(known)
        self._smoothed: dict[ir.Value, Smoothed] = {}
        self._reasons: dict[ir.Value, str] = {}
        if step.activations != "none" and step.smooth and not step.takes_stored:
            for x in self._ranges:
                self._smooth(x)

    def round(self, product: MatMul) -> str:
        """Let `product` read its input rounded to the dtype; say what was done, "" where it was left alone."""
        x, static = product.x, self.step.activations == "static"
        own = self._stored[product.node].input_scale if static and product.node in self._stored else None
        if self.step.activations == "none" or (static and own is None and not self._ranges[x]):
            return ""
        if (x, own) not in self._made:
            self._made[x, own] = self._static(product, own) if static else self._per_token(product)
        made = self._made[x, own]
        product.x = made.values
        if made.scale is not None:
            y = product.output
            scaled = ir.node("Mul", [y, made.scale], name=f"{product.name}/scaled")
            scaled.outputs[0].type = y.type
            graph.insert_behind(y, [scaled], "in_steps")
        return made.done

    def _smooth(self, x: ir.Value) -> None:
        """Divide features of `x` by factors, where calibration found some that help and the graph can take them."""
        found = [each.smoothed for each in self._ranges[x]]
        if not found or found[0] is None:
            return
        first = found[0]
        if any(each is None or not np.array_equal(each.exponents, first.exponents) for each in found):
            self._reasons[x] = "its readers were measured apart"
        elif first.alpha is None:
            self._reasons[x] = f"no factors help, output error {first.loss:.2g}"
        elif reason := smoothing.smooth(self.model, x, first.exponents):
            self._reasons[x] = reason
        else:
            self._smoothed[x] = first

    def _done(self, x: ir.Value) -> str:
        if (smoothed := self._smoothed.get(x)) is not None:
            error = f"output error {smoothed.loss_before:.2g}, smoothed {smoothed.loss:.2g}"
            return f"inputs {self.step.activations}, smoothed by alpha {smoothed.alpha:g}: {error}"
        reason = self._reasons.get(x)
        return f"inputs {self.step.activations}" + (f", not smoothed: {reason}" if reason else "")

    def _static(self, product: MatMul, own: float | None) -> _Input:
        """Round by the largest magnitude on the calibration text, or by a step of the checkpoint's `own`."""
        x, node, name = product.x, product.node, f"{product.x.name}.{self.step.dtype}"
        if own is not None:
            others = sum(1 for value, _ in self._made if value is x)
            name = f"{name}.{others}" if others else name
            scale = graph.initializer(self.model, f"{name}.scale", np.float32(own))
            return _Input(self._through_codes(node, x, scale, name), None, "inputs static, by the checkpoint")
        factors = self._smoothed[x].factors if x in self._smoothed else np.float32(1)
        peak = float(np.max([(each.peaks / factors).max() for each in self._ranges[x]]))
        if not 0 < peak < math.inf:
            raise DataError(
                f"{self.step.name}: what {node.name} reads ranges to {peak:g} on the calibration text, so that it has "
                "no scale",
                hint="use more calibration text, or set `activations: none`",
            )
        step = np.float32(peak / channels.LARGEST[channels.DTYPES[self.step.dtype]])
        scale = graph.initializer(self.model, f"{name}.scale", step)
        return _Input(self._through_codes(node, x, scale, name), None, self._done(x))

    def _per_token(self, product: MatMul) -> _Input:
        """Round each token by its own largest magnitude: what is read is in steps of the token."""
        x, node, name = product.x, product.node, f"{product.x.name}.{self.step.dtype}"
        largest = channels.LARGEST[channels.DTYPES[self.step.dtype]]
        one = graph.initializer(self.model, f"{self.step.name}.one", np.float32(1))
        last = graph.initializer(self.model, f"{self.step.name}.last_axis", np.array([-1]))
        share = graph.initializer(self.model, f"{self.step.name}.of_largest_{self.step.dtype}", np.float32(1 / largest))
        least = graph.initializer(self.model, f"{self.step.name}.least", np.float32(_LEAST))
        size = self._add("Abs", node, [x], f"{name}.size", x)
        top = self._add("ReduceMax", node, [size, last], f"{name}.top", x, per_token=True, keepdims=1)
        step = self._add("Mul", node, [top, share], f"{name}.step", x, per_token=True)
        scale = self._add("Max", node, [step, least], f"{name}.scale", x, per_token=True)
        steps = self._add("Div", node, [x, scale], f"{name}.steps", x)
        return _Input(self._through_codes(node, steps, one, name), scale, self._done(x))

    def _through_codes(self, node: ir.Node, x: ir.Value, scale: ir.Value, name: str) -> ir.Value:
        """Round `x` to multiples of `scale` in front of `node`."""
        dtype = channels.DTYPES[self.step.dtype]
        zero = graph.initializer(self.model, f"{self.step.name}.zero_{self.step.dtype}", np.zeros((), dtype.numpy()))
        codes = self._add("QuantizeLinear", node, [x, scale, zero], f"{name}.codes", x)
        codes.type = ir.TensorType(dtype)
        return self._add("DequantizeLinear", node, [codes, scale], name, x)

    def _add(
        self,
        op_type: str,
        node: ir.Node,
        inputs: list[ir.Value],
        name: str,
        like: ir.Value,
        *,
        per_token: bool = False,
        **attributes: int,
    ) -> ir.Value:
        """Insert a node in front of `node` that makes what `like` is, or one number for each of its tokens."""
        [made] = graph.insert(node, op_type, inputs, attributes, name=f"{name}/{op_type}")
        made.name, made.type, made.shape = name, like.type, like.shape
        if per_token and like.shape is not None:
            made.shape = ir.Shape([*like.shape[:-1], 1])
        return made


def _sources(product: MatMul) -> list[str]:
    weight = _weight(product)
    return [] if weight is None else graph.sources(weight)


def _weight(product: MatMul) -> ir.Value | None:
    """Return the matrix of `product`, an initializer or the transpose of one; None where it is neither."""
    turned = Transpose.made(product.w)
    weight = product.w if turned is None else turned.x
    return weight if weight.is_initializer() and len(graph.dims(weight) or ()) == 2 else None


def _reason(weight: ir.Value, transposed: bool) -> str | None:
    """Say why `weight` stays as it is; None where it can be stored."""
    if weight.dtype != ir.DataType.FLOAT:
        return f"{weight.name} is {weight.dtype}; expected an fp32 matrix"
    if weight.is_graph_input() or weight.is_graph_output() or (len(weight.uses()) > 1 and not transposed):
        return f"{weight.name} has other readers"
    return None
