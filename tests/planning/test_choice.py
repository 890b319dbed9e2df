"""Formats and limits that `init` chooses by what a probe measured."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pytest
import yaml

from llmforge import passes, targets
from llmforge.backends import BackendName
from llmforge.planning import choice, starting
from llmforge.planning.choice import Probed, ProbedDrafts, Tried
from llmforge.quantization.costs import FormatCost, ModelFormats, ProbedCosts
from llmforge.recipe import Recipe
from llmforge.rewrite import weight_proposals
from llmforge.rewrite.traits import Goal

from ..models.shapes import PUBLIC
from .test_starting import measured, options

SIZES = {4: 66e6, 5: 78e6, 6: 89e6, 8: 113e6}
SMOLLM2 = {4: 0.36, 5: 0.073, 6: 0.026, 8: 0.0019}  # KLD of bits, rounded to nearest


def recipe(
    folder: Path,
    klds: dict[int, float] | str,
    goal: Goal = "latency",
    shape: str = "smollm2-135m",
    backend: BackendName | None = None,
    tried: Tried = choice.UNTRIED,
    runs_by_layer: bool = True,
    drafts: ProbedDrafts | None = None,
) -> Recipe:
    def probe(formats: Sequence[ModelFormats]) -> Probed:
        if isinstance(klds, str):
            return Probed(why=klds, runs_by_layer=runs_by_layer)
        of = tuple(FormatCost(each, klds[each.linears.bits], int(SIZES[each.linears.bits])) for each in formats)
        return Probed(ProbedCosts(1024, 134_515_008, of, cache=0.0013, activations=0.0027), drafts=drafts)

    config = PUBLIC["llama-3.1-8b"]
    if shape == "smollm2-135m":
        sizes = {"hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30, "num_attention_heads": 9}
        config = {**config, **sizes, "num_key_value_heads": 3, "vocab_size": 49152, "tie_word_embeddings": True}
    (folder / "checkpoint").mkdir(exist_ok=True)
    (folder / "checkpoint" / "config.json").write_text(json.dumps(config))
    given = {"checkpoint": "checkpoint", "target": "cpu-avx2", "calibration": "a.jsonl", "evaluation": "b.jsonl"}
    target, place = measured(targets.load("cpu-avx2")), folder / "checkpoint"
    made = starting.write(place, target, goal, name="m", given=given, backend=backend, probe=probe, tried=tried)
    (folder / "recipe.yaml").write_text(made.yaml)
    found = Recipe.load(folder / "recipe.yaml")
    found.instantiate(passes.ALL)
    return found


def weights(found: Recipe) -> tuple[object, object]:
    said = options(found, "quantize-weights")
    return said["bits"], said["method"]


def test_the_smallest_format_that_keeps_the_quality(tmp_path: Path) -> None:
    """Five bits lose too much; to calibrate takes too long, but where size is the goal."""
    assert weights(recipe(tmp_path, SMOLLM2)) == (6, "importance")
    assert weights(recipe(tmp_path, {**SMOLLM2, 5: 0.01})) == (5, "importance")
    assert weights(recipe(tmp_path, {**SMOLLM2, 6: 0.2})) == (8, "rtn")
    assert weights(recipe(tmp_path, dict.fromkeys(SIZES, 1.0) | {8: 0.5})) == (8, "rtn")
    assert weights(recipe(tmp_path, SMOLLM2, "size")) == (5, "gptq")
    assert weights(recipe(tmp_path, SMOLLM2, "quality")) == (8, "rtn")
    assert weights(recipe(tmp_path, "no time")) == (6, "importance")


def test_short_calibrations_are_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choice, "CALIBRATION_S", 1000.0)
    assert weights(recipe(tmp_path, {**SMOLLM2, 4: 0.05})) == (4, "gptq")
    assert weights(recipe(tmp_path, {**SMOLLM2, 5: 0.05})) == (5, "gptq")


def test_layers_may_retreat_up_to_the_size_of_the_next_format(tmp_path: Path) -> None:
    found = options(recipe(tmp_path, SMOLLM2), "quantize-weights")
    assert found["retreat"] == {"bits": [8], "max_bytes": SIZES[8]}
    found = options(recipe(tmp_path, {**SMOLLM2, 5: 0.01}), "quantize-weights")
    assert found["retreat"] == {"bits": [6, 8], "max_bytes": SIZES[6]}
    assert "retreat" not in options(recipe(tmp_path, SMOLLM2, "quality"), "quantize-weights"), "it has most bits"
    unmeasured = options(recipe(tmp_path, "no time"), "quantize-weights")
    assert unmeasured["retreat"]["max_bytes"] == pytest.approx(143e6, rel=0.05), "as a plan predicts it"
    assert "# retreat: where the weights exceed their budget" in (tmp_path / "recipe.yaml").read_text()
    exported = options(recipe(tmp_path, {**SMOLLM2, 4: 0.04}, backend="compressed-tensors"), "quantize-weights")
    assert "retreat" not in exported


def test_limits_stand_above_what_is_predicted(tmp_path: Path) -> None:
    found = recipe(tmp_path, SMOLLM2)
    budgets = {step.name: step.options["budget"]["kld_mean"] for step in found.passes if "budget" in step.options}
    assert budgets == {
        "quantize-weights": pytest.approx(0.037),  # 2 · (.6 · .026 + .0027)
        "quantize-kv-cache": pytest.approx(0.014),  # 2 · (.0013 + 2 · .0027)
        "cpu-kernels": pytest.approx(0.011),  # 2 · 2 · .0027
    }
    assert {gate: limit.max for gate, limit in found.gates.items()} == {
        "kld_mean": pytest.approx(0.04),
        "perplexity_ratio": pytest.approx(1.04),
    }
    text = (tmp_path / "recipe.yaml").read_text()
    assert "# Measured, KLD on 1,024 tokens of weights rounded to nearest: 5 bits 0.073, 6 bits 0.026, 8 bits" in text
    assert "# method: importance weighs errors by what layers read, which leaves 0.6 of that or less." in text
    assert "Budgets and gates stand at 2 times what that predicts" in text
    assert f"{SIZES[6] / 1e6:.1f} MB of weights" in text, "as counted, where types of a file are others than asked for"
    calibration = found.calibration
    assert calibration is not None
    assert (calibration.samples, calibration.length) == (2, 512), "read once, forwards: few tokens do"


def test_a_recipe_says_why_nothing_was_measured(tmp_path: Path) -> None:
    recipe(tmp_path, "8 billion parameters take too long", shape="8b")
    text = (tmp_path / "recipe.yaml").read_text()
    assert "# What formats cost this model was not measured: 8 billion parameters take too long." in text


def test_what_a_trial_found_idle_is_left_out_and_said(tmp_path: Path) -> None:
    why = "quantize-kv-cache has no effect here: flash-attention changed no node"
    found = recipe(tmp_path, SMOLLM2, tried=Tried({"quantize-kv-cache": why}))
    names = [step.name for step in found.passes]
    assert "quantize-kv-cache" not in names
    assert "cpu-kernels" in names
    assert f"  # left out: {why}\n" in (tmp_path / "recipe.yaml").read_text()
    assert found.gates["kld_mean"].max == pytest.approx(0.037)  # 2 · (.6 · .026 + .0027): less than with the cache


def test_a_model_that_cannot_be_calibrated_is_rounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choice, "CALIBRATION_S", 1000.0)
    assert weights(recipe(tmp_path, "its layers share a state")) == (4, "gptq")
    assert weights(recipe(tmp_path, "its layers share a state", runs_by_layer=False)) == (6, "rtn")
    assert "measured, and nothing is calibrated: its layers share" in (tmp_path / "recipe.yaml").read_text()
    assert weights(recipe(tmp_path, SMOLLM2, "size", tried=Tried(uncalibrated="two lists"))) == (5, "rtn")
    assert "# Nothing is calibrated: two lists.\n" in (tmp_path / "recipe.yaml").read_text()


def test_what_others_load_keeps_its_formats(tmp_path: Path) -> None:
    """4 bits where they keep the quality by what was measured, else 8."""
    assert weights(recipe(tmp_path, {**SMOLLM2, 4: 0.04}, backend="compressed-tensors")) == (4, "gptq")
    assert weights(recipe(tmp_path, SMOLLM2, backend="compressed-tensors")) == (8, "rtn")


def test_gguf_files_have_their_own_types_where_the_kernels_that_prove_them_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = recipe(tmp_path, SMOLLM2, backend="gguf")
    assert weights(found) == (6, "importance")
    step = options(found, "quantize-weights")
    assert (step["codes"], step["embedding_bits"], step["retreat"]["bits"]) == ("gguf", 6, [8])
    assert weights(recipe(tmp_path, {**SMOLLM2, 4: 0.04}, "size", backend="gguf")) == (4, "gptq")
    monkeypatch.setattr(starting, "library", lambda: None)
    without = options(recipe(tmp_path, SMOLLM2, backend="gguf"), "quantize-weights")
    assert "codes" not in without
    assert without["scales"] == "fp16"


def test_without_kernels_formats_are_those_of_onnxruntime(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(starting, "library", lambda: None)
    found = recipe(tmp_path, SMOLLM2)
    assert weights(found) == (8, "rtn")
    assert "scales" not in options(found, "quantize-weights")
    assert options(found, "cpu-kernels")["fallback"] == "onnxruntime"
    assert "granularity" not in options(found, "quantize-kv-cache")


def test_every_format_that_is_proposed_is_one_that_its_pass_writes() -> None:
    """The grids that a probe measures are those of the options beside them."""
    from llmforge.backends import BACKENDS
    from llmforge.passes.quantize_weights import QuantizeWeights
    from llmforge.rewrite.traits import Deployment

    on_gpus = (("t4", "onnxruntime"), ("h200", "gguf"), ("l4", "tensorrt"))
    for target, backend in (("cpu-avx2", "onnxruntime"), ("cpu-avx2", "gguf"), *on_gpus):
        for own in (True, False):
            there = Deployment(targets.load(target), BACKENDS[backend], "fp32", own_kernels=own)
            for each in weight_proposals.of_weights("quantize-weights", there):
                read = yaml.safe_load("{" + each.options.replace("{budget}", "budget: {kld_mean: 1.0}") + "}")
                step = QuantizeWeights(**read)
                assert each.formats == ModelFormats(step.grid, step.tables)


def test_limits_have_two_digits_and_stand_above() -> None:
    assert choice.limit(0.0287) == 0.058
    assert choice.limit(0.0055) == 0.011
    assert choice.limit(1e-7) == 0.002
    assert choice.limit(0.0305) == 0.061


def test_drafts_are_proposed_where_they_pay(tmp_path: Path) -> None:
    """A step that verifies a draft takes some times as long as one of a token: few repetitions do not pay."""
    edits, prose = ProbedDrafts(tokens=600, steps=100, drafted=90), ProbedDrafts(tokens=1200, steps=1000, drafted=300)
    assert edits.gain > 2
    assert prose.gain < 1
    assert recipe(tmp_path, SMOLLM2, drafts=edits).serving.speculation == "prompt-lookup"
    text = (tmp_path / "recipe.yaml").read_text()
    assert f"{edits.gain:.1f} times the tokens a second (6.00 tokens a step" in text
    assert recipe(tmp_path, SMOLLM2, drafts=prose).serving.speculation is None
    text = (tmp_path / "recipe.yaml").read_text()
    assert "# No `serving: {speculation: prompt-lookup}`: by repetitions in the calibration text 0." in text
    assert "(1.20 tokens a step" in text
    assert recipe(tmp_path, SMOLLM2, "throughput", drafts=edits).serving.speculation is None
    assert recipe(tmp_path, SMOLLM2).serving.speculation is None
    assert "speculation" not in (tmp_path / "recipe.yaml").read_text()
