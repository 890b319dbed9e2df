"""Quantize the weights of linear layers, experts, embedding and output head to 3, 4, 5, 6 or 8 bits.

    y = x·W + b                     becomes  y = com.microsoft::MatMulNBits(x, codes, scales[, zero_points, , b])
    e = Gather(E, input_ids)        becomes  e = com.microsoft::GatherBlockQuantized(codes, input_ids, scales)
    logits = x·Eᵀ  (tied head)      becomes  logits = MatMulNBits(x, codes, scales), and the embedding
                                             e = Reshape(GatherBlockQuantized(codes, input_ids, Reshape(scales)))
                                             reads the same codes
    y = llmforge::MoE(x, ids, …)    becomes  y = com.microsoft::QMoE(x, w, codes, scales, …, zero_points, …, w),
                                             w [batch·sequence, experts]: the weights at ids, 0 elsewhere

or, where MatMulNBits has no such format (3, 5 or 6 bits, `scales: int8`, `codes: trellis`, types of GGUF files):

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

`layer_bits` gives some weights other bits, in the same blocks and with the same scales; where a recipe has `retreat`,
the build adds to them the layers that lost most, until the budget is kept (`llmforge.compile.retreats`).

8 bits run at `accuracy_level` 4 alone: at any other, the CPU kernel of onnxruntime 1.31 takes 400 times as long.

With `method: stored`, codes, scales and zero points, or minima, are those of a checkpoint that comes quantized, whose
bits, blocks and symmetry they have; codes that llmforge's CPU kernels alone read (3, 5 and 6 bits, minima of blocks)
stay dequantized on other targets. What it does not store as codes, or not in a format of ours, stays as it is,
embedding and head apart, which are quantized as above where they are no codes. Where its input features are in another
order, `x` becomes Gather(x, columns) along the last axis.

Numerics: lossy, within the budget of the recipe.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from copy import deepcopy
from dataclasses import dataclass as record
from dataclasses import field, replace
from functools import cached_property
from typing import Annotated, Any, ClassVar, Literal, Self, cast

import onnx_ir as ir
from pydantic import Field, model_validator
from pydantic.dataclasses import dataclass

from llmforge.backends.record import StoredDtype
from llmforge.base.plugins import Plugin
from llmforge.ir import graph, interface, logits_rows, operators, routing
from llmforge.ir.operators import canonical, contrib
from llmforge.ir.operators.contrib import INT8_ACTIVATIONS
from llmforge.ir.operators.standard import Gather, MatMul
from llmforge.quantization import methods
from llmforge.quantization.formats import SUPERSCALED
from llmforge.quantization.grid import PORTABLE_BITS, TRELLIS_BITS, Grid, Scale, gguf_type
from llmforge.quantization.methods.base import Method
from llmforge.quantization.statistics import ChannelDemand, Demand, WeightDemand, exclusion
from llmforge.quantization.stored import require
from llmforge.rewrite import moe_kernels
from llmforge.rewrite.block_codes import (
    BlockWriter,
    described,
    layer_of,
    parameters,
    reads_transposed_initializer,
    require_matches,
    require_own,
    shape_of,
    summary,
    tied_head,
)
from llmforge.rewrite.chosen_blocks import KEPT_BITS, ChosenBlocks, StoredBlocks
from llmforge.rewrite.declared import QuantizeWeightsTraits
from llmforge.rewrite.pass_base import Budget, Changes, Context, Numerics, Pass, Retreat, Rewritten
from llmforge.rewrite.patterns import NotApplicable, rewrite_each, skip_if
from llmforge.rewrite.traits import FinerCodes, Storage

Bits = Literal[3, 4, 5, 6, 8]
_FINER = 8  # bits of weights that a recipe of mixed precision keeps
_SHARED = ("budget", "block_size", "symmetric", "embedding_bits", "routers")  # options that say nothing of the method


@dataclass(frozen=True)
@methods.with_options(before="routers")
class QuantizeWeights(QuantizeWeightsTraits, Pass):
    """Quantize linear layers, embedding and output head to 3, 4, 5, 6 or 8 bits, experts to 4 or 8."""

    numerics: ClassVar[Numerics] = Numerics.LOSSY

    budget: Annotated[Budget, Field(description="quality budget of the pass")]
    bits: Annotated[
        Bits,
        Field(description="bits per weight of the decoder's linear layers; 3, 5 and 6 need llmforge's CPU kernels"),
    ] = 4
    block_size: Annotated[Literal[32, 64, 128], Field(description="consecutive input features that share a scale")] = 32
    symmetric: Annotated[
        bool, Field(description="no zero points; saves `bits` bits per block, at a cost in quality with 4 bits")
    ] = False
    scales: Annotated[
        Literal["fp32", "fp16", "bf16", "int8"],
        Field(
            description="stored type of scales; fp16 hardly affects quality; bf16 is for servers that compute in it; "
            "int8 (with a bf16 scale per 256 columns) needs llmforge's CPU kernels"
        ),
    ] = "fp32"
    codes: Annotated[
        Literal["uniform", "trellis", "gguf"],
        Field(
            description="trellis: 4 bits choose among 32 levels, 5 among 64, by the codes of the rows before (with "
            "`layer_bits`, other widths are uniform); gguf: the types of "
            "GGUF files, by `bits`: Q3_K, Q4_K, Q5_K, Q6_K, Q8_0, and those of blocks of 32 where 256 does not divide "
            "the input features, `auto` among all, also Q2_K, IQ4_XS and IQ4_NL; both need llmforge's CPU kernels"
        ),
    ] = "uniform"
    method: Annotated[str, methods.Named(), Field(description=methods.summaries())] = methods.DEFAULT.name
    weight_bits: Annotated[
        float | None,
        Field(
            gt=0,
            le=32,
            description="for auto: bytes of all weights, in bits for each parameter of the model; default: as few as "
            "keep the budget",
        ),
    ] = None
    weight_bytes: Annotated[int | None, Field(gt=0, description="for auto: bytes of all weights")] = None
    embedding_bits: Annotated[
        Literal[3, 4, 5, 6, 8, 16], Field(description="bits of embedding and output head; 16 skips them")
    ] = 8
    embedding_block_size: Annotated[
        Literal[32, 64, 128] | None, Field(description="block size of embedding and head; default: `block_size`")
    ] = None
    layer_bits: Annotated[
        dict[str, Bits],
        Field(
            description="bits of weights whose parameters match a glob, embedding and head among them, in place of "
            "`bits` and `embedding_bits`; the last glob that matches counts"
        ),
    ] = field(default_factory=dict)
    retreat: Annotated[
        Retreat | None,
        Field(
            description="where the budget is exceeded, the layers that lost most get the next of these bits, as long "
            "as all weights fit; default: the build ends"
        ),
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
        if self.codes == "gguf" and (self.block_size, self.symmetric, self.scales) != (32, False, "fp32"):
            raise ValueError("codes: gguf has blocks and scales of its own; leave out block_size, symmetric and scales")
        if self.codes == "gguf" and self.embedding_block_size is not None:
            raise ValueError("codes: gguf has blocks of its own; leave out embedding_block_size")
        if self.codes == "gguf" and self.method == methods.AUTO and self.bits != 4:
            raise ValueError(f"method: {methods.AUTO} chooses among all types of GGUF; leave out bits")
        limits = (self.weight_bits is not None) + (self.weight_bytes is not None)
        if limits > (self.method == methods.AUTO):
            raise ValueError(
                f"weight_bits or weight_bytes, one of both, goes with method: {methods.AUTO}, and no other"
            )
        if self.scales == "bf16" and self.embedding_bits not in (*PORTABLE_BITS, KEPT_BITS):
            raise ValueError("scales: bf16 go with embedding_bits: 4, 8 or 16")
        if self.codes == "trellis" and (self.bits not in TRELLIS_BITS or not self.symmetric):
            raise ValueError("codes: trellis has bits: 4 or 5, and symmetric: true")
        native = not (self.grid.portable and self.embedding_bits in (*PORTABLE_BITS, KEPT_BITS))
        if native and self.accuracy_level != INT8_ACTIVATIONS:
            raise ValueError(f"this format needs llmforge's CPU kernels, which have accuracy_level: {INT8_ACTIVATIONS}")
        if self.takes_stored:
            defaults = {"bits": 4, "block_size": 32, "symmetric": False, "codes": "uniform"}
            if given := [name for name, default in defaults.items() if getattr(self, name) != default]:
                raise ValueError(f"method: {methods.STORED} takes {', '.join(given)} from the checkpoint; leave it out")
            if self.scales in ("int8", "bf16"):
                rounds = f"which {self.scales} would round"
                raise ValueError(f"method: {methods.STORED} keeps scales, {rounds}; use fp32 or fp16")
            if self.accuracy_level != INT8_ACTIVATIONS:
                raise ValueError(f"method: {methods.STORED} goes with accuracy_level: {INT8_ACTIVATIONS}")
        if self.grid.format not in self.chosen.formats:
            raise ValueError(f"method: {self.method} cannot give {self.grid.format.name}; use another format or method")
        return self

    @model_validator(mode="after")
    def _layers_run_well(self) -> Self:
        for option, given in (("layer_bits", bool(self.layer_bits)), ("retreat", self.retreat is not None)):
            if given and self.method in (methods.AUTO, methods.STORED):
                raise ValueError(f"{option}: method: {self.method} has formats of its own; use another method")
            if given and self.accuracy_level != INT8_ACTIVATIONS:
                raise ValueError(f"{option} goes with accuracy_level: {INT8_ACTIVATIONS}")
        for bits in {*self.layer_bits.values(), *(self.retreat.bits if self.retreat is not None else ())}:
            if (found := self.grid.of_bits(bits).format) not in self.chosen.formats:
                raise ValueError(f"method: {self.method} cannot give {found.name}; use other bits, or another method")
        return self

    @classmethod
    def taking(cls, options: Mapping[str, object]) -> type[Pass]:
        """Add the options of a plug-in's method, where the recipe names one."""
        name = options.get("method")
        return methods.extended(cls, name) if isinstance(name, str) else cls

    def uses(self) -> tuple[type[Method], ...]:
        """Name the method."""
        return (type(self.chosen),)

    def plugins_used(self) -> tuple[Plugin, ...]:
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
        if self.codes == "gguf":
            return gguf_type(self.bits)
        return Grid(self.bits, self.block_size, self.symmetric, self.scales, self.codes == "trellis")

    @property
    def tables(self) -> Grid | None:
        """The grid of embedding and head, with the largest block that divides their width; None: they stay."""
        if self.embedding_bits == KEPT_BITS:
            return None
        if self.codes == "gguf":
            return gguf_type(self.embedding_bits)
        return Grid(self.embedding_bits, self.embedding_block_size or self.block_size, True, self.scales)

    @property
    def chosen(self) -> Method:
        """The method of the decoder's linear layers, with its options."""
        return methods.make(self.method, self)

    @property
    def server_format(self) -> str | None:
        """Name the format of linear layers."""
        return f"int{self.bits}"

    def stores(self, stored: Grid | None) -> Storage:
        """Say the dtypes of embedding and head, and of weights; codes of the checkpoint are on the grid `stored`."""
        table = self.embedding_bits
        said = Storage(embedding=None if table == KEPT_BITS else cast(StoredDtype, f"int{table}"))
        if (grid := stored if self.takes_stored else self.grid) is None:
            return said
        weights = cast(StoredDtype, f"int{grid.bits}")
        # others become what activations are in, but where the CPU kernels alone read them
        kept = grid.scale in SUPERSCALED or (grid.minimums and self.scales == grid.scale)
        scale: Scale | None = grid.scale if kept else None
        shared = replace(said, block=grid.block_size, symmetric=grid.symmetric, minimums=grid.minimums)
        return replace(shared, weights=weights, scale=scale)

    @property
    def may_retreat(self) -> Retreat | None:
        """How layers get more bits where the budget is exceeded."""
        return self.retreat

    def retreated(self, layer_bits: Mapping[str, int]) -> Pass:
        """Return the pass with more bits for the weights whose parameters match a glob; of several, the last counts."""
        others = {glob: bits for glob, bits in self.layer_bits.items() if glob not in layer_bits}
        return replace(self, layer_bits={**others, **cast(dict[str, Bits], layer_bits)})

    def finer(self, written: Mapping[str, Any]) -> FinerCodes | None:
        """Keep weights of few bits in 8, the only ones that 8 bits run well at `accuracy_level` 4."""
        if self.bits >= _FINER or self.accuracy_level != INT8_ACTIVATIONS:
            return None
        shared = {name: deepcopy(written[name]) for name in _SHARED if name in written}  # YAML marks what is one object
        return FinerCodes(_FINER, {**shared, "bits": _FINER, "method": methods.PLAIN.name})

    def demands(self) -> tuple[Demand, ...]:
        """Ask calibration for quantized linear layers and experts, where the method needs its text."""
        if not self.chosen.demands:
            return ()
        if self.chosen.is_by_channel():
            return (ChannelDemand(),)
        demand = WeightDemand(self.chosen, self.grid, self.exclude, self.routers, self.tables)
        demand = replace(demand, layer_bits=tuple(self.layer_bits.items()))
        if self.method == methods.AUTO and self.weight_bits is None and self.weight_bytes is None:
            return (replace(demand, weight_loss=self.budget.kld_mean),)
        return (replace(demand, weight_bits=self.weight_bits, weight_bytes=self.weight_bytes),)

    def run(self, model: ir.Model, context: Context) -> Changes:
        """Rewrite every linear layer, the embedding and the head of `model`.

        Raises:
            UnsupportedError: the target has no ONNX Runtime, whose operators these are, or `method` is stored and the
                checkpoint has no codes.
        """
        context.require_onnxruntime(self.name, "MatMulNBits is an operator of ONNX Runtime")
        for bits in self.retreat.bits if self.retreat is not None else ():  # before anything is calibrated
            if not (grid := self.grid.of_bits(bits)).portable:
                context.require_cpu(f"{self.name} with retreat to {described(grid)}")
        require_matches(model, self.layer_bits)
        stored = None
        if self.takes_stored:
            stored = StoredBlocks(self.name, require(context.stored, self.name), self.scales, context.is_cpu)
        routers = {} if self.routers else routing.routers(model)
        quantizer = _WeightQuantizer(self, model, context, stored, logits_rows.readers(model), routers)
        changes = Changes()
        for tables in (True, False):  # the embedding first, with which a tied head goes
            nodes = [node for node in model.graph if Gather.matches(node) is tables]
            rewrite_each(nodes, quantizer.rewrite, changes)
        if changes:
            graph.drop_unused(model)
        changes.notes += [*(() if stored is None else stored.skipped.notes()), *quantizer.notes()]
        return changes


