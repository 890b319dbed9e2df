"""The canonical dialect (docs/dialect.md) as data, and its verifier.

`OPERATORS` lists what a graph may hold between the frontend and an engine: the canonical operators, what passes write
in their place, and pointwise arithmetic. `check` verifies a graph against it; `expand` writes `llmforge::` operators
as standard ONNX.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from llmforge.base.errors import VerificationError
from llmforge.ir import graph as g
from llmforge.ir import interface, moe
from llmforge.ir.expansion import expand
from llmforge.ir.recurrence import ACTIVATIONS, causal_conv, linear_attention

__all__ = [
    "OPERATORS",
    "OPSETS",
    "Input",
    "Operator",
    "attention",
    "caches",
    "causal_conv",
    "check",
    "expand",
    "linear_attention",
]

OPSETS: Mapping[str, int] = {"": 24, "llmforge": 1, "com.microsoft": 1, "llmforge.cpu": 1}

FLOAT, FLOAT16, BFLOAT16 = ir.DataType.FLOAT, ir.DataType.FLOAT16, ir.DataType.BFLOAT16
INT32, INT64, UINT8 = ir.DataType.INT32, ir.DataType.INT64, ir.DataType.UINT8
FLOATS = frozenset({FLOAT, FLOAT16, BFLOAT16})
NUMBERS = FLOATS | {INT32, INT64}
CACHE = FLOATS | {ir.DataType.INT8, UINT8}  # uint8: two 4-bit values
ANY = frozenset(ir.DataType)


@dataclass(frozen=True)
class Input:
    """One input of an operator; `ranks` empty: any rank."""

    name: str
    dtypes: frozenset[ir.DataType] = FLOATS
    ranks: frozenset[int] = frozenset()
    optional: bool = False


@dataclass(frozen=True)
class Operator:
    """What the verifier knows of an operator; `attributes` marks the required ones with a trailing `!`."""

    inputs: tuple[Input, ...]
    attributes: Mapping[str, str] = field(
        default_factory=dict
    )  # name → "int", "float", "string", "ints", "tensor" and perhaps "!"
    outputs: int = 1  # at most
    variadic: bool = False  # the last input may repeat


def _in(name: str, dtypes: frozenset[ir.DataType] = FLOATS, *ranks: int, optional: bool = False) -> Input:
    return Input(name, dtypes, frozenset(ranks), optional)


_POINTWISE = Operator((_in("x"),))
_BINARY = Operator((_in("a", NUMBERS), _in("b", NUMBERS)))
_I64, _I32 = frozenset({INT64}), frozenset({INT32})
_BOOL = frozenset({ir.DataType.BOOL})
_REDUCTION = Operator(
    (_in("x", NUMBERS | _BOOL), _in("axes", _I64, 1)), {"keepdims": "int", "noop_with_empty_axes": "int"}
)
_COMPARED = Operator((_in("a", NUMBERS | _BOOL), _in("b", NUMBERS | _BOOL)))
_LOGICAL = Operator((_in("a", _BOOL), _in("b", _BOOL)))
_MANY = Operator((_in("x", NUMBERS),), variadic=True)
_AXES = Operator((_in("x", ANY), _in("axes", _I64, 1)))
_CODES = frozenset({UINT8, ir.DataType.INT4, ir.DataType.UINT4})
_BYTES = frozenset({ir.DataType.INT8, ir.DataType.FLOAT8E4M3FN})
_EXPERTS = {  # attributes of com.microsoft::MoE and QMoE
    "k": "int!",
    "activation_type": "string!",
    "activation_alpha": "float",
    "activation_beta": "float",
    "swiglu_fusion": "int",
    "swiglu_limit": "float",
    "normalize_routing_weights": "int",
}


_CPU_WEIGHTS = {"N": "int!", "K": "int!", "bits": "int!", "block_size": "int!", "zero_points": "int!"}


def _cpu_attention(cache: ir.DataType) -> Operator:
    """Describe the attention of `llmforge.cpu` over caches of one dtype."""
    floats = frozenset({FLOAT})
    return Operator(
        (
            _in("qkv", floats, 3),
            _in("past_key", frozenset({cache}), 4),
            _in("past_value", frozenset({cache}), 4),
            _in("seqlens_k", _I32, 1),
            _in("cos_cache", floats, 2, optional=True),
            _in("sin_cache", floats, 2, optional=True),
            _in("k_scale", floats, optional=True),
            _in("v_scale", floats, optional=True),
            _in("q_norm_weight", floats, 1, optional=True),
            _in("k_norm_weight", floats, 1, optional=True),
            _in("head_sink", floats, 1, optional=True),
        ),
        {
            "num_heads": "int!",
            "kv_num_heads": "int!",
            "local_window_size": "int!",
            "rotary_interleaved": "int!",
            "per_channel": "int!",
            "scale": "float!",
            "softcap": "float!",
            "qk_norm_epsilon": "float!",
        },
        outputs=3,
    )


def _attention_over(tokens: Input) -> Operator:
    """Describe attention whose input `tokens` says which slots of its caches hold some."""
    return Operator(
        (
            _in("q", FLOATS, 3),
            _in("k", FLOATS, 3),
            _in("v", FLOATS, 3),
            _in("past_key", FLOATS, 4),
            _in("past_value", FLOATS, 4),
            tokens,
            _in("sinks", FLOATS, 1, optional=True),
            _in("alibi_slopes", frozenset({FLOAT}), 1, optional=True),
        ),
        {
            "num_heads": "int!",
            "kv_num_heads": "int!",
            "scale": "float!",
            "softcap": "float!",
            "window": "int!",
            "layer": "int!",
        },
        outputs=3,
    )


OPERATORS: Mapping[tuple[str, str], Operator] = {
    # canonical
    ("llmforge", "Attention"): _attention_over(_in("past_lengths", _I32, 1)),
    ("llmforge", "MoE"): Operator(
        (
            _in("x"),
            _in("expert_ids", _I64),
            _in("expert_weights"),
            _in("up", FLOATS, 3),
            _in("down", FLOATS, 3),
            _in("up_bias", FLOATS, 2, optional=True),
            _in("down_bias", FLOATS, 2, optional=True),
        ),
        {
            "activation": "string!",
            "gated": "int!",
            "interleaved": "int!",
            "alpha": "float!",
            "beta": "float!",
            "limit": "float!",
        },
    ),
    ("llmforge", "CausalConv"): Operator(
        (
            _in("x", FLOATS, 3),
            _in("weight", FLOATS, 3),
            _in("past", FLOATS, 3),
            _in("past_lengths", _I32, 1),
            _in("lengths", _I32, 1),
            _in("bias", FLOATS, 1, optional=True),
        ),
        {"activation": "string!", "layer": "int!"},
        outputs=2,
    ),
    ("llmforge", "LinearAttention"): Operator(
        (
            _in("q", FLOATS, 3),
            _in("k", FLOATS, 3),
            _in("v", FLOATS, 3),
            _in("decay", FLOATS, 3),
            _in("beta", FLOATS, 3),
            _in("past", FLOATS, 4),
            _in("past_lengths", _I32, 1),
            _in("lengths", _I32, 1),
        ),
        {"num_heads": "int!", "scale": "float!", "layer": "int!"},
        outputs=2,
    ),
    ("llmforge", "GrowingAttention"): _attention_over(_in("attention_mask", _I64, 2)),  # by optimum-interface
    # written by genai-interface
    ("llmforge", "CacheLengths"): Operator((_in("attention_mask", _I64, 2),), outputs=2),
    ("llmforge", "TokenOrder"): Operator((_in("attention_mask", _I64, 2), _in("input_ids", _I64, 2)), outputs=2),
    ("llmforge", "RowPlaces"): Operator(
        (_in("logits_rows", _I64, 1), _in("attention_mask", _I64, 2), _in("input_ids", _I64, 2))
    ),
    # written by the split among ranks (llmforge.parallel.split)
    ("llmforge", "AllReduce"): Operator((_in("x"),), {"ranks": "int!"}),
    ("llmforge", "AllGather"): Operator((_in("x"),), {"ranks": "int!", "axis": "int!"}),
    ("", "GatherND"): Operator((_in("data", ANY), _in("indices", _I64)), {"batch_dims": "int"}),
    ("", "RMSNormalization"): Operator(
        (_in("x"), _in("scale", FLOATS, 1)), {"axis": "int", "epsilon": "float!", "stash_type": "int"}
    ),
    ("", "LayerNormalization"): Operator(
        (_in("x"), _in("scale", FLOATS, 1), _in("bias", FLOATS, 1, optional=True)),
        {"axis": "int", "epsilon": "float", "stash_type": "int"},
    ),
    ("", "RotaryEmbedding"): Operator(
        (_in("x", FLOATS, 3), _in("cos", FLOATS, 2), _in("sin", FLOATS, 2), _in("position_ids", _I64, 2)),
        {"num_heads": "int!", "interleaved": "int", "rotary_embedding_dim": "int"},
    ),
    ("", "MatMul"): Operator((_in("x"), _in("w"))),
    ("", "Gather"): Operator((_in("data", ANY), _in("indices", frozenset({INT32, INT64}))), {"axis": "int"}),
    ("", "Transpose"): Operator((_in("x", ANY),), {"perm": "ints!"}),
    ("", "Reshape"): Operator((_in("x", ANY), _in("shape", _I64, 1)), {"allowzero": "int"}),
    ("", "Split"): Operator(
        (_in("x", ANY), _in("split", _I64, 1, optional=True)), {"axis": "int", "num_outputs": "int"}, outputs=64
    ),
    ("", "Concat"): Operator((_in("x", ANY),), {"axis": "int!"}, variadic=True),
    ("", "Slice"): Operator(
        (
            _in("x", ANY),
            _in("starts", _I64, 1),
            _in("ends", _I64, 1),
            _in("axes", _I64, 1, optional=True),
            _in("steps", _I64, 1, optional=True),
        )
    ),
    ("", "Sigmoid"): _POINTWISE,
    ("", "Tanh"): _POINTWISE,
    ("", "Relu"): _POINTWISE,
    ("", "Erf"): _POINTWISE,
    ("", "Neg"): _POINTWISE,
    ("", "Exp"): _POINTWISE,
    ("", "Softplus"): _POINTWISE,
    ("", "Gelu"): Operator((_in("x"),), {"approximate": "string"}),
    ("", "Pow"): _BINARY,
    ("", "Add"): _BINARY,
    ("", "Sub"): _BINARY,
    ("", "Mul"): _BINARY,
    ("", "Div"): _BINARY,
    # of routers, which choose experts
    ("", "Softmax"): Operator((_in("x"),), {"axis": "int!"}),
    ("", "TopK"): Operator(
        (_in("x"), _in("k", _I64, 1)), {"axis": "int", "largest": "int", "sorted": "int"}, outputs=2
    ),
    ("", "ArgMax"): Operator((_in("x"),), {"axis": "int!", "keepdims": "int", "select_last_index": "int"}),
    ("", "GatherElements"): Operator((_in("data", NUMBERS), _in("indices", _I64)), {"axis": "int!"}),
    ("", "ReduceSum"): _REDUCTION,
    ("", "ReduceMax"): _REDUCTION,
    ("", "Unsqueeze"): _AXES,
    ("", "Squeeze"): Operator((_in("x", ANY), _in("axes", _I64, 1, optional=True))),
    ("", "Expand"): Operator((_in("x", ANY), _in("shape", _I64, 1))),
    ("", "Cast"): Operator((_in("x", ANY),), {"to": "int!", "saturate": "int"}),
    ("", "Where"): Operator((_in("condition", _BOOL), _in("x", NUMBERS | _BOOL), _in("y", NUMBERS | _BOOL))),
    ("", "Not"): Operator((_in("x", _BOOL),)),
    ("", "And"): _LOGICAL,
    ("", "Or"): _LOGICAL,
    ("", "Equal"): _COMPARED,
    ("", "Greater"): _COMPARED,
    ("", "GreaterOrEqual"): _COMPARED,
    ("", "Less"): _COMPARED,
    ("", "LessOrEqual"): _COMPARED,
    ("", "Abs"): Operator((_in("x", NUMBERS),)),
    ("", "Max"): _MANY,
    ("", "Clip"): Operator(
        (_in("x", NUMBERS), _in("min", NUMBERS, 0, optional=True), _in("max", NUMBERS, 0, optional=True))
    ),
    # the model's own arithmetic beyond: norms, activations, scales of positions
    ("", "Sqrt"): _POINTWISE,
    ("", "Reciprocal"): _POINTWISE,
    ("", "Log"): _POINTWISE,
    ("", "Floor"): _POINTWISE,
    ("", "Cos"): _POINTWISE,
    ("", "Sin"): _POINTWISE,
    ("", "Min"): _MANY,
    ("", "ReduceMean"): _REDUCTION,
    # written by passes
    ("com.microsoft", "GroupQueryAttention"): Operator(
        (
            _in("query", FLOATS, 3),
            _in("key", FLOATS, 3, optional=True),
            _in("value", FLOATS, 3, optional=True),
            _in("past_key", CACHE, 4),
            _in("past_value", CACHE, 4),
            _in("seqlens_k", _I32, 1),
            _in("total_sequence_length", _I32, 0, 1),
            _in("cos_cache", FLOATS, 2, optional=True),
            _in("sin_cache", FLOATS, 2, optional=True),
            _in("position_ids", _I64, 2, optional=True),
            _in("attention_bias", FLOATS, 4, optional=True),
            _in("head_sink", FLOATS, 1, optional=True),
            _in("k_scale", frozenset({FLOAT}), optional=True),
            _in("v_scale", frozenset({FLOAT}), optional=True),
            _in("q_norm_weight", FLOATS, 1, optional=True),
            _in("k_norm_weight", FLOATS, 1, optional=True),
        ),
        {
            "num_heads": "int!",
            "kv_num_heads": "int!",
            "scale": "float",
            "softcap": "float",
            "local_window_size": "int",
            "sliding_window_cache": "int",
            "do_rotary": "int",
            "rotary_interleaved": "int",
            "smooth_softmax": "int",
            "causal": "int",
            "qk_norm_epsilon": "float",
            "k_quant_type": "string",
            "v_quant_type": "string",
            "kv_cache_bit_width": "int",
        },
        outputs=3,
    ),
    ("", "DequantizeLinear"): Operator(
        (_in("codes", _BYTES), _in("scales", FLOATS, 0, 1), _in("zero_points", _BYTES, optional=True)), {"axis": "int"}
    ),
    ("", "QuantizeLinear"): Operator((_in("x"), _in("scale", FLOATS, 0), _in("zero_point", _BYTES, 0))),
    ("com.microsoft", "MatMulNBits"): Operator(
        (
            _in("a"),
            _in("b", frozenset({UINT8}), 2, 3),
            _in("scales", FLOATS, 1, 2),
            _in("zero_points", FLOATS | {UINT8}, 1, 2, optional=True),
            _in("g_idx", _I32, 1, optional=True),
            _in("bias", FLOATS, 1, optional=True),
        ),
        {
            "K": "int!",
            "N": "int!",
            "bits": "int!",
            "block_size": "int!",
            "accuracy_level": "int",
            "weight_prepacked": "int",
        },
    ),
    ("com.microsoft", "GatherBlockQuantized"): Operator(
        (
            _in("data", _CODES),
            _in("indices", frozenset({INT32, INT64})),
            _in("scales"),
            _in("zero_points", _CODES, optional=True),
        ),
        {"bits": "int", "block_size": "int!", "gather_axis": "int", "quantize_axis": "int"},
    ),
    ("com.microsoft", "MoE"): Operator(
        (
            _in("input"),
            _in("router_probs", FLOATS, 2),
            _in("fc1_experts_weights", FLOATS, 3),
            _in("fc1_experts_bias", FLOATS, 2, optional=True),
            _in("fc2_experts_weights", FLOATS, 3),
            _in("fc2_experts_bias", FLOATS, 2, optional=True),
        ),
        _EXPERTS,
    ),
    ("com.microsoft", "QMoE"): Operator(
        (
            _in("input"),
            _in("router_probs", FLOATS, 2),
            _in("fc1_experts_weights", frozenset({UINT8}), 3),
            _in("fc1_scales", FLOATS, 3),
            _in("fc1_experts_bias", FLOATS, 2, optional=True),
            _in("fc2_experts_weights", frozenset({UINT8}), 3),
            _in("fc2_scales", FLOATS, 3),
            _in("fc2_experts_bias", FLOATS, 2, optional=True),
            *(_in(f"fc3_{part}", optional=True) for part in ("experts_weights", "scales", "experts_bias")),
            _in("fc1_zero_points", frozenset({UINT8}), 3, optional=True),
            _in("fc2_zero_points", frozenset({UINT8}), 3, optional=True),
            _in("fc3_zero_points", frozenset({UINT8}), 3, optional=True),
            _in("router_weights", FLOATS, 2, optional=True),
        ),
        {
            **_EXPERTS,
            "expert_weight_bits": "int!",
            "block_size": "int!",
            "accuracy_level": "int",
        },
    ),
    ("com.microsoft", "SkipSimplifiedLayerNormalization"): Operator(
        (_in("input"), _in("skip"), _in("gamma", FLOATS, 1), _in("bias", FLOATS, 1, optional=True)),
        {"epsilon": "float!"},
        outputs=4,
    ),
    ("com.microsoft", "SkipLayerNormalization"): Operator(
        (
            _in("input"),
            _in("skip"),
            _in("gamma", FLOATS, 1),
            _in("beta", FLOATS, 1, optional=True),
            _in("bias", FLOATS, 1, optional=True),
        ),
        {"epsilon": "float!"},
        outputs=4,
    ),
    # written by cpu-kernels (docs/cpu-kernels.md)
    ("llmforge.cpu", "Linear"): Operator(
        (
            _in("x", frozenset({FLOAT})),
            _in("weights", frozenset({UINT8}), 2),
            _in("bias", frozenset({FLOAT}), 1, optional=True),
            _in("norm", frozenset({FLOAT}), 1, optional=True),
            _in("residual", frozenset({FLOAT}), optional=True),
        ),
        {**_CPU_WEIGHTS, "activation": "int!", "epsilon": "float!"},
    ),
    ("llmforge.cpu", "Embedding"): Operator((_in("ids", _I64), _in("weights", frozenset({UINT8}), 2)), _CPU_WEIGHTS),
    ("llmforge.cpu", "GroupQueryAttention"): _cpu_attention(FLOAT),
    ("llmforge.cpu", "GroupQueryAttentionInt8"): _cpu_attention(ir.DataType.INT8),
    ("", "SimplifiedLayerNormalization"): Operator(  # ONNX Runtime's, in the standard domain
        (_in("x"), _in("scale", FLOATS, 1)), {"axis": "int", "epsilon": "float!", "stash_type": "int"}, outputs=2
    ),
    ("com.microsoft", "FusedMatMul"): Operator(
        (_in("a"), _in("b")),
        {"alpha": "float", "transA": "int", "transB": "int", "transBatchA": "int", "transBatchB": "int"},
    ),
}

# Besides those, in a graph whose metadata `interface.FALLBACK` says that the model's own attention was traced.
OWN_ATTENTION: Mapping[tuple[str, str], Operator] = {
    ("", "TensorScatter"): Operator(  # see `_check_scatter`
        (_in("past", FLOATS, 4), _in("new", FLOATS, 4), _in("past_lengths", _I64, 1)),
        {"axis": "int!", "mode": "string"},
    ),
    ("", "Shape"): Operator((_in("x", ANY),), {"start": "int", "end": "int"}),
    ("", "ConstantOfShape"): Operator((_in("shape", _I64, 1),), {"value": "tensor"}),
    ("", "Range"): Operator((_in("start", NUMBERS), _in("limit", NUMBERS), _in("delta", NUMBERS))),
    ("", "Tile"): Operator((_in("x", NUMBERS | _BOOL), _in("repeats", _I64, 1))),
    ("", "CastLike"): Operator((_in("x", ANY), _in("like", ANY)), {"saturate": "int"}),
    ("", "CumSum"): Operator((_in("x", NUMBERS), _in("axis", _I64 | _I32)), {"exclusive": "int", "reverse": "int"}),
    ("", "ScatterElements"): Operator(
        (_in("data", NUMBERS), _in("indices", _I64), _in("updates", NUMBERS)), {"axis": "int!", "reduction": "string"}
    ),
    ("", "ScatterND"): Operator(
        (_in("data", NUMBERS), _in("indices", _I64), _in("updates", NUMBERS)), {"reduction": "string"}
    ),
    ("", "Gemm"): Operator(
        (_in("a", FLOATS, 2), _in("b", FLOATS, 2), _in("c", optional=True)),
        {"alpha": "float", "beta": "float", "transA": "int", "transB": "int"},
    ),
}

# Graph inputs and outputs: dtypes and rank by name; {layer} is the index of a cache.
INPUTS: Mapping[str, tuple[frozenset[ir.DataType], int]] = {
    interface.INPUT_IDS: (_I64, 2),
    interface.POSITION_IDS: (_I64, 2),
    interface.PAST_LENGTHS: (_I32, 1),
    interface.LENGTHS: (_I32, 1),
    interface.TEXT_LENGTHS: (_I64, 1),
    interface.SEQLENS_K: (_I32, 1),
    interface.TOTAL_SEQUENCE_LENGTH: (_I32, 0),
    interface.ATTENTION_MASK: (_I64, 2),
    interface.LOGITS_ROWS: (_I64, 1),
}
PAST = re.compile(r"past_key_values\.(\d+)\.(key|value|conv|recurrent)")
# Operators that carry a state, its name in the cache, and where it stands among their inputs.
STATE_OPERATORS = {("llmforge", "CausalConv"): ("conv", 2), ("llmforge", "LinearAttention"): ("recurrent", 5)}
RANKS = {"key": 4, "value": 4, "conv": 3, "recurrent": 4}  # of the parts of a cache


def check(model: ir.Model) -> None:
    """Verify that `model` is a well-formed graph of the dialect.

    Raises:
        VerificationError: it is not; the message names the node or value, and the reason.
    """
    _check_opsets(model)
    _check_names(model.graph)
    _check_initializers(model.graph)
    _check_interface(model.graph)
    defined = {id(value) for value in (*model.graph.inputs, *model.graph.initializers.values())}
    own_attention = interface.FALLBACK in model.metadata_props
    for node in model.graph:
        _check_node(node, defined, own_attention=own_attention)
        defined |= {id(value) for value in node.outputs}
    for value in model.graph.outputs:
        _require(id(value) in defined, f"output {value.name!r}", "no node of the graph makes it")


def caches(model: ir.Model) -> dict[int, set[str]]:
    """List the parts of each layer's cache: key, value, conv, recurrent."""
    found: dict[int, set[str]] = {}
    for value in model.graph.inputs:
        if past := PAST.fullmatch(str(value.name)):
            found.setdefault(int(past[1]), set()).add(past[2])
    return found


