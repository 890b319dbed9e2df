"""Structured pruning, as far as a configuration tells: what a build would refuse, and how much goes.

The build reads more off the graph: packed projections, norms over all heads, layers that are not one behind the other.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from llmforge.backends import BACKENDS, BackendName
from llmforge.base.errors import UnsupportedError
from llmforge.planning.shape import LayerSizes, Shape
from llmforge.quantization.statistics import PruningDemand
from llmforge.quantization.structure import PrunableLayer, Structure
from llmforge.rewrite.pass_base import Context, Pass
from llmforge.targets import Target


def note(steps: Sequence[Pass], shape: Shape, target: Target, backend: BackendName) -> str | None:
    """Say how many parameters a pass of `steps` takes out of `shape`, whose plan does not count it; None: none does.

    Raises:
        UnsupportedError: the build refuses it: there is nothing to take out, it saves a decode step too little, or the
            runtime that the recipe's passes or `backend` are for reads one size for all layers.
    """
    found = [(step.name, each) for step in steps for each in step.demands() if isinstance(each, PruningDemand)]
    if not found:
        return None
    [(name, demand), *_] = found
    if any(step.loads_in for step in steps) or BACKENDS[backend].export_format is not None:
        from llmforge import passes  # which brings onnx-ir

        interfaces = ", ".join(sorted(step.name for step in passes.ALL if step.loads_in))
        raise UnsupportedError(
            f"{name}: runtimes of others read one number of layers and heads, and pruned layers differ",
            hint=f"leave {name} out of the recipe, or {interfaces}, or choose another `engine`",
        )
    layers = [layer for count, layer in shape.layers for _ in range(count)]
    other = [layer for layer in layers if layer.attention is None or layer.attention.latent is not None]
    if other:
        raise UnsupportedError(
            f"{name}: {len(other)} of {len(layers)} layers have no attention over keys and values",
            hint=f"leave {name} out of the recipe",
        )
    if "layers" not in demand.units and not any(_may_go(layer, demand) for layer in layers):
        reasons = {"heads": "every layer has one KV head", "channels": "experts are not pruned"}
        why = "; ".join(reason for unit, reason in reasons.items() if unit in demand.units)
        raise UnsupportedError(f"{name}: nothing can be taken out: {why}", hint=f"leave {name} out of the recipe")
    sizes = [layer.matrices + layer.expert * layer.experts for layer in layers]
    blocks = tuple(PrunableLayer(index, "", size, None, None, ()) for index, size in enumerate(sizes))
    bound = replace(demand, structure=Structure(blocks, ""), read=sum(sizes) + shape.head_matrix)
    Context(target).require_fewer_bytes(name, bound.read, max(bound.read - bound.target, 1))
    share = bound.target / sum(sizes)
    return f"{name} takes {share:.1%} of the parameters out of the decoder's layers; this plan is of the whole model"


def _may_go(layer: LayerSizes, demand: PruningDemand) -> bool:
    """Say whether a head or a channel of `layer` may go."""
    assert layer.attention is not None
    heads, channels = layer.attention.kv_heads > 1, not layer.experts
    return ("heads" in demand.units and heads) or ("channels" in demand.units and channels)
