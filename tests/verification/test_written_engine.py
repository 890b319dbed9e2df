"""An engine that does not compute what was proven is refused, wherever the difference lies; so are files beside it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest

from llmforge import targets
from llmforge.backends.engines import BuildRequest
from llmforge.backends.onnxruntime import builder
from llmforge.base.errors import VerificationError
from llmforge.cache import Cache, default_folder
from llmforge.checkpoint import Checkpoint
from llmforge.compile import pipeline
from llmforge.compile.stages import engine as stage
from llmforge.ir import graph
from llmforge.recipe import EngineSpec, Recipe
from llmforge.rewrite.pass_base import Context
from llmforge.runtime.config import FILE, RuntimeConfig
from llmforge.trace import trace
from llmforge.triton import repository
from llmforge.verification import written_engine
from llmforge.verification.written_engine import make_runs, require_same

from ..models import zoo
from ..samples import tiny_recipes
from .lies.written import biased
from .test_engine_parts import INT4

SPEC = EngineSpec(max_context=128, max_batch=2, threads=1)
SEEDS = [f"{seed:016x}" for seed in (1, 2, 3)]


@pytest.fixture(scope="module")
def proven(tmp_path_factory: pytest.TempPathFactory) -> ir.Model:
    """A graph of int4 weights, for ONNX Runtime's kernels; nobody may change it."""
    folder = tmp_path_factory.mktemp("llama")
    zoo.write("llama", folder)
    model = trace(Checkpoint.open(folder))
    assert INT4.run(model, Context(targets.local()))
    return model


def write(model: ir.Model, folder: Path, change: Callable[[ir.Model], None] = lambda model: None) -> Path:
    """Write the engine of `model`, of whose lowered graph something was changed."""
    lowered = builder.lower(model, targets.local())[0]
    change(lowered)
    builder.build(BuildRequest(lowered, folder, SPEC, targets.local(), (3,), 0))
    return folder


def test_an_engine_as_it_was_built_passes(proven: ir.Model, tmp_path: Path) -> None:
    folder = write(proven, tmp_path / "engine")
    for seed in SEEDS:
        said = require_same(proven, folder, seed, [], threads=1)
        assert said.startswith("engine: as written, it computes what was proven, up to ")


def clip_lengths(model: ir.Model) -> None:
    """Let no token see more than 40 others before it."""
    past = graph.input_named(model, "past_lengths")
    most = graph.initializer(model, "most", np.array(40, np.int32))
    readers = list(past.uses())
    made = ir.node("Min", [past, most], num_outputs=1, name="clipped")
    made.outputs[0].name, made.outputs[0].type, made.outputs[0].shape = "clipped", past.type, past.shape
    for reader, index in readers:
        reader.replace_input_with(index, made.outputs[0])
    model.graph.insert_before(model.graph[0], made)


def scale_a_weight(model: ir.Model) -> None:
    name = next(name for name in model.graph.initializers if name.endswith("scales"))
    value = model.graph.initializers[name]
    value.const_value = ir.tensor(np.asarray(graph.tensor(value).numpy()) * np.float32(1.5), name=name)


@pytest.mark.parametrize("change", [clip_lengths, scale_a_weight])
def test_a_lowering_that_changes_what_is_computed_is_refused(
    change: Callable[[ir.Model], None], proven: ir.Model, tmp_path: Path
) -> None:
    folder = write(proven, tmp_path / "engine", change)
    for seed in SEEDS:
        with pytest.raises(VerificationError, match=r"does not compute what was proven: (a long text|unequal rows)"):
            require_same(proven, folder, seed, [], threads=1)


