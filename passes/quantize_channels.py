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

    with `granularity: tensor`, for fp8 and `activations: static`, as ModelOpt's checkpoints have it: `scales` are fp32
    [], one number for all matrices that read one input, which servers multiply by as one.

    with `granularity: block`, for fp8 and `activations: per_token`, as servers of others read DeepSeek's checkpoints:
    y = x·W + b                     becomes  y = r·DequantizeLinear(codes, scales) + b,
                                             r = t·DequantizeLinear(QuantizeLinear(x / t, 1), 1)

one scale for each square of 128 × 128 weights, `scales` [K / 128, N] on axis 0 with those of a square alike, and `t`
one of each token and 128 features, [batch, sequence, K / 128, 1]. Matrices whose K 128 does not divide stay, and
nothing is smoothed: an outlier takes no more than the 127 features beside it along.

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

from collections.abc import Sequence
from typing import Annotated, ClassVar, Literal, Self

import numpy as np
import onnx_ir as ir
from pydantic import Field, model_validator
from pydantic.dataclasses import dataclass

from llmforge.ir import graph, logits_rows, routing
from llmforge.ir.derived import Derived, computed, stored_in, swapped
from llmforge.ir.operators.standard import MatMul
from llmforge.quantization import channels, methods
from llmforge.quantization.grid import Grid
from llmforge.quantization.statistics import Demand, InputRangeDemand, Smoothing, exclusion
from llmforge.quantization.stored import (
    QuantizedSource,
    SkippedCodes,
    StoredChannels,
    UnrepresentableCodes,
    require,
    stack_channels,
)
from llmforge.rewrite.declared import QuantizeChannelsTraits
from llmforge.rewrite.pass_base import Budget, Changes, Context, Numerics, Pass
from llmforge.rewrite.patterns import NotApplicable, rewrite_each, skip_if
from llmforge.rewrite.rounded_inputs import HowRounded, InputRounding, weight_of
from llmforge.rewrite.traits import Storage


