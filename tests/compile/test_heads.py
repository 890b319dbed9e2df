"""EAGLE-3 heads: what is traced is what they compute, lies are refused, and so is the head of another model."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest

from llmforge import targets
from llmforge.artifact import Artifact
from llmforge.backends.engines import BuildRequest
from llmforge.backends.onnxruntime import builder
from llmforge.base.errors import CheckpointError, ForgeError, RecipeError, UnsupportedError, VerificationError
from llmforge.checkpoint import Checkpoint
from llmforge.checkpoint.eagle3 import Eagle3Head
from llmforge.compile import drafts, heads
from llmforge.recipe import EngineSpec, Recipe
from llmforge.rewrite.pass_base import Changes, Context, Numerics, Rewritten
from llmforge.runtime.config import DRAFT_FOLDER, SpeculationFacts
from llmforge.serving import Request, Sampling, load
from llmforge.trace.export.eagle3 import HeadReference, model_of
from llmforge.trace.export.weights import plan

from ..models import eagle3
from ..samples import tiny_recipes

TRAINED = Path(__file__).parents[1] / "data" / "eagle3-docs-llama-7m"


@pytest.fixture(scope="module")
def target(sample_checkpoint) -> Checkpoint:
    return Checkpoint.open(sample_checkpoint)


@pytest.fixture(scope="module")
def head(tmp_path_factory, target) -> Eagle3Head:
    folder = tmp_path_factory.mktemp("heads") / "head"
    return Eagle3Head.open(eagle3.write(folder, eagle3.tensors(), eagle3.settings()), target)


@pytest.fixture(scope="module")
def traced(head) -> ir.Model:
    return heads._traced(head, 64)


@pytest.mark.parametrize("norms_residual", [False, True])
def test_a_head_computes_what_is_written_out(tmp_path, target, norms_residual):
    """The model that graphs are held to, against numpy: with states of the target and of its own."""
    held = eagle3.tensors(1)
    config = eagle3.settings(norm_before_residual=norms_residual)
    head = Eagle3Head.open(eagle3.write(tmp_path / "head", held, config), target)
    embedding = np.asarray(target.tensor("model.embed_tokens.weight").numpy(), np.float32)
    for text in heads._texts(head):
        expected = eagle3.compute(held, embedding[text.ids], text.hidden, text.own, norms_residual=norms_residual)
        made = HeadReference(head).run(text.ids, text.hidden, text.own)
        for a, b in zip(expected, made, strict=True):
            assert np.abs(a - b).max() < 1e-4 * a.std()


def test_the_graph_of_a_head_is_held_to_its_model(head, traced):
    heads._hold_to_torch(head, traced, heads._texts(head), 1)
    lying = swapped(traced)
    with pytest.raises(VerificationError, match=r"does not compute what its model computes in torch: it is [\d.]+ st"):
        heads._hold_to_torch(head, lying, heads._texts(head), 1)


def swapped(model: ir.Model) -> ir.Model:
    """Give two matrices each other's numbers."""
    copy = model.clone()
    gate, up = (copy.graph.initializers[f"model.layers.0.mlp.{name}_proj.weight"] for name in ("gate", "up"))
    gate.const_value, up.const_value = up.const_value, gate.const_value
    return copy


class Lying:
    """Claims to change nothing but the last bits."""

    name = "lie"

    def __init__(self, numerics: Numerics) -> None:
        self.numerics = numerics

    def demands(self) -> tuple[()]:
        return ()

    def run(self, model: ir.Model, context: object) -> Changes:
        head = model.graph.initializers["model.layers.0.fc.weight"]
        assert head.const_value is not None
        head.const_value = ir.Tensor(-np.asarray(head.const_value.numpy()), name=head.name)
        return Changes([Rewritten("fc", "negated")])


@pytest.mark.parametrize("numerics", [Numerics.ROUNDING, Numerics.LOSSY])
def test_a_pass_that_breaks_a_head_is_refused(head, traced, monkeypatch, numerics):
    monkeypatch.setattr("llmforge.compile.heads.pass_base.run", lambda step, model, context: step.run(model, context))
    by: Any = type("By", (), {"instantiate": lambda self, known: (Lying(numerics),)})()
    with pytest.raises(
        VerificationError, match=f"pass lie changed what the EAGLE-3 head computes: .* {numerics.value}"
    ):
        heads._run_passes(by, traced.clone(), heads._texts(head), None, 1)  # type: ignore[arg-type]