def _require(condition: bool, where: str, reason: str) -> None:
    if not condition:
        raise VerificationError(f"{where}: {reason}")


def _check_opsets(model: ir.Model) -> None:
    used = {node.domain for node in model.graph}
    for domain, version in model.opset_imports.items():
        where = f"opset import {domain or 'ai.onnx'!r}"
        _require(domain in OPSETS, where, f"the domain is unknown; known are {_listed(OPSETS)}")
        _require(version == OPSETS[domain], where, f"version is {version}, must be {OPSETS[domain]}")
    for domain in sorted(used - set(model.opset_imports)):
        _require(False, f"opset import {domain or 'ai.onnx'!r}", "nodes use the domain, and it is not imported")
    _require(not model.functions, "functions", "the dialect has none")


def _check_names(graph: ir.Graph) -> None:
    values: dict[str, ir.Value] = {}
    for value in (
        *graph.inputs,
        *graph.initializers.values(),
        *(output for node in graph for output in node.outputs),
    ):
        if value.name == "" and value.producer() is not None and not value.uses():
            continue  # an optional output that is not wanted
        if not value.name:
            _require(not value.uses() and value.producer() is not None, "a value", "has no name")
            continue  # an output that its node leaves out
        _require(values.setdefault(value.name, value) is value, f"value {value.name!r}", "two values have this name")
    nodes: set[str] = set()
    for node in graph:
        _require(bool(node.name), f"a node {node.op_type}", "has no name")
        assert node.name is not None
        _require(node.name not in nodes, f"node {node.name!r}", "two nodes have this name")
        nodes.add(node.name)


