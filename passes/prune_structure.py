"""Take heads, channels and layers out of the decoder, and let the others make up for them.

    attention of 8 query and 4 KV heads           becomes  one of 6 and 3: fewer columns of Wq, Wk, Wv, fewer rows of Wo
    down(act(gate(x))·up(x)), [H, I] and [I, H]   becomes  the same with [H, I'] and [I', H]
    layers 0 … n - 1                              becomes  those without the layers that do least

A KV head goes with the query heads that read it; its cache [batch, kv_heads, capacity, head_dim] gets smaller, and that
of a layer that goes is no input any more. Channels go by whole blocks (`block`), so that codes of quantize-weights fit.
What goes is chosen on calibration text: heads and channels by their cost in the second order, over all layers at once,
each layer as much as it can spare; layers by their influence on hidden states; how many of these, by the KLD on text
that is held out (llmforge.calibration.prune). Wo and Wdown of a pruned layer are the least-squares fit of what they
made (llmforge.quantization.structure). Passes behind it are calibrated on the pruned model.

Fires for every `llmforge::Attention` whose queries, keys and values come from linear layers of their own, through
rotary embedding and norms of single heads, and whose output one linear layer alone reads; for every MLP whose channels
are made one by one of linear layers. Put it in front of all other passes. Left alone, with the reason: packed matrices,
experts, latent attention, recurrent layers, norms over all heads.

Numerics: lossy, within the budget of the recipe. Refused where what may go is too little of what a decode step reads.
"""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal, Self

import onnx_ir as ir
from pydantic import Field, model_validator
from pydantic.dataclasses import dataclass

from llmforge.ir import graph
from llmforge.quantization.statistics import Demand, PruningDemand
from llmforge.rewrite import pruning
from llmforge.rewrite.pass_base import Budget, Changes, Context, Numerics, Pass, Rewritten, Skipped


@dataclass(frozen=True)
class PruneStructure(Pass):
    """Take heads, channels and layers out of the decoder."""

    name: ClassVar[str] = "prune-structure"
    numerics: ClassVar[Numerics] = Numerics.LOSSY
    drops_caches: ClassVar[bool] = True

    budget: Annotated[Budget, Field(description="quality budget of the pass")]
    fraction: Annotated[
        float | None, Field(gt=0, lt=1, description="share of the parameters of all decoder layers that goes")
    ] = None
    speedup: Annotated[
        float | None,
        Field(gt=1, le=4, description="how many times fewer parameters a decode step is to read, the head among them"),
    ] = None
    units: Annotated[
        tuple[Literal["heads", "channels", "layers"], ...],
        Field(min_length=1, max_length=3, description="what may go: KV heads with their query heads, channels, layers"),
    ] = ("heads", "channels", "layers")
    block: Annotated[
        Literal[16, 32, 64, 128], Field(description="channels that go together: the block_size of quantize-weights")
    ] = 32
    damping: Annotated[
        float, Field(gt=0, le=1, description="fraction of the mean diagonal of the inputs' moments added to it")
    ] = 0.01

    @model_validator(mode="after")
    def _has_one_limit(self) -> Self:
        if (self.fraction is None) == (self.speedup is None):
            raise ValueError("give fraction or speedup: one of both")
        return self

    def demands(self) -> tuple[Demand, ...]:
        """Ask calibration what is to go, and for the matrices that make up for it."""
        return (PruningDemand(self.units, self.fraction, self.speedup, self.block, self.damping),)

    def run(self, model: ir.Model, context: Context) -> Changes:
        """Take out of `model` what calibration chose.

        Raises:
            UnsupportedError: it saves too little, or the graph has nothing that can be taken out.
        """
        changes = Changes()
        structure = pruning.find(model)
        for block in structure.blocks:
            changes.skipped += [Skipped(block.prefix.removesuffix("."), reason) for reason in block.reasons]
        if structure.fixed and "layers" in self.units:
            changes.skipped.append(Skipped("layers", f"none can go: {structure.fixed}"))
        if graph.PRUNED in model.metadata_props:
            changes.skipped = [Skipped("layers", "it is pruned already")]
            return changes
        kept = None if context.statistics is None else context.statistics.kept
        if kept is None or context.statistics is None:
            return changes
        demand = pruning.bound(self.demands()[0], model)
        assert isinstance(demand, PruningDemand)
        left = demand.read - demand.target
        context.require_fewer_bytes(self.name, demand.read, max(left, 1))
        done = pruning.Surgery(model, kept, context.statistics.pruned).run()
        changes.rewritten += [Rewritten(name, what) for name, what in done]
        return changes
