"""Lies: what a pass may do wrong and declare right. The author of a new pass runs them behind it: `caught`.

A lie changes a graph and names the places that it would report; None where the graph has nothing to lie about.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from llmforge.base.errors import VerificationError
from llmforge.ir import graph, interface
from llmforge.ir.derived import Derived, side_by_side
from llmforge.ir.operators import canonical, contrib
from llmforge.ir.operators.standard import Add, Gather, MatMul, RMSNormalization, RotaryEmbedding, Sigmoid
from llmforge.rewrite import smoothing
from llmforge.rewrite.pass_base import Budget, Changes, Context, Numerics, Pass, Rewritten, Skipped
from llmforge.verification.promises import Promises
from llmforge.verification.verifier import Verifier

from ...models import graphs

EXACT, ROUNDING, LOSSY = Numerics.EXACT, Numerics.ROUNDING, Numerics.LOSSY
Act = Callable[[ir.Model], "list[str] | None"]
_END = np.iinfo(np.int64).max
_CPU = graphs.CPU


@dataclass(frozen=True)
class Lie:
    """One lie: `prepare` changes the graph that the pass finds, `act` is the pass, and says nothing wrong of itself."""

    name: str
    act: Act
    numerics: Numerics = EXACT
    prepare: Callable[[ir.Model], None] = lambda model: None
    report: Callable[[list[str]], Changes] = lambda places: Changes([Rewritten(place, "improved") for place in places])


@dataclass(frozen=True)
class Lying(Pass):
    """A pass that does what `inner` does, and tells a lie besides."""

    name: ClassVar[str] = "lying-pass"
    lie: Lie
    inner: Pass | None = None
    numerics: Numerics = EXACT  # type: ignore[misc]  # an instance's own, in a test only
    budget: Budget = field(default_factory=lambda: Budget(kld_mean=100.0))  # text alone shall not show it

    def run(self, model: ir.Model, context: Context) -> Changes:
        """Change `model`."""
        changes = Changes() if self.inner is None else self.inner.run(model, context)
        places = self.lie.act(model)
        if places is None:
            raise NothingToLieAbout(self.lie.name)
        found = self.lie.report(places)
        return Changes([*changes.rewritten, *found.rewritten], [*changes.skipped, *found.skipped], changes.notes)


class NothingToLieAbout(Exception):
    """The graph has nothing of the kind that a lie is about."""


def caught(
    lie: Lie,
    model: ir.Model,
    promises: Promises,
    folder: Path,
    context: Context,
    *,
    inner: Pass | None = None,
    texts: list[NDArray[np.int64]] | None = None,
    whole_bytes: int = 2**40,
) -> str | None:
    """Tell `lie` about a copy of `model`, behind the pass `inner`; return how it is caught, or None.

    Raises:
        NothingToLieAbout: the graph has nothing of the kind.
    """
    trial = model.clone()
    lie.prepare(trial)
    step = Lying(lie, inner, lie.numerics)
    verifier = Verifier(trial, promises=promises, folder=folder, texts=texts or [], whole_bytes=whole_bytes)
    try:
        verifier.check(step, trial, step.run(trial, context))
    except VerificationError as error:
        return error.message if error.exit_code == 7 else None
    return None


# What lies are made of


def _pick(found: list[ir.Node], which: int | None) -> list[ir.Node]:
    """Choose one of the nodes, counted from the end where negative; None: all."""
    if which is None:
        return found
    return [found[which]] if -len(found) <= which < len(found) else []


def _after(node: ir.Node, make: Callable[[ir.Value], list[ir.Node]], output: int = 0) -> None:
    """Put nodes behind a value, under whose name their result goes on."""
    value = node.outputs[output]
    graph.insert_behind(value, make(value), "true")


def _node(op: str, inputs: list[ir.Value], value: ir.Value, what: str, **attributes: object) -> ir.Node:
    made = ir.node(op, inputs, attributes or None, name=f"{value.name}/{what}")
    made.outputs[0].name, made.outputs[0].type, made.outputs[0].shape = f"{value.name}/{what}", value.type, value.shape
    return made


def _constant(model: ir.Model, name: str, data: object, dtype: type = np.int64) -> ir.Value:
    return graph.initializer(model, f"lie.{name}", np.array(data, dtype))


def _nodes(model: ir.Model, *operators: type) -> list[ir.Node]:
    return [node for node in model.graph if any(operator.matches(node) for operator in operators)]


def _attentions(model: ir.Model) -> list[ir.Node]:
    return _nodes(model, canonical.Attention, contrib.GroupQueryAttention)


def _sums(model: ir.Model) -> list[ir.Node]:
    """The residual sums."""
    return [
        node
        for node in _nodes(model, Add)
        if not any(value is None or value.is_initializer() for value in node.inputs)
        and (graph.dims(node.outputs[0]) or ())[:2] == ("batch", "sequence")
    ]


def _products(model: ir.Model, part: str) -> list[ir.Node]:
    return [node for node in _nodes(model, MatMul) if part in str(node.inputs[1] and node.inputs[1].name)]


def _names(nodes: list[ir.Node]) -> list[str] | None:
    return [str(node.name) for node in nodes] or None


# Windows, positions, tables


def window(change: Callable[[int], int], which: int | None = None, *, only: Callable[[int], bool] = bool) -> Act:
    """Change the attention windows for which `only` holds."""

    def act(model: ir.Model) -> list[str] | None:
        found = [node for node in _nodes(model, canonical.Attention) if only(node.attributes.get_int("window"))]
        for node in (chosen := _pick(found, which)):
            node.attributes["window"] = ir.AttrInt64("window", change(node.attributes.get_int("window")))
        return _names(chosen)

    return act


def table(change: Callable[[NDArray[np.float32]], None], which: int | None = None, *, lazy: bool = False) -> Act:
    """Change a copy of the rotary tables, and let the rotary embeddings read it."""

    def act(model: ir.Model) -> list[str] | None:
        chosen = _pick(_nodes(model, RotaryEmbedding), which)
        for node in chosen:
            for number in (1, 2):
                old = node.inputs[number]
                assert old is not None
                if not old.is_initializer() or old.const_value is None:
                    return None
                if str(old.name).startswith("lie."):
                    continue
                array = old.const_value.numpy().copy()
                before = array.copy()
                change(array)
                if np.array_equal(array, before):
                    return None
                tensor: ir.TensorProtocol = ir.Tensor(array)
                if lazy:
                    tensor = ir.LazyTensor(
                        lambda array=array: ir.Tensor(array), tensor.dtype, ir.Shape(array.shape), name="lazy"
                    )
                node.replace_input_with(number, graph.initializer(model, f"lie.{old.name}", tensor))
        graph.drop_unused(model)
        return _names(chosen)

    return act


def rows_from(first: int) -> Callable[[NDArray[np.float32]], None]:
    def change(array: NDArray[np.float32]) -> None:
        array[first:] *= np.float32(1.01)

    return change


def positions(limit: int, which: int | None = None) -> Act:
    """Clip positions at `limit`."""

    def act(model: ir.Model) -> list[str] | None:
        chosen = _pick(_nodes(model, RotaryEmbedding), which)
        for node in chosen:
            given = node.inputs[3]
            assert given is not None
            [clipped] = graph.insert(node, "Min", [given, _constant(model, "limit", limit)], name=f"{node.name}/clip")
            clipped.name, clipped.type, clipped.shape = f"{node.name}/clip", given.type, given.shape
            node.replace_input_with(3, clipped)
        return _names(chosen)

    return act


def past(limit: int, which: int) -> Act:
    """Let an attention forget how long its past is from `limit` on."""

    def act(model: ir.Model) -> list[str] | None:
        chosen = _pick(_nodes(model, canonical.Attention), which)
        for node in chosen:
            given = node.inputs[5]
            assert given is not None
            bound = _constant(model, "past", limit, np.int32)
            [clipped] = graph.insert(node, "Min", [given, bound], name=f"{node.name}/clip")
            clipped.name, clipped.type, clipped.shape = f"{node.name}/clip", given.type, given.shape
            node.replace_input_with(5, clipped)
        return _names(chosen)

    return act


def beyond(axis: int, first: int, find: Callable[[ir.Model], list[ir.Node]], which: int | None = None) -> Act:
    """Halve what a value holds from place `first` of an axis on: rows of a batch, or tokens of a step."""

    def act(model: ir.Model) -> list[str] | None:
        chosen = _pick(find(model), which)
        for node in chosen:
            value = node.outputs[0]
            start, end = _constant(model, f"{axis}.{first}.start", [0]), _constant(model, f"{axis}.{first}", [first])
            last, axes = _constant(model, "end", [_END]), _constant(model, f"axis.{axis}", [axis])
            head = _node("Slice", [value, start, end, axes], value, "head")
            rest = _node("Slice", [value, end, last, axes], value, "rest")
            half = _node("Mul", [rest.outputs[0], _constant(model, "half", 0.5, np.float32)], value, "half")
            both = _node("Concat", [head.outputs[0], half.outputs[0]], value, "both", axis=axis)
            for made in (head, rest, half):  # of sizes that nobody names
                made.outputs[0].shape = ir.Shape([None] * len(graph.dims(value) or ()))
            put_in_place(value, [head, rest, half, both])
        return _names(chosen)

    return act


def put_in_place(value: ir.Value, nodes: Sequence[ir.Node]) -> None:
    """Let what the last of `nodes` makes of `value` be read in its place, under its name, by all but `nodes`."""
    node, name, made = value.producer(), value.name, nodes[-1].outputs[0]
    assert node is not None
    readers = [(reader, index) for reader, index in value.uses() if reader not in nodes]
    owner = graph.owner(node)
    owner.insert_after(node, nodes)
    for reader, index in readers:
        reader.replace_input_with(index, made)
    for index, output in enumerate(owner.outputs):
        if output is value:
            owner.outputs[index] = made
    value.name, made.name = f"{name}.true", name


def embedding(change: Callable[[NDArray[np.float32]], None]) -> Act:
    """Change rows of the embedding."""

    def act(model: ir.Model) -> list[str] | None:
        [lookup] = [node for node in _nodes(model, Gather) if node.inputs[1] and node.inputs[1].name == "input_ids"]
        value = lookup.inputs[0]
        assert value is not None
        old = graph.tensor(value)

        def read() -> ir.TensorProtocol:
            array = old.numpy().astype(np.float32)
            change(array)
            return ir.Tensor(array)

        lazy = ir.LazyTensor(read, old.dtype, ir.Shape(old.shape.numpy()), name="lazy")
        lookup.replace_input_with(0, graph.initializer(model, "lie.embedding", lazy, graph.sources(value)))
        graph.drop_unused(model)
        return _names([lookup])

    return act


def tokens_from(first: int) -> Callable[[NDArray[np.float32]], None]:
    def change(array: NDArray[np.float32]) -> None:
        array[first:] *= np.float32(0.5)

    return change


def one_token(array: NDArray[np.float32]) -> None:
    array[len(array) - 3] = 0


def default_rows(model: ir.Model) -> list[str] | None:
    model.graph.initializers[interface.LOGITS_ROWS].const_value = ir.Tensor(
        np.array([0], np.int64), name=interface.LOGITS_ROWS
    )
    return [interface.LOGITS_ROWS]


def late_rows(model: ir.Model) -> list[str] | None:
    """Give the logits of token 40 for those of any later one."""
    [node] = [node for node in _nodes(model, Gather) if node.inputs[1] and node.inputs[1].name == "logits_rows"]
    rows = node.inputs[1]
    assert rows is not None
    [clipped] = graph.insert(node, "Min", [rows, _constant(model, "rows", 40)], name="clipped_rows")
    clipped.name, clipped.type, clipped.shape = "clipped_rows", rows.type, rows.shape
    node.replace_input_with(1, clipped)
    return _names([node])


# Numbers


def clip(limit: float, find: Callable[[ir.Model], list[ir.Node]], which: int | None = None) -> Act:
    """Clip what nodes make at ± `limit`."""

    def act(model: ir.Model) -> list[str] | None:
        chosen = _pick(find(model), which)
        for node in chosen:
            value, bounds = node.outputs[0], [_constant(model, f"bound.{s}", s * limit, np.float32) for s in (-1, 1)]
            _after(node, lambda value, bounds=bounds: [_node("Clip", [value, *bounds], value, "clip")])
            assert value.name
        return _names(chosen)

    return act


def shift(by: float, find: Callable[[ir.Model], list[ir.Node]], which: int | None = None) -> Act:
    """Add a small number."""

    def act(model: ir.Model) -> list[str] | None:
        chosen = _pick(find(model), which)
        small = _constant(model, "small", by, np.float32)
        for node in chosen:
            _after(node, lambda value: [_node("Add", [value, small], value, "shift")])
        return _names(chosen)

    return act


def epsilon(factor: float, which: int | None = None) -> Act:
    def act(model: ir.Model) -> list[str] | None:
        chosen = _pick(_nodes(model, RMSNormalization), which)
        for node in chosen:
            changed = node.attributes.get_float("epsilon", 1e-5) * factor
            node.attributes["epsilon"] = ir.AttrFloat32("epsilon", changed)
        return _names(chosen)

    return act


def attribute(operator: type, name: str, change: Callable[[float], float], which: int | None = None) -> Act:
    def act(model: ir.Model) -> list[str] | None:
        chosen = _pick(_nodes(model, operator), which)
        given = [(node, node.attributes.get_float(name, 0.0)) for node in chosen]
        for node, number in given:
            node.attributes[name] = ir.AttrFloat32(name, change(number))
        return _names([node for node, number in given if change(number) != number])

    return act


def weight(part: str, change: Callable[[NDArray[np.float32]], None], which: int, *, derived: bool = False) -> Act:
    """Change a weight that ends on `part`."""

    def act(model: ir.Model) -> list[str] | None:
        found = [value for name, value in model.graph.initializers.items() if name.endswith(part) and value.uses()]
        if not -len(found) <= which < len(found):
            return None
        value = found[which]
        old = graph.tensor(value)

        def function(arrays: list[NDArray[np.float32]] | tuple[NDArray[np.float32], ...]) -> NDArray[np.float32]:
            array = np.array(arrays[0], np.float32)
            change(array)
            return array

        if np.array_equal(function([old.numpy()]), old.numpy()):
            return None
        shape = ir.Shape(old.shape.numpy())
        if derived:
            value.const_value = Derived(function, [old], old.dtype, shape, str(value.name))
        else:
            value.const_value = ir.LazyTensor(
                lambda: ir.Tensor(function([old.numpy()])), old.dtype, shape, name=str(value.name)
            )
        return [str(value.name)]

    return act


def one_column(array: NDArray[np.float32]) -> None:
    array[..., -1] *= np.float32(1.05)


def one_number(array: NDArray[np.float32]) -> None:
    array.flat[array.size // 2] += np.abs(array).max()


def ones(array: NDArray[np.float32]) -> None:
    array[...] = 1


def zeros(array: NDArray[np.float32]) -> None:
    array[...] = 0


def six_bits(array: NDArray[np.float32]) -> None:
    step = np.abs(array).max() / 31
    array[...] = np.round(array / step) * step


def swap(part: str, one: int, other: int) -> Act:
    """Let two layers read each other's weight."""

    def act(model: ir.Model) -> list[str] | None:
        found = _products(model, part)
        if len(found) <= max(one, other):
            return None
        a, b = found[one], found[other]
        first, second = a.inputs[1], b.inputs[1]
        a.replace_input_with(1, second)
        b.replace_input_with(1, first)
        return _names([a, b])

    return act


