"""Run a graph from its inputs to its logits block by block, with the weights of one block in memory at a time.

A block is a run of consecutive nodes whose weights stay below a size (one node's weights may exceed it). It runs for
all steps of all runs before the next block is loaded; what later blocks read is kept in between.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from llmforge.backends.onnxruntime import session as backend
from llmforge.backends.onnxruntime.session import PROVIDER, open_graph, session_options
from llmforge.base import mapped
from llmforge.ir import graph, interface
from llmforge.ir.derived import Stored
from llmforge.ir.graph import is_constant
from llmforge.ir.operators.record import MICROSOFT
from llmforge.ir.operators.standard import Cast, Gather, MatMul, Transpose
from llmforge.ir.subgraph import Index, behind, extract
from llmforge.metrics.tokens import require_finite
from llmforge.runtime.config import SessionConfig
from llmforge.verification import probe, streamed_execution
from llmforge.verification.subgraph_session import Arrays, SubgraphSession, multiply_as_stored

BLOCK_BYTES = 1 << 26  # of weights, as the graph declares them: about a layer of a small model
_TILE_BYTES = 1 << 22  # of a table in fp32: it is multiplied by while it is in the processor's caches

Logits = list[list[NDArray[np.float32]]]  # by run, by step: fp32 [B, R, V], padding included
Values = list[list[Arrays]]  # by run, by step: outputs of the graph by name, padding included
Rows = Callable[[probe.ProbeCall], NDArray[np.int64]]  # positions of a step that get logits, [R]


@dataclass(frozen=True)
class NodeBlock:
    """Some nodes of a graph: the values that later blocks, or the graph's outputs, want of them."""

    outputs: tuple[str, ...]
    inputs: frozenset[str]  # what earlier blocks made


@dataclass(frozen=True)
class Feeding:
    """How runs are fed.

    Caches have `capacity` slots, those that a run needs by default, and hold `fill` before it. `given` are inputs of
    the graph besides those of each step; they take precedence. `after_step` may change what a step has put into the
    caches of a block.
    """

    rows: Rows | None = None  # None: all tokens get logits
    capacity: Callable[[probe.Run], int] = lambda run: run.capacity
    fill: float = 0.0
    given: Callable[[probe.Run], Mapping[str, NDArray[Any]]] = lambda run: {}
    after_step: probe.AfterStep | None = None


def drive(
    model: ir.Model,
    runs: Sequence[probe.Run],
    *,
    threads: int,
    block_bytes: int = BLOCK_BYTES,
    optimize: bool = False,
    after_step: probe.AfterStep | None = None,
) -> Logits:
    """Run `model`, which stays as it is, on `runs` and return the logits of all tokens.

    ONNX Runtime may `optimize` blocks, as it does when it serves; by default they run as they are written.

    Raises:
        UnsupportedError: ONNX Runtime refuses a block.
    """
    made = outputs(
        model,
        runs,
        [interface.LOGITS],
        Feeding(after_step=after_step),
        threads=threads,
        block_bytes=block_bytes,
        optimize=optimize,
    )
    return [[step[interface.LOGITS] for step in steps] for steps in made]


def outputs(
    model: ir.Model,
    runs: Sequence[probe.Run],
    names: Collection[str],
    feeding: Feeding,
    *,
    threads: int,
    block_bytes: int = BLOCK_BYTES,
    optimize: bool = False,
) -> Values:
    """Run `model`, which stays as it is, on `runs` and return the outputs `names`.

    Memory: the weights of one block, what crosses from one to the next for every step, the caches of one block, and
    the logits. Linear layers multiply by their weights as these are stored, without a transposed copy; an embedding or
    a head that is larger than a block is read in tiles.

    Raises:
        UnsupportedError: ONNX Runtime refuses a block.
    """
    index = Index.of(model)
    live: Values = [[{} for _ in run.steps] for run in runs]
    kept = set(names)
    ahead = list(blocks(index, block_bytes))
    while ahead:
        block = ahead.pop(0)
        session = _open(extract(index, block.outputs, block.inputs), threads, block_bytes, optimize=optimize)
        later = {name for other in ahead for name in other.inputs}
        if isinstance(session, _LargeTable):
            session.run(
                [
                    (step, held)
                    for run, values in zip(runs, live, strict=True)
                    for step, held in zip(run.steps, values, strict=True)
                ]
            )
            _forget(live, later | kept)
            continue
        for run, values in zip(runs, live, strict=True):
            caches = session.allocate(run.batch, feeding.capacity(run), feeding.fill)
            more = feeding.given(run)
            for step, held in zip(run.steps, values, strict=True):
                rows = None if feeding.rows is None else feeding.rows(step)
                held |= session.run(step, {**held, **more}, caches, rows)
                if feeding.after_step is not None:
                    feeding.after_step(caches, step)
                _forget([[held]], later | kept)
    return live


