"""Quantize the weights of linear layers, experts, embedding and output head to 3, 4, 5, 6 or 8 bits.

    y = x·W + b                     becomes  y = com.microsoft::MatMulNBits(x, codes, scales[, zero_points, , b])
    e = Gather(E, input_ids)        becomes  e = com.microsoft::GatherBlockQuantized(codes, input_ids, scales)
    logits = x·Eᵀ  (tied head)      becomes  logits = MatMulNBits(x, codes, scales), and the embedding
                                             e = Reshape(GatherBlockQuantized(codes, input_ids, Reshape(scales)))
                                             reads the same codes
    y = llmforge::MoE(x, ids, …)    becomes  y = com.microsoft::QMoE(x, w, codes, scales, …, zero_points, …, w),
                                             w [batch·sequence, experts]: the weights at ids, 0 elsewhere

or, where MatMulNBits has no such format (3, 5 or 6 bits, `scales: int8`, `codes: trellis`):

    y = x·W + b                     becomes  y = llmforge.cpu::Linear(x, groups, b)
    e = Gather(E, input_ids)        becomes  e = llmforge.cpu::Embedding(input_ids, groups)

`x` is [batch, sequence, K], `W` fp32 [K, N], `b` [N], `E` [V, K]. With blocks = ceil(K / block_size), `codes` are uint8
[N, blocks, block_size·bits/8], `scales` fp32 [N, blocks], `zero_points` uint8 [N, ceil(blocks·bits/8)]: lazy tensors,
computed when they are written.

Fires for
- every MatMul of the decoder whose second input is an fp32 initializer [K, N] that nothing else reads: with `bits`,
  `block_size`, `symmetric` and `method` (where that needs calibration text, a packed weight is put together from the
  parameters that it names as its sources). A bias that is added next, and only there, becomes an input.
- the head, which is the MatMul that works on the selected rows, and the embedding, which `input_ids` gathers from: with
  `embedding_bits`, symmetric, in the largest power of two, 16 to `block_size`, that divides K; by `method`, or rounded
  to nearest where it needs calibration text and that has not seen them. At 8
  bits, `accuracy_level` 4, this moves the KLD of the sample checkpoint (tests/data) by 0.00035 in blocks of 32 and by
  0.0009 in blocks of 128, which the activations share.

- the experts of every `llmforge::MoE` that com.microsoft::QMoE computes (`llmforge.rewrite.moe_kernels`): with `bits`,
  `symmetric`, `method`, in the largest block up to `block_size` that divides both their widths and is smaller; with
  scales in fp16 where `scales` is int8, without a trellis, and not at all with 3, 5 or 6 bits. A method that needs
  calibration text sees of it, for each expert, the tokens that chose it. A router, which makes ids and weights, stays
  as it is unless `routers` says otherwise: it is small, and one wrong choice costs more than all its bits.

Codes of experts are [experts, N, K·bits/8], scales and zero points [experts, N, …]. Measured on onnxruntime 1.31.1, one
thread, 8 of 16 experts, H 2048, I 768, 4 bits, blocks of 32, accuracy_level 4: a decode step takes 2.1 ms; the kernel
for fp32 takes 20 ms, the Loop 43 ms.

Where the head is tied, the embedding gathers from [V, blocks, block_size] and reshapes the rows that it got: ONNX
Runtime would fold a Reshape of the table when it loads, and hold the table twice.

8 bits run at `accuracy_level` 4 alone: at any other, the CPU kernel of onnxruntime 1.31 takes 400 times as long.

With `method: stored`, codes, scales and zero points are those of a checkpoint that comes quantized, whose bits, blocks
and symmetry they have; what it does not store as codes, or not in a format of ours, stays as it is, embedding and head
apart, which are quantized as above where they are no codes. Where its input features are in another order,
`x` becomes Gather(x, columns) along the last axis.

Numerics: lossy, within the budget of the recipe.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass as record
from dataclasses import field, replace
from typing import Annotated, Any, ClassVar, Literal, Self, cast

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray
from pydantic import Field, model_validator
from pydantic.dataclasses import dataclass

from llmforge import native
from llmforge.backends.record import Dtype
from llmforge.base.plugins import Plugin
from llmforge.ir import graph, interface, logits_rows, operators, routing
from llmforge.ir.derived import OfExperts, stored_in
from llmforge.ir.operators import canonical, contrib, cpu
from llmforge.ir.operators.contrib import INT8_ACTIVATIONS
from llmforge.ir.operators.standard import Add, Gather, MatMul, Transpose
from llmforge.quantization import initializers, methods
from llmforge.quantization.exclusion import exclusion
from llmforge.quantization.grids import SMALLEST_BLOCK, Grid, QuantizedMatrix, Scale, rows, stack
from llmforge.quantization.initializers import LazyMatrix, PackedInitializers
from llmforge.quantization.methods.base import Method
from llmforge.quantization.statistics import Demand, WeightDemand
from llmforge.quantization.stored import (
    SkippedCodes,
    StoredCodes,
    UnrepresentableCodes,
    common,
    on_grid,
    require,
    stack_codes,
)
from llmforge.rewrite import cpu_linear, linear, moe_kernels, weight_proposals
from llmforge.rewrite.pass_base import Budget, Changes, Context, Numerics, Pass, Rewritten, Skipped
from llmforge.rewrite.traits import Codes, Deployment, FinerCodes, Prediction, Proposal, Storage

_KEEP = 16  # embedding_bits that leave embedding and head alone
_FINER = 8  # bits of weights that a recipe of mixed precision keeps
_SHARED = ("budget", "block_size", "symmetric", "embedding_bits", "routers")  # options that say nothing of the method
_PLAIN = methods.PLAIN()  # of an embedding or head that was not calibrated


@dataclass(frozen=True)
@methods.with_options(before="routers")
class QuantizeWeights(Pass):
    """Quantize the weights of linear layers, experts, embedding and output head to 4 or 8 bits."""

    name: ClassVar[str] = "quantize-weights"
    numerics: ClassVar[Numerics] = Numerics.LOSSY
    writes_codes: ClassVar[Codes | None] = "blocks"

    budget: Annotated[Budget, Field(description="quality budget of the pass")]
    bits: Annotated[
        Literal[3, 4, 5, 6, 8],
        Field(description="bits per weight of the decoder's linear layers; 3, 5 and 6 need llmforge's CPU kernels"),
    ] = 4
    block_size: Annotated[Literal[32, 64, 128], Field(description="consecutive input features that share a scale")] = 32
    symmetric: Annotated[
        bool, Field(description="no zero points; saves `bits` bits per block, at a cost in quality with 4 bits")
    ] = False
    scales: Annotated[
        Scale,
        Field(
            description="stored type of scales; fp16 hardly affects quality; int8 (with a bf16 scale per 256 columns) "
            "needs llmforge's CPU kernels"
        ),
    ] = "fp32"
    codes: Annotated[
        Literal["uniform", "trellis"],
        Field(
            description="trellis: 4 bits choose among 32 levels, by the codes of the rows before; needs llmforge's CPU "
            "kernels"
        ),
    ] = "uniform"
    method: Annotated[str, methods.Named(), Field(description=methods.summaries())] = methods.DEFAULT.name
    weight_bits: Annotated[
        float | None,
        Field(gt=0, le=32, description="for auto: bytes of all weights, in bits for each parameter of the model"),
    ] = None
    weight_bytes: Annotated[int | None, Field(gt=0, description="for auto: bytes of all weights")] = None
    embedding_bits: Annotated[
        Literal[3, 4, 5, 6, 8, 16], Field(description="bits of embedding and output head; 16 skips them")
    ] = 8
    embedding_block_size: Annotated[
        Literal[32, 64, 128] | None, Field(description="block size of embedding and head; default: `block_size`")
    ] = None
    accuracy_level: Annotated[
        Literal[0, 1, 4],
        Field(description="accuracy_level of MatMulNBits; 4: int8 activations, 0 and 1: fp32 activations"),
    ] = INT8_ACTIVATIONS
    routers: Annotated[bool, Field(description="also quantize the routers of experts")] = False
    exclude: Annotated[tuple[str, ...], Field(description="globs of checkpoint parameter names to skip")] = ()

    @model_validator(mode="after")
    def _runs_well(self) -> Self:
        eight = [name for name in ("bits", "embedding_bits") if getattr(self, name) == 8]
        if eight and self.accuracy_level != INT8_ACTIVATIONS:
            raise ValueError(
                f"{eight[0]}: 8 bits run 400 times slower with accuracy_level: {self.accuracy_level} than with "
                f"accuracy_level: {INT8_ACTIVATIONS}; use that, or other bits"
            )
        if self.method == methods.AUTO and self.accuracy_level != INT8_ACTIVATIONS:
            raise ValueError(f"method: {methods.AUTO} has formats of 8 bits, and accuracy_level: {INT8_ACTIVATIONS}")
        limits = (self.weight_bits is not None) + (self.weight_bytes is not None)
        if limits != (self.method == methods.AUTO):
            raise ValueError(f"method: {methods.AUTO} goes with weight_bits or weight_bytes: one of both, and no other")
        if self.codes == "trellis" and (self.bits != 4 or not self.symmetric):
            raise ValueError("codes: trellis has bits: 4 and symmetric: true")
        native = not (self.grid.portable and self.embedding_bits in (4, 8, _KEEP))
        if native and self.accuracy_level != INT8_ACTIVATIONS:
            raise ValueError(f"this format needs llmforge's CPU kernels, which have accuracy_level: {INT8_ACTIVATIONS}")
        if self.takes_stored:
            defaults = {"bits": 4, "block_size": 32, "symmetric": False, "codes": "uniform"}
            if given := [name for name, default in defaults.items() if getattr(self, name) != default]:
                raise ValueError(f"method: {methods.STORED} takes {', '.join(given)} from the checkpoint; leave it out")
            if self.scales == "int8":
                raise ValueError(f"method: {methods.STORED} keeps scales, which int8 would round; use fp32 or fp16")
            if self.accuracy_level != INT8_ACTIVATIONS:
                raise ValueError(f"method: {methods.STORED} goes with accuracy_level: {INT8_ACTIVATIONS}")
        if self.grid.format not in self.chosen.formats:
            raise ValueError(f"method: {self.method} cannot give {self.grid.format.name}; use another format or method")
        return self

    @classmethod
    def taking(cls, options: Mapping[str, object]) -> type[Pass]:
        """Add the options of a plug-in's method, where the recipe names one."""
        name = options.get("method")
        return methods.extended(cls, name) if isinstance(name, str) else cls

    def uses(self) -> tuple[type[Method], ...]:
        """Name the method."""
        return (type(self.chosen),)

    def brought(self) -> tuple[Plugin, ...]:
        """Name who brings the method."""
        plugin = methods.plugin_of(type(self.chosen).name)
        return () if plugin is None else (plugin,)

    @property
    def takes_stored(self) -> bool:
        """Whether codes are those of the checkpoint."""
        return self.method == methods.STORED

    @property
    def grid(self) -> Grid:
        """The grid of the decoder's linear layers."""
        return Grid(self.bits, self.block_size, self.symmetric, self.scales, self.codes == "trellis")

    @property
    def tables(self) -> Grid | None:
        """The grid of embedding and head, with the largest block that divides their width; None: they stay."""
        if self.embedding_bits == _KEEP:
            return None
        return Grid(self.embedding_bits, self.embedding_block_size or self.block_size, True, self.scales)

    @property
    def chosen(self) -> Method:
        """The method of the decoder's linear layers, with its options."""
        return methods.make(self.method, self)

    @classmethod
    def predicts(cls, there: Deployment) -> Iterable[Prediction]:
        """Judge 4 bits, and 8 where blocks of 8 bits are multiplied as they are."""
        if there.backend.scales == "blocks":
            yield Prediction(f"{cls.name}, bits: 8", Storage(weights="int8"))
        yield Prediction(f"{cls.name}, bits: 4", Storage(weights="int4"))

    @classmethod
    def proposes(cls, there: Deployment) -> Iterable[Proposal]:
        """Propose the formats that the engine runs best, or the codes of the checkpoint."""
        propose = weight_proposals.of_stored if there.is_quantized else weight_proposals.of_weights
        return propose(cls.name, there)

    def stores(self, stored: Grid | None) -> Storage:
        """Say the dtypes of embedding and head, and of weights; codes of the checkpoint are on the grid `stored`."""
        table = self.embedding_bits  # others have no dtype here
        said = Storage(embedding=cast(Dtype, f"int{table}") if table in (4, 8) else None)
        if (grid := stored if self.takes_stored else self.grid) is None:
            return said
        weights = cast(Dtype, f"int{grid.bits}")
        return replace(said, weights=weights, block=grid.block_size, symmetric=grid.symmetric)

    def finer(self, written: Mapping[str, Any]) -> FinerCodes | None:
        """Keep weights of few bits in 8, the only ones that 8 bits run well at `accuracy_level` 4."""
        if self.bits >= _FINER or self.accuracy_level != INT8_ACTIVATIONS:
            return None
        shared = {name: deepcopy(written[name]) for name in _SHARED if name in written}  # YAML marks what is one object
        return FinerCodes(_FINER, {**shared, "bits": _FINER, "method": _PLAIN.name})

    def demands(self) -> tuple[Demand, ...]:
        """Ask calibration for quantized linear layers and experts, where the method needs its text."""
        if not self.chosen.demands:
            return ()
        demand = WeightDemand(self.chosen, self.grid, self.exclude, self.routers, self.tables)
        return (replace(demand, weight_bits=self.weight_bits, weight_bytes=self.weight_bytes),)

    def run(self, model: ir.Model, context: Context) -> Changes:
        """Rewrite every linear layer, the embedding and the head of `model`.

        Raises:
            UnsupportedError: the target has no ONNX Runtime, whose operators these are, or `method` is stored and the
                checkpoint has no codes.
        """
        context.require_onnxruntime(self.name, "MatMulNBits is an operator of ONNX Runtime")
        if self.takes_stored:
            require(context.stored, self.name)
        routers = {} if self.routers else routing.routers(model)
        rewriting = _WeightQuantizer(self, model, context, logits_rows.readers(model), routers)
        changes = rewriting.changes
        for tables in (True, False):  # the embedding first, with which a tied head goes
            for node in [node for node in model.graph if Gather.matches(node) is tables]:
                try:
                    rewriting.rewrite(node)
                except _Skip as reason:
                    changes.skipped.append(Skipped(str(node.name), str(reason)))
        if changes:
            graph.drop_unused(model)
        changes.notes += [*rewriting.untaken.notes(), *rewriting.notes()]
        return changes