def packed(order: tuple[int, ...], which: int, factor: float = 1.0) -> Act:
    """Pack a layer's keys and values in another order, or scaled."""

    def scaled(arrays: list[NDArray[np.float32]] | tuple[NDArray[np.float32], ...]) -> NDArray[np.float32]:
        return side_by_side(arrays) * np.float32(factor)

    def act(model: ir.Model) -> list[str] | None:
        layers = list(zip(_products(model, "k_proj"), _products(model, "v_proj"), strict=False))
        if not layers:
            return None
        pair = layers[which]
        values = [node.inputs[1] for node in pair]
        tensors = [graph.tensor(value) for value in values if value is not None]
        sizes = [tensor.shape.numpy()[1] for tensor in tensors]
        if len(tensors) < 2 or sizes[0] != sizes[1]:
            return None
        chosen = [tensors[place] for place in order]
        names = [name for value in values if value is not None for name in graph.sources(value)]
        function = side_by_side if factor == 1.0 else scaled
        shape = ir.Shape([tensors[0].shape.numpy()[0], sum(sizes)])
        tensor = Derived(function, chosen, tensors[0].dtype, shape, "packed")
        given = names if factor != 1.0 else [names[place] for place in order]
        made = graph.initializer(model, "lie.packed", tensor, given)
        x = pair[0].inputs[0]
        [both] = graph.insert(pair[0], "MatMul", [x, made], name="lie/packed")
        both.name, both.type = "lie/packed", pair[0].outputs[0].type
        both.shape = ir.Shape(["batch", "sequence", sum(sizes)])
        split = graph.insert(
            pair[0], "Split", [both, _constant(model, "sizes", sizes)], {"axis": -1}, outputs=2, name="lie/split"
        )
        for node, part, role in zip(pair, split, "kv", strict=True):
            part.name = f"lie/{role}"
            graph.replace_value(node.outputs[0], part)
        places = _names(list(pair))
        graph.drop_unused(model)
        return places

    return act


