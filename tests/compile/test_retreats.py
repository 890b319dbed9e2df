"""Layers that retreat to more bits where their pass exceeds its budget."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from llmforge.artifact import Artifact
from llmforge.cli import cli
from llmforge.compile import retreats
from llmforge.compile.retreats import RetreatingLayer, RetreatingWeight
from llmforge.gates import records
from llmforge.gates.records import PassRecord, VerificationRecord
from llmforge.quantization.grid import Grid
from llmforge.rewrite.pass_base import Numerics, Retreat

from ..samples import tiny_recipes


@pytest.fixture
def recipe_file(tmp_path: Path, tiny_checkpoint: Path) -> Path:
    weights = {"bits": 4, "block_size": 32, "scales": "int8", "embedding_bits": 8, "budget": {"kld_mean": 0.5}}
    return tiny_recipes.write(tmp_path, tiny_checkpoint, [{"quantize-weights": weights}], {"kld_mean": {"max": 1}})


def build(recipe: Path, out: Path, **options: Any) -> Result:
    words = ["build", str(recipe), "--out", str(out)]
    for name, value in options.items():
        words += ["--set", f"passes.quantize-weights.{name}={json.dumps(value)}"]
    return CliRunner().invoke(cli, words)


def opened(result: Result) -> tuple[Path, PassRecord]:
    """Return the artifact that was built, and the record of the pass."""
    assert result.exit_code == 0, result.output
    path = Path(result.stdout.splitlines()[-1])
    return path, records.read(Artifact.open(path)).passes[-1]


@pytest.mark.thorough
@pytest.mark.usefixtures("shared_build_cache")
def test_layers_retreat_and_everything_names_them(recipe_file: Path, tmp_path: Path) -> None:
    out, tight = tmp_path / "out", {"kld_mean": 0.0025}
    plain, before = opened(build(recipe_file, out))
    ended = build(recipe_file, out, budget=tight)
    assert ended.exit_code == 7, "without the key a build ends"
    assert "to retreat" not in ended.stderr
    made = build(recipe_file, out, budget=tight, retreat={"bits": [4, 5, 6, 8], "max_bytes": 10**6})
    path, done = opened(made)
    found = done.verification
    assert found.kld_mean is not None
    assert found.kld_mean <= 0.0025
    assert done.weight_bytes_after > before.weight_bytes_after
    first = [each for each in done.retreats if each.round == 1]
    assert {each.before for each in first if each.layer.startswith("layer")} == {4}
    assert all(each.after > each.before and each.kld_mean > each.budget == 0.0025 for each in done.retreats)
    assert first == sorted(first, key=lambda each: -(each.share or 0))

    said = records.retreated([done])
    assert said is not None
    assert "retreated to" in said
    [verdict] = [line for line in made.stdout.splitlines() if line.startswith(" PASS ")]
    assert said in verdict
    page, text = (path / "report" / f"report.{kind}" for kind in ("html", "md"))
    assert all(said in file.read_text() for file in (page, text))
    assert all(f"{each.layer} (" in file.read_text() for each in done.retreats for file in (page, text))
    told = CliRunner().invoke(cli, ["diff", str(plain), str(path)]).stdout
    assert [line for line in told.splitlines() if line.startswith("B: ")] == [
        f"B: {each}" for each in done.retreat_lines
    ]
    assert "recipe: passes.quantize-weights.layer_bits.model.layers." in told
    assert said in CliRunner().invoke(cli, ["gate", str(path)]).stdout


@pytest.mark.slow
def test_what_has_retreated_is_reproduced(recipe_file: Path, tmp_path: Path) -> None:
    """By the recipe that it holds, which has the bits, and by the one that it was built by."""
    wanted = {"bits": [4, 5, 6, 8], "max_bytes": 10**6}
    path, _ = opened(build(recipe_file, tmp_path / "out", budget={"kld_mean": 0.0025}, retreat=wanted))
    given = [
        "passes.quantize-weights.budget.kld_mean=0.0025",
        'passes.quantize-weights.retreat={"bits": [4, 5, 6, 8], "max_bytes": 1000000}',
    ]
    recipe = ["--recipe", str(recipe_file), *(word for each in given for word in ("--set", each))]
    for way in ([], recipe):
        again = CliRunner().invoke(cli, ["reproduce", str(path), *way])
        assert again.exit_code == 0, again.output
        assert again.stdout.startswith("equal: content digest")


@pytest.mark.usefixtures("shared_build_cache")
@pytest.mark.thorough
def test_a_build_ends_where_the_size_forbids_to_retreat(recipe_file: Path, tmp_path: Path) -> None:
    tight, small = {"kld_mean": 0.0025}, {"bits": [5, 6, 8], "max_bytes": 60_000}
    ended = build(recipe_file, tmp_path / "out", budget=tight, retreat=small)
    assert ended.exit_code == 7, ended.output
    said = next(line for line in ended.stderr.splitlines() if line.startswith("pass quantize-weights: mean KLD is"))
    assert said.endswith("; no layer retreated; retreat.max_bytes, 60.0 kB, allows no more bits")


@pytest.mark.thorough
def test_rounds_end(recipe_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What was predicted may not come: the message says how far layers got."""
    monkeypatch.setattr(retreats, "LEFT_BY_A_BIT", 1e-3)
    monkeypatch.setattr(retreats, "AIMS", (0.85,))
    wanted = {"bits": [5], "max_bytes": 10**6}
    ended = build(recipe_file, tmp_path / "out", budget={"kld_mean": 0.0005}, retreat=wanted, embedding_bits=4)
    assert ended.exit_code == 7, ended.output
    said = next(line for line in ended.stderr.splitlines() if line.startswith("pass quantize-weights: mean KLD is"))
    assert said.endswith("retreated to 5 bits; no more than 1 rounds are tried"), said


