"""`llmforge::MoE` as standard ONNX."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from llmforge.ir import graph
from llmforge.ir.builder import PREFIX, GraphBuilder
from llmforge.ir.operators import canonical


@dataclass
class MoEExpansion(GraphBuilder):
    """One `llmforge::MoE` as a Loop over the experts that a step chooses.

    An iteration takes one expert's matrices and the tokens that chose it, and adds what it makes of them: memory is
    that of one expert, and a decode step reads no more than top_k experts a row. Comments give shapes: T tokens, of
    which one expert gets n.
    """

    experts: canonical.MoE
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
        experts, name = self.experts, f"{self.experts.name}/expert"
        index = ir.Value(name=f"{name}.index", shape=ir.Shape([]), type=ir.TensorType(ir.DataType.INT64))
        going = ir.Value(name=f"{name}.condition", shape=ir.Shape([]), type=ir.TensorType(ir.DataType.BOOL))
        before = ir.Value(name=f"{name}.sum", shape=ir.Shape([None, None]), type=ir.TensorType(self._dtype))
        column = self._constant("axis_1", [1])

        expert = self._inner("Gather", [chosen, index])
        places = self._inner("NonZero", [self._inner("Equal", [ids, expert])])  # [2, n]: tokens, places in their top_k
        tokens = self._inner("Gather", [places, self._constant("zero", 0)])
        h = self._product(self._inner("Gather", [x, tokens]), expert, experts.up, experts.up_bias)  # [n, 2·I or I]
        h = self._product(self._between(h), expert, experts.down, experts.down_bias)  # [n, H]
        weight = self._inner("GatherND", [weights, self._inner("Transpose", [places], {"perm": [1, 0]})])
        h = self._inner("Mul", [h, self._inner("Unsqueeze", [weight, column])])
        rows = self._inner("Unsqueeze", [tokens, column])
        after = self._inner("ScatterND", [before, rows, h], {"reduction": "add"})
        again = self._inner("Identity", [going])
        for output, kind in ((again, ir.DataType.BOOL), (after, self._dtype)):
            output.type = ir.TensorType(kind)
        again.shape, after.shape = ir.Shape([]), ir.Shape([None, None])
        return ir.Graph([index, going, before], [again, after], nodes=self.body, name=name)

    def _product(self, x: ir.Value, expert: ir.Value, matrices: ir.Value, biases: ir.Value | None) -> ir.Value:
        """Multiply by one expert's matrix, and add its bias, where there is one."""
        y = self._inner("MatMul", [x, self._inner("Gather", [matrices, expert])])
        return y if biases is None else self._inner("Add", [y, self._inner("Gather", [biases, expert])])

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