class _Skip(Exception):
    """Why a place is left alone."""


@record(eq=False)
class _WeightQuantizer:
    """One run of the pass over one graph; what it leaves alone raises a _Skip before anything is changed."""

    step: QuantizeWeights
    model: ir.Model
    context: Context
    on_rows: set[ir.Node]  # what works on the rows that get logits
    routers: Mapping[ir.Node, ir.Node]  # nodes of routers that stay, and the experts that they choose
    changes: Changes = field(default_factory=Changes)
    reordered: dict[tuple[ir.Value, bytes], ir.Value] = field(default_factory=dict)  # inputs, by the order of columns

    untaken: SkippedCodes = field(default_factory=lambda: SkippedCodes(QuantizeWeights.name))  # codes of the checkpoint

    left: dict[str, list[canonical.MoE]] = field(default_factory=dict)  # layers whose experts stay, by the reason

    def notes(self) -> list[str]:
        """Say how much of the experts was not quantized."""
        notes = []
        for reason, layers in self.left.items():
            weights = sum(math.prod(graph.static(value)) for each in layers for value in (each.up, each.down))
            which = layers[0].name if len(layers) == 1 else f"{layers[0].name} and {len(layers) - 1} more"
            size = f"{weights / 1e6:,.4g} million weights"
            notes.append(f"{self.step.name}: experts of {which} are not quantized, {size}: {reason}")
        return notes

    def rewrite(self, node: ir.Node) -> None:
        """Rewrite what `node` stands for."""
        match operators.view(node):
            case Gather() as lookup:
                self.embedding(lookup)
            case MatMul():
                self.product(node)
            case canonical.MoE() as layer:
                try:
                    with moe_kernels.gathered(self.model, layer):
                        self.experts(layer)
                except _Skip as reason:
                    self.left.setdefault(str(reason), []).append(layer)
                    raise
            case canonical.LatentAttention():
                raise _Skip("what makes keys and values of its latents stays fp32; cpu-kernels stores it in int8")
            case contrib.ContribMoE():
                raise _Skip("already fused in fp32; put quantize-weights before fuse-experts")

    def product(self, node: ir.Node) -> None:
        """Rewrite a linear layer, or a head that has its own weight (a tied one goes with its embedding)."""
        head, layer = node in self.on_rows, _layer(node)
        if layer is None:
            if head and _reads_transposed_initializer(node):
                raise _Skip("tied to the embedding, which is not quantized")
            return
        k, n = _shape(layer.weight)
        _require_own(layer.weight)
        self._refuse_excluded(_names(layer.weight))
        method, columns = self.step.method, None
        if node in self.routers and not head and not self.step.takes_stored:
            raise _Skip(f"router of {self.routers[node].name}; `routers: true` quantizes it")
        if self.step.takes_stored and (not head or self._is_codes(layer.weight)):
            matrix, columns = self._stored(layer.weight, n, k)
        elif head:
            matrix, method = self._table(layer.weight, n, k)
        else:
            matrix = self._matrix(layer.weight, n, k)
        parts = self._store(layer.weight, matrix)
        if columns is not None:
            self._reorder(layer, columns)
        self._multiply(layer, matrix, parts)
        self._note(node, f"{'head, ' if head else ''}{method}, {_summary(matrix)}")

    def embedding(self, lookup: Gather) -> None:
        """Rewrite the embedding, and the head that is tied to it."""
        table = lookup.data
        if lookup.indices.name != interface.INPUT_IDS or not table.is_initializer():
            return
        v, k = _shape(table)
        self._refuse_excluded(_names(table))
        if self.step.takes_stored and self._is_codes(table, transposed=False):
            matrix, columns = self._stored(table, v, k, transposed=False)
            method = self.step.method
            if columns is not None or not matrix.grid.symmetric:
                raise _Skip(
                    "its codes have zero points, or another order; GatherBlockQuantized is written with neither"
                )
        else:
            matrix, method = self._table(table, v, k, transposed=False)
        tied = _tied_head(table, lookup.node, self.on_rows)
        parts = self._store(table, matrix, flat=tied is None)
        self._gather(lookup, matrix, parts, tied is not None)
        self._note(lookup.node, f"embedding, {method}, {_summary(matrix)}")
        if tied is not None:
            self._multiply(tied, matrix, parts)
            self._note(tied.matmul, "head, reads the codes of the embedding")

    def experts(self, layer: canonical.MoE) -> None:
        """Rewrite the experts of a layer."""
        if reason := moe_kernels.reason(layer):
            raise _Skip(f"{reason}; its matrices stay fp32")
        experts = moe_kernels.of(layer)
        if self.step.takes_stored:
            self._stored_experts(experts)
            return
        grid = self.step.grid.fitting(experts.hidden, experts.inner)
        if grid is None and self.step.bits not in (4, 8):
            raise _Skip(f"QMoE has 4 and 8 bits, not {self.step.bits}; its matrices stay fp32")
        if grid is None:
            widths = f"{experts.hidden} and {experts.inner}"
            raise _Skip(f"its widths, {widths}, are not divisible into blocks of {SMALLEST_BLOCK} or more")
        self._refuse_excluded(_names(layer.up) + _names(layer.down))
        up, down = (
            self._register(weight, self._of_experts(weight, order, grid), experts=experts.count)
            for weight, order in ((layer.up, experts.order), (layer.down, np.arange(experts.hidden)))
        )
        moe_kernels.fuse_quantized(self.model, experts, up, down, self.step.accuracy_level)
        shape = f"{experts.count} experts, top {experts.top_k}, [{len(experts.order)}, {experts.hidden}] each"
        self._note(layer.node, f"{self.step.method}, {_grid(grid)}, {shape}")

    def _store(self, weight: ir.Value, matrix: LazyMatrix, *, flat: bool = False) -> PackedInitializers | ir.Value:
        """Register a matrix as ONNX Runtime reads it, or as the CPU kernels do, where they alone can."""
        if matrix.grid.portable:
            return self._register(weight, matrix, flat=flat)
        self.context.require_cpu(f"{self.step.name} with {_grid(matrix.grid)}")
        native.require()
        if reason := cpu_linear.reason_against_grid(matrix.k, matrix.grid.block_size):
            raise _Skip(reason)
        return initializers.register_groups(self.model, weight, matrix, self.context.scratch)

    def _register(
        self, weight: ir.Value, matrix: LazyMatrix, *, flat: bool = False, experts: int = 0
    ) -> PackedInitializers:
        """Register the parts of a matrix, which is computed when the first of them is read."""
        scratch = self.context.scratch
        return initializers.register(self.model, weight, matrix, flat=flat, experts=experts, scratch=scratch)

    def _of_experts(self, weight: ir.Value, order: NDArray[np.intp], grid: Grid) -> LazyMatrix:
        """Quantize [E, K, N] as one matrix [E·N, K], the output features of each expert in `order`."""
        if not self.step.chosen.demands:
            return initializers.quantized_experts(weight, order, self.step.chosen, grid)
        count, k, n = graph.static(weight)
        calibrated = self._calibrated(_names(weight))
        stacked = (n * np.arange(count)[:, None] + order).reshape(-1)
        return LazyMatrix(lambda: rows(calibrated(), stacked), count * n, k, grid)

    def _matrix(self, weight: ir.Value, n: int, k: int) -> LazyMatrix:
        """Quantize the weight [K, N] of a linear layer."""
        if not self.step.chosen.demands:
            return initializers.quantized(weight, self.step.chosen, self.step.grid)
        names = _names(weight)
        calculate, grids = self._calibrated(names), self._grids(names)
        if len(grids) > 1:
            raise _Skip(f"{', '.join(names)} are one matrix, and have {len(grids)} formats")
        return LazyMatrix(calculate, n, k, grids.pop())

    def _is_codes(self, weight: ir.Value, *, transposed: bool = True) -> bool:
        """Say whether the checkpoint stores all of a weight as codes, which a format here may hold or not."""
        tensors = stored_in(graph.tensor(weight), transposed=transposed)
        assert self.context.stored is not None
        try:
            for tensor in tensors:
                self.context.stored.codes(tensor)
        except UnrepresentableCodes as reason:
            return not reason.is_plain
        return bool(tensors)

    def _stored(
        self, weight: ir.Value, n: int, k: int, *, transposed: bool = True
    ) -> tuple[LazyMatrix, NDArray[np.intp] | None]:
        """Take the codes of a weight [K, N] from the checkpoint, with the input feature of each of their columns."""
        tensors = stored_in(graph.tensor(weight), transposed=transposed)
        if not tensors:
            raise _Skip("its numbers are not those of the checkpoint any more; put quantize-weights further in front")
        try:
            found = self._together(tensors)
        except UnrepresentableCodes as reason:
            self.untaken.add(tensors, reason)
            raise _Skip(f"its codes {reason}" + ("" if reason.is_plain else "; it stays dequantized")) from reason
        return LazyMatrix(found.read, n, k, found.grid), found.columns

    def _together(self, tensors: Sequence[str]) -> StoredCodes:
        """Put the codes of tensors on top of each other, with fp32 scales unless fp16 is wanted and holds them.

        Raises:
            UnrepresentableCodes: no format here holds them.
        """
        assert self.context.stored is not None
        found = stack_codes([self.context.stored.codes(tensor) for tensor in tensors])
        if found.grid.scale == self.step.scales:
            return found
        grid = replace(found.grid, scale="fp32")
        return StoredCodes(grid, found.columns, lambda: on_grid(found.read(), grid))

    def _stored_experts(self, experts: moe_kernels.FusableExperts) -> None:
        """Take the codes of experts from the checkpoint, on one grid that QMoE reads."""
        layer = experts.layer
        self._refuse_excluded(_names(layer.up) + _names(layer.down))
        try:
            up, down = (self._codes_of_experts(weight) for weight in (layer.up, layer.down))
            grid = common(up.grid, down.grid).fitting(experts.hidden, experts.inner)
            if grid is None:
                raise UnrepresentableCodes("have bits, or blocks, that QMoE does not read")
        except UnrepresentableCodes as reason:
            self.untaken.add(_names(layer.up) + _names(layer.down), reason)
            raise _Skip(f"its codes {reason}; its matrices stay dequantized") from reason
        orders = experts.order, np.arange(experts.hidden)
        first, second = (
            self._register(weight, _ordered(weight, found, grid, order), experts=experts.count)
            for weight, found, order in zip((layer.up, layer.down), (up, down), orders, strict=True)
        )
        moe_kernels.fuse_quantized(self.model, experts, first, second, self.step.accuracy_level)
        shape = f"{experts.count} experts, top {experts.top_k}, [{len(experts.order)}, {experts.hidden}] each"
        self._note(layer.node, f"{self.step.method}, {_grid(grid)}, {shape}")

    def _codes_of_experts(self, weight: ir.Value) -> StoredCodes:
        """Return the codes of an initializer [E, K, N] as one matrix [E·N, K].

        Raises:
            UnrepresentableCodes: they are not put together here.
        """
        tensor = graph.tensor(weight)
        if not isinstance(tensor, OfExperts) or not tensor.matrices or not tensor.transposed:
            raise UnrepresentableCodes("are not put together of matrices of experts")
        found = self._together([name for names in tensor.matrices for name in names])
        if found.columns is not None:
            raise UnrepresentableCodes("have input features in another order, which QMoE does not read")
        return found

    def _reorder(self, layer: linear.LinearLayer, columns: NDArray[np.intp]) -> None:
        """Let a layer read the features of its input in the order of its columns; one that reads the same shares it."""
        key = layer.input, columns.tobytes()
        if key not in self.reordered:
            indices = graph.initializer(self.model, f"{layer.weight.name}.columns", columns.astype(np.int64))
            inputs, name = [layer.input, indices], f"{layer.matmul.name}/columns"
            [made] = graph.insert(layer.matmul, "Gather", inputs, {"axis": -1}, name=name)
            made.type, made.shape, made.name = layer.input.type, layer.input.shape, name
            self.reordered[key] = made
        layer.matmul.replace_input_with(0, self.reordered[key])

    def _table(self, weight: ir.Value, v: int, k: int, *, transposed: bool = True) -> tuple[LazyMatrix, str]:
        """Quantize an embedding [V, K], or a head, `transposed`; returns the name of the method, too.

        One that calibration has not seen is rounded to nearest.
        """
        if self.step.tables is None:
            raise _Skip(f"embedding_bits is {_KEEP}")
        grid, names = self.step.tables.dividing(k), _names(weight)
        if grid is None:
            raise _Skip(f"its {k} features are not a multiple of {SMALLEST_BLOCK}, the smallest block")
        statistics = self.context.statistics
        if self.step.chosen.demands and statistics is not None and len(names) == 1 and names[0] in statistics.linears:
            return LazyMatrix(self._calibrated(names), v, k, statistics.grid(names[0])), self.step.method
        matrix = initializers.quantized(weight, _PLAIN, grid, transposed=transposed)
        return matrix, _PLAIN.name

    def _grids(self, names: list[str]) -> set[Grid]:
        """Return the grids that calibration has given to `names`, which it knows."""
        statistics = self.context.statistics
        assert statistics is not None
        return {statistics.grid(name) for name in names}

    def _calibrated(self, names: list[str]) -> Callable[[], QuantizedMatrix]:
        """Return what puts the matrix together from the calibrated ones of `names`."""
        statistics = self.context.statistics
        matrices = {} if statistics is None else statistics.linears
        if missing := [name for name in names if name not in matrices]:
            raise _Skip(f"calibration has no result for {', '.join(missing)}")
        return lambda: stack([matrices[name] for name in names])

    def _refuse_excluded(self, names: list[str]) -> None:
        if reason := exclusion(names, self.step.exclude):
            raise _Skip(reason)

    def _multiply(self, layer: linear.LinearLayer, matrix: LazyMatrix, parts: PackedInitializers | ir.Value) -> None:
        """Put MatMulNBits, or Linear, in the place of a linear layer."""
        if isinstance(parts, ir.Value):
            attributes = {
                **cpu_linear.grid_attributes(matrix.n, matrix.k, matrix.grid),
                "terms": 1,
                "activation": cpu_linear.NO_ACTIVATION,
                "epsilon": 0.0,
            }
            operands = {"x": layer.input, "weights": parts, "bias": layer.bias}
            kernel = cpu.CpuLinear.insert(layer.matmul, operands, attributes, name=layer.matmul.name)
            self._replace(layer, kernel.output)
            return
        attributes = {
            "N": matrix.n,
            "K": matrix.k,
            "bits": matrix.grid.bits,
            "block_size": matrix.grid.block_size,
            "accuracy_level": self.step.accuracy_level,
        }
        inputs = {
            "a": layer.input,
            "b": parts.codes,
            "scales": self._in_fp32(layer.matmul, parts.scales),
            "zero_points": parts.zero_points,
            "bias": layer.bias,
        }
        product = contrib.MatMulNBits.insert(layer.matmul, inputs, attributes, name=layer.matmul.name)
        self._replace(layer, product.output)

    def _in_fp32(self, reader: ir.Node, scales: ir.Value) -> ir.Value:
        """Cast scales that are stored as fp16 in front of `reader`; ONNX Runtime does so once, when it loads."""
        if scales.dtype == ir.DataType.FLOAT:
            return scales
        [cast] = graph.insert(reader, "Cast", [scales], {"to": ir.DataType.FLOAT}, name=f"{reader.name}/scales_fp32")
        cast.type, cast.shape = ir.TensorType(ir.DataType.FLOAT), scales.shape
        return cast

    def _replace(self, layer: linear.LinearLayer, output: ir.Value) -> None:
        graph.replace_value(layer.output, output)
        self.model.graph.remove([node for node in (layer.add, layer.matmul) if node is not None], safe=True)

    def _gather(self, lookup: Gather, matrix: LazyMatrix, parts: PackedInitializers | ir.Value, tied: bool) -> None:
        """Put GatherBlockQuantized, or Embedding, in the place of the embedding."""
        if isinstance(parts, ir.Value):
            operands = {"ids": lookup.indices, "weights": parts}
            attributes = cpu_linear.grid_attributes(matrix.n, matrix.k, matrix.grid)
            found = cpu.Embedding.insert(lookup.node, operands, attributes, name=lookup.name)
            graph.replace_value(lookup.output, found.y)
            self.model.graph.remove(lookup.node, safe=True)
            return
        v, k, grid = matrix.n, matrix.k, matrix.grid
        attributes = {"gather_axis": 0, "quantize_axis": 1, "block_size": grid.block_size, "bits": grid.bits}
        node, name = lookup.node, lookup.name
        scales = self._in_fp32(node, parts.scales)
        if tied:
            attributes["quantize_axis"] = 2
            shape = graph.initializer(self.model, f"{parts.scales.name}.shape", np.array([v, grid.blocks(k), 1]))
            [scales] = graph.insert(node, "Reshape", [scales, shape], name=f"{name}/scales")
            scales.name = f"{name}/scales"
        inputs = {"data": parts.codes, "indices": lookup.indices, "scales": scales}
        rows = contrib.GatherBlockQuantized.insert(node, inputs, attributes, name=name).output
        if tied:
            rows.name = f"{name}/blocks"
            shape = graph.initializer(self.model, f"{parts.codes.name}.row_shape", np.array([0, 0, k]))  # 0: as it is
            [rows] = graph.insert(node, "Reshape", [rows, shape], name=f"{name}/rows")
        graph.replace_value(lookup.output, rows)
        self.model.graph.remove(node, safe=True)

    def _note(self, node: ir.Node, what: str) -> None:
        self.changes.rewritten.append(Rewritten(str(node.name), what))


