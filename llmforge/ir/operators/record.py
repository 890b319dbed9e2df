"""The record of one operator: its inputs, outputs, attributes and traits.

A record is a class: its body names inputs, attributes and outputs in the order of the operator's definition, its class
attributes are the traits that the rest of the package asks for. An instance is a typed view of one node:

    class MatMulNBits(Operator, domain=MICROSOFT):
        a = Input()
        scales = Input(FLOATS, 1, 2)
        bias = OptionalInput(FLOATS, 1)
        K = integer()

    product = MatMulNBits.of(node)    # None: the node is of another operator
    product.scales                    # an ir.Value
    product.bias                      # an ir.Value or None
    product.K                         # an int
    product.bias = None               # rewires the node
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Generic, Literal, Self, TypeVar, overload

import onnx_ir as ir

from llmforge.base.errors import VerificationError
from llmforge.ir import graph

FLOAT = ir.DataType.FLOAT
INT8, INT32, INT64, UINT8 = ir.DataType.INT8, ir.DataType.INT32, ir.DataType.INT64, ir.DataType.UINT8
BOOL, FLOAT8 = ir.DataType.BOOL, ir.DataType.FLOAT8E4M3FN
T = TypeVar("T")
Dtypes = frozenset[ir.DataType]
HALVES: Dtypes = frozenset({ir.DataType.FLOAT16, ir.DataType.BFLOAT16})
FLOATS: Dtypes = HALVES | {FLOAT}
FP32: Dtypes = frozenset({FLOAT})
I32: Dtypes = frozenset({INT32})
I64: Dtypes = frozenset({INT64})
BOOLS: Dtypes = frozenset({BOOL})
BYTES: Dtypes = frozenset({UINT8})
NUMBERS: Dtypes = FLOATS | {INT32, INT64}
ANY: Dtypes = frozenset(ir.DataType)

STANDARD, CANONICAL, MICROSOFT = "", "llmforge", "com.microsoft"
CPU, CUDA = "llmforge.cpu", "llmforge.cuda"  # llmforge's own kernels
OPSETS: Mapping[str, int] = {STANDARD: 24, CANONICAL: 1, MICROSOFT: 1, CPU: 1, CUDA: 1}


class Stage(enum.Enum):
    """Where an operator may stand (docs/dialect.md)."""

    DIALECT = enum.auto()  # between the frontend and an engine
    OWN_ATTENTION = enum.auto()  # there too, where the model's own attention was traced (`interface.FALLBACK`)
    LOWERED = enum.auto()  # in what an engine's lowering or a raw translation writes, never in the dialect


class Precision(enum.Enum):
    """What an operator computes in, where a graph is lowered to half precision (`rewrite.precision`)."""

    FOLLOWS = enum.auto()  # half precision where all that it reads is
    HALF = enum.auto()  # always: it carries the work
    FP32 = enum.auto()  # never: a few bits spoil its result
    NO_HALF = enum.auto()  # has fp32 kernels alone: a graph with it is not lowered


class Sign(enum.Enum):
    """When no element of the first output is negative."""

    UNKNOWN = enum.auto()
    NEVER_NEGATIVE = enum.auto()  # whatever it reads
    AS_FIRST = enum.auto()  # where its first input is not
    AS_ALL = enum.auto()  # where no input is
    AS_ANY = enum.auto()  # where one input is not


@dataclass(frozen=True)
class Seen:
    """The dtypes with which TensorRT-RTX 1.7.1 was seen to build an operator, ahead of time."""

    dtypes: Dtypes  # of what it computes with or moves
    besides: Dtypes = frozenset()  # of indices, shapes, masks and codes, and of what comparisons make


class Field(Generic[T]):
    """A part of a record that is read by its name; on a view, what the node has there."""

    name = ""

    def __set_name__(self, owner: type[Operator], name: str) -> None:
        self.name = name

    def _read(self, view: Operator) -> T:
        """Return what the node of `view` has there."""
        raise NotImplementedError

    @overload
    def __get__(self, view: None, owner: type[Operator]) -> Self: ...
    @overload
    def __get__(self, view: Operator, owner: type[Operator]) -> T: ...
    def __get__(self, view: Operator | None, owner: type[Operator]) -> Self | T:
        return self if view is None else self._read(view)


class Operand:
    """An input of an operator: one that every node has (`Input`), or may leave out (`OptionalInput`).

    Args:
        dtypes: what it may hold.
        ranks: what rank it may have; none: any.
        fp32: it is fp32 whatever its operator computes in.
        table: its operator looks a few rows of it up.
        of: axis 0 is the experts, of which a token reads those that were chosen for it, or the adapters, of which each
            row of the batch reads one.
        chooses: it chooses experts, or weighs them.
        heads: the axis of the query heads.
        kv_heads: the axis of the KV heads, where it has rank 4.
        rotary: a table of rotary embedding, a row a position.
    """

    name: str
    optional = False

    def __init__(
        self,
        dtypes: Iterable[ir.DataType] = FLOATS,
        *ranks: int,
        fp32: bool = False,
        table: bool = False,
        of: Literal["experts", "adapters"] | None = None,
        chooses: bool = False,
        heads: int | None = None,
        kv_heads: int | None = None,
        rotary: bool = False,
    ) -> None:
        self.index, self.dtypes, self.ranks = -1, frozenset(dtypes), frozenset(ranks)
        self.fp32, self.table, self.of, self.chooses = fp32, table or rotary, of, chooses
        self.heads, self.kv_heads, self.rotary = heads, kv_heads, rotary


class Input(Operand, Field[ir.Value]):
    """An input that every node has; on a view, its value."""

    def _read(self, view: Operator) -> ir.Value:
        return view.required(self)

    def __set__(self, view: Operator, value: ir.Value) -> None:
        view.node.replace_input_with(self.index, value)


class OptionalInput(Operand, Field[ir.Value | None]):
    """An input that a node may leave out; on a view, its value or None."""

    optional = True

    def _read(self, view: Operator) -> ir.Value | None:
        return view.operand(self)

    def __set__(self, view: Operator, value: ir.Value | None) -> None:
        if len(view.node.inputs) <= self.index:
            if value is None:
                return
            view.node.resize_inputs(self.index + 1)
        view.node.replace_input_with(self.index, value)
        while view.node.inputs and view.node.inputs[-1] is None:
            view.node.resize_inputs(len(view.node.inputs) - 1)


class Output(Field[ir.Value]):
    """An output; on a view, its value.

    Args:
        like: the input whose dtype it has; "" for the first.
        dtype: the dtype that it has whatever is read.
    """

    def __init__(self, like: str = "", dtype: ir.DataType | None = None) -> None:
        self.index, self.like, self.dtype = -1, like, dtype

    def _read(self, view: Operator) -> ir.Value:
        return view.node.outputs[self.index]


class Attribute(Field[T]):
    """An attribute; on a view, its value. Made by `integer`, `real`, `text` and so on."""

    def __init__(
        self,
        type_: ir.AttributeType,
        parse: Callable[[ir.Attr], T],
        default: T,
        *,
        required: bool = False,
        stated: bool = False,
        fixed: bool = False,
    ) -> None:
        self.type, self.default, self.required = type_, default, required
        self.stated = required or stated  # the dialect wants it written, whatever its default
        self.fixed = fixed  # the dialect allows the default alone
        self._parse = parse

    def _read(self, view: Operator) -> T:
        attribute = view.node.attributes.get(self.name)
        if attribute is not None:
            return self._parse(attribute)
        if self.required:
            raise view.malformed(f"attribute {self.name!r} is missing")
        return self.default

    def __set__(self, view: Operator, value: graph.Attribute) -> None:
        [view.node.attributes[self.name]] = ir.convenience.convert_attributes({self.name: value})


def integer(default: int | None = None, *, fixed: bool = False) -> Attribute[int]:
    """Describe an integer; without a default it must be there, and in the dialect it is the default where `fixed`."""
    return Attribute(ir.AttributeType.INT, ir.Attr.as_int, default or 0, required=default is None, fixed=fixed)


def real(default: float | None = None, *, stated: bool = False) -> Attribute[float]:
    """Describe a number; without a default it must be there, and in the dialect where it is `stated`."""
    missing = default is None
    return Attribute(ir.AttributeType.FLOAT, ir.Attr.as_float, default or 0.0, required=missing, stated=stated)


def text(default: str | None = None) -> Attribute[str]:
    """Describe a text; without a default it must be there."""
    return Attribute(ir.AttributeType.STRING, ir.Attr.as_string, default or "", required=default is None)


def integers() -> Attribute[Sequence[int]]:
    """Describe a list of integers, which must be there."""
    return Attribute(ir.AttributeType.INTS, ir.Attr.as_ints, (), required=True)


def optional_integer() -> Attribute[int | None]:
    """Describe an integer that may be left out, with no number in its place."""
    return Attribute[int | None](ir.AttributeType.INT, ir.Attr.as_int, None)


def optional_real() -> Attribute[float | None]:
    """Describe a number that may be left out, with none in its place."""
    return Attribute[float | None](ir.AttributeType.FLOAT, ir.Attr.as_float, None)


def optional_tensor() -> Attribute[ir.TensorProtocol | None]:
    """Describe a tensor that may be left out."""
    return Attribute[ir.TensorProtocol | None](ir.AttributeType.TENSOR, ir.Attr.as_tensor, None)


class Operator:
    """An operator, as a class; a node of it, as an instance.

    Class attributes below are traits: a record overrides those in which it differs.
    """

    domain: ClassVar[str] = STANDARD
    op_type: ClassVar[str] = ""
    identity: ClassVar[tuple[str, str]] = ("", "")  # domain and op_type
    inputs: ClassVar[tuple[Operand, ...]] = ()
    outputs: ClassVar[tuple[Output, ...]] = (Output(),)
    attributes: ClassVar[Mapping[str, Attribute[Any]]] = {}

    stage: ClassVar[Stage] = Stage.DIALECT
    variadic: ClassVar[bool] = False  # the last input may repeat
    most_outputs: ClassVar[int] = 0  # of an operator whose outputs repeat; 0: they are as listed
    pointwise: ClassVar[bool] = False  # each number that it makes comes from one number of each input, which broadcast
    moves: ClassVar[bool] = False  # what it makes are numbers that it read, or their negatives: nothing is rounded
    lookup: ClassVar[bool] = False  # makes numbers of codes, or of places in a table
    linear: ClassVar[bool] = False  # a product of tokens with a matrix
    adds_residual: ClassVar[bool] = False  # adds to the residual stream
    precision: ClassVar[Precision] = Precision.FOLLOWS
    sign: ClassVar[Sign] = Sign.UNKNOWN
    state: ClassVar[str] = ""  # the part of a layer's cache that its input `past` is, where every token replaces it
    rounds: ClassVar[bool] = False  # its kernel rounds what it reads to fewer bits
    indivisible: ClassVar[str] = ""  # why a graph with it cannot be divided among ranks
    prepacked: ClassVar[bool] = False  # ONNX Runtime computes otherwise where its weights are no initializers
    tensorrt: ClassVar[Seen | None] = None  # None: TensorRT was not seen to build it

    __slots__ = ("node",)

    def __init_subclass__(cls, *, domain: str | None = None, op_type: str | None = None) -> None:
        super().__init_subclass__()
        cls.domain = cls.domain if domain is None else domain
        cls.op_type = op_type or cls.__name__  # stated where another domain has an operator of the name
        cls.identity = (cls.domain, cls.op_type)
        own = vars(cls)
        inputs = {field.name: field for field in cls.inputs}
        inputs |= {name: field for name, field in own.items() if isinstance(field, Operand)}
        outputs = {field.name: field for field in cls.outputs if field.name}
        outputs |= {name: field for name, field in own.items() if isinstance(field, Output)}
        cls.inputs = tuple(inputs.values())
        cls.outputs = tuple(outputs.values()) or cls.outputs
        cls.attributes = {**cls.attributes, **{n: field for n, field in own.items() if isinstance(field, Attribute)}}
        for index, given in enumerate(cls.inputs):
            given.index = index
        for index, made in enumerate(cls.outputs):
            made.index = index

    def __init__(self, node: ir.Node) -> None:
        self.node = node

    @classmethod
    def named(cls, op_type: str, **traits: object) -> type[Self]:
        """Make the record of an operator that differs from this family in its name and `traits` alone."""
        assert all(hasattr(cls, trait) for trait in traits), f"{op_type} has a trait that no operator has: {traits}"
        return type(op_type, (cls,), {"__module__": cls.__module__, **traits})

    @classmethod
    def matches(cls, node: ir.Node | None) -> bool:
        """Say whether `node` is of this operator."""
        return node is not None and identity(node) == cls.identity

    @classmethod
    def of(cls, node: ir.Node | None) -> Self | None:
        """View `node`; None where it is of another operator."""
        return cls(node) if node is not None and cls.matches(node) else None

    @classmethod
    def made(cls, value: ir.Value | None) -> Self | None:
        """View the node that makes `value`; None where it is of another operator."""
        return None if value is None else cls.of(value.producer())

    @classmethod
    def only_reader(cls, value: ir.Value) -> Self | None:
        """View the node that alone reads `value`; None where it is of another operator, or others read it, too."""
        return cls.of(graph.only_reader(value))

    @classmethod
    def all(cls, model: ir.Model) -> list[Self]:
        """View every node of this operator in the main graph of `model`, in its order; the graph may then change."""
        return [cls(node) for node in model.graph if cls.matches(node)]

    @classmethod
    def insert(
        cls,
        before: ir.Node,
        inputs: Mapping[str, ir.Value | None],
        attributes: Mapping[str, graph.Attribute] | None = None,
        *,
        outputs: int = 1,
        name: str | None = None,
    ) -> Self:
        """Insert a node in front of `before`, with inputs by name; the caller sets types and shapes of its outputs.

        The graph imports the operator's domain afterwards.
        """
        made = graph.insert(
            before, cls.op_type, cls.ordered(inputs), attributes, domain=cls.domain, outputs=outputs, name=name
        )
        graph.owner(before).opset_imports.setdefault(cls.domain, OPSETS[cls.domain])
        return cls(graph.producer(made[0]))

    @classmethod
    def ordered(cls, inputs: Mapping[str, T | None]) -> list[T | None]:
        """Lay out `inputs` by name in the operator's order; absent ones at the end are left out."""
        unknown = set(inputs) - {field.name for field in cls.inputs}
        assert not unknown, f"{cls.op_type} has no input {', '.join(sorted(unknown))}"
        given = [inputs.get(field.name) for field in cls.inputs]
        while given and given[-1] is None:
            given.pop()
        return given

    @property
    def name(self) -> str:
        """The node's name."""
        return str(self.node.name)

    @property
    def output(self) -> ir.Value:
        """The first output."""
        return self.node.outputs[0]

    @property
    def first_input(self) -> ir.Value:
        """The first input: of operators of any kind, what they work on."""
        if (value := graph.operand(self.node, 0)) is None:
            raise self.malformed("it reads nothing")
        return value

    def operand(self, field: Operand) -> ir.Value | None:
        """Return the value of an input; None where it is left out."""
        return graph.operand(self.node, field.index)

    def required(self, field: Operand) -> ir.Value:
        """Return the value of an input that must be there (VerificationError: it is left out)."""
        value = self.operand(field)
        if value is None:
            raise self.malformed(f"input {field.name!r} is missing")
        return value

    def check(self) -> None:
        """Check what the table cannot say (VerificationError: the node is malformed)."""

    def output_dtype(self, index: int) -> ir.DataType | None:
        """Infer the dtype of output `index` from those of the inputs; None where that is unknown."""
        rule = self.outputs[min(index, len(self.outputs) - 1)]
        if rule.dtype is not None:
            return rule.dtype
        value = graph.operand(self.node, next((field.index for field in self.inputs if field.name == rule.like), 0))
        return None if value is None else value.dtype

    def expand(self, model: ir.Model) -> None:
        """Write the node as standard ONNX: for an operator of llmforge that `ir.expansion` has no rule of."""
        raise NotImplementedError(f"{self.op_type} has no expansion")

    def malformed(self, reason: str) -> VerificationError:
        """Say that the node is malformed, and why."""
        return VerificationError(f"node {self.node.name!r}: {reason}")

    def require(self, condition: bool, reason: str) -> None:
        """Raise what `malformed` returns unless `condition` holds."""
        if not condition:
            raise self.malformed(reason)


