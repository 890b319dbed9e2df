"""Who drafts for an engine: what its options say, and else what its artifact says."""

from __future__ import annotations

import dataclasses
import shutil

import pytest
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

from llmforge import passes
from llmforge.artifact import Artifact
from llmforge.base.errors import InputError, UnsupportedError, UsageError
from llmforge.compile.drafts import Draft, built, recipe_of
from llmforge.recipe import Recipe, ValidationSpec
from llmforge.runtime.config import DRAFT_FOLDER, FILE, RuntimeConfig, SpeculationFacts
from llmforge.serving import Engine, EngineOptions, Request, Sampling, load
from llmforge.serving.drafting import speculation_of
from llmforge.serving.speculation import DraftModel, PromptLookup

from ..models.small_engines import Received, prompt, small_runner

MANY = Sampling(max_tokens=40, ignore_eos=True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory, sample_checkpoint):
    """Give the folder of an engine that drafts by itself: the draft is the same model."""
    folder = tmp_path_factory.mktemp("drafting")
    small_runner(folder / "engine", sample_checkpoint)
    (folder / "tokenizer").mkdir()
    shutil.copy(sample_checkpoint / "tokenizer.json", folder / "tokenizer")
    shutil.copytree(folder / "engine", folder / "draft")
    shutil.move(folder / "draft", folder / "engine" / DRAFT_FOLDER)
    return folder


def loaded(folder, facts: SpeculationFacts | None):
    """Load the engine with what its builder says of speculation."""
    file = folder / "engine" / FILE
    file.write_text(dataclasses.replace(RuntimeConfig.read(file), speculation=facts).to_json())
    return load(folder)


@pytest.mark.parametrize("method", ["prompt-lookup", "draft"])
def test_an_artifact_says_who_drafts(folder, method):
    plain = loaded(folder, None)
    assert plain.draft is None
    assert speculation_of(plain, 1) is None
    text = prompt(6) * 3
    expected = [chunk.token_id for chunk in plain.generate(text, MANY)]
    runner = loaded(folder, SpeculationFacts(method, 4))
    made = speculation_of(runner, 1)
    assert made is not None
    assert made.max_tokens == 4
    assert isinstance(made.proposer, DraftModel if method == "draft" else PromptLookup)
    chunks = list(runner.generate(text, MANY))
    assert [chunk.token_id for chunk in chunks] == expected
    if method == "draft":
        assert chunks[-1].usage.drafted_tokens > 0
    with Engine(runner) as engine:
        received = Received()
        engine.submit(Request(text, MANY), received.receive)
        assert received.wait().tokens == expected[:-1]
    stats = engine.stats()
    assert (stats.accepted_length is None) == (stats.drafted_tokens == 0)
    if method == "draft":  # the same model: every draft stands
        assert stats.accepted_tokens == stats.drafted_tokens > 0
        assert stats.accepted_length > 2


def test_options_go_before_the_artifact(folder):
    runner = loaded(folder, SpeculationFacts("draft", 7))
    assert speculation_of(runner, 1, "off") is None
    assert isinstance(speculation_of(runner, 1, "prompt-lookup").proposer, PromptLookup)
    with Engine(runner, EngineOptions(speculation="off")) as engine:
        engine.submit(Request(prompt(6) * 3, MANY), (received := Received()).receive)
        received.wait()
    assert engine.stats().drafted_tokens == 0
    plain = loaded(folder, SpeculationFacts("prompt-lookup", 7))
    with pytest.raises(UsageError, match="speculation is 'draft' and there is no draft artifact"):
        speculation_of(plain, 1, "draft")


@pytest.mark.parametrize("most", [0, 8, -1])
def test_lengths_of_drafts_that_no_kernel_takes_are_refused(folder, tmp_path, most):
    config = dataclasses.replace(RuntimeConfig.read(folder / "engine" / FILE), speculation=None)
    (tmp_path / FILE).write_text(dataclasses.replace(config, speculation=SpeculationFacts("draft", most)).to_json())
    with pytest.raises(InputError, match=f"speculation.max_tokens is {most}; expected 1 to 7"):
        RuntimeConfig.read(tmp_path / FILE)
    assert "speculation" not in config.to_json(), "versions of engines without one stay"


def test_a_draft_of_another_vocabulary_is_refused(tmp_path):
    for name in ("draft", "staging"):
        (tmp_path / name / "tokenizer").mkdir(parents=True)
        (tmp_path / name / "engine").mkdir()
        Tokenizer(WordLevel({name: 0}, name)).save(str(tmp_path / name / "tokenizer" / "tokenizer.json"))
    with pytest.raises(InputError, match="the draft has a different vocabulary"):
        Draft(tmp_path / "draft", "").copy_into(tmp_path / "staging")
    assert not (tmp_path / "staging" / "engine" / DRAFT_FOLDER).exists()