@record(eq=False)
class _WeightQuantizer:
    """One run of the pass over one graph; what it leaves alone raises NotApplicable before anything is changed."""

    step: QuantizeWeights
    model: ir.Model
    context: Context
    stored: StoredBlocks | None  # codes of the checkpoint, where the method takes them
    on_rows: set[ir.Node]  # what works on the rows that get logits
    routers: Mapping[ir.Node, ir.Node]  # nodes of routers that stay, and the experts that they choose
    left: dict[str, list[canonical.MoE]] = field(default_factory=dict)  # layers whose experts stay, by the reason

    @cached_property
    def chosen(self) -> ChosenBlocks:
        step, layer_bits = self.step, tuple(self.step.layer_bits.items())
        return ChosenBlocks(step.chosen, step.grid, step.tables, self.context.statistics, layer_bits)

    @cached_property
    def writer(self) -> BlockWriter:
        return BlockWriter(self.step.name, self.model, self.context, self.step.accuracy_level)

    def notes(self) -> list[str]:
        """Say how much of the experts was not quantized."""
        notes = []
        for reason, layers in self.left.items():
            weights = sum(math.prod(graph.static(value)) for each in layers for value in (each.up, each.down))
            which = layers[0].name if len(layers) == 1 else f"{layers[0].name} and {len(layers) - 1} more"
            size = f"{weights / 1e6:,.4g} million weights"
            notes.append(f"{self.step.name}: experts of {which} are not quantized, {size}: {reason}")
        return notes

    def rewrite(self, node: ir.Node) -> str | list[Rewritten] | None:
        """Rewrite what `node` stands for."""
        match operators.view(node):
            case Gather() as lookup:
                return self.embedding(lookup)
            case MatMul():
                return self.product(node)
            case canonical.MoE() as layer:
                try:
                    with moe_kernels.gathered(self.model, layer):
                        return self.experts(layer)
                except NotApplicable as reason:
                    self.left.setdefault(str(reason), []).append(layer)
                    raise
            case canonical.LatentAttention():
                raise NotApplicable(
                    "what makes keys and values of its latents stays fp32; cpu-kernels stores it in int8"
                )
            case contrib.ContribMoE():
                raise NotApplicable("already fused in fp32; put quantize-weights before fuse-experts")
        return None

    def product(self, node: ir.Node) -> str | None:
        """Rewrite a linear layer, or a head that has its own weight (a tied one goes with its embedding)."""
        head, layer = node in self.on_rows, layer_of(node)
        if layer is None:
            if head and reads_transposed_initializer(node):
                raise NotApplicable("tied to the embedding, which is not quantized")
            return None
        k, n = shape_of(layer.weight)
        require_own(layer.weight)
        skip_if(exclusion(parameters(layer.weight), self.step.exclude))
        method, columns = self.step.method, None
        if node in self.routers and not head and self.stored is None:
            raise NotApplicable(f"router of {self.routers[node].name}; `routers: true` quantizes it")
        if self.stored is not None and (not head or self.stored.are_codes(layer.weight)):
            matrix, columns = self.stored.matrix(layer.weight, n, k)
        elif head:
            matrix, method = self.chosen.table(layer.weight, n, k)
        else:
            matrix, method = self.chosen.matrix(layer.weight, n, k)
        parts = self.writer.store(layer.weight, matrix)
        if columns is not None:
            self.writer.reorder(layer, columns)
        self.writer.multiply(layer, matrix, parts)
        return f"{'head, ' if head else ''}{method}, {summary(matrix)}"

    def embedding(self, lookup: Gather) -> list[Rewritten] | None:
        """Rewrite the embedding, and the head that is tied to it."""
        table = lookup.data
        if lookup.indices.name != interface.INPUT_IDS or not table.is_initializer():
            return None
        v, k = shape_of(table)
        skip_if(exclusion(parameters(table), self.step.exclude))
        if self.stored is not None and self.stored.are_codes(table, transposed=False):
            matrix, columns = self.stored.matrix(table, v, k, transposed=False)
            method = self.step.method
            if columns is not None or matrix.grid.zero_points:
                raise NotApplicable(
                    "its codes have zero points, or another order; GatherBlockQuantized is written with neither"
                )
        else:
            matrix, method = self.chosen.table(table, v, k, transposed=False)
        tied = tied_head(table, lookup.node, self.on_rows)
        parts = self.writer.store(table, matrix, flat=tied is None)
        self.writer.gather(lookup, matrix, parts, tied is not None)
        done = [Rewritten(lookup.name, f"embedding, {method}, {summary(matrix)}")]
        if tied is not None:
            self.writer.multiply(tied, matrix, parts)
            done.append(Rewritten(str(tied.matmul.name), "head, reads the codes of the embedding"))
        return done

    def experts(self, layer: canonical.MoE) -> str:
        """Rewrite the experts of a layer."""
        if (reason := moe_kernels.reason(layer)) is not None:
            raise NotApplicable(f"{reason}; its matrices stay fp32")
        experts = moe_kernels.of(layer)
        if self.stored is not None:
            skip_if(exclusion(experts.parameters, self.step.exclude))
            up, down = self.stored.of_experts(experts)
        else:
            up, down = self.chosen.of_experts(experts, self.step.exclude)
        first, second = (
            self.writer.register(weight, matrix, experts=experts.count)
            for weight, matrix in ((layer.up, up), (layer.down, down))
        )
        moe_kernels.fuse_quantized(self.model, experts, first, second, self.step.accuracy_level)
        shape = f"{experts.count} experts, top {experts.top_k}, [{len(experts.order)}, {experts.hidden}] each"
        method = self.step.method if self.stored is not None else self.chosen.of_plain_experts.name
        return f"{method}, {described(up.grid)}, {shape}"