def _forget(live: Sequence[Sequence[Arrays]], wanted: set[str]) -> None:
    """Drop what is not `wanted`."""
    for values in live:
        for held in values:
            for name in held.keys() - wanted:
                del held[name]


@dataclass(frozen=True, eq=False)
class _LargeTable:
    """A block that is one stored table, larger than a block should be: looked up in, or multiplied by, in tiles.

    It is read once for all steps: reading and widening it takes longer than multiplying a few tokens by it.
    """

    name: str  # of what it makes
    table: NDArray[Any]  # [V, K], as it is stored
    reads: str | None  # the value that is multiplied, fp32 [..., K]; None: rows of the step's ids are looked up
    dtype: ir.DataType  # what the graph computes in; results are held in fp32
    threads: int

    def run(self, steps: Sequence[tuple[probe.ProbeCall, Arrays]]) -> None:
        """Add to what each step has what the block makes of it."""
        if self.reads is None:
            for step, given in steps:
                given[self.name] = self.table[step.ids].astype(np.float32)
            return
        (v, k), read = self.table.shape, [given[self.reads] for _, given in steps]
        x = np.concatenate([each.reshape(-1, k) for each in read])
        product, multiply = np.empty((len(x), v), np.float32), _product(k, self.threads)
        size = max(1, _TILE_BYTES // (4 * k))
        widened = np.empty((min(size, v), k), np.float32)
        for at in range(0, v, size):
            stored = self.table[at : at + size]
            tile = widened[: len(stored)]
            tile[...] = stored
            [made] = backend.run(multiply, None, {"x": x, "w": tile})
            product[:, at : at + size] = made.astype(self.dtype.numpy(), copy=False)
            mapped.forget(stored)
        ends = np.cumsum([each.size // k for each in read])[:-1]
        for (_, given), each, made in zip(steps, read, np.split(product, ends), strict=True):
            given[self.name] = made.reshape(*each.shape[:-1], v)


def _product(k: int, threads: int) -> Any:
    """Open x @ w.T of x [M, k] and w [N, k], fp32: numpy's product takes three times as long for a few rows of x."""
    x = ir.Value(name="x", shape=ir.Shape(("m", k)), type=ir.TensorType(ir.DataType.FLOAT))
    w = ir.Value(name="w", shape=ir.Shape(("n", k)), type=ir.TensorType(ir.DataType.FLOAT))
    node = ir.node("FusedMatMul", [x, w], {"transB": 1}, domain=MICROSOFT, num_outputs=1)
    [made] = node.outputs
    made.name, made.shape, made.type = "y", ir.Shape(("m", "n")), ir.TensorType(ir.DataType.FLOAT)
    body = ir.Graph([x, w], [made], nodes=[node], opset_imports={"": 18, MICROSOFT: 1}, name="product")
    options = session_options(SessionConfig(threads=threads, optimize=False, entries=probe.QUIET))
    serialized = ir.serde.serialize_model(ir.Model(body, ir_version=10)).SerializeToString()
    return open_graph(serialized, options, [PROVIDER], "a product")


def _open(block: ir.Model, threads: int, block_bytes: int, *, optimize: bool) -> SubgraphSession | _LargeTable:
    """Load a block in ONNX Runtime, or read it in tiles where it is one large table."""
    if graph.weight_bytes(block) > block_bytes and (table := _large_table(block, threads)) is not None:
        return table
    multiply_as_stored(block)
    return SubgraphSession(block, probe.InitializerArrays(), threads, optimize=optimize)


def _large_table(block: ir.Model, threads: int) -> _LargeTable | None:
    """Recognize `Gather(W, input_ids)`, `MatMul(x, Transpose(W))` and `MatMul(x, W)` of a stored matrix W."""
    body = list(block.graph)
    if len(body) > 1 and Cast.matches(body[-1]):  # of a result in half precision, which is held in fp32 anyway
        body.pop()
    *before, last = body
    product = MatMul.of(last)
    if (lookup := Gather.of(last)) is not None and not before:
        weight, reads, transposed = lookup.data, None, False
        if lookup.axis != 0 or lookup.indices.name != interface.INPUT_IDS:
            return None
    elif product is not None and [node.outputs[0] for node in before] == [product.w]:
        if (transpose := Transpose.of(before[0])) is None:
            return None
        weight, reads, transposed = transpose.x, product.x, False
    elif product is not None and not before:
        weight, reads, transposed = product.w, product.x, True
    else:
        return None
    tensor = weight.const_value
    if not is_constant(weight) or not isinstance(tensor, Stored):
        return None
    if not tensor.is_matrix or tensor.transposed != transposed:
        return None
    name, dtype = str(block.graph[-1].outputs[0].name), last.outputs[0].dtype or ir.DataType.FLOAT
    return _LargeTable(name, tensor.stored(), None if reads is None else str(reads.name), dtype, threads)


def blocks(index: Index, block_bytes: int) -> Iterator[NodeBlock]:
    """Divide a graph into blocks whose weights take about `block_bytes` each.

    It is divided where the type of everything that crosses is known.
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
        typed = all(value.dtype is not None and value.shape is not None for value in ahead)
        whole = at == len(nodes) - 1
        if not whole and (size + _new_bytes(nodes[at + 1], index, set(seen)) <= block_bytes or not typed):
            continue
        made = [value for other in nodes[begin : at + 1] for value in other.outputs]
        wanted = tuple(str(value.name) for value in made if value in ahead or value in outputs)
        if wanted:
            yield NodeBlock(wanted, given)
        given = frozenset(str(value.name) for value in ahead)
        crossing, size, begin = ahead, 0, at + 1
        seen.clear()


def _new_bytes(node: ir.Node, index: Index, seen: set[int]) -> int:
    """Size of the weights of `node` that are not in `seen`, which they join; a constant comes with its reader."""
    size = 0
    for value in node.inputs if node.outputs[0] not in index.constant else ():
        if value is None:
            continue
        leaves = behind([value], lambda _: False)[1] if value in index.constant else [value]
        for tensor in (leaf.const_value for leaf in leaves if is_constant(leaf)):
            if tensor is not None and id(tensor) not in seen:
                size += tensor.nbytes
                seen.add(id(tensor))
    return size


STEPS = (2, 1)  # tokens of each: a prompt, and a token behind it


def run_engine(file: Path, context: int, threads: int) -> None:
    """Run the steps of `STEPS` that `context` has room for through the engine in `file`, `model.onnx`.

    Raises:
        UnsupportedError: ONNX Runtime refuses a block.
        VerificationError: a logit is NaN or infinite.
    """
    model = ir.load(file)
    for initializer in model.graph.initializers.values():
        if isinstance(tensor := initializer.const_value, ir.ExternalTensor):
            initializer.const_value = _unmapped(tensor)
    lengths = [(tokens,) for tokens in STEPS][: context - 1]
    steps = probe.schedule("engine", [np.zeros(sum(tokens for (tokens,) in lengths), np.int64)], lengths)
    [made] = streamed_execution.drive(model, [steps], threads=threads, optimize=True)
    for number, logits in enumerate(made):
        require_finite("engine", logits[0], steps.where(number))


def _unmapped(tensor: ir.ExternalTensor) -> ir.LazyTensor:
    """Map the same bytes anew for each reader: an external tensor keeps the pages that it has read."""
    again = partial(
        ir.ExternalTensor,
        tensor.location,
        tensor.offset,
        tensor.length,
        tensor.dtype,
        shape=tensor.shape,
        name=str(tensor.name),
        base_dir=tensor.base_dir,
    )
    return ir.LazyTensor(again, tensor.dtype, tensor.shape, name=tensor.name)