def operator(old: type, new: str, which: int) -> Act:
    def act(model: ir.Model) -> list[str] | None:
        for node in (chosen := _pick(_nodes(model, old), which)):
            node.op_type = new
        return _names(chosen)

    return act


def flush(limit: float) -> Act:
    """Make what is small zero."""

    def act(model: ir.Model) -> list[str] | None:
        chosen = _pick(_sums(model), 0)
        for node in chosen:
            value = node.outputs[0]
            size = _node("Abs", [value], value, "size")
            small = _node("Less", [size.outputs[0], _constant(model, "flush", limit, np.float32)], value, "small")
            small.outputs[0].type = ir.TensorType(ir.DataType.BOOL)
            zero = _constant(model, "zero", 0, np.float32)
            chosen_node = _node("Where", [small.outputs[0], zero, value], value, "flush")
            readers = [(reader, index) for reader, index in value.uses() if reader not in (size, chosen_node)]
            graph.owner(node).insert_after(node, [size, small, chosen_node])
            for reader, index in readers:
                reader.replace_input_with(index, chosen_node.outputs[0])
            name = value.name
            value.name, chosen_node.outputs[0].name = f"{name}.true", name
        return _names(chosen)

    return act


def late_positions(limit: int) -> Act:
    """Count positions above `limit` one too low."""

    def act(model: ir.Model) -> list[str] | None:
        chosen = _nodes(model, RotaryEmbedding)
        for node in chosen:
            given = node.inputs[3]
            assert given is not None
            bounds = [_constant(model, f"bound.{bound}", bound) for bound in (limit, limit + 1)]
            head = graph.insert(node, "Min", [given, bounds[0]], name=f"{node.name}/head")[0]
            rest = graph.insert(node, "Sub", [given, bounds[1]], name=f"{node.name}/rest")[0]
            zero = _constant(model, "nought", 0)
            rest = graph.insert(node, "Clip", [rest, zero], name=f"{node.name}/above")[0]
            sum_ = graph.insert(node, "Add", [head, rest], name=f"{node.name}/late")[0]
            for number, value in enumerate((head, rest, sum_)):
                value.name, value.type, value.shape = f"{node.name}/late.{number}", given.type, given.shape
            graph.producer(rest).inputs[0].name = f"{node.name}/late.3"  # type: ignore[union-attr]
            node.replace_input_with(3, sum_)
        return _names(chosen)

    return act


