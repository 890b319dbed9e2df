"""The canonical dialect (docs/dialect.md): its inputs and outputs, and its verifier.

What may stand between the frontend and an engine is said in `llmforge.ir.operators`: the canonical operators, what
passes write in their place, and pointwise arithmetic. `check` verifies a graph against it; `expand` writes `llmforge::`
operators as standard ONNX.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from llmforge.base.errors import VerificationError
from llmforge.ir import graph as g
from llmforge.ir import interface, operators
from llmforge.ir.expansion import expand
from llmforge.ir.operators.contrib import CACHE
from llmforge.ir.operators.record import FLOATS, FP32, I32, I64, OPSETS, Dtypes, Operator, Stage, listed, shown

__all__ = ["AttentionForm", "attention", "caches", "check", "expand"]

# Graph inputs and outputs: dtypes and rank by name; {layer} is the index of a cache.
INPUTS: Mapping[str, tuple[Dtypes, int]] = {
    interface.INPUT_IDS: (I64, 2),
    interface.INPUTS_EMBEDS: (FP32, 3),
    interface.HIDDEN_STATES: (FP32, 3),
    interface.DRAFT_STATES: (FP32, 3),
    interface.POSITION_IDS: (I64, 2),
    interface.PAST_LENGTHS: (I32, 1),
    interface.LENGTHS: (I32, 1),
    interface.TEXT_LENGTHS: (I64, 1),
    interface.SEQLENS_K: (I32, 1),
    interface.TOTAL_SEQUENCE_LENGTH: (I32, 0),
    interface.ATTENTION_MASK: (I64, 2),
    interface.ADAPTER_IDS: (I64, 1),
    interface.LOGITS_ROWS: (I64, 1),
}
ENCODER_INPUTS: Mapping[str, tuple[Dtypes, int]] = {
    interface.INPUT_IDS: (I64, 2),
    interface.POSITION_IDS: (I64, 2),
    interface.TOKEN_TYPE_IDS: (I64, 2),
    interface.SEQUENCE_STARTS: (I32, 1),
}
RANKS = {"key": 4, "value": 4, "latent": 4, "conv": 3, "recurrent": 4}  # of the parts of a cache


def check(model: ir.Model) -> None:
    """Verify that `model` is a well-formed graph of the dialect.

    Raises:
        VerificationError: it is not; the message names the node or value, and the reason.
    """
    _check_opsets(model)
    _check_names(model.graph)
    _check_initializers(model.graph)
    _check_interface(model)
    defined = {id(value) for value in (*model.graph.inputs, *model.graph.initializers.values())}
    own_attention = interface.FALLBACK in model.metadata_props
    for node in model.graph:
        _check_node(node, defined, own_attention=own_attention)
        defined |= {id(value) for value in node.outputs}
    for value in model.graph.outputs:
        _require(id(value) in defined, f"output {value.name!r}", "no node of the graph makes it")


def caches(model: ir.Model) -> dict[int, set[str]]:
    """List the parts of each layer's cache: key, value, latent, conv, recurrent."""
    found: dict[int, set[str]] = {}
    for value in model.graph.inputs:
        if past := interface.PAST.fullmatch(str(value.name)):
            found.setdefault(int(past[1]), set()).add(past[2])
    return found


def _require(condition: bool, where: str, reason: str) -> None:
    if not condition:
        raise VerificationError(f"{where}: {reason}")


def _check_opsets(model: ir.Model) -> None:
    used = {node.domain for node in model.graph}
    for domain, version in model.opset_imports.items():
        where = f"opset import {domain or 'ai.onnx'!r}"
        _require(domain in OPSETS, where, f"the domain is unknown; known are {listed(OPSETS)}")
        _require(version == OPSETS[domain], where, f"version is {version}, must be {OPSETS[domain]}")
    for domain in sorted(used - set(model.opset_imports)):
        _require(False, f"opset import {domain or 'ai.onnx'!r}", "nodes use the domain, and it is not imported")
    _require(not model.functions, "functions", "the dialect has none")


def _check_names(graph: ir.Graph) -> None:
    values: dict[str, ir.Value] = {}
    made = (output for node in graph for output in node.outputs)
    for value in (*graph.inputs, *graph.initializers.values(), *made):
        if not value.name:
            _require(not value.uses() and value.producer() is not None, "a value", "has no name")
            continue  # an optional output that is not wanted
        _require(values.setdefault(value.name, value) is value, f"value {value.name!r}", "two values have this name")
    nodes: set[str | None] = set()
    for node in graph:
        _require(bool(node.name), f"a node {node.op_type}", "has no name")
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
            _require(dims == held, where, f"is declared {shown(dims)}, its tensor is {shown(held)}")


