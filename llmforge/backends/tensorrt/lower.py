"""From the canonical dialect to the ONNX that TensorRT's parser builds: opset 24, no operator of another domain.

`rewrite` knows no target, so that ONNX Runtime can run what it writes on a CPU and prove it equal. `lower` refuses by
name what has no way through (`unsupported` lists it), and holds what it writes against what was seen to build
(`support`); what compute capabilities lack stands in `refusals`. No weight is read for any of it.

The graph keeps the names of `llmforge.ir.interface`. Batch and sequence stay open, the capacity of caches is a number.
`logits_rows` is [batch, rows] (`llmforge.ir.logits_rows.choose_by_row`), without a default, since an engine's inputs
have none. `position_ids` is always an input: masks are made of it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
import onnx_ir as ir

from llmforge.backends.tensorrt import weights
from llmforge.backends.tensorrt.attention import Attentions
from llmforge.base.errors import UnsupportedError
from llmforge.ir import expansion, graph, interface, logits_rows, moe, operators
from llmforge.ir.builder import GraphBuilder
from llmforge.ir.operators import canonical, contrib, standard
from llmforge.ir.operators.canonical import AllGather, AllReduce
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
    check_operators(lowered)
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
            return experts_reason(view), _OTHER_ENGINE
        case canonical.LowRankAdapter():
            return None, ""
        case canonical.AllReduce() | canonical.AllGather():
            return collective_reason(view), "split the graph along its last axis"
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
                return lower_experts(self.model, layer)
            case canonical.LowRankAdapter() as layer:
                self._adapters.adapter(layer)
                return "LowRankAdapter to Gather and MatMul, which no GPU has run"
            case canonical.AllReduce() | canonical.AllGather() as collective:
                return lower_collective(collective)
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


def check_operators(model: ir.Model) -> None:
    """Return if every operator of a lowered `model` was seen to build with its dtypes.

    Raises:
        UnsupportedError: names those that were not, and a node of each.
    """
    unseen = dict(_unseen(model))
    if unseen:
        listed = ", ".join(f"{what}, node {node}" for what, node in reversed(unseen.items()))
        raise UnsupportedError(
            f"TensorRT is not known to build {listed}",
            hint="leave the pass that writes it out of the recipe, or choose `engine: {backend: onnxruntime}`",
        )


def _unseen(model: ir.Model) -> Iterator[tuple[str, str]]:
    """Find operators, the last first, that do not stand in the table, or not with one of their dtypes."""
    for node in reversed(list(model.graph.all_nodes())):
        operator = f"{node.domain}::{node.op_type}" if node.domain else node.op_type
        seen = operators.view(node).tensorrt
        if seen is None:
            yield operator, str(node.name)
            continue
        dtypes = {value.dtype for value in (*node.inputs, *node.outputs) if value is not None and value.dtype}
        if unseen := dtypes - seen.dtypes - seen.besides:
            yield f"{operator} of {', '.join(sorted(dtype.name for dtype in unseen))}", str(node.name)


_TO_FRONT, _TO_BACK = [2, 0, 1], [1, 2, 0]


def collective_reason(view: AllReduce | AllGather) -> str | None:
    """Say why a collective has no way to TensorRT; None where it has one."""
    if isinstance(view, AllGather) and (view.axis != -1 or len(graph.dims(view.output) or ()) != len(_TO_FRONT)):
        return "only the last axis of three is gathered"
    return None


def lower_collective(view: AllReduce | AllGather) -> str:
    """Replace a collective that no reason is against; say what it became."""
    node, name, x = view.node, view.name, view.x
    common: dict[str, graph.Attribute] = {"root": -1, "group_size": 0, "nb_rank": view.ranks}
    if isinstance(view, AllReduce):
        attributes = {"collective_operation": "all_reduce", "reduce_op": "sum", **common}
        [y] = graph.insert(node, "DistCollective", [x], attributes, name=name)
    else:
        [turned] = graph.insert(node, "Transpose", [x], {"perm": _TO_FRONT}, name=f"{name}/front")
        attributes = {"collective_operation": "all_gather", "reduce_op": "none", **common}
        [whole] = graph.insert(node, "DistCollective", [turned], attributes, name=name)
        [y] = graph.insert(node, "Transpose", [whole], {"perm": _TO_BACK}, name=f"{name}/back")
        turned.type = whole.type = x.type
        dims, made = [*(x.shape or ())], [*(view.output.shape or ())]
        if dims and made:
            turned.shape = ir.Shape([dims[axis] for axis in _TO_FRONT])
            whole.shape = ir.Shape([made[axis] for axis in _TO_FRONT])
    graph.replace_value(view.output, y)
    return f"{view.op_type} to DistCollective of {view.ranks} ranks"


MOST_READ = 4  # a Mixtral has 8 experts, of which a token chooses 2


def experts_reason(layer: canonical.MoE) -> str | None:
    """Say why the experts of `layer` are not computed all; None where they are."""
    experts, top_k = graph.static(layer.up)[0], graph.width(layer.expert_ids)
    if experts > MOST_READ * top_k:
        return (
            f"a token chooses {top_k} of {experts} experts; the lowering computes all of them, and reads "
            f"{experts / top_k:g} times what is chosen, of which {MOST_READ} are allowed"
        )
    return None


def lower_experts(model: ir.Model, layer: canonical.MoE) -> str:
    """Replace one `llmforge::MoE`; say what it became."""
    graph.replace_value(layer.output, _Dense(model, layer).result())
    return f"MoE to products with all {graph.static(layer.up)[0]} experts"


@dataclass
class _Dense(moe.MoEExpansion):
    """The products of one layer; comments give shapes."""

    _inner = moe.MoEExpansion._outer  # no loop, so nothing inside of one

    def result(self) -> ir.Value:
        layer = self.experts
        experts, hidden, width = graph.static(layer.up)
        _, inner, _ = graph.static(layer.down)
        weights = self._chosen(experts)
        h = self._inner("MatMul", [self._flat(layer.x), layer.up])  # [E, T, 2·I or I]
        if (bias := layer.up_bias) is not None:
            column = self._constant(f"by_expert_{experts}_{width}", [experts, 1, width])
            h = self._inner("Add", [h, self._inner("Reshape", [bias, column])])
        h = self._inner("Transpose", [self._between(h)], {"perm": [1, 0, 2]})  # [T, E, I]
        h = self._inner("Mul", [h, self._inner("Unsqueeze", [weights, self._constant("axis_2", [2])])])
        h = self._inner("Reshape", [h, self._constant(f"side_by_side_{experts * inner}", [-1, experts * inner])])
        down = self._inner("Reshape", [layer.down, self._constant(f"stacked_{hidden}", [-1, hidden])])
        y = self._inner("MatMul", [h, down])  # [T, H]
        if (bias := layer.down_bias) is not None:
            y = self._inner("Add", [y, self._inner("MatMul", [weights, bias])])
        return self._inner("Reshape", [y, self._inner("Shape", [layer.x])])

    def _chosen(self, experts: int) -> ir.Value:
        """[T, E]: the weights of each token's experts."""
        ids, weights = self._flat(self.experts.expert_ids), self._flat(self.experts.expert_weights)  # [T, top_k]
        last = self._constant("axis_2", [2])
        numbers = self._constant(f"experts_{experts}", list(range(experts)))
        equal = self._inner("Equal", [self._inner("Unsqueeze", [ids, last]), numbers])  # [T, top_k, E]
        spread = self._inner("Where", [equal, self._inner("Unsqueeze", [weights, last]), self._number(0.0)])
        return self._inner("ReduceSum", [spread, self._constant("axis_1", [1])], {"keepdims": 0})

    def _number(self, value: float) -> ir.Value:
        """In what the experts compute in."""
        return self._constant(f"number_{value}_{self._dtype.name}", np.asarray(value, self._dtype.numpy()))