def interleaved(which: int) -> Act:
    def act(model: ir.Model) -> list[str] | None:
        for node in (chosen := _pick(_nodes(model, RotaryEmbedding), which)):
            other = 1 - node.attributes.get_int("interleaved", 0)
            node.attributes["interleaved"] = ir.AttrInt64("interleaved", other)
        return _names(chosen)

    return act


def through(dtype: ir.DataType, which: int) -> Act:
    """Round a residual sum to half precision and back."""

    def act(model: ir.Model) -> list[str] | None:
        chosen = _pick(_sums(model), which)

        def make(value: ir.Value) -> list[ir.Node]:
            down = _node("Cast", [value], value, "half", to=int(dtype))
            down.outputs[0].type = ir.TensorType(dtype)
            return [down, _node("Cast", [down.outputs[0]], value, "back", to=int(ir.DataType.FLOAT))]

        for node in chosen:
            _after(node, make)
        return _names(chosen)

    return act


def norms_swapped(which: int) -> Act:
    """Let the two norms of a layer read each other's weight."""

    def act(model: ir.Model) -> list[str] | None:
        found = [node for node in _nodes(model, RMSNormalization) if node.inputs[1] and not node.inputs[1].producer()]
        pair = [node for node in found if "layernorm" in str(node.name)][2 * which :][:2]
        if len(pair) < 2:
            return None
        one, other = (node.inputs[1] for node in pair)
        pair[0].replace_input_with(1, other)
        pair[1].replace_input_with(1, one)
        return _names(pair)

    return act


def caches_swapped(which: int) -> Act:
    """Let two layers read each other's keys."""

    def act(model: ir.Model) -> list[str] | None:
        pair = _nodes(model, canonical.Attention)[which:][:2]
        if len(pair) < 2 or graph.dims(pair[0].inputs[3]) != graph.dims(pair[1].inputs[3]):  # type: ignore[arg-type]
            return None
        one, other = (node.inputs[3] for node in pair)
        pair[0].replace_input_with(3, other)
        pair[1].replace_input_with(3, one)
        return _names(pair)

    return act


