"""Builds with adapters: merged ones are a part of the checkpoint, of the proofs, of the baseline and of the version."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from llmforge import native, passes
from llmforge.artifact import Artifact
from llmforge.base.errors import CheckpointError, RecipeError
from llmforge.checkpoint import Checkpoint
from llmforge.checkpoint.adapters import AdapterSource
from llmforge.compile import pipeline
from llmforge.compile.frontend import Frontend
from llmforge.diagnosis import reproducing
from llmforge.gates import records, verdict
from llmforge.recipe import Recipe
from llmforge.serving import load

from ..models.adapters import write_adapter, write_merged
from ..models.checkpoints import write_checkpoint

FUSED: list[Any] = ["fuse-norms", "pack-qkv", "pack-gate-up", "flash-attention"]
Write = Callable[..., Recipe]


@pytest.fixture
def recipe(tmp_path: Path, tiny_checkpoint: Path) -> Write:
    def write(**sections: Any) -> Recipe:
        text = "\n".join(json.dumps({"id": str(i), "text": f"text {i} of graphs and gates " * 4}) for i in range(10))
        (tmp_path / "evaluation.jsonl").write_text(text)
        plain = {
            "schema": 1,
            "name": "tiny",
            "checkpoint": str(tiny_checkpoint),
            "target": "local",
            "engine": {"max_context": 128, "max_batch": 4, "threads": 1},
            "passes": FUSED,
            **sections,
        }
        (tmp_path / "recipe.yaml").write_text(json.dumps(plain))
        return Recipe.load(tmp_path / "recipe.yaml")

    return write


def logits(artifact: Path, ids: list[int]) -> np.ndarray[Any, Any]:
    runner = load(artifact, threads=1)
    return runner.logits(ids)


@pytest.mark.thorough
def test_a_merged_adapter_is_a_part_of_the_build(recipe: Write, tmp_path: Path, tiny_checkpoint: Path) -> None:
    adapter = write_adapter(tmp_path / "style", tiny_checkpoint)
    named = [{"name": "style", "path": "style"}]
    quality = {"quality": {"data": "evaluation.jsonl", "context": 64}}
    built = pipeline.build(recipe(adapters=named, validation=quality), tmp_path / "out")
    opened = Artifact.open(built.path)
    opened.verify()
    [written] = opened.manifest.recipe["adapters"]
    assert written["path"] == {"name": "style", "sha256": AdapterSource("style", adapter).digest()}
    report = records.read(opened)
    assert any(note.startswith("adapter style merged: 14 modules") for note in report.notes)
    assert report.quality is not None
    assert report.quality.kld_mean.value < 1e-6  # the baseline has the adapter, too

    other = write_merged(tmp_path / "merged", tiny_checkpoint, adapter)
    plain = pipeline.build(recipe(checkpoint=str(other)), tmp_path / "out", measure=False)
    ids = [5, 40, 77, 130, 9]
    ours, theirs = logits(built.path, ids), logits(plain.path, ids)
    np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-5)
    assert opened.manifest.checkpoint != Artifact.open(plain.path).manifest.checkpoint
    again = reproducing.recorded(built.path, None, [], tmp_path)  # this machine remembers where they lie
    assert [each.name for each in again.adapters] == ["style"]


@pytest.mark.thorough
def test_the_process_that_traces_merges_as_well(tmp_path: Path, tiny_checkpoint: Path) -> None:
    source = AdapterSource("style", write_adapter(tmp_path / "style", tiny_checkpoint))
    with Frontend() as frontend:
        files = frontend.trace((tiny_checkpoint, (source,), None))
        assert frontend.prove((tiny_checkpoint, (source,), None), files, 1).startswith(
            "trace: logits match transformers"
        )


def test_an_adapter_of_another_base_is_refused_before_anything_is_read(
    recipe: Write, tmp_path: Path, tiny_checkpoint: Path
) -> None:
    write_checkpoint(tmp_path / "wide", hidden_size=128)
    write_adapter(tmp_path / "style", tmp_path / "wide", targets=("q_proj",))
    with pytest.raises(CheckpointError, match=r"adapter style: .*q_proj: its product is"):
        pipeline.build(recipe(adapters=[{"name": "style", "path": "style"}]), tmp_path / "out")
    apart = [{"name": "style", "path": "style", "mode": "apart"}]
    with pytest.raises(CheckpointError, match=r"adapter style: .*q_proj: its product is"):
        pipeline.build(recipe(adapters=apart, passes=[*FUSED, "add-adapters"]), tmp_path / "out")
    assert Checkpoint.open(tiny_checkpoint).merge is None


@pytest.mark.parametrize(
    ("adapters", "words"),
    [
        ([{"name": "a", "path": "x"}, {"name": "a", "path": "y"}], r"adapters\.1\.name: there are two adapters a"),
        ([{"name": "a b", "path": "x"}], r"adapters\.0\.name"),
        ([{"name": "a", "path": "x", "weight": 1e9}], r"adapters\.0\.weight"),
        ([{"name": "a", "path": "x", "mode": "both"}], r"adapters\.0\.mode"),
    ],
)
def test_recipes_that_are_wrong_say_where(recipe: Write, adapters: list[dict[str, Any]], words: str) -> None:
    with pytest.raises(RecipeError, match=words):
        recipe(adapters=adapters)


def test_a_recipe_without_adapters_keeps_its_version(recipe: Write) -> None:
    assert "adapters" not in recipe().resolved()


@pytest.mark.thorough
def test_adapters_kept_apart_are_chosen_by_requests(recipe: Write, tmp_path: Path, tiny_checkpoint: Path) -> None:
    for seed, name in enumerate(("one", "two")):
        write_adapter(tmp_path / name, tiny_checkpoint, seed=seed, rank=4 + seed)
    named = [{"name": name, "path": name, "mode": "apart"} for name in ("one", "two")]
    loose = {"budget": {"kld_mean": 5.0}}
    quantized: list[Any] = [{"quantize-weights": {"bits": 8, "method": "rtn", "block_size": 32, **loose}}]
    if native.library() is not None:
        quantized.append({"cpu-kernels": loose})
    quality = {"quality": {"data": "evaluation.jsonl", "context": 64}}
    steps = [*FUSED, "add-adapters", *quantized]
    gates = {"adapter.one.kld_mean": {"max": 0.05}, "adapter.two.top1_agreement": {"min": 0.5}}
    wanted = recipe(adapters=named, passes=steps, validation=quality, gates=gates)
    built = pipeline.build(wanted, tmp_path / "out")
    opened = Artifact.open(built.path)
    report = records.read(opened)
    assert [(each.adapter, each.quality.documents) for each in report.adapters] == [("one", 10), ("two", 10)]
    assert all(0 < each.quality.kld_mean.value < 0.01 for each in report.adapters)  # int8, and no more
    assert {gate.metric: gate.verdict.value for gate in report.gates} == dict.fromkeys(gates, "pass")
    page = (built.path / "report" / "report.html").read_text(encoding="utf-8")
    assert "Quality with each adapter" in page
    assert '<th scope="row">two</th>' in page
    assert "\n| two | 10 |" in (built.path / "report" / "report.md").read_text(encoding="utf-8")
    assert {gate.metric for gate in verdict.recompute(opened)} == set(gates)
    lie = report.adapters[0].quality.model_copy(update={"kld_mean": report.adapters[1].quality.kld_mean})
    told = (report.adapters[0].model_copy(update={"quality": lie}), report.adapters[1])
    assert list(verdict._figures(report.model_copy(update={"adapters": told}))) == ["adapter one: kld_mean"]
    if native.library() is not None:
        whats = [each.what for each in report.passes[-1].rewritten]
        assert sum(what.startswith("LowRankAdapter of rank 5, 2 adapters") for what in whats) == 8
    [proven] = [note for note in report.proven if note.startswith("adapters:")]
    assert "rows with one, two, and rows beside them with none" in proven
    runner = load(built.path, threads=1)
    assert runner.config.adapters == ("one", "two")
    ids = [5, 40, 77, 130, 9]
    rows = [runner.logits(ids, adapter=name) for name in ("", "one", "two")]
    for number, name in enumerate(("one", "two"), 1):
        merged = write_merged(tmp_path / f"merged-{name}", tiny_checkpoint, tmp_path / name)
        plain = pipeline.build(recipe(checkpoint=str(merged)), tmp_path / "out", measure=False)
        theirs = logits(plain.path, ids)
        near = np.abs(rows[number] - theirs).max()
        assert near < 0.1 * np.abs(rows[0] - theirs).max()  # int8 weights beside fp32 ones


@pytest.mark.parametrize(
    ("gate", "quality", "words"),
    [
        ("adapter.b.kld_mean", {}, r"adapter\.b\.kld_mean: it would not be measured: a are kept apart"),
        ("adapter.a.kld_mean", {"adapter_tokens": 0}, r"adapter\.a\.kld_mean: .*adapter_tokens is 0"),
        ("adapter.a.kld_p99", {}, r"gates"),
        ("adapter.a.perplexity", {}, r"gates"),
    ],
)
def test_gates_of_adapters_that_are_not_measured(recipe: Write, gate: str, quality: dict[str, Any], words: str) -> None:
    validation = {"quality": {"data": "evaluation.jsonl", "context": 64, **quality}}
    apart = [{"name": "a", "path": "x", "mode": "apart"}]
    with pytest.raises(RecipeError, match=words):
        recipe(adapters=apart, validation=validation, gates={gate: {"max": 1}})


@pytest.mark.parametrize(
    ("adapters", "steps", "words"),
    [
        ([{"name": "a", "path": "x", "mode": "apart"}], FUSED, r"adapters\.0: it is kept apart, and no pass adds it"),
        ([], [*FUSED, "add-adapters"], r"passes\.add-adapters: the recipe has no adapters with `mode: apart`"),
        (
            [{"name": "a", "path": "x", "mode": "apart"}],
            [*FUSED, "add-adapters", "genai-interface"],
            r"genai-interface: other runtimes cannot choose an adapter",
        ),
    ],
)
def test_adapters_and_passes_belong_together(
    recipe: Write, adapters: list[dict[str, Any]], steps: list[Any], words: str
) -> None:
    with pytest.raises(RecipeError, match=words):
        recipe(adapters=adapters, passes=steps).instantiate(passes.ALL)
