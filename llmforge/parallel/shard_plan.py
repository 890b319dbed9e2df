"""Where a decoder can be divided among ranks: which linear layers by columns, which by rows, where ranks must meet.

A plan is made on the graph alone; no weight is read. It starts from what is divided by nature:

- attention, by heads: each rank has `num_heads / degree` query heads and the KV heads that they read. Where there are
  fewer KV heads than ranks, neighbours hold the same one; latents are of all heads, and every rank has them.
- experts, each of them: a rank has a part of every expert's inner width.
- the linear layers that are left, by their inputs, where these come pointwise from other linear layers: an MLP's way
  down. What is in front is divided by its outputs, packed or not, section by section.
- the head, by the vocabulary, and a tied embedding with it.

From there it walks up to the linear layers that make what is divided, and says of each value between which part a rank
holds. What nothing divides (norms, routers, an untied embedding) stays whole on every rank.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import reduce

import onnx_ir as ir

from llmforge.base.errors import UnsupportedError
from llmforge.ir import dtype_inference, graph, interface, operators
from llmforge.ir.operators import canonical, standard
from llmforge.ir.operators.contrib import ContribMoE, GroupQueryAttention, MatMulNBits, QMoE
from llmforge.ir.operators.record import CachedAttention, Operator
from llmforge.parallel.partition import Partition, Undivided, axis_of, even, size_of, spread, through_reshape


@dataclass(eq=False)
class ShardPlan:
    """What each rank holds of a graph; nodes and values are of the graph that the plan was made of."""

    degree: int
    partitions: dict[ir.Value, Partition] = field(default_factory=dict)  # of values not whole, caches included
    columns: dict[ir.Node, Partition] = field(default_factory=dict)  # linear layers by their output features
    rows: dict[ir.Node, Partition] = field(default_factory=dict)  # linear layers by their input features
    experts: dict[ir.Node, Partition] = field(default_factory=dict)  # `llmforge::MoE`, by every expert's inner width
    head: ir.Node | None = None  # the linear layer that is divided by the vocabulary; it is in `columns`
    embedding: ir.Node | None = None  # the lookup in the table that the head is tied to
    whole: dict[str, str] = field(default_factory=dict)  # linear layers that every rank has, and why


def plan(model: ir.Model, degree: int) -> ShardPlan:
    """Divide `model`, canonical or fused, among `degree` ranks; it stays as it is, but shapes are completed.

    Raises:
        UnsupportedError: a width is no multiple of `degree`, or a layer cannot be divided; the message names the layer,
            and the degrees that are allowed.
    """
    if (reason := model.metadata_props.get(interface.FALLBACK)) is not None:
        raise UnsupportedError(f"tensor_parallel: the attention of this model was traced from its own code: {reason}")
    for node in model.graph:
        if reason := operators.view(node).indivisible:
            raise UnsupportedError(f"{node.op_type} {node.name} cannot be divided among ranks: {reason}")
    _complete_shapes(model)
    planner = _Planner(model, degree)
    for node in model.graph:
        view = operators.view(node)
        if isinstance(view, CachedAttention):
            planner.attention(view)
        elif isinstance(view, canonical.LatentAttention):
            planner.latent_attention(view)
    for experts in canonical.MoE.all(model):
        planner.moe(experts.node, graph.static(experts.down)[1])
    for moe in ContribMoE.all(model):
        planner.kernel_moe(moe)
    for quantized in QMoE.all(model):
        planner.kernel_moe(quantized)
    planner.vocabulary()
    head = _head(model)
    for node in list(model.graph):
        if node is not head and (layer := features(node)) is not None:
            planner.row(node, layer)
    return planner.result()


@dataclass(frozen=True)
class Features:
    """What a linear layer reads, and how many features go in and out."""

    x: ir.Value
    k: int
    n: int
    block: int  # input features that share a scale; 1 where no codes are


def features(node: ir.Node) -> Features | None:
    """Recognize a product with a matrix that is an initializer, perhaps quantized."""
    if (quantized := MatMulNBits.of(node)) is not None:
        known = Features(quantized.a, quantized.K, quantized.N, quantized.block_size)
        return known if quantized.b.is_initializer() else None
    product = standard.MatMul.of(node)
    if product is None or not product.w.is_initializer() or len(sizes := graph.static(product.w)) != 2:
        return None
    return Features(product.x, sizes[0], sizes[1], 1)


def allowed(fits: Callable[[int], bool], most: int) -> str:
    """List the degrees up to `most` that fit, for a message."""
    return ", ".join(["1", *(str(degree) for degree in range(2, most + 1) if fits(degree))])


class _Planner(ShardPlan):
    """Makes the plan that it is."""

    def __init__(self, model: ir.Model, degree: int) -> None:
        super().__init__(degree)
        self.model = model
        self.position = {node: index for index, node in enumerate(model.graph)}
        self.pending: list[tuple[int, ir.Node]] = []

    def result(self) -> ShardPlan:
        divided = {str(node.name) for node in (*self.columns, *self.rows)}
        self.whole = {name: reason for name, reason in self.whole.items() if name not in divided}
        return self

    # what is divided by nature

    def attention(self, layer: CachedAttention) -> None:
        """Divide one attention by heads, what it reads, and the linear layer behind it."""
        heads, kv_heads, n = layer.num_heads, layer.kv_num_heads, self.degree

        def fits(degree: int) -> bool:
            return heads % degree == 0 and (kv_heads % degree == 0 or degree % kv_heads == 0)

        if not fits(n):
            raise UnsupportedError(
                f"tensor_parallel is {n}: attention {layer.name} has {heads} query heads and {kv_heads} KV heads, "
                f"which {n} ranks cannot share evenly",
                hint=f"allowed are {allowed(fits, heads)}",
            )
        own_kv = even(kv_heads, n, 2) if kv_heads % n == 0 else spread(kv_heads, n, 2)
        key, value = graph.width(layer.past_key), graph.width(layer.past_value)

        def divide(own: Partition) -> None:
            q, k, v = own.scaled(key), own_kv.scaled(key), own_kv.scaled(value)
            beside = q.beside(k.shifted(heads * key)).beside(v.shifted((heads + kv_heads) * key))
            given = layer.projections
            for projection, wanted in zip(given, (beside,) if len(given) == 1 else (q, k, v), strict=True):
                self._demand(projection, wanted)
            for cache in (layer.past_key, layer.past_value, *layer.node.outputs[1:]):
                self.partitions[cache] = own_kv.on(1)
            if isinstance(layer, GroupQueryAttention) and layer.attention_bias is not None:
                raise Undivided("it has a bias by position")

        self._by_heads(layer, heads, value, fits, divide)

    def latent_attention(self, layer: canonical.LatentAttention) -> None:
        """Divide one attention by heads; latents are of all heads, and every rank caches them."""
        heads, n = layer.num_heads, self.degree

        def fits(degree: int) -> bool:
            return heads % degree == 0

        if not fits(n):
            raise UnsupportedError(
                f"tensor_parallel is {n}: attention {layer.name} has {heads} query heads, which {n} ranks cannot share "
                "evenly",
                hint=f"allowed are {allowed(fits, heads)}",
            )
        if not layer.up.is_initializer():
            raise UnsupportedError(f"tensor_parallel is {n}: the up-projection of attention {layer.name} is quantized")
        width = graph.width(layer.q) // heads
        self._by_heads(layer, heads, layer.value_dim, fits, lambda own: self._demand(layer.q, own.scaled(width)))

    def _by_heads(
        self,
        layer: Operator,
        heads: int,
        value: int,
        fits: Callable[[int], bool],
        divide: Callable[[Partition], None],
    ) -> None:
        """Divide what a `layer` of `heads` with values of `value` channels reads, and the linear layer behind it."""
        own = even(heads, self.degree, 2)
        try:
            divide(own)
            self._after(layer.output, own.scaled(value))
            self._resolve()
            self._check_readers(self.partitions)
        except Undivided as reason:
            hint = None
            if unit := reason.unit:
                degrees = allowed(lambda degree: fits(degree) and heads // degree * value % unit == 0, heads)
                hint = f"allowed are {degrees}"
            raise UnsupportedError(
                f"tensor_parallel is {self.degree}: attention {layer.name} cannot be divided: {reason}", hint=hint
            ) from None

    def moe(self, node: ir.Node, inner: int, block: int = 1) -> None:
        """Divide the inner width of every expert of a layer; a rank's part is whole blocks of so many features."""
        if inner % (self.degree * block):
            raise UnsupportedError(
                f"tensor_parallel is {self.degree}: the experts of {node.name} are {inner} wide, no multiple of it"
                + (f" in blocks of {block}" if block > 1 else ""),
                hint=f"allowed are {allowed(lambda degree: inner % (degree * block) == 0, min(inner, 64))}",
            )
        self.experts[node] = even(inner, self.degree, 1)

    def kernel_moe(self, layer: ContribMoE | QMoE) -> None:
        """Divide experts in the words of ONNX Runtime's kernels, matrices [E, 2·I or I, H] and [E, H, I]."""
        if (layer.activation_type == "swiglu") != (layer.swiglu_fusion == 1):
            raise UnsupportedError(f"tensor_parallel: the gates of {layer.name} are not interleaved, and not divided")
        rows = graph.static(layer.fc1_experts_weights)[1]
        inner = rows // (2 if layer.swiglu_fusion else 1)
        if not isinstance(layer, QMoE):
            self.moe(layer.node, inner)
        else:  # zero points of a row with a single block lie otherwise (llmforge.rewrite.moe_kernels)
            self.moe(layer.node, inner, layer.block_size * (1 if layer.fc2_zero_points is None else 2))

    def vocabulary(self) -> None:
        """Divide the head, and a tied embedding, by the vocabulary; else say why not."""
        node = _head(self.model)
        if node is None:
            return
        table, known = _tied_table(node), features(node)
        size = graph.static(table)[0] if table is not None else known.n if known is not None else 0
        if not size:
            self.whole[str(node.name)] = "it has no weight of its own"
            return
        if size % self.degree:
            self.whole[str(node.name)] = f"the vocabulary has {size} entries, no multiple of {self.degree}"
            return
        if table is not None:
            lookups = [
                view for reader, _ in table.uses() if (view := standard.Gather.of(reader)) and view.data is table
            ]
            others = len(table.uses()) - len(lookups)
            if len(lookups) != 1 or others != 1 or graph.static(lookups[0].output)[-1:] == (0,):
                self.whole[str(node.name)] = f"the table {table.name} has other readers than the embedding and the head"
                return
            self.embedding = lookups[0].node
        elif any(len(value.uses()) > 1 for value in node.inputs if value is not None and value.is_initializer()):
            self.whole[str(node.name)] = "it is tied to a quantized embedding"
            return
        self.head = node
        self.columns[node] = even(size, self.degree, 1)

    def row(self, node: ir.Node, layer: Features) -> None:
        """Divide a linear layer by its inputs, where these come from layers that can be divided by their outputs."""
        if node in self.rows or node in self.columns:
            return
        x, k, unit = layer.x, layer.k, layer.block
        before = dict(self.partitions), dict(self.columns)
        try:
            axis = len(graph.dims(x) or ()) - 1
            self._demand(x, even(k // unit, self.degree, axis).scaled(unit))
            self._resolve()
            self.rows[node] = self.partitions[x]
            self._check_readers(value for value in self.partitions if value not in before[0])
        except Undivided as reason:
            self.pending.clear()
            self.partitions, self.columns = before
            self.rows.pop(node, None)
            self.whole[str(node.name)] = str(reason)
            return
        if k % (unit * self.degree):
            blocks = f", in blocks of {unit}" if unit > 1 else ""
            fits = allowed(lambda degree: k % (unit * degree) == 0, min(k // unit, 64))
            raise UnsupportedError(
                f"tensor_parallel is {self.degree}: {node.name} reads {k} features{blocks}, which {self.degree} ranks "
                "cannot share evenly",
                hint=f"allowed are {fits}",
            )

    # the walks

    def _demand(self, value: ir.Value, partition: Partition) -> None:
        """Let each rank hold its share of `value`."""
        if value in self.partitions:
            if self.partitions[value] != partition:
                raise Undivided(f"{value.name} would be divided in two ways")
            return
        maker = value.producer()
        if maker is None:
            raise Undivided(f"{value.name} is given from outside")
        self.partitions[value] = partition
        heapq.heappush(self.pending, (-self.position[maker], maker))

    def _resolve(self) -> None:
        """Walk up from what was demanded, the last node first, until linear layers make all of it."""
        while self.pending:
            _, node = heapq.heappop(self.pending)
            if features(node) is not None:
                self._column(node)
            elif not isinstance(view := operators.view(node), CachedAttention | canonical.LatentAttention):
                for value, partition in self._inputs(view):
                    self._demand(value, partition)

    def _column(self, node: ir.Node) -> None:
        y = node.outputs[0]
        if node in self.rows:
            raise Undivided(f"{node.name} is divided by its inputs already")
        if self.partitions[y].axis != len(graph.dims(y) or ()) - 1:
            raise Undivided(f"{node.name} would be divided along another axis than its features")
        self.columns[node] = self.partitions[y].on(1)

    def _after(self, value: ir.Value, partition: Partition) -> None:
        """Walk down from what attention made to the linear layer that reads it."""
        self.partitions[value] = partition
        for reader, _ in value.uses():
            if (layer := features(reader)) is not None:
                if layer.x is not value:
                    raise Undivided(f"{reader.name} multiplies by {value.name}")
                if partition.divided(layer.block) is None:
                    reason = f"a rank's part would end within a block of {layer.block} features of {reader.name}"
                    raise Undivided(reason, layer.block)
                self.rows[reader] = partition
                continue
            view = operators.view(reader)
            passed = self._output(view, partition)
            if view.output in self.partitions:
                continue
            self._after(view.output, passed)
            for other, wanted in self._inputs(view):
                self._demand(other, wanted) if other not in self.partitions else None

    def _output(self, view: Operator, partition: Partition) -> Partition:
        """Say how what `view` makes is divided where its input is: of nodes behind attention."""
        if view.pointwise:
            return partition
        if isinstance(view, standard.Reshape):
            if (passed := through_reshape(view.x, view.output, partition)) is not None:
                return passed
        elif _normalizes(view) and partition.axis != len(graph.dims(view.output) or ()) - 1:
            return partition
        raise Undivided(f"{view.op_type} {view.name} reads what it made")

    def _inputs(self, view: Operator) -> Iterator[tuple[ir.Value, Partition]]:
        """Say how the inputs of a node must be divided for its outputs to be as planned; constants are not named."""
        node = view.node
        made = [self.partitions.get(value) for value in node.outputs]
        partition = next(found for found in made if found is not None)
        axis, last = partition.axis, len(graph.dims(view.output) or ()) - 1
        if view.pointwise:
            size = graph.static(node.outputs[made.index(partition)])[axis]
            for value in node.inputs:
                if value is not None and not value.is_initializer() and size_of(value, axis, last) == size:
                    yield value, partition
        elif (isinstance(view, standard.RotaryEmbedding) and axis == last) or (_normalizes(view) and axis != last):
            yield view.first_input, partition
        elif isinstance(view, standard.Transpose):
            yield view.x, partition.on(view.perm[axis])
        elif (
            isinstance(view, standard.Reshape)
            and (passed := through_reshape(view.output, view.x, partition)) is not None
        ):
            yield view.x, passed
        elif isinstance(view, standard.Split) and axis_of(view, last) == axis:
            yield view.x, self._sections(view, made, axis)
        elif (
            isinstance(view, standard.Split | standard.Concat | standard.Slice | standard.Expand)
            and axis_of(view, last) != axis
        ):
            for value in node.inputs if isinstance(view, standard.Concat) else [view.x]:
                if value is not None and size_of(value, axis, last) != 1:
                    yield value, partition
        else:
            raise Undivided(f"what it reads comes whole from {node.op_type} {node.name}")

    def _sections(self, split: standard.Split, made: Sequence[Partition | None], axis: int) -> Partition:
        """Put the partitions of all outputs of a Split behind one another."""
        whole: list[Partition] = []
        offset = 0
        for value, partition in zip(split.node.outputs, made, strict=True):
            if partition is None or partition.axis != axis:
                raise Undivided(f"{value.name}, a part of {split.name}, is not divided")
            whole.append(partition.shifted(offset))
            offset += graph.static(value)[axis]
        return reduce(Partition.beside, whole)

    def _check_readers(self, values: Iterable[ir.Value]) -> None:
        """Return if everything that reads one of `values`, which are divided, knows of it."""
        for value in values:
            for reader, _ in value.uses():
                layer = features(reader)
                divided = reader in self.rows and layer is not None and layer.x is value
                if not divided and not any(made in self.partitions for made in reader.outputs):
                    raise Undivided(f"{reader.op_type} {reader.name} reads {value.name} whole")
            if value.is_graph_output() and interface.past_of(str(value.name)) == value.name:
                raise Undivided(f"{value.name} is an output of the graph")


def _normalizes(view: Operator) -> bool:
    return isinstance(view, standard.RMSNormalization | standard.LayerNormalization)


def _head(model: ir.Model) -> ir.Node | None:
    """Walk up from the logits to the product that makes them."""
    node = graph.output_named(model, interface.LOGITS).producer()
    while node is not None and not operators.is_a(node, standard.MatMul, MatMulNBits):
        if not operators.view(node).pointwise:
            return None
        node = next((x.producer() for x in node.inputs if x is not None and x.producer() is not None), None)
    return node


def _tied_table(head: ir.Node) -> ir.Value | None:
    """Return the table of which the product `head` reads the transpose."""
    product = standard.MatMul.of(head)
    transpose = None if product is None else standard.Transpose.made(product.w)
    return transpose.x if transpose is not None and transpose.x.is_initializer() else None


def _complete_shapes(model: ir.Model) -> None:
    """Give what linear layers and pointwise operators make its shape, where that is not recorded, and its dtype."""
    dtype_inference.complete(model)
    for node in model.graph:
        value, first = node.outputs[0], next(iter(node.inputs), None)
        if value.shape is not None or first is None or first.shape is None:
            continue
        if (layer := features(node)) is not None:
            value.shape = ir.Shape([*first.shape[:-1], layer.n])
        elif operators.view(node).pointwise:
            value.shape = first.shape.copy()