def _ordered(weight: ir.Value, found: StoredCodes, grid: Grid, order: NDArray[np.intp]) -> LazyMatrix:
    """Make a matrix [E·N, K] on `grid` of the codes of experts [E, K, N], the output features of each in `order`."""
    count, k, n = graph.static(weight)
    stacked = (n * np.arange(count)[:, None] + order).reshape(-1)
    return LazyMatrix(lambda: rows(on_grid(found.read(), grid), stacked), count * n, k, grid)


def _names(weight: ir.Value) -> list[str]:
    """Name the parameters that `weight` comes from, or itself where it comes from none."""
    return graph.sources(weight) or [str(weight.name)]


def _summary(matrix: LazyMatrix) -> str:
    return f"{_grid(matrix.grid)}, [{matrix.n}, {matrix.k}]"


def _grid(grid: Grid) -> str:
    kind = "trellis" if grid.trellis else "symmetric" if grid.symmetric else "asymmetric"
    scales = "" if grid.scale == "fp32" else f", scales {grid.scale}"
    return f"{grid.bits} bits, blocks of {grid.block_size}, {kind}{scales}"


def _layer(matmul: ir.Node) -> linear.LinearLayer | None:
    """Recognize the linear layer of `matmul`, with the bias that is added next; None where it has no weight."""
    adding = [node for node in matmul.outputs[0].consumers() if Add.matches(node)]
    layer = linear.of(adding[0].outputs[0]) if len(adding) == 1 else None
    return layer if layer is not None and layer.matmul is matmul else linear.of(matmul.outputs[0])