def _check_initializers(graph: ir.Graph) -> None:
    for name, value in graph.initializers.items():
        where, tensor = f"initializer {name!r}", value.const_value
        if tensor is None:
            raise VerificationError(f"{where}: has no tensor")
        _require(value.name == name, where, f"is registered under another name than its own, {value.name!r}")
        _require(value.dtype == tensor.dtype, where, f"is declared {value.dtype}, its tensor is {tensor.dtype}")
        if not value.is_graph_input():  # the default of an input need not have the shape of what is fed
            dims, held = g.dims(value), tensor.shape.numpy()
            _require(dims == held, where, f"is declared {_shape(dims)}, its tensor is {_shape(held)}")


def _check_interface(graph: ir.Graph) -> None:
    inputs = {str(value.name): value for value in graph.inputs}
    outputs = {str(value.name): value for value in graph.outputs}
    _require(len(inputs) == len(graph.inputs), "graph inputs", "one is listed twice")
    _require(len(outputs) == len(graph.outputs), "graph outputs", "one is listed twice")
    masked = interface.ATTENTION_MASK in inputs  # for a runtime of others, which may want all rows
    for name in (interface.INPUT_IDS, interface.LOGITS_ROWS):
        _require(name in inputs or (masked and name == interface.LOGITS_ROWS), f"graph input {name!r}", "is missing")
    if rows := inputs.get(interface.LOGITS_ROWS):
        _require(rows.is_initializer(), f"graph input {interface.LOGITS_ROWS!r}", "has no default (an initializer)")
    caches: dict[int, set[str]] = {}
    for name, value in inputs.items():
        where = f"graph input {name!r}"
        if past := PAST.fullmatch(name):
            caches.setdefault(int(past[1]), set()).add(past[2])
            _check_value(value, where, CACHE, frozenset({RANKS[past[2]]}), typed=True)
            present = outputs.get(interface.present_of(name))
            if present is None:
                raise VerificationError(f"{where}: has no output {interface.present_of(name)!r}")
            _require(present.dtype == value.dtype, where, f"is {value.dtype}, its present is {present.dtype}")
            same = _without_slots(present) == _without_slots(value) if masked else g.dims(present) == g.dims(value)
            _require(same, where, f"is {_shape(g.dims(value))}, its present is {_shape(g.dims(present))}")
        else:
            _require(name in INPUTS, where, f"is unknown; known are {_listed(INPUTS)} and the caches")
            dtypes, rank = INPUTS[name]
            _check_value(value, where, dtypes, frozenset({rank}), typed=True)
    for position, layer in enumerate(sorted(caches)):
        _require(layer == position, f"cache of layer {layer}", f"there is none of layer {position}")
        both = len({"key", "value"} & caches[layer]) != 1
        _require(both, f"cache of layer {layer}", f"has only its {_listed(sorted(caches[layer]))}")
    _require(interface.LOGITS in outputs, f"graph output {interface.LOGITS!r}", "is missing")
    _check_value(outputs[interface.LOGITS], f"graph output {interface.LOGITS!r}", FLOATS, frozenset({3}), typed=True)
    known = {interface.LOGITS} | {interface.present_of(name) for name in inputs if PAST.fullmatch(name)}
    for name in outputs:
        _require(name in known, f"graph output {name!r}", "is unknown: logits, and one present for every past")


