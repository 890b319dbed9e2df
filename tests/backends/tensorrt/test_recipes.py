"""The recipes for TensorRT: each is run dry for its devices, refused for the others, and built (slow)."""

from __future__ import annotations

from pathlib import Path

import onnx_ir as ir
import pytest
from click.testing import CliRunner
from ruamel.yaml import YAML

from llmforge import calibration, passes, targets
from llmforge.artifact import Artifact
from llmforge.backends.tensorrt.plan_cache import PlanRecord
from llmforge.base.errors import UnsupportedError
from llmforge.checkpoint import Checkpoint
from llmforge.cli import cli
from llmforge.compile import dry_run
from llmforge.ir import dialect
from llmforge.recipe import Recipe
from llmforge.trace import trace

pytest.importorskip("tensorrt_rtx")

FOLDER = Path(__file__).parents[3] / "recipes"
INT4, FP8, H200 = "llama-rtx4090-tensorrt", "llama-rtx4090-tensorrt-fp8", "h200-tensorrt"
CHAT, COST = "chat-h100-fp8", "cost-l4"
QUICK = (
    "calibration.samples=2",
    "passes.quantize-weights.method=rtn",
    "passes.quantize-weights.budget.kld_mean=0.1",
)

# recipe → targets that it is built for, and those that it is refused for, with the reason
BUILT = {
    INT4: ("a100-80", "a10g", "l4", "l40s", "rtx-4090", "rtx-5090", "rtx-pro-6000"),
    FP8: ("l4", "l40s", "rtx-4090", "rtx-5090", "rtx-pro-6000"),
    H200: ("h200", "h100-sxm", "b200"),
    CHAT: ("h100-sxm", "h100-pcie", "h200"),
    COST: ("l4", "a10g", "rtx-4090"),
}
REFUSED = {
    INT4: {"t4": "no int4 weights for Turing", "h200": "cannot load engines of tensorrt-rtx"},
    FP8: {"a10g": "does not compute in fp8", "t4": "does not compute in fp8"},
    H200: {"a100-80": "does not compute in fp8"},
    CHAT: {"a100-80": "does not compute in fp8"},
    COST: {"t4": "no int4 weights for Turing"},
}


@pytest.fixture(scope="module")
def checkpoint() -> Checkpoint:
    return Checkpoint.open(Recipe.load(FOLDER / f"{INT4}.yaml").checkpoint)


@pytest.fixture(scope="module")
def model(checkpoint: Checkpoint) -> ir.Model:
    return trace(checkpoint)


def run_dry(name: str, target: str, checkpoint: Checkpoint, model: ir.Model) -> None:
    recipe = Recipe.load(FOLDER / f"{name}.yaml", [f"target={target}"])
    steps = recipe.instantiate(passes.ALL)
    demands = [demand for step in steps for demand in step.demands()]
    linears = calibration.plan(checkpoint, demands, dialect.caches(model)) if demands else {}
    device = targets.load(target)
    dry_run.run(model, steps, target=device, spec=recipe.engine, checkpoint=checkpoint, calibrated=linears)


def test_every_recipe_for_tensorrt_is_here() -> None:
    recipes = {file.stem: Recipe.load(file) for file in FOLDER.glob("*.yaml")}
    assert {name for name, recipe in recipes.items() if "tensorrt" in recipe.engine.backend} == set(BUILT)


@pytest.mark.thorough
@pytest.mark.parametrize("name", BUILT)
def test_recipes_fit_their_devices(name: str, checkpoint: Checkpoint, model: ir.Model) -> None:
    for target in BUILT[name]:
        run_dry(name, target, checkpoint, model)
    for target, reason in REFUSED[name].items():
        with pytest.raises(UnsupportedError, match=reason) as caught:
            run_dry(name, target, checkpoint, model)
        assert caught.value.hint


def build(recipe: Path, out: Path, *settings: str) -> PlanRecord:
    """Build the sample checkpoint; gates stay undecided where no device measures. Return what the plan says it is."""
    options = [option for setting in settings for option in ("--set", setting)]
    result = CliRunner().invoke(cli, ["build", str(recipe), "--out", str(out), "--quiet", *options])
    assert result.exit_code == 4, result.output
    opened = Artifact.open(Path(result.stdout.splitlines()[-1]))
    opened.verify()
    record = PlanRecord.read(opened.path / "engine/plan.json")
    assert record.layers["ATTENTION_INPUT"] == 6
    assert record.layers["KV_CACHE_UPDATE"] == 12
    return record


@pytest.mark.slow
@pytest.mark.parametrize("target", ["t4", "a100-80", "a10g", "rtx-4090", "rtx-5090"])
def test_the_sample_becomes_a_plan_in_fp16(target: str, tmp_path: Path) -> None:
    recipe = YAML().load(FOLDER / f"{INT4}.yaml")
    recipe["checkpoint"] = str(FOLDER / recipe["checkpoint"])
    recipe["validation"]["quality"]["data"] = str(FOLDER / recipe["validation"]["quality"]["data"])
    recipe["passes"] = [each for each in recipe["passes"] if "quantize-weights" not in each]
    del recipe["calibration"]
    YAML().dump(recipe, tmp_path / "fp16.yaml")
    record = build(tmp_path / "fp16.yaml", tmp_path / "out", f"target={target}")
    assert record.source.sm == targets.load(target).sm
    assert "DEQUANTIZE" not in record.layers
    assert record.size_bytes > 13_000_000


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "target", "settings"),
    [
        *((INT4, target, QUICK) for target in ("a100-80", "a10g", "rtx-4090", "rtx-5090")),
        *((FP8, target, ()) for target in ("l40s", "rtx-5090")),
        (FP8, "t4", ("passes.quantize-channels.dtype=int8",)),
    ],
)
def test_recipes_become_plans(name: str, target: str, settings: tuple[str, ...], tmp_path: Path) -> None:
    record = build(FOLDER / f"{name}.yaml", tmp_path, *settings, f"target={target}")
    assert record.source.sm == targets.load(target).sm
    assert record.layers["DEQUANTIZE"] in (24, 25)
    assert record.size_bytes > 4_000_000
