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

from llmforge.ir import graph as g
from llmforge.ir import operators
from llmforge.parallel.collectives import ALL_GATHER, ALL_REDUCE, Collective, meetings
from llmforge.parallel.partition import Cut, nibbles, shard
from llmforge.parallel.shard_plan import ATTENTION, ShardPlan, is_linear, plan

RANK = "llmforge.rank"  # metadata_props key of a rank's graph: "1/4" is the second of four


@dataclass(frozen=True, eq=False)
class Split:
    """The graphs of all ranks, and where they meet."""

    ranks: tuple[ir.Model, ...]
    collectives: tuple[Collective, ...]  # in the order of a step
    whole: Mapping[str, str]  # linear layers that every rank has, and why


def split(model: ir.Model, degree: int) -> Split:
    """Split `model`, canonical or fused, fp32 or half precision, which stays as it is.

    Raises:
        UnsupportedError: a width is no multiple of `degree`, or a layer cannot be divided; the message names the layer
            and the degrees that are allowed.
    """
    source = model.clone()
    made = plan(source, degree)
    if degree == 1:
        return Split((source,), (), made.whole)
    ranks = tuple(_Rank(source, made, rank).write() for rank in range(degree))
    return Split(ranks, meetings(made), made.whole)


class _Rank:
    """Writes the graph of one rank."""

    def __init__(self, source: ir.Model, made: ShardPlan, rank: int) -> None:
        self.rank, self.degree = rank, made.degree
        self.model = source.clone()
        nodes = {node.name: node for node in self.model.graph}
        values = [*self.model.graph.inputs, *(value for node in self.model.graph for value in node.outputs)]
        named = {value.name: value for value in values}
        self.cuts = {named[value.name]: cut for value, cut in made.cuts.items()}
        self.columns, self.rows, self.experts = (
            {nodes[node.name]: cut for node, cut in part.items()} for part in (made.columns, made.rows, made.experts)
        )
        self.head = None if made.head is None else nodes[made.head.name]
        self.embedding = None if made.embedding is None else nodes[made.embedding.name]
        self.shards: dict[str, tuple[int, Cut]] = {}  # initializers that were cut in place

    def write(self) -> ir.Model:
        for node in list(self.model.graph):
            if node is self.embedding:
                self._look_up(node)
            if node in self.columns:
                self._columns(node)
            elif node in self.rows:
                self._rows(node)
            elif node in self.experts:
                self._experts(node)
            elif (node.domain, node.op_type) in ATTENTION:
                self._attention(node)
            elif any(value in self.cuts for value in node.outputs):
                self._between(node)
        for value, cut in self.cuts.items():
            self._resize(value, cut.axis, cut)
        self.model.metadata_props[RANK] = f"{self.rank}/{self.degree}"
        g.drop_unused(self.model)
        return self.model

    # linear layers

    def _columns(self, node: ir.Node) -> None:
        cut = self.columns[node]
        if node is self.head and not is_linear(node):  # MatMul(x, Transpose(table)), whose table is cut
            turned = node.inputs[1]
            assert turned is not None
            maker = turned.producer()
            assert maker is not None
            self._cut_input(maker, 0, 0, cut)
            self._resize(turned, 1, cut)
        elif node.op_type == "MatMulNBits":
            for index in (1, 2, 3, 5):  # codes, scales, zero points, bias: output features in front
                self._cut_input(node, index, 0, cut)
            node.attributes["N"] = ir.AttrInt64("N", cut.size(self.rank))
        else:
            self._cut_input(node, 1, 1, cut)
        if node is self.head:
            self._resize(node.outputs[0], len(g.dims(node.outputs[0]) or ()) - 1, cut)
            self._meet(node.outputs[0], ALL_GATHER, {"axis": -1}, _width_of(self.degree, cut))

    def _rows(self, node: ir.Node) -> None:
        cut = self.rows[node].on(0)
        if node.op_type == "MatMulNBits":
            self._rows_of_blocks(node, cut)
        else:
            self._cut_input(node, 1, 0, cut)
        bias = g.operand(node, 5) if node.op_type == "MatMulNBits" else None
        if bias is not None:
            node.replace_input_with(5, None)
        total = self._meet(node.outputs[0], ALL_REDUCE, {})
        if bias is not None:
            self._add_bias(total, bias)

    def _rows_of_blocks(self, node: ir.Node, cut: Cut) -> None:
        """Cut the input features of a MatMulNBits: whole blocks of codes and scales, and their zero points."""
        size = node.attributes.get_int("block_size")
        blocks = cut.divided(size)
        assert blocks is not None, f"{node.name}: a part does not end with a block"
        for index in (1, 2):
            self._cut_input(node, index, 1, blocks)
        zeros = g.operand(node, 3)
        if zeros is not None:
            if node.attributes.get_int("bits") == 4:
                name = str(zeros.name)
                assert zeros.const_value is not None
                self._hold(zeros, nibbles(zeros.const_value, blocks.ranks[self.rank], name))
            else:
                self._cut_input(node, 3, 1, blocks)
        node.attributes["K"] = ir.AttrInt64("K", cut.size(self.rank))

    def _add_bias(self, total: ir.Value, bias: ir.Value) -> None:
        """Add a bias once, behind the sum over ranks."""
        maker = total.producer()
        assert maker is not None
        owner = maker.graph
        assert owner is not None
        name = str(total.name)
        added = ir.Node("", "Add", [total, bias], name=f"{name}/bias")
        owner.insert_after(maker, added)
        for reader, index in [(reader, index) for reader, index in total.uses() if reader is not added]:
            reader.replace_input_with(index, added.outputs[0])
        added.outputs[0].type, added.outputs[0].shape = total.type, total.shape
        total.name, added.outputs[0].name = f"{name}.sum", name

    # attention, experts, embedding

    def _attention(self, node: ir.Node) -> None:
        own = self.cuts[node.outputs[0]]
        kv = self.cuts[next(value for value in node.outputs[1:] if value in self.cuts)]
        channels = (g.dims(node.inputs[4]) or (0,))[-1] if node.inputs[4] is not None else 0
        assert isinstance(channels, int)
        heads = own.divided(channels)
        assert heads is not None
        view = operators.view(node)
        for field in view.inputs:
            value = view.operand(field)
            if field.heads is not None:
                self._cut_input(node, field.index, field.heads, heads)
            elif field.kv_heads is not None and value is not None and len(g.dims(value) or ()) == 4:
                self._cut_input(node, field.index, field.kv_heads, kv)
        node.attributes["num_heads"] = ir.AttrInt64("num_heads", heads.size(self.rank))
        node.attributes["kv_num_heads"] = ir.AttrInt64("kv_num_heads", kv.size(self.rank))

    def _experts(self, node: ir.Node) -> None:
        inner = self.experts[node]
        width = max(stop for ranges in inner.ranks for _, stop in ranges)
        up = inner
        if node.attributes.get_int("gated"):
            paired = node.attributes.get_int("interleaved")
            up = inner.scaled(2) if paired else inner.beside(inner.shifted(width))
        self._cut_input(node, 3, 2, up)
        self._cut_input(node, 4, 1, inner)
        self._cut_input(node, 5, 1, up)
        if (bias := g.operand(node, 6)) is not None and self.rank:  # added once, by the first rank
            assert bias.const_value is not None
            zeros = np.zeros(bias.const_value.shape.numpy(), bias.const_value.dtype.numpy())
            self._hold(bias, ir.Tensor(zeros, dtype=bias.const_value.dtype, name=str(bias.name)))
        self._meet(node.outputs[0], ALL_REDUCE, {})

    def _look_up(self, node: ir.Node) -> None:
        """Look up the rows that this rank holds, and zeros for others."""
        assert self.head is not None
        ids, [(first, stop)] = node.inputs[1], self.columns[self.head].ranks[self.rank]
        assert ids is not None
        table = node.inputs[0]
        assert table is not None
        assert table.dtype is not None
        begin, size = self._constant(first), self._constant(stop - first)
        zero, last = self._constant(0), g.initializer(self.model, "rank.axis_-1", np.array([-1]))
        none = g.initializer(
            self.model,
            f"rank.none_{table.dtype.name.lower()}",
            ir.Tensor(np.zeros((), table.dtype.numpy()), dtype=table.dtype),
        )
        [local] = self._before(node, "Sub", [ids, begin], like=ids)
        [above] = self._before(node, "GreaterOrEqual", [local, zero], ir.DataType.BOOL, like=ids)
        [below] = self._before(node, "Less", [local, size], ir.DataType.BOOL, like=ids)
        [inside] = self._before(node, "And", [above, below], ir.DataType.BOOL, like=ids)
        [safe] = self._before(node, "Where", [inside, local, zero], like=ids)
        [marks] = self._before(node, "Unsqueeze", [inside, last], ir.DataType.BOOL)
        marks.shape = ir.Shape([*(ids.shape or ()), 1])
        node.replace_input_with(1, safe)
        rows, owner = node.outputs[0], node.graph
        assert owner is not None
        kept = ir.Node("", "Where", [marks, rows, none], name=f"{node.name}/own")
        owner.insert_after(node, kept)
        for reader, index in [(reader, index) for reader, index in rows.uses() if reader is not kept]:
            reader.replace_input_with(index, kept.outputs[0])
        name = str(rows.name)
        kept.outputs[0].type, kept.outputs[0].shape = rows.type, rows.shape
        rows.name, kept.outputs[0].name = f"{name}.rows", name
        self._meet(kept.outputs[0], ALL_REDUCE, {})

    # what stands between

    def _between(self, node: ir.Node) -> None:
        """Fit constants and attributes of a node to the part that this rank holds."""
        value = next(value for value in node.outputs if value in self.cuts)
        cut = self.cuts[value]
        dims = [*(g.dims(value) or ())]
        kind = node.op_type
        if kind == "RotaryEmbedding":
            whole = dims[cut.axis]
            assert isinstance(whole, int)
            heads = node.attributes.get_int("num_heads") * cut.size(self.rank) // whole
            node.attributes["num_heads"] = ir.AttrInt64("num_heads", heads)
        elif kind == "Reshape" or kind == "Expand":
            self._fit_shape(node, dims[cut.axis], cut)
        elif kind == "Split":
            self._fit_split(node)
        elif kind not in ("Transpose", "Concat", "Slice", "RMSNormalization", "LayerNormalization"):
            for index, read in enumerate(node.inputs):
                held = None if read is None else g.dims(read)
                if read is None or held is None or not read.is_initializer():
                    continue
                axis = cut.axis - (len(dims) - len(held))
                if axis >= 0 and held[axis] == dims[cut.axis]:
                    self._cut_input(node, index, axis, cut)

    def _fit_shape(self, node: ir.Node, whole: object, cut: Cut) -> None:
        """Name the size of a rank's part where the target of Reshape or Expand names the whole."""
        target = node.inputs[1]
        assert target is not None
        assert target.const_value is not None
        sizes = target.const_value.numpy().tolist()
        if sizes[cut.axis] == whole:
            sizes[cut.axis] = cut.size(self.rank)
            name = f"rank.shape_{'_'.join(map(str, sizes))}"
            node.replace_input_with(1, g.initializer(self.model, name, np.array(sizes)))

    def _fit_split(self, node: ir.Node) -> None:
        last = len(g.dims(node.outputs[0]) or ()) - 1
        axis = node.attributes.get_int("axis", 0)
        axis = axis + last + 1 if axis < 0 else axis
        cuts = [self.cuts[value] for value in node.outputs]
        if any(cut.axis != axis for cut in cuts):
            return
        sizes = [cut.size(self.rank) for cut in cuts]
        node.attributes.pop("num_outputs", None)
        node.resize_inputs(2)
        name = f"rank.split_{'_'.join(map(str, sizes))}"
        node.replace_input_with(1, g.initializer(self.model, name, np.array(sizes)))

    # moves

    def _cut_input(self, node: ir.Node, index: int, axis: int, cut: Cut) -> None:
        """Let initializer `index` of `node`, where there is one, hold this rank's part of `axis`."""
        value = g.operand(node, index)
        if value is None:
            return
        tensor, name = value.const_value, str(value.name)
        assert tensor is not None, f"{node.name}: input {index} is no initializer"
        if name in self.shards:
            assert self.shards[name] == (axis, cut), f"{name} is divided in two ways"
            return
        alike = all(self._is_cut_alike(reader, node) for reader, _ in value.uses())
        if alike:
            self.shards[name] = (axis, cut)
            self._hold(value, shard(tensor, axis, cut.ranks[self.rank], name))
            return
        own = f"{name}.{node.name}"
        made = g.initializer(self.model, own, shard(tensor, axis, cut.ranks[self.rank], own))
        if sources := g.sources(value):
            g.set_sources(made, sources)
        node.replace_input_with(index, made)

    def _is_cut_alike(self, reader: ir.Node, node: ir.Node) -> bool:
        """Say whether `reader` reads what `node` reads of a shared initializer: itself, or the table of a tied head."""
        return reader is node or reader is self.embedding

    def _hold(self, value: ir.Value, tensor: ir.TensorProtocol) -> None:
        value.const_value, value.shape = tensor, ir.Shape(tensor.shape.numpy())

    def _resize(self, value: ir.Value, axis: int, cut: Cut) -> None:
        if value.shape is not None:
            dims = [*value.shape]
            dims[axis] = cut.size(self.rank)
            value.shape = ir.Shape(dims)

    def _meet(
        self, value: ir.Value, kind: str, attributes: Mapping[str, g.Attribute], width: int | None = None
    ) -> ir.Value:
        """Put a collective behind `value`; what it makes takes over readers and name. Return it."""
        maker, name = value.producer(), str(value.name)
        assert maker is not None
        owner = maker.graph
        assert owner is not None
        given = ir.convenience.convert_attributes({"ranks": self.degree, **attributes})
        node = ir.Node("llmforge", kind, [value], given, name=f"{maker.name}/{kind}")
        made = node.outputs[0]
        for reader, index in list(value.uses()):
            if reader is not node:
                reader.replace_input_with(index, made)
        for index, output in enumerate(owner.outputs):
            if output is value:
                owner.outputs[index] = made
        owner.insert_after(maker, node)
        made.type = value.type
        if value.shape is not None:
            made.shape = ir.Shape([*value.shape[:-1], width]) if width is not None else value.shape.copy()
        value.name, made.name = f"{name}.part", name
        self.model.opset_imports["llmforge"] = 1
        return made

    def _constant(self, number: int) -> ir.Value:
        name = f"rank.number_{number}"
        return g.initializer(self.model, name, ir.Tensor(np.array(number, np.int64), name=name))

    def _before(
        self,
        node: ir.Node,
        op_type: str,
        inputs: Sequence[ir.Value],
        dtype: ir.DataType = ir.DataType.INT64,
        like: ir.Value | None = None,
    ) -> list[ir.Value]:
        name = f"{node.name}/{op_type}"
        made = g.insert(node, op_type, inputs, name=name)
        made[0].name, made[0].type = name, ir.TensorType(dtype)
        made[0].shape = None if like is None else like.shape
        return made


def _width_of(degree: int, cut: Cut) -> int:
    """Count the features of all ranks together."""
    return sum(cut.size(rank) for rank in range(degree))