def _check_node(node: ir.Node, defined: set[int], *, own_attention: bool) -> None:
    where, key = f"node {node.name!r}", (node.domain, node.op_type)
    operator = OPERATORS.get(key, OWN_ATTENTION.get(key) if own_attention else None)
    if operator is None:
        raise VerificationError(f"{where}: operator {node.domain or 'ai.onnx'}::{node.op_type} is not in the dialect")
    _require(node.overload == "", where, "has an overload")
    most = len(operator.inputs)
    _require(operator.variadic or len(node.inputs) <= most, where, f"has {len(node.inputs)} inputs, at most {most}")
    for index in range(max(len(node.inputs), most)):
        expected = operator.inputs[min(index, most - 1)]
        value = node.inputs[index] if index < len(node.inputs) else None
        if value is None:
            _require(expected.optional, where, f"input {expected.name!r} is missing")
            continue
        _require(id(value) in defined, where, f"reads {value.name!r} before it is made, or from another graph")
        _check_value(value, f"{where}: input {expected.name!r}", expected.dtypes, expected.ranks, typed=False)
    _require(1 <= len(node.outputs) <= operator.outputs, where, f"has {len(node.outputs)} outputs")
    _check_attributes(node, operator, where)
    if key == ("", "TensorScatter"):
        _check_scatter(node, where)
    if (node.domain, node.op_type) == ("llmforge", "Attention"):
        _check_attention(node, where, interface.PAST_LENGTHS)
    if (node.domain, node.op_type) == ("llmforge", "GrowingAttention"):
        _check_attention(node, where, interface.ATTENTION_MASK)
    if (node.domain, node.op_type) == ("llmforge", "MoE"):
        _check_moe(node, where)
    if (node.domain, node.op_type) in STATE_OPERATORS:
        _check_state(node, where, *STATE_OPERATORS[node.domain, node.op_type])


