"""The footprint of a decode step: bytes that it reads, counted on the graph that the passes leave."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from dataclasses import dataclass

import onnx_ir as ir

from llmforge.ir import interface, logits_rows, operators
from llmforge.ir.routing import share_read
from llmforge.ir.subgraph import Index, behind
from llmforge.metrics.latency import Footprint


@dataclass(frozen=True)
class BytesRead:
    """What a decode step reads at batch 1."""

    weights: int
    kv: int  # for each token of context
    multiply_adds: int | None = None  # of the weights, for each token; see `multiply_adds`
    head_multiply_adds: int = 0  # of these, those that a prompt takes once; see `head_multiply_adds`

    def footprint(self, artifact_bytes: int) -> Footprint:
        """Put it beside the size of the artifact's engine."""
        return Footprint(
            artifact_bytes=artifact_bytes,
            weight_bytes_per_token=self.weights,
            kv_bytes_per_token=self.kv,
            multiply_adds_per_token=self.multiply_adds,
            head_multiply_adds=self.head_multiply_adds,
        )


def count(model: ir.Model) -> BytesRead:
    """Count the bytes that a decode step of `model` reads; an initializer that several nodes read counts once.

    Of experts count those that a token chooses, at batch 1. In a lowered graph these cannot be told any more: count
    before the lowering.

    A cache input is [batch, kv_heads, capacity, head_dim]; a token of context is one slot of it. States of fixed size
    do not grow with the context and count as none.
    """
    return BytesRead(sum(each.read_bytes for each in reads(model)), sum(each.token_bytes for each in caches(model)))


def multiply_adds(model: ir.Model) -> int:
    """Count the multiply-adds of weights that one token takes: an element of a matrix each, of experts the chosen ones.

    For a graph as it was traced, whose weights have an element for each parameter. Attention's products of queries,
    keys and values are not among them: they grow with the context. Tables and vectors multiply nothing.
    """
    return _multiply_adds(model.graph.initializers.values())


def head_multiply_adds(traced: ir.Model, model: ir.Model) -> int:
    """Count those multiply-adds of `traced` that only a row which gets logits takes: of a prompt, the last one.

    0 where every row of `model`, which the passes made of it, gets logits, and of an encoder.
    """
    if not logits_rows.readers(model):
        return 0
    constant = Index.of(traced).constant  # a tied head reads the embedding through a Transpose
    read = [value for node in logits_rows.readers(traced) for value in node.inputs if value is not None]
    _, sources = behind(read, lambda value: value not in constant)
    return _multiply_adds(sources)


def _multiply_adds(values: Iterable[ir.Value]) -> int:
    return sum(
        math.ceil(share_read(value) * tensor.size)
        for value in values
        if (tensor := value.const_value) is not None and len(tensor.shape) >= 2 and not _only_looked_up(value)
    )


@dataclass(frozen=True)
class TensorGroup:
    """Initializers of one dtype whose names are the same but for the numbers between dots."""

    name: str  # "model.layers.*.mlp.down_proj.weight"
    dtype: str
    tensors: int
    size_bytes: int


@dataclass(frozen=True)
class WeightsRead(TensorGroup):
    """A group, with what a decode step reads of it at batch 1."""

    read_bytes: int


@dataclass(frozen=True)
class Caches:
    """Cache inputs of one dtype whose names are the same but for the numbers between dots."""

    name: str  # "past_key_values.*.key"
    dtype: str
    tensors: int
    token_bytes: int  # that a token of context takes in them


_NUMBER = re.compile(r"(?<=\.)\d+(?=\.)")


def weights(model: ir.Model) -> list[TensorGroup]:
    """Group all initializers, the largest group first; the values of none are read."""
    groups = [
        TensorGroup(*key, tensors=len(values), size_bytes=sum(map(_size, values)))
        for key, values in _groups(_held(model)).items()
    ]
    return sorted(groups, key=_largest_first)


def reads(model: ir.Model) -> list[WeightsRead]:
    """Group all initializers as `weights` does, with what a decode step reads of each group: of a table nothing."""
    groups = [
        WeightsRead(*key, tensors=len(values), size_bytes=sum(map(_size, values)), read_bytes=sum(map(_read, values)))
        for key, values in _groups(_held(model)).items()
    ]
    return sorted(groups, key=_largest_first)


def caches(model: ir.Model) -> list[Caches]:
    """Group the cache inputs that grow with the context."""
    grow = [
        value
        for value in model.graph.inputs
        if interface.present_of(value.name or "") != value.name and not interface.is_state(value.name or "")
    ]
    return [
        Caches(*key, tensors=len(values), token_bytes=sum(map(_token_bytes, values)))
        for key, values in sorted(_groups(grow).items())
    ]


def _held(model: ir.Model) -> list[ir.Value]:
    return [value for value in model.graph.initializers.values() if value.const_value is not None]


def _groups(values: Iterable[ir.Value]) -> dict[tuple[str, str], list[ir.Value]]:
    """Group values by name, but for numbers between dots, and dtype."""
    found: dict[tuple[str, str], list[ir.Value]] = {}
    for value in values:
        dtype = value.dtype if value.const_value is None else value.const_value.dtype
        if dtype is None:
            raise ValueError(f"{value.name} has no dtype")
        found.setdefault((_NUMBER.sub("*", str(value.name)), dtype.name.lower()), []).append(value)
    return found


def _largest_first(group: TensorGroup) -> tuple[int, str, str]:
    return -group.size_bytes, group.name, group.dtype


def _size(value: ir.Value) -> int:
    assert value.const_value is not None
    return value.const_value.nbytes


def _read(value: ir.Value) -> int:
    return 0 if _only_looked_up(value) else math.ceil(share_read(value) * _size(value))


def _token_bytes(value: ir.Value) -> int:
    if value.shape is None or value.dtype is None:
        raise ValueError(f"cache input {value.name} has no shape or dtype")
    return _bytes(value.dtype, [value.shape[axis] for axis in (1, 3)])


def _only_looked_up(value: ir.Value) -> bool:
    reads = [operators.operand(node, index) for node, index in value.uses()]
    return bool(reads) and all(read is not None and read.table for read in reads)


def _bytes(dtype: ir.DataType, dims: list[int | ir.SymbolicDim]) -> int:
    return -(-math.prod(dim for dim in dims if isinstance(dim, int)) * dtype.bitwidth // 8)