WRONG: dict[str, tuple[Callable[[dict[str, Any], dict[str, Any]], object], str]] = {
    "another hidden size": (
        lambda held, config: held.update({"fc.weight": np.zeros((256, 3 * 512), np.float32)}),
        r"tensor 'fc.weight' has shape \[256, 1536\]; a head of hidden size 256 for docs-llama-7m, whose hidden size "
        r"is 256, has \[256, 768\]",
    ),
    "a hidden size that it says": (
        lambda held, config: config.update(target_hidden_size=4096),
        "target_hidden_size is 4096, and the target's hidden size is 256",
    ),
    "another vocabulary": (
        lambda held, config: config.update(vocab_size=32000),
        "vocab_size is 32000, and the target's vocabulary is 8192",
    ),
    "a draft token beyond the vocabulary": (
        lambda held, config: held["d2t"].__setitem__(7, 9000),
        r"tensor 'd2t': draft token 7 is 9007; expected different tokens from 0 to 8191",
    ),
    "two draft tokens of one": (
        lambda held, config: held["d2t"].__setitem__(1, held["d2t"][0] - 1),
        "two draft tokens are one of the target's",
    ),
    "draft tokens that nobody names": (
        lambda held, config: held.pop("d2t"),
        "tells 500 tokens apart, its target has 8192, and no tensor 'd2t' says which they are",
    ),
    "fewer of them": (
        lambda held, config: held.update(d2t=held["d2t"][:-1]),
        r"tensor 'd2t' is INT64 \[499\]; expected int64 \[500\]",
    ),
    "layers that are not there": (
        lambda held, config: config.update(eagle_aux_hidden_state_layer_ids=[2, 18, 33]),
        r"reads the inputs of layers \[2, 18, 33\]; the target's are 0 to 5, and a head reads 3",
    ),
    "another architecture": (
        lambda held, config: config.update(architectures=["LlamaForCausalLM"]),
        "an EAGLE-3 head has .'LlamaForCausalLMEagle3'",
    ),
    "two layers": (lambda held, config: config.update(num_hidden_layers=2), "num_hidden_layers is 2; heads of one"),
    "one layer's states": (
        lambda held, config: config.update(eagle_config={"use_aux_hidden_state": False}),
        "use_aux_hidden_state is false",
    ),
    "no size of a vocabulary": (
        lambda held, config: config.update(draft_vocab_size="x"),
        'draft_vocab_size is "x"; expected a number of tokens',
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_the_head_of_another_model_is_refused(tmp_path, target, name):
    held, config = eagle3.tensors(), eagle3.settings()
    change, message = WRONG[name]
    change(held, config)
    with pytest.raises((CheckpointError, UnsupportedError), match=message):
        Eagle3Head.open(eagle3.write(tmp_path / "head", held, config), target)


def test_a_head_that_lacks_a_matrix_is_refused(tmp_path, target):
    held = eagle3.tensors()
    del held["midlayer.self_attn.k_proj.weight"]
    head = Eagle3Head.open(eagle3.write(tmp_path / "head", held, eagle3.settings()), target)
    with pytest.raises(CheckpointError, match=r"lacks 'model.layers.0.self_attn.k_proj.weight'"):
        plan(model_of(head, "eager")[0], head.checkpoint)


def test_an_embedding_of_its_own_is_used_and_one_that_fits_not_is_not_shared(tmp_path, target):
    held = eagle3.tensors()
    own = Eagle3Head.open(eagle3.write(tmp_path / "shared", held, eagle3.settings()), target)
    assert own.checkpoint.tensors["model.embed_tokens.weight"].file.parent == target.path
    held["embed_tokens.weight"] = np.zeros((8192, 256), np.float32)
    own = Eagle3Head.open(eagle3.write(tmp_path / "own", held, eagle3.settings()), target)
    assert own.checkpoint.tensors["model.embed_tokens.weight"].file.parent == tmp_path / "own"
    del held["embed_tokens.weight"]
    held["fc.weight"] = np.zeros((128, 768), np.float32)
    with pytest.raises(CheckpointError, match=r"the head has no embed_tokens.weight \[8192, 128\], and docs-llama-7m"):
        Eagle3Head.open(eagle3.write(tmp_path / "small", held, eagle3.settings(hidden_size=128)), target)


@pytest.mark.parametrize(
    ("changes", "layers"),
    [
        ({}, (2, 3, 3)),
        ({"eagle_aux_hidden_state_layer_ids": [0, 2, 5]}, (0, 2, 5)),
        ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 2, 4]}}, (1, 3, 5)),
    ],
)
def test_layers_are_numbered_as_vllm_and_sglang_do(tmp_path, target, changes, layers):
    config = eagle3.settings(**changes)
    assert Eagle3Head.open(eagle3.write(tmp_path / "head", eagle3.tensors(), config), target).layers == layers