def _check_scatter(node: ir.Node, where: str) -> None:
    """Check that a TensorScatter writes a step into a cache: past, new, past lengths → present, along the slots."""
    past = node.inputs[0]
    name = "" if past is None else past.name or ""
    _require(PAST.fullmatch(name) is not None, where, f"writes into {name!r}, which is no cache")
    _require(node.attributes["axis"].value == 2, where, "writes along another axis than the slots")
    made = node.outputs[0].name
    _require(made == interface.present_of(name), where, f"makes {made!r}, must make {interface.present_of(name)!r}")


def _check_attributes(node: ir.Node, operator: Operator, where: str) -> None:
    types = {"int": ir.AttributeType.INT, "float": ir.AttributeType.FLOAT}
    types |= {"string": ir.AttributeType.STRING, "ints": ir.AttributeType.INTS, "tensor": ir.AttributeType.TENSOR}
    for name, attribute in node.attributes.items():
        _require(
            name in operator.attributes,
            where,
            f"attribute {name!r} is unknown; known are {_listed(operator.attributes)}",
        )
        wanted = operator.attributes[name].removesuffix("!")
        _require(
            attribute.type == types[wanted], where, f"attribute {name!r} is {attribute.type.name}, must be {wanted}"
        )
    for name, wanted in operator.attributes.items():
        _require(not wanted.endswith("!") or name in node.attributes, where, f"attribute {name!r} is missing")


