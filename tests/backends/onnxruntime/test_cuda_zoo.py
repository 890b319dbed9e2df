"""Every architecture of the zoo for ONNX Runtime on a GPU: it lowers, all its nodes have kernels, or it is refused."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest

from llmforge import passes, targets
from llmforge.base.errors import UnsupportedError
from llmforge.checkpoint import Checkpoint
from llmforge.compile import dry_run
from llmforge.passes import (
    FlashAttention,
    FuseExperts,
    FuseNorms,
    LowerPrecision,
    PackGateUp,
    PackQkv,
    QuantizeKvCache,
    QuantizeWeights,
)
from llmforge.quantization.grid import Grid
from llmforge.recipe import EngineSpec, Recipe
from llmforge.rewrite.pass_base import Budget, Pass
from llmforge.trace import trace

from ...models import zoo, zoo_classic

H100 = targets.load("h100-sxm")
SPEC = EngineSpec(max_context=64, max_batch=2)  # CUDA graphs of every decode step, or a refusal
RECIPE = Path(__file__).parents[3] / "recipes" / "llama-h100-cuda.yaml"
BUDGET = Budget(kld_mean=5)
FIRST = (FuseNorms(), PackQkv(), PackGateUp(), FlashAttention())
SCHEMES: Mapping[str, tuple[Pass, ...]] = {
    "fp16": (*FIRST, FuseExperts(), LowerPrecision(BUDGET, "fp16")),
    "bf16": (*FIRST, FuseExperts(), LowerPrecision(BUDGET, "bf16")),
    "int4": (*FIRST, QuantizeWeights(BUDGET, method="rtn", symmetric=True), LowerPrecision(BUDGET, "fp16")),
    "int8-kv": (*FIRST, QuantizeKvCache(BUDGET), FuseExperts(), LowerPrecision(BUDGET, "bf16")),
}

# scheme → models, why they are refused; what is not named is lowered
NARROW = r"QMoE .* on CUDA: the inner width of its experts is (48|96), not a multiple of 64"
NO_GQA = "quantize-kv-cache has no effect here: flash-attention changed no node"
REFUSED: Mapping[str, Mapping[str, str]] = {
    "int4": dict.fromkeys(("mixtral", "qwen3-moe", "gpt-oss", "qwen2-moe", "phimoe", "granitemoe", "glm4-moe"), NARROW),
    "int8-kv": {
        **dict.fromkeys(("deepseek-v2", "deepseek-v3", "minicpm3", "youtu"), NO_GQA),  # keys wider than values
        **dict.fromkeys(("bloom", "mpt"), NO_GQA),  # scores biased by position
    },
}


def held(name: str, folder: Path) -> None:
    """Rehearse the schemes on a model, and hold what becomes of them against the table."""
    (zoo_classic if name in zoo_classic.ZOO else zoo).write(name, folder)
    checkpoint = Checkpoint.open(folder)
    model = trace(checkpoint)
    for each in SCHEMES:
        reason = REFUSED.get(each, {}).get(name)
        if reason is None:
            dry_run.run(model, SCHEMES[each], target=H100, spec=SPEC, checkpoint=checkpoint)
            continue
        with pytest.raises(UnsupportedError, match=reason) as caught:
            dry_run.run(model, SCHEMES[each], target=H100, spec=SPEC, checkpoint=checkpoint)
        assert caught.value.hint


@pytest.mark.parametrize("name", ["llama-tied", pytest.param("deepseek-v2", marks=[pytest.mark.slow])])
def test_two_architectures(name: str, tmp_path: Path) -> None:
    held(name, tmp_path)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", [*zoo.ZOO, *zoo_classic.ZOO])
def test_every_architecture(name: str, tmp_path: Path) -> None:
    held(name, tmp_path)


def test_the_shipped_recipe_runs_dry(sample_checkpoint: Path) -> None:
    recipe = Recipe.load(RECIPE)
    steps = recipe.instantiate(passes.ALL)
    checkpoint = Checkpoint.open(sample_checkpoint)
    model = trace(checkpoint)
    names = dict.fromkeys(checkpoint.tensors, Grid(4, 32, True))
    dry_run.run(
        model, steps, target=targets.load(recipe.target), spec=recipe.engine, checkpoint=checkpoint, calibrated=names
    )
    with pytest.raises(UnsupportedError, match="lower-precision") as caught:
        dry_run.run(
            model,
            [step for step in steps if step.name not in ("lower-precision", "quantize-weights")],
            target=H100,
            spec=recipe.engine,
            checkpoint=checkpoint,
        )
    assert "PagedAttention: no kernel with" in caught.value.message
