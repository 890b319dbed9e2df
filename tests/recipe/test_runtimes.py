"""`validation.runtimes` of a recipe, and gates on what other runtimes say."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from llmforge import passes
from llmforge.base.errors import RecipeError
from llmforge.recipe import Recipe

QUALITY = {"data": "text.jsonl", "context": 64}
GENAI = ["flash-attention", "genai-interface"]


def load(folder: Path, **changes: Any) -> Recipe:
    (folder / "text.jsonl").write_text('{"id": "a", "text": "b"}\n')
    fields = {
        "schema": 1, "name": "r", "checkpoint": "nowhere", "target": "local", "engine": {"max_context": 96},
        "passes": GENAI, "validation": {"quality": QUALITY, "runtimes": ["onnxruntime-genai", "optimum"]}, **changes,
    }  # fmt: skip
    file = folder / "r.yaml"
    file.write_text(json.dumps(fields))
    recipe = Recipe.load(file)
    recipe.instantiate(passes.ALL)
    return recipe


def test_runtimes_of_an_interface_that_serves_both(tmp_path: Path) -> None:
    recipe = load(tmp_path, gates={"runtime.optimum.agreement": {"min": 0.9, "drop_max": 0.1}})
    assert recipe.resolved()["validation"]["runtimes"] == ["onnxruntime-genai", "optimum"]


def test_without_runtimes_a_resolved_recipe_is_what_it_was(tmp_path: Path) -> None:
    assert "runtimes" not in load(tmp_path, validation={"quality": QUALITY}).resolved()["validation"]


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"validation": {"quality": QUALITY, "runtimes": ["genai"]}}, "onnxruntime-genai"),
    ({"validation": {"quality": QUALITY, "runtimes": ["optimum", "optimum"]}}, "expected each name once"),
    ({"validation": {"runtimes": ["optimum"]}}, "there is no text to answer"),
    ({"engine": {"max_context": 95}}, "prompts and answers of 96 tokens exceed engine.max_context, 95"),
    ({"passes": ["flash-attention"]}, r"onnxruntime-genai cannot load the engine: no pass adapts it"),
    ({"passes": ["optimum-interface"]}, r"onnxruntime-genai cannot load the engine: no pass adapts it"),
    (
        {"passes": [*GENAI, {"cpu-kernels": {"budget": {"kld_mean": 0.1}}}]},
        "optimum cannot load the operators of the pass cpu-kernels, which only llmforge has",
    ),
    ({"engine": {"max_context": 96, "backend": "tensorrt"}}, "cannot load engines of the backend tensorrt"),
    (
        {"validation": {"quality": QUALITY, "runtimes": ["llama-cpp"]}},
        r"llama-cpp cannot load engines of the backend onnxruntime[\s\S]*set engine.backend to gguf",
    ),
    (
        {"validation": {"quality": QUALITY}, "gates": {"runtime.optimum.agreement": {"min": 0.9}}},
        r"it would not be measured[\s\S]*validation: \{runtimes: \[optimum\]\}",
    ),
    ({"gates": {"runtime.optimum.agreement": {"rise_max": 0.1}}}, "would limit an improvement"),
    ({"gates": {"runtime.optimum.agreemnt": {"min": 0.9}}}, "runtime.optimum.agreement"),
]


@pytest.mark.parametrize(("changes", "said"), REFUSED)
def test_refused_with_its_place(changes: dict[str, Any], said: str, tmp_path: Path) -> None:
    with pytest.raises(RecipeError) as caught:
        load(tmp_path, **changes)
    assert re.search(r"r\.yaml:\d+:\d+", str(caught.value))
    assert re.search(said, str(caught.value)), str(caught.value)


SERVED = {"backend": "compressed-tensors", "max_context": 96}
INT4 = [
    {
        "quantize-weights": {
            "bits": 4,
            "method": "rtn",
            "scales": "fp16",
            "embedding_bits": 16,
            "budget": {"kld_mean": 1},
        }
    }
]
TIMED = {"prompt_tokens": [8], "output_tokens": 8}


def served(folder: Path, runtimes: list[str], latency: dict[str, Any]) -> Recipe:
    validation = {"quality": QUALITY, "runtimes": runtimes, "latency": latency}
    return load(folder, engine=SERVED, passes=INT4, validation=validation)


def test_what_a_server_loads_is_timed_in_that_server(tmp_path: Path) -> None:
    assert served(tmp_path, ["vllm"], TIMED).validation.runtimes == ("vllm",)
    for runtimes, latency, said in (
        (["transformers"], TIMED, r"measured on what serves[\s\S]*add vllm to `runtimes`"),
        (["vllm"], {**TIMED, "starts": 1}, "starts: is measured of llmforge's own engines alone"),
    ):
        with pytest.raises(RecipeError, match=said):
            served(tmp_path, runtimes, latency)
