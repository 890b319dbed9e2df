"""Inputs and outputs of a decoder graph (docs/dialect.md), read from what an engine says of its inputs and outputs."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType

from llmforge.base.errors import InputError, UnsupportedError
from llmforge.ir import interface


@dataclass(frozen=True)
class ElementType:
    """A type of the elements of caches: `onnx` is its number in ONNX's TensorProto.DataType."""

    name: str  # as numpy and ml_dtypes spell it
    onnx: int
    size_bytes: int
    on_hosts: bool = True  # numpy has it by itself


CACHE_TYPES: Mapping[str, ElementType] = MappingProxyType(
    {
        "tensor(float)": ElementType("float32", 1, 4),
        "tensor(float16)": ElementType("float16", 10, 2),
        "tensor(int8)": ElementType("int8", 3, 1),
        "tensor(uint8)": ElementType("uint8", 2, 1),  # two int4 values a byte
        "tensor(bfloat16)": ElementType("bfloat16", 16, 2, on_hosts=False),
        "tensor(float8e4m3fn)": ElementType("float8_e4m3fn", 17, 1, on_hosts=False),
    }
)
ELEMENTS: Mapping[str, ElementType] = MappingProxyType({each.name: each for each in CACHE_TYPES.values()})

# What `interface.feeds` knows to make.
_FED = interface.PLACES | {
    interface.INPUT_IDS,
    interface.INPUTS_EMBEDS,
    interface.HIDDEN_STATES,
    interface.DRAFT_STATES,
    interface.ADAPTER_IDS,
    interface.LOGITS_ROWS,
    interface.TEMPERATURES,
    interface.DRAWS,
    interface.CHOSEN_IDS,
}
_HIDDEN = (interface.HIDDEN_STATES, interface.DRAFT_STATES, interface.NEXT_STATES)
# ONNX Runtime 1.31 has a kernel for one token, and from two tokens on equal bits (measured, docs/runtime.md). Our own
# attention has one for up to 8 queries (FEW_QUERIES in native/impl.inc).
_STEADY_FROM, _STEADY_FROM_OWN = 2, 9


@dataclass(frozen=True)
class CacheInput:
    """One cache that a graph takes and returns: `dtype` [batch, kv_heads, capacity, head_dim].

    Of a graph that reads blocks by a table, [blocks, block_size, kv_heads, head_dim].
    """

    name: str
    dtype: str  # as numpy spells it
    kv_heads: int
    head_dim: int


@dataclass(frozen=True)
class StateInput:
    """One state of fixed size that a graph takes and returns: `dtype` [batch, *dims]."""

    name: str
    dtype: str  # as numpy spells it
    dims: tuple[int, ...]


@dataclass(frozen=True)
class Argument:
    """One input or output of a graph, as ONNX Runtime's `NodeArg` describes it, which serves in its place."""

    name: str
    type: str  # "tensor(float)"
    shape: Sequence[int | str | None]  # a number for a fixed dimension


