"""Attention that a model writes out in primitive operators, recognized by what it computes.

Models that predate transformers' attention interface multiply, mask and normalize scores in their own code. Their
cache hands out past and new keys and values joined (`OpenLayer`), their mask is a node `llmforge::CausalMask`
(`OpenAttention`), and the nodes between these and the sum over the values are one attention (`recognize`). That part
of the graph is run on made-up numbers: probabilities tell its scale, its window and the slopes of its position bias
(ALiBi); it is then replaced by `llmforge::Attention` if, and only if, both agree on random input.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers.cache_utils import Cache

from llmforge.base.errors import UnsupportedError
from llmforge.ir import dialect, interface
from llmforge.ir import graph as g
from llmforge.trace.canonicalize.evaluation import MASK, Origins, Part
from llmforge.trace.hooks.attention import Attention, Layer

Floats = NDArray[np.float32]

HIDDEN = np.finfo(np.float32).min  # what transformers adds to the score of a slot that a query must not see
TOLERANCE = 1e-5  # fp32, on outputs of order one
BIAS_ROUNDINGS = 4  # of a score that has a bias by position: product, sums, and the reading of the slope
ELEMENTS = 1 << 24  # of keys in a probe: bounds its memory (64 MB) for long contexts
SHORT = 5  # keys of a short probe
QUERIES = 3
EXPONENT = 12.0  # largest difference of two scores from which a slope is read: e^-12 is far from the end of fp32
ABSENT = 1e-6  # a slope below this, over the positions probed, is no slope


class OpenLayer(Layer):  # type: ignore[no-untyped-call]  # as its base
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


class OpenAttention(Attention):
    """What transformers calls for the masks of a model with attention code of its own."""

    NAME = "eager"  # the implementation whose masks are added to scores
    bounded = True

    def step(self, past: Sequence[Mapping[str, Tensor] | None], past_lengths: Tensor, lengths: Tensor) -> Cache:
        """Begin one run of the model: make its cache from the graph inputs of each layer (None: a dry run)."""
        super().step(past, past_lengths, lengths)
        self.layers = [OpenLayer(parts, self) for parts in past]
        return Cache(layers=[*self.layers])

    def describe(  # type: ignore[override]  # transformers names its arguments
        self, *, batch_size: int, q_length: int, kv_length: int, **kwargs: object
    ) -> Tensor:
        """Emit the mask that transformers asks for: fp32 [batch, 1, queries, keys], 0 or the lowest number."""
        mask = self.mask(**kwargs)  # type: ignore[arg-type]
        assert self.past_lengths is not None
        return torch.onnx.ops.symbolic(
            f"llmforge::{MASK}",
            (self.past_lengths,),
            {"window": mask.window},
            dtype=torch.float32,
            shape=(batch_size, 1, q_length, kv_length),
            version=1,
        )


@dataclass(frozen=True)
class Found:
    """What an attention in primitives computes."""

    scale: float
    window: int
    slopes: Floats | None  # [num_heads]


@dataclass(frozen=True)
class Core:
    """The part of a raw graph that is one attention."""

    layer: int
    query: ir.Value  # [batch, heads, sequence, D], or with heads last
    heads_last: bool
    heads: int
    keys: ir.Value  # [batch, kv_heads, capacity + sequence, D]: the layer's cache joined with its new keys
    values: ir.Value
    masks: tuple[ir.Value, ...]  # outputs of CausalMask
    output: ir.Value  # the sum over the values
    by_head: ir.Value  # the same, as [batch, heads, sequence, Dv]


def recognize(model: ir.Model, weights: Collection[str], positions: int) -> None:
    """Replace each attention of a raw graph that is written in primitives by `llmforge::Attention`, in place.

    `weights` are the names of initializers that hold no numbers; contexts reach `positions` tokens.

    Raises:
        UnsupportedError: a layer's attention computes something else, or cannot be told from the rest of the graph.
    """
    origins = Origins(weights)
    shared: dict[bytes, ir.Value] = {}
    outputs = {value.name for value in model.graph.outputs}
    for layer in itertools.takewhile(lambda index: interface.present_key(index) in outputs, itertools.count()):
        core = find(model, layer, origins)
        found = probe(model, core, positions)
        _replace(model, core, found, shared)
    g.drop_unused(model)


def find(model: ir.Model, layer: int, origins: Origins) -> Core:
    """Find the attention of `layer`: what lies between its cache and the first value that keys and values both reach.

    Raises:
        UnsupportedError: it is entangled with other inputs than one query and a mask.
    """
    where = f"layer {layer}"
    outputs = {str(value.name): value for value in model.graph.outputs}
    keys, values = outputs[interface.present_key(layer)], outputs[interface.present_value(layer)]
    of_keys, of_values = {keys}, {values}
    output: ir.Value | None = None
    for node in model.graph:
        from_keys, from_values = (not reached.isdisjoint(node.inputs) for reached in (of_keys, of_values))
        if node.op_type == "Shape":
            continue
        if from_keys and from_values:
            output = node.outputs[0]
            break
        of_keys.update(node.outputs if from_keys else ())
        of_values.update(node.outputs if from_values else ())
    if output is None:
        raise UnsupportedError(f"{where} caches keys and values that no attention reads")
    bounds: set[ir.Value] = {keys, values}
    causal: dict[ir.Value, None] = {}
    queries: dict[ir.Value, None] = {}
    visited: set[ir.Value] = set()
    pending = [output]
    while pending:
        value = pending.pop()
        made_by = value.producer()
        if value in bounds or value in visited:
            continue
        visited.add(value)
        if made_by is not None and (made_by.domain, made_by.op_type) == ("llmforge", MASK):
            causal[value] = None
        elif origins.is_data(value) and value not in of_keys and value not in of_values and value is not output:
            queries[value] = None
        elif made_by is not None and made_by.op_type != "Shape":
            pending.extend(x for x in made_by.inputs if x is not None)
    if len(queries) != 1:
        listed = ", ".join(str(value.name) for value in queries) or "nothing"
        raise UnsupportedError(f"{where} computes attention from {listed} besides keys and values, wanted one query")
    query, heads_last, heads = _by_head(next(iter(queries)), keys, where)
    return Core(layer, query, heads_last, heads, keys, values, tuple(causal), output, _readable(output, heads, where))


def _by_head(query: ir.Value, keys: ir.Value, where: str) -> tuple[ir.Value, bool, int]:
    """Walk up from a query to where it is [batch, heads, sequence, D] or [batch, sequence, heads, D]."""
    width = (g.dims(keys) or ())[-1]
    kv_heads = (g.dims(keys) or ())[1]
    value: ir.Value | None = query
    while value is not None:
        dims = g.dims(value) or ()
        if len(dims) == 4 and dims[3] == width and isinstance(kv_heads, int):
            for heads_last, (heads, sequence) in ((False, (dims[1], dims[2])), (True, (dims[2], dims[1]))):
                if isinstance(heads, int) and sequence == "sequence" and heads % kv_heads == 0:
                    return value, heads_last, heads
        node = value.producer()
        value = node.inputs[0] if node is not None and node.op_type in ("Reshape", "Transpose") else None
    raise UnsupportedError(f"{where} has a query of shape {query.shape}, which shows no heads")


def _readable(output: ir.Value, heads: int, where: str) -> ir.Value:
    """Return the sum over the values as [batch, heads, sequence, Dv]: it, or the reshape that reads it."""
    value = output
    while True:
        dims = g.dims(value) or ()
        if len(dims) == 4 and dims[:3] == ("batch", heads, "sequence"):
            return value
        readers = [node for node, _ in value.uses() if node.op_type != "Shape"]
        if len(readers) != 1 or readers[0].op_type != "Reshape":
            raise UnsupportedError(f"{where} ends its attention with shape {value.shape}, which shows no heads")
        value = readers[0].outputs[0]


class _Probe:
    """One attention, run on numbers."""

    def __init__(self, model: ir.Model, core: Core) -> None:
        self.core = core
        self.part = Part(model, [core.query, core.keys, core.values, *core.masks], [core.by_head])
        self.model = model
        self.kv_heads, self.width, self.value_width = (
            _int(dims[axis])
            for dims, axis in (
                (g.dims(core.keys) or (), 1),
                (g.dims(core.keys) or (), 3),
                (g.dims(core.values) or (), 3),
            )
        )

    def run(self, query: Floats, keys: Floats, values: Floats) -> Floats:
        """Run on query [B, H, S, D], keys and values [B, kv_heads, T, D]; return [B, H, S, Dv]."""
        core = self.core
        batch, _, sequence, _ = query.shape
        total = keys.shape[2]
        feeds: dict[ir.Value, NDArray[np.generic]] = {
            core.query: np.ascontiguousarray(query.transpose(0, 2, 1, 3)) if core.heads_last else query,
            core.keys: keys,
            core.values: values,
        }
        slots, own = np.arange(total)[None], np.arange(total - sequence, total)[:, None]
        for mask in core.masks:
            node = mask.producer()
            assert node is not None
            window = node.attributes.get_int("window")
            seen = (slots <= own) & ((slots > own - window) if window else True)
            added = np.where(seen, np.float32(0), HIDDEN).astype(np.float32)
            feeds[mask] = np.broadcast_to(added, (batch, 1, sequence, total)).copy()
        sizes = {"batch": batch, "sequence": sequence, "capacity": total - sequence}
        for value in self.part.extra:  # graph inputs of which only sizes are read
            dims = [dim if isinstance(dim, int) else sizes.get(str(dim), 1) for dim in g.dims(value) or ()]
            assert value.dtype is not None
            feeds[value] = np.zeros(dims, value.dtype.numpy())
        (result,) = self.part.run(feeds)
        return result.astype(np.float32)


def probe(model: ir.Model, core: Core, positions: int) -> Found:
    """Find what the attention `core` computes.

    Raises:
        UnsupportedError: something that `llmforge::Attention` cannot say.
    """
    instance = _Probe(model, core)
    where = f"layer {core.layer}"
    declared = {node.attributes.get_int("window") for mask in core.masks if (node := mask.producer()) is not None}
    if len(declared) > 1:
        raise UnsupportedError(f"{where} adds masks of different windows")
    total = max(SHORT, min(positions, ELEMENTS // (core.heads * max(instance.width, instance.value_width))))
    slopes = _slopes(instance, total, where)
    window = next(iter(declared), 0)
    if slopes is None:
        window = _window(instance, total) or window
    elif total < positions:
        window = next(iter(declared), 0)
    found = Found(_scale(instance, slopes, where), window, slopes)
    for keys in (QUERIES, SHORT, total):
        if not _agrees(instance, found, keys):
            raise UnsupportedError(
                f"{where} computes attention in code of its own, which is not softmax(scale·q·kᵀ) over a causal window"
            )
    if total < positions and _masks_by_itself(instance):
        raise UnsupportedError(f"{where} masks scores in code of its own, further than {total} tokens can be told")
    return found


def _masks_by_itself(instance: _Probe) -> bool:
    return any(node.op_type == "Where" for node in instance.part.nodes)


def _zeros(instance: _Probe, total: int, queries: int) -> tuple[Floats, Floats, Floats]:
    return (
        np.zeros((1, instance.core.heads, queries, instance.width), np.float32),
        np.zeros((1, instance.kv_heads, total, instance.width), np.float32),
        np.zeros((1, instance.kv_heads, total, instance.value_width), np.float32),
    )


def _slopes(instance: _Probe, total: int, where: str) -> Floats | None:
    """Read each head's bias per position off the probabilities of keys at distances 1, 2, 4, … from the query.

    Scores are 0 but for the bias; one value channel a key shows its probability.
    """
    query, keys, values = _zeros(instance, total, 1)
    distances = [0] + [1 << n for n in range(instance.value_width - 1) if (1 << n) < total]
    for channel, distance in enumerate(distances):
        values[0, :, total - 1 - distance, channel] = 1
    shown = instance.run(query, keys, values)[0, :, 0, : len(distances)].astype(np.float64)  # [H, distances]
    slopes = np.zeros(len(shown), np.float64)
    for head, row in enumerate(shown):
        if not row[0] > 0:
            raise UnsupportedError(f"{where}: a query does not see its own position")
        visible = [n for n in range(1, len(distances)) if row[n] > 0 and abs(np.log(row[0] / row[n])) < EXPONENT]
        if visible:
            slopes[head] = np.log(row[0] / row[visible[-1]]) / distances[visible[-1]]
    if np.abs(slopes).max() * total < ABSENT * total:
        return None
    return slopes.astype(np.float32)


def _window(instance: _Probe, total: int) -> int:
    """Read the window off the mean of the positions that a query sees, all of one probability."""
    query, keys, values = _zeros(instance, total, 1)
    values[0, :, :, 0] = np.arange(total, dtype=np.float32) - (total - 1)
    mean = float(instance.run(query, keys, values)[0, 0, 0, 0])
    window = round(1 - 2 * mean)
    return 0 if window >= total else window


def _scale(instance: _Probe, slopes: Floats | None, where: str) -> float:
    """Fit the scale of q·k on two keys, and take the exact number that it stands for.

    That number is 1/√D, 1, or a constant of the code or its inverse: a fit is not exact enough.
    """
    rng = np.random.default_rng(1)
    query, keys, values = _zeros(instance, 2, 1)
    query[:] = rng.standard_normal(query.shape)
    keys[:] = rng.standard_normal(keys.shape)
    values[0, :, 0, 0] = values[0, :, 1, 1] = 1
    first, second = instance.run(query, keys, values)[0, :, 0, :2].astype(np.float64).T  # [H]
    group = instance.core.heads // instance.kv_heads
    products = np.einsum("hd,htd->ht", query[0, :, 0], keys[0].repeat(group, 0).astype(np.float64))
    if not ((first > 0) & (second > 0)).all():
        raise UnsupportedError(f"{where}: the scale of its attention cannot be read off its probabilities")
    logits = np.log(first / second) + (0 if slopes is None else slopes.astype(np.float64))
    difference = products[:, 0] - products[:, 1]
    fitted = float((logits * difference).sum() / (difference**2).sum())
    constants = [
        float(value.const_value.numpy())
        for node in instance.part.nodes
        for value in node.inputs
        if value is not None
        and value.const_value is not None
        and value.const_value.size == 1
        and value.dtype == ir.DataType.FLOAT
    ]
    candidates = [1.0, instance.width**-0.5]
    for constant in constants:
        if constant and np.isfinite(constant):
            candidates += [constant, 1 / constant, constant * instance.width**-0.5]
    nearest: float = min(candidates, key=lambda candidate: abs(candidate - fitted))
    if abs(nearest - fitted) > 1e-4 * abs(fitted):
        raise UnsupportedError(f"{where}: its attention scales scores by about {fitted:.6g}, a number it does not hold")
    return nearest


def _agrees(instance: _Probe, found: Found, total: int) -> bool:
    """Compare with the dialect's reference on random input: the last queries of `total` positions, two rows."""
    core, rng = instance.core, np.random.default_rng(2)
    batch, sequence = 2, min(QUERIES, total)
    past = total - sequence
    query = rng.standard_normal((batch, core.heads, sequence, instance.width)).astype(np.float32)
    keys = rng.standard_normal((batch, instance.kv_heads, total, instance.width)).astype(np.float32)
    values = rng.standard_normal((batch, instance.kv_heads, total, instance.value_width)).astype(np.float32)

    def rows(x: Floats) -> Floats:
        return np.ascontiguousarray(x.transpose(0, 2, 1, 3)).reshape(batch, sequence, -1)

    expected, _, _ = dialect.attention(
        rows(query),
        rows(keys[:, :, past:]),
        rows(values[:, :, past:]),
        keys,
        values,
        np.full(batch, past, np.int32),
        alibi_slopes=found.slopes,
        num_heads=core.heads,
        kv_num_heads=instance.kv_heads,
        scale=found.scale,
        softcap=0.0,
        window=found.window,
    )
    actual = rows(instance.run(query, keys, values))
    # A bias by position is as large as the positions; models add it in fp32, by absolute positions.
    steepest = 0.0 if found.slopes is None else float(np.abs(found.slopes).max())
    rounding = BIAS_ROUNDINGS * float(np.finfo(np.float32).eps) * steepest * total
    return bool(np.allclose(actual, expected, rtol=0, atol=TOLERANCE + rounding))


