"""Heads, channels and layers of a canonical graph: which can be taken out, and how.

`find` reads from the graph what belongs together, so that calibration need not know any architecture; `Surgery` takes
out what calibration chose.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from llmforge.base.errors import UnsupportedError
from llmforge.ir import graph, interface, operators
from llmforge.ir.derived import Derived, computed
from llmforge.ir.operators.canonical import Attention, MoE
from llmforge.ir.operators.standard import (
    Add,
    Gather,
    LayerNormalization,
    MatMul,
    Reshape,
    RMSNormalization,
    RotaryEmbedding,
)
from llmforge.quantization.statistics import Demand, PruningDemand
from llmforge.quantization.structure import (
    Float32,
    MlpChannels,
    PrunableHeads,
    PrunableLayer,
    PrunedStructure,
    Structure,
    columns,
)
from llmforge.rewrite import linear
from llmforge.rewrite.linear import LinearLayer
from llmforge.rewrite.patterns import NotApplicable


@dataclass(frozen=True, eq=False)
class _Path:
    """How attention gets queries, keys or values: from a linear layer, through nodes that know how many heads."""

    layer: LinearLayer
    between: tuple[ir.Node, ...]  # from attention up


@dataclass(frozen=True, eq=False)
class _PrunableAttention:
    node: Attention
    paths: Mapping[str, _Path]  # query, key, value
    output: LinearLayer


@dataclass(frozen=True, eq=False)
class _Mlp:
    inner: tuple[LinearLayer, ...]
    between: tuple[ir.Node, ...]
    output: LinearLayer


def find(model: ir.Model) -> Structure:
    """Find the decoder layers of `model` and what can be taken out of them, in front of passes that pack weights."""
    blocks = []
    sizes = {name: value for value in _weights(model) for name in graph.sources(value)}
    for attention in Attention.all(model):
        reasons: list[str] = []
        heads = channels = None
        try:
            output = _output(attention)
        except NotApplicable as reason:
            blocks.append(PrunableLayer(attention.layer, f"{attention.name}.", 0, None, None, (str(reason),)))
            continue
        [name] = graph.sources(output.weight)
        prefix = _prefix(name, attention.layer)
        try:
            heads = _heads(attention, _attention(attention))
        except NotApplicable as reason:
            reasons.append(f"heads: {reason}")
        try:
            channels = _channels(_mlp(model, prefix))
        except NotApplicable as reason:
            reasons.append(f"channels: {reason}")
        own = {id(value): value for name, value in sizes.items() if name.startswith(prefix)}
        parameters = sum(int(np.prod(graph.static(value))) for value in own.values())
        blocks.append(PrunableLayer(attention.layer, prefix, parameters, heads, channels, tuple(reasons)))
    blocks.sort(key=lambda block: block.index)
    try:
        _streams(model, blocks)
        fixed = ""
    except NotApplicable as reason:
        fixed = str(reason)
    return Structure(tuple(blocks), fixed)


def _weights(model: ir.Model) -> list[ir.Value]:
    return [value for value in model.graph.initializers.values() if len(graph.dims(value) or ()) > 1]


def _prefix(name: str, layer: int) -> str:
    """Return what the names of all parameters of a layer begin with."""
    found = re.match(rf"(.*?\.{layer}\.)", name)
    if found is None:
        raise NotApplicable(f"{name} does not say that it is of layer {layer}")
    return found[1]


def _linear(value: ir.Value, what: str) -> LinearLayer:
    layer = linear.of(value)
    if layer is None:
        made = value.producer()
        raise NotApplicable(f"{what} comes from {made.op_type if made else 'an input'}, not from a linear layer")
    if len(graph.sources(layer.weight)) != 1:
        raise NotApplicable(f"{what} comes from {layer.weight.name}, which is packed; put prune-structure in front")
    for own in (layer.weight, layer.bias):
        if own is not None and (len(own.uses()) > 1 or own.is_graph_output()):
            raise NotApplicable(f"{own.name} has other readers")
    return layer


def _output(attention: Attention) -> LinearLayer:
    """Find the linear layer that alone reads what attention makes."""
    product = MatMul.only_reader(attention.y)
    if product is None or not graph.is_constant(product.w) or len(graph.sources(product.w)) != 1:
        raise NotApplicable(f"no linear layer alone reads what {attention.name} makes")
    return LinearLayer(product.node, product.w)


def _attention(attention: Attention) -> _PrunableAttention:
    for past in (attention.past_key, attention.past_value):
        if not past.is_graph_input() or len(past.uses()) > 1:
            raise NotApplicable(f"{past.name} is read by others, too")
    for present in attention.node.outputs[1:]:
        if present.uses():
            raise NotApplicable(f"other layers read {present.name}")
    paths = {
        role: _path(value, role) for role, value in zip(("query", "key", "value"), attention.projections, strict=True)
    }
    return _PrunableAttention(attention, paths, _output(attention))


def _path(value: ir.Value, role: str) -> _Path:
    between: list[ir.Node] = []
    while True:
        if len(value.uses()) != 1:
            raise NotApplicable(f"its {role} has other readers")
        if (rotary := RotaryEmbedding.made(value)) is not None:
            between.append(rotary.node)
            value = rotary.x
        elif (norm := RMSNormalization.made(value)) is not None:
            if len(graph.dims(value) or ()) != 4:
                raise NotApplicable(f"all heads of its {role} are normalized together")
            between.append(norm.node)
            value = norm.x
        elif (shaped := Reshape.made(value)) is not None and graph.is_constant(shaped.shape):
            between.append(shaped.node)
            value = shaped.x
        else:
            return _Path(_linear(value, role), tuple(between))


def _heads(attention: Attention, found: _PrunableAttention) -> PrunableHeads:
    layers = {role: path.layer for role, path in found.paths.items()}
    count, kv_count = attention.num_heads, attention.kv_num_heads
    if kv_count < 2:
        raise NotApplicable("it has one KV head")
    names = {role: graph.sources(layer.weight)[0] for role, layer in layers.items()}
    matrices = [*(layer.weight for layer in layers.values()), found.output.weight]
    whole = sum(int(np.prod(graph.static(value))) for value in matrices)
    dim, value_dim = graph.width(attention.past_key), graph.width(attention.past_value)
    [output] = graph.sources(found.output.weight)
    return PrunableHeads(
        **names,
        output=output,
        count=count,
        kv_count=kv_count,
        dim=dim,
        value_dim=value_dim,
        unit_parameters=whole // kv_count,
    )


def _mlp(model: ir.Model, prefix: str) -> _Mlp:
    """Find the MLP of the layer `prefix`: the one matrix that reads what others make channel by channel."""
    found, reasons = [], []
    for product in MatMul.all(model):
        names = graph.sources(product.w) if graph.is_constant(product.w) else []
        if len(names) != 1 or not names[0].startswith(prefix) or product.x.producer() is None:
            continue
        node = graph.producer(product.x)
        if not operators.view(node).pointwise:
            continue
        try:
            found.append(_cone(product))
        except NotApplicable as reason:
            reasons.append(str(reason))
    if len(found) != 1:
        experts = any(
            str(value.name).startswith(prefix)
            for layer in MoE.all(model)
            for value in layer.node.inputs
            if value is not None
        )
        why = (
            "it has experts, which are not pruned" if experts else "; ".join(reasons) or f"{len(found)} MLPs are found"
        )
        raise NotApplicable(why)
    return found[0]


def _cone(product: MatMul) -> _Mlp:
    """Walk up from what `product` reads to the linear layers that make it."""
    width = graph.width(product.x)
    inner: dict[ir.Node, LinearLayer] = {}
    between: dict[ir.Node, None] = {}
    inside: set[ir.Node] = {product.node}
    waiting = [product.x]
    while waiting:
        value = waiting.pop()
        if graph.is_constant(value):
            if graph.static(value) not in ((), (1,)):
                raise NotApplicable(f"{value.name} belongs to its channels")
            continue
        layer = linear.of(value)
        if layer is not None:
            if layer.matmul not in inner:
                inner[layer.matmul] = _linear(value, "a channel")
            continue
        node = value.producer()
        if node is None or not operators.view(node).pointwise:
            raise NotApplicable(
                f"{value.name} is made of all channels together, by {node.op_type if node else 'an input'}"
            )
        between[node] = None
        waiting.extend(each for each in node.inputs if each is not None)
    inside |= {*between, *inner, *(layer.add for layer in inner.values() if layer.add is not None)}
    made = [*(layer.output for layer in inner.values()), *(out for node in between for out in node.outputs)]
    for value in made:
        if value.is_graph_output() or any(reader not in inside for reader, _ in value.uses()):
            raise NotApplicable(f"{value.name} has other readers")
        if graph.width(value) != width:
            raise NotApplicable(f"{value.name} is {graph.width(value)} wide, {product.name} reads {width} channels")
    if len({layer.input for layer in inner.values()}) != 1:
        raise NotApplicable("its matrices read different tensors")
    return _Mlp(tuple(inner.values()), tuple(between), LinearLayer(product.node, product.w))


def _channels(mlp: _Mlp) -> MlpChannels:
    names = tuple(graph.sources(layer.weight)[0] for layer in mlp.inner)
    [output] = graph.sources(mlp.output.weight)
    width = graph.static(mlp.output.weight)[0]
    whole = sum(int(np.prod(graph.static(layer.weight))) for layer in (*mlp.inner, mlp.output))
    return MlpChannels(names, output, width, whole // width)


def _streams(model: ir.Model, blocks: Sequence[PrunableLayer]) -> list[tuple[ir.Value, ir.Value]]:
    """Return the hidden states in front of each layer and behind it; raises where layers are not one behind the other.

    A layer adds what attention makes to its hidden states, and to that sum what its MLP makes.
    """
    by_layer = {attention.layer: attention for attention in Attention.all(model)}
    found: list[tuple[ir.Value, ir.Value]] = []
    for block in blocks:
        value = by_layer[block.index].y
        while (add := Add.only_reader(value)) is None or _is_constant_sum(add):
            reader = graph.only_reader(value)
            if reader is None or not operators.is_a(reader, MatMul, RMSNormalization, Add):
                raise NotApplicable(f"what attention of layer {block.index} makes is not added to hidden states")
            value = reader.outputs[0]
        before = next(other for own, other in add.either_way if own is value)
        total = add.output
        sums = [node for node, _ in total.uses() if Add.matches(node)]
        if len(sums) != 1 or len(total.uses()) != 2:
            raise NotApplicable(f"layer {block.index} does not add its MLP to what attention has added to")
        if found and found[-1][1] is not before:
            raise NotApplicable(f"layer {block.index} does not read what layer {blocks[len(found) - 1].index} makes")
        found.append((before, sums[0].outputs[0]))
    if len({block.index for block in blocks}) != len(blocks) or [b.index for b in blocks] != [*range(len(blocks))]:
        raise NotApplicable("there are layers without attention")
    for before, after in found:
        readers = [reader for reader, _ in after.uses()]
        others = [node for node in readers if not operators.is_a(node, RMSNormalization, LayerNormalization, Add)]
        if before.is_graph_output() or after.is_graph_output() or others:
            raise NotApplicable(f"{after.name} is read by {', '.join(sorted({node.op_type for node in readers}))}")
    return found


def _is_constant_sum(add: Add) -> bool:
    return any(graph.is_constant(value) for pair in add.either_way for value in pair)


@dataclass(eq=False)
class Surgery:
    """Takes out of `model` what is not among `kept`; `outputs` has the matrices [N, kept] that make up for it."""

    model: ir.Model
    kept: PrunedStructure
    outputs: Mapping[str, Float32]

    def run(self) -> list[tuple[str, str]]:
        """Do it; return the names of nodes that were there, and what became of each.

        Raises:
            UnsupportedError: the graph is not the one that was calibrated.
        """
        structure = find(self.model)
        attentions = {attention.layer: attention for attention in Attention.all(self.model)}
        done = []
        try:
            streams = _streams(self.model, structure.blocks) if self.kept.dropped else []
            for block in structure.blocks:
                if block.index in self.kept.dropped:
                    continue
                if (heads := self.kept.of_heads(block.index)) is not None:
                    done.append(self._heads(_attention(attentions[block.index]), heads))
                if (channels := self.kept.of_channels(block.index)) is not None:
                    done.append(self._channels(_mlp(self.model, block.prefix), channels))
            for index in sorted(self.kept.dropped, reverse=True):
                done.append((str(attentions[index].name), f"layer {index} dropped"))
                before, after = streams[index]
                graph.replace_uses(after, before)
        except NotApplicable as reason:
            raise UnsupportedError(
                f"prune-structure: the graph is not the one that was calibrated: {reason}",
                hint="put prune-structure in front of all other passes",
            ) from reason
        self._drop_caches()
        described = {"heads": dict(self.kept.heads), "dropped": list(self.kept.dropped)}
        self.model.metadata_props[graph.PRUNED] = json.dumps(described)
        graph.drop_unused(self.model)
        return done

    def _drop_caches(self) -> None:
        names = {interface.present_part(layer, part) for layer in self.kept.dropped for part in ("key", "value")}
        outputs = self.model.graph.outputs
        for index in reversed(range(len(outputs))):
            if outputs[index].name in names:
                del outputs[index]

    def _heads(self, found: _PrunableAttention, kept: Sequence[int]) -> tuple[str, str]:
        attention = found.node
        count, kv_count, many = attention.num_heads, attention.kv_num_heads, len(kept)
        shared = count // kv_count
        queries = columns(kept, shared)
        dim, value_dim = graph.width(attention.past_key), graph.width(attention.past_value)
        for role, which, width, was in (
            ("query", queries, dim, count),
            ("key", np.asarray(kept), dim, kv_count),
            ("value", np.asarray(kept), value_dim, kv_count),
        ):
            path = found.paths[role]
            self._select(path.layer, columns(which.tolist(), width))
            for node in path.between:
                self._fewer(node, was, len(which), width)
        for field in Attention.inputs:
            if field.heads == 0 and (value := attention.operand(field)) is not None:
                attention.node.replace_input_with(field.index, self._derived(value, queries, 0))
        attention.num_heads, attention.kv_num_heads = many * shared, many
        for held in (attention.past_key, attention.past_value, *attention.node.outputs[1:]):
            assert held.shape is not None
            held.shape = ir.Shape([held.shape[0], many, *held.shape[2:]])
        _narrow(attention.y, many * shared * value_dim)
        self._compensated(found.output)
        return str(attention.name), f"{many} of {kv_count} KV heads, {many * shared} of {count} query heads"

    def _fewer(self, node: ir.Node, was: int, now: int, width: int) -> None:
        """Let a node between a projection and attention have fewer heads."""
        if (rotary := RotaryEmbedding.of(node)) is not None and rotary.num_heads:
            rotary.num_heads = now
        if Reshape.matches(node):
            shape = Reshape(node).shape
            sizes = graph.tensor(shape).numpy().tolist()
            other = [*sizes]
            if len(sizes) == 4 and sizes[2] == was:
                other[2] = now
            elif sizes[-1] == was * width:
                other[-1] = now * width
            if other != sizes:
                made = graph.initializer(self.model, f"shape_{'_'.join(map(str, other))}", np.array(other, np.int64))
                node.replace_input_with(1, made)
        value = node.outputs[0]
        assert value.shape is not None
        dims = list(value.shape)
        if len(dims) == 4:
            dims[2] = now
        else:
            dims[-1] = now * width
        value.shape = ir.Shape(dims)

    def _channels(self, mlp: _Mlp, kept: Sequence[int]) -> tuple[str, str]:
        which = np.asarray(kept, np.intp)
        was = graph.static(mlp.output.weight)[0]
        for layer in mlp.inner:
            self._select(layer, which)
        for node in mlp.between:
            for value in node.outputs:
                _narrow(value, len(which))
        self._compensated(mlp.output)
        return str(mlp.output.matmul.name), f"{len(which)} of {was} channels"

    def _select(self, layer: LinearLayer, which: NDArray[np.intp]) -> None:
        """Keep some outputs of a linear layer."""
        layer.matmul.replace_input_with(1, self._derived(layer.weight, which, 1))
        _narrow(layer.matmul.outputs[0], len(which))
        if layer.add is not None and layer.bias is not None:
            layer.add.replace_input_with(list(layer.add.inputs).index(layer.bias), self._derived(layer.bias, which, 0))
            _narrow(layer.add.outputs[0], len(which))

    def _derived(self, value: ir.Value, which: NDArray[np.intp], axis: int) -> ir.Value:
        tensor = graph.tensor(value)
        shape = list(graph.static(value))
        shape[axis] = len(which)
        name = f"{value.name}.pruned"
        made = Derived(_taken(tuple(which.tolist()), axis), [tensor], tensor.dtype, ir.Shape(shape), name)
        return graph.initializer(self.model, name, made, graph.sources(value))

    def _compensated(self, layer: LinearLayer) -> None:
        """Put the matrix that makes up for what is gone in the place of a layer's weight."""
        [parameter] = graph.sources(layer.weight)
        outputs, name = self.outputs, f"{layer.weight.name}.pruned"
        shape = outputs[parameter].shape[::-1]
        lazy = computed(lambda: np.ascontiguousarray(outputs[parameter].T), ir.DataType.FLOAT, shape, name)
        layer.matmul.replace_input_with(1, graph.initializer(self.model, name, lazy, [parameter]))


