"""What a recipe cannot do with an architecture is refused before a weight is read; what it can, is built."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from llmforge import calibration, passes, targets
from llmforge.backends.engines import BuildRequest
from llmforge.backends.onnxruntime import builder as engines
from llmforge.backends.onnxruntime import interop
from llmforge.base.errors import UnsupportedError
from llmforge.checkpoint import Checkpoint
from llmforge.checkpoint.text import TokenWindow
from llmforge.compile import dry_run
from llmforge.ir import dialect
from llmforge.quantization.statistics import KvRangeDemand, Statistics
from llmforge.recipe import EngineSpec, Recipe
from llmforge.recipes import OF_ENCODERS
from llmforge.rewrite.pass_base import Budget, Context, Pass
from llmforge.trace import trace
from llmforge.verification.verifier import Verifier

from ..models import graphs, zoo

TARGET = targets.load("cpu-avx2")
ENGINE = EngineSpec(max_context=64, threads=1)
FOLDER = Path(__file__).parents[2] / "recipes"
ALL = (
    "evidence", "fp32", "genai", "int4-rtn", "int8", "long-context", "moe", "offline-throughput", "optimum", "portable",
    "quickstart", "retrieval",
)  # fmt: skip
SLOTS = ("evidence", "genai", "long-context", "moe", "offline-throughput", "portable", "quickstart", "retrieval")

# type → recipe → why it is refused; recipes that are not named are not
LATENT = "it caches latents, and GroupQueryAttention reads keys and values"
REFUSED: Mapping[str, Mapping[str, str]] = {
    "llama": {},
    "llama-wide-heads-llama3-rope": {"optimum": "its caches would not fit"},
    "gpt-neox": {},
    "deepseek-v2": {
        **dict.fromkeys(SLOTS, LATENT),
        "optimum": "caches latents; ORTModelForCausalLM feeds caches of keys and values",
    },
    "qwen3-5": dict.fromkeys(("genai", "optimum", "portable"), "keeps a state of fixed size"),
    "mixtral": {"optimum": "its caches would not fit"},
}
DEFAULT = {"llama", "deepseek-v2", "qwen3-5"}  # the others are slow tests


def steps_of(recipe: str) -> tuple[Pass, ...]:
    """Make the passes of a shipped recipe, with budgets that random weights keep."""
    made = Recipe.load(FOLDER / f"{recipe}.yaml").instantiate(passes.ALL)
    loose = Budget(kld_mean=5.0)
    return tuple(dataclasses.replace(step, budget=loose) if hasattr(step, "budget") else step for step in made)


def run_dry(checkpoint: Checkpoint, model: Any, steps: tuple[Pass, ...]) -> None:
    demands = [demand for step in steps for demand in step.demands()]
    linears = calibration.plan(checkpoint, demands, dialect.caches(model)) if demands else {}
    dry_run.run(model, steps, target=TARGET, spec=ENGINE, checkpoint=checkpoint, calibrated=linears)


def open_unread(name: str, folder: Path) -> Checkpoint:
    """Write a checkpoint and take the bytes of its weights away: what reads them fails."""
    zoo.write(name, folder)
    checkpoint = Checkpoint.open(folder)
    for file in checkpoint.weight_files:
        size = file.stat().st_size
        header = min(entry.offset for entry in checkpoint.tensors.values())
        file.write_bytes(file.read_bytes()[:header])
        assert file.stat().st_size < size
    return checkpoint


def test_every_shipped_recipe_is_in_the_table() -> None:
    recipes = {file.stem: Recipe.load(file) for file in FOLDER.glob("*.yaml")}
    ours = {name: recipe for name, recipe in recipes.items() if recipe.engine.backend == "onnxruntime"}
    cpu = [name for name, recipe in ours.items() if targets.load(recipe.target).kind == "cpu"]
    cpu = [name for name in cpu if name not in OF_ENCODERS]
    assert sorted(cpu) == sorted(ALL)


@pytest.mark.thorough
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name in DEFAULT else [pytest.mark.slow]) for name in REFUSED]
)
def test_recipes_are_refused_without_reading_a_weight(name: str, tmp_path: Path) -> None:
    checkpoint = open_unread(name, tmp_path)
    model = trace(checkpoint)
    for recipe in ALL:
        if (reason := REFUSED[name].get(recipe)) is None:
            run_dry(checkpoint, model, steps_of(recipe))
            continue
        with pytest.raises(UnsupportedError) as caught:
            run_dry(checkpoint, model, steps_of(recipe))
        assert caught.value.exit_code == 6
        assert reason in caught.value.message
        assert caught.value.hint


def build(name: str, recipe: str, folder: Path, *, without: str = "") -> Statistics | None:
    """Take a checkpoint of the zoo through calibration, passes and their proofs, lowering and engine."""
    zoo.write(name, folder)
    checkpoint = Checkpoint.open(folder)
    model, steps = trace(checkpoint), tuple(step for step in steps_of(recipe) if step.name != without)
    run_dry(checkpoint, model, steps)
    rng = np.random.default_rng(0)
    texts = [rng.integers(3, zoo.VOCABULARY, 40) for _ in range(4)]
    demands = [demand for step in steps for demand in step.demands()]
    windows = [TokenWindow("random", ids) for ids in texts]
    caches = dialect.caches(model)
    statistics = calibration.calibrate(checkpoint, windows, demands, caches=caches) if demands else None
    verifier = Verifier(model, promises=graphs.PROMISES, folder=folder / "failed", texts=texts)
    for step in steps:
        verifier.check(step, model, step.run(model, Context(TARGET, statistics)))
    lowered, _ = engines.lower(model, TARGET)
    engine = engines.build(BuildRequest(lowered, folder / "engine", ENGINE, TARGET, [0], 0))
    interop.write(lowered, engine, checkpoint)
    return statistics


@pytest.mark.slow
def test_ranges_are_calibrated_where_a_layer_caches_keys_and_values(tmp_path: Path) -> None:
    statistics = build("qwen3-5", "portable", tmp_path, without="genai-interface")
    # layer 0 keeps a state, layer 1 attends
    assert statistics is not None
    assert sorted(statistics.kv) == [1]
    assert any(".layers.0." in name for name in statistics.linears)


def test_a_layer_that_caches_more_than_keys_and_values_is_refused(tmp_path: Path) -> None:
    zoo.write("llama", tmp_path)
    with pytest.raises(UnsupportedError, match="layer 1 caches conv besides them") as caught:
        calibration.plan(
            Checkpoint.open(tmp_path), [KvRangeDemand()], {0: {"key", "value"}, 1: {"key", "value", "conv"}}
        )
    assert caught.value.hint == "leave quantize-kv-cache out"


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("name", zoo.ZOO)
@pytest.mark.parametrize("recipe", ALL)
def test_what_is_not_refused_is_built(name: str, recipe: str, tmp_path: Path) -> None:
    """The whole table: no traceback, no late refusal."""
    checkpoint = open_unread(name, tmp_path / "plan")
    try:
        run_dry(checkpoint, trace(checkpoint), steps_of(recipe))
    except UnsupportedError:
        return
    build(name, recipe, tmp_path / "build")