def layer(name: str, lost: float, bits: int = 4, rows: int = 64) -> RetreatingLayer:
    return RetreatingLayer(name, [RetreatingWeight((name,), rows, 64, Grid(bits, 32, False, "int8"))], lost, lost)


def done_at(kld: float, budget: float) -> PassRecord:
    verification = VerificationRecord(
        numerics=Numerics.LOSSY, largest_difference=1.0, allowed=None, kld_mean=kld, budget=budget, probes=()
    )
    return PassRecord(
        name="quantize-weights",
        options={},
        numerics=Numerics.LOSSY,
        rewritten=(),
        skipped=(),
        nodes_before=1,
        nodes_after=1,
        weight_bytes_before=1,
        weight_bytes_after=1,
        seconds=0.0,
        verification=verification,
    )


def test_what_gains_most_for_its_bytes_goes_first() -> None:
    layers = [layer("a", 0.04), layer("b", 0.05), layer("c", 0.06, rows=256)]
    wanted = Retreat(bits=(5, 6, 8), max_bytes=10**6)
    chosen = retreats.choose(layers, done_at(0.15, 0.14), wanted, 10**5)
    assert [(each.name, each.bits) for each in chosen.layers] == [("b", 5)]
    layers = [layer("a", 0.04), layer("b", 0.05), layer("c", 0.06, rows=256)]
    chosen = retreats.choose(layers, done_at(0.15, 0.05), wanted, 10**5)
    assert {each.name: each.bits for each in chosen.layers} == {"a": 5, "b": 5, "c": 5}
    assert chosen.predicted == pytest.approx(0.15 / 4)
    layers = [layer("a", 0.04), layer("b", 0.05), layer("c", 0.06, rows=256)]
    chosen = retreats.choose(layers, done_at(0.15, 0.05), wanted, 10**5, comes_true=0.8)
    assert sum(each.bits for each in chosen.layers) > 15, "where a round gained less than was predicted, more is taken"


def test_layers_grow_no_further_than_they_may() -> None:
    grown = layer("a", 0.1)
    more = grown.bytes_at(5) - grown.bytes_at(4)
    allowed = Retreat(bits=(5, 6), max_bytes=1000 + more)
    assert [each.bits for each in retreats.choose([grown], done_at(0.1, 0.04), allowed, 1000).layers] == [5]
    forbidden = retreats.choose([layer("a", 0.1)], done_at(0.1, 0.04), allowed, 1001)
    assert not forbidden.layers
    assert "allows no more bits" in forbidden.why_not
    least = retreats.choose([layer("a", 0.1)], done_at(0.1, 0.001), allowed, 1000)
    assert least.why_not == "with all that retreat.max_bytes, 1.51 kB, allows, 0.025 nats are predicted"


def test_weights_of_a_layer_that_have_more_bits_keep_them() -> None:
    few, many = (
        RetreatingWeight((f"model.layers.3.{name}",), 64, 64, Grid(bits, 32, False, "int8"))
        for name, bits in (("few", 4), ("many", 8))
    )
    mixed = RetreatingLayer("layer 3", [few, many], 0.1, 0.5)
    mixed.bits = 5
    assert mixed.layer_bits() == {"model.layers.3.few": 5}
    mixed.bits = 8
    assert mixed.layer_bits() == {"model.layers.3.*": 8}
    experts = RetreatingWeight(("e",), 64, 64, Grid(4, 32, True, "fp16"), of_experts=True)
    assert RetreatingLayer("x", [few, experts], 0.1, None).next_bits(Retreat(bits=(5, 6, 8), max_bytes=1)) == 8
