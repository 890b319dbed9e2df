"""llmforge from Python: the whole way in twenty lines, and what notebooks see."""

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import llmforge
from llmforge import Answer, Built, ForgeError, Judged, Model, Plans, Recipe
from llmforge.gates.decision import Verdict

ROOT = Path(__file__).parents[2]
RECIPE = ROOT / "recipes" / "int4-rtn.yaml"
LESS = ("validation.quality.max_tokens=6144", "validation.latency=null")


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Built:
    return llmforge.build(RECIPE, out=tmp_path_factory.mktemp("artifacts"), overrides=LESS)


def test_the_whole_way(built: Built) -> None:
    """What a program of twenty lines does."""
    assert built.verdict is Verdict.PASS
    model: Model = llmforge.load(built.path)
    answer: Answer = model.generate("If the file does not exist,", max_tokens=12)
    assert answer.text == "".join(model.stream("If the file does not exist,", max_tokens=12)) == str(answer)
    assert len(answer.token_ids) == answer.usage.output_tokens == 12
    assert answer.finish_reason == "length"
    logits = model.logits("If the file does not exist,")
    assert logits.shape == (answer.usage.prompt_tokens, model.runner.config.vocabulary)
    assert logits.dtype == np.float32
    assert int(logits[-1].argmax()) == answer.token_ids[0]
    plans: Plans = llmforge.plan(RECIPE, target=["l4", "h200"])
    assert [plan["target"] for plan in plans.data] == ["l4", "h200"]
    judged: Judged = llmforge.gate(built.path, gates={"kld_mean": {"max": 1.0}})
    assert judged.passed
    assert llmforge.gate(built.path, gates={"kld_mean": {"max": 1e-6}}).verdict is Verdict.FAIL
    assert llmforge.gate(built.path, against=built.path, gates={"kld_mean": {"rise_max": 0.001}}).passed


def test_chat_tokens_and_options(built: Built) -> None:
    model = llmforge.load(built.path)
    ids = model.tokenizer.encode("If the file").ids
    assert model.generate(ids, max_tokens=4).token_ids == model.generate("If the file", max_tokens=4).token_ids
    assert model.generate([{"role": "user", "content": "hello"}], max_tokens=4).token_ids
    drawn = [model.generate(ids, max_tokens=8, temperature=1.0, seed=seed).token_ids for seed in (1, 1, 2)]
    assert drawn[0] == drawn[1] != drawn[2]
    assert len(model.generate(ids, max_tokens=3, logprobs=2).logprobs) == 3
    with pytest.raises(ForgeError, match="unknown option of sampling: max_token; known: temperature"):
        model.generate(ids, max_token=4)
    with pytest.raises(ForgeError, match="the prompt is empty"):
        model.generate([])


def test_notebooks_show_pages(built: Built) -> None:
    page = built._repr_html_()
    assert page.startswith("<iframe srcdoc=")
    assert "&lt;!doctype html&gt;" in page.lower()
    assert 'sandbox=""' in page
    plans = llmforge.plan(RECIPE, target="l4")
    assert "<pre>" in plans._repr_html_()
    assert "Memory per device" in str(plans)
    judged = llmforge.gate(built.path, gates={"kld_mean": {"max": 1.0}})
    assert "kld_mean" in judged._repr_markdown_()
    assert "PASS" in str(judged)


def test_a_plan_is_shown_once(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """In a notebook rich displays what it prints, beside what the notebook makes of the value."""
    plans = llmforge.plan(RECIPE, target="l4")
    assert repr(plans) == str(plans).rstrip()
    assert repr(plans).startswith("docs-llama-7m on NVIDIA L4")
    monkeypatch.setattr("rich.console._is_jupyter", lambda: True)
    monkeypatch.setattr("rich.jupyter.display", lambda *drawn: pytest.fail("displayed by rich, too"))
    assert plans._repr_html_().count("Memory per device") == 1
    assert str(plans).count("Memory per device") == 1
    assert capsys.readouterr().out == ""


def test_dir_lists_what_is_public() -> None:
    assert dir(llmforge) == sorted([*llmforge.__all__, "__version__"])
    assert {"build", "evaluate", "gate", "load", "plan"} <= {*dir(llmforge)}


def test_mistakes_are_forge_errors(built: Built, tmp_path: Path) -> None:
    for wrong in (
        lambda: llmforge.build(tmp_path / "absent.yaml"),
        lambda: llmforge.load(tmp_path),
        lambda: llmforge.gate(built.path, gates={"kld": {"max": 1.0}}),
        lambda: llmforge.gate(built.path, gates={"kld_mean": {"drop_max": 1.0}}),
        lambda: llmforge.gate(built.path, gates={}),
        lambda: llmforge.plan(RECIPE, target="h20"),
    ):
        with pytest.raises(ForgeError) as caught:
            wrong()
        assert caught.value.message
        assert caught.value.exit_code in (2, 5, 8)


def test_a_recipe_that_is_loaded_has_its_overrides() -> None:
    with pytest.raises(ValueError, match="overrides go with the path of a recipe"):
        llmforge.build(Recipe.load(RECIPE, LESS), overrides=LESS)


@pytest.mark.parametrize("first", ["import llmforge.compile.overlap", "pass"])
def test_build_is_a_function_whatever_was_imported_first(first: str) -> None:
    code = f"import llmforge\n{first}\n" + (
        "try: llmforge.build('absent.yaml')\nexcept llmforge.ForgeError as error: print(error.exit_code)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=False)
    assert done.stdout.split() == [str(llmforge.base.errors.RecipeError.exit_code)], done.stderr  # type: ignore[attr-defined]


def test_importing_is_cheap() -> None:
    code = "import sys, llmforge; print(*(set(sys.modules) & {'numpy', 'torch', 'onnxruntime', 'pydantic', 'rich'}))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=True)
    assert done.stdout.split() == []


def test_unknown_names_are_attribute_errors() -> None:
    with pytest.raises(AttributeError, match="has no attribute 'optimize'"):
        llmforge.optimize  # type: ignore[attr-defined]  # noqa: B018
    assert set(llmforge.__all__) <= {*dir(llmforge), *llmforge.__all__}
    for name in llmforge.__all__:
        assert getattr(llmforge, name) is not None
