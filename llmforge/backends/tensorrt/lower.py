"""From the canonical dialect to the ONNX that TensorRT's parser builds: opset 24, no operator of another domain.

`rewrite` knows no target, so that ONNX Runtime can run what it writes on a CPU and prove it equal. `lower` refuses by
name what has no way through (`unsupported` lists it), and holds what it writes against what was seen to build
(`support`); what compute capabilities lack stands in `refusals`. No weight is read for any of it.

The graph keeps the names of `llmforge.ir.interface`. Batch and sequence stay open, the capacity of caches is a number.
`logits_rows` is [batch, rows] (`llmforge.ir.logits_rows.choose_by_row`), without a default, since an engine's inputs
have none. `position_ids` is always an input: masks are made of it.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import onnx_ir as ir

from llmforge.backends.tensorrt import collectives, experts, support, weights
from llmforge.backends.tensorrt.attention import Attentions
from llmforge.base.errors import UnsupportedError
from llmforge.ir import expansion, graph, interface, logits_rows, operators
from llmforge.ir.builder import GraphBuilder
from llmforge.ir.operators import canonical, contrib, standard
from llmforge.ir.operators.record import Operator, identity
from llmforge.recipe import EngineSpec
from llmforge.rewrite import topk_outputs
from llmforge.rewrite.pass_base import Changes, Rewritten
from llmforge.targets import Target

CAPACITY = "capacity"  # the dimension of caches that becomes a number
_OTHER_ENGINE = "choose `engine: {backend: onnxruntime}`"


@dataclass(frozen=True)
class Unsupported:
    """One thing of a graph that TensorRT has no way for."""

    node: str  # name of a node, or of an input of the graph
    reason: str
    hint: str

    def __str__(self) -> str:
        return f"{self.node}: {self.reason}"


def lower(model: ir.Model, target: Target, spec: EngineSpec) -> tuple[ir.Model, Changes]:
    """Write `model` for an engine of `spec.max_context` slots; the model is left alone, its tensors are shared.

    Steps give heads of rows, too (`llmforge.rewrite.topk_outputs`).

    Raises:
        UnsupportedError: the graph has what TensorRT does not take.
    """
    if found := unsupported(model):
        listed = "; ".join(map(str, found[:3])) + (f"; and {len(found) - 3} more" if len(found) > 3 else "")
        raise UnsupportedError(f"TensorRT for target {target.name} does not support {listed}", hint=found[0].hint)
    lowered, changes = rewrite(model, spec.max_context)
    changes.rewritten.append(topk_outputs.add_topk_outputs(lowered))
    support.check(lowered)
    return lowered, changes


def unsupported(model: ir.Model) -> list[Unsupported]:
    """List what of `model` no engine of TensorRT has, whatever the device; reads no weight, and changes nothing."""
    found = []
    if (reason := model.metadata_props.get(interface.FALLBACK)) is not None:
        found.append(
            Unsupported("the model", f"its attention was traced from the model's own code: {reason}", _OTHER_ENGINE)
        )
    for value in model.graph.inputs:
        if value.name == interface.INPUTS_EMBEDS:
            what = "TensorRT has no inputs that may be left out"
            found.append(Unsupported(value.name, what, "leave accept-embeddings out of the recipe"))
        if value.name in (interface.ATTENTION_MASK, interface.SEQLENS_K):
            what = "only canonical attention over past_lengths is lowered to TensorRT"
            hint = "leave flash-attention, genai-interface and optimum-interface out of the recipe"
            found.append(Unsupported(value.name, what, hint))
    for view in map(operators.view, model.graph.all_nodes()):
        reason, hint = _reason(view)
        if reason is not None:
            found.append(Unsupported(view.name, reason, hint))
    return found


def _reason(view: Operator) -> tuple[str | None, str]:
    """Say why there is no way for a node, None where there is one, and what to do."""
    match view:
        case canonical.Attention() | canonical.LatentAttention():
            fp32 = view.q.dtype == ir.DataType.FLOAT
            reason = "IAttention has kernels for fp16 and bf16 only, not fp32" if fp32 else None
            return reason, "put `lower-precision` into the recipe"
        case canonical.MoE():
            return experts.reason_against(view), _OTHER_ENGINE
        case canonical.LowRankAdapter():
            return None, ""
        case canonical.AllReduce() | canonical.AllGather():
            return collectives.reason_against(view), "split the graph along its last axis"
        case canonical.Fp4Linear():
            return None, ""
        case canonical.CausalConv() | canonical.LinearAttention():
            return "layers with a recurrent state are not lowered", _OTHER_ENGINE
        case contrib.MatMulNBits() | contrib.GatherBlockQuantized():
            hint = "set `bits: 4`, `symmetric: true` and `embedding_bits: 4` or 16 in quantize-weights"
            return weights.reason_against(view), hint
        case contrib.SkipSimplifiedLayerNormalization() | contrib.SkipLayerNormalization():
            return None, ""
        case contrib.GroupQueryAttention():
            return (
                "the parser says it knows GroupQueryAttention, and the build then lacks a plugin",
                "leave flash-attention out of the recipe: canonical attention becomes IAttention, which is one kernel",
            )
        case contrib.QMoE():
            hint = "exclude the experts: `exclude: ['*.experts.*']` in quantize-weights"
            return "the parser has no quantized experts", hint
        case contrib.ContribMoE():
            return "the parser has no com.microsoft::MoE", "leave fuse-experts out of the recipe"
    if view.tensorrt is not None:
        return None, ""
    domain, op_type = identity(view.node)
    what = f"the parser has no {op_type}" + (f" of {domain}" if domain else "")
    return what, "leave the pass that writes it out of the recipe"


def rewrite(model: ir.Model, capacity: int) -> tuple[ir.Model, Changes]:
    """Write a clone of `model`, with nothing unsupported in it, as standard ONNX whose caches have `capacity` slots."""
    lowered = model.clone()
    operators.complete_dtypes(lowered)
    writing = _Lowering(lowered, capacity)
    changes = Changes()
    for node in list(lowered.graph):
        if (what := writing.node(node)) is not None:
            changes.rewritten.append(Rewritten(str(node.name), what))
    if any(value.name == interface.LOGITS_ROWS for value in lowered.graph.inputs):
        changes.rewritten.append(Rewritten(*logits_rows.choose_by_row(lowered)))
    _fix_capacity(lowered, capacity)
    graph.drop_unused(lowered)
    operators.complete_dtypes(lowered)
    return lowered, changes


@dataclass
class _Lowering(GraphBuilder):
    """One rewriting of one graph."""

    capacity: int
    _attentions: Attentions = field(init=False)
    _weights: weights.QuantizedWeights = field(init=False)
    _adapters: expansion.LowRankExpansion = field(init=False)

    def __post_init__(self) -> None:
        self._attentions, self._weights = Attentions(self.model, self.capacity), weights.QuantizedWeights(self.model)
        self._adapters = expansion.LowRankExpansion(self.model)

    def node(self, node: ir.Node) -> str | None:
        """Replace `node` where the parser does not take it; say what it became."""
        match operators.view(node):
            case canonical.Attention() as attention:
                return self._attentions.rewrite(attention)
            case canonical.LatentAttention() as latent:
                return self._attentions.rewrite_latent(latent)
            case canonical.MoE() as layer:
                return experts.lower(self.model, layer)
            case canonical.LowRankAdapter() as layer:
                self._adapters.adapter(layer)
                return "LowRankAdapter to Gather and MatMul, which no GPU has run"
            case canonical.AllReduce() | canonical.AllGather() as collective:
                return collectives.lower(collective)
            case canonical.Fp4Linear() as layer:
                return self._weights.multiply_fp4(layer)
            case contrib.MatMulNBits() as product:
                return self._weights.multiply(product)
            case contrib.GatherBlockQuantized() as lookup:
                return self._weights.gather(lookup)
            case contrib.SkipSimplifiedLayerNormalization() as norm:
                return self._skip_norm(norm, "RMSNormalization", None)
            case contrib.SkipLayerNormalization() as norm:
                return self._skip_norm(norm, "LayerNormalization", norm.beta)
            case standard.ReduceMax() as reduction if reduction.output.dtype == ir.DataType.BOOL:
                return self._any(reduction)
        return None

    def _skip_norm(
        self,
        skip: contrib.SkipSimplifiedLayerNormalization | contrib.SkipLayerNormalization,
        norm: str,
        shift: ir.Value | None,
    ) -> str:
        """Take a sum and its norm apart again: TensorRT fuses them by itself."""
        node, branch = skip.node, skip.skip
        if skip.bias is not None:
            branch = self._typed("Add", node, [branch, skip.bias])
        total = self._typed("Add", node, [skip.input, branch])
        attributes = {"axis": -1, "epsilon": skip.epsilon}
        [y] = graph.insert(node, norm, [total, skip.gamma, shift], attributes, name=skip.name)
        graph.replace_value(skip.y, y)
        if len(node.outputs) == len(skip.outputs):
            graph.replace_value(skip.sum, total)
        return f"{skip.op_type} to Add and {norm}"

    def _any(self, reduction: standard.ReduceMax) -> str:
        """Say in numbers whether any of some truths holds: the parser's ReduceMax takes no bool."""
        node = reduction.node
        inputs = [self._add(node, "Cast", [reduction.x], {"to": int(ir.DataType.FLOAT)}), reduction.axes]
        attributes = {"keepdims": reduction.keepdims}
        [largest] = graph.insert(node, "ReduceMax", inputs, attributes, name=reduction.name)
        graph.replace_value(reduction.output, self._add(node, "Cast", [largest], {"to": int(ir.DataType.BOOL)}))
        return "ReduceMax of bool to one of numbers"

    def _typed(self, op_type: str, node: ir.Node, inputs: list[ir.Value]) -> ir.Value:
        value = self._add(node, op_type, inputs)
        value.type, value.shape = inputs[0].type, inputs[0].shape
        return value


def _fix_capacity(model: ir.Model, capacity: int) -> None:
    """Write the capacity of caches as a number, which IKVCacheUpdateLayer wants."""
    for value in [*model.graph.inputs, *model.graph.outputs]:
        dims = graph.dims(value)
        if dims is not None and CAPACITY in dims:
            value.shape = ir.Shape([capacity if dim == CAPACITY else dim for dim in dims])
