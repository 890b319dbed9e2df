"""Inputs of linear layers, rounded to int8 or fp8 by a static scale or by one of each token, and smoothed first."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass as record
from typing import Literal

import numpy as np
import onnx_ir as ir

from llmforge.base.errors import DataError
from llmforge.ir import graph
from llmforge.ir.operators.standard import MatMul, Transpose
from llmforge.quantization import channels
from llmforge.quantization.statistics import InputRange, Smoothed
from llmforge.quantization.stored import StoredChannels
from llmforge.rewrite import smoothing

_LEAST = 2.0**-24  # scale of a token: the smallest number of fp16, so that a token of zeros has a scale


@record(frozen=True)
class HowRounded:
    """How the pass `step` rounds what layers read."""

    step: str
    dtype: Literal["int8", "fp8"]
    activations: Literal["none", "static", "per_token"]
    smooth: bool  # by the factors that calibration found
    group: int | None = None  # features of a token that share a scale; None: all do


@record(eq=False)
class _Input:
    """What layers read, rounded: `values` in the units of `scale`, one for each token; None: in those of the layers."""

    values: ir.Value
    scale: ir.Value | None
    done: str


class InputRounding:
    """Rounds what layers `chosen` read, smoothed where that is possible; `sources` are the parameters of each."""

    def __init__(
        self,
        how: HowRounded,
        model: ir.Model,
        chosen: Sequence[MatMul],
        inputs: Mapping[str, InputRange],
        stored: Mapping[ir.Node, StoredChannels],
    ) -> None:
        self.how, self.model, self._stored = how, model, stored
        self.sources = {product.node: sources_of(product) for product in chosen}
        self._ranges: dict[ir.Value, list[InputRange]] = {}
        self._made: dict[tuple[ir.Value, float | None], _Input] = {}
        for product in chosen:
            known = [inputs[name] for name in self.sources[product.node] if name in inputs]
            self._ranges.setdefault(product.x, []).extend(known)
        self._smoothed: dict[ir.Value, Smoothed] = {}
        self._reasons: dict[ir.Value, str] = {}
        if how.activations != "none" and how.smooth:
            for x in self._ranges:
                self._smooth(x)

    def round(self, product: MatMul) -> str:
        """Let `product` read its input rounded to the dtype; say what was done, "" where it was left alone."""
        x, static = product.x, self.how.activations == "static"
        own = self._stored[product.node].input_scale if static and product.node in self._stored else None
        if self.how.activations == "none" or (static and own is None and not self._ranges[x]):
            return ""
        if (x, own) not in self._made:
            grouped = self.how.group is not None
            make = self._per_group if grouped else self._per_token
            self._made[x, own] = self._static(product, own) if static else make(product)
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
            return f"inputs {self.how.activations}, smoothed by alpha {smoothed.alpha:g}: {error}"
        reason = self._reasons.get(x)
        return f"inputs {self.how.activations}" + (f", not smoothed: {reason}" if reason else "")

    def _static(self, product: MatMul, own: float | None) -> _Input:
        """Round by the largest magnitude on the calibration text, or by a step of the checkpoint's `own`."""
        x, node, name = product.x, product.node, f"{product.x.name}.{self.how.dtype}"
        if own is not None:
            others = sum(1 for value, _ in self._made if value is x)
            name = f"{name}.{others}" if others else name
            scale = graph.initializer(self.model, f"{name}.scale", np.float32(own))
            return _Input(self._through_codes(node, x, scale, name), None, "inputs static, by the checkpoint")
        factors = self._smoothed[x].factors if x in self._smoothed else np.float32(1)
        peak = float(np.max([(each.peaks / factors).max() for each in self._ranges[x]]))
        if not 0 < peak < math.inf:
            raise DataError(
                f"{self.how.step}: what {node.name} reads ranges to {peak:g} on the calibration text, so that it has "
                "no scale",
                hint="use more calibration text, or set `activations: none`",
            )
        step = np.float32(peak / channels.LARGEST[channels.DTYPES[self.how.dtype]])
        scale = graph.initializer(self.model, f"{name}.scale", step)
        return _Input(self._through_codes(node, x, scale, name), None, self._done(x))

    def _per_token(self, product: MatMul) -> _Input:
        """Round each token by its own largest magnitude: what is read is in steps of the token."""
        x, name = product.x, f"{product.x.name}.{self.how.dtype}"
        values, scale = self._by_last_axis(product.node, x, name)
        return _Input(values, scale, self._done(x))

    def _per_group(self, product: MatMul) -> _Input:
        """Round each group of features of a token by its own largest magnitude, in the units of the layers."""
        x, node, name, group = product.x, product.node, f"{product.x.name}.{self.how.dtype}", self.how.group
        assert group is not None
        groups = graph.initializer(self.model, f"{self.how.step}.groups", np.array([0, 0, -1, group]))
        whole = graph.initializer(self.model, f"{self.how.step}.features", np.array([0, 0, -1]))
        split = self._add("Reshape", node, [x, groups], f"{name}.groups", x)
        if x.shape is not None:
            split.shape = ir.Shape([*x.shape[:-1], graph.width(x) // group, group])
        steps, scale = self._by_last_axis(node, split, name)
        values = self._add("Mul", node, [steps, scale], f"{name}.values", split)
        joined = self._add("Reshape", node, [values, whole], f"{name}.joined", x)
        return _Input(joined, None, f"{self._done(x)}, in groups of {group}")

    def _by_last_axis(self, node: ir.Node, x: ir.Value, name: str) -> tuple[ir.Value, ir.Value]:
        """Round `x` by its largest magnitudes along the last axis; return the steps, and how large one is."""
        largest = channels.LARGEST[channels.DTYPES[self.how.dtype]]
        one = graph.initializer(self.model, f"{self.how.step}.one", np.float32(1))
        last = graph.initializer(self.model, f"{self.how.step}.last_axis", np.array([-1]))
        code = graph.initializer(self.model, f"{self.how.step}.largest_{self.how.dtype}", np.float32(largest))
        least = graph.initializer(self.model, f"{self.how.step}.least", np.float32(_LEAST))
        size = self._add("Abs", node, [x], f"{name}.size", x)
        top = self._add("ReduceMax", node, [size, last], f"{name}.top", x, per_token=True, keepdims=1)
        step = self._add("Div", node, [top, code], f"{name}.step", x, per_token=True)  # as vLLM: the same bits
        scale = self._add("Max", node, [step, least], f"{name}.scale", x, per_token=True)
        steps = self._add("Div", node, [x, scale], f"{name}.steps", x)
        return self._through_codes(node, steps, one, name), scale

    def _through_codes(self, node: ir.Node, x: ir.Value, scale: ir.Value, name: str) -> ir.Value:
        """Round `x` to multiples of `scale` in front of `node`."""
        dtype = channels.DTYPES[self.how.dtype]
        zero = graph.initializer(self.model, f"{self.how.step}.zero_{self.how.dtype}", np.zeros((), dtype.numpy()))
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


def sources_of(product: MatMul) -> list[str]:
    """Name the parameters that the matrix of `product` comes from."""
    weight = weight_of(product)
    return [] if weight is None else graph.sources(weight)


def weight_of(product: MatMul) -> ir.Value | None:
    """Return the matrix of `product`, an initializer or the transpose of one; None where it is neither."""
    turned = Transpose.made(product.w)
    weight = product.w if turned is None else turned.x
    return weight if weight.is_initializer() and len(graph.dims(weight) or ()) == 2 else None
