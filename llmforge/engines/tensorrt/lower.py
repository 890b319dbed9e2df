"""From the canonical dialect to the ONNX that TensorRT's parser builds: opset 24, no operator of another domain.

`rewrite` knows no target, so that ONNX Runtime can run what it writes on a CPU and prove it equal. `lower` refuses by
name what has no way through, and holds what it writes against what was seen to build (`support`); what compute
capabilities lack stands in `refusals`. No weight is read for any of it.

The graph keeps the names of `llmforge.ir.interface`. Batch and sequence stay open, the capacity of caches is a number.
`logits_rows` has no default, since an engine's inputs have none, and may count from the end. `position_ids` is always
an input: masks are made of it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import onnx_ir as ir

from llmforge.base.errors import UnsupportedError
from llmforge.engines.tensorrt import collectives, experts, support
from llmforge.engines.tensorrt.attention import Attentions
from llmforge.engines.tensorrt.weights import Weights
from llmforge.engines.tensorrt.weights import refusal_reason as weights_refusal_reason
from llmforge.ir import dtype_inference, interface, operators
from llmforge.ir import graph as g
from llmforge.ir.builder import Builder
from llmforge.lowering.pass_base import Changes, Rewritten
from llmforge.recipe import EngineSpec
from llmforge.targets import Target

MICROSOFT, LLMFORGE = "com.microsoft", "llmforge"
CAPACITY = "capacity"  # the dimension of caches that becomes a number

_SKIP_NORMS = {"SkipSimplifiedLayerNormalization": "RMSNormalization", "SkipLayerNormalization": "LayerNormalization"}


@dataclass(frozen=True)
class Refusal:
    """One thing of a graph that TensorRT has no way for."""

    node: str  # name of a node, or of an input of the graph
    reason: str
    hint: str

    def __str__(self) -> str:
        return f"{self.node}: {self.reason}"


def lower(model: ir.Model, target: Target, spec: EngineSpec) -> tuple[ir.Model, Changes]:
    """Write `model` for an engine of `spec.max_context` slots; the model is left alone, its tensors are shared.

    Raises:
        UnsupportedError: the graph has what TensorRT does not take.
    """
    if found := refused(model):
        listed = "; ".join(map(str, found[:3])) + (f"; and {len(found) - 3} more" if len(found) > 3 else "")
        raise UnsupportedError(f"TensorRT for target {target.name} does not take {listed}", hint=found[0].hint)
    lowered, changes = rewrite(model, spec.max_context)
    support.check(lowered)
    return lowered, changes


def refused(model: ir.Model) -> list[Refusal]:
    """List what of `model` has no way to TensorRT, on any device; reads no weight, and changes nothing."""
    found = []
    if (reason := model.metadata_props.get(interface.FALLBACK)) is not None:
        hint = "choose `engine: {backend: onnxruntime}`"
        found.append(Refusal("the model", f"its own attention was traced, because: {reason}", hint))
    for value in model.graph.inputs:
        found += _of_input(value)
    for node in model.graph.all_nodes():
        if (rule := _RULES.get((node.domain, node.op_type))) is not None:
            found += [] if (refusal := rule(node)) is None else [refusal]
        elif operators.view(node).tensorrt is None:
            reason = f"the parser has no {node.op_type}" + (f" of {node.domain}" if node.domain else "")
            found.append(Refusal(str(node.name), reason, "leave the pass that writes it out of the recipe"))
    return found


def _of_input(value: ir.Value) -> list[Refusal]:
    name = str(value.name)
    if name in (interface.ATTENTION_MASK, interface.SEQLENS_K):
        hint = "leave flash-attention, genai-interface and optimum-interface out of the recipe"
        return [Refusal(name, "only canonical attention over past_lengths is lowered to TensorRT", hint)]
    return []


def _of_attention(node: ir.Node) -> Refusal | None:
    if node.inputs[0] is not None and node.inputs[0].dtype == ir.DataType.FLOAT:
        hint = "put `lower-precision` into the recipe"
        return Refusal(str(node.name), "IAttention has kernels for fp16 and bf16, and this one is fp32", hint)
    return None


def _of_weights(node: ir.Node) -> Refusal | None:
    reason = weights_refusal_reason(node)
    hint = "set `bits: 4`, `symmetric: true` and `embedding_bits: 4` or 16 in quantize-weights"
    return None if reason is None else Refusal(str(node.name), reason, hint)


def _of_experts(node: ir.Node) -> Refusal | None:
    reason = experts.refusal_reason(node)
    return None if reason is None else Refusal(str(node.name), reason, "choose `engine: {backend: onnxruntime}`")


def _of_collective(node: ir.Node) -> Refusal | None:
    reason = collectives.refusal_reason(node)
    return None if reason is None else Refusal(str(node.name), reason, "split the graph along its last axis")


def _refused(reason: str, hint: str) -> Callable[[ir.Node], Refusal]:
    return lambda node: Refusal(str(node.name), reason, hint)


_RECURRENT = _refused("layers with a recurrent state are not lowered", "choose `engine: {backend: onnxruntime}`")
_RULES: Mapping[tuple[str, str], Callable[[ir.Node], Refusal | None]] = {
    (LLMFORGE, "Attention"): _of_attention,
    (LLMFORGE, "MoE"): _of_experts,
    (LLMFORGE, "AllReduce"): _of_collective,
    (LLMFORGE, "AllGather"): _of_collective,
    (LLMFORGE, "CausalConv"): _RECURRENT,
    (LLMFORGE, "LinearAttention"): _RECURRENT,
    (MICROSOFT, "MatMulNBits"): _of_weights,
    (MICROSOFT, "GatherBlockQuantized"): _of_weights,
    (MICROSOFT, "SkipSimplifiedLayerNormalization"): lambda node: None,
    (MICROSOFT, "SkipLayerNormalization"): lambda node: None,
    (MICROSOFT, "GroupQueryAttention"): _refused(
        "the parser says it knows GroupQueryAttention, and the build then lacks a plugin",
        "leave flash-attention out of the recipe: canonical attention becomes IAttention, which is one kernel",
    ),
    (MICROSOFT, "QMoE"): _refused(
        "the parser has no quantized experts", "exclude the experts: `exclude: ['*.experts.*']` in quantize-weights"
    ),
    (MICROSOFT, "MoE"): _refused("the parser has no com.microsoft::MoE", "leave fuse-experts out of the recipe"),
}


def rewrite(model: ir.Model, capacity: int) -> tuple[ir.Model, Changes]:
    """Write a clone of `model`, of which nothing is refused, as standard ONNX whose caches have `capacity` slots."""
    lowered = model.clone()
    dtype_inference.complete(lowered)
    writing = _Rewriting(lowered, capacity)
    changes = Changes()
    for node in list(lowered.graph):
        if (what := writing.node(node)) is not None:
            changes.rewritten.append(Rewritten(str(node.name), what))
    writing.select_rows()
    _fix_capacity(lowered, capacity)
    g.drop_unused(lowered)
    dtype_inference.complete(lowered)
    return lowered, changes


@dataclass
class _Rewriting(Builder):
    """One rewriting of one graph."""

    capacity: int
    _attentions: Attentions = field(init=False)
    _weights: Weights = field(init=False)

    def __post_init__(self) -> None:
        self._attentions, self._weights = Attentions(self.model, self.capacity), Weights(self.model)

    def node(self, node: ir.Node) -> str | None:
        """Replace `node` where the parser does not take it; say what it became."""
        match node.domain, node.op_type:
            case "llmforge", "Attention":
                return self._attentions.rewrite(node)
            case "llmforge", "MoE":
                return experts.lower(self.model, node)
            case "llmforge", "AllReduce" | "AllGather":
                return collectives.lower(node)
            case "com.microsoft", "MatMulNBits":
                return self._weights.multiply(node)
            case "com.microsoft", "GatherBlockQuantized":
                return self._weights.gather(node)
            case "com.microsoft", operator if operator in _SKIP_NORMS:
                return self._skip_norm(node)
            case "", "ReduceMax" if node.outputs[0].dtype == ir.DataType.BOOL:
                return self._any(node)
        return None

    def _skip_norm(self, node: ir.Node) -> str:
        """Take a sum and its norm apart again: TensorRT fuses them by itself."""
        norm = _SKIP_NORMS[node.op_type]
        shifted = norm == "LayerNormalization"  # inputs: input, skip, gamma[, beta], bias
        residual, branch, weight, *others = (g.operand(node, index) for index in range(5 if shifted else 4))
        assert residual is not None
        assert branch is not None
        assert weight is not None
        shift, bias = others if shifted else (None, others[0])
        if bias is not None:
            branch = self._typed("Add", node, [branch, bias])
        total = self._typed("Add", node, [residual, branch])
        attributes = {"axis": -1, "epsilon": node.attributes.get_float("epsilon", 1e-5)}
        [y] = g.insert(node, norm, [total, weight, shift], attributes, name=node.name)
        g.supersede(node.outputs[0], y)
        if len(node.outputs) > 3:
            g.supersede(node.outputs[3], total)
        return f"{node.op_type} to Add and {norm}"

    def _any(self, node: ir.Node) -> str:
        """Say in numbers whether any of some truths holds: the parser's ReduceMax takes no bool."""
        truths = node.inputs[0]
        assert truths is not None
        counted = self._add(node, "Cast", [truths], {"to": int(ir.DataType.FLOAT)})
        attributes = {"keepdims": node.attributes.get_int("keepdims", 1)}
        [largest] = g.insert(node, "ReduceMax", [counted, *node.inputs[1:]], attributes, name=node.name)
        g.supersede(node.outputs[0], self._add(node, "Cast", [largest], {"to": int(ir.DataType.BOOL)}))
        return "ReduceMax of bool to one of numbers"

    def _typed(self, op_type: str, node: ir.Node, inputs: list[ir.Value]) -> ir.Value:
        value = self._add(node, op_type, inputs)
        value.type, value.shape = inputs[0].type, inputs[0].shape
        return value

    def select_rows(self) -> None:
        """Make `logits_rows` an input without a default, of which rows below 0 count from the end."""
        rows = next((value for value in self.model.graph.inputs if value.name == interface.LOGITS_ROWS), None)
        if rows is None:
            return
        self.model.graph.initializers.pop(interface.LOGITS_ROWS, None)
        rows.const_value = None
        readers = list(rows.uses())
        ids = next(value for value in self.model.graph.inputs if value.name == interface.INPUT_IDS)
        length = self._first("Shape", [ids], {"start": 1, "end": 2})
        below = self._first("Less", [rows, self._constant("row_0", [0])])
        chosen = self._first("Where", [below, self._first("Add", [rows, length]), rows])
        for reader, index in readers:
            reader.replace_input_with(index, chosen)


def _fix_capacity(model: ir.Model, capacity: int) -> None:
    """Write the capacity of caches as a number, which IKVCacheUpdateLayer wants."""
    for value in [*model.graph.inputs, *model.graph.outputs]:
        dims = g.dims(value)
        if dims is not None and CAPACITY in dims:
            value.shape = ir.Shape([capacity if dim == CAPACITY else dim for dim in dims])
