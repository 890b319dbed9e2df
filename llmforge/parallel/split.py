"""Split a decoder into one graph a rank, which compute together what the whole graph computes.

    q, k, v, gate, up   by columns: y_r = x·W[:, part r]                        (heads, inner features)
    o, down             by rows:    y   = AllReduce(Σ_r x_r·W[part r, :]) + b
    experts             by their inner width:  y = AllReduce(Σ_r MoE_r(x))
    head                by columns of the vocabulary:  logits = AllGather(x·W[:, part r])
    tied embedding      by its rows:  e = AllReduce(W_r[id] where the rank has it, else 0): exact

Each graph keeps the interface of the whole: inputs and outputs have the same names, caches hold the KV heads of the
rank [batch, kv_heads of the rank, capacity, head_dim], logits are whole on every rank. Two collectives a layer, one for
the head, one for a tied embedding. Weights are lazy slices of the whole graph's lazy weights: a rank reads its part.

`llmforge::AllReduce` and `llmforge::AllGather` (docs/dialect.md) stand where ranks meet; `docs/tensor-parallelism.md`
says which engines have them. One graph becomes several, so this is no pass: it comes after all passes, before the
lowering of each rank. Numerics: the sums of a row-divided product in another order, ROUNDING.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from llmforge.ir import graph, operators
from llmforge.ir.operators import canonical, standard
from llmforge.ir.operators.canonical import AllGather, AllReduce
from llmforge.ir.operators.contrib import ContribMoE, MatMulNBits, QMoE
from llmforge.ir.operators.record import CANONICAL, OPSETS, CachedAttention, Operator
from llmforge.parallel.partition import Partition, Ranges, nibbles, shard
from llmforge.parallel.shard_plan import ShardPlan, features, plan

RANK = "llmforge.rank"  # metadata_props key of a rank's graph: "1/4" is the second of four


@dataclass(frozen=True, eq=False)
class RankGraphs:
    """The graphs of all ranks."""

    ranks: tuple[ir.Model, ...]
    whole: Mapping[str, str]  # linear layers that every rank has, and why


def split(model: ir.Model, degree: int) -> RankGraphs:
    """Split `model`, canonical or fused, fp32 or half precision, which stays as it is.

    Raises:
        UnsupportedError: a width is no multiple of `degree`, or a layer cannot be divided; the message names the layer
            and the degrees that are allowed.
    """
    source = model.clone()
    made = plan(source, degree)
    if degree == 1:
        return RankGraphs((source,), made.whole)
    return RankGraphs(tuple(_RankGraph(source, made, rank).write() for rank in range(degree)), made.whole)


class _RankGraph:
    """Writes the graph of one rank."""

    def __init__(self, source: ir.Model, made: ShardPlan, rank: int) -> None:
        self.rank, self.degree = rank, made.degree
        self.model = source.clone()
        nodes = {node.name: node for node in self.model.graph}
        values = [*self.model.graph.inputs, *(value for node in self.model.graph for value in node.outputs)]
        named = {value.name: value for value in values}
        self.partitions = {named[value.name]: partition for value, partition in made.partitions.items()}
        self.columns, self.rows, self.experts = (
            {nodes[node.name]: partition for node, partition in each.items()}
            for each in (made.columns, made.rows, made.experts)
        )
        self.head = None if made.head is None else nodes[made.head.name]
        self.vocabulary: Ranges = () if made.head is None else made.columns[made.head].ranks[rank]
        self.embedding = None if made.embedding is None else nodes[made.embedding.name]
        self.shards: dict[str, tuple[int, Partition]] = {}  # initializers that hold a share

    def write(self) -> ir.Model:
        for node in list(self.model.graph):
            view = operators.view(node)
            if node is self.embedding:
                self._look_up(standard.Gather(node))
            if node in self.columns:
                self._columns(node)
            elif node in self.rows:
                self._rows(node)
            elif node in self.experts:
                self._experts(view)
            elif isinstance(view, CachedAttention):
                self._attention(view)
            elif isinstance(view, canonical.LatentAttention):
                self._latent_attention(view)
            elif any(value in self.partitions for value in node.outputs):
                self._between(view)
        for value, partition in self.partitions.items():
            self._resize(value, partition.axis, partition)
        self.model.metadata_props[RANK] = f"{self.rank}/{self.degree}"
        graph.drop_unused(self.model)
        return self.model

    # linear layers

    def _columns(self, node: ir.Node) -> None:
        partition, y = self.columns[node], node.outputs[0]
        if (quantized := MatMulNBits.of(node)) is not None:
            for value in (quantized.b, quantized.scales, quantized.zero_points, quantized.bias):
                self._shard(node, value, 0, partition)  # output features in front
            quantized.N = partition.size(self.rank)
        elif features(node) is not None:
            self._shard(node, standard.MatMul(node).w, 1, partition)
        else:  # the head, MatMul(x, Transpose(table))
            turned = standard.MatMul(node).w
            transpose = standard.Transpose(graph.producer(turned))
            self._shard(transpose.node, transpose.x, 0, partition)
            self._resize(turned, 1, partition)
        if node is self.head:
            self._resize(y, len(graph.dims(y) or ()) - 1, partition)
            whole = sum(partition.size(rank) for rank in range(self.degree))
            self._meet(y, AllGather, whole)

    def _rows(self, node: ir.Node) -> None:
        partition = self.rows[node].on(0)
        quantized = MatMulNBits.of(node)
        bias = None
        if quantized is None:
            self._shard(node, standard.MatMul(node).w, 0, partition)
        else:
            self._rows_of_blocks(quantized, partition)
            bias, quantized.bias = quantized.bias, None
        total = self._meet(node.outputs[0], AllReduce)
        if bias is not None:  # added once, behind the sum over ranks
            graph.insert_behind(total, [ir.Node("", "Add", [total, bias], name=f"{total.name}/bias")], "sum")

    def _rows_of_blocks(self, layer: MatMulNBits, partition: Partition) -> None:
        """Divide the input features of a layer: whole blocks of codes and scales, and their zero points."""
        blocks, zeros = partition.in_blocks(layer.block_size), layer.zero_points
        for value in (layer.b, layer.scales):
            self._shard(layer.node, value, 1, blocks)
        if zeros is not None and layer.bits == 4:
            self._hold(zeros, nibbles(graph.tensor(zeros), blocks.ranks[self.rank], str(zeros.name)))
        else:
            self._shard(layer.node, zeros, 1, blocks)
        layer.K = partition.size(self.rank)

    # attention, experts, embedding

    def _attention(self, layer: CachedAttention) -> None:
        own = self.partitions[layer.output]
        kv = next(self.partitions[value] for value in layer.node.outputs[1:] if value in self.partitions)
        heads = own.in_blocks(graph.width(layer.past_value))
        for field in layer.inputs:
            value = layer.operand(field)
            if field.heads is not None:
                self._shard(layer.node, value, field.heads, heads)
            elif field.kv_heads is not None and value is not None and len(graph.dims(value) or ()) == 4:
                self._shard(layer.node, value, field.kv_heads, kv)
        layer.num_heads, layer.kv_num_heads = heads.size(self.rank), kv.size(self.rank)

    def _latent_attention(self, layer: canonical.LatentAttention) -> None:
        heads = self.partitions[layer.output].in_blocks(layer.value_dim)
        self._shard(layer.node, layer.up, 0, heads.scaled(layer.plain + layer.value_dim))
        self._shard(layer.node, layer.sinks, 0, heads)
        layer.num_heads = heads.size(self.rank)

    def _experts(self, layer: Operator) -> None:
        """Hold a part of every expert's inner width; a bias behind it is added once, by the first rank."""
        inner = self.experts[layer.node]
        if isinstance(layer, canonical.MoE):
            bias, y = self._canonical_experts(layer, inner), layer.output
        else:
            assert isinstance(layer, ContribMoE | QMoE)
            bias, y = self._kernel_experts(layer, inner), layer.output
        if bias is not None and self.rank:
            held = graph.tensor(bias)
            zeros = np.zeros(held.shape.numpy(), held.dtype.numpy())
            self._hold(bias, ir.Tensor(zeros, dtype=held.dtype, name=str(bias.name)))
        self._meet(y, AllReduce)

    def _canonical_experts(self, layer: canonical.MoE, inner: Partition) -> ir.Value | None:
        up, width = inner, max(stop for ranges in inner.ranks for _, stop in ranges)
        if layer.gated:
            up = inner.scaled(2) if layer.interleaved else inner.beside(inner.shifted(width))
        self._shard(layer.node, layer.up, 2, up)
        self._shard(layer.node, layer.down, 1, inner)
        self._shard(layer.node, layer.up_bias, 1, up)
        return layer.down_bias

    def _kernel_experts(self, layer: ContribMoE | QMoE, inner: Partition) -> ir.Value | None:
        """Divide matrices [E, N, K], gates interleaved, and what goes with their codes."""
        up = inner.scaled(2) if layer.swiglu_fusion else inner
        for value in (layer.fc1_experts_weights, layer.fc1_experts_bias):
            self._shard(layer.node, value, 1, up)
        if not isinstance(layer, QMoE):
            self._shard(layer.node, layer.fc2_experts_weights, 2, inner.on(2))
            return layer.fc2_experts_bias
        blocks, zeros = inner.in_blocks(layer.block_size).on(2), layer.fc2_zero_points
        for value in (layer.fc1_scales, layer.fc1_zero_points):
            self._shard(layer.node, value, 1, up)
        codes = blocks.scaled(layer.block_size * layer.expert_weight_bits // 8)
        self._shard(layer.node, layer.fc2_experts_weights, 2, codes)
        self._shard(layer.node, layer.fc2_scales, 2, blocks)
        if zeros is not None and layer.expert_weight_bits == 4:
            self._hold(zeros, nibbles(graph.tensor(zeros), blocks.ranks[self.rank], str(zeros.name)))
        else:
            self._shard(layer.node, zeros, 2, blocks)
        return layer.fc2_experts_bias

    def _look_up(self, lookup: standard.Gather) -> None:
        """Look up the rows that this rank holds, and zeros for others."""
        node, ids, dtype, [(first, stop)] = lookup.node, lookup.indices, graph.dtype(lookup.data), self.vocabulary
        begin, size = self._constant(first), self._constant(stop - first)
        zero, last = self._constant(0), graph.initializer(self.model, "rank.axis_-1", np.array([-1]))
        none = graph.initializer(self.model, f"rank.none_{dtype.name.lower()}", np.zeros((), dtype.numpy()))
        local = self._before(node, "Sub", [ids, begin], like=ids)
        above = self._before(node, "GreaterOrEqual", [local, zero], ir.DataType.BOOL, like=ids)
        below = self._before(node, "Less", [local, size], ir.DataType.BOOL, like=ids)
        inside = self._before(node, "And", [above, below], ir.DataType.BOOL, like=ids)
        safe = self._before(node, "Where", [inside, local, zero], like=ids)
        marks = self._before(node, "Unsqueeze", [inside, last], ir.DataType.BOOL)
        marks.shape = ir.Shape([*(ids.shape or ()), 1])
        lookup.indices = safe
        own = ir.Node("", "Where", [marks, lookup.output, none], name=f"{lookup.name}/own")
        self._meet(graph.insert_behind(lookup.output, [own], "rows"), AllReduce)

    # what stands between

    def _between(self, view: Operator) -> None:
        """Fit constants and attributes of a node to the share that this rank holds."""
        value = next(value for value in view.node.outputs if value in self.partitions)
        partition, dims = self.partitions[value], graph.dims(value) or ()
        if isinstance(view, standard.RotaryEmbedding):
            view.num_heads = view.num_heads * partition.size(self.rank) // graph.static(value)[partition.axis]
        elif isinstance(view, standard.Reshape | standard.Expand):
            self._fit_shape(view, dims[partition.axis], partition)
        elif isinstance(view, standard.Split):
            self._fit_split(view)
        elif not isinstance(view, standard.Transpose | standard.Concat | standard.Slice):
            for read in view.node.inputs:
                held = None if read is None else graph.dims(read)
                if read is None or held is None or not read.is_initializer():
                    continue
                axis = partition.axis - (len(dims) - len(held))
                if axis >= 0 and held[axis] == dims[partition.axis]:
                    self._shard(view.node, read, axis, partition)

    def _fit_shape(self, view: standard.Reshape | standard.Expand, whole: object, partition: Partition) -> None:
        """Name the size of a rank's share where the target of Reshape or Expand names the whole."""
        sizes = graph.tensor(view.shape).numpy().tolist()
        if sizes[partition.axis] == whole:
            sizes[partition.axis] = partition.size(self.rank)
            view.shape = graph.initializer(self.model, f"rank.shape_{'_'.join(map(str, sizes))}", np.array(sizes))

    def _fit_split(self, split: standard.Split) -> None:
        axis = split.axis + len(graph.dims(split.output) or ()) if split.axis < 0 else split.axis
        partitions = [self.partitions[value] for value in split.node.outputs]
        if any(partition.axis != axis for partition in partitions):
            return
        sizes = [partition.size(self.rank) for partition in partitions]
        split.node.attributes.pop("num_outputs", None)
        split.split = graph.initializer(self.model, f"rank.split_{'_'.join(map(str, sizes))}", np.array(sizes))

    # moves

    def _shard(self, node: ir.Node, value: ir.Value | None, axis: int, partition: Partition) -> None:
        """Let the initializer `value`, which `node` reads, hold this rank's share of `axis`; None: there is none."""
        if value is None:
            return
        tensor, name, ranges = graph.tensor(value), str(value.name), partition.ranks[self.rank]
        if name in self.shards:
            assert self.shards[name] == (axis, partition), f"{name} is divided in two ways"
            return
        if all(reader in (node, self.embedding) for reader, _ in value.uses()):  # of a tied head, the table
            self.shards[name] = (axis, partition)
            self._hold(value, shard(tensor, axis, ranges, name))
            return
        own = f"{name}.{node.name}"
        made = graph.initializer(self.model, own, shard(tensor, axis, ranges, own))
        if sources := graph.sources(value):
            graph.set_sources(made, sources)
        for index, read in enumerate(node.inputs):
            if read is value:
                node.replace_input_with(index, made)

    def _hold(self, value: ir.Value, tensor: ir.TensorProtocol) -> None:
        value.const_value, value.shape = tensor, ir.Shape(tensor.shape.numpy())

    def _resize(self, value: ir.Value, axis: int, partition: Partition) -> None:
        if value.shape is not None:
            dims = [*value.shape]
            dims[axis] = partition.size(self.rank)
            value.shape = ir.Shape(dims)

    def _meet(self, value: ir.Value, operator: type[Operator], width: int | None = None) -> ir.Value:
        """Put a collective behind `value`; what it makes takes over readers and name. Return it.

        `width` is that of what AllGather puts together.
        """
        axis = {} if width is None else {"axis": -1}
        given = ir.convenience.convert_attributes({"ranks": self.degree, **axis})
        name = f"{graph.producer(value).name}/{operator.op_type}"
        node = ir.Node(CANONICAL, operator.op_type, [value], given, name=name)
        made = node.outputs[0]
        if value.shape is not None:
            made.shape = ir.Shape([*value.shape[:-1], width]) if width is not None else value.shape.copy()
        self.model.opset_imports[CANONICAL] = OPSETS[CANONICAL]
        return graph.insert_behind(value, [node], "part")

    def _constant(self, number: int) -> ir.Value:
        return graph.initializer(self.model, f"rank.number_{number}", np.array(number, np.int64))

    def _before(
        self,
        node: ir.Node,
        op_type: str,
        inputs: Sequence[ir.Value],
        dtype: ir.DataType = ir.DataType.INT64,
        like: ir.Value | None = None,
    ) -> ir.Value:
        name = f"{node.name}/{op_type}"
        [made] = graph.insert(node, op_type, inputs, name=name)
        made.name, made.type = name, ir.TensorType(dtype)
        made.shape = None if like is None else like.shape
        return made