def _check_interface(model: ir.Model) -> None:
    graph = model.graph
    inputs = {str(value.name): value for value in graph.inputs}
    outputs = {str(value.name): value for value in graph.outputs}
    _require(len(inputs) == len(graph.inputs), "graph inputs", "one is listed twice")
    _require(len(outputs) == len(graph.outputs), "graph outputs", "one is listed twice")
    if interface.encodes(model):
        _check_encoder(inputs, outputs)
        return
    masked = interface.ATTENTION_MASK in inputs  # for a runtime of others, which may want all rows
    for name in (interface.INPUT_IDS, interface.LOGITS_ROWS):
        _require(name in inputs or (masked and name == interface.LOGITS_ROWS), f"graph input {name!r}", "is missing")
    for name in (interface.LOGITS_ROWS, interface.INPUTS_EMBEDS):
        if (optional := inputs.get(name)) is not None:
            _require(optional.is_initializer(), f"graph input {name!r}", "has no default (an initializer)")
    for name, value in inputs.items():
        where = f"graph input {name!r}"
        if past := interface.PAST.fullmatch(name):
            _check_value(value, where, CACHE, frozenset({RANKS[past[2]]}), typed=True)
            present = outputs.get(interface.present_of(name))
            if present is None:
                raise VerificationError(f"{where}: has no output {interface.present_of(name)!r}")
            _require(present.dtype == value.dtype, where, f"is {value.dtype}, its present is {present.dtype}")
            same = _without_slots(present) == _without_slots(value) if masked else g.dims(present) == g.dims(value)
            _require(same, where, f"is {shown(g.dims(value))}, its present is {shown(g.dims(present))}")
        else:
            _require(name in INPUTS, where, f"is unknown; known are {listed(INPUTS)} and the caches")
            dtypes, rank = INPUTS[name]
            _check_value(value, where, dtypes, frozenset({rank}), typed=True)
    held, gone = caches(model), g.dropped_layers(model)
    places = (layer for layer in itertools.count() if layer not in gone)
    for position, (layer, parts) in zip(places, sorted(held.items()), strict=False):
        _require(layer == position, f"cache of layer {layer}", f"there is none of layer {position}")
        both = len({"key", "value"} & parts) != 1
        _require(both, f"cache of layer {layer}", f"has only its {listed(sorted(parts))}")
    _require(interface.LOGITS in outputs, f"graph output {interface.LOGITS!r}", "is missing")
    _check_value(outputs[interface.LOGITS], f"graph output {interface.LOGITS!r}", FLOATS, frozenset({3}), typed=True)
    known = {interface.LOGITS} | {interface.present_of(name) for name in inputs if interface.PAST.fullmatch(name)}
    states = {interface.HIDDEN_STATES, interface.NEXT_STATES}
    for name, value in outputs.items():
        where = f"graph output {name!r}"
        _require(name in known | states, where, "is unknown: logits, states, and one present for every past")
        if name in states:
            _check_value(value, where, FP32, frozenset({3}), typed=True)


def _check_encoder(inputs: Mapping[str, ir.Value], outputs: Mapping[str, ir.Value]) -> None:
    """Check inputs and outputs of a graph that reads whole sequences."""
    _require(interface.INPUT_IDS in inputs, f"graph input {interface.INPUT_IDS!r}", "is missing")
    for name, value in inputs.items():
        where = f"graph input {name!r}"
        _require(
            name in ENCODER_INPUTS, where, f"is unknown; an encoder's are {listed(ENCODER_INPUTS)}: it has no cache"
        )
        dtypes, rank = ENCODER_INPUTS[name]
        _check_value(value, where, dtypes, frozenset({rank}), typed=True)
    one = len(outputs) == 1 and not outputs.keys() - {interface.EMBEDDINGS, interface.LOGITS}
    _require(one, "graph outputs", f"are {listed(outputs)}; an encoder has one, embeddings or logits")
    for name, value in outputs.items():
        _check_value(value, f"graph output {name!r}", FLOATS, frozenset({2}), typed=True)


def _check_node(node: ir.Node, defined: set[int], *, own_attention: bool) -> None:
    where, view = f"node {node.name!r}", operators.view(node)
    known = {Stage.DIALECT, Stage.OWN_ATTENTION} if own_attention else {Stage.DIALECT}
    if not view.op_type or view.stage not in known:
        raise VerificationError(f"{where}: operator {operators.qualified(node)} is not in the dialect")
    _require(node.overload == "", where, "has an overload")
    most = len(view.inputs)
    _require(view.variadic or len(node.inputs) <= most, where, f"has {len(node.inputs)} inputs, at most {most}")
    for index in range(max(len(node.inputs), most)):
        expected, value = view.inputs[min(index, most - 1)], g.operand(node, index)
        if value is None:
            _require(expected.optional, where, f"input {expected.name!r} is missing")
            continue
        _require(id(value) in defined, where, f"reads {value.name!r} before it is made, or from another graph")
        _check_value(value, f"{where}: input {expected.name!r}", expected.dtypes, expected.ranks, typed=False)
    outputs = len(node.outputs)
    _require(1 <= outputs <= (view.most_outputs or len(view.outputs)), where, f"has {outputs} outputs")
    _check_attributes(view, where)
    view.check()