def cache_scaled(which: int) -> Act:
    """Keep values in the cache a little larger than they were read."""

    def act(model: ir.Model) -> list[str] | None:
        chosen = _pick(_nodes(model, canonical.Attention), which)
        factor = _constant(model, "factor", 1.001, np.float32)
        for node in chosen:
            _after(node, lambda value: [_node("Mul", [value, factor], value, "scaled")], output=2)
        return _names(chosen)

    return act


# Reports


def _flip(model: ir.Model) -> list[str] | None:
    """Negate a residual sum twice: that is no lie."""
    node = _sums(model)[-1]

    def make(value: ir.Value) -> list[ir.Node]:
        once = _node("Neg", [value], value, "once")
        return [once, _node("Neg", [once.outputs[0]], value, "twice")]

    _after(node, make)
    return _names([node])


def dead(model: ir.Model) -> list[str] | None:
    graph.initializer(model, "model.forgotten", np.ones(300, np.float32))
    return _flip(model)


def left_behind(model: ir.Model) -> list[str] | None:
    """Leave a weight behind that nothing reads any more."""
    node = _products(model, "o_proj")[-1]
    value = node.inputs[1]
    assert value is not None
    tensor = graph.tensor(value)
    copy = Derived(side_by_side, [tensor], tensor.dtype, ir.Shape(tensor.shape.numpy()), "copy")
    node.replace_input_with(1, graph.initializer(model, "lie.copy", copy, graph.sources(value)))
    return _names([node])


def sources(one: str, other: str, which: int) -> Act:
    """Swap what two weights say they come from."""

    def act(model: ir.Model) -> list[str] | None:
        pair = [_products(model, part) for part in (one, other)]
        if not all(pair):
            return None
        values = [nodes[which].inputs[1] for nodes in pair]
        a, b = (value for value in values if value is not None)
        names = graph.sources(a), graph.sources(b)
        graph.set_sources(a, names[1])
        graph.set_sources(b, names[0])
        return _flip(model)

    return act


def foreign_sources(model: ir.Model) -> list[str] | None:
    value = _products(model, "o_proj")[0].inputs[1]
    assert value is not None
    graph.set_sources(value, ["model.layers.99.self_attn.o_proj.weight"])
    return _flip(model)


def _own_lazy(model: ir.Model) -> None:
    value = _products(model, "o_proj")[0].inputs[1]
    assert value is not None
    old = graph.tensor(value)
    value.const_value = ir.LazyTensor(
        lambda: ir.Tensor(old.numpy()), old.dtype, ir.Shape(old.shape.numpy()), name=str(value.name)
    )


def _own_derived(model: ir.Model) -> None:
    value = _products(model, "o_proj")[0].inputs[1]
    assert value is not None
    old = graph.tensor(value)
    value.const_value = Derived(side_by_side, [old], old.dtype, ir.Shape(old.shape.numpy()), str(value.name))


def _own_array(model: ir.Model) -> None:
    value = _products(model, "o_proj")[0].inputs[1]
    assert value is not None
    value.const_value = ir.Tensor(graph.tensor(value).numpy().copy(), name=value.name)


def function_replaced(model: ir.Model) -> list[str] | None:
    value = _products(model, "o_proj")[0].inputs[1]
    assert value is not None
    tensor = graph.tensor(value)
    array = tensor.numpy() * np.float32(1.01)
    tensor._func = lambda: ir.Tensor(array)  # type: ignore[attr-defined]
    return _flip(model)


def derivation_replaced(model: ir.Model) -> list[str] | None:
    value = _products(model, "o_proj")[0].inputs[1]
    assert value is not None
    tensor = graph.tensor(value)
    assert isinstance(tensor, Derived)
    tensor.function = lambda arrays: arrays[0] * np.float32(1.01)
    return _flip(model)


def operands_replaced(model: ir.Model) -> list[str] | None:
    value = _products(model, "o_proj")[0].inputs[1]
    other = _products(model, "o_proj")[-1].inputs[1]
    assert value is not None
    assert other is not None
    tensor = graph.tensor(value)
    assert isinstance(tensor, Derived)
    tensor.operands = (graph.tensor(other),)
    return _flip(model)


def numbers_overwritten(model: ir.Model) -> list[str] | None:
    value = _products(model, "o_proj")[0].inputs[1]
    assert value is not None
    graph.tensor(value).numpy()[0] += 1
    return _flip(model)


def nowhere(places: list[str]) -> Changes:
    return Changes([Rewritten("model.layers.77.mlp/Mul", "improved")])


def skipped_nowhere(places: list[str]) -> Changes:
    return Changes([Rewritten(place, "improved") for place in places], [Skipped("model.layers.77", "too deep")])


def silent(places: list[str]) -> Changes:
    return Changes()


def nothing(model: ir.Model) -> list[str] | None:
    return _names(_sums(model)[:1])