def recipe(tmp_path: Path, checkpoint: Path, *overrides: str) -> Recipe:
    file = tmp_path / "heads.yaml"
    file.write_text(eagle3.RECIPE.format(checkpoint=checkpoint, head=TRAINED))
    return Recipe.load(file, overrides)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("serving.speculation={method: eagle3}", "method is eagle3; expected `checkpoint`, the folder of the head"),
        ("serving.speculation={method: mtp}", "multi-token prediction .MTP. or other heads are not"),
        ("engine.kv_cache=paged", "engine.kv_cache is paged; expected slots: serving.speculation is eagle3"),
    ],
)
def test_recipes_of_what_is_not_built_are_refused(tmp_path, sample_checkpoint, override, message):
    with pytest.raises(RecipeError, match=message):
        recipe(tmp_path, sample_checkpoint, override)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["target=h100-pcie"], "EAGLE-3 heads are compiled for ONNX Runtime on one CPU"),
        (["engine.tensor_parallel=2"], "EAGLE-3 heads are compiled for ONNX Runtime on one CPU"),
        (["engine.backend=gguf"], "an EAGLE-3 head ships with an engine of llmforge's own"),
    ],
)
def test_engines_without_hidden_states_are_refused(tmp_path, sample_checkpoint, overrides, message):
    asked = recipe(tmp_path, sample_checkpoint, *overrides)
    with pytest.raises(ForgeError, match=message), drafts.built(asked, lambda recipe, folder: folder):
        pass


@pytest.mark.thorough
def test_a_head_is_quantized_by_a_recipe_and_ships(tmp_path, sample_checkpoint):
    from llmforge.compile.pipeline import build
    from llmforge.triton import repository

    quantized = {"quantize-weights": {"bits": 8, "block_size": 32, "method": "rtn", "budget": {"kld_mean": 10.0}}}
    by = tiny_recipes.write(tmp_path, sample_checkpoint, [quantized], {})
    given = f"{{method: eagle3, max_tokens: 4, checkpoint: {TRAINED}, recipe: {by}}}"
    result = build(recipe(tmp_path, sample_checkpoint, f"serving.speculation={given}"), tmp_path / "out")
    opened = Artifact.open(result.path)
    opened.verify()
    assert f"engine/{DRAFT_FOLDER}/model.onnx" in opened.manifest.files
    assert any("speculation: EAGLE-3 head eagle3-docs-llama-7m" in note for note in result.report.notes)
    assert str(tmp_path) not in opened.manifest.recipe["serving"]["speculation"]["checkpoint"]
    runner = load(result.path)
    assert runner.config.speculation == SpeculationFacts("eagle3", 4)
    asked = [Request(tuple(runner.encode("The file is")), Sampling(max_tokens=60, ignore_eos=True))]
    [drafted], stats = eagle3.answered(runner, asked, eagle3.drafting(runner))
    assert stats.accepted_tokens > 0
    assert drafted.tokens == eagle3.answered(runner, asked, None)[0][0].tokens
    model = repository.of_artifact(opened)
    assert 'key: "speculation" value { string_value: "eagle3" }' in repository.config(model, ".")


def test_a_recipe_that_calibrates_is_refused_for_a_head(tmp_path, sample_checkpoint, head, traced):
    calibrates = {"quantize-weights": {"bits": 4, "block_size": 32, "method": "gptq", "budget": {"kld_mean": 1.0}}}
    by = Recipe.load(tiny_recipes.write(tmp_path, sample_checkpoint, [calibrates], {}))
    with pytest.raises(UnsupportedError, match="quantize-weights would calibrate the EAGLE-3 head") as refused:
        heads._run_passes(by, traced.clone(), heads._texts(head), Context(targets.local()), 1)
    assert "recipe: head.yaml" in str(refused.value.hint)


def test_an_engine_that_computes_something_else_is_refused(tmp_path, head, traced):
    spec = EngineSpec(max_context=64, threads=1)
    lowered, _ = builder.lower(traced, targets.local())
    builder.build(BuildRequest(lowered, tmp_path / "engine", spec, targets.local(), (0,), 0))
    texts = heads._texts(head)
    heads._hold_engine(traced, tmp_path / "engine", None, texts, 1)
    with pytest.raises(VerificationError, match="the engine of the EAGLE-3 head does not compute what was proven"):
        heads._hold_engine(swapped(traced), tmp_path / "engine", None, texts, 1)