RECIPE = """\
schema: 1
name: drafting
checkpoint: {checkpoint}
target: local
engine: {{max_context: 128, max_batch: 2}}
passes: [fuse-norms, flash-attention]
serving: {{speculation: {{method: draft, max_tokens: 5, checkpoint: {checkpoint}}}}}
"""


OWN = """\
revision: v1
adapters: [{name: a, path: a, mode: apart}, {name: b, path: b}]
calibration: {data: c.jsonl, samples: 8, length: 32}
validation:
  quality: {data: [e.jsonl, f.jsonl], context: 64, max_tokens: 1000, reference: whole}
  latency: {prompt_tokens: [8], output_tokens: 4}
  attribution: true
  tasks: [task.yaml]
gates: {kld_mean: {max: 0.1}}
"""
ADAPTED = "passes: [fuse-norms, add-adapters, quantize-weights: {bits: 8, budget: {kld_mean: 0.00001}}]"


def test_a_draft_has_nothing_of_the_other_checkpoint(tmp_path, sample_checkpoint, monkeypatch):
    monkeypatch.setattr(Recipe, "_with_snapshot", lambda recipe: recipe)  # which asks the Hub for a revision
    text = RECIPE.format(checkpoint=sample_checkpoint).replace("passes: [fuse-norms, flash-attention]", ADAPTED)
    (tmp_path / "r.yaml").write_text(f"{text}{OWN}")
    recipe = Recipe.load(tmp_path / "r.yaml", ["calibration.samples=4"])
    draft = recipe_of(recipe)
    assert draft.checkpoint == sample_checkpoint
    assert (draft.revision, draft.adapters, draft.gates, draft.serving.draft) == (None, (), {}, None)
    assert draft.validation == ValidationSpec(quality=recipe.validation.quality.model_copy(update={"reference": None}))
    assert draft.calibration == recipe.calibration
    assert [spec.name for spec in draft.passes] == ["fuse-norms", "quantize-weights"]
    assert draft.passes[1].options == recipe.passes[2].options
    assert draft.instantiate(passes.ALL)[1].budget.kld_mean == 0.00001


def test_a_draft_of_a_recipe_of_its_own_keeps_what_that_says(tmp_path, sample_checkpoint):
    text = RECIPE.format(checkpoint=sample_checkpoint)
    own = "validation: {quality: {data: e.jsonl, context: 64, reference: whole}}\n"
    (tmp_path / "own.yaml").write_text(text.partition("serving:")[0] + own)
    (tmp_path / "r.yaml").write_text(text.replace(f"5, checkpoint: {sample_checkpoint}", "5, recipe: own.yaml"))
    draft = recipe_of(Recipe.load(tmp_path / "r.yaml"))
    assert draft.path == tmp_path / "own.yaml"
    assert draft.validation.quality.reference == tmp_path / "whole"


@pytest.mark.parametrize(
    ("engine", "what", "hint"),
    [
        ("deferred: true", "built here, and this one is deferred", "remove `deferred`, or --defer"),
        ("backend: gguf", "and gguf is for servers of others", "remove `speculation`, or choose another backend"),
    ],
)
@pytest.mark.parametrize("method", ["draft", "eagle3"])
def test_engines_that_ship_no_draft_say_why(tmp_path, sample_checkpoint, engine, what, hint, method):
    text = RECIPE.format(checkpoint=sample_checkpoint).replace("method: draft", f"method: {method}")
    (tmp_path / "r.yaml").write_text(text.replace("max_batch: 2", f"max_batch: 2, {engine}"))
    with pytest.raises(UnsupportedError, match=what) as caught, built(Recipe.load(tmp_path / "r.yaml"), None):
        pass
    assert caught.value.hint == hint


@pytest.mark.thorough
def test_a_draft_is_built_and_ships(tmp_path, sample_checkpoint):
    from llmforge.compile.pipeline import build
    from llmforge.triton import repository

    file = tmp_path / "r.yaml"
    file.write_text(RECIPE.format(checkpoint=sample_checkpoint))
    result = build(Recipe.load(file), tmp_path / "out")
    opened = Artifact.open(result.path)
    opened.verify()
    assert f"engine/{DRAFT_FOLDER}/model.onnx" in opened.manifest.files
    assert any("speculation: drafts of docs-llama-7m, engine " in note for note in result.report.notes)
    assert str(tmp_path) not in opened.manifest.recipe["serving"]["speculation"]["checkpoint"]
    runner = load(result.path)
    assert runner.config.speculation == SpeculationFacts("draft", 5)
    assert runner.draft.config.speculation is None
    last = list(runner.generate(tuple(runner.encode("The file is")), MANY))[-1]
    assert last.usage.accepted_tokens == last.usage.drafted_tokens > 0
    model = repository.of_artifact(opened)
    assert 'key: "speculation" value { string_value: "draft" }' in repository.config(model, ".")
    written = repository.export(opened, model, tmp_path / "models")
    assert (written / "1" / "engine" / DRAFT_FOLDER / FILE).is_file()
