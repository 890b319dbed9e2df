"""Attention that a model writes out in primitive operators, recognized by what it computes.

Models that predate transformers' attention interface multiply, mask and normalize scores in their own code. Their
cache hands out past and new keys and values joined (`JoinedCacheLayer`), their mask is a node `llmforge::CausalMask`
(`OpenAttention`), and the nodes between these and the sum over the values are one attention (`recognize`). That part
of the graph is run on made-up numbers: probabilities tell its scale, its window and the slopes of its position bias
(ALiBi); it is then replaced by `llmforge::Attention` if, and only if, both agree on random input.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import numpy as np
import onnx_ir as ir
import onnxruntime as ort
import torch
from numpy.typing import NDArray
from onnxruntime.capi import onnxruntime_pybind11_state as refused
from torch import Tensor

from llmforge.base.errors import UnsupportedError
from llmforge.ir import dialect, graph, interface, operators
from llmforge.ir.operators import canonical, standard
from llmforge.ir.subgraph import behind, copy_nodes
from llmforge.trace.canonicalize.rewriting import lay_out, swap_heads
from llmforge.trace.hooks.attention import AttentionHook, CacheLayer
from llmforge.trace.hooks.symbolic import emit

Array = NDArray[np.generic]

REFUSED = (
    refused.Fail,
    refused.InvalidArgument,
    refused.InvalidGraph,
    refused.NotImplemented,
    refused.RuntimeException,
)


@dataclass
class Origins:
    """What each value of a graph depends on.

    A value is *data* if it depends on the content of a graph input or a weight; sizes of inputs and masks do not count.
    """

    weights: Collection[str]  # names of initializers that stand for tensors of a checkpoint
    _data: dict[ir.Value, bool] = field(default_factory=dict)

    def is_data(self, value: ir.Value) -> bool:
        """Say whether `value` depends on the content of an input or a weight."""
        pending = [value]
        while pending:
            current = pending[-1]
            if current in self._data:
                pending.pop()
                continue
            node = current.producer()
            if node is None:
                self._data[current] = current.is_graph_input() or current.name in self.weights
            elif operators.is_a(node, standard.OnnxShape, canonical.CausalMask):
                self._data[current] = False
            else:
                read = [x for x in node.inputs if x is not None]
                unknown = [x for x in read if x not in self._data]
                if unknown:
                    pending.extend(unknown)
                    continue
                self._data[current] = any(self._data[x] for x in read)
        return self._data[value]


class Evaluation:
    """The subgraph between `inputs` and `outputs`, ready to run on numbers."""

    def __init__(self, model: ir.Model, inputs: Sequence[ir.Value], outputs: Sequence[ir.Value]) -> None:
        nodes, edge = behind(outputs, lambda value: value in inputs)
        roots = [value for value in edge if value not in inputs]
        order = {node: index for index, node in enumerate(model.graph)}
        constants = [value for value in roots if value.is_initializer() and not value.is_graph_input()]
        fed = [*inputs, *(value for value in roots if value.is_graph_input())]
        copies: dict[ir.Value, ir.Value] = {}
        for index, value in enumerate(fed):
            rank_only = None if value.shape is None else ir.Shape([None] * len(value.shape))
            copies[value] = ir.Value(name=f"input_{index}", type=value.type, shape=rank_only)
        for index, value in enumerate(constants):
            if value.const_value is None:
                raise UnsupportedError(f"a part of the graph reads {value.name!r}, which has no numbers")
            tensor = ir.tensor(value.const_value.numpy(), name=f"constant_{index}")
            copies[value] = ir.val(tensor.name, const_value=tensor)
        copied = copy_nodes(sorted(nodes, key=order.__getitem__), copies)
        for number, node in enumerate(copied):  # names of a raw graph may be missing, and its shapes disagree
            for index, value in enumerate(node.outputs):
                value.name, value.shape = f"value_{number}_{index}", None
        graph = ir.Graph(
            [copies[value] for value in fed],
            [copies[value] for value in outputs],
            nodes=copied,
            initializers=[copies[value] for value in constants],
            opset_imports=dict(model.opset_imports),
        )
        self.extra = [value for value in roots if value.is_graph_input()]
        self.nodes = copied
        options = ort.SessionOptions()
        options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
        options.intra_op_num_threads = 1
        options.log_severity_level = 3
        proto = ir.to_proto(ir.Model(graph, ir_version=model.ir_version))
        with _refusals():
            self._session = ort.InferenceSession(proto.SerializeToString(), options, ["CPUExecutionProvider"])
        self._names = {value: str(copies[value].name) for value in fed}

    def run(self, feeds: Mapping[ir.Value, Array]) -> list[Array]:
        """Evaluate the outputs."""
        named = {self._names[value]: array for value, array in feeds.items()}
        with _refusals():
            results: list[Array] = self._session.run(None, named)
        return results


@contextmanager
def _refusals() -> Iterator[None]:
    """Say of what ONNX Runtime refuses that it cannot be evaluated."""
    try:
        yield
    except REFUSED as error:
        raise UnsupportedError(f"a part of the graph cannot be evaluated: {str(error).splitlines()[0]}") from error


Floats = NDArray[np.float32]

HIDDEN = np.finfo(np.float32).min  # what transformers adds to the score of a slot that a query must not see
TOLERANCE = 1e-5  # fp32, on outputs of order one
BIAS_ROUNDINGS = 4  # of a score that has a bias by position: product, sums, and the reading of the slope
ELEMENTS = 1 << 24  # of keys in a probe: bounds its memory (64 MB) for long contexts
SHORT = 5  # keys of a short probe
QUERIES = 3
SLOPED = (64, 512)  # tokens of texts that a slope is read in, besides a long one
EXPONENT = 12.0  # largest difference of two scores from which a slope is read: e^-12 is far from the end of fp32
ABSENT = 1e-6  # a bias below this, of the farthest key that shows one, is a rounding error of fp32 probabilities


class JoinedCacheLayer(CacheLayer):  # type: ignore[no-untyped-call]  # as its base
    """The cache of one layer for code of its own: hands out past and new keys and values joined, as transformers'."""

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: object, **kwargs: object
    ) -> tuple[Tensor, Tensor]:
        """Remember the step's keys and values [B, kv_heads, S, D] and return [B, kv_heads, C + S, D]."""
        key, value = self.read = super().update(key_states, value_states)
        self.shapes |= {"key": (key.shape[1], key.shape[3]), "value": (value.shape[1], value.shape[3])}
        if self.past is None:
            return key, value
        self.present["key"] = torch.cat([self.past["key"], key], 2)
        self.present["value"] = torch.cat([self.past["value"], value], 2)
        return self.present["key"], self.present["value"]

    def get_seq_length(self) -> int:
        """Return the capacity: the past is taken for full, as long as the graph is a raw one."""
        return 0 if self.past is None else self.past["key"].shape[2]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Return the number of keys and the first of them."""
        return self.get_seq_length() + query_length, 0


class OpenAttention(AttentionHook):
    """What transformers calls for the masks of a model with attention code of its own."""

    NAME = "eager"  # the implementation whose masks are added to scores
    LAYER = JoinedCacheLayer
    bounded = True

    def describe(  # type: ignore[override]  # transformers names its arguments
        self, *, batch_size: int, q_length: int, kv_length: int, **kwargs: object
    ) -> Tensor:
        """Emit the mask that transformers asks for: fp32 [batch, 1, queries, keys], 0 or the lowest number."""
        described = self.mask(**kwargs)  # type: ignore[arg-type]
        if described.chunk:
            raise UnsupportedError(f"attention of its own code reads chunks of {described.chunk} tokens")
        window = described.window
        made = [(torch.float32, (batch_size, 1, q_length, kv_length))]
        (mask,) = emit(canonical.CausalMask, {"past_lengths": self.past_lengths}, {"window": window}, made)
        return mask


@dataclass(frozen=True)
class AttentionParameters:
    """What an attention in primitives computes."""

    scale: float
    window: int
    slopes: Floats | None  # [num_heads]


@dataclass(frozen=True)
class AttentionSubgraph:
    """The part of a raw graph that is one attention."""

    layer: int
    query: ir.Value  # [batch, heads, sequence, width], or with heads last
    heads_last: bool
    heads: int
    kv_heads: int
    width: int
    value_width: int
    keys: ir.Value  # [batch, kv_heads, capacity + sequence, width]: the layer's cache joined with its new keys
    values: ir.Value
    masks: tuple[canonical.CausalMask, ...]
    output: ir.Value  # the sum over the values [batch, heads, sequence, value_width]


def recognize(model: ir.Model, weights: Collection[str], positions: int) -> None:
    """Replace each attention of a raw graph that is written in primitives by `llmforge::Attention`, in place.

    `weights` are the names of initializers that hold no numbers; contexts reach `positions` tokens.

    Raises:
        UnsupportedError: a layer's attention computes something else, or cannot be told from the rest of the graph.
    """
    origins = Origins(weights)
    shared: dict[bytes, ir.Value] = {}
    outputs = {value.name for value in model.graph.outputs}
    for layer in itertools.takewhile(lambda index: interface.present_part(index, "key") in outputs, itertools.count()):
        subgraph = find(model, layer, origins)
        _replace(model, subgraph, probe(model, subgraph, positions), shared)
    graph.drop_unused(model)


def find(model: ir.Model, layer: int, origins: Origins) -> AttentionSubgraph:
    """Find the attention of `layer`: what lies between its cache and the first value that keys and values both reach.

    Raises:
        UnsupportedError: it is entangled with other inputs than one query and a mask.
    """
    where = f"layer {layer}"
    outputs = {str(value.name): value for value in model.graph.outputs}
    keys, values = outputs[interface.present_part(layer, "key")], outputs[interface.present_part(layer, "value")]
    of_keys, of_values = {keys}, {values}
    output: ir.Value | None = None
    for node in model.graph:
        from_keys, from_values = (not reached.isdisjoint(node.inputs) for reached in (of_keys, of_values))
        if standard.OnnxShape.matches(node):
            continue
        if from_keys and from_values:
            output = operators.view(node).output
            break
        of_keys.update(node.outputs if from_keys else ())
        of_values.update(node.outputs if from_values else ())
    if output is None:
        raise UnsupportedError(f"{where} caches keys and values that no attention reads")
    inside = {output} | (of_keys | of_values) - {keys, values}

    def is_edge(value: ir.Value) -> bool:
        sized = standard.OnnxShape.made(value) or canonical.CausalMask.made(value)
        return value in (keys, values) or sized is not None or (value not in inside and origins.is_data(value))

    _, edge = behind([output], is_edge)
    masks = [mask for value in edge if (mask := canonical.CausalMask.made(value)) is not None]
    queries = [value for value in edge if value not in (keys, values) and origins.is_data(value)]
    if len(queries) != 1:
        listed = ", ".join(str(value.name) for value in queries) or "nothing"
        raise UnsupportedError(f"{where} computes attention from {listed} besides keys and values, expected one query")
    (query,) = queries
    (_, kv_heads, _, width), (*_, value_width) = graph.dims(keys) or (None,) * 4, graph.dims(values) or (None,)
    if not isinstance(kv_heads, int) or not isinstance(width, int) or not isinstance(value_width, int):
        raise UnsupportedError(f"{where} caches keys of shape {keys.shape} and values of shape {values.shape}")
    query, heads_last, heads = _by_head(query, kv_heads, width, where)
    by_head = _output_by_head(output, heads, where)
    return AttentionSubgraph(
        layer, query, heads_last, heads, kv_heads, width, value_width, keys, values, tuple(masks), by_head
    )


def _by_head(query: ir.Value, kv_heads: int, width: int, where: str) -> tuple[ir.Value, bool, int]:
    """Walk up from a query to where it is [batch, heads, sequence, D] or [batch, sequence, heads, D]."""
    value: ir.Value | None = query
    while value is not None:
        dims = graph.dims(value) or ()
        if len(dims) == 4 and dims[3] == width:
            for heads_last, (heads, sequence) in ((False, (dims[1], dims[2])), (True, (dims[2], dims[1]))):
                if isinstance(heads, int) and sequence == "sequence" and heads % kv_heads == 0:
                    return value, heads_last, heads
        moved = standard.Reshape.made(value) or standard.Transpose.made(value)
        value = None if moved is None else moved.x
    raise UnsupportedError(f"{where} has a query of shape {query.shape}, which shows no heads")


def _output_by_head(output: ir.Value, heads: int, where: str) -> ir.Value:
    """Return the sum over the values as [batch, heads, sequence, Dv]: it, or the reshape that reads it."""
    value = output
    while True:
        dims = graph.dims(value) or ()
        if len(dims) == 4 and dims[:3] == ("batch", heads, "sequence"):
            return value
        readers = [node for node, _ in value.uses() if not standard.OnnxShape.matches(node)]
        reshape = standard.Reshape.of(readers[0]) if len(readers) == 1 else None
        if reshape is None:
            raise UnsupportedError(f"{where} ends its attention with shape {value.shape}, which shows no heads")
        value = reshape.output


class _Probe:
    """One attention, run on numbers."""

    def __init__(self, model: ir.Model, subgraph: AttentionSubgraph) -> None:
        self.subgraph = subgraph
        inputs = [subgraph.query, subgraph.keys, subgraph.values, *(mask.output for mask in subgraph.masks)]
        self.evaluation = Evaluation(model, inputs, [subgraph.output])

    def run(self, query: Floats, keys: Floats, values: Floats) -> Floats:
        """Run on query [B, H, S, D], keys and values [B, kv_heads, T, D]; return [B, H, S, Dv]."""
        subgraph = self.subgraph
        batch, _, sequence, _ = query.shape
        total = keys.shape[2]
        feeds: dict[ir.Value, NDArray[np.generic]] = {
            subgraph.query: np.ascontiguousarray(query.transpose(0, 2, 1, 3)) if subgraph.heads_last else query,
            subgraph.keys: keys,
            subgraph.values: values,
        }
        slots, own = np.arange(total)[None], np.arange(total - sequence, total)[:, None]
        for mask in subgraph.masks:
            seen = (slots <= own) & ((slots > own - mask.window) if mask.window else True)
            added = np.where(seen, np.float32(0), HIDDEN).astype(np.float32)
            feeds[mask.output] = np.broadcast_to(added, (batch, 1, sequence, total)).copy()
        sizes = {"batch": batch, "sequence": sequence, "capacity": total - sequence}
        for value in self.evaluation.extra:  # graph inputs of which only sizes are read
            dims = [dim if isinstance(dim, int) else sizes.get(str(dim), 1) for dim in graph.dims(value) or ()]
            feeds[value] = np.zeros(dims, (value.dtype or ir.DataType.FLOAT).numpy())
        (result,) = self.evaluation.run(feeds)
        return result.astype(np.float32)


def probe(model: ir.Model, subgraph: AttentionSubgraph, positions: int) -> AttentionParameters:
    """Find what the attention `subgraph` computes.

    Raises:
        UnsupportedError: something that `llmforge::Attention` cannot say.
    """
    probed = _Probe(model, subgraph)
    where = f"layer {subgraph.layer}"
    declared = {mask.window for mask in subgraph.masks}
    if len(declared) > 1:
        raise UnsupportedError(f"{where} adds masks of different windows")
    total = max(SHORT, min(positions, ELEMENTS // (subgraph.heads * max(subgraph.width, subgraph.value_width))))
    slopes = _slopes(probed, total, where)
    window = (0 if slopes is not None else _window(probed, total)) or next(iter(declared), 0)
    found = AttentionParameters(_scale(probed, slopes, where), window, slopes)
    for keys in (QUERIES, SHORT, total):
        if not _agrees(probed, found, keys):
            raise UnsupportedError(
                f"{where} computes attention in code of its own, which is not softmax(scale·q·kᵀ) over a causal window"
            )
    if total < positions and any(map(standard.Where.matches, probed.evaluation.nodes)):
        raise UnsupportedError(f"{where} masks scores in code of its own, further than {total} tokens can be told")
    return found


def _zeros(probed: _Probe, total: int, queries: int) -> tuple[Floats, Floats, Floats]:
    subgraph = probed.subgraph
    return (
        np.zeros((1, subgraph.heads, queries, subgraph.width), np.float32),
        np.zeros((1, subgraph.kv_heads, total, subgraph.width), np.float32),
        np.zeros((1, subgraph.kv_heads, total, subgraph.value_width), np.float32),
    )


def _slopes(probed: _Probe, total: int, where: str) -> Floats | None:
    """Read each head's bias per position off the probabilities of keys at distances 1, 2, 4, … from the query.

    Models add the bias in fp32 by absolute positions: in long texts it is rounded more, and reaches further. Of texts
    of several lengths, up to `total` tokens, that tells each slope which tells it best.
    """
    lengths = [total, *(length for length in SLOPED if length < total)]
    read = [_slopes_in(probed, length, where) for length in lengths]
    eps = float(np.finfo(np.float32).eps)
    largest = max(float(np.abs(slopes * distances).max()) for slopes, distances in read)
    if largest < ABSENT:
        return None
    rounding = np.array(
        [
            np.where(distances > 0, eps * (np.abs(slopes) * length + 1) / np.maximum(distances, 1), np.inf)
            for length, (slopes, distances) in zip(lengths, read, strict=True)
        ]
    )
    best = rounding.argmin(0)
    slopes: Floats = np.array([read[at][0][head] for head, at in enumerate(best)], np.float32)
    return slopes


def _slopes_in(probed: _Probe, total: int, where: str) -> tuple[NDArray[np.float64], NDArray[np.int64]]:
    """Read slopes in a text of `total` tokens, and the distance that tells each: [H], 0 where none does.

    Scores are 0 but for the bias; one value channel a key shows its probability.
    """
    query, keys, values = _zeros(probed, total, 1)
    distances = [0] + [1 << n for n in range(probed.subgraph.value_width - 1) if (1 << n) < total]
    for channel, distance in enumerate(distances):
        values[0, :, total - 1 - distance, channel] = 1
    shown = probed.run(query, keys, values)[0, :, 0, : len(distances)].astype(np.float64)  # [H, distances]
    slopes, told = np.zeros(len(shown), np.float64), np.zeros(len(shown), np.int64)
    for head, row in enumerate(shown):
        if not row[0] > 0:
            raise UnsupportedError(f"{where}: a query does not see its own position")
        visible = [n for n in range(1, len(distances)) if row[n] > 0 and abs(np.log(row[0] / row[n])) < EXPONENT]
        if visible:
            told[head] = distances[visible[-1]]
            slopes[head] = float(np.log(row[0] / row[visible[-1]])) / told[head]
    return slopes, told


def _window(probed: _Probe, total: int) -> int:
    """Read the window off the mean of the positions that a query sees, all of one probability."""
    query, keys, values = _zeros(probed, total, 1)
    values[0, :, :, 0] = np.arange(total, dtype=np.float32) - (total - 1)
    mean = float(probed.run(query, keys, values)[0, 0, 0, 0])
    window = round(1 - 2 * mean)
    return 0 if window >= total else window


def _scale(probed: _Probe, slopes: Floats | None, where: str) -> float:
    """Fit the scale of q·k on two keys, and take the exact number that it stands for.

    That number is 1/√D, 1, or a constant of the code or its inverse: a fit is not exact enough.
    """
    rng = np.random.default_rng(1)
    query, keys, values = _zeros(probed, 2, 1)
    query[:] = rng.standard_normal(query.shape)
    keys[:] = rng.standard_normal(keys.shape)
    values[0, :, 0, 0] = values[0, :, 1, 1] = 1
    first, second = probed.run(query, keys, values)[0, :, 0, :2].astype(np.float64).T  # [H]
    group = probed.subgraph.heads // probed.subgraph.kv_heads
    products = np.einsum("hd,htd->ht", query[0, :, 0], keys[0].repeat(group, 0).astype(np.float64))
    if not ((first > 0) & (second > 0)).all():
        raise UnsupportedError(f"{where}: the scale of its attention cannot be read off its probabilities")
    logits = np.log(first / second) + (0 if slopes is None else slopes.astype(np.float64))
    difference = products[:, 0] - products[:, 1]
    fitted = float((logits * difference).sum() / (difference**2).sum())
    constants = [
        float(value.const_value.numpy())
        for node in probed.evaluation.nodes
        for value in node.inputs
        if value is not None
        and value.const_value is not None
        and value.const_value.size == 1
        and value.dtype == ir.DataType.FLOAT
    ]
    candidates = [1.0, probed.subgraph.width**-0.5]
    for constant in constants:
        if constant and np.isfinite(constant):
            candidates += [constant, 1 / constant, constant * probed.subgraph.width**-0.5]
    nearest: float = min(candidates, key=lambda candidate: abs(candidate - fitted))
    if abs(nearest - fitted) > 1e-4 * abs(fitted):
        raise UnsupportedError(f"{where}: its attention scales scores by about {fitted:.6g}, a number it does not hold")
    return nearest


def _agrees(probed: _Probe, found: AttentionParameters, total: int) -> bool:
    """Compare with the dialect's reference on random input: the last queries of `total` positions, two rows."""
    subgraph, rng = probed.subgraph, np.random.default_rng(2)
    batch, sequence = 2, min(QUERIES, total)
    past = total - sequence
    query = rng.standard_normal((batch, subgraph.heads, sequence, subgraph.width)).astype(np.float32)
    keys = rng.standard_normal((batch, subgraph.kv_heads, total, subgraph.width)).astype(np.float32)
    values = rng.standard_normal((batch, subgraph.kv_heads, total, subgraph.value_width)).astype(np.float32)

    def rows(x: Floats) -> Floats:
        return np.ascontiguousarray(x.transpose(0, 2, 1, 3)).reshape(batch, sequence, -1)

    expected, _, _ = dialect.attention(
        rows(query),
        rows(keys[:, :, past:]),
        rows(values[:, :, past:]),
        keys,
        values,
        np.full(batch, past, np.int32),
        form=dialect.AttentionForm(
            subgraph.heads, subgraph.kv_heads, found.scale, window=found.window, alibi_slopes=found.slopes
        ),
    )
    actual = rows(probed.run(query, keys, values))
    # A bias by position is as large as the positions; models add it in fp32, by absolute positions.
    steepest = 0.0 if found.slopes is None else float(np.abs(found.slopes).max())
    rounding = BIAS_ROUNDINGS * float(np.finfo(np.float32).eps) * steepest * total
    return bool(np.allclose(actual, expected, rtol=0, atol=TOLERANCE + rounding))


