"""Write experts as standard ONNX: a Loop over those that a step chooses, in the dtype of their matrices or in codes.

Codes of `llmforge::LowPrecisionMoE` are widened for one expert at a time, and what its products read is rounded as
servers of others do: by the largest magnitude of each token, or of groups of its features, or in blocks of NVFP4.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from llmforge.ir import graph
from llmforge.ir.builder import PREFIX, GraphBuilder
from llmforge.ir.derived import Derived, Function
from llmforge.ir.fp4 import BlockRounding
from llmforge.ir.operators import canonical

Part = Literal["up", "down"]  # of two products
LARGEST: Mapping[ir.DataType, float] = {ir.DataType.INT8: 127.0, ir.DataType.FLOAT8E4M3FN: 448.0}
LEAST = np.float32(2.0**-24)  # scale of a token: the smallest number of fp16, so that a token of zeros has a scale


@dataclass
class MoEExpansion(GraphBuilder):
    """One `llmforge::MoE` as a Loop over the experts that a step chooses.

    An iteration takes one expert's matrices and the tokens that chose it, and adds what it makes of them: memory is
    that of one expert, and a decode step reads no more than top_k experts a row. Comments give shapes: T tokens, of
    which one expert gets n.
    """

    experts: canonical.MoE | canonical.LowPrecisionMoE
    body: list[ir.Node] = field(default_factory=list)

    def result(self) -> ir.Value:
        """Write the nodes in front of the operator, and around them the loop."""
        experts = self.experts
        shape = self._outer("Shape", [experts.x])
        x, ids = self._flat(experts.x), self._flat(experts.expert_ids)  # [T, H], [T, top_k]
        weights = self._flat(experts.expert_weights)  # [T, top_k]
        chosen = self._outer("Unique", [self._outer("Reshape", [ids, self._constant("all", [-1])])], {"sorted": 1})
        count = self._outer("Squeeze", [self._outer("Shape", [chosen])])
        start = self._outer("Expand", [self._number(0.0), self._outer("Shape", [x])])
        going = self._constant("true", np.bool_(True))
        body = self._iteration(x, ids, weights, chosen)
        loop = ir.Node("", "Loop", [count, going, start], [ir.AttrGraph("body", body)], name=f"{experts.name}/Loop")
        graph.owner(experts.node).insert_before(experts.node, loop)
        return self._outer("Reshape", [loop.outputs[0], shape])

    def _iteration(self, x: ir.Value, ids: ir.Value, weights: ir.Value, chosen: ir.Value) -> ir.Graph:
        """Build the loop's body: (index, condition, sum [T, H]) → (condition, sum [T, H])."""
        name = f"{self.experts.name}/expert"
        index = ir.Value(name=f"{name}.index", shape=ir.Shape([]), type=ir.TensorType(ir.DataType.INT64))
        going = ir.Value(name=f"{name}.condition", shape=ir.Shape([]), type=ir.TensorType(ir.DataType.BOOL))
        before = ir.Value(name=f"{name}.sum", shape=ir.Shape([None, None]), type=ir.TensorType(self._dtype))
        column = self._constant("axis_1", [1])

        expert = self._inner("Gather", [chosen, index])
        places = self._inner("NonZero", [self._inner("Equal", [ids, expert])])  # [2, n]: tokens, places in their top_k
        tokens = self._inner("Gather", [places, self._constant("zero", 0)])
        h = self._product(self._inner("Gather", [x, tokens]), expert, "up")  # [n, 2·I or I]
        h = self._product(self._between(h), expert, "down")  # [n, H]
        weight = self._inner("GatherND", [weights, self._inner("Transpose", [places], {"perm": [1, 0]})])
        h = self._inner("Mul", [h, self._inner("Unsqueeze", [weight, column])])
        rows = self._inner("Unsqueeze", [tokens, column])
        after = self._inner("ScatterND", [before, rows, h], {"reduction": "add"})
        again = self._inner("Identity", [going])
        for output, kind in ((again, ir.DataType.BOOL), (after, self._dtype)):
            output.type = ir.TensorType(kind)
        again.shape, after.shape = ir.Shape([]), ir.Shape([None, None])
        return ir.Graph([index, going, before], [again, after], nodes=self.body, name=name)

    def _product(self, x: ir.Value, expert: ir.Value, part: Part) -> ir.Value:
        """Multiply by one expert's matrix, and add its bias, where there is one."""
        biases = getattr(self.experts, f"{part}_bias")
        y = self._inner("MatMul", [self._read(x, part), self._matrix(expert, part)])
        return y if biases is None else self._inner("Add", [y, self._inner("Gather", [biases, expert])])

    def _matrix(self, expert: ir.Value, part: Part) -> ir.Value:
        """Take one expert's matrix [K, N]."""
        return self._inner("Gather", [getattr(self.experts, part), expert])

    def _read(self, x: ir.Value, part: Part) -> ir.Value:
        """Give what a product reads of tokens [n, K]."""
        return x

    def _between(self, h: ir.Value) -> ir.Value:
        """Gate or activate: [..., 2·I or I] → [..., I]."""
        experts = self.experts
        if not experts.gated:
            return self._activate(h)
        gate, linear = self._halves(h)
        if limit := experts.limit:
            high, low = self._number(limit), self._number(-limit)
            gate, linear = self._inner("Min", [gate, high]), self._inner("Clip", [linear, low, high])
        if beta := experts.beta:
            linear = self._inner("Add", [linear, self._number(beta)])
        return self._inner("Mul", [self._activate(gate), linear])

    def _halves(self, h: ir.Value) -> tuple[ir.Value, ir.Value]:
        """Take gate and up apart: even and odd columns, or the first half and the second."""
        width, interleaved = graph.width(self.experts.up), self.experts.interleaved
        first, second, step = (0, 1, 2) if interleaved else (0, width // 2, 1)

        def columns(start: int, end: int) -> ir.Value:
            places = [self._constant(f"at_{place}", [place]) for place in (start, end, -1, step)]
            return self._inner("Slice", [h, *places])

        return columns(first, width if interleaved else second), columns(second, width)

    def _activate(self, x: ir.Value) -> ir.Value:
        match self.experts.activation:
            case "silu":
                alpha = self.experts.alpha
                scaled = x if alpha == 1 else self._inner("Mul", [x, self._number(alpha)])
                return self._inner("Mul", [x, self._inner("Sigmoid", [scaled])])
            case "gelu":
                return self._inner("Gelu", [x])
            case "gelu_tanh":
                return self._inner("Gelu", [x], {"approximate": "tanh"})
            case "relu":
                return self._inner("Relu", [x])
            case "relu2":
                positive = self._inner("Relu", [x])
                return self._inner("Mul", [positive, positive])
        known = ", ".join(canonical.MOE_ACTIVATIONS)
        raise ValueError(f"activation {self.experts.activation!r} is unknown; known are {known}")

    def _flat(self, x: ir.Value) -> ir.Value:
        """Lay tokens in one axis: [..., n] → [T, n]."""
        width = graph.width(x)
        return self._outer("Reshape", [x, self._constant(f"flat_{width}", [-1, width])])

    @property
    def _dtype(self) -> ir.DataType:
        """What the experts compute in: the dtype of their matrices."""
        return graph.dtype(self.experts.up)

    def _number(self, value: float) -> ir.Value:
        suffix = "" if self._dtype == ir.DataType.FLOAT else f"_{self._dtype.name.lower()}"
        return self._constant(f"number_{value}{suffix}", self._dtype.numpy().type(value))

    def _constant(self, name: str, value: int | list[int] | np.generic | NDArray[np.generic]) -> ir.Value:
        array = np.array(value, np.int64) if isinstance(value, int | list) else np.asarray(value)
        return graph.initializer(self.model, f"{PREFIX}.moe_{name}", array)

    def _outer(
        self, op_type: str, inputs: list[ir.Value], attributes: Mapping[str, graph.Attribute] | None = None
    ) -> ir.Value:
        return self._add(self.experts.node, op_type, inputs, attributes)

    def _inner(
        self, op_type: str, inputs: list[ir.Value], attributes: Mapping[str, graph.Attribute] | None = None
    ) -> ir.Value:
        """Add a node to the loop's body; its names are its own in the whole graph."""
        name = f"{self.experts.name}/expert/{op_type}_{len(self.body)}"
        node = ir.Node("", op_type, inputs, ir.convenience.convert_attributes(dict(attributes or {})), name=name)
        node.outputs[0].name = name
        self.body.append(node)
        return node.outputs[0]


def _as_fp16(parts: Sequence[NDArray[Any]]) -> NDArray[np.float16]:
    """Write codes of fp8 or fp4 as fp16."""
    wide: NDArray[np.float16] = parts[0].astype(np.float32).astype(np.float16)
    return wide


def _steps(parts: Sequence[NDArray[Any]]) -> NDArray[np.float32]:
    """Multiply scales of blocks [E, K / 16, N] and those of experts [E]."""
    blocks, scales = parts
    steps: NDArray[np.float32] = blocks.astype(np.float32) * scales.astype(np.float32)[:, None, None]
    return steps


@dataclass
class LowPrecisionMoEExpansion(MoEExpansion):
    """One `llmforge::LowPrecisionMoE` as such a Loop."""

    experts: canonical.LowPrecisionMoE

    @property
    def _dtype(self) -> ir.DataType:
        return ir.DataType.FLOAT

    def _matrix(self, expert: ir.Value, part: Part) -> ir.Value:
        """Widen codes by Cast and Mul: ONNX Runtime would make products of integers of two DequantizeLinear."""
        layer, codes, scales = self.experts, getattr(self.experts, part), getattr(self.experts, f"{part}_scales")
        if graph.dtype(codes) != ir.DataType.INT8:  # ONNX's Gather takes no fp8, and fp16 holds fp8 and fp4
            codes = self._derived(_as_fp16, [codes], ir.DataType.FLOAT16)
        if layer.is_fp4:
            scales = self._derived(_steps, [scales, getattr(layer, f"{part}_scale")], ir.DataType.FLOAT)
        _, rows, columns = graph.static(getattr(layer, part))
        weight = self._widened(self._inner("Gather", [codes, expert]))
        steps_of = self._inner("Gather", [scales, expert])
        if not layer.group:
            return self._inner("Mul", [weight, steps_of])
        size, column = layer.group, self._constant("axis_1", [1])
        grouped = self._inner("Reshape", [weight, self._constant(f"groups_{size}_{columns}", [-1, size, columns])])
        weight = self._inner("Mul", [grouped, self._inner("Unsqueeze", [steps_of, column])])
        return self._inner("Reshape", [weight, self._constant(f"matrix_{rows}_{columns}", [rows, columns])])

    def _read(self, x: ir.Value, part: Part) -> ir.Value:
        layer = self.experts
        if layer.is_fp4:
            return _RoundingInBody(self).rounded(layer.node, x, getattr(layer, f"{part}_input_scale"), axes=2)
        dtype, size = graph.dtype(layer.up), layer.group
        if size:
            x = self._inner("Reshape", [x, self._constant(f"grouped_{size}", [0, -1, size])])
        last = self._constant("last", [-1])
        peak = self._inner("ReduceMax", [self._inner("Abs", [x]), last], {"keepdims": 1})
        scale = self._inner("Div", [peak, self._number(LARGEST[dtype])])
        scale = self._inner("Max", [scale, self._constant("least", LEAST)])
        zero = self._constant(f"zero_{dtype.name.lower()}", np.zeros((), dtype.numpy()))
        steps = self._inner("Div", [x, scale])
        values = self._widened(self._inner("QuantizeLinear", [steps, self._number(1.0), zero]))
        values = self._inner("Mul", [values, scale])
        return self._inner("Reshape", [values, self._constant("joined", [0, -1])]) if size else values

    def _derived(self, function: Function, values: Sequence[ir.Value], dtype: ir.DataType) -> ir.Value:
        """Make an initializer of the shape of the first of `values`, of all of them."""
        tensors = [graph.tensor(value) for value in values]
        name = f"{values[0].name}.{dtype.name.lower()}"
        made = Derived(function, tensors, dtype, ir.Shape(tensors[0].shape.numpy()), name)
        return graph.initializer(self.model, name, made)

    def _widened(self, codes: ir.Value) -> ir.Value:
        return self._inner("Cast", [codes], {"to": int(ir.DataType.FLOAT)})


class _RoundingInBody(BlockRounding):
    """Rounds to NVFP4 in the body of a loop."""

    def __init__(self, owner: LowPrecisionMoEExpansion) -> None:
        super().__init__(owner.model)
        self._owner = owner

    def _add(
        self,
        node: ir.Node,
        op_type: str,
        inputs: list[ir.Value],
        attributes: Mapping[str, graph.Attribute] | None = None,
    ) -> ir.Value:
        return self._owner._inner(op_type, inputs, attributes)
