"""The parts of a lossy pass, and what the pass costs with some of them kept or requantized.

A part is *kept* where it is as it was before the pass, and *requantized* where it is rounded to nearest in the very
format that the pass chose, straight from what was there before: what a part costs above that is no cost of its format.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from llmforge.ir import graph, interface
from llmforge.ir.derived import by_output
from llmforge.ir.operators import canonical, contrib, cpu
from llmforge.metrics.tokens import Floats
from llmforge.quantization import kv_cache
from llmforge.quantization.formats import INT8_KV, SlotFormat
from llmforge.quantization.grid import Grid, Scale
from llmforge.quantization.grids import Packed, QuantizedMatrix, dequantize, pack, round_to_nearest, stack, unpack
from llmforge.quantization.initializers import SCALES, arrange
from llmforge.rewrite import cpu_attention, cpu_linear, moe_kernels, options
from llmforge.rewrite.pass_base import Context, Pass
from llmforge.verification.divergence import Divergence
from llmforge.verification.probe import AfterStep, ProbeCall

_NAMED = 3  # parameters that the name of a part gives: queries, keys and values
_PARTS = ("codes", "scales", "zero_points", "groups")  # initializers of a quantized matrix, after its name
_LAYER = re.compile(r"\.(\d+)\.")

Leaf = tuple[str, int, int]  # an initializer and an expert or -1; a cache, a head and a channel


@dataclass(frozen=True)
class LossyPart:
    """A part of a pass, and the smaller ones that it consists of; () where it is one leaf."""

    name: str
    leaves: frozenset[Leaf]
    parts: tuple[LossyPart, ...] = ()
    parameters: tuple[str, ...] = ()  # of the checkpoint, that `exclude` names to keep it
    layers: tuple[int, ...] = ()  # of the cache, that `exclude_layers` names to keep it
    table: bool = False  # an embedding or head, which has bits of its own


@dataclass(frozen=True, eq=False)
class LossyStep:
    """A lossy pass of a build, and the graphs before and after it."""

    number: int  # of the pass in its recipe, from 0
    step: Pass
    before: ir.Model
    after: ir.Model
    context: Context


@dataclass(eq=False)
class PartLoss(ABC):
    """What a pass costs, against the graph before it."""

    lossy: LossyStep
    divergence: Divergence

    @property
    def watch(self) -> AfterStep | None:
        """What looks at the cache while the graph before the pass runs."""
        return None

    def share(self, model: ir.Model, kept: Sequence[LossyPart] = ()) -> None:
        """Let `model`, made by the pass with other options, have the tensors of the graph after it, but of `kept`."""
        after, before = self.lossy.after.graph.initializers, self.lossy.before.graph.initializers
        own = {f"{name}.{part}" for each in kept for name, *_ in each.leaves for part in _PARTS}
        for name, value in model.graph.initializers.items():
            if name in after and name not in before and name not in own:
                value.const_value = after[name].const_value

    @property
    @abstractmethod
    def parts(self) -> tuple[LossyPart, ...]:
        """The largest parts, each with its own."""

    @abstractmethod
    def of(self, kept: frozenset[Leaf] = frozenset(), *, inside: LossyPart | None = None) -> Floats:
        """Measure the divergence of the graph with the leaves `kept`: sums over each document [D].

        `inside` is the part whose leaves are looked at.
        """

    @abstractmethod
    def requantized(self, leaves: frozenset[Leaf], *, inside: LossyPart | None = None) -> Floats | None:
        """Measure it with `leaves` requantized; None where they are as if requantized."""


def of_pass(lossy: LossyStep, divergence: Divergence) -> PartLoss | None:
    """Make what measures the parts of a pass; None for a pass that has none."""
    if lossy.step.writes_codes == "blocks":
        return WeightLoss(lossy, divergence)
    if lossy.step.servers_alone:  # no cache of the graph is other than before
        return None
    return None if lossy.step.stores(None).kv is None else CacheLoss(lossy, divergence)


# weights


@dataclass(frozen=True, eq=False)
class LossyMatrix:
    """A weight that was quantized: [K, N], an embedding [V, K], or experts [E, K, N], in `order`."""

    name: str  # of the initializer before the pass
    tensor: ir.TensorProtocol
    grid: Grid
    transposed: bool
    order: NDArray[np.intp] | None  # of the output features of each expert; None: no experts
    parts: Mapping[str, ir.TensorProtocol]  # codes, scales, zero_points, as the pass wrote them

    @property
    def k(self) -> int:
        """The features that it reads."""
        return int(self.tensor.shape.numpy()[-1 if not self.transposed else -2])

    @property
    def fresh(self) -> QuantizedMatrix:
        """Round it to nearest."""
        if self.order is None:
            return round_to_nearest(by_output(self.tensor, transposed=self.transposed), self.grid)
        return stack([round_to_nearest(each.T[self.order], self.grid) for each in self.tensor.numpy()])

    @property
    def found(self) -> QuantizedMatrix:
        """Read what the pass wrote."""
        codes, scales = self.parts["codes"].numpy(), self.parts["scales"].numpy()
        blocks: int = self.grid.blocks(self.k)
        points = self.parts.get("zero_points")
        packed = Packed(
            codes.reshape(-1, blocks, self.grid.block_size * self.grid.bits // 8),
            scales.reshape(-1, blocks).astype(np.float32),
            None if points is None else points.numpy().reshape(-1, int(points.shape.numpy()[-1])),
        )
        return unpack(packed, self.grid, self.k)

    def requantized(self) -> dict[str, ir.TensorProtocol]:
        """Pack it, rounded to nearest, in the shapes of what the pass wrote."""
        if "groups" in self.parts:
            return {"groups": ir.Tensor(arrange(self.fresh), name=self.parts["groups"].name)}
        packed = pack(self.fresh)
        made: dict[str, ir.TensorProtocol] = {}
        for part, tensor in self.parts.items():
            array: NDArray[Any] = getattr(packed, part)
            shaped = array.reshape(tensor.shape.numpy()).astype(tensor.dtype.numpy())
            made[part] = ir.Tensor(shaped, name=tensor.name)
        return made

    def differs(self, expert: int) -> bool:
        """Say if what the pass wrote is not what rounding to nearest gives, of an expert or (-1) of all."""
        if "groups" in self.parts:
            return not np.array_equal(self.parts["groups"].numpy(), arrange(self.fresh))
        own, found, fresh = slice(None), self.found, self.fresh
        if expert >= 0:
            rows = fresh.shape[0] // int(self.tensor.shape.numpy()[0])
            own = slice(expert * rows, (expert + 1) * rows)
        pairs: list[tuple[NDArray[Any], NDArray[Any]]] = [(found.codes, fresh.codes), (found.scales, fresh.scales)]
        if fresh.zero_points is not None and found.zero_points is not None:
            pairs.append((found.zero_points, fresh.zero_points))
        return any(not np.array_equal(a[own], b[own]) for a, b in pairs)

    def experts(self, kept: frozenset[int], requantized: frozenset[int]) -> NDArray[np.float32]:
        """Return the experts [E, K, N] as they were quantized, but those `kept` and `requantized`."""
        assert self.order is not None
        original: NDArray[np.float32] = self.tensor.numpy()
        count, k, n = original.shape
        found, fresh = (dequantize(m).reshape(count, n, k) for m in (self.found, self.fresh))
        result = np.empty_like(original)
        for expert in range(count):
            rows = fresh[expert] if expert in requantized else found[expert]
            result[expert][:, self.order] = rows.T
            if expert in kept:
                result[expert] = original[expert]
        return result


def matrices_of(lossy: LossyStep) -> dict[str, LossyMatrix]:
    """Find the weights that a pass has quantized, by the name of the initializer before it."""
    found = {}
    after = lossy.after.graph.initializers
    for name, value in lossy.before.graph.initializers.items():
        codes = after.get(f"{name}.codes", after.get(f"{name}.groups"))
        if codes is None or value.const_value is None:
            continue
        node = codes.consumers()[0]
        grid = _grid(node, after, name)
        parts = {part: graph.tensor(after[f"{name}.{part}"]) for part in _PARTS if f"{name}.{part}" in after}
        reader = value.consumers()[0]
        lookups = (contrib.GatherBlockQuantized, cpu.Embedding)
        order, transposed = None, not any(kind.matches(each) for kind in lookups for each in codes.consumers())
        if canonical.MoE.matches(reader):
            experts = moe_kernels.of(canonical.MoE(reader))
            order = experts.order if experts.layer.up is value else np.arange(experts.hidden)
        found[name] = LossyMatrix(name, graph.tensor(value), grid, transposed, order, parts)
    return found


@dataclass(eq=False)
class WeightLoss(PartLoss):
    """Layers, their weights, and of experts each."""

    _current: Floats | None = field(default=None)
    _differs: dict[Leaf, bool] = field(default_factory=dict)

    @cached_property
    def matrices(self) -> dict[str, LossyMatrix]:
        """The weights that were quantized, by the name of the initializer before the pass."""
        return matrices_of(self.lossy)

    @cached_property
    def parts(self) -> tuple[LossyPart, ...]:
        """Layers and what is in none; in a layer what is kept together, and in experts each."""
        by_reader: dict[str, list[str]] = {}  # by the node that reads them
        initializers = self.lossy.before.graph.initializers
        for name in self.matrices:
            reader = initializers[name].consumers()[0]
            key = str(reader.name) if canonical.MoE.matches(reader) else name
            by_reader.setdefault(key, []).append(name)
        layers: dict[int | None, list[LossyPart]] = {}
        for names in by_reader.values():
            part = self._part(names)
            number = _LAYER.search(part.parameters[0])
            layers.setdefault(None if number is None else int(number[1]), []).append(part)
        made = []
        for layer in sorted(layers, key=lambda each: -1 if each is None else each):
            inner = layers[layer]
            if layer is None:
                made += inner
            else:
                leaves = frozenset().union(*(part.leaves for part in inner))
                parameters = tuple(name for part in inner for name in part.parameters)
                made.append(LossyPart(f"layer {layer}", leaves, tuple(inner), parameters))
        return tuple(made)

    def _part(self, names: Sequence[str]) -> LossyPart:
        initializers = self.lossy.before.graph.initializers
        parameters = tuple(p for name in names for p in graph.sources(initializers[name]) or [name])
        more = "" if len(parameters) <= _NAMED else f" and {len(parameters) - _NAMED} more"
        title = ", ".join(parameters[:_NAMED]) + more
        first = self.matrices[names[0]]
        if first.order is None:
            leaves = frozenset((name, -1, -1) for name in names)
            return LossyPart(title, leaves, parameters=parameters, table=not _LAYER.search(parameters[0]))
        count = int(first.tensor.shape.numpy()[0])
        experts = tuple(
            LossyPart(f"{title}, expert {expert}", frozenset((name, expert, -1) for name in names), (), parameters)
            for expert in range(count)
        )
        return LossyPart(title, frozenset().union(*(part.leaves for part in experts)), experts, parameters)

    def of(self, kept: frozenset[Leaf] = frozenset(), *, inside: LossyPart | None = None) -> Floats:
        """Measure the divergence with the leaves `kept`; see `PartLoss`."""
        opened = frozenset() if inside is None else self._experts_of(inside)
        if not kept and not opened:
            if self._current is None:
                self._current = self.divergence.of(self.lossy.after)
            return self._current
        return self.divergence.of(self._graph(kept, frozenset(), opened))

    def requantized(self, leaves: frozenset[Leaf], *, inside: LossyPart | None = None) -> Floats | None:
        """Measure it with `leaves` requantized; see `PartLoss`."""
        for leaf in leaves - self._differs.keys():
            name, expert, _ = leaf
            self._differs[leaf] = self.matrices[name].differs(expert)
        if not any(self._differs[leaf] for leaf in leaves):
            return None
        opened = frozenset() if inside is None else self._experts_of(inside)
        return self.divergence.of(self._graph(frozenset(), leaves, opened))

    def _experts_of(self, part: LossyPart) -> frozenset[str]:
        """Name the matrices of experts that are told apart in `part`."""
        of_experts = bool(part.parts) and all(expert >= 0 for _, expert, _ in part.leaves)
        told_apart = of_experts and not any(inner.parts for inner in part.parts)
        return frozenset(name for name, _, _ in part.leaves) if told_apart else frozenset()

    def _graph(self, kept: frozenset[Leaf], requantized: frozenset[Leaf], opened: frozenset[str]) -> ir.Model:
        """Make the graph; matrices `opened` are multiplied in fp32, so that experts can differ."""
        lossy, model = self.lossy, self.lossy.before.clone()
        by_name = {name: {e for n, e, _ in kept if n == name} for name, *_ in kept}
        whole = {name for name, experts in by_name.items() if name not in opened}
        initializers = lossy.before.graph.initializers
        names = [graph.sources(initializers[name]) or [name] for name in sorted(whole | opened)]
        excluded = [parameter for group in names for parameter in group]
        for name in opened:
            chosen = frozenset(by_name.get(name, ()))
            again = frozenset(e for n, e, _ in requantized if n == name)
            array = self.matrices[name].experts(chosen, again)
            model.graph.initializers[name].const_value = ir.Tensor(array, name=name)
        excluding(lossy.step, excluded).run(model, lossy.context)
        self.share(model)
        for name in {name for name, _, _ in requantized} - opened:
            for part, tensor in self.matrices[name].requantized().items():
                model.graph.initializers[f"{name}.{part}"].const_value = tensor
        return model


def excluding(step: Pass, parameters: Sequence[str]) -> Pass:
    """Return the pass that leaves `parameters` alone, too."""
    excluded = tuple(dict.fromkeys((*options.values(step)["exclude"], *map(literal, parameters))))
    changed: Pass = replace(step, exclude=excluded)  # type: ignore[type-var]
    return changed


def literal(name: str) -> str:
    """Write a name as a glob that matches it alone."""
    return re.sub(r"([*?\[])", r"[\1]", name)


def literal_layer(name: str) -> str:
    """Write the name of a parameter as a glob that matches all those of its layer; of one in no layer, it alone."""
    found = _LAYER.search(name)
    return literal(name) if found is None else f"{literal(name[: found.end()])}*"


def _grid(node: ir.Node, initializers: Mapping[str, ir.Value], name: str) -> Grid:
    """Read the grid that `node` reads the codes of weight `name` on."""
    if (packed := cpu.CpuLinear.of(node) or cpu.Embedding.of(node)) is not None:
        return cpu_linear.grid_of(packed)
    dtype = initializers[f"{name}.scales"].dtype
    scale: Scale = next(scale for scale, stored in SCALES.items() if stored == dtype)
    symmetric = f"{name}.zero_points" not in initializers
    bits = "expert_weight_bits" if contrib.QMoE.matches(node) else "bits"
    return Grid(node.attributes[bits].as_int(), node.attributes["block_size"].as_int(), symmetric, scale)


# caches


@dataclass(eq=False)
class CacheLoss(PartLoss):
    """Layers, keys and values of each head, and their channels.

    The cache is rounded after each step of the graph before the pass, so that any channel can be kept.
    """

    _peaks: dict[str, NDArray[np.float32]] = field(default_factory=dict)  # by cache, [heads, channels]

    @cached_property
    def scales(self) -> dict[str, NDArray[np.float32]]:
        """Scales of each cache that the pass rounds, [heads, channels]; of one with scales of tokens, of no meaning."""
        found = {}
        after = self.lossy.after.graph.initializers
        for value in self.lossy.before.graph.inputs:
            scale = after.get(f"{value.name}.scale")
            if scale is not None or value.name in self.slots:
                heads, channels = (int(value.shape[axis]) for axis in (1, 3))  # type: ignore[index,arg-type]
                array = np.ones(1, np.float32) if scale is None else graph.tensor(scale).numpy().reshape(-1)
                found[str(value.name)] = np.broadcast_to(array, heads * channels).reshape(heads, channels).copy()
        return found

    @cached_property
    def slots(self) -> dict[str, SlotFormat]:
        """Formats of the caches whose tokens have scales of their own."""
        found = {}
        for node in cpu.GroupQueryAttentionSlots.all(self.lossy.after):
            for cache in (node.past_key, node.past_value):
                slots = cpu_attention.slots_of(node.node, str(cache.name))
                if slots is not None and not slots[0].portable:
                    found[str(cache.name)] = slots[0]
        return found

    @cached_property
    def parts(self) -> tuple[LossyPart, ...]:
        """Layers, in them keys and values of each head, and in these channels."""
        made = []
        by_layer: dict[int, list[str]] = {}
        for name in self.scales:
            by_layer.setdefault(int(re.findall(r"\d+", name)[0]), []).append(name)
        for layer, names in sorted(by_layer.items()):
            heads = []
            for name in names:
                count, channels = self.scales[name].shape
                kind = "key" if name == interface.past_part(layer, "key") else "value"
                for head in range(count):
                    title = f"layer {layer}, {kind} cache, head {head}"
                    leaves = [(name, head, channel) for channel in range(channels)]
                    singles = tuple(
                        LossyPart(f"{title}, channel {leaf[2]}", frozenset([leaf]), layers=(layer,)) for leaf in leaves
                    )
                    heads.append(LossyPart(title, frozenset(leaves), singles, layers=(layer,)))
            whole = frozenset().union(*(part.leaves for part in heads))
            made.append(LossyPart(f"layer {layer}, cache", whole, tuple(heads), layers=(layer,)))
        return tuple(made)

    @property
    def watch(self) -> AfterStep:
        """Note the largest magnitude of each channel, of which requantized scales are made."""
        return self._peak

    def _peak(self, caches: Mapping[str, NDArray[Any]], step: ProbeCall) -> None:
        for name in self.scales.keys() & caches.keys():
            for slots in _written(caches[name], step):
                peak = np.abs(slots).max(1)
                self._peaks[name] = np.maximum(self._peaks.get(name, peak), peak)

    def of(self, kept: frozenset[Leaf] = frozenset(), *, inside: LossyPart | None = None) -> Floats:
        """Measure the divergence with the leaves `kept`; see `PartLoss`."""
        return self._measure(kept, frozenset())

    def requantized(self, leaves: frozenset[Leaf], *, inside: LossyPart | None = None) -> Floats | None:
        """Measure it with `leaves` requantized; see `PartLoss`."""
        static = frozenset(leaf for leaf in leaves if leaf[0] not in self.slots)
        return self._measure(frozenset(), static) if static else None

    def _measure(self, kept: frozenset[Leaf], requantized: frozenset[Leaf]) -> Floats:
        scales = {name: array.copy() for name, array in self.scales.items()}
        for name, head, channel in requantized:
            scales[name][head, channel] = max(self._peaks[name][head, channel] / INT8_KV.largest, np.float32(1e-30))
        exact = {name: np.zeros(array.shape, bool) for name, array in scales.items()}
        for name, head, channel in kept:
            exact[name][head, channel] = True

        def round_cache(caches: Mapping[str, NDArray[Any]], step: ProbeCall) -> None:
            for name in scales.keys() & caches.keys():
                wide, same, form = scales[name][:, None], exact[name][:, None], self.slots.get(name)
                for slots in _written(caches[name], step):
                    if form is None:
                        stored = np.clip(np.rint(slots / wide), -INT8_KV.largest - 1, INT8_KV.largest) * wide
                    else:
                        stored = kv_cache.read(kv_cache.write(slots, form), form, slots.shape[-1])
                    slots[...] = np.where(same, slots, stored)

        return self.divergence.of(self.lossy.before, round_cache)


def _written(buffer: NDArray[Any], step: ProbeCall) -> list[NDArray[Any]]:
    """Return what `step` wrote into a cache, by row: views [heads, tokens, channels]."""
    return [
        buffer[row, :, past : past + length]
        for row, (past, length) in enumerate(zip(step.past.tolist(), step.lengths.tolist(), strict=True))
        if length
    ]
