"""The operators that a lowered graph may hold, with the dtypes that they were seen to build with.

Every row was seen with TensorRT-RTX 1.7.1, ahead of time: in the lowered graphs of the model zoo, built for SM89, and
where the row names more, for those compute capabilities. What does not stand here is refused at plan time, whether
TensorRT might take it or not. What a compute capability lacks whatever the operator (bf16, int4, fp8, …) stands in
`refusals`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import onnx_ir as ir

from llmforge.errors import UnsupportedError

_HALVES = frozenset({ir.DataType.FLOAT16, ir.DataType.BFLOAT16})
_FLOATS = _HALVES | {ir.DataType.FLOAT}
_INT, _BOOL = frozenset({ir.DataType.INT64}), frozenset({ir.DataType.BOOL})
_NUMBERS = _FLOATS | _INT
_CODES = frozenset({ir.DataType.INT4, ir.DataType.INT8, ir.DataType.FLOAT8E4M3FN})

ZOO, LAYERS, MATRIX = (
    "graphs of the zoo, fp16 and bf16",
    "layers of the sample checkpoint, SM75 to SM120",
    "one matrix product, SM75 to SM120",
)


@dataclass(frozen=True)
class Seen:
    """What an operator was seen to build with."""

    dtypes: frozenset[ir.DataType]  # of all that it reads and makes
    how: str


OPERATORS: Mapping[str, Seen] = {
    # what carries the work
    "MatMul": Seen(_FLOATS, LAYERS),
    "Attention": Seen(_HALVES | _BOOL, LAYERS),
    "TensorScatter": Seen(_HALVES | _INT, LAYERS),
    "RotaryEmbedding": Seen(_HALVES | _INT, LAYERS),
    "RMSNormalization": Seen(_FLOATS, LAYERS),
    "LayerNormalization": Seen(_FLOATS, ZOO),
    "DequantizeLinear": Seen(_HALVES | _CODES, MATRIX),
    "QuantizeLinear": Seen(_HALVES | _CODES, MATRIX),
    # what stands between
    **{
        name: Seen(_NUMBERS, ZOO)
        for name in ("Add", "Sub", "Mul", "Div", "Min", "Max", "Neg", "Abs", "Clip", "ReduceMax", "ReduceSum", "Pow")
    },
    **{
        name: Seen(_FLOATS, ZOO)
        for name in ("Sigmoid", "Tanh", "Relu", "Gelu", "Erf", "Exp", "Softplus", "Softmax", "Sqrt", "Reciprocal")
    },
    **{name: Seen(_FLOATS, ZOO) for name in ("Log", "Floor", "Cos", "Sin", "ReduceMean")},
    **{
        name: Seen(_NUMBERS | _BOOL, ZOO)
        for name in ("Equal", "Greater", "GreaterOrEqual", "Less", "LessOrEqual", "And", "Or", "Not", "Where")
    },
    # what moves numbers
    **{
        name: Seen(_NUMBERS | _BOOL, ZOO)
        for name in ("Reshape", "Transpose", "Concat", "Slice", "Split", "Expand", "Squeeze", "Unsqueeze", "Gather")
    },
    "Cast": Seen(_NUMBERS | _BOOL | {ir.DataType.INT32}, ZOO),
    "GatherElements": Seen(_NUMBERS, ZOO),
    "TopK": Seen(_NUMBERS, ZOO),
    "ArgMax": Seen(_NUMBERS, ZOO),
    "Shape": Seen(_NUMBERS, ZOO),
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
        if unseen := dtypes - seen.dtypes:
            yield f"{operator} of {', '.join(sorted(dtype.name for dtype in unseen))}", str(node.name)