def test_bytes_that_change_on_the_disk_are_refused(proven: ir.Model, tmp_path: Path) -> None:
    folder = write(proven, tmp_path / "engine")
    data = max(folder.iterdir(), key=lambda file: file.stat().st_size)
    content = bytearray(data.read_bytes())
    content[len(content) // 4 : len(content) // 2] = bytes(len(content) // 2 - len(content) // 4)
    data.write_bytes(content)
    with pytest.raises(VerificationError, match="does not compute what was proven"):
        require_same(proven, folder, SEEDS[0], [], threads=1)


def test_a_token_that_is_less_likely_throughout_is_refused_whatever_it_loses(
    proven: ir.Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(written_engine, "MOST_KLD", 1e9)  # as where its share is far below any that a KLD shows
    folder = write(proven, tmp_path / "engine", biased(77, -15.0))
    for seed in SEEDS:
        with pytest.raises(VerificationError, match=r"the logit of token 77 is -1[45]"):
            require_same(proven, folder, seed, [], threads=1)


def test_rows_side_by_side_have_tokens_that_no_text_has(proven: ir.Model, tmp_path: Path) -> None:
    config = RuntimeConfig.read(write(proven, tmp_path / "engine") / FILE)
    alone, rows = make_runs(config, [np.full(2000, 5)], 0)
    assert {int(token) for step in alone.steps for token in step.ids.ravel()} == {5}
    assert len({int(token) for step in rows.steps for token in step.ids.ravel()}) > 30


@pytest.mark.parametrize("context", [2, 3, 5, 16, 128, 4096])
def test_runs_stay_within_the_context_and_go_far(context: int, proven: ir.Model, tmp_path: Path) -> None:
    config = RuntimeConfig.read(write(proven, tmp_path / "engine") / FILE)
    for seed in range(50):
        runs = make_runs(_changed(config, max_context=context), [], seed)
        assert max(run.capacity for run in runs) <= context
        assert runs[0].capacity >= min(context, written_engine.LONGEST) // 2
        assert all((step.lengths > 0).all() for run in runs for step in run.steps)


def _changed(config: RuntimeConfig, **facts: Any) -> RuntimeConfig:
    return replace(config, **facts)


@pytest.fixture
def recipe(tmp_path: Path, tiny_checkpoint: Path) -> Recipe:
    """A recipe with int4 weights."""
    passes = [{"quantize-weights": {"block_size": 32, "method": "rtn", "budget": {"kld_mean": 5.0}}}]
    return Recipe.load(tiny_recipes.write(tmp_path, tiny_checkpoint, passes, {}))


@pytest.mark.thorough
def test_a_report_says_that_the_engine_was_compared(recipe: Recipe, tmp_path: Path) -> None:
    result = pipeline.build(recipe, tmp_path / "out")
    assert any(line.startswith("engine: as written, it computes what was proven") for line in result.report.proven)


def wrong_eos(config: RuntimeConfig) -> Any:
    return _changed(config, eos_token_ids=(1,))


def wrong_context(config: RuntimeConfig) -> Any:
    return _changed(config, max_context=config.max_context + 1)


@pytest.mark.usefixtures("shared_build_cache")
@pytest.mark.parametrize("change", [wrong_eos, wrong_context])
def test_a_wrong_runtime_json_is_refused(
    change: Callable[[RuntimeConfig], RuntimeConfig],
    recipe: Recipe,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    plain = RuntimeConfig.to_json
    monkeypatch.setattr(RuntimeConfig, "to_json", lambda config: plain(change(config)))
    with pytest.raises(VerificationError, match=r"what was written is not what was built: engine/runtime\.json"):
        pipeline.build(recipe, tmp_path / "out", cache=lambda: Cache(default_folder()))
    assert not list((tmp_path / "out").glob("*/[!.]*"))


def spoiled(path: str) -> Callable[[Path], None]:
    def spoil(staging: Path) -> None:
        [file] = staging.glob(path)
        file.chmod(0o644)
        file.write_bytes(file.read_bytes() + b" ")

    return spoil


@pytest.mark.usefixtures("shared_build_cache")
@pytest.mark.parametrize("path", ["tokenizer/tokenizer.json", "triton/*/config.pbtxt", "triton/*/1/model.py"])
def test_other_files_that_are_wrong_are_refused(
    path: str, recipe: Recipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_own = repository.write

    def write_wrong(model: repository.TritonModel, folder: Path) -> None:
        write_own(model, folder)
        spoiled(path)(folder.parents[1])

    monkeypatch.setattr(stage.repository, "write", write_wrong)
    with pytest.raises(VerificationError, match=r"what was written is not what was built: .* differs from what"):
        pipeline.build(recipe, tmp_path / "out", cache=lambda: Cache(default_folder()))