@dataclass(frozen=True)
class Signature:
    """Inputs and outputs of a decoder graph.

    `block_size`: tokens of a block, where caches are blocks of a pool; None: they are rows.
    `growing`: its caches grow in every step, and are not written in place. `declared_rows`: how many rows of logits it
    declares to give; None: any number. `own_kernels`: kernels of llmforge's own run some of its nodes.
    `chooses_by_row`: each row of a step chooses its own tokens for logits (`llmforge.ir.logits_rows.choose_by_row`).
    `hidden_widths`: the width of each input and output of hidden states (`interface.HIDDEN_STATES` and the two after).
    """

    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    caches: tuple[CacheInput, ...]
    states: tuple[StateInput, ...]
    vocabulary: int
    growing: bool
    declared_rows: int | None
    own_kernels: bool = False
    block_size: int | None = None
    chooses_by_row: bool = False
    hidden_widths: Mapping[str, int] = field(default_factory=dict, hash=False)

    @classmethod
    def of(
        cls, inputs: Sequence[Argument], outputs: Sequence[Argument], where: str, *, own_kernels: bool = False
    ) -> Signature:
        """Read the signature of the graph at `where`; `own_kernels`, which its inputs do not tell, is given.

        Raises:
            InputError: it is no decoder graph.
            UnsupportedError: a type that nothing here reads.
        """
        given = {value.name for value in outputs}
        past = [value for value in inputs if interface.present_of(value.name) != value.name]
        paged = any(value.name == interface.BLOCK_TABLE for value in inputs)
        caches = tuple(
            _cache_input(value, given, where, heads_axis=2 if paged else 1)
            for value in past
            if not interface.is_state(value.name)
        )
        states = tuple(_state_input(value, given, where) for value in past if interface.is_state(value.name))
        names = [value.name for value in inputs]
        logits = next((value for value in outputs if value.name == interface.LOGITS), None)
        vocabulary = logits.shape[-1] if logits is not None and len(logits.shape) == 3 else None
        if interface.INPUT_IDS not in names or logits is None or not isinstance(vocabulary, int):
            raise InputError(
                f"{where}: not a decoder graph: it needs the input {interface.INPUT_IDS} and the output "
                f"{interface.LOGITS} [batch, rows, vocabulary] with a fixed vocabulary; inputs {names}, "
                f"outputs {[value.name for value in outputs]}"
            )
        if unknown := set(names) - _FED - {value.name for value in past}:
            raise InputError(f"{where}: unknown inputs: {', '.join(sorted(unknown))}")
        if logits.type != "tensor(float)":
            raise UnsupportedError(f"{where}: logits are {logits.type}; only fp32 logits are read")
        return cls(
            inputs=tuple(names),
            outputs=tuple(value.name for value in outputs),
            caches=caches,
            states=states,
            vocabulary=vocabulary,
            growing=_reads_growing_caches(caches, {value.name: value.shape for value in (*inputs, *outputs)}, where),
            declared_rows=logits.shape[1] if isinstance(logits.shape[1], int) else None,
            own_kernels=own_kernels,
            block_size=_block_size(past, where) if paged else None,
            chooses_by_row=any(value.name == interface.LOGITS_ROWS and len(value.shape) == 2 for value in inputs),
            hidden_widths={value.name: _width(value, where) for value in (*inputs, *outputs) if value.name in _HIDDEN},
        )

    @property
    def gives_hidden(self) -> str | None:
        """The output of hidden states; None: there is none."""
        return next((name for name in self.hidden_widths if name in self.outputs), None)

    @property
    def cache_types(self) -> dict[str, str]:
        """The type of the elements of each cache and state, by the name of its input."""
        return {each.name: each.dtype for each in self.caches} | {each.name: each.dtype for each in self.states}

    @property
    def takes_adapters(self) -> bool:
        """Whether each row of a step chooses an adapter."""
        return interface.ADAPTER_IDS in self.inputs

    @property
    def gives_top_logits(self) -> bool:
        """Whether a step gives the largest logits of its last row (`interface.TopLogits`)."""
        return interface.MASSES in self.outputs

    @property
    def gives_next_ids(self) -> bool:
        """Whether a step guesses the tokens that follow, and takes them instead of negative ids."""
        return interface.NEXT_IDS in self.outputs

    @property
    def gives_all_rows(self) -> bool:
        """Whether every token gets logits: the graph takes no choice of rows."""
        return interface.LOGITS_ROWS not in self.inputs

    @property
    def one_row_continuations(self) -> bool:
        """Whether several tokens after a past must run a row at a time.

        GroupQueryAttention of ONNX Runtime, which alone reads that input: "batch_size must be 1 when sequence_length >
        1 and past context is given".
        """
        masked = interface.ATTENTION_MASK in self.inputs and not self.growing
        return interface.TOTAL_SEQUENCE_LENGTH in self.inputs or masked

    @property
    def steady_from(self) -> int:
        """How many tokens of one row a step must have for the bits of each not to depend on how many there are.

        Kernels for few tokens add in another order than those for many; a step of fewer tokens may differ by rounding.
        One attention that needs more of them decides for all.
        """
        return _STEADY_FROM_OWN if self.own_kernels else _STEADY_FROM

    @property
    def no_reuse_reason(self) -> str | None:
        """Why tokens in a row of a cache can neither serve another text nor be taken back; None: they can."""
        if self.states:
            return "layers keep a state, which holds a whole text and no part of it"
        if interface.TEXT_LENGTHS in self.inputs:
            return "rotary angles of cached keys depend on the length of the whole text"
        return None


