"""What `plan` says of structured pruning: refusals of the build that a configuration tells, and what goes."""

from __future__ import annotations

from dataclasses import replace

import pytest

from llmforge import targets
from llmforge.base.errors import UnsupportedError
from llmforge.passes import FuseNorms, GenaiInterface, PruneStructure
from llmforge.planning import families, pruning
from llmforge.planning.shape import Shape
from llmforge.quantization.statistics import PruningDemand
from llmforge.rewrite.pass_base import Budget, Pass

from ..models.shapes import PUBLIC

H200 = targets.load("h200")
LLAMA, EXPERTS = (families.shape(name, PUBLIC[name]) for name in ("llama-3.1-8b", "qwen3-30b-a3b"))
DEMAND = PruningDemand(("heads", "channels", "layers"), 0.25, None, 32, 0.01)


def pruning_pass(demand: PruningDemand) -> Pass:
    said = {"units": demand.units, "fraction": demand.fraction, "speedup": demand.speedup}
    return PruneStructure(budget=Budget(kld_mean=0.1), **said)  # type: ignore[arg-type]


def of_layers(shape: Shape, **changes: int) -> Shape:
    """Change the attention of all layers."""
    layers = [(count, replace(layer, attention=replace(layer.attention, **changes))) for count, layer in shape.layers]  # type: ignore[type-var]
    return replace(shape, layers=tuple(layers))


def test_it_says_how_much_goes() -> None:
    said = pruning.note((FuseNorms(), pruning_pass(DEMAND)), LLAMA, H200, "onnxruntime")
    assert (
        said
        == "prune-structure takes 25.0% of the parameters out of the decoder's layers; this plan is of the whole model"
    )
    # 32 layers of 218.1 M and a head of 525 M are read; 1 / 1.25 of that stays: 1.504 G of 6.979 G go
    twice = pruning.note((pruning_pass(replace(DEMAND, fraction=None, speedup=1.25)),), LLAMA, H200, "onnxruntime")
    assert twice is not None
    assert twice.startswith("prune-structure takes 21.5% of")


@pytest.mark.parametrize(
    ("shape", "demand", "passes", "backend", "says"),
    [
        (LLAMA, replace(DEMAND, fraction=0.02), (), "onnxruntime", "does not pay on target h200"),
        (LLAMA, DEMAND, (GenaiInterface(),), "onnxruntime", "pruned layers differ"),
        (LLAMA, DEMAND, (), "compressed-tensors", "pruned layers differ"),
        (of_layers(LLAMA, latent=64), DEMAND, (), "onnxruntime", "32 of 32 layers have no attention over keys"),
        (
            of_layers(EXPERTS, kv_heads=1), replace(DEMAND, units=("heads", "channels")), (), "onnxruntime",
            "nothing can be taken out: every layer has one KV head; experts are not pruned",
        ),
        (EXPERTS, replace(DEMAND, units=("channels",)), (), "onnxruntime", "nothing can be taken out: experts"),
    ],
)  # fmt: skip
def test_what_the_build_would_refuse(
    shape: Shape, demand: PruningDemand, passes: tuple[Pass, ...], backend: str, says: str
) -> None:
    with pytest.raises(UnsupportedError) as caught:
        pruning.note((pruning_pass(demand), *passes), shape, H200, backend)
    assert says in caught.value.message
    assert caught.value.hint is not None


def test_experts_lose_heads_and_layers() -> None:
    assert "25.0%" in str(pruning.note((pruning_pass(DEMAND),), EXPERTS, H200, "onnxruntime"))


def test_recipes_that_prune_nothing_have_no_note() -> None:
    assert pruning.note((FuseNorms(),), LLAMA, H200, "onnxruntime") is None