def _replace(model: ir.Model, core: Core, found: Found, shared: dict[bytes, ir.Value]) -> None:
    """Put `llmforge::Attention` in the place of `core`."""
    inputs = {str(value.name): value for value in model.graph.inputs}
    past = [inputs[interface.past_key(core.layer)], inputs[interface.past_value(core.layer)]]
    at = core.by_head.producer()
    assert at is not None

    def rows(x: ir.Value, heads_last: bool = False) -> ir.Value:
        batch, heads, sequence, width = (
            ((dims[0], dims[2], dims[1], dims[3]) if heads_last else dims)
            if (dims := g.dims(x))
            else (None, None, None, None)
        )
        assert isinstance(heads, int)
        assert isinstance(width, int)
        if not heads_last:
            x = _typed(g.insert(at, "Transpose", [x], {"perm": [0, 2, 1, 3]})[0], x, (batch, sequence, heads, width))
        target = g.initializer(model, f"shape_0_0_{heads * width}", np.array([0, 0, heads * width], np.int64))
        return _typed(g.insert(at, "Reshape", [x, target])[0], x, (batch, sequence, heads * width))

    new = []
    for joined in (core.keys, core.values):
        node = joined.producer()
        assert node is not None
        assert node.op_type == "Concat"
        new.append(node.inputs[1])
    slopes: list[ir.Value | None] = []
    if found.slopes is not None:
        key = found.slopes.tobytes()
        if key not in shared:
            name = "alibi.slopes" + (f"_{len(shared)}" if shared else "")
            shared[key] = g.initializer(model, name, found.slopes)
        slopes = [None, shared[key]]  # None: no sinks
    (_, kv_heads, _, _) = g.dims(core.keys) or (None, None, None, None)
    assert isinstance(kv_heads, int)
    operands = [rows(core.query, core.heads_last), *(rows(x) for x in new if x is not None)]
    y, present_key, present_value = g.insert(
        at,
        "Attention",
        [*operands, *past, inputs[interface.PAST_LENGTHS], *slopes],
        {
            "num_heads": core.heads,
            "kv_num_heads": kv_heads,
            "scale": found.scale,
            "softcap": 0.0,
            "window": found.window,
            "layer": core.layer,
        },
        domain="llmforge",
        outputs=3,
    )
    scopes = at.metadata_props
    dims = g.dims(core.by_head) or ()
    batch, heads, sequence, width = dims
    assert isinstance(width, int)
    _typed(y, core.by_head, (batch, sequence, core.heads * width))
    target = g.initializer(model, f"shape_0_0_{core.heads}_{width}", np.array([0, 0, core.heads, width], np.int64))
    split = _typed(g.insert(at, "Reshape", [y, target])[0], y, (batch, sequence, heads, width))
    by_head = _typed(g.insert(at, "Transpose", [split], {"perm": [0, 2, 1, 3]})[0], y, dims)
    for node in (y.producer(), split.producer(), by_head.producer(), *(x.producer() for x in operands)):
        assert node is not None
        node.metadata_props.update(scopes)
    g.replace_uses(core.by_head, by_head)
    for joined, present, buffer in zip((core.keys, core.values), (present_key, present_value), past, strict=True):
        _typed(present, buffer, g.dims(buffer) or ())
        g.replace_uses(joined, present)
    model.opset_imports["llmforge"] = 1


def _int(dim: int | str | None) -> int:
    assert isinstance(dim, int)
    return dim


def _typed(value: ir.Value, like: ir.Value, dims: Sequence[int | str | None]) -> ir.Value:
    value.type, value.shape = like.type, ir.Shape(dims)
    return value
