"""Compute quantized layers and attention with the CPU kernels of llmforge, each with what stands around it.

    y = r + MatMulNBits(RMSNormalization(x)·…, W) + b   becomes  y = llmforge.cpu::Linear(x, W', b, norm, r)
    y = f(gate)·up of Split(MatMulNBits(x, W))          becomes  y = llmforge.cpu::Linear(x, W', activation=f)
    e = GatherBlockQuantized(codes, ids, scales)        becomes  e = llmforge.cpu::Embedding(ids, W')
    y = f(MatMulNBits(x, W) + b)                        becomes  y = llmforge.cpu::Linear(x, W', b, activation=f)
    y = t·(r·DequantizeLinear(codes, scales)) + b       becomes  y = llmforge.cpu::Linear(x, W', b)
    y, … = com.microsoft::GroupQueryAttention(RMSNormalization of heads, …)
                                                        becomes  y, … = llmforge.cpu::GroupQueryAttention[Int8](qkv, …)
    y, … = llmforge::LatentAttention(q, latent, up, …)  becomes  y, … = llmforge.cpu::LatentAttention[Int8](q, …)
    y = LowRankAdapter(base, x, ids, a, b)              becomes  y = llmforge.cpu::LowRankAdapter(base, x, ids, a', b)

`x` is [batch, sequence, K] and `y` [batch, sequence, N], or N / 2 behind a gate. `W'` holds the codes, scales and zero
points of W, arranged in the order in which the kernel reads them (docs/cpu-kernels.md); ONNX Runtime maps them from the
file and makes no copy of its own. Rows of activations are rounded to int8 in the blocks of the weights, as ONNX
Runtime's kernel does at `accuracy_level` 4. What that leaves of blocks with outliers, larger than others of the row, is
rounded to int8 as well, and both products are added; that of all blocks is with `activations: int8x2`, where `int8x2`
names the weights, and with `last_layer: int8x2` behind the last attention: in the last feed-forward layer and the head.
SkipSimplifiedLayerNormalization in front of such a layer comes apart: its sum goes into the layer before, its norm into
the one behind.

Fires for
- every plain Linear that quantize-weights wrote,
- every product of int8 channels with activations rounded token by token (quantize-channels, `activations: per_token`),
  K a multiple of 32: rows of both are single blocks,
- every MatMulNBits of `accuracy_level` 4 in blocks of 32 or more that divide K,
- every GatherBlockQuantized whose table has such blocks,
- every LowRankAdapter in fp32,
- every GroupQueryAttention with heads of a multiple of 16 channels and caches of fp32 or int8,
- every LatentAttention in fp32 whose latents, keys and values have multiples of 16 channels.

Needs the compiled kernels (llmforge.native), here and wherever the artifact runs. Where llmforge was installed without
a C compiler there are none: the pass refuses, or, with `fallback: onnxruntime`, leaves the graph as it is and says so.

Numerics: lossy, within the budget of the recipe: sums come in another order, and what is rounded to int8 may land on a
neighbour.
"""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

import onnx_ir as ir
from pydantic import Field
from pydantic.dataclasses import dataclass

from llmforge import native
from llmforge.ir import graph
from llmforge.ir.operators import canonical, contrib, cpu
from llmforge.ir.operators.standard import MatMul
from llmforge.quantization.statistics import exclusion
from llmforge.rewrite import cpu_attention, cpu_channels, cpu_linear
from llmforge.rewrite.declared import CpuKernelsTraits
from llmforge.rewrite.pass_base import Budget, Changes, Context, Numerics, Pass, Skipped
from llmforge.rewrite.patterns import rewrite_each, skip_if

FALLBACK = "cpu-kernels: using ONNX Runtime's slower kernels: llmforge was installed without a C compiler"


