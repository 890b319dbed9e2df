"""The plan of CUDA graphs: which decode steps the CUDA provider captures, and what keeps it from that.

ONNX Runtime captures a run whose option `gpu_graph_id` names a graph that it has not captured yet, and replays it in
every later run with that id: the same kernels with the same arguments on the same addresses. So a plan holds one graph
for each number of rows (`decode_batches`) and each class of lengths (`lengths`), and a step takes the smallest that it
fits into. What must not differ between two steps of one graph:

- addresses: caches and inputs lie in buffers of the largest size, of which a step over n rows uses the first n;
- shapes: [batch, 1] tokens, caches of full capacity;
- numbers on the host: `total_sequence_length`, by which GroupQueryAttention chooses its kernel, its splits and its
  scratch memory, is the upper end of the class. How many tokens each row has is on the device (`seqlens_k`).

Captures are warmed up from the largest batch on, and in it from the longest class on: the arena gets its largest blocks
first, which later ones fit into, and the fast product has chosen its tactics for every number of rows.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import onnx_ir as ir

from llmforge.base.errors import UnsupportedError
from llmforge.ir import graph, interface, operators
from llmforge.ir.operators import contrib, standard
from llmforge.recipe import EngineSpec
from llmforge.runtime.config import Capture, GraphPlan
from llmforge.runtime.prefill_shapes import PREFILL_CHUNK

# Lengths that a graph serves: up to these, then all. Between two of them attention's scratch memory and splits are four
# times too large at most; what it reads of the cache follows the rows' own lengths.
LENGTH_CLASSES = (1024, 4096, 16384, 65536)

# Device memory of one launch in a graph: 64 KiB before CUDA 12.4 (PyTorch, "CUDAGraph Trees", Limitations). CUDA 13,
# which the wheel needs, takes less; nobody has measured here how much, so this is the upper end.
LAUNCH_BYTES = 64 << 10
# Of a device's memory, what a pool of blocks may fill up to, with all that lies beside it: CUDA's context, its
# libraries and scratch memory take the rest. vLLM and TensorRT-LLM have 0.9, too.
POOL_PART = 0.9
LAUNCHES_A_NODE = 2  # GroupQueryAttention has up to four, pointwise operators one

# Operators whose results have shapes that depend on numbers. The table of operators has no others of that kind.
NUMBERED_SHAPES = (standard.NonZero, standard.Unique)
_SUBGRAPHS = {ir.AttributeType.GRAPH, ir.AttributeType.GRAPHS}


@dataclass(frozen=True)
class EngineMemory:
    """Device memory that an engine wants, in bytes; all but weights and caches are estimates."""

    weights: int
    caches: int
    activations: int
    graphs: int

    @property
    def total(self) -> int:
        """All together."""
        return self.weights + self.caches + self.activations + self.graphs

    def __str__(self) -> str:
        parts = ("weights", "caches", "activations", "graphs")
        return ", ".join(f"{part} {getattr(self, part) / 1e9:.2f} GB" for part in parts)


def decode_batches(spec: EngineSpec) -> tuple[int, ...]:
    """Return the numbers of rows that decode steps are padded to, ascending: powers of two and `max_batch`."""
    if spec.decode_batches:
        return spec.decode_batches
    powers = [1 << exponent for exponent in range(spec.max_batch.bit_length())]
    return tuple(sorted({power for power in powers if power <= spec.max_batch} | {spec.max_batch}))


def lengths(max_context: int) -> tuple[int, ...]:
    """Return the upper ends of the classes of lengths, ascending; the last is `max_context`."""
    return (*(length for length in LENGTH_CLASSES if length < max_context), max_context)


def plan(model: ir.Model, spec: EngineSpec) -> GraphPlan:
    """Say which steps of the lowered `model` are captured, in the order of their warm-up.

    Nothing, where `spec.cuda_graphs` is off or, with `allow`, where something keeps the graph from being captured.
    """
    if spec.cuda_graphs == "off" or next(reasons(model), None) is not None:
        return GraphPlan("off", ())
    wanted = [(batch, length) for batch in decode_batches(spec) for length in lengths(spec.max_context)]
    captures = tuple(Capture(id, batch, length) for id, (batch, length) in enumerate(sorted(wanted, reverse=True), 1))
    return GraphPlan(spec.cuda_graphs, captures)


def require(model: ir.Model, spec: EngineSpec) -> None:
    """Refuse a lowered `model` that cannot be captured where `spec` wants it to be.

    Raises:
        UnsupportedError: names the nodes.
    """
    found = list(reasons(model))
    if spec.cuda_graphs != "require" or not found:
        return
    node, reason = found[0]
    more = f" and {len(found) - 1} more" if len(found) > 1 else ""
    raise UnsupportedError(
        f"engine.cuda_graphs is require, and a decode step cannot be captured: {node.op_type} {node.name}{more}: "
        f"{reason}",
        hint="set `engine: {cuda_graphs: allow}`, or off; or choose passes that replace the operator",
    )


def reasons(model: ir.Model) -> Iterator[tuple[ir.Node, str]]:
    """Yield the nodes of the lowered `model` that keep a step from being captured, with the reason."""
    for node in model.graph.all_nodes():
        if any(attribute.type in _SUBGRAPHS for attribute in node.attributes.values()):
            yield node, "control flow: ONNX Runtime captures no graph that has any"
        elif any(operator.matches(node) for operator in NUMBERED_SHAPES):
            yield node, "the shape of its result depends on numbers, which the host waits for"
        elif operators.record(node) is None:
            yield node, "the operator is unknown"
        elif (product := contrib.MatMulNBits.of(node)) is not None and product.g_idx is not None:
            yield node, "the host reads its group indices"


def memory(model: ir.Model, spec: EngineSpec, graphs: GraphPlan, blocks: int = 0) -> EngineMemory:
    """Estimate the device memory of the lowered `model`, with a pool of `blocks` if it reads blocks.

    Activations: three tensors of the widest layer for every token of a prefill step, fp32 logits of `max_batch` rows,
    twice, and what a step with prompts gathers of int8 blocks. Graphs: LAUNCH_BYTES for each launch.
    """
    tensors = [value.const_value for value in model.graph.initializers.values() if value.const_value is not None]
    widest = max((max(tensor.shape.numpy(), default=0) for tensor in tensors if len(tensor.shape) > 1), default=0)
    logits = 2 * 4 * spec.max_batch * graph.width(graph.output_named(model, interface.LOGITS))
    launches = LAUNCHES_A_NODE * graph.nodes(model)
    return EngineMemory(
        weights=sum(tensor.nbytes for tensor in tensors),
        caches=(blocks + 1) * block_bytes(model)
        if contrib.PagedAttention.all(model)
        else sum(_cache_bytes(value, spec) for value in model.graph.inputs if _is_cache(value)),
        activations=3 * 2 * PREFILL_CHUNK * widest + logits + gathered_bytes(model, spec),
        graphs=LAUNCH_BYTES * launches * len(graphs.captures),
    )


def block_bytes(model: ir.Model) -> int:
    """Size of one block in all layers, of a graph that reads blocks of a pool."""
    return sum(
        int(math.prod(graph.static(value)[1:]) * graph.dtype(value).itemsize)
        for value in model.graph.inputs
        if _is_cache(value)
    )


def gathered_bytes(model: ir.Model, spec: EngineSpec) -> int:
    """Size of the scratch memory into which a step with a prompt dequantizes int8 blocks, one layer at a time.

    PagedAttention sizes it by the rows of the step times its longest text, in 16 bits, of keys and of values
    (onnxruntime 1.31, paged_attention.cc: `total_kv_tokens` with metadata). So such a step has one row, of up to
    `max_context` tokens: 34 MB at 8192 of them and 1024 channels, where 32 rows would take 1.1 GB.
    """
    channels = [
        math.prod(graph.static(layer.key_cache)[2:])
        for layer in contrib.PagedAttention.all(model)
        if layer.key_cache.dtype == ir.DataType.INT8
    ]
    return 2 * 2 * spec.max_context * max(channels, default=0)


def pool_blocks(model: ir.Model, spec: EngineSpec, graphs: GraphPlan, capacity_bytes: float) -> int:
    """Choose the blocks of a pool: what sequences of full length fill, or what the device has room for.

    At least those of one text of `max_context` tokens, whether the device has room for them or not.
    """
    layer = contrib.PagedAttention.all(model)[0]
    of_a_row = -(-spec.max_context // graph.static(layer.key_cache)[1])
    room = capacity_bytes * POOL_PART - memory(model, spec, graphs).total
    return max(of_a_row, min(spec.max_batch * of_a_row, int(room) // block_bytes(model)))


def _is_cache(value: ir.Value) -> bool:
    return interface.present_of(str(value.name)) != value.name


def _cache_bytes(value: ir.Value, spec: EngineSpec) -> int:
    """Size of one cache of `max_batch` rows."""
    dims, size = graph.dims(value) or (), spec.max_batch
    for axis, dim in enumerate(dims[1:], 1):
        tokens = axis == 2 and not interface.is_state(str(value.name))
        size *= spec.max_context if tokens else dim if isinstance(dim, int) else 1
    return int(size * graph.dtype(value).itemsize)