def _check_attributes(view: Operator, where: str) -> None:
    given = view.node.attributes
    for name, attribute in given.items():
        _require(name in view.attributes, where, f"attribute {name!r} is unknown; known are {listed(view.attributes)}")
        wanted, held = view.attributes[name].type, attribute.type
        _require(held == wanted, where, f"attribute {name!r} is {held.name}, must be {wanted.name.lower()}")
    for name, described in view.attributes.items():
        _require(not described.stated or name in given, where, f"attribute {name!r} is missing")
        if described.fixed and name in given:
            held = given[name].value
            _require(held == described.default, where, f"attribute {name!r} is {held}, must be {described.default}")


def _check_value(value: ir.Value, where: str, dtypes: Dtypes, ranks: frozenset[int], *, typed: bool) -> None:
    """Check dtype and rank, as far as they are known; `typed`: they must be."""
    dims = g.dims(value)
    _require(not typed or (value.dtype is not None and dims is not None), where, "has no dtype or no shape")
    if value.dtype is not None:
        allowed = listed(dtype.name for dtype in sorted(dtypes))
        _require(value.dtype in dtypes, where, f"is {value.dtype.name}, must be one of {allowed}")
    if dims is not None and ranks:
        wanted = " or ".join(map(str, sorted(ranks)))
        _require(len(dims) in ranks, where, f"has shape {shown(dims)}, must have rank {wanted}")


def _without_slots(cache: ir.Value) -> tuple[int | str | None, ...] | None:
    """Leave the slots, which may grow, out of the shape of a cache."""
    dims = g.dims(cache)
    return None if dims is None else (*dims[:2], *dims[3:])


@dataclass(frozen=True, eq=False)
class AttentionForm:
    """Attributes of `llmforge::Attention`, and its slopes of ALiBi, [num_heads]."""

    num_heads: int
    kv_num_heads: int
    scale: float
    softcap: float = 0.0
    window: int = 0
    chunk: int = 0
    alibi_slopes: NDArray[np.float32] | None = None


def attention(
    q: NDArray[np.float32],
    k: NDArray[np.float32],
    v: NDArray[np.float32],
    past_key: NDArray[np.float32],
    past_value: NDArray[np.float32],
    past_lengths: NDArray[np.int32],
    sinks: NDArray[np.float32] | None = None,
    *,
    form: AttentionForm,
) -> tuple[NDArray[np.float32], NDArray[np.float32], NDArray[np.float32]]:
    """Compute `llmforge::Attention` query by query, as docs/dialect.md defines it; the reference of tests.

    q [B, S, num_heads·D], k [B, S, kv_num_heads·D], v [B, S, kv_num_heads·Dv], caches [B, kv_num_heads, C, D or Dv],
    past_lengths int32 [B], sinks [num_heads] → y [B, S, num_heads·Dv], present_key, present_value.
    """
    batch, sequence, _ = q.shape
    num_heads, kv_num_heads = form.num_heads, form.kv_num_heads
    present_key, present_value = past_key.copy(), past_value.copy()
    queries = q.reshape(batch, sequence, num_heads, -1)
    y = np.zeros((batch, sequence, num_heads, v.shape[2] // kv_num_heads), np.float32)
    for b in range(batch):
        for s in range(sequence):
            present_key[b, :, past_lengths[b] + s] = k[b, s].reshape(kv_num_heads, -1)
            present_value[b, :, past_lengths[b] + s] = v[b, s].reshape(kv_num_heads, -1)
        for s in range(sequence):
            last = past_lengths[b] + s
            first = max(0, last + 1 - form.window) if form.window else 0
            seen = slice(max(first, last - last % form.chunk) if form.chunk else first, last + 1)
            for h in range(num_heads):
                kv = h // (num_heads // kv_num_heads)
                scores = form.scale * (present_key[b, kv, seen].astype(np.float64) @ queries[b, s, h])
                if form.softcap:
                    scores = form.softcap * np.tanh(scores / form.softcap)
                if form.alibi_slopes is not None:
                    scores = scores + float(form.alibi_slopes[h]) * (np.arange(seen.start, seen.stop) - last)
                top = max(scores.max(), sinks[h]) if sinks is not None else scores.max()
                weights = np.exp(scores - top)
                total = weights.sum() + (np.exp(sinks[h] - top) if sinks is not None else 0)
                y[b, s, h] = (weights / total) @ present_value[b, kv, seen]
    return y.reshape(batch, sequence, -1), present_key, present_value
