"""Run a graph from its inputs to its logits piece by piece, with the weights of one piece in memory at a time.

A piece is a run of consecutive nodes whose weights stay below a size (one node's weights may exceed it). It runs for
all steps of all runs before the next piece is loaded; what later pieces read is kept in between.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from llmforge.ir import graph, interface
from llmforge.ir.derived import Stored, by_output, is_stored
from llmforge.ir.operators.record import MICROSOFT
from llmforge.verification import probe
from llmforge.verification.subgraph import Arrays, Index, Part, behind, cut_out, is_fixed

PIECE_BYTES = 1 << 26  # of weights, as the graph declares them: about a layer of a small model

Logits = list[list[NDArray[np.float32]]]  # by run, by step: fp32 [B, R, V], padding included
_TABLES = ([("", "Gather")], [("", "MatMul")], [("", "Transpose"), ("", "MatMul")])  # pieces that are one table
Rows = Callable[[probe.Step], NDArray[np.int64]]  # positions of a step that get logits, [R]


@dataclass(frozen=True)
class Piece:
    """Some nodes of a graph: the values that later pieces, or the graph's outputs, want of them."""

    gives: tuple[str, ...]
    stops: frozenset[str]  # what earlier pieces gave


def drive(
    model: ir.Model,
    runs: Sequence[probe.Run],
    *,
    threads: int,
    rows: Rows | None = None,
    capacity: Callable[[probe.Run], int] = lambda run: run.capacity,
    fill: float = 0.0,
    piece_bytes: int = PIECE_BYTES,
) -> Logits:
    """Run `model`, which stays as it is, on `runs` and return the logits of `rows`, of all tokens by default.

    Caches have `capacity` slots, those that a run needs by default, and hold `fill` before it.

    Memory: the weights of one piece, what crosses from one to the next for every step, the caches of one piece, and
    the logits. Linear layers multiply by their weights as these are stored, without a transposed copy; an embedding or
    a head that is larger than a piece is read in blocks.

    Raises:
        UnsupportedError: ONNX Runtime refuses a piece.
    """
    index = Index.of(model)
    live: list[list[Arrays]] = [[{} for _ in run.steps] for run in runs]
    pieces = list(cut(index, piece_bytes))
    for number, piece in enumerate(pieces):
        session = _open(cut_out(index, piece.gives, piece.stops), threads, piece_bytes)
        later = {name for other in pieces[number + 1 :] for name in other.stops}
        for run, values in zip(runs, live, strict=True):
            caches = session.allocate(run.batch, capacity(run), fill)
            for step, given in zip(run.steps, values, strict=True):
                given |= session.run(step, given, caches, None if rows is None else rows(step))
                for name in given.keys() - later - {interface.LOGITS}:
                    del given[name]
    return [[given[interface.LOGITS] for given in values] for values in live]


class _Runs(Protocol):
    """What runs a piece."""

    def allocate(self, batch: int, capacity: int, fill: float) -> Arrays: ...

    def run(
        self, step: probe.Step, given: Mapping[str, NDArray[Any]], caches: Arrays, rows: NDArray[np.int64] | None
    ) -> Arrays: ...