def _check_attention(node: ir.Node, where: str, held: str) -> None:
    """Check what the table cannot say: heads divide widths, the cache is the layer's own."""
    attributes = {name: attribute.value for name, attribute in node.attributes.items()}
    heads, kv_heads, layer = attributes["num_heads"], attributes["kv_num_heads"], attributes["layer"]
    _require(0 < kv_heads <= heads and heads % kv_heads == 0, where, f"{heads} heads cannot share {kv_heads} KV heads")
    _require(attributes["window"] >= 0 and attributes["softcap"] >= 0, where, "window and softcap must not be negative")
    for index, name in ((6, "sinks"), (7, "alibi_slopes")):
        size = _dim(node.inputs[index], 0) if len(node.inputs) > index else None
        _require(size in (None, heads), where, f"{name} has {size} numbers, there are {heads} heads")
    names = [value.name if value is not None else None for value in node.inputs]
    expected = [interface.past_key(layer), interface.past_value(layer), held]
    _require(
        names[3:6] == expected,
        where,
        f"layer {layer} must read {_listed(expected)}, reads {_listed(map(str, names[3:6]))}",
    )
    made = [value.name for value in node.outputs[1:]]
    expected = [interface.present_key(layer), interface.present_value(layer)]
    _require(made == expected, where, f"layer {layer} must make {_listed(expected)}, makes {_listed(map(str, made))}")
    for name, index, count, cache in (("q", 0, heads, 3), ("k", 1, kv_heads, 3), ("v", 2, kv_heads, 4)):
        width, slots = _dim(node.inputs[index], 2), _dim(node.inputs[cache], 3)
        if width is not None and slots is not None:
            _require(
                width == count * slots, where, f"{name} is {width} wide, {count} heads of {slots} are {count * slots}"
            )


