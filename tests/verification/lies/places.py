"""Lies about places: right everywhere but in one range of an axis, or in several together, that no fixed probe is in.

What a node makes is multiplied by 1.5 where a condition on places holds, and by 1 elsewhere, which changes no bit.
`OF_THE_TABLE` are those that went through proofs at fixed places; `MORE` are of other kinds.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import onnx_ir as ir

from llmforge.ir import graph, interface
from llmforge.ir.operators import canonical
from llmforge.ir.operators.standard import Gather, RotaryEmbedding

from .table import LOSSY, ROUNDING, Act, Lie, _attentions, _names, _nodes, _pick, _products, _sums

Find = Callable[[ir.Model], list[ir.Node]]
Condition = Callable[["Conditions"], ir.Value]
WRONG = 0.5  # is added to the factor 1


@dataclass
class Conditions:
    """Writes nodes in front of others that tell where a step stands: numbers are int64, conditions bool."""

    model: ir.Model
    value: ir.Value  # what is to be wrong somewhere
    nodes: list[ir.Node] = field(default_factory=list)

    def op(self, op: str, *inputs: ir.Value | int | Sequence[int], **attributes: object) -> ir.Value:
        """Write a node; numbers become constants."""
        read = [each if isinstance(each, ir.Value) else self.constant(each) for each in inputs]
        node = ir.node(op, read, attributes or None, num_outputs=1)
        node.name = f"{self.value.name}/place.{len(self.nodes)}"
        [made] = node.outputs
        made.name = node.name
        self.nodes.append(node)
        return made

    def constant(self, number: int | Sequence[int] | np.ndarray) -> ir.Value:
        array = np.array(number, getattr(number, "dtype", np.int64))
        return graph.initializer(self.model, f"{self.value.name}/number.{len(self.model.graph.initializers)}", array)

    def input(self, name: str) -> ir.Value:
        found = next((value for value in self.model.graph.inputs if value.name == name), None)
        return self.value if found is None else found

    @property
    def tokens(self) -> ir.Value:
        """Tokens of the step, [1]."""
        return self.op("Shape", self.input(interface.INPUT_IDS), start=1, end=2)

    @property
    def rows(self) -> ir.Value:
        """Rows of the batch, [1]."""
        return self.op("Shape", self.input(interface.INPUT_IDS), start=0, end=1)

    @property
    def past(self) -> ir.Value:
        """Tokens behind the step, [B, 1, 1]."""
        wide = self.op("Cast", self.input(interface.PAST_LENGTHS), to=int(ir.DataType.INT64))
        return self.op("Unsqueeze", wide, [1, 2])

    @property
    def positions(self) -> ir.Value:
        """Positions, [B, S, 1]."""
        return self.op("Unsqueeze", self.input(interface.POSITION_IDS), [2])

    @property
    def ids(self) -> ir.Value:
        """Token ids, [B, S, 1]."""
        return self.op("Unsqueeze", self.input(interface.INPUT_IDS), [2])

    @property
    def in_step(self) -> ir.Value:
        """Number of each token in its step, [1, S, 1]."""
        return self.op("Unsqueeze", self.op("Range", *map(self._scalar, (0, self.tokens, 1))), [0, 2])

    @property
    def row(self) -> ir.Value:
        """Number of each row in its batch, [B, 1, 1]."""
        return self.op("Unsqueeze", self.op("Range", *map(self._scalar, (0, self.rows, 1))), [1, 2])

    def _scalar(self, value: ir.Value | int) -> ir.Value:
        return (
            self.op("Reshape", value, self.constant(np.zeros(0, np.int64)))
            if isinstance(value, ir.Value)
            else self.constant(np.array(value))
        )

    def within(self, number: ir.Value, low: int, high: int) -> ir.Value:
        """Say where `low` <= number <= `high`."""
        return self.both(self.op("GreaterOrEqual", number, [low]), self.op("LessOrEqual", number, [high]))

    def both(self, *conditions: ir.Value) -> ir.Value:
        first, *others = conditions
        for other in others:
            first = self.op("And", first, other)
        return first

    def rest(self, number: ir.Value, divisor: int, rest: int) -> ir.Value:
        """Say where a number leaves `rest`."""
        return self.op("Equal", self.op("Mod", number, [divisor]), [rest])


def wrong(where: Condition, find: Find, which: int | None = -1, *, output: int = 0, axis: int | None = None) -> Act:
    """Let what nodes make be wrong `where` a condition holds; `axis` that of channels, of which the first is wrong."""

    def act(model: ir.Model) -> list[str] | None:
        chosen = _pick(find(model), which)
        for node in chosen:
            value = node.outputs[output]
            conditions = Conditions(model, value)
            where_ = conditions.op("Cast", where(conditions), to=int(ir.DataType.FLOAT))
            shares = np.full(1, WRONG, np.float32)
            if axis is not None:
                shares = np.zeros(int((graph.dims(value) or ())[axis] or 1), np.float32)  # type: ignore[arg-type]
                shares[: max(1, len(shares) // 20)] = WRONG
            share = conditions.constant(shares)
            factor = conditions.op(
                "Add", conditions.op("Mul", where_, share), conditions.constant(np.array([1], np.float32))
            )
            product = ir.node("Mul", [value, factor], name=f"{value.name}/wrong", num_outputs=1)
            product.outputs[0].type, product.outputs[0].shape = value.type, value.shape
            owner, name = graph.owner(node), value.name
            readers = [
                (reader, index)
                for reader, index in value.uses()
                if reader is not product and reader not in conditions.nodes
            ]
            owner.insert_after(node, [*conditions.nodes, product])
            for reader, index in readers:
                reader.replace_input_with(index, product.outputs[0])
            for index, given in enumerate(owner.outputs):
                if given is value:
                    owner.outputs[index] = product.outputs[0]
            value.name, product.outputs[0].name = f"{name}.true", name
        return _names(chosen)

    return act


def cache_scaled_where(where: Condition, part: int, which: int = -1) -> Act:
    """Let attention read a past, 3 of keys and 4 of values, that is wrong `where` a condition on steps holds."""

    def act(model: ir.Model) -> list[str] | None:
        chosen = _pick(_nodes(model, canonical.Attention), which)
        for node in chosen:
            value = node.inputs[part]
            assert value is not None
            conditions = Conditions(model, value)
            where_ = conditions.op("Cast", where(conditions), to=int(ir.DataType.FLOAT))
            half = conditions.op("Mul", where_, conditions.constant(np.array([WRONG], np.float32)))
            factor = conditions.op("Add", half, conditions.constant(np.array([1], np.float32)))
            made = conditions.op("Mul", value, factor)
            made.type, made.shape = value.type, value.shape
            graph.owner(node).insert_before(node, conditions.nodes)
            node.replace_input_with(part, made)
        return _names(chosen)

    return act


def slots(conditions: Conditions, low: int, high: int) -> ir.Value:
    """Mark slots of a cache, [C, 1]."""
    count = conditions.op("Shape", conditions.value, start=2, end=3)
    numbers = conditions.op("Range", *map(conditions._scalar, (0, count, 1)))
    return conditions.op("Unsqueeze", conditions.within(numbers, low, high), [1])


def window_where(where: Condition, by: int) -> Act:
    """Let attention know `by` tokens less of its past than it holds, where a condition on rows [B, 1, 1] holds."""

    def act(model: ir.Model) -> list[str] | None:
        chosen = _pick(_nodes(model, canonical.Attention), -1)
        for node in chosen:
            given = node.inputs[5]
            assert given is not None
            conditions = Conditions(model, given)
            flag = conditions.op("Squeeze", where(conditions), [1, 2])
            moved = conditions.op(
                "Mul",
                conditions.op("Cast", flag, to=int(ir.DataType.INT32)),
                conditions.constant(np.array([by], np.int32)),
            )
            made = conditions.op("Sub", given, moved)
            made.type, made.shape = given.type, given.shape
            graph.owner(node).insert_before(node, conditions.nodes)
            node.replace_input_with(5, made)
        return _names(chosen)

    return act


def _rotary(model: ir.Model) -> list[ir.Node]:
    return _nodes(model, RotaryEmbedding)


def _up(model: ir.Model) -> list[ir.Node]:
    return _products(model, "up_proj") or _products(model, "gate_proj") or _products(model, "o_proj")


def _head(model: ir.Model) -> list[ir.Node]:
    """What makes the logits."""
    return [node for node in model.graph if any(value.name == interface.LOGITS for value in node.outputs)]


def _lookup(model: ir.Model) -> list[ir.Node]:
    return [node for node in _nodes(model, Gather) if node.inputs[1] and node.inputs[1].name == interface.INPUT_IDS]


def _alike(c: Conditions, axis: int) -> ir.Value:
    """Say where a token holds what the one before it holds, along rows (0) or tokens (1); of the first: never."""
    start, end = ([0], [-1]), ([1], [np.iinfo(np.int64).max])
    before = c.op("Slice", c.value, *start, [axis])
    after = c.op("Slice", c.value, *end, [axis])
    apart = c.op("Abs", c.op("Sub", after, before))
    most = c.op("ReduceMax", apart, [2], keepdims=1)
    same = c.op("Cast", c.op("Equal", most, c.constant(np.array([0], np.float32))), to=int(ir.DataType.INT64))
    pads = [0, 0, 0, 0, 0, 0]
    pads[axis] = 1
    return c.op("Cast", c.op("Pad", same, pads), to=int(ir.DataType.BOOL))


def _padding(c: Conditions, low: int, high: int) -> ir.Value:
    """Say which rows have from `low` to `high` tokens of padding, as their ids of 0 at the end tell."""
    is_pad = c.op("Cast", c.op("Equal", c.input(interface.INPUT_IDS), [0]), to=int(ir.DataType.INT64))
    count = c.op("ReduceSum", is_pad, [1], keepdims=1)
    return c.op("Unsqueeze", c.within(count, low, high), [2])


def _of_the_table() -> Iterator[Lie]:
    yield Lie("positions 530 to 999", wrong(lambda c: c.within(c.positions, 530, 999), _sums))
    yield Lie("positions 530 to 999, rounding", wrong(lambda c: c.within(c.positions, 530, 999), _up), ROUNDING)
    yield Lie(
        "decode behind 520 to 999 tokens",
        wrong(lambda c: c.both(c.within(c.past, 520, 999), c.within(c.tokens, 1, 1)), _attentions),
    )
    yield Lie(
        "attention behind 600 to 1000 tokens", wrong(lambda c: c.within(c.past, 600, 1000), _attentions), ROUNDING
    )
    yield Lie(
        "chunked prefill behind 512 to 899 tokens",
        wrong(lambda c: c.both(c.within(c.past, 512, 899), c.within(c.tokens, 2, 512)), _attentions),
    )
    yield Lie("batches of 3 to 15 rows", wrong(lambda c: c.within(c.rows, 3, 15), _up), ROUNDING)
    yield Lie("steps of 257 to 511 tokens", wrong(lambda c: c.within(c.tokens, 257, 511), _up))


def _more() -> Iterator[Lie]:
    # one axis
    yield Lie("positions 700 to 750", wrong(lambda c: c.within(c.positions, 700, 750), _sums), ROUNDING)
    yield Lie("every 20th position", wrong(lambda c: c.rest(c.positions, 20, 7), _sums))
    yield Lie("steps of 300 to 325 tokens", wrong(lambda c: c.within(c.tokens, 300, 325), _up), ROUNDING)
    yield Lie(
        "steps of an odd number of tokens above 16",
        wrong(lambda c: c.both(c.rest(c.tokens, 2, 1), c.within(c.tokens, 17, 512)), _sums),
    )
    yield Lie("steps of every 20th length", wrong(lambda c: c.rest(c.tokens, 20, 13), _up))
    yield Lie("steps of 17 to 40 tokens", wrong(lambda c: c.within(c.tokens, 17, 40), _attentions), ROUNDING)
    yield Lie("batches of 7 rows", wrong(lambda c: c.within(c.rows, 7, 7), _sums))
    yield Lie("batches of 9 rows, attention", wrong(lambda c: c.within(c.rows, 9, 9), _attentions), ROUNDING)
    yield Lie(
        "an odd number of rows above 1", wrong(lambda c: c.both(c.rest(c.rows, 2, 1), c.within(c.rows, 3, 99)), _up)
    )
    yield Lie(
        "row 6 of up to 15", wrong(lambda c: c.both(c.within(c.row, 6, 6), c.within(c.rows, 7, 15)), _sums), ROUNDING
    )
    yield Lie("token ids 4000 to 4409", wrong(lambda c: c.within(c.ids, 4000, 4409), _lookup))
    yield Lie("token ids 4000 to 4409, in a layer", wrong(lambda c: c.within(c.ids, 4000, 4409), _sums), ROUNDING)
    # several together
    yield Lie(
        "angles of one head beyond position 640",
        wrong(lambda c: c.within(c.positions, 640, 780), _rotary, axis=-1),
        ROUNDING,
    )
    yield Lie("keys' angles at positions 200 to 252", wrong(lambda c: c.within(c.positions, 200, 252), _rotary, -1))
    yield Lie(
        "continuations behind 300 to 360 tokens",
        wrong(lambda c: c.both(c.within(c.past, 300, 360), c.within(c.tokens, 2, 512)), _attentions),
    )
    yield Lie(
        "steps of 100 to 300 tokens behind 100 to 400",
        wrong(lambda c: c.both(c.within(c.past, 100, 400), c.within(c.tokens, 100, 300)), _attentions),
        ROUNDING,
    )
    yield Lie(
        "texts that a step of several tokens makes 700 to 800 long",
        wrong(
            lambda c: c.both(c.within(c.op("Add", c.past, c.tokens), 700, 800), c.within(c.tokens, 2, 512)), _attentions
        ),
    )
    yield Lie(
        "the first token of a step behind 70 to 500",
        wrong(
            lambda c: c.both(c.within(c.past, 70, 500), c.within(c.in_step, 0, 0), c.within(c.tokens, 3, 512)), _sums
        ),
    )
    yield Lie(
        "the last tokens of steps of 400 to 500",
        wrong(lambda c: c.both(c.within(c.tokens, 400, 500), c.within(c.in_step, 390, 500)), _up),
        ROUNDING,
    )
    yield Lie(
        "odd rows behind 260 to 500 tokens",
        wrong(lambda c: c.both(c.rest(c.row, 2, 1), c.within(c.past, 260, 500)), _attentions),
    )
    yield Lie(
        "two rows of 300 to 900 tokens behind",
        wrong(lambda c: c.both(c.within(c.rows, 2, 5), c.within(c.past, 300, 900)), _attentions),
        ROUNDING,
    )
    yield Lie("a window one too short behind 530 to 900 tokens", window_where(lambda c: c.within(c.past, 530, 900), 1))
    yield Lie(
        "keys of slots 100 to 160 behind 600 to 950",
        cache_scaled_where(lambda c: c.both(slots(c, 100, 160), c.op("Unsqueeze", c.within(c.past, 600, 950), [1])), 3),
    )
    yield Lie(
        "values of slots 520 to 571 in steps of several tokens",
        cache_scaled_where(lambda c: c.both(slots(c, 520, 571), c.within(c.tokens, 2, 512)), 4),
        ROUNDING,
    )
    yield Lie(
        "keys kept of positions 300 to 352",
        wrong(lambda c: c.op("Unsqueeze", c.within(c.past, 300, 352), [3]), _attentions, output=1),
    )
    yield Lie(
        "values kept of decode behind 800 to 1000",
        wrong(
            lambda c: c.op("Unsqueeze", c.both(c.within(c.past, 800, 1000), c.within(c.tokens, 1, 1)), [3]),
            _attentions,
            output=2,
        ),
        ROUNDING,
    )
    yield Lie("equal tokens", wrong(lambda c: _alike(c, 1), _up))
    yield Lie("equal rows", wrong(lambda c: _alike(c, 0), _up), ROUNDING)
    yield Lie("rows with 3 to 9 tokens of padding", wrong(lambda c: _padding(c, 4, 9), _sums))
    yield Lie(
        "a slice of the vocabulary in steps of 20 to 200 tokens",
        wrong(lambda c: c.within(c.tokens, 20, 200), _head, axis=-1),
    )
    yield Lie(
        "a slice of the vocabulary in batches of 4 to 6",
        wrong(lambda c: c.within(c.rows, 4, 6), _head, axis=-1),
        ROUNDING,
    )
    yield Lie(
        "logits of 3 to 6 rows asked for",
        wrong(lambda c: c.within(c.op("Shape", c.value, start=1, end=2), 3, 6), _head),
    )
    yield Lie(
        "64 to 128 tokens of several rows",
        wrong(lambda c: c.both(c.within(c.op("Mul", c.rows, c.tokens), 33, 128), c.within(c.rows, 2, 99)), _up),
    )
    # lossy
    yield Lie("lossy: positions 530 to 999", wrong(lambda c: c.within(c.positions, 530, 999), _sums), LOSSY)
    yield Lie(
        "lossy: attention behind 600 to 1000 tokens", wrong(lambda c: c.within(c.past, 600, 1000), _attentions), LOSSY
    )
    yield Lie("lossy: batches of 3 to 15 rows", wrong(lambda c: c.within(c.rows, 3, 15), _up), LOSSY)
    yield Lie("lossy: steps of 257 to 511 tokens", wrong(lambda c: c.within(c.tokens, 257, 511), _up), LOSSY)
    yield Lie(
        "lossy: continuations behind 300 to 360",
        wrong(lambda c: c.both(c.within(c.past, 300, 360), c.within(c.tokens, 2, 512)), _attentions),
        LOSSY,
    )


OF_THE_TABLE = tuple(_of_the_table())
MORE = tuple(_more())