@dataclass(frozen=True, eq=False)
class _Blocks:
    """A piece that is one stored table, larger than a piece should be: looked up in, or multiplied by, in blocks."""

    name: str  # of what it gives
    table: NDArray[Any]  # [V, K], as it is stored
    reads: str | None  # the value that is multiplied, fp32 [..., K]; None: rows of the step's ids are looked up
    block_bytes: int
    dtype: ir.DataType  # what the graph computes in; results are held in fp32

    def allocate(self, batch: int, capacity: int, fill: float) -> Arrays:
        return {}

    def run(
        self, step: probe.Step, given: Mapping[str, NDArray[Any]], caches: Arrays, rows: NDArray[np.int64] | None
    ) -> Arrays:
        if self.reads is None:
            return {self.name: self.table[step.ids].astype(np.float32)}
        x, (v, k) = given[self.reads], self.table.shape
        product = np.empty((*x.shape[:-1], v), np.float32)
        size = max(1, self.block_bytes // (4 * k))
        for at in range(0, v, size):
            block = x @ self.table[at : at + size].astype(np.float32).T
            product[..., at : at + size] = block.astype(self.dtype.numpy())
        return {self.name: product}


def _open(part: ir.Model, threads: int, piece_bytes: int) -> _Runs:
    """Load a piece in ONNX Runtime, or read it in blocks where it is one large table."""
    if graph.weight_bytes(part) > piece_bytes and (blocks := _blocks(part, piece_bytes)) is not None:
        return blocks
    _multiply_as_stored(part)
    return Part(part, probe.Weights(), threads)


def _blocks(part: ir.Model, block_bytes: int) -> _Blocks | None:
    """Recognize `Gather(W, input_ids)`, `MatMul(x, Transpose(W))` and `MatMul(x, W)` of a stored matrix W."""
    body = list(part.graph)
    if len(body) > 1 and body[-1].op_type == "Cast":  # of a result in half precision, which is held in fp32 anyway
        body.pop()
    nodes = [(node.domain, node.op_type) for node in body]
    last = body[-1]
    first, second = (*last.inputs, None)[:2]
    if first is None or second is None or nodes not in _TABLES:
        return None
    if last.op_type == "Gather":
        weight, transposed, looked_up = first, False, second.name == interface.INPUT_IDS
        if last.attributes.get_int("axis", 0) != 0 or not looked_up:
            return None
    else:
        maker = second.producer()
        weight, transposed = (second, True) if maker is None or maker.inputs[0] is None else (maker.inputs[0], False)
        looked_up = False
    tensor = weight.const_value
    if not is_fixed(weight) or not isinstance(tensor, Stored) or tensor.transposed != transposed:
        return None
    name, dtype = str(part.graph[-1].outputs[0].name), last.outputs[0].dtype or ir.DataType.FLOAT
    return _Blocks(name, tensor.stored(), None if looked_up else str(first.name), block_bytes, dtype)


def _multiply_as_stored(model: ir.Model) -> None:
    """Make `MatMul(x, W)` with W [K, N], stored as [N, K], one FusedMatMul that reads it so, in place."""
    owner = model.graph
    for node in [node for node in owner if node.op_type == "MatMul" and not node.domain]:
        x, weight = node.inputs
        if x is None or weight is None or not is_fixed(weight) or len(weight.uses()) > 1:
            continue
        if weight.const_value is None or not is_stored(weight.const_value) or weight.shape is None:
            continue
        stored = _as_stored(weight.const_value)
        del owner.initializers[str(weight.name)]
        turned = graph.initializer(owner, str(weight.name), stored)
        [product] = graph.insert(node, "FusedMatMul", [x, turned], {"transB": 1}, domain=MICROSOFT, name=node.name)
        graph.replace_value(node.outputs[0], product)
        owner.remove(node, safe=True)
        model.opset_imports.setdefault(MICROSOFT, 1)


def _as_stored(tensor: ir.TensorProtocol) -> ir.LazyTensor:
    """Make a lazy fp32 [N, K] of a weight [K, N]."""
    k, n = tensor.shape.numpy()

    def read() -> ir.TensorProtocol:
        return ir.Tensor(by_output(tensor, transposed=True).astype(np.float32), name=tensor.name)

    return ir.LazyTensor(read, ir.DataType.FLOAT, ir.Shape((n, k)), name=tensor.name)


def cut(index: Index, piece_bytes: int) -> Iterator[Piece]:
    """Cut a graph into pieces whose weights take about `piece_bytes` each.

    A cut is made where the type of everything that crosses it is known.
    """
    nodes = list(index.model.graph)
    last_read = {value: at for at, node in enumerate(nodes) for value in node.inputs if value is not None}
    outputs = set(index.model.graph.outputs)
    seen: set[int] = set()
    size, begin = 0, 0
    crossing: dict[ir.Value, None] = {}
    given: frozenset[str] = frozenset()
    for at, node in enumerate(nodes):
        size += _new_bytes(node, index, seen)
        crossing |= {value: None for value in node.outputs if value not in index.constant}
        ahead = {value: None for value in crossing if last_read.get(value, -1) > at}
        whole = at == len(nodes) - 1
        if not whole and (size + _new_bytes(nodes[at + 1], index, set(seen)) <= piece_bytes or not _typed(ahead)):
            continue
        made = [value for other in nodes[begin : at + 1] for value in other.outputs]
        gives = tuple(str(value.name) for value in made if value in ahead or value in outputs)
        if gives:
            yield Piece(gives, given)
        given = frozenset(str(value.name) for value in ahead)
        crossing, size, begin = ahead, 0, at + 1
        seen.clear()


def _new_bytes(node: ir.Node, index: Index, seen: set[int]) -> int:
    """Size of the weights of `node` that are not in `seen`, which they join; a constant comes with its reader."""
    size = 0
    for value in node.inputs if node.outputs[0] not in index.constant else ():
        if value is None:
            continue
        if value in index.constant:
            made_of = behind([value], ())[0]
            tensors = [x.const_value for maker in made_of for x in maker.inputs if x is not None]
        else:
            tensors = [value.const_value] if is_fixed(value) else []
        for tensor in tensors:
            if tensor is not None and id(tensor) not in seen:
                size += tensor.nbytes
                seen.add(id(tensor))
    return size


def _typed(values: dict[ir.Value, None]) -> bool:
    return all(value.dtype is not None and value.shape is not None for value in values)
