"""The operators that a lowered graph may hold, with the dtypes that they were seen to build with.

Every row was seen with TensorRT-RTX 1.7.1, ahead of time: tests build each operator with each of its dtypes for SM75,
80, 86, 89 and 120, those aside that `refusals` keeps from one, and the lowered graphs of the model zoo. What does not
stand here is refused at plan time, whether TensorRT might take it or not.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import onnx_ir as ir

from llmforge.base.errors import UnsupportedError

_HALVES = frozenset({ir.DataType.FLOAT16, ir.DataType.BFLOAT16})
_FLOATS = _HALVES | {ir.DataType.FLOAT}
_INT, _BOOL = frozenset({ir.DataType.INT64}), frozenset({ir.DataType.BOOL})
_NUMBERS = _FLOATS | _INT
_ANY = _NUMBERS | _BOOL
_EIGHT_BITS = frozenset({ir.DataType.INT8, ir.DataType.FLOAT8E4M3FN})


@dataclass(frozen=True)
class Seen:
    """What an operator was seen to build with."""

    dtypes: frozenset[ir.DataType]  # of what it computes with or moves
    besides: frozenset[ir.DataType] = frozenset()  # of indices, shapes, masks and codes, and of what comparisons make


OPERATORS: Mapping[str, Seen] = {
    # what carries the work
    "MatMul": Seen(_FLOATS),
    "Attention": Seen(_HALVES, _BOOL),
    "TensorScatter": Seen(_HALVES, _INT),
    "RotaryEmbedding": Seen(_HALVES, _INT),
    "RMSNormalization": Seen(_FLOATS),
    "LayerNormalization": Seen(_FLOATS),
    "DequantizeLinear": Seen(_HALVES, _EIGHT_BITS | {ir.DataType.INT4}),
    "QuantizeLinear": Seen(_HALVES, _EIGHT_BITS),
    "DistCollective": Seen(_FLOATS),  # TensorRT's own, in the domain of ONNX
    # what stands between
    **{name: Seen(_NUMBERS) for name in ("Add", "Sub", "Mul", "Div", "Min", "Max", "Neg", "Abs", "Clip")},
    **{name: Seen(_NUMBERS, _INT) for name in ("ReduceMax", "ReduceSum")},
    **{name: Seen(_FLOATS) for name in ("Sigmoid", "Tanh", "Relu", "Gelu", "Erf", "Exp", "Log", "Softplus", "Softmax")},
    **{name: Seen(_FLOATS) for name in ("Pow", "Sqrt", "Reciprocal", "Floor", "Cos", "Sin")},
    "ReduceMean": Seen(_FLOATS, _INT),
    **{name: Seen(_NUMBERS, _BOOL) for name in ("Greater", "GreaterOrEqual", "Less", "LessOrEqual")},
    "Equal": Seen(_ANY, _BOOL),
    "Where": Seen(_NUMBERS, _BOOL),
    **{name: Seen(_BOOL) for name in ("And", "Or", "Not")},
    # what moves numbers
    **{name: Seen(_ANY, _INT) for name in ("Reshape", "Slice", "Expand", "Squeeze", "Unsqueeze", "Shape")},
    **{name: Seen(_ANY) for name in ("Transpose", "Concat")},
    "Split": Seen(_NUMBERS, _INT),
    "Cast": Seen(_ANY | {ir.DataType.INT32}),
    **{name: Seen(_NUMBERS, _INT) for name in ("Gather", "GatherElements", "TopK", "ArgMax")},
}


def check(model: ir.Model) -> None:
    """Return if every operator of a lowered `model` was seen to build with its dtypes.

    Raises:
        UnsupportedError: names those that were not, and a node of each.
    """
    unseen = dict(_unseen(model))
    if unseen:
        listed = ", ".join(f"{what}, node {node}" for what, node in reversed(unseen.items()))
        raise UnsupportedError(
            f"TensorRT was not seen to build {listed}",
            hint="leave the pass that writes it out of the recipe, or choose `engine: {backend: onnxruntime}`",
        )


def _unseen(model: ir.Model) -> Iterator[tuple[str, str]]:
    """Find operators, the last first, that do not stand in the table, or not with one of their dtypes."""
    for node in reversed(list(model.graph.all_nodes())):
        operator = f"{node.domain}::{node.op_type}" if node.domain else node.op_type
        seen = None if node.domain else OPERATORS.get(node.op_type)
        if seen is None:
            yield operator, str(node.name)
            continue
        dtypes = {value.dtype for value in (*node.inputs, *node.outputs) if value is not None and value.dtype}
        if unseen := dtypes - seen.dtypes - seen.besides:
            yield f"{operator} of {', '.join(sorted(dtype.name for dtype in unseen))}", str(node.name)
