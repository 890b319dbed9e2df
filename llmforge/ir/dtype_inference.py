"""Dtypes of the values that a pass left untyped: every operator of the dialect says what it makes of what it reads."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import onnx_ir as ir

_Rule = Callable[[ir.Node, int], ir.DataType | None]


def complete(model: ir.Model) -> None:
    """Give every value of `model` that has no dtype the one that its operator makes, where that is known.

    Shapes are left alone. Graphs inside of nodes are not looked at.
    """
    for node in model.graph:
        for index, value in enumerate(node.outputs):
            if value.dtype is None and value.name != "":
                dtype = _RULES.get((node.domain, node.op_type), _as(0))(node, index)
                if dtype is not None:
                    value.type = ir.TensorType(dtype)


def _as(*inputs: int) -> _Rule:
    """Say that output `i` has the dtype of input `inputs[i]`; the last one stands for all further outputs."""

    def rule(node: ir.Node, index: int) -> ir.DataType | None:
        place = inputs[min(index, len(inputs) - 1)]
        value = node.inputs[place] if place < len(node.inputs) else None
        return None if value is None else value.dtype

    return rule


def _always(*dtypes: ir.DataType) -> _Rule:
    return lambda node, index: dtypes[min(index, len(dtypes) - 1)]


def _top_k(node: ir.Node, index: int) -> ir.DataType | None:
    return _as(0)(node, 0) if index == 0 else ir.DataType.INT64


def _cast(node: ir.Node, index: int) -> ir.DataType | None:
    return ir.DataType(node.attributes.get_int("to"))


def _filled(node: ir.Node, index: int) -> ir.DataType | None:
    value = node.attributes.get("value")
    return ir.DataType.FLOAT if value is None else value.as_tensor().dtype  # ONNX ConstantOfShape: zeros in fp32


_BOOL, _INT32, _INT64 = ir.DataType.BOOL, ir.DataType.INT32, ir.DataType.INT64
_COMPARISONS = ("Equal", "Greater", "GreaterOrEqual", "Less", "LessOrEqual", "And", "Or", "Not")
# Others make what their first input is.
_RULES: Mapping[tuple[str, str], _Rule] = {
    **{("", name): _always(_BOOL) for name in _COMPARISONS},
    ("", "Shape"): _always(_INT64),
    ("", "ArgMax"): _always(_INT64),
    ("", "NonZero"): _always(_INT64),
    ("", "TopK"): _top_k,
    ("", "Cast"): _cast,
    ("", "CastLike"): _as(1),
    ("", "ConstantOfShape"): _filled,
    ("", "Where"): _as(1),
    ("", "DequantizeLinear"): _as(1),
    ("", "QuantizeLinear"): _as(2),
    ("llmforge", "Attention"): _as(0, 3, 4),
    ("llmforge", "GrowingAttention"): _as(0, 3, 4),
    ("llmforge", "CausalConv"): _as(0, 2),
    ("llmforge", "LinearAttention"): _as(0, 5),
    ("llmforge", "CacheLengths"): _always(_INT32),
    ("llmforge", "TokenOrder"): _always(_INT64),
    ("llmforge", "RowPlaces"): _always(_INT64),
    ("llmforge.cpu", "Embedding"): _always(ir.DataType.FLOAT),
    ("com.microsoft", "GatherBlockQuantized"): _as(2),
    ("com.microsoft", "GroupQueryAttention"): _as(0, 3, 4),
    ("llmforge.cpu", "GroupQueryAttention"): _as(0, 1, 2),
    ("llmforge.cpu", "GroupQueryAttentionInt8"): _as(0, 1, 2),
}