def _shape(weight: ir.Value) -> tuple[int, int]:
    """Return the shape of an fp32 matrix."""
    dims = graph.dims(weight)
    if weight.dtype != ir.DataType.FLOAT or dims is None or len(dims) != 2:
        raise _Skip(f"{weight.name} is {weight.dtype} {dims}; expected an fp32 matrix")
    rows, columns = graph.static(weight)
    return rows, columns


def _require_own(weight: ir.Value) -> None:
    if len(weight.uses()) > 1 or weight.is_graph_input() or weight.is_graph_output():
        raise _Skip(f"{weight.name} has other readers")


def _reads_transposed_initializer(matmul: ir.Node) -> bool:
    turned = Transpose.made(MatMul(matmul).w)
    return turned is not None and turned.x.is_initializer()


def _tied_head(table: ir.Value, gather: ir.Node, on_rows: set[ir.Node]) -> linear.LinearLayer | None:
    """Return the head that multiplies by the transpose of `table`, which only `gather` reads besides; None: no head."""
    others = [node for node in table.consumers() if node is not gather]
    if table.is_graph_input() or table.is_graph_output():
        raise _Skip(f"{table.name} has other readers")
    if not others:
        return None
    heads = others[0].outputs[0].consumers()
    if len(others) > 1 or not Transpose.matches(others[0]) or len(heads) != 1 or heads[0] not in on_rows:
        raise _Skip(
            f"{table.name} is read by {', '.join(str(other.name) for other in others)}; only the embedding and a tied "
            "head may"
        )
    [matmul] = heads
    product = MatMul.of(matmul)
    if product is None or product.w is not others[0].outputs[0]:
        raise _Skip(f"{table.name} is also read by {matmul.op_type} {matmul.name}, which is not the output head")
    return linear.LinearLayer(matmul, table)
