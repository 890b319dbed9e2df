"""The layers of TensorRT's network, counted and held against the graph that it was parsed from.

They prove what a finished plan no longer shows: that every attention is one IAttention that may not be decomposed, so
that the build, which fails where no fused kernel exists, chose a fused kernel for each; that every cache is updated in
place; that quantized weights reach the builder quantized.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import onnx_ir as ir

from llmforge.base.errors import VerificationError
from llmforge.ir import graph, interface, operators
from llmforge.ir.operators import standard
from llmforge.ir.operators.standard import DequantizeLinear, MatMul, Transpose
from llmforge.quantization.sparsity import is_sparse

ATTENTION = "ATTENTION_INPUT"
WITH_LENGTHS = "ATTENTION_INPUT with lengths"


def set_lengths(network: Any, api: Any) -> int:
    """Give every attention of a parsed `network` the lengths of its texts; return how many there are.

    0 where the graph has no past_lengths or input_ids: it is no decoder.

    Raises:
        VerificationError: an attention does not keep them.
    """
    inputs = {network.get_input(i).name: network.get_input(i) for i in range(network.num_inputs)}
    past, ids = inputs.get(interface.PAST_LENGTHS), inputs.get(interface.INPUT_IDS)
    found = [layer for i in range(network.num_layers) if (layer := network.get_layer(i)).type.name == ATTENTION]
    if past is None or ids is None or not found:
        return 0
    lengths = _lengths(network, api, past, ids)
    for layer in found:
        layer.__class__ = api.IAttentionInputLayer  # how a layer is narrowed in TensorRT's Python API
        layer.attention.key_value_lengths = lengths
        kept = layer.attention.key_value_lengths
        if kept is None or kept.name != lengths.name:
            raise VerificationError(f"attention {layer.attention.name} did not keep the lengths of its keys and values")
    return len(found)


def _lengths(network: Any, api: Any, past: Any, ids: Any) -> Any:
    """past_lengths [B] + sequence of input_ids [B, S], int32 [B]."""
    shape = network.add_shape(ids).get_output(0)  # int64 [2]
    sequence = network.add_slice(shape, (1,), (1,), (1,)).get_output(0)
    terms = [network.add_cast(each, api.int32).get_output(0) for each in (past, sequence)]
    total = network.add_elementwise(*terms, api.ElementWiseOperation.SUM)
    total.name = total.get_output(0).name = "key_value_lengths"
    return total.get_output(0)


# Operator → the type of layer that stands for one of its nodes. Softmax: none beyond the graph's own means that
# no attention was taken apart.
ASSERTED: Mapping[type[operators.Operator], str] = {
    standard.OnnxAttention: "ATTENTION_INPUT",
    standard.TensorScatter: "KV_CACHE_UPDATE",
    standard.DequantizeLinear: "DEQUANTIZE",
    standard.QuantizeLinear: "QUANTIZE",
    standard.TRT_FP4DynamicQuantize: "DYNAMIC_QUANTIZE",
    standard.Softmax: "SOFTMAX",
    standard.DistCollective: "DIST_COLLECTIVE",
}


def count(network: Any) -> dict[str, int]:
    """Count the layers of a parsed network by type, as TensorRT names it; sorted."""
    kinds = Counter(network.get_layer(i).type.name for i in range(network.num_layers))
    return dict(sorted(kinds.items()))


def decomposable(network: Any, api: Any) -> list[str]:
    """Name every attention of a network that the builder may take apart; `api` is the module that made it."""
    found = []
    for i in range(network.num_layers):
        layer = network.get_layer(i)
        if layer.type.name == ASSERTED[standard.OnnxAttention]:
            layer.__class__ = api.IAttentionInputLayer  # how a layer is narrowed in TensorRT's Python API
            if layer.attention.decomposable:
                found.append(str(layer.attention.name))
    return found


def check(counted: Mapping[str, int], taken_apart: list[str], model: ir.Model) -> None:
    """Return if a network has the layers that the lowered `model` asks for.

    Raises:
        VerificationError: it has more, or fewer, or an attention that may be decomposed.
    """
    if taken_apart:
        raise VerificationError(
            f"attention {', '.join(taken_apart)} may be decomposed: the plan would not prove a fused kernel"
        )
    nodes = Counter(map(operators.record, model.graph.all_nodes()))
    for operator, kind in ASSERTED.items():
        wanted, found = nodes[operator], counted.get(kind, 0)
        if wanted != found:
            raise VerificationError(
                f"the graph has {wanted} nodes {operator.op_type}, but TensorRT's network {found} layers {kind}: "
                "the result would differ",
                hint="report it with the recipe and the version of TensorRT",
            )


def sparse(model: ir.Model) -> dict[str, int]:
    """Count the products of a lowered `model`, said to be of 2:4 sparsity, whose weights are; reads them.

    Raises:
        VerificationError: none is.
    """
    found = 0
    for product in standard.MatMul.all(model):
        dequantized = standard.DequantizeLinear.made(product.w)
        weight = product.w if dequantized is None else dequantized.codes
        if graph.is_constant(weight) and len(graph.dims(weight) or ()) == 2:
            found += is_sparse(graph.tensor(weight).numpy())
    if not found:
        raise VerificationError(
            "the graph is said to have weights of 2:4 sparsity, and none of its products does",
            hint="a pass behind sparsify-weights filled their zeros: quantize-channels keeps them",
        )
    return {"MATRIX_MULTIPLY of 2:4 weights": found}


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