@dataclass(frozen=True)
class QuantizeChannels(QuantizeChannelsTraits, Pass):
    """Quantize the weights of linear layers and output head to int8 or fp8, with one scale per output feature."""

    numerics: ClassVar[Numerics] = Numerics.LOSSY

    budget: Annotated[Budget, Field(description="quality budget of the pass")]
    dtype: Annotated[Literal["int8", "fp8"], Field(description="int8, or fp8 (e4m3)")]
    activations: Annotated[
        Literal["none", "static", "per_token"],
        Field(
            description="also round the inputs of the layers; static: by calibrated ranges (with `method: stored`, by "
            "those of the checkpoint), per_token: by the range of each token"
        ),
    ] = "none"
    granularity: Annotated[
        Literal["channel", "tensor", "block"],
        Field(
            description="what shares a scale; channel: an output feature, and a token; tensor: all matrices that read "
            "one input, in fp8 with `activations: static`; block: 128 × 128 weights in fp8, and 128 features of a "
            "token, with `activations: per_token`"
        ),
    ] = "channel"
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
        if self.in_squares and (self.dtype, self.activations) != ("fp8", "per_token"):
            raise ValueError("granularity: block goes with dtype: fp8 and activations: per_token")
        if self.in_squares and (self.takes_stored or self.head or self.alpha is not None):
            raise ValueError("granularity: block goes with method: rtn and head: false, and without alpha")
        if self.granularity == "tensor" and (self.dtype, self.activations) != ("fp8", "static"):
            raise ValueError("granularity: tensor goes with dtype: fp8 and activations: static")
        if self.granularity == "tensor" and (self.takes_stored or self.head):
            raise ValueError("granularity: tensor goes with method: rtn and head: false")
        if self.alpha is not None and (self.activations == "none" or not self.smooth):
            raise ValueError("alpha goes with smooth: true and activations: static or per_token")
        if self.alpha is not None and self.takes_stored:
            raise ValueError(f"method: {methods.STORED} keeps weights as they are, which alpha would move")
        return self

    @property
    def in_squares(self) -> bool:
        """Whether squares of weights share a scale."""
        return self.granularity == "block"

    @property
    def takes_stored(self) -> bool:
        """Whether codes are those of the checkpoint."""
        return self.method == methods.STORED

    @property
    def server_format(self) -> str | None:
        """Name the format of linear layers."""
        if self.granularity != "channel":
            return f"{self.dtype}-{self.granularity}"
        return self.dtype if self.activations == "none" else f"{self.dtype}-{self.activations}"

    def stores(self, stored: Grid | None) -> Storage:
        """Say the dtype of weights and head, and of products where activations are rounded, too."""
        product = self.dtype if self.activations != "none" else None
        return Storage(weights=self.dtype, product=product, head=self.dtype if self.head else None, block=0)

    def demands(self) -> tuple[Demand, ...]:
        """Ask calibration for the ranges of what linears read, and for factors."""
        per_token = self.activations == "per_token"
        if self.activations == "none" or self.takes_stored or (per_token and not (self.smooth and not self.in_squares)):
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
        chosen = list[MatMul]()
        codes = _Codes(self, require(context.stored, self.name)) if self.takes_stored else None

        def choose(product: MatMul) -> None:
            node, weight = product.node, weight_of(product)
            if weight is None:
                return
            if node in left_alone:
                raise NotApplicable(f"router of {left_alone[node].name}; `routers: true` quantizes it")
            if node in heads and not self.head:
                raise NotApplicable("output head, and `head` is false")
            skip_if(_reason(weight, weight is not product.w))
            if self.in_squares and (k := graph.static(weight)[0]) % channels.SQUARE:
                raise NotApplicable(f"its {k} input features are not a multiple of {channels.SQUARE}")
            skip_if(exclusion(graph.sources(weight) or [str(weight.name)], self.exclude))
            if codes is not None:
                codes.find(product, weight)
            chosen.append(product)

        def quantize(product: MatMul) -> str:
            x = product.x
            done = rounding.round(product)
            self._store(model, product, rounding.sources[product.node], found.get(product.node), beside.get(x, ()))
            shared = {"channel": "output feature", "tensor": "input"}.get(
                self.granularity, f"{channels.SQUARE} × {channels.SQUARE} weights"
            )
            what = f"{self.dtype}{', stored' if found else ''}, one scale per {shared}"
            return what + (f", {done}" if done else "")

        changes = rewrite_each(MatMul.all(model), choose, Changes())
        inputs = {} if context.statistics is None else context.statistics.inputs
        found = {} if codes is None else codes.found
        smooth = self.smooth and not self.takes_stored and not self.in_squares
        group = channels.SQUARE if self.in_squares else None
        how = HowRounded(self.name, self.dtype, self.activations, smooth, group)
        rounding = InputRounding(how, model, chosen, inputs, found)
        beside: dict[ir.Value, list[ir.TensorProtocol]] = {}  # weights that share a scale, by what they read
        for product in chosen if self.granularity == "tensor" else ():
            if (weight := weight_of(product)) is not None:
                beside.setdefault(product.x, []).append(graph.tensor(weight))
        rewrite_each(chosen, quantize, changes)
        if codes is not None:
            changes.notes += codes.notes()
        if changes:
            graph.drop_unused(model)
        return changes

    def _store(
        self,
        model: ir.Model,
        product: MatMul,
        sources: Sequence[str],
        stored: StoredChannels | None,
        beside: Sequence[ir.TensorProtocol],
    ) -> None:
        """Let `product` multiply by dequantized codes of its weight, [K, N], or [N, K] where that is transposed.

        Weights that stand `beside` it, it among them, share one scale; there are none where scales are of channels.
        """
        weight = weight_of(product)
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
        elif beside:
            rounded = Derived(channels.tensor_codes, [tensor, *beside], dtype, shape, name)
            steps = Derived(channels.tensor_scale, beside, ir.DataType.FLOAT, ir.Shape([]), f"{name}.scales")
        elif self.in_squares:
            rounded = Derived(channels.square_codes, [tensor], dtype, shape, name)
            by_square = ir.Shape([shape.numpy()[0] // channels.SQUARE, shape.numpy()[1]])
            steps = Derived(channels.square_scales, [tensor], ir.DataType.FLOAT, by_square, f"{name}.scales")
        else:
            rounded = Derived(channels.CODES[dtype], [tensor], dtype, shape, name)
            steps = Derived(channels.SCALES[dtype], [tensor], ir.DataType.FLOAT, ir.Shape(shape[1:]), f"{name}.scales")
        codes = graph.initializer(model, name, rounded, () if transposed else sources)  # a tied head's: the embedding's
        scales = graph.initializer(model, f"{name}.scales", steps)
        place = product.node
        where = {"axis": 0, "block_size": channels.SQUARE} if self.in_squares else {"axis": 1}
        [wide] = graph.insert(place, "DequantizeLinear", [codes, scales], where, name=f"{product.name}/weight")
        wide.name, wide.type, wide.shape = f"{name}.dequantized", ir.TensorType(ir.DataType.FLOAT), codes.shape
        product.w = wide


def _lazy(
    stored: StoredChannels, dtype: ir.DataType, shape: ir.Shape, name: str
) -> tuple[ir.LazyTensor, ir.LazyTensor]:
    """Return codes [K, N] and scales [N] of a checkpoint, which are read when they are written."""

    steps = computed(stored.scales, ir.DataType.FLOAT, shape.numpy()[1:], f"{name}.scales")
    return computed(lambda: np.ascontiguousarray(stored.codes().T), dtype, shape.numpy(), name), steps


class _Codes:
    """Codes of the checkpoint: those that are `found`, by the product that multiplies by them."""

    def __init__(self, step: QuantizeChannels, source: QuantizedSource) -> None:
        self._step, self._source = step, source
        self.found: dict[ir.Node, StoredChannels] = {}
        self.skipped = SkippedCodes(step.name)

    def find(self, product: MatMul, weight: ir.Value) -> None:
        """Look for the codes of `weight` (NotApplicable: there are none)."""
        tensors = stored_in(graph.tensor(weight), transposed=weight is product.w)
        if not tensors:
            changed = "its numbers are not those of the checkpoint any more"
            raise NotApplicable(f"{changed}; put quantize-channels further in front")
        try:
            codes = stack_channels([self._source.channels(name) for name in tensors])
            if codes.dtype != self._step.dtype:
                raise UnrepresentableCodes(f"are {codes.dtype}; `dtype` is {self._step.dtype}")
        except UnrepresentableCodes as reason:
            self.skipped.add(tensors, reason)
            stays = "" if reason.is_plain else "; it stays dequantized"
            raise NotApplicable(f"its codes {reason}{stays}") from reason
        self.found[product.node] = codes

    def notes(self) -> list[str]:
        """Say what of the checkpoint was not taken.

        Raises:
            UnsupportedError: no codes were, and there are some.
        """
        if not self.found:
            self.skipped.refuse()
        name, notes, count = self._step.name, self.skipped.notes(), len(self.found)
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


def _reason(weight: ir.Value, transposed: bool) -> str | None:
    """Say why `weight` stays as it is; None where it can be stored."""
    if weight.dtype != ir.DataType.FLOAT:
        return f"{weight.name} is {weight.dtype}; expected an fp32 matrix"
    if weight.is_graph_input() or weight.is_graph_output() or (len(weight.uses()) > 1 and not transposed):
        return f"{weight.name} has other readers"
    return None
