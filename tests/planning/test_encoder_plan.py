"""Plans of embedders and rerankers."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from llmforge import targets
from llmforge.base.errors import UnsupportedError, UsageError
from llmforge.checkpoint import Checkpoint
from llmforge.cli import cli
from llmforge.planning import encoder_plan
from llmforge.targets import SourcedFigure, Target

DATA = Path(__file__).resolve().parents[1] / "data"
EMBEDDER = DATA / "docs-embedder-1m"


def machine(target: Target) -> Target:
    """Give a CPU figures: 10 GB/s, 1 T/s, all of them reached."""
    figures = {"bandwidth_gbs": 10.0, "memory_gb": 1.0}
    made = {name: SourcedFigure(value=value, source="made up", verified=True) for name, value in figures.items()}
    rate = SourcedFigure(value=1.0, source="made up", verified=True)
    return target.model_copy(update={**made, "rates": {"fp32": rate}})


def test_the_sample_is_counted() -> None:
    folder, recipe, encoding = encoder_plan.encoding_at(EMBEDDER)
    assert recipe is None
    assert encoding is not None
    shape = encoder_plan.read(folder, encoding)
    opened = Checkpoint.open(EMBEDDER)
    tables = sum(entry.shape[0] * entry.shape[1] for name, entry in opened.tensors.items() if "_embeddings" in name)
    assert shape.tables == tables
    matrices = [entry.shape for name, entry in opened.tensors.items() if len(entry.shape) == 2 and "pooler" not in name]
    assert shape.products == sum(rows * columns for rows, columns in matrices) - tables
    assert shape.weight_bytes == 4 * shape.parameters
    assert shape.operations(3, 10) == 30 * (2 * shape.products + shape.layers * 4 * shape.hidden * 10)


def test_a_batch_takes_as_long_as_its_ceiling_says() -> None:
    folder, recipe, encoding = encoder_plan.encoding_at(EMBEDDER)
    assert encoding is not None
    plan = encoder_plan.answer(folder, encoding, recipe, ["local"], machine)
    assert plan.fits
    shape = plan.shape
    share = plan.target.share("bandwidth").value
    least = (shape.parameters - shape.tables) * 4 / (10e9 * share)
    for each in plan.times:
        compute = shape.operations(each.texts, each.tokens) / 1e12
        assert each.seconds >= max(least, compute) * 0.999
        assert each.bound == ("memory" if each.seconds == pytest.approx(least) else "compute")
    assert {each.tokens for each in plan.times} == {16, 128}  # its texts have no more than 128
    without = encoder_plan.answer(folder, encoding, recipe, ["cpu-avx2"])
    assert without.times == ()
    assert "no times: target cpu-avx2 has no figures" in encoder_plan.notes(without)[0]


def test_what_is_not_planned_is_refused() -> None:
    folder, recipe, encoding = encoder_plan.encoding_at(DATA / "docs-reranker-1m")
    assert encoding is not None
    with pytest.raises(UnsupportedError, match="is a reranker, and none runs on h200"):
        encoder_plan.answer(folder, encoding, recipe, ["h200"])
    with pytest.raises(UsageError, match="those are planned for one target"):
        encoder_plan.answer(folder, encoding, recipe, ["cpu-avx2", "h200"])


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("--batch", "3"),
        ("--calibration-workers", "2"),
        ("--dtype", "fp16"),
        ("--engine", "onnxruntime"),
        ("--plot", "plan.svg"),
        ("--price", "2"),
        ("--products", "int8"),
        ("--rate", "2/s"),
        ("--tp", "2"),
        ("--trace", "arrivals.jsonl"),
    ],
)
def test_an_option_of_language_models_is_refused_as_it_is_typed(option: str, value: str) -> None:
    refused = CliRunner().invoke(cli, ["plan", str(EMBEDDER), option, value])
    assert refused.exit_code == 2
    assert f"{option} is for language models" in " ".join(refused.output.split())


def test_a_recipe_is_planned_by_the_command() -> None:
    recipe = Path(__file__).resolve().parents[2] / "recipes" / "reranker.yaml"
    said = CliRunner().invoke(cli, ["plan", str(recipe), "--target", "cpu-avx2", "--json"])
    assert said.exit_code == 0, said.output
    made = json.loads(said.stdout)
    assert made["model"]["title"] == "a reranker"
    assert made["memory"]["needed"] == sum(made["memory"][name] for name in ("weights", "activations", "reserve"))
    assert targets.load("cpu-avx2").name == made["target"]