def _width(value: Argument, where: str) -> int:
    """Read the width of an input or output of hidden states."""
    width = value.shape[2] if len(value.shape) == 3 else None
    if not isinstance(width, int) or value.type != "tensor(float)":
        raise UnsupportedError(
            f"{where}: {value.name} is {value.type} {list(value.shape)}; expected fp32 [batch, sequence, width] with "
            "a fixed width"
        )
    return width


def _reads_growing_caches(
    caches: Sequence[CacheInput], shapes: Mapping[str, Sequence[int | str | None]], where: str
) -> bool:
    """Say whether the caches grow in every step: all or none."""
    growing = {c.name: interface.grows(shapes[c.name], shapes[interface.present_of(c.name)]) for c in caches}
    if any(growing.values()) and not all(growing.values()):
        fixed = next(name for name, grows in growing.items() if not grows)
        raise InputError(f"{where}: cache {fixed} keeps its size, and others grow")
    return any(growing.values())


def _cache_input(value: Argument, outputs: Collection[str], where: str, heads_axis: int) -> CacheInput:
    name, shape = value.name, value.shape
    kv_heads, head_dim = (shape[heads_axis], shape[3]) if len(shape) == 4 else (None, None)
    if not (isinstance(kv_heads, int) and isinstance(head_dim, int)):
        dims = "batch, kv_heads, capacity" if heads_axis == 1 else "blocks, block_size, kv_heads"
        raise InputError(
            f"{where}: cache input {name} has shape {shape}; expected [{dims}, head_dim] with fixed kv_heads and "
            "head_dim"
        )
    return CacheInput(name, _element(value, outputs, "cache input", where), kv_heads, head_dim)


def _block_size(past: Sequence[Argument], where: str) -> int:
    """Read the tokens of a block, which all caches have in common."""
    sizes = {value.shape[1] for value in past if len(value.shape) == 4}
    [size] = sizes if len(sizes) == 1 else [None]
    if not isinstance(size, int) or len(past) == 0 or any(interface.is_state(value.name) for value in past):
        raise InputError(f"{where}: it reads {interface.BLOCK_TABLE}, and its caches are no blocks of one size")
    return size


def _state_input(value: Argument, outputs: Collection[str], where: str) -> StateInput:
    dims = [dim for dim in value.shape[1:] if isinstance(dim, int)]
    if not dims or len(dims) != len(value.shape) - 1:
        raise InputError(
            f"{where}: state {value.name} has shape {value.shape}; expected [batch, …] with fixed dimensions"
        )
    return StateInput(value.name, _element(value, outputs, "state", where), tuple(dims))


def _element(value: Argument, outputs: Collection[str], what: str, where: str) -> str:
    """Name the type of a cache's elements, once its output is known to be there."""
    if interface.present_of(value.name) not in outputs:
        raise InputError(f"{where}: {what} {value.name} has no output {interface.present_of(value.name)}")
    if value.type not in CACHE_TYPES:
        raise UnsupportedError(f"{where}: {what} {value.name} is {value.type}; one of {list(CACHE_TYPES)}")
    return CACHE_TYPES[value.type].name
