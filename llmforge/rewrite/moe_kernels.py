"""`llmforge::MoE` in the words of ONNX Runtime's kernels, com.microsoft::MoE (fp32) and QMoE (4 and 8 bits).

What the CPU kernels of onnxruntime 1.31.1 compute, found by running them beside `moe` of `tests/samples/references.py`:

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

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from llmforge.ir import graph, moved_weights
from llmforge.ir.derived import computed
from llmforge.ir.operators import contrib
from llmforge.ir.operators.canonical import MoE
from llmforge.ir.operators.record import Operator
from llmforge.ir.routing import never_negative
from llmforge.quantization.initializers import PackedInitializers

UNGATED = {"relu": "relu", "silu": "silu", "gelu_tanh": "gelu"}  # activation → activation_type
_TINY = np.float32(1e-30)  # its logarithm stands for that of 0: an infinite one makes NaN where all weights are 0


@dataclass(frozen=True, eq=False)
class FusableExperts:
    """One `llmforge::MoE` that a kernel computes; E experts, H features, I inner ones, top_k experts a token."""

    layer: MoE
    count: int
    hidden: int
    inner: int
    top_k: int

    @property
    def parameters(self) -> list[str]:
        """The parameters that its matrices come from, or themselves where they come from none."""
        return [
            name for value in (self.layer.up, self.layer.down) for name in graph.sources(value) or [str(value.name)]
        ]

    @property
    def order(self) -> NDArray[np.intp]:
        """The columns of `up` in the order in which the kernels want them: int [2·I or I]."""
        if not self.layer.gated or self.layer.interleaved:
            return np.arange(self.inner * (1 + self.layer.gated))
        return np.arange(2 * self.inner).reshape(2, self.inner).T.reshape(-1)


def reason(layer: MoE) -> str | None:
    """Say why the kernels cannot compute `layer`; None where they can."""
    activation, gated, alpha = layer.activation, layer.gated, layer.alpha
    if gated and activation != "silu":
        return f"its gate activation is {activation}; the kernel has only SiLU"
    if not gated and (activation not in UNGATED or (activation == "silu" and alpha != 1)):
        return f"its activation is {activation} (alpha {alpha:g}); the kernel has {', '.join(UNGATED)} with alpha 1"
    for value in (layer.up, layer.down):
        if not value.is_initializer() or value.is_graph_output() or len(value.uses()) > 1:
            return f"{value.name} is not an initializer of this node only"
        if value.dtype != ir.DataType.FLOAT:
            return f"{value.name} is {value.dtype}, not fp32"
    if layer.chosen is None:
        return "the number of experts per token is unknown"
    if not never_negative(layer.expert_weights):
        return "router weights may be negative; the kernel drops such experts"
    return None


@contextlib.contextmanager
def gathered(model: ir.Model, layer: MoE) -> Iterator[None]:
    """Let `layer` read matrices that its graph puts together of weights as one tensor each, which is made when written.

    If the `with` block raises, the layer reads what it did.
    """
    was, made = {}, []
    for part in ("up", "down"):
        value: ir.Value = getattr(layer, part)
        if (found := moved_weights.held(value)) is None:
            continue
        tensor, sources = found
        was[part] = value
        made.append(graph.initializer(model, str(tensor.name), tensor, sources))
        setattr(layer, part, made[-1])
    try:
        yield
    except BaseException:
        for part, value in was.items():
            setattr(layer, part, value)
        for value in made:
            del model.graph.initializers[str(value.name)]
        raise


def of(layer: MoE) -> FusableExperts:
    """Read the sizes of a layer for which `reason` finds none."""
    count, inner, hidden = graph.static(layer.down)
    return FusableExperts(layer, count, hidden, inner, graph.width(layer.expert_ids))


def fuse(model: ir.Model, experts: FusableExperts) -> None:
    """Put com.microsoft::MoE in the place of the node; matrices are laid out when they are written.

    What nothing reads any more stays: see `graph.drop_unused`.
    """
    layer, writer = experts.layer, _KernelWriter(model, experts)
    weights, last = writer.routing(), writer.constant("last", [-1])
    total = writer.add("ReduceSum", [layer.expert_weights, last], {"keepdims": 1}, name="total")
    logs = writer.add("Log", [writer.add("Max", [weights, writer.constant("tiny", _TINY)])])
    inputs = {
        "router_probs": logs,
        "fc1_experts_weights": writer.rows(layer.up, experts.order),
        "fc2_experts_weights": writer.rows(layer.down, None),
    }
    y = writer.kernel(contrib.ContribMoE, inputs, {})
    alive = writer.add("Where", [writer.constant("always", np.bool_(True)), y, layer.x], name="keep")
    writer.finish(writer.add("Mul", [alive, total]))


def fuse_quantized(
    model: ir.Model, experts: FusableExperts, up: PackedInitializers, down: PackedInitializers, accuracy_level: int
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
    }
    inputs = {
        "router_probs": weights,
        "fc1_experts_weights": up.codes,
        "fc1_scales": writer.scales(up.scales),
        "fc1_zero_points": up.zero_points,
        "fc2_experts_weights": down.codes,
        "fc2_scales": writer.scales(down.scales),
        "fc2_zero_points": down.zero_points,
        "router_weights": weights,
    }
    writer.finish(writer.kernel(contrib.QMoE, inputs, attributes))


@dataclass(frozen=True, eq=False)
class _KernelWriter:
    """Writes nodes in front of one `llmforge::MoE`, then takes its place."""

    model: ir.Model
    experts: FusableExperts

    def routing(self) -> ir.Value:
        """Spread the weights of the chosen experts over all: [tokens, E], 0 where an expert is not chosen."""
        count, last = self.experts.count, self.constant("last", [-1])
        all_experts = self.constant(f"of_{count}", list(range(count)))
        ids = self.add("Unsqueeze", [self.experts.layer.expert_ids, last], name="ids")
        weights = self.add("Unsqueeze", [self.experts.layer.expert_weights, last], name="weights")
        chosen = self.add("Equal", [ids, all_experts])
        placed = self.add("Where", [chosen, weights, self.constant("zero", np.float32(0))])  # [..., top_k, E]
        spread = self.add("ReduceSum", [placed, self.constant("top_k", [-2])], {"keepdims": 0})
        return self.add("Reshape", [spread, self.constant(f"tokens_of_{count}", [-1, count])])

    def _attributes(self) -> dict[str, graph.Attribute]:
        """Say the activation, the gates and top_k."""
        layer = self.experts.layer
        if not layer.gated:
            return {"k": self.experts.top_k, "activation_type": UNGATED[layer.activation]}
        gates = {"swiglu_fusion": 1, "activation_alpha": layer.alpha, "activation_beta": layer.beta}
        limit = {"swiglu_limit": layer.limit} if layer.limit else {}
        return {"k": self.experts.top_k, "activation_type": "swiglu", **gates, **limit}

    def rows(self, value: ir.Value, order: NDArray[np.intp] | None) -> ir.Value:
        """Register the transposes of matrices [E, K, N], their rows in `order`: fp32 [E, N, K], lazy."""
        count, k, n = graph.static(value)
        own = slice(None) if order is None else order

        def turned(held: NDArray[np.float32]) -> NDArray[np.float32]:
            result = np.empty((count, n, k), np.float32)
            for expert, matrix in enumerate(held):
                result[expert] = matrix.T[own]
            return result

        return self._register(value, turned, (count, n, k))

    def _up_bias(self) -> ir.Value | None:
        """Register the biases of `up` in the order of the kernels, [E, 2·I or I]; None where there are none."""
        value, order = self.experts.layer.up_bias, self.experts.order
        if value is None or (order == np.arange(len(order))).all():
            return value
        return self._register(value, lambda held: np.ascontiguousarray(held[:, order]), graph.static(value))

    def _register(
        self, value: ir.Value, change: Callable[[NDArray[np.float32]], NDArray[np.float32]], shape: Sequence[int]
    ) -> ir.Value:
        """Register what `change` makes of an initializer when it is written."""
        tensor, name = graph.tensor(value), f"{value.name}.rows"
        lazy = computed(lambda: change(tensor.numpy()), tensor.dtype, shape, name)
        return graph.initializer(self.model, name, lazy, graph.sources(value))

    def scales(self, value: ir.Value) -> ir.Value:
        """Let the kernel, which takes no bf16, read such scales in fp32; ONNX Runtime casts them when it loads."""
        if value.dtype != ir.DataType.BFLOAT16:
            return value
        made = self.add("Cast", [value], {"to": ir.DataType.FLOAT}, name=f"{value.name}.fp32")
        made.type, made.shape = ir.TensorType(ir.DataType.FLOAT), value.shape
        return made

    def constant(self, name: str, value: list[int] | np.generic) -> ir.Value:
        array = np.array(value, np.int64) if isinstance(value, list) else np.asarray(value)
        return graph.initializer(self.model, f"moe.{name}", array)

    def add(
        self,
        op_type: str,
        inputs: Sequence[ir.Value],
        attributes: Mapping[str, graph.Attribute] | None = None,
        *,
        name: str | None = None,
    ) -> ir.Value:
        """Add a node of ONNX, named by the layer it stands for and `name`, or its operator."""
        name = f"{self.experts.layer.name}/{name or op_type}"
        [value] = graph.insert(self.experts.layer.node, op_type, inputs, attributes, name=name)
        value.name = name
        return value

    def kernel(
        self, operator: type[Operator], inputs: Mapping[str, ir.Value | None], attributes: Mapping[str, graph.Attribute]
    ) -> ir.Value:
        """Add the node of the kernel, with what both kernels read besides `inputs`."""
        layer, name = self.experts.layer, f"{self.experts.layer.name}/{operator.op_type}"
        shared = {"input": layer.x, "fc1_experts_bias": self._up_bias(), "fc2_experts_bias": layer.down_bias}
        attributes = {**attributes, **self._attributes()}
        output = operator.insert(layer.node, {**shared, **inputs}, attributes, name=name).output
        output.name = name
        return output

    def finish(self, y: ir.Value) -> None:
        """Let `y` stand for the node's result."""
        graph.replace_value(self.experts.layer.output, y)
        self.model.graph.remove(self.experts.layer.node, safe=True)