def _check_moe(node: ir.Node, where: str) -> None:
    """Check what the table cannot say: the activation, and that matrices and biases belong together."""
    attributes = {name: attribute.value for name, attribute in node.attributes.items()}
    known = _listed(moe.ACTIVATIONS)
    activation, gated = attributes["activation"], attributes["gated"]
    _require(activation in moe.ACTIVATIONS, where, f"activation {activation!r} is unknown; known are {known}")
    _require(gated in (0, 1) and attributes["interleaved"] in (0, gated), where, "gated, interleaved must be 0 or 1")
    _require(attributes["limit"] >= 0, where, "limit must not be negative")
    _require(gated == 1 or not (attributes["limit"] or attributes["beta"]), where, "limit and beta are of gates")
    inputs = [*node.inputs, None, None]
    x, ids, weights, up, down, up_bias, down_bias = inputs[:7]
    _require((up_bias is None) == (down_bias is None), where, "one of two biases is missing")
    inner = _dim(down, 1)
    wide = None if inner is None else inner * (1 + gated)
    for name, value, axes in (
        ("x", x, {-1: _dim(up, 1)}),
        ("expert_weights", weights, {-1: _dim(ids, -1)}),
        ("up", up, {2: wide}),
        ("down", down, {0: _dim(up, 0), 2: _dim(up, 1)}),
        ("up_bias", up_bias, {0: _dim(up, 0), 1: wide}),
        ("down_bias", down_bias, {0: _dim(up, 0), 1: _dim(up, 1)}),
    ):
        for axis, size in axes.items():
            held = _dim(value, axis)
            fits = held is None or size is None or held == size
            _require(fits, where, f"{name} has size {held} along axis {axis}, must have {size}")


