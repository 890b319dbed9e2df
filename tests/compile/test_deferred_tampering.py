"""An engine that is finished elsewhere: what changes before, between and after both builds is refused."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from llmforge.base.errors import InputError, VerificationError
from llmforge.cache import Cache
from llmforge.compile import finishing, pipeline
from llmforge.compile.stages import engine as stage
from llmforge.recipe import Recipe

from ..models.checkpoints import write_checkpoint
from . import test_tampering as local
from .test_tampering import CHANGES, Change, add, flip

pytest.importorskip("tensorrt_rtx")
pytestmark = [pytest.mark.usefixtures("no_device"), pytest.mark.thorough]

TOKENIZER = tuple(path for path in local.CONTENT if path.startswith("tokenizer/"))
BESIDE = ("engine/pending.json", *TOKENIZER)
GRAPH = ("engine/model.onnx", "engine/model.onnx.data")
FINISHED = (
    "engine/model.plan",
    "engine/plan.json",
    "engine/runtime.json",
    *TOKENIZER,
    *(path for path in local.CONTENT if path.startswith(local.SERVED)),
)
# Nothing but its GPU reads a plan: what changes it before its hash is begun is not seen.
COMPARED = FINISHED[2:]


class Deferred:
    """A small artifact whose engine is pending, and a cache with its plan, so that to finish it takes a second."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        write_checkpoint(folder / "tiny-llama")
        (folder / "tiny-llama" / "chat_template.jinja").write_text("{{ messages[0].content }}")
        texts = [{"id": str(number), "text": f"graph engine pass weight {number} " * 6} for number in range(8)]
        (folder / "text.jsonl").write_text("\n".join(map(json.dumps, texts)))
        facts = {
            "schema": 1,
            "name": "tiny",
            "checkpoint": "tiny-llama",
            "target": "l4",
            "engine": {"backend": "tensorrt-rtx", "max_context": 64, "max_batch": 2, "deferred": True},
            "calibration": {"data": "text.jsonl", "samples": 4, "length": 16},
            "passes": [{"lower-precision": {"dtype": "fp16", "budget": {"kld_mean": 5.0}}}],
        }
        (folder / "recipe.yaml").write_text(json.dumps(facts))
        self.published = self.build(folder / "out")

    def build(self, out: Path) -> Path:
        recipe = Recipe.load(self.folder / "recipe.yaml")
        return pipeline.build(recipe, out, cache=partial(Cache, self.folder / "cache")).path

    def copy(self, to: Path) -> Path:
        return shutil.copytree(self.published, to / "tiny" / self.published.name)


@pytest.fixture(scope="module")
def deferred(tmp_path_factory: pytest.TempPathFactory) -> Deferred:
    return Deferred(tmp_path_factory.mktemp("deferred"))


@pytest.fixture(autouse=True)
def plans(deferred: Deferred, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LLMFORGE_CACHE", str(deferred.folder / "cache"))


def test_without_a_change_it_is_finished(deferred: Deferred, tmp_path: Path) -> None:
    pending = deferred.copy(tmp_path)
    finished = finishing.finish(pending).path
    assert finished.parent == pending.parent
    assert local.unlisted(finished, FINISHED) == []
    assert local.unlisted(pending, (*BESIDE, *GRAPH)) == []


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("path", [*BESIDE, *GRAPH])
def test_what_changes_as_it_is_deferred_is_refused(
    path: str, change: Change, deferred: Deferred, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if path.startswith("engine/") and change is add:
        pytest.skip("nothing says what else may lie beside the graph")
    write = stage.pending.write

    def act(request: stage.BuildRequest, **facts: int) -> object:
        made = write(request, **facts)
        change(request.folder.parent / path)
        return made

    monkeypatch.setattr(stage.pending, "write", act)
    with pytest.raises((VerificationError, InputError)):
        deferred.build(tmp_path)
    assert not list(tmp_path.glob("*/[!.]*"))


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("path", [*GRAPH, *BESIDE, *local.EVIDENCE, "manifest.json"])
def test_what_changes_between_both_builds_is_refused(
    path: str, change: Change, deferred: Deferred, tmp_path: Path
) -> None:
    pending = deferred.copy(tmp_path)
    change(pending / path)
    with pytest.raises(InputError):
        finishing.finish(pending)
    assert len(list(pending.parent.glob("[!.]*"))) == 1


@pytest.mark.parametrize("change", [flip, Path.unlink])
@pytest.mark.parametrize("path", [*GRAPH, *BESIDE])
def test_what_changes_while_the_engine_is_built_is_refused(
    path: str, change: Change, deferred: Deferred, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pending = deferred.copy(tmp_path)
    local.written(monkeypatch, lambda _: change(pending / path))
    with pytest.raises(InputError, match="was changed after it was published"):
        finishing.finish(pending)
    assert len(list(pending.parent.glob("[!.]*"))) == 1


def test_a_link_to_a_file_is_no_change(deferred: Deferred, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pending = deferred.copy(tmp_path)
    local.written(monkeypatch, lambda _: os.link(pending / GRAPH[1], tmp_path / "link"))
    assert finishing.finish(pending).path.is_dir()


def measured(patch: pytest.MonkeyPatch, change: Change) -> None:
    judge = finishing.judge_gates
    patch.setattr(finishing, "judge_gates", lambda state: (judge(state), change(state.staging)))


MOMENTS = {
    local.written: COMPARED,
    measured: FINISHED,
    local.sealed: FINISHED,
    local.recorded: (*FINISHED, *local.EVIDENCE),
}


def trials() -> list[object]:
    """List moments, files and changes; the thorough tests change a bit, slow ones do the rest."""
    return [
        pytest.param(
            moment,
            path,
            change,
            marks=[] if change is flip and moment in (local.written, measured) else [pytest.mark.slow],
            id=f"{moment.__name__} {path} {change.__name__}",
        )
        for moment, paths in MOMENTS.items()
        for path in paths
        for change in CHANGES
        # an engine's files are its own
        if not (moment is local.written and change is add and path.startswith("engine/"))
    ]


@pytest.mark.parametrize(("moment", "path", "change"), trials())
def test_what_changes_as_it_is_finished_is_refused(
    moment: Callable[[pytest.MonkeyPatch, Change], None],
    path: str,
    change: Change,
    deferred: Deferred,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pending = deferred.copy(tmp_path)
    moment(monkeypatch, lambda folder: change(folder / path))
    said = "what was written is not what was built|after the build had written|not valid JSON"
    with pytest.raises((VerificationError, InputError), match=said):
        finishing.finish(pending)
    assert len(list(pending.parent.glob("[!.]*"))) == 1
