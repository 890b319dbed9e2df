"""One node of every operator that a lowered graph may hold, in graphs that TensorRT can build."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import ml_dtypes
import numpy as np
import onnx_ir as ir

from llmforge.ir import graph
from llmforge.ir.operators import TABLE

OPERATORS = {each.op_type: each.tensorrt for each in TABLE.values() if each.tensorrt is not None}

B, S, C, D = 2, 3, 8, 64  # batch, sequence, capacity, channels
Maker = Callable[["Bench"], ir.Value]


class Bench:
    """A graph that grows by one node of an operator in one dtype at a time."""

    def __init__(self) -> None:
        self.graph = ir.Graph([], [], nodes=[], opset_imports={"": 24}, name="operators")

    def given(self, name: str, dtype: ir.DataType, *shape: int) -> ir.Value:
        """Return a graph input, made where there is none of that name."""
        for value in self.graph.inputs:
            if value.name == name:
                return value
        value = ir.Value(name=name, type=ir.TensorType(dtype), shape=ir.Shape(shape))
        self.graph.inputs.append(value)
        return value

    def constant(self, name: str, array: np.ndarray) -> ir.Value:
        return graph.initializer(self.graph, name, ir.Tensor(array, name=name))

    def node(self, operator: str, inputs: list[ir.Value | None], outputs: int = 1, **attributes: object) -> ir.Value:
        made = ir.node(operator, inputs, attributes, num_outputs=outputs, name=f"{operator}_{len(self.graph)}")
        self.graph.append(made)
        return made.outputs[0]

    def add(self, operator: str, dtype: ir.DataType) -> None:
        made = make(self, operator, dtype)
        made.name, made.type = f"{operator}.{dtype.name}", ir.TensorType(_made(operator, dtype))
        self.graph.outputs.append(made)

    def model(self) -> ir.Model:
        return ir.Model(self.graph, ir_version=11)


def _made(operator: str, dtype: ir.DataType) -> ir.DataType:
    if operator in ("Greater", "GreaterOrEqual", "Less", "LessOrEqual", "Equal"):
        return ir.DataType.BOOL
    if operator in ("Shape", "ArgMax"):
        return ir.DataType.INT64
    return ir.DataType.FLOAT if operator == "Cast" else dtype


def _through_fp4(bench: Bench, x: ir.Value, dtype: ir.DataType) -> ir.Value:
    """Round in blocks, and back: the operator's outputs are none that an engine could give out."""
    scale = bench.constant("scale4", np.array(0.5, np.float32))
    node = ir.node(
        "TRT_FP4DynamicQuantize", [x, scale], {"axis": -1, "block_size": 16, "scale_type": 17}, num_outputs=2
    )
    node.name = f"TRT_FP4DynamicQuantize_{len(bench.graph)}"
    bench.graph.append(node)
    codes, scales = node.outputs
    codes.type, scales.type = ir.TensorType(ir.DataType.FLOAT4E2M1), ir.TensorType(ir.DataType.FLOAT8E4M3FN)
    steps = bench.node("Cast", [bench.node("DequantizeLinear", [scales, scale])], to=int(dtype))
    return bench.node("DequantizeLinear", [codes, steps], axis=-1, block_size=16)