@dataclass(frozen=True)
class CpuKernels(CpuKernelsTraits, Pass):
    """Run quantized layers and attention with llmforge's CPU kernels."""

    numerics: ClassVar[Numerics] = Numerics.LOSSY
    own_operators: ClassVar[bool] = True

    budget: Annotated[Budget, Field(description="quality budget of the pass")]
    fallback: Annotated[
        Literal["none", "onnxruntime"],
        Field(description="kernels to use if llmforge's are not compiled; none: fail the build"),
    ] = "none"

    activations: Annotated[
        Literal["int8", "int8x2"],
        Field(
            description="what products of quantized layers read: int8, or two terms of it, as precise as 16 bits, for "
            "about twice the arithmetic"
        ),
    ] = "int8"
    int8x2: Annotated[
        tuple[str, ...], Field(description="globs of checkpoint parameter names whose layers read int8x2 in any case")
    ] = ()

    outliers: Annotated[
        float,
        Field(
            ge=0,
            le=1024,
            description="blocks of a token's numbers, as layers read them, that have a second term with `activations: "
            "int8`: those whose largest is more than so many times the mean of the token's blocks; 0: none",
        ),
    ] = 0.0

    last_layer: Annotated[
        Literal["int8", "int8x2"],
        Field(description="what the products behind the last attention read: last feed-forward layer and head"),
    ] = "int8"

    latents: Annotated[
        Literal["int8", "fp32"],
        Field(description="what makes keys and values of latents: int8 in blocks of 64 columns, or fp32 as it is"),
    ] = "int8"

    def run(self, model: ir.Model, context: Context) -> Changes:
        """Rewrite every layer and every attention of `model` that the kernels compute.

        Raises:
            UnsupportedError: the target is no CPU with ONNX Runtime.
            EnvironmentLacks: the kernels are not compiled here, and there is no fallback.
        """
        context.require_cpu(self.name)
        if self.fallback == "onnxruntime" and native.library() is None:
            left = [Skipped(layer.name, "the kernels are not compiled") for layer in contrib.MatMulNBits.all(model)]
            return Changes(notes=[FALLBACK], skipped=left)
        native.require()
        changes = Changes()
        found = [each for each in map(cpu_channels.ChannelProduct.of, MatMul.all(model)) if each is not None]

        def multiply_channels(layer: cpu_channels.ChannelProduct) -> str:
            skip_if(cpu_channels.reason_against(layer))
            return cpu_channels.lower(model, layer, context.scratch)

        if rewrite_each(found, multiply_channels, changes):
            graph.drop_unused(model)  # what rounded their inputs reads norms, too
        layers: dict[contrib.MatMulNBits | cpu.CpuLinear, str | None] = {
            **{layer: cpu_linear.reason_against(layer) for layer in contrib.MatMulNBits.all(model)},
            **{layer: None for layer in cpu.CpuLinear.all(model) if cpu_linear.plain(layer)},
        }
        last = _behind_caches(model)
        ready = frozenset(layer.node for layer, reason in layers.items() if reason is None)
        rewriting = cpu_linear.Rewriting(model, ready, context.scratch)
        if rewriting.ready:
            rewriting.separate_norms()
        adapters = [each for each in canonical.LowRankAdapter.all(model) if each.base.dtype == ir.DataType.FLOAT]
        for adapter in adapters:
            if adapter.base.producer() in ready:
                cpu_linear.add_before_adapter(adapter)

        def attend(attention: contrib.GroupQueryAttention) -> str:
            skip_if(cpu_attention.reason_against(attention))
            return cpu_attention.lower(attention)

        def attend_latents(latent: canonical.LatentAttention) -> str:
            skip_if(cpu_attention.reason_against_latents(latent))
            return cpu_attention.lower_latents(model, latent, context.scratch, int8=self.latents == "int8")

        def multiply(layer: contrib.MatMulNBits | cpu.CpuLinear) -> str:
            skip_if(layers[layer])
            terms = self._terms(layer, last=layer.node in last)
            outliers = self.outliers if terms == 1 else 0.0
            return _done(rewriting.linear(layer, terms, outliers), "it has nothing to take over")

        def look_up(table: contrib.GatherBlockQuantized) -> str:
            return _done(rewriting.embedding(table), "its table has blocks that the kernel cannot read")

        rewrite_each(contrib.GroupQueryAttention.all(model), attend, changes)
        rewrite_each(canonical.LatentAttention.all(model), attend_latents, changes)
        rewrite_each(layers, multiply, changes)
        rewrite_each(adapters, cpu_linear.lower_adapter, changes)
        rewrite_each(contrib.GatherBlockQuantized.all(model), look_up, changes)
        if changes:
            graph.drop_unused(model)
        return changes

    def _terms(self, layer: contrib.MatMulNBits | cpu.CpuLinear, *, last: bool) -> int:
        """Return how many terms of int8 a number that `layer` reads has."""
        sensitive = exclusion(cpu_linear.parameters(layer), self.int8x2) is not None
        return 2 if sensitive or "int8x2" in (self.activations, self.last_layer if last else "int8") else 1


def _behind_caches(model: ir.Model) -> set[ir.Node]:
    """Return the nodes behind the last one that reads a cache, or another state: an input of three axes or more."""
    states = {value for value in model.graph.inputs if len(graph.dims(value) or ()) > 2}
    nodes = list(model.graph)
    readers = [place for place, node in enumerate(nodes) if states.intersection(node.inputs)]
    return set(nodes[readers[-1] + 1 :]) if readers else set()


def _done(what: str | None, otherwise: str) -> str:
    """Return what was done; NotApplicable, with the reason `otherwise`, where nothing was."""
    skip_if(otherwise if what is None else None)
    return str(what)
