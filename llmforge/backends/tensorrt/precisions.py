"""In which dtype a plan multiplies codes by codes: read off what the builder says of the layers that it made.

A graph that rounds what a layer reads promises no more than numbers: the builder may widen codes and multiply in 16
bits. TensorRT-RTX 1.7 does where it divides one matrix into several of one size (a packed query, key and value with as
many KV heads as heads). With detailed profiling verbosity it lists every layer of every profile as it ends:

    Name: …, LayerType: gemm, Inputs: [ { …, Datatype: Int8, … }], Constants: [ … ], …, Metadata: [ONNX Layer: NODE]
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import onnx_ir as ir

from llmforge.ir.operators.standard import DequantizeLinear, MatMul, Transpose

_LIST = re.compile(r"^(?:Engine )?Layers?(?: Information)?:", re.IGNORECASE)
_LAYER = re.compile(
    r"^Name: .*?, LayerType: (?P<kind>[^,]+), Inputs: (?P<inputs>.*?), Constants: (?P<constants>.*?), Out"
)
_DTYPE = re.compile(r"Datatype: (\w+)")
_NODE = re.compile(r"\[ONNX Layer: ([^\]]+)\]")
_PRODUCT = "gemm"
_SAID = {ir.DataType.INT8: "Int8", ir.DataType.FLOAT8E4M3FN: "FP8", ir.DataType.FLOAT4E2M1: "FP4E2M1"}


@dataclass(frozen=True)
class Products:
    """Products of codes by codes in a plan: how many by dtype, and those that the builder widened, by node."""

    counted: Mapping[str, int]
    widened: tuple[str, ...] = ()

    @property
    def layers(self) -> dict[str, int]:
        """The counts as entries beside those of the network's layers."""
        return {f"MATRIX_MULTIPLY of {dtype} by {dtype}": count for dtype, count in sorted(self.counted.items())}

    @property
    def warnings(self) -> tuple[str, ...]:
        """What a reader of the report should know."""
        if not self.widened:
            return ()
        listed = ", ".join(self.widened[:4]) + (f" and {len(self.widened) - 4} more" if len(self.widened) > 4 else "")
        return (
            f"codes are widened and multiplied in 16 bits in {len(self.widened)} products, {listed}: as exact, and no "
            "faster than with weights alone; without pack-qkv the builder may keep them",
        )


def of(lines: Iterable[str], model: ir.Model, profiles: int) -> Products | None:
    """Find every product of codes by codes of the lowered `model` in what a builder said; None: it lists no layers."""
    said = [line for text in lines if _LIST.match(text) and "LayerType: " in text for line in text.splitlines()]
    if not said:
        return None
    found: Counter[tuple[str, str]] = Counter()
    for line in said:
        layer = _LAYER.match(line)
        if layer is None or layer["kind"] != _PRODUCT:
            continue
        dtypes = [*_DTYPE.findall(layer["inputs"])[:1], *_of_weights(_DTYPE.findall(layer["constants"]))]
        if len(dtypes) == 2 and dtypes[0] == dtypes[1]:
            found.update((node, dtypes[0]) for node in set(_NODE.findall(line)))
    wanted = codes_by_codes(model)
    kept = {node: dtype for node, dtype in wanted.items() if found[node, _SAID[dtype]] >= profiles}
    widened = tuple(node for node in wanted if node not in kept)
    return Products(Counter(dtype.name for dtype in kept.values()), widened)


def _of_weights(dtypes: Sequence[str]) -> list[str]:
    """Leave out what scales a product."""
    return [dtype for dtype in dtypes if dtype != "Float"][:1]


def codes_by_codes(model: ir.Model) -> dict[str, ir.DataType]:
    """Name the products of a lowered `model` both operands of which are dequantized codes of one dtype."""
    found = {}
    for product in MatMul.all(model):
        turned = Transpose.made(product.w)
        read = DequantizeLinear.made(product.x)
        weight = DequantizeLinear.made(product.w if turned is None else turned.x)
        if read is not None and weight is not None and (dtype := read.codes.dtype) == weight.codes.dtype in _SAID:
            assert dtype is not None
            found[product.name] = dtype
    return found
