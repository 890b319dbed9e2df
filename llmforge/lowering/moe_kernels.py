"""`llmforge::MoE` in the words of ONNX Runtime's kernels, com.microsoft::MoE (fp32) and QMoE (4 and 8 bits).

What the CPU kernels of onnxruntime 1.31.1 compute, found by running them beside `moe` of `tests/references.py`:

- Gates: `swiglu` alone, even columns the gate and odd ones the rest (`swiglu_fusion` 1), with alpha, beta and limit as
  `llmforge::MoE` means them. A third matrix for the gate (fc3) is refused when it runs. Without gates: `relu`, `silu`
  and `gelu`, which is the approximation by tanh.
- Matrices are [E, N, K], the transposes of `up` and `down`. QMoE's codes, scales and zero points are those of
  MatMulNBits, expert after expert. One block size divides H and I; zero points of a row with a single block lie
  otherwise than MatMulNBits has them, so a row gets two blocks at least.
- Routing: the k largest of `router_probs` [tokens, E] are chosen. MoE weighs them by their softmax, over all experts or
  over those k (`normalize_routing_weights`). QMoE does, too, unless it has `router_weights` [tokens, E], which it takes
  as they are. A weight that is not above 0 (MoE) or 1e-8 (QMoE) is left out, a negative one therefore, too.
- MoE may be given the memory of `x` for its result, where nothing reads `x` later, and clears it before it reads it:
  silently wrong. A `Where` that reads `x` behind it, and never takes it, keeps the two apart. QMoE asks for memory of
  its own.

So a weight of any router can be said: `w` [tokens, E] holds a token's weights at its experts and 0 elsewhere. It is
QMoE's `router_probs` and `router_weights` both. MoE gets log(w), whose softmax is w / Σw, and its result times Σw.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from llmforge.ir import graph as g
from llmforge.ir.routing import never_negative
from llmforge.quantization.initializers import PackedInitializers

DOMAIN = "com.microsoft"
UNGATED = {"relu": "relu", "silu": "silu", "gelu_tanh": "gelu"}  # activation → activation_type
_PREFIX = "moe"  # of the names of constants made here
_TINY = np.float32(
    1e-30
)  # whose logarithm stands for that of 0: an infinite one would make NaN where all weights are 0


@dataclass(frozen=True, eq=False)
class Experts:
    """One `llmforge::MoE` that a kernel computes; E experts, H features, I inner ones, top_k experts a token."""

    node: ir.Node
    count: int
    hidden: int
    inner: int
    top_k: int

    @property
    def up(self) -> ir.Value:
        """[E, H, 2·I or I]."""
        return _input(self.node, 3)

    @property
    def down(self) -> ir.Value:
        """[E, I, H]."""
        return _input(self.node, 4)

    @property
    def gated(self) -> bool:
        """Whether `up` makes gates."""
        return bool(self.node.attributes.get_int("gated"))

    @property
    def order(self) -> NDArray[np.intp]:
        """The columns of `up` in the order in which the kernels want them: int [2·I or I]."""
        if not self.gated or self.node.attributes.get_int("interleaved"):
            return np.arange(self.inner * (1 + self.gated))
        return np.arange(2 * self.inner).reshape(2, self.inner).T.reshape(-1)


def reason(node: ir.Node) -> str | None:
    """Say why the kernels cannot compute the `llmforge::MoE` `node`; None where they can."""
    activation, gated = node.attributes.get_string("activation"), node.attributes.get_int("gated")
    alpha = node.attributes.get_float("alpha")
    if gated and activation != "silu":
        return f"its gates are {activation}, and the kernel's are SiLU"
    if not gated and (activation not in UNGATED or (activation == "silu" and alpha != 1)):
        return f"its activation is {activation}, alpha {alpha:g}; the kernel has {', '.join(UNGATED)} with alpha 1"
    for index in (3, 4):
        value = _input(node, index)
        if not value.is_initializer() or value.is_graph_output() or len(value.uses()) > 1:
            return f"{value.name} is no initializer that it alone reads"
        if value.dtype != ir.DataType.FLOAT:
            return f"{value.name} is {value.dtype}, not fp32"
    dims = g.dims(_input(node, 1))
    if not dims or not isinstance(dims[-1], int):
        return "how many experts a token has is not known"
    if not never_negative(_input(node, 2)):
        return "a weight of its router may be negative, and the kernel leaves such experts out"
    return None


def of(node: ir.Node) -> Experts:
    """Read the sizes of a node for which `reason` finds none."""
    count, inner, hidden = (int(str(dim)) for dim in g.dims(_input(node, 4)) or ())
    return Experts(node, count, hidden, inner, int(str((g.dims(_input(node, 1)) or ())[-1])))


def fuse(model: ir.Model, experts: Experts) -> None:
    """Put com.microsoft::MoE in the place of the node; matrices are laid out when they are written.

    What nothing reads any more stays: see `graph.drop_unused`.
    """
    x, writer = _input(experts.node, 0), _KernelWriter(model, experts)
    weights, last = writer.routing(), writer.constant("last", [-1])
    total = writer.add("ReduceSum", [_input(experts.node, 2), last], {"keepdims": 1}, name="total")
    logs = writer.add("Log", [writer.add("Max", [weights, writer.constant("tiny", _TINY)])])
    first, second = writer.rows(experts.up, experts.order), writer.rows(experts.down, None)
    inputs = [x, logs, first, writer.up_bias(), second, writer.down_bias()]
    y = writer.add("MoE", inputs, writer.attributes(), domain=DOMAIN)
    kept = writer.add("Where", [writer.constant("always", np.bool_(True)), y, x], name="keep")
    writer.finish(writer.add("Mul", [kept, total]))


def fuse_quantized(
    model: ir.Model, experts: Experts, up: PackedInitializers, down: PackedInitializers, accuracy_level: int
) -> None:
    """Put com.microsoft::QMoE in the place of the node; the rows of `up` stand in `experts.order`.

    `up` and `down` have codes [E, N, K·bits/8], scales [E, N, blocks], zero points [E, N, ceil(blocks·bits/8)] or none.
    """
    writer = _KernelWriter(model, experts)
    weights = writer.routing()
    attributes = {
        "expert_weight_bits": up.grid.bits,
        "block_size": up.grid.block_size,
        "accuracy_level": accuracy_level,
        **writer.attributes(),
    }
    first = [up.codes, up.scales, writer.up_bias()]
    second = [down.codes, down.scales, writer.down_bias()]
    third = [None, None, None]
    inputs = [
        _input(experts.node, 0),
        weights,
        *first,
        *second,
        *third,
        up.zero_points,
        down.zero_points,
        None,
        weights,
    ]
    writer.finish(writer.add("QMoE", inputs, attributes, domain=DOMAIN))


@dataclass(frozen=True, eq=False)
class _KernelWriter:
    """Writes nodes in front of one `llmforge::MoE`, then takes its place."""

    model: ir.Model
    experts: Experts

    def routing(self) -> ir.Value:
        """Spread the weights of the chosen experts over all: [tokens, E], 0 where an expert is not chosen."""
        count, last = self.experts.count, self.constant("last", [-1])
        all_experts = self.constant(f"of_{count}", list(range(count)))
        ids = self.add("Unsqueeze", [_input(self.experts.node, 1), last], name="ids")
        weights = self.add("Unsqueeze", [_input(self.experts.node, 2), last], name="weights")
        chosen = self.add("Equal", [ids, all_experts])
        placed = self.add("Where", [chosen, weights, self.constant("zero", np.float32(0))])  # [..., top_k, E]
        spread = self.add("ReduceSum", [placed, self.constant("top_k", [-2])], {"keepdims": 0})
        return self.add("Reshape", [spread, self.constant(f"tokens_of_{count}", [-1, count])])

    def attributes(self) -> dict[str, g.Attribute]:
        """Say the activation, the gates and top_k."""
        given = {name: attribute.value for name, attribute in self.experts.node.attributes.items()}
        if not self.experts.gated:
            return {"k": self.experts.top_k, "activation_type": UNGATED[given["activation"]]}
        gates = {"swiglu_fusion": 1, "activation_alpha": given["alpha"], "activation_beta": given["beta"]}
        limit = {"swiglu_limit": given["limit"]} if given["limit"] else {}
        return {"k": self.experts.top_k, "activation_type": "swiglu", **gates, **limit}

    def rows(self, value: ir.Value, order: NDArray[np.intp] | None) -> ir.Value:
        """Register the transposes of matrices [E, K, N], their rows in `order`: fp32 [E, N, K], lazy."""
        tensor, name = value.const_value, f"{value.name}.rows"
        assert tensor is not None
        count, k, n = (int(dim) for dim in tensor.shape.numpy())
        own = slice(None) if order is None else order

        def read() -> ir.TensorProtocol:
            held, result = tensor.numpy(), np.empty((count, n, k), np.float32)
            for expert, matrix in enumerate(held):
                result[expert] = matrix.T[own]
            return ir.Tensor(result, name=name)

        return self._register(value, name, ir.LazyTensor(read, tensor.dtype, ir.Shape([count, n, k]), name=name))

    def up_bias(self) -> ir.Value | None:
        """Register the biases of `up` in the order of the kernels, [E, 2·I or I]; None where there are none."""
        value, order = self._bias(5), self.experts.order
        if value is None or (order == np.arange(len(order))).all():
            return value
        tensor, name = value.const_value, f"{value.name}.rows"
        assert tensor is not None

        def read() -> ir.TensorProtocol:
            return ir.Tensor(np.ascontiguousarray(tensor.numpy()[:, order]), name=name)

        return self._register(value, name, ir.LazyTensor(read, tensor.dtype, ir.Shape(tensor.shape.numpy()), name=name))

    def down_bias(self) -> ir.Value | None:
        """Return the biases of `down`, [E, H]; None where there are none."""
        return self._bias(6)

    def _bias(self, index: int) -> ir.Value | None:
        inputs = self.experts.node.inputs
        return inputs[index] if len(inputs) > index else None

    def _register(self, value: ir.Value, name: str, tensor: ir.LazyTensor) -> ir.Value:
        registered = g.initializer(self.model, name, tensor)
        if sources := g.sources(value):
            g.set_sources(registered, sources)
        return registered

    def constant(self, name: str, value: list[int] | np.generic) -> ir.Value:
        array = np.array(value, np.int64) if isinstance(value, list) else np.asarray(value)
        own = f"{_PREFIX}.{name}"
        return g.initializer(self.model, own, ir.Tensor(array, name=own))  # a tensor keeps scalars without axes

    def add(
        self,
        op_type: str,
        inputs: Sequence[ir.Value | None],
        attributes: Mapping[str, g.Attribute] | None = None,
        *,
        domain: str = "",
        name: str | None = None,
    ) -> ir.Value:
        """Add a node, named by the node it stands for and `name`, or its operator."""
        name = f"{self.experts.node.name}/{name or op_type}"
        [value] = g.insert(self.experts.node, op_type, inputs, attributes, domain=domain, name=name)
        value.name = name
        return value

    def finish(self, y: ir.Value) -> None:
        """Let `y` stand for the node's result."""
        g.replace_value(self.experts.node.outputs[0], y)
        self.model.graph.remove(self.experts.node, safe=True)
        self.model.opset_imports[DOMAIN] = 1


def _input(node: ir.Node, index: int) -> ir.Value:
    value = node.inputs[index]
    assert value is not None, f"{node.name}: input {index} of MoE is absent"
    return value