def _replace(
    model: ir.Model, subgraph: AttentionSubgraph, parameters: AttentionParameters, shared: dict[bytes, ir.Value]
) -> None:
    """Put `llmforge::Attention` in the place of `subgraph`."""
    layer, y, at = subgraph.layer, subgraph.output, subgraph.output.producer()
    joined = [standard.Concat.made(cache) for cache in (subgraph.keys, subgraph.values)]
    parts = [part for concat in joined if concat is not None for part in concat.node.inputs if part is not None]
    if at is None or len(parts) != 4:
        raise UnsupportedError(f"layer {layer} caches something else than past and new keys and values joined")
    _, key, _, value = parts
    inputs = {str(value.name): value for value in model.graph.inputs}
    past_key, past_value = inputs[interface.past_part(layer, "key")], inputs[interface.past_part(layer, "value")]
    if parameters.slopes is not None and parameters.slopes.tobytes() not in shared:
        name = "alibi.slopes" + (f"_{len(shared)}" if shared else "")
        shared[parameters.slopes.tobytes()] = graph.initializer(model, name, parameters.slopes)

    def rows(x: ir.Value, heads: int, width: int, *, heads_last: bool = False) -> ir.Value:
        """Lay heads side by side: [B, H, S, D] → [B, S, H·D]."""
        return lay_out(model, at, x if heads_last else swap_heads(at, x), heads * width)

    attention = canonical.Attention.insert(
        at,
        {
            "q": rows(subgraph.query, subgraph.heads, subgraph.width, heads_last=subgraph.heads_last),
            "k": rows(key, subgraph.kv_heads, subgraph.width),
            "v": rows(value, subgraph.kv_heads, subgraph.value_width),
            "past_key": past_key,
            "past_value": past_value,
            "past_lengths": inputs[interface.PAST_LENGTHS],
            "alibi_slopes": None if parameters.slopes is None else shared[parameters.slopes.tobytes()],
        },
        {
            "num_heads": subgraph.heads,
            "kv_num_heads": subgraph.kv_heads,
            "scale": parameters.scale,
            "softcap": 0.0,
            "window": parameters.window,
            "layer": layer,
        },
        outputs=3,
    )
    attention.node.metadata_props.update(at.metadata_props)
    batch, _, sequence, _ = graph.dims(y) or (None,) * 4
    attention.y.type, attention.y.shape = y.type, ir.Shape([batch, sequence, subgraph.heads * subgraph.value_width])
    graph.replace_uses(y, swap_heads(at, lay_out(model, at, attention.y, subgraph.heads, subgraph.value_width)))
    for cache, present, past in (
        (subgraph.keys, attention.present_key, past_key),
        (subgraph.values, attention.present_value, past_value),
    ):
        present.type, present.shape = past.type, ir.Shape(graph.dims(past) or ())
        graph.replace_uses(cache, present)