class Reduction(Operator):
    """A number of all that stand along some axes; not an operator itself."""

    x = Input(NUMBERS | BOOLS)
    axes = Input(I64, 1)
    keepdims = integer(1)
    noop_with_empty_axes = integer(0)


class CachedAttention(Operator):
    """Attention by heads over a KV cache; not an operator itself."""

    past_key: Input
    past_value: Input
    num_heads = integer()
    kv_num_heads = integer()
    y = Output()
    present_key = Output(like="past_key")
    present_value = Output(like="past_value")
    precision = Precision.HALF

    @property
    def projections(self) -> tuple[ir.Value, ...]:
        """Query, key and value; one where the query holds all three side by side."""
        raise NotImplementedError


class ChosenExperts(Operator):
    """Experts, of which each token chooses some; not an operator itself."""

    precision = Precision.HALF

    @property
    def chosen(self) -> int | None:
        """How many experts a token chooses, where that is known."""
        raise NotImplementedError


def identity(node: ir.Node) -> tuple[str, str]:
    """Return the domain of `node` and its operator."""
    return node.domain, node.op_type


def qualified(node: ir.Node) -> str:
    """Name the operator of `node`, with its domain, in a message."""
    return f"{node.domain or 'ai.onnx'}::{node.op_type}"


def listed(names: Iterable[str]) -> str:
    """List names for a message."""
    return ", ".join(name or "ai.onnx" for name in names)


def shown(dims: Iterable[int | str | None] | None) -> str:
    """Show a shape in a message."""
    if dims is None:
        return "of unknown rank"
    return f"[{', '.join('?' if dim is None else str(dim) for dim in dims)}]"
