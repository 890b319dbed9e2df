"""Add the adapters of a recipe that are kept apart to the linear layers that they change; each request chooses one.

    y = x·W + c   becomes   y = LowRankAdapter(x·W + c, x, adapter_ids, a, b) = x·W + c + x·a[id]·b[id]

`x` is [batch, sequence, K], `W` [K, N]; `adapter_ids` [batch] is a new input of the graph: number 1 is the first of the
recipe's adapters that are kept apart, 0 is none. `a` [n + 1, K, R] and `b` [n + 1, R, N] hold the matrices of all n
adapters, b times their scale, filled up with zeros to the largest rank R; number 0 is zeros. The layer itself stays as
it is, and may be quantized by a later pass: adapters stay in fp32, or in what `lower-precision` says.

Fires for every linear layer whose weight is that of a module which an adapter changes, or packs several such side by
side (`pack-qkv`, `pack-gate-up`): put those passes before this one. Refuses adapters that change something else:
embeddings, biases, whole modules (`modules_to_save`), experts, the length of rows (DoRA); and layers that an earlier
pass has quantized.

Numerics: exact for rows without an adapter, which is what is proven of the pass. That a row with one is what a merged
checkpoint gives is proven besides (`llmforge.verification.adapter_proof`).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, ClassVar

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray
from pydantic.dataclasses import dataclass

from llmforge.base.errors import CheckpointError, UnsupportedError
from llmforge.checkpoint.adapters import Adapter, LowRankUpdate
from llmforge.ir import graph, interface
from llmforge.ir.derived import Derived
from llmforge.ir.operators.canonical import LowRankAdapter
from llmforge.ir.operators.standard import Add, MatMul
from llmforge.rewrite import linear
from llmforge.rewrite.pass_base import Changes, Context, Numerics, Pass, Rewritten, Skipped

Part = tuple[LowRankUpdate, float] | None  # of one adapter and one part of a layer: what it adds, and its whole scale
MERGE = "merge it: `mode: merged`"


@dataclass(frozen=True)
class AddAdapters(Pass):
    """Add the recipe's adapters that are kept apart, of which each request chooses at most one."""

    name: ClassVar[str] = "add-adapters"
    numerics: ClassVar[Numerics] = Numerics.EXACT
    adds_adapters: ClassVar[bool] = True

    def run(self, model: ir.Model, context: Context) -> Changes:
        """Rewrite every linear layer of `model` that an adapter changes.

        Raises:
            UnsupportedError: an adapter changes what is no linear layer of the graph.
            CheckpointError: an adapter is of another base.
        """
        changes = Changes()
        for adapter in context.adapters:
            _check(adapter)
        wanted = {f"{module}.weight" for adapter in context.adapters for module in adapter.low_rank}
        found: set[str] = set()
        for layer in list(_layers(model)):
            names = graph.sources(layer.weight)
            if not wanted.intersection(names):
                continue
            found.update(names)
            if any(LowRankAdapter.matches(reader) for reader, _ in layer.output.uses()):
                changes.skipped.append(Skipped(str(layer.matmul.name), "it has adapters already"))
                continue
            parts = [[_part(adapter, name) for name in names] for adapter in context.adapters]
            _insert(model, layer, names, parts)
            count = sum(any(own) for own in parts)
            what = f"{count} adapters of {', '.join(name for name in names if name in wanted)}"
            changes.rewritten.append(Rewritten(str(layer.matmul.name), what))
        if missing := sorted(wanted - found):
            raise _missing(context.adapters, missing)
        if changes:
            model.metadata_props[interface.ADAPTERS] = json.dumps([adapter.name for adapter in context.adapters])
        return changes


def _check(adapter: Adapter) -> None:
    """Refuse an adapter that adds more than products to linear layers."""
    where = f"{adapter.path}: adapter {adapter.name}"
    if adapter.saved:
        raise UnsupportedError(f"{where}: it replaces {next(iter(adapter.saved))!r} as a whole", hint=MERGE)
    for module, low_rank in adapter.low_rank.items():
        for wrong, what in (
            (low_rank.embedding, "an embedding"),
            (low_rank.magnitude is not None, "the length of rows, by DoRA"),
            (low_rank.bias is not None, "a bias"),
        ):
            if wrong:
                raise UnsupportedError(f"{where}: {module}: it changes {what}, which is not kept apart", hint=MERGE)


def _missing(adapters: Sequence[Adapter], missing: Sequence[str]) -> CheckpointError | UnsupportedError:
    """Say that no linear layer of the graph reads a parameter that an adapter changes."""
    adapter = next(each for each in adapters if _module(missing[0]) in each.low_rank)
    trained = f"; it was trained on {adapter.base}" if adapter.base else ""
    return UnsupportedError(
        f"{adapter.path}: adapter {adapter.name}: no linear layer of the graph multiplies by {missing[0]!r}{trained}",
        hint=f"put add-adapters before passes that quantize; experts, tied heads, up-projections of latents: {MERGE}",
    )


def _layers(model: ir.Model) -> list[linear.LinearLayer]:
    """List the linear layers of `model`, with their biases."""
    found = []
    for product in MatMul.all(model):
        reader = Add.only_reader(product.output)
        layer = None if reader is None else linear.of(reader.output)
        if layer is None or layer.matmul is not product.node:
            layer = linear.of(product.output)
        if layer is not None:
            found.append(layer)
    return found