def _lies() -> Iterator[Lie]:
    """List all lies, by the kinds that a proof must see."""
    some = bool
    none = lambda size: not size  # noqa: E731

    # windows
    yield Lie("window dropped", window(lambda w: 0, only=some))
    yield Lie("window of one layer dropped", window(lambda w: 0, -1, only=some), ROUNDING)
    yield Lie("window one longer", window(lambda w: w + 1, only=some), ROUNDING)
    yield Lie("window one shorter", window(lambda w: w - 1, 0, only=some))
    yield Lie("window of 64 added", window(lambda w: 64, only=none))
    yield Lie("window of 100 added to one layer", window(lambda w: 100, -1, only=none), ROUNDING)
    yield Lie("window of 7 added", window(lambda w: 7, only=none), ROUNDING)
    # rotary embedding
    yield Lie("rope wrong from 24", table(rows_from(24)))
    yield Lie("rope wrong from 100, all layers", table(rows_from(100), lazy=True), ROUNDING)
    yield Lie("rope wrong from 512", table(rows_from(512)), ROUNDING)
    yield Lie("rope of one layer wrong from 24", table(rows_from(24), -1), ROUNDING)
    yield Lie("rope wrong in the last rows", table(rows_from(-2), lazy=True))
    yield Lie("positions clipped at 100", positions(100))
    yield Lie("positions clipped at 512", positions(512), ROUNDING)
    yield Lie("positions of one layer clipped at 20", positions(20, -1))
    yield Lie("past of one layer forgotten from 90", past(90, -1), ROUNDING)
    # rows, tokens, ids
    yield Lie("rows of a batch from 2 on", beyond(0, 2, _sums))
    yield Lie("rows of a batch from 2 on, one MLP", beyond(0, 2, lambda m: _products(m, "down_proj"), -1), ROUNDING)
    yield Lie("tokens of a step from 12 on", beyond(1, 12, _sums), ROUNDING)
    yield Lie("tokens of a step from 100 on, one layer", beyond(1, 100, _sums, -2))
    yield Lie("tokens of a step from 60 on, of attention", beyond(1, 60, _attentions, 0), ROUNDING)
    yield Lie("embeddings from token 90 on", embedding(tokens_from(90)))
    yield Lie("embedding of one token", embedding(one_token), ROUNDING)
    yield Lie("default of logits_rows", default_rows)
    yield Lie("logits of late tokens", late_rows, ROUNDING)
    # numbers
    yield Lie("residuals clipped at 8", clip(8, _sums))
    yield Lie("residual of one layer clipped at 100", clip(100, _sums, -1), ROUNDING)
    yield Lie("gates clipped at 20", clip(20, lambda m: _products(m, "gate_proj")), ROUNDING)
    yield Lie("attention of one layer clipped at 3", clip(3, _attentions, -1))
    yield Lie("a thousandth added", shift(1e-3, _sums, -1), ROUNDING)
    yield Lie("small numbers become zero", flush(1e-3), ROUNDING)
    yield Lie("eps × 10", epsilon(10))
    yield Lie("eps × 10, rounding", epsilon(10), ROUNDING)
    yield Lie("eps of one norm lost", epsilon(0, -2), ROUNDING)
    yield Lie("scale of attention", attribute(canonical.Attention, "scale", lambda s: s * 1.001, -1), ROUNDING)
    yield Lie("softcap lost", attribute(canonical.Attention, "softcap", lambda s: 0.0), ROUNDING)
    yield Lie("another activation", operator(Sigmoid, "Tanh", -1), ROUNDING)
    # weights of one layer
    yield Lie("a column of one weight", weight("down_proj.weight", one_column, -1), ROUNDING)
    yield Lie("one number of one weight", weight("q_proj.weight", one_number, -1))
    yield Lie("a weight with six bits", weight("o_proj.weight", six_bits, 1), ROUNDING)
    yield Lie("a derived weight of one layer", weight("o_proj.weight", one_column, -1, derived=True), ROUNDING)
    yield Lie("a norm without its weight", weight("input_layernorm.weight", ones, -1), ROUNDING)
    yield Lie("a bias dropped", weight(".bias", zeros, -1), ROUNDING)
    yield Lie("two layers' queries swapped", swap("q_proj", 0, 1))
    yield Lie("K and V packed the wrong way round", packed((1, 0), -1), ROUNDING)
    yield Lie("K and V of one layer scaled as they are packed", packed((0, 1), -1, 1.001), ROUNDING)
    yield Lie("an expert limit added", attribute(canonical.MoE, "limit", lambda limit: limit + 7), ROUNDING)
    yield Lie("an expert limit of one layer", attribute(canonical.MoE, "limit", lambda limit: limit + 3, -1))
    yield Lie("experts' activation", attribute(canonical.MoE, "alpha", lambda alpha: alpha * 1.01, -1), ROUNDING)
    # reports
    yield Lie("an initializer that nothing reads", dead)
    yield Lie("a weight left behind", left_behind)
    yield Lie("sources of K and V swapped", sources("k_proj", "v_proj", -1))
    yield Lie("sources of two layers' gates swapped", sources("gate_proj", "up_proj", 0))
    yield Lie("sources that do not exist", foreign_sources)
    yield Lie("the function of a lazy tensor replaced", function_replaced, prepare=_own_lazy)
    yield Lie("the function of a derived tensor replaced", derivation_replaced, prepare=_own_derived)
    yield Lie("the operands of a derived tensor replaced", operands_replaced, prepare=_own_derived)
    yield Lie("numbers overwritten in place", numbers_overwritten, prepare=_own_array)
    yield Lie("a place that does not exist", _flip, report=nowhere)
    yield Lie("a skipped place that does not exist", _flip, report=skipped_nowhere)
    yield Lie("changes that are not reported", _flip, report=silent)
    yield Lie("a report of nothing", nothing)
    # budgets
    yield Lie("lossy: window dropped", window(lambda w: 0, only=some), LOSSY)
    yield Lie("lossy: window of 100 added", window(lambda w: 100, only=none), LOSSY)
    yield Lie("lossy: rope wrong from 100", table(rows_from(100)), LOSSY)
    yield Lie("lossy: positions clipped at 100", positions(100), LOSSY)
    yield Lie("lossy: rows of a batch from 4 on", beyond(0, 4, _sums, -1), LOSSY)
    yield Lie("lossy: tokens of a step from 100 on", beyond(1, 100, _sums, -1), LOSSY)
    yield Lie("lossy: embedding of one token", embedding(one_token), LOSSY)
    yield Lie("lossy: residuals clipped at 100", clip(100, _sums), LOSSY)


