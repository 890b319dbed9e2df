"""Where a decoder can be divided among ranks: which linear layers by columns, which by rows, where ranks must meet.

A plan is made on the graph alone; no weight is read. It starts from what is divided by nature:

- attention, by heads: each rank has `num_heads / degree` query heads and the KV heads that they read. Where there are
  fewer KV heads than ranks, neighbours hold the same one.
- experts, each of them: a rank has a part of every expert's inner width.
- the linear layers that are left, by their inputs, where these come pointwise from other linear layers: an MLP's way
  down. What is in front is divided by its outputs, packed or not, section by section.
- the head, by the vocabulary, and a tied embedding with it.

From there it walks up to the linear layers that make what is divided, and says of each value between which part a rank
holds. What nothing divides (norms, routers, an untied embedding) stays whole on every rank.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import onnx_ir as ir

from llmforge.base.errors import UnsupportedError
from llmforge.ir import dtype_inference, graph, interface, operators
from llmforge.parallel.partition import Cut, even, spread
from llmforge.parallel.partition_shapes import Undivided, axis_of, size_of, static, through_reshape

MATMUL, NBITS = ("", "MatMul"), ("com.microsoft", "MatMulNBits")
ATTENTION = {("llmforge", "Attention"), ("com.microsoft", "GroupQueryAttention")}
MOE = ("llmforge", "MoE")
PACKED_QUERY_SECTIONS = 3
_NORMS = {"RMSNormalization", "LayerNormalization"}
_BESIDE = {"Split", "Concat", "Slice", "Expand"}  # which must work along another axis than the one that is cut


@dataclass(frozen=True, eq=False)
class ShardPlan:
    """What each rank holds of a graph; nodes and values are of the graph that the plan was made of."""

    degree: int
    cuts: Mapping[ir.Value, Cut]  # of values that are not whole, caches included
    columns: Mapping[ir.Node, Cut]  # linear layers by their output features
    rows: Mapping[ir.Node, Cut]  # linear layers by their input features
    experts: Mapping[ir.Node, Cut]  # `llmforge::MoE`, by the inner width of every expert
    head: ir.Node | None  # the linear layer that is divided by the vocabulary; it is in `columns`
    embedding: ir.Node | None  # the lookup in the table that the head is tied to
    whole: Mapping[str, str]  # linear layers that every rank has, and why


class _PartsBlocks(Undivided):
    """A quantized layer would be divided within a block of `unit` features."""

    def __init__(self, layer: ir.Node, unit: int) -> None:
        super().__init__(f"a rank's part would end within a block of {unit} features of {layer.name}")
        self.unit = unit


def plan(model: ir.Model, degree: int) -> ShardPlan:
    """Divide `model`, canonical or fused, among `degree` ranks; it stays as it is, but shapes are completed.

    Raises:
        UnsupportedError: a width is no multiple of `degree`, or a layer cannot be divided; the message names the layer,
            and the degrees that are allowed.
    """
    if (reason := model.metadata_props.get(interface.FALLBACK)) is not None:
        raise UnsupportedError(f"a model whose own attention was traced is not divided; it was, because: {reason}")
    for node in model.graph:
        if reason := operators.view(node).indivisible:
            raise UnsupportedError(f"{node.op_type} {node.name} cannot be divided among ranks: {reason}")
    _complete_shapes(model)
    planner = _Planner(model, degree)
    for node in model.graph:
        if (node.domain, node.op_type) in ATTENTION:
            planner.attention(node)
    for node in model.graph:
        if (node.domain, node.op_type) == MOE:
            planner.moe(node)
    planner.vocabulary()
    head = _head(model)
    for node in list(model.graph):
        if is_linear(node) and node is not head:
            planner.row(node)
    return planner.result()


def is_linear(node: ir.Node) -> bool:
    """Recognize a product with a matrix that is an initializer, perhaps quantized."""
    key = (node.domain, node.op_type)
    weight = node.inputs[1] if key in (MATMUL, NBITS) else None
    return weight is not None and weight.is_initializer() and (key == NBITS or len(graph.dims(weight) or ()) == 2)


def features(node: ir.Node) -> tuple[int, int]:
    """Return the input and output features of a linear layer."""
    if node.op_type == "MatMulNBits":
        return node.attributes.get_int("K"), node.attributes.get_int("N")
    k, n = static(node.inputs[1])
    return k, n


def allowed(fits: Callable[[int], bool], most: int) -> str:
    """List the degrees up to `most` that fit, for a message."""
    return ", ".join(["1", *(str(degree) for degree in range(2, most + 1) if fits(degree))])


@dataclass(eq=False)
class _Planner:
    model: ir.Model
    degree: int
    cuts: dict[ir.Value, Cut] = field(default_factory=dict)
    columns: dict[ir.Node, Cut] = field(default_factory=dict)
    rows: dict[ir.Node, Cut] = field(default_factory=dict)
    experts: dict[ir.Node, Cut] = field(default_factory=dict)
    whole: dict[str, str] = field(default_factory=dict)
    head: ir.Node | None = None
    embedding: ir.Node | None = None

    def __post_init__(self) -> None:
        self.position = {node: index for index, node in enumerate(self.model.graph)}
        self.pending: list[tuple[int, ir.Node]] = []

    def result(self) -> ShardPlan:
        divided = {str(node.name) for node in (*self.columns, *self.rows)}
        return ShardPlan(
            self.degree,
            self.cuts,
            self.columns,
            self.rows,
            self.experts,
            self.head,
            self.embedding,
            {name: reason for name, reason in self.whole.items() if name not in divided},
        )

    # what is divided by nature

    def attention(self, node: ir.Node) -> None:
        """Divide one attention by heads, what it reads, and the linear layer behind it."""
        heads, kv_heads = node.attributes.get_int("num_heads"), node.attributes.get_int("kv_num_heads")
        n = self.degree

        def fits(degree: int) -> bool:
            return heads % degree == 0 and (kv_heads % degree == 0 or degree % kv_heads == 0)

        if not fits(n):
            raise UnsupportedError(
                f"tensor_parallel is {n}: attention {node.name} has {heads} query heads and {kv_heads} KV heads, which "
                f"{n} ranks cannot share evenly",
                hint=f"allowed are {allowed(fits, heads)}",
            )
        own = even(heads, n, 2)
        own_kv = even(kv_heads, n, 2) if kv_heads % n == 0 else spread(kv_heads, n, 2)
        key, value = static(node.inputs[3])[3], static(node.inputs[4])[3]
        try:
            q, k, v = own.scaled(key), own_kv.scaled(key), own_kv.scaled(value)
            if node.inputs[1] is None:  # query, key and value side by side
                width = heads * key
                self._demand(node.inputs[0], q.beside(k.shifted(width)).beside(v.shifted(width + kv_heads * key)))
            else:
                for given, cut in zip(node.inputs[:3], (q, k, v), strict=True):
                    self._demand(given, cut)
            for held in (*node.inputs[3:5], *node.outputs[1:]):
                assert held is not None
                self.cuts[held] = own_kv.on(1)
            bias = graph.operand(node, 10) if node.domain else None
            if bias is not None:
                raise Undivided("it has a bias by position")
            self._behind(node.outputs[0], own.scaled(value))
            self._resolve()
            self._check_readers(self.cuts)
        except Undivided as reason:
            unit = reason.unit if isinstance(reason, _PartsBlocks) else 0
            degrees = (
                allowed(lambda degree: fits(degree) and heads // degree * value % unit == 0, heads) if unit else ""
            )
            raise UnsupportedError(
                f"tensor_parallel is {n}: attention {node.name} cannot be divided: {reason}",
                hint=f"allowed are {degrees}" if unit else None,
            ) from None

    def moe(self, node: ir.Node) -> None:
        """Divide the inner width of every expert of a layer."""
        inner = static(node.inputs[4])[1]
        if inner % self.degree:
            raise UnsupportedError(
                f"tensor_parallel is {self.degree}: the experts of {node.name} are {inner} wide, no multiple of it",
                hint=f"allowed are {allowed(lambda degree: inner % degree == 0, min(inner, 64))}",
            )
        self.experts[node] = even(inner, self.degree, 1)

    def vocabulary(self) -> None:
        """Divide the head, and a tied embedding, by the vocabulary; else say why not."""
        node = _head(self.model)
        if node is None:
            return
        table = self._tied_table(node)
        size = static(table)[0] if table is not None else features(node)[1] if is_linear(node) else 0
        if not size:
            self.whole[str(node.name)] = "its weight is none of its own"
            return
        if size % self.degree:
            self.whole[str(node.name)] = f"the vocabulary has {size} entries, no multiple of {self.degree}"
            return
        if table is not None:
            lookups = [reader for reader, index in table.uses() if reader.op_type == "Gather" and index == 0]
            others = len(table.uses()) - len(lookups)
            if len(lookups) != 1 or others != 1 or static(lookups[0].outputs[0])[-1:] == (0,):
                self.whole[str(node.name)] = f"the table {table.name} has other readers than the embedding and the head"
                return
            self.embedding = lookups[0]
        elif any(len(value.uses()) > 1 for value in node.inputs[1:4] if value is not None):
            self.whole[str(node.name)] = "it is tied to a quantized embedding"
            return
        self.head = node
        self.columns[node] = even(size, self.degree, 1)

    def _tied_table(self, head: ir.Node) -> ir.Value | None:
        maker = head.inputs[1].producer() if len(head.inputs) > 1 and head.inputs[1] is not None else None
        table = maker.inputs[0] if maker is not None and maker.op_type == "Transpose" else None
        return table if table is not None and table.is_initializer() else None

    def row(self, node: ir.Node) -> None:
        """Divide a linear layer by its inputs, where these come from layers that can be divided by their outputs."""
        if node in self.rows or node in self.columns:
            return
        x, (k, _) = node.inputs[0], features(node)
        assert x is not None
        unit = node.attributes.get_int("block_size") if node.op_type == "MatMulNBits" else 1
        before = dict(self.cuts), dict(self.columns)
        try:
            axis = len(graph.dims(x) or ()) - 1
            self._demand(x, even(k // unit, self.degree, axis).scaled(unit))
            self._resolve()
            self.rows[node] = self.cuts[x]
            self._check_readers({value: cut for value, cut in self.cuts.items() if value not in before[0]})
        except Undivided as reason:
            self.pending.clear()
            self.cuts, self.columns = before
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

    def _demand(self, value: ir.Value | None, cut: Cut) -> None:
        """Let each rank hold its part of `value`."""
        assert value is not None
        if value in self.cuts:
            if self.cuts[value] != cut:
                raise Undivided(f"{value.name} would be divided in two ways")
            return
        maker = value.producer()
        if maker is None:
            raise Undivided(f"{value.name} is given from outside")
        self.cuts[value] = cut
        heapq.heappush(self.pending, (-self.position[maker], maker))

    def _resolve(self) -> None:
        """Walk up from what was demanded, the last node first, until linear layers make all of it."""
        while self.pending:
            _, node = heapq.heappop(self.pending)
            if is_linear(node):
                self._column(node)
            elif (node.domain, node.op_type) not in ATTENTION:
                for value, cut in self._inputs(node):
                    self._demand(value, cut)

    def _column(self, node: ir.Node) -> None:
        cut = self.cuts[node.outputs[0]]
        if node in self.rows:
            raise Undivided(f"{node.name} is divided by its inputs already")
        if cut.axis != len(graph.dims(node.outputs[0]) or ()) - 1:
            raise Undivided(f"{node.name} would be divided along another axis than its features")
        self.columns[node] = cut.on(1)

    def _behind(self, value: ir.Value, cut: Cut) -> None:
        """Walk down from what attention made to the linear layer that reads it."""
        self.cuts[value] = cut
        for reader, index in value.uses():
            if is_linear(reader):
                unit = reader.attributes.get_int("block_size") if reader.op_type == "MatMulNBits" else 1
                if index:
                    raise Undivided(f"{reader.name} multiplies by {value.name}")
                if cut.divided(unit) is None:
                    raise _PartsBlocks(reader, unit)
                self.rows[reader] = cut
                continue
            made = reader.outputs[0]
            passed = self._output(reader, cut)
            if made in self.cuts:
                continue
            self._behind(made, passed)
            for other, wanted in self._inputs(reader):
                self._demand(other, wanted) if other not in self.cuts else None

    def _output(self, node: ir.Node, cut: Cut) -> Cut:
        """Say how what `node` makes is divided where its input is: of nodes behind attention."""
        if operators.view(node).pointwise:
            return cut
        if not node.domain and node.op_type == "Reshape":
            if (passed := through_reshape(node.inputs[0], node.outputs[0], cut)) is not None:
                return passed
        elif not node.domain and node.op_type in _NORMS and cut.axis != len(graph.dims(node.outputs[0]) or ()) - 1:
            return cut
        raise Undivided(f"{node.op_type} {node.name} reads what it made")

    def _inputs(self, node: ir.Node) -> Iterator[tuple[ir.Value, Cut]]:
        """Say how the inputs of `node` must be divided for its outputs to be as `cuts` say; constants are not named."""
        held = [self.cuts.get(value) for value in node.outputs]
        cut = next(found for found in held if found is not None)
        last, first = len(graph.dims(node.outputs[0]) or ()) - 1, node.inputs[0]
        assert first is not None
        kind = node.op_type if not node.domain else ""
        if operators.view(node).pointwise:
            size = static(node.outputs[held.index(cut)])[cut.axis]
            for value in node.inputs:
                if value is not None and not value.is_initializer() and size_of(value, cut.axis, last) == size:
                    yield value, cut
        elif (kind == "RotaryEmbedding" and cut.axis == last) or (kind in _NORMS and cut.axis != last):
            yield first, cut
        elif kind == "Transpose":
            yield first, cut.on(node.attributes["perm"].as_ints()[cut.axis])
        elif kind == "Reshape" and (passed := through_reshape(node.outputs[0], first, cut)) is not None:
            yield first, passed
        elif kind == "Split" and axis_of(node, last) == cut.axis:
            yield first, self._sections(node, held, cut.axis)
        elif kind in _BESIDE and axis_of(node, last) != cut.axis:
            for value in node.inputs if kind == "Concat" else [first]:
                if value is not None and size_of(value, cut.axis, last) != 1:
                    yield value, cut
        else:
            raise Undivided(f"what it reads comes whole from {node.op_type} {node.name}")

    def _sections(self, split: ir.Node, held: Sequence[Cut | None], axis: int) -> Cut:
        """Put the cuts of all outputs of a Split behind one another."""
        whole: Cut | None = None
        offset = 0
        for value, cut in zip(split.outputs, held, strict=True):
            if cut is None or cut.axis != axis:
                raise Undivided(f"{value.name}, a part of {split.name}, is not divided")
            section = cut.shifted(offset)
            whole = section if whole is None else whole.beside(section)
            offset += static(value)[axis]
        assert whole is not None
        return whole

    def _check_readers(self, cuts: Mapping[ir.Value, Cut]) -> None:
        """Return if everything that reads a divided value knows of it."""
        for value in cuts:
            for reader, index in value.uses():
                known = (reader in self.rows and index == 0) or any(made in self.cuts for made in reader.outputs)
                if not known:
                    raise Undivided(f"{reader.op_type} {reader.name} reads {value.name} whole")
            if value.is_graph_output() and interface.past_of(str(value.name)) == value.name:
                raise Undivided(f"{value.name} is an output of the graph")


def _head(model: ir.Model) -> ir.Node | None:
    """Walk up from the logits to the product that makes them."""
    value = next(value for value in model.graph.outputs if value.name == interface.LOGITS)
    node = value.producer()
    while node is not None and (node.domain, node.op_type) not in (MATMUL, NBITS):
        if not operators.view(node).pointwise:
            return None
        node = next((x.producer() for x in node.inputs if x is not None and x.producer() is not None), None)
    return node


def _complete_shapes(model: ir.Model) -> None:
    """Give what linear layers and pointwise operators make its shape, where that is not recorded, and its dtype."""
    dtype_inference.complete(model)
    for node in model.graph:
        value, first = node.outputs[0], node.inputs[0] if node.inputs else None
        if value.shape is not None or first is None or first.shape is None:
            continue
        if is_linear(node):
            value.shape = ir.Shape([*first.shape[:-1], features(node)[1]])
        elif operators.view(node).pointwise:
            value.shape = first.shape.copy()