def make(bench: Bench, operator: str, dtype: ir.DataType) -> ir.Value:
    """Add the node; what it reads is [B, S, D] of `dtype` unless the operator wants another shape."""
    name = dtype.name
    if operator == "Cast":
        x, y = bench.given(f"x.{name}", dtype, B, S, D), ir.DataType.FLOAT
        if dtype == y:
            x = bench.node("Cast", [x], to=int(ir.DataType.BOOL))
        return bench.node("Cast", [x], to=int(y))
    x, other = (bench.given(f"{letter}.{name}", dtype, B, S, D) for letter in "xy")
    numpy = {ir.DataType.BFLOAT16: ml_dtypes.bfloat16}.get(dtype) or dtype.numpy()
    one_axis, ids = bench.constant("axis_1", np.array([1])), bench.constant("ids", np.array([2, 0]))

    def of(label: str, *shape: int) -> ir.Value:
        return bench.given(f"{label}.{name}", dtype, *shape)

    def fixed(label: str, *shape: int) -> ir.Value:
        return bench.constant(f"{label}.{name}", np.full(shape, 0.5).astype(numpy))

    weight = ("RMSNormalization", "LayerNormalization")
    special: Mapping[str, Callable[[], ir.Value]] = {
        "MatMul": lambda: bench.node("MatMul", [x, fixed("w", D, D)]),
        "Attention": lambda: bench.node(
            "Attention",
            [
                of("q", B, 4, S, D),
                of("k", B, 2, C, D),
                of("v", B, 2, C, D),
                bench.given(f"mask.{name}", ir.DataType.BOOL, B, 1, S, C),
            ],
            scale=0.125,
        ),
        "TensorScatter": lambda: bench.node(
            "TensorScatter",
            [of("past", B, 2, C, D), of("new", B, 2, S, D), bench.given("at", ir.DataType.INT64, B)],
            axis=-2,
        ),
        "RotaryEmbedding": lambda: bench.node(
            "RotaryEmbedding",
            [x, fixed("cos", C, 8), fixed("sin", C, 8), bench.given("places", ir.DataType.INT64, B, S)],
            num_heads=4,
        ),
        "DequantizeLinear": lambda: bench.node(
            "MatMul",
            [
                x,
                bench.node(
                    "DequantizeLinear", [bench.constant("codes", np.ones((D, D), np.int8)), fixed("s", D)], axis=1
                ),
            ],
        ),
        "TRT_FP4DynamicQuantize": lambda: _through_fp4(bench, x, dtype),
        "QuantizeLinear": lambda: bench.node(
            "DequantizeLinear",
            [
                bench.node("QuantizeLinear", [x, fixed("scale"), bench.constant("zero", np.array(0, np.int8))]),
                fixed("scale"),
            ],
        ),
        "Clip": lambda: bench.node("Clip", [x, fixed("low"), fixed("high")]),
        "Where": lambda: bench.node("Where", [bench.given("truth", ir.DataType.BOOL, B, S, D), x, other]),
        "Concat": lambda: bench.node("Concat", [x, other], axis=-1),
        "Transpose": lambda: bench.node("Transpose", [x], perm=[0, 2, 1]),
        "Reshape": lambda: bench.node("Reshape", [x, bench.constant("flat", np.array([0, -1]))]),
        "Slice": lambda: bench.node("Slice", [x, bench.constant("0", np.array([0])), one_axis, one_axis]),
        "Expand": lambda: bench.node("Expand", [of("thin", B, 1, D), bench.constant("like", np.array([1, S, 1]))]),
        "Pad": lambda: bench.node("Pad", [x, bench.constant("pads", np.array([0, 0, 0, 0, 0, 3]))]),
        "Squeeze": lambda: bench.node("Squeeze", [of("thin", B, 1, D), one_axis]),
        "Unsqueeze": lambda: bench.node("Unsqueeze", [x, one_axis]),
        "Split": lambda: bench.node(
            "Split", [x, bench.constant("halves", np.array([D // 2, D // 2]))], outputs=2, axis=-1
        ),
        "Gather": lambda: bench.node("Gather", [x, ids], axis=1),
        "GatherElements": lambda: bench.node(
            "GatherElements", [x, bench.given("each", ir.DataType.INT64, B, S, 2)], axis=2
        ),
        "TopK": lambda: bench.node("TopK", [x, bench.constant("two", np.array([2]))], outputs=2, axis=-1),
        "DistCollective": lambda: bench.node(
            "DistCollective", [x], collective_operation="all_reduce", reduce_op="sum", root=-1, group_size=0, nb_rank=2
        ),
        "ArgMax": lambda: bench.node("ArgMax", [x], axis=-1),
    }
    if operator in special:
        return special[operator]()
    if operator in weight:
        return bench.node(operator, [x, fixed("scale_of_norm", D)], axis=-1, epsilon=1e-5)
    if operator.startswith("Reduce"):
        return bench.node(operator, [x, bench.constant("axis_2", np.array([2]))])
    binary = {"Add", "Sub", "Mul", "Div", "Min", "Max", "Pow", "And", "Or"}
    binary |= {"Equal", "Greater", "GreaterOrEqual", "Less", "LessOrEqual"}
    return bench.node(operator, [x, other] if operator in binary else [x])


def rows() -> list[tuple[str, ir.DataType]]:
    """List every operator with each dtype of its row."""
    return [
        (name, dtype) for name, seen in OPERATORS.items() for dtype in sorted(seen.dtypes, key=lambda each: each.name)
    ]