def _thought_up_later() -> Iterator[Lie]:
    """List lies that were thought up when the proofs stood."""
    yield Lie("positions one too low above 90", late_positions(90), ROUNDING)
    yield Lie("positions one too low above 700", late_positions(700))
    yield Lie("the last row of the largest batch", beyond(0, 7, _attentions, -1))
    yield Lie("the last token of the longest step", beyond(1, 511, lambda m: _products(m, "up_proj"), -1), ROUNDING)
    yield Lie("rope of one key interleaved", interleaved(-1), ROUNDING)
    yield Lie("a residual rounded to fp16", through(ir.DataType.FLOAT16, -1), ROUNDING)
    yield Lie("a residual rounded to bf16", through(ir.DataType.BFLOAT16, 0), ROUNDING)
    yield Lie("two norms of a layer swapped", norms_swapped(1))
    yield Lie("keys of two layers swapped", caches_swapped(0), ROUNDING)
    yield Lie("a cache kept larger", cache_scaled(-1), ROUNDING)
    yield Lie("residuals clipped at 5000", clip(5000, _sums, -1))
    yield Lie("the last column of the vocabulary", weight("embed_tokens.weight", one_token, 0), ROUNDING)


# What was thought up once more


def _expanded(model: ir.Model, node: ir.Node, name: str, op: str, inputs: list[ir.Value], like: ir.Value) -> ir.Value:
    [made] = graph.insert(node, op, inputs, name=f"{node.name}/{name}")
    made.name, made.type, made.shape = f"{node.name}/{name}", like.type, like.shape
    return made


def longest_past(model: ir.Model) -> list[str] | None:
    """Let every row of a batch have the past of the longest."""
    chosen = _nodes(model, canonical.Attention)
    for node in chosen:
        given = node.inputs[5]
        assert given is not None
        axes = _constant(model, "rows", [0])
        [most] = graph.insert(node, "ReduceMax", [given, axes], {"keepdims": 1}, name=f"{node.name}/most")
        most.name, most.type, most.shape = f"{node.name}/most", given.type, ir.Shape([1])
        all_ = _expanded(model, node, "all", "Max", [given, most], given)
        node.replace_input_with(5, all_)
    return _names(chosen)


def heads_reversed(which: int) -> Act:
    """Read the heads of a cache in reverse order; those of new tokens stay."""

    def act(model: ir.Model) -> list[str] | None:
        chosen = _pick(_nodes(model, canonical.Attention), which)
        for node in chosen:
            past = node.inputs[3]
            assert past is not None
            if (count := int((graph.dims(past) or (0, 1))[1] or 1)) < 2:  # type: ignore[arg-type]
                return None
            order = _constant(model, "heads", list(reversed(range(count))))
            [turned] = graph.insert(node, "Gather", [past, order], {"axis": 1}, name=f"{node.name}/heads")
            turned.name, turned.type, turned.shape = f"{node.name}/heads", past.type, past.shape
            node.replace_input_with(3, turned)
        return _names(chosen)

    return act


def gain_by_position(first: int) -> Act:
    """Multiply residuals by a gain for each position, in a product: 1, but in one layer not from `first` on."""

    def act(model: ir.Model) -> list[str] | None:
        chosen, last = _sums(model)[1::2][-3:], 1024
        places = next((value for value in model.graph.inputs if value.name == interface.POSITION_IDS), None)
        if len(chosen) < 2 or places is None:
            return None
        for number, node in enumerate(chosen):
            gains = np.ones((last, 1), np.float32)
            if number == len(chosen) - 1:
                gains[first:] = 1.5
            gain = graph.initializer(model, f"lie.gains.{number}", gains)
            every = graph.initializer(model, f"lie.places.{number}", np.arange(last).reshape(1, 1, last))
            value: ir.Value = places
            for op, inputs, width, dtype in (
                ("Unsqueeze", [_constant(model, "gain.axis", [2])], 1, ir.DataType.INT64),
                ("Equal", [every], last, ir.DataType.BOOL),
                ("Cast", [], last, ir.DataType.FLOAT),
                ("MatMul", [gain], 1, ir.DataType.FLOAT),
            ):
                to = {"to": int(dtype)} if op == "Cast" else None
                [value] = graph.insert(node, op, [value, *inputs], to, name=f"{node.name}/lie.{op}")
                value.name, value.type = f"{node.name}/lie.{op}", ir.TensorType(dtype)
                value.shape = ir.Shape(["batch", "sequence", width])
            _after(node, lambda made, gain=value: [_node("Mul", [made, gain], made, "gained")])
        return _names(chosen)

    return act


def attribute_in_place(model: ir.Model) -> list[str] | None:
    """Change an attribute where the graph before holds it, too."""
    node = _attentions(model)[-1]
    node.attributes["scale"]._value = node.attributes["scale"].as_float() * 1.01
    return _flip(model)


def sources_in_place(model: ir.Model) -> list[str] | None:
    """Say that weights come from elsewhere in the list that the graph before has, too."""
    value = _products(model, "o_proj")[0].inputs[1]
    assert value is not None
    other = _products(model, "o_proj")[-1].inputs[1]
    assert other is not None
    value.metadata_props.update(other.metadata_props)
    return _flip(model)


def stash_type(model: ir.Model) -> list[str] | None:
    """Let a norm say that it computes in fp16."""
    node = _nodes(model, RMSNormalization)[-1]
    node.attributes["stash_type"] = ir.AttrInt64("stash_type", int(ir.DataType.FLOAT16))
    return _names([node])


