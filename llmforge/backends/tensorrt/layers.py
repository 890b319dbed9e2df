"""The layers of TensorRT's network, counted and held against the graph that it was parsed from.

They prove what a finished plan no longer shows: that every attention is one IAttention that may not be decomposed, so
that the build, which fails where no fused kernel exists, chose a fused kernel for each; that every cache is updated in
place; that quantized weights reach the builder quantized.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

import onnx_ir as ir

from llmforge.base.errors import VerificationError
from llmforge.ir import graph, operators
from llmforge.ir.operators import standard
from llmforge.quantization.sparsity import is_sparse

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