def _check_state(node: ir.Node, where: str, part: str, index: int) -> None:
    """Check what the table cannot say: the state is the layer's own, heads and channels fit it."""
    attributes = {name: attribute.value for name, attribute in node.attributes.items()}
    layer = attributes["layer"]
    expected = [interface.past_part(layer, part), interface.PAST_LENGTHS, interface.LENGTHS]
    names = [value.name if value is not None else None for value in node.inputs[index : index + 3]]
    reads = _listed(map(str, names))
    _require(names == expected, where, f"layer {layer} must read {_listed(expected)}, reads {reads}")
    made = [value.name for value in node.outputs[1:]]
    expected = [interface.present_part(layer, part)]
    _require(made == expected, where, f"layer {layer} must make {_listed(expected)}, makes {_listed(map(str, made))}")
    if part == "conv":
        activation = attributes["activation"]
        _require(activation in ACTIVATIONS, where, f"activation is {activation!r}, must be {_listed(ACTIVATIONS)}")
        weight, state, x = (g.dims(value) if value else None for value in (node.inputs[i] for i in (1, 2, 0)))
        if weight and state and x and isinstance(weight[2], int):
            fits = weight[1] == 1 and state[1:] == (weight[2] - 1, weight[0]) and x[2] == weight[0]
            _require(fits, where, f"x {_shape(x)} and state {_shape(state)} do not fit a kernel {_shape(weight)}")
        return
    few, past = attributes["num_heads"], node.inputs[index]
    state = None if past is None else g.dims(past)
    heads, width, value_width = (dim if isinstance(dim, int) else 0 for dim in (state or (0, 0, 0, 0))[1:])
    if not (heads and width and value_width):
        return
    _require(0 < few <= heads and heads % few == 0, where, f"{few} heads of keys cannot serve {heads} of values")
    widths = (few * width, few * width, heads * value_width, heads, heads)
    for name, value, wanted in zip(("q", "k", "v", "decay", "beta"), node.inputs, widths, strict=False):
        found = _dim(value, 2)
        _require(found in (None, wanted), where, f"{name} is {found} wide, must be {wanted} for {_shape(state)}")


def _check_value(
    value: ir.Value, where: str, dtypes: frozenset[ir.DataType], ranks: frozenset[int], *, typed: bool
) -> None:
    """Check dtype and rank, as far as they are known; `typed`: they must be."""
    dims = g.dims(value)
    _require(not typed or (value.dtype is not None and dims is not None), where, "has no dtype or no shape")
    if value.dtype is not None:
        allowed = _listed(dtype.name for dtype in sorted(dtypes))
        _require(value.dtype in dtypes, where, f"is {value.dtype.name}, must be one of {allowed}")
    if dims is not None and ranks:
        wanted = " or ".join(map(str, sorted(ranks)))
        _require(len(dims) in ranks, where, f"has shape {_shape(dims)}, must have rank {wanted}")


def _dim(value: ir.Value | None, axis: int) -> int | None:
    dims = None if value is None else g.dims(value)
    dim = None if dims is None else dims[axis]
    return dim if isinstance(dim, int) else None


def _without_slots(cache: ir.Value) -> tuple[int | str | None, ...] | None:
    """Leave the slots, which may grow, out of the shape of a cache."""
    dims = g.dims(cache)
    return None if dims is None else (*dims[:2], *dims[3:])


def _shape(dims: Iterable[int | str | None] | None) -> str:
    return (
        "of unknown rank" if dims is None else "[" + ", ".join("?" if dim is None else str(dim) for dim in dims) + "]"
    )


def _listed(names: Iterable[str]) -> str:
    return ", ".join(name or "ai.onnx" for name in names)


def attention(
    q: NDArray[np.float32],
    k: NDArray[np.float32],
    v: NDArray[np.float32],
    past_key: NDArray[np.float32],
    past_value: NDArray[np.float32],
    past_lengths: NDArray[np.int32],
    sinks: NDArray[np.float32] | None = None,
    alibi_slopes: NDArray[np.float32] | None = None,
    *,
    num_heads: int,
    kv_num_heads: int,
    scale: float,
    softcap: float,
    window: int,
) -> tuple[NDArray[np.float32], NDArray[np.float32], NDArray[np.float32]]:
    """Compute `llmforge::Attention` query by query, as docs/dialect.md defines it; the reference of tests.

    q [B, S, num_heads·D], k [B, S, kv_num_heads·D], v [B, S, kv_num_heads·Dv], caches [B, kv_num_heads, C, D or Dv],
    past_lengths int32 [B], sinks and alibi_slopes [num_heads] → y [B, S, num_heads·Dv], present_key, present_value.
    """
    batch, sequence, _ = q.shape
    present_key, present_value = past_key.copy(), past_value.copy()
    queries = q.reshape(batch, sequence, num_heads, -1)
    y = np.zeros((batch, sequence, num_heads, v.shape[2] // kv_num_heads), np.float32)
    for b in range(batch):
        for s in range(sequence):
            present_key[b, :, past_lengths[b] + s] = k[b, s].reshape(kv_num_heads, -1)
            present_value[b, :, past_lengths[b] + s] = v[b, s].reshape(kv_num_heads, -1)
        for s in range(sequence):
            last = past_lengths[b] + s
            seen = slice(max(0, last + 1 - window) if window else 0, last + 1)
            for h in range(num_heads):
                kv = h // (num_heads // kv_num_heads)
                scores = scale * (present_key[b, kv, seen].astype(np.float64) @ queries[b, s, h])
                if softcap:
                    scores = softcap * np.tanh(scores / softcap)
                if alibi_slopes is not None:
                    scores = scores + float(alibi_slopes[h]) * (np.arange(seen.start, seen.stop) - last)
                top = max(scores.max(), sinks[h]) if sinks is not None else scores.max()
                weights = np.exp(scores - top)
                total = weights.sum() + (np.exp(sinks[h] - top) if sinks is not None else 0)
                y[b, s, h] = (weights / total) @ present_value[b, kv, seen]
    return y.reshape(batch, sequence, -1), present_key, present_value