def _part(adapter: Adapter, parameter: str) -> Part:
    low_rank = adapter.low_rank.get(_module(parameter))
    return None if low_rank is None else (low_rank, low_rank.scale * adapter.source.weight)


def _module(parameter: str) -> str:
    return parameter.removesuffix(".weight")


def _insert(model: ir.Model, layer: linear.LinearLayer, names: Sequence[str], parts: Sequence[Sequence[Part]]) -> None:
    """Put the adapters, of which each has a part for each of `names`, behind `layer`."""
    k, n = graph.static(layer.weight)
    widths = linear.widths(layer.weight)
    if len(widths) != len(names):
        raise UnsupportedError(f"{layer.weight.name}: its {len(names)} parts cannot be told apart for adapters")
    for own in parts:
        for name, width, part in zip(names, widths, own, strict=True):
            if part is not None and part[0].shape != (width, k):
                raise CheckpointError(
                    f"{part[0].a.file}: {part[0].module}: its product is {list(part[0].shape)}, {name!r} of the model "
                    f"[{width}, {k}]",
                    hint="is it an adapter of another base?",
                )
    present = [part[0] for own in parts for part in own if part is not None]
    rank = max(part.rank for part in present)
    layout = tuple(tuple(None if part is None else (part[0].rank, part[1]) for part in own) for own in parts)
    prefix = _module(str(layer.weight.name))
    count = len(parts) + 1
    a = Derived(
        _first(layout, k, rank),
        [_tensor(part.a) for part in present],
        ir.DataType.FLOAT,
        ir.Shape((count, k, len(names) * rank)),
        f"{prefix}.lora_A",
    )
    b = Derived(
        _second(layout, tuple(widths), rank),
        [_tensor(part.b) for part in present],
        ir.DataType.FLOAT,
        ir.Shape((count, rank, n)),
        f"{prefix}.lora_B",
    )
    node = ir.Node(
        LowRankAdapter.domain,
        LowRankAdapter.op_type,
        LowRankAdapter.ordered(
            {
                "base": layer.output,
                "x": layer.input,
                "adapter_ids": _ids(model),
                "a": graph.initializer(model, f"{prefix}.lora_A", a),
                "b": graph.initializer(model, f"{prefix}.lora_B", b),
            }
        ),
        ir.convenience.convert_attributes({"widths": widths}),
        name=f"{layer.matmul.name}/adapters",
    )
    graph.insert_behind(layer.output, [node], "base")
    model.graph.opset_imports.setdefault(LowRankAdapter.domain, 1)


def _ids(model: ir.Model) -> ir.Value:
    """Find the input that names the adapter of each row, or make it, with one symbol for the batch."""
    for value in model.graph.inputs:
        if value.name == interface.ADAPTER_IDS:
            return value
    batch = (graph.dims(graph.input_named(model, interface.INPUT_IDS)) or ("batch",))[0]
    made = ir.Value(name=interface.ADAPTER_IDS, type=ir.TensorType(ir.DataType.INT64), shape=ir.Shape([batch]))
    model.graph.inputs.append(made)
    return made


def _tensor(entry: Any) -> ir.ExternalTensor:
    return ir.ExternalTensor(
        str(entry.file), entry.offset, entry.size_bytes, entry.dtype, shape=ir.Shape(entry.shape), name=entry.name
    )


Layout = tuple[tuple[tuple[int, float] | None, ...], ...]  # of each adapter and part: rank and scale
_Function = Callable[[Sequence[NDArray[Any]]], NDArray[Any]]


@cache
def _first(layout: Layout, k: int, rank: int) -> _Function:
    """Return what stacks matrices A [r, K] to [n + 1, K, P·R]; one object for equal arguments."""

    def stack(matrices: Sequence[NDArray[Any]]) -> NDArray[Any]:
        parts = len(layout[0])
        stacked = np.zeros((len(layout) + 1, k, parts * rank), np.float32)
        for (number, part, (own, _)), matrix in zip(_present(layout), matrices, strict=True):
            stacked[number, :, part * rank : part * rank + own] = matrix.T
        return stacked

    return stack


@cache
def _second(layout: Layout, widths: tuple[int, ...], rank: int) -> _Function:
    """Return what stacks matrices B [N, r], each times its scale, to [n + 1, R, N]; one object for equal arguments."""

    def stack(matrices: Sequence[NDArray[Any]]) -> NDArray[Any]:
        starts = np.cumsum([0, *widths])
        stacked = np.zeros((len(layout) + 1, rank, int(starts[-1])), np.float32)
        for (number, part, (own, scale)), matrix in zip(_present(layout), matrices, strict=True):
            with np.errstate(over="ignore"):
                scaled = matrix.T.astype(np.float32) * np.float32(scale)
            if not np.isfinite(scaled).all():
                raise OverflowError(f"an adapter times its scale, {scale:g}, leaves the range of fp32")
            stacked[number, :own, starts[part] : starts[part + 1]] = scaled
        return stacked

    return stack


def _present(layout: Layout) -> list[tuple[int, int, tuple[int, float]]]:
    """List the parts that are there: the number of the adapter, of the part, and its rank and scale."""
    return [
        (number, part, each)
        for number, own in enumerate(layout, 1)
        for part, each in enumerate(own)
        if each is not None
    ]