def _narrow(value: ir.Value, width: int) -> None:
    if value.shape is not None:
        value.shape = ir.Shape([*value.shape[:-1], width])


@cache
def _taken(which: tuple[int, ...], axis: int) -> Callable[[Sequence[NDArray[Any]]], NDArray[Any]]:
    """Return what takes `which` along an axis; one object for equal arguments."""

    def take(matrices: Sequence[NDArray[Any]]) -> NDArray[Any]:
        return np.take(matrices[0], which, axis=axis)

    return take


def kept_heads(model: ir.Model) -> dict[str, tuple[int, ...]]:
    """Return the KV heads that caches of a pruned graph hold, by the name of the cache input."""
    kept = graph.kept_heads(model)
    return {interface.past_part(layer, part): own for layer, own in kept.items() for part in ("key", "value")}


def dropped_caches(model: ir.Model) -> set[str]:
    """Name the cache inputs and outputs of the layers that a pruned graph lacks."""
    pasts = {interface.past_part(layer, part) for layer in graph.dropped_layers(model) for part in ("key", "value")}
    return pasts | {interface.present_of(past) for past in pasts}


def bound(demand: Demand, model: ir.Model) -> Demand:
    """Say to a demand for pruning what there is in `model`; others stay as they are."""
    if not isinstance(demand, PruningDemand):
        return demand
    return replace(demand, structure=find(model), read=_read(model))