def other_opset(model: ir.Model) -> list[str] | None:
    """Say that operators are those of an older version."""
    model.opset_imports[""] = model.opset_imports[""] - 1
    model.graph.opset_imports[""] = model.opset_imports[""]
    return _names(_sums(model)[-1:])


def own_function(model: ir.Model) -> list[str] | None:
    """Give an operator of the standard a body of the model's own."""
    x = ir.val("x", ir.DataType.FLOAT)
    node = ir.node("Neg", [x], num_outputs=1)
    node.outputs[0].name = "y"
    body = ir.Graph([x], [node.outputs[0]], nodes=[node], name="sigmoid", opset_imports={"": 23})
    made = ir.Function(domain="", name="Sigmoid", graph=body, attributes=[])
    model.functions[made.identifier()] = made
    return _flip(model)


def ulp(array: NDArray[np.float32]) -> None:
    """Move one small number by its last bit."""
    at = int(np.argmin(np.abs(array) + (array == 0)))
    array.flat[at] = np.nextafter(array.flat[at], np.float32(np.inf), dtype=np.float32)


def one_expert(model: ir.Model) -> list[str] | None:
    """Write the experts of all layers anew, and those of the last one with an expert that is not what it was."""
    found = [value for name, value in model.graph.initializers.items() if name.endswith("experts.down_proj")]
    for value in found:
        old = graph.tensor(value)

        def function(arrays: tuple[NDArray[np.float32], ...], last: bool = value is found[-1]) -> NDArray[np.float32]:
            array = np.array(arrays[0], np.float32)
            if last:
                array[-1] *= np.float32(1.5)
            return array

        value.const_value = Derived(function, [old], old.dtype, ir.Shape(old.shape.numpy()), str(value.name))
    return [str(value.name) for value in found] or None


def lowest_frequency(array: NDArray[np.float32]) -> None:
    array[:, -1] = array[0, -1]


def switch_later(model: ir.Model) -> list[str] | None:
    """Let the angles of a long text begin one token later."""
    found = [
        node
        for node in model.graph
        if any(value is not None and value.name == interface.TEXT_LENGTHS for value in node.inputs)
    ]
    for node in found:
        number = int(graph.tensor(graph.operand(node, 1)).numpy())
        node.replace_input_with(1, _constant(model, f"switch.{number}", number + 1))
    return _names(found)


def _quantized(model: ir.Model) -> None:
    from llmforge.passes import QuantizeWeights

    QuantizeWeights(block_size=32, method="rtn", budget=Budget(kld_mean=100.0)).run(model, _CPU)


def scales_swapped(model: ir.Model) -> list[str] | None:
    """Let two products of one shape read each other's scales."""
    found: dict[object, ir.Node] = {}
    for node in _nodes(model, contrib.MatMulNBits):
        shapes = tuple(graph.static(node.inputs[at]) for at in (1, 2))
        if (other := found.setdefault(shapes, node)) is not node:
            one, two = node.inputs[2], other.inputs[2]
            node.replace_input_with(2, two)
            other.replace_input_with(2, one)
            return _names([node, other])
    return None


def _thought_up_last() -> Iterator[Lie]:
    """List lies that were thought up when those above were caught."""
    yield Lie("the longest past for all rows", longest_past, ROUNDING)
    yield Lie("heads of a cache reversed as it is read", heads_reversed(-1), ROUNDING)
    yield Lie(
        "a softcap that large scores alone feel",
        attribute(canonical.Attention, "softcap", lambda s: s * 4 or 1e3),
        ROUNDING,
    )
    yield Lie("scales of two products swapped", scales_swapped, prepare=_quantized)
    yield Lie("the last slot of the context", past(1022, -1))
    yield Lie("a gain by position of one layer", gain_by_position(100), ROUNDING)
    yield Lie("an attribute changed in place", attribute_in_place)
    yield Lie("sources changed in place", sources_in_place)
    yield Lie("a norm that stashes in fp16", stash_type)
    yield Lie("operators of an older version", other_opset)
    yield Lie("a function in an operator's place", own_function)
    yield Lie("the last bit of one small number", weight("down_proj.weight", ulp, -1))
    yield Lie(
        "the last bit of an epsilon",
        attribute(RMSNormalization, "epsilon", lambda e: float(np.nextafter(np.float32(e), np.float32(1)))),
    )
    yield Lie("numbers of one expert among new ones", one_expert, ROUNDING)
    yield Lie("the lowest frequency of rope", table(lowest_frequency, -1), ROUNDING)
    yield Lie("long rope switched a token later", switch_later, ROUNDING)


def smoothed_on_one_side(model: ir.Model) -> list[str] | None:
    """Move factors of what layers read into all weights but those of the last reader."""
    for product in MatMul.all(model):
        x, k = product.x, graph.static(product.w)[0]
        readers = [MatMul(node) for node, _ in x.uses() if MatMul.matches(node)]
        last = readers[-1].w
        if k > 1 and smoothing.smooth(model, x, np.arange(k).astype(np.int8) % 4) is None:
            readers[-1].w = last
            graph.drop_unused(model)
            return _names([reader.node for reader in readers])
    return None


def _of_compression() -> Iterator[Lie]:
    """List lies of passes that round activations."""
    yield Lie("factors of activations on one side", smoothed_on_one_side)
    yield Lie("factors of activations on one side, as rounding", smoothed_on_one_side, ROUNDING)


LIES = (*_lies(), *_thought_up_later(), *_thought_up_last(), *_of_compression())