def sample(model: ir.Model, demand: PruningDemand) -> tuple[PrunedStructure, dict[str, Float32]]:
    """Make up a choice, to see that the graph lets it: a KV head and a block of channels of each layer, or a layer."""
    structure, units = find(model), demand.units
    heads, channels, outputs = [], [], dict[str, Float32]()
    sizes = {name: graph.static(value) for value in _weights(model) for name in graph.sources(value)}
    for block in structure.blocks:
        if block.heads is not None and "heads" in units:
            own = block.heads
            heads.append((block.index, tuple(range(own.kv_count - 1))))
            shape = sizes[own.output][1], (own.kv_count - 1) * own.shared * own.value_dim
            outputs[own.output] = np.broadcast_to(np.float32(0), shape)
        if block.channels is not None and "channels" in units and block.channels.count > demand.together:
            left = block.channels.count - demand.together
            channels.append((block.index, tuple(range(left))))
            outputs[block.channels.output] = np.broadcast_to(np.float32(0), (sizes[block.channels.output][1], left))
    last = [block.index for block in structure.blocks[-1:]] if units == ("layers",) and not structure.fixed else []
    return PrunedStructure(tuple(last), tuple(heads), tuple(channels)), outputs


def _read(model: ir.Model) -> int:
    """Count the parameters that a decode step reads: all matrices but an embedding that no head shares."""
    total = 0
    for value in _weights(model):
        readers = [reader for reader, _ in value.uses()]
        lookups = [Gather.matches(node) and Gather(node).indices.name == interface.INPUT_IDS for node in readers]
        if graph.sources(value) and not all(lookups):
            total += int(np.prod(graph.static(value)))
    return total
