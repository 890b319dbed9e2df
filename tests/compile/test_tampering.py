"""Files that something else writes to, while an artifact is made or afterwards: nothing is published, or it is refused.

Moments: *written*, when the engine and what lies beside it were just written; *measured*, before they are sealed;
*sealed*, before evidence is written; *recorded*, before all is published; *published*, before it is loaded.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping, Sequence
from fnmatch import fnmatch
from functools import partial
from pathlib import Path

import pytest

from llmforge import artifact
from llmforge.artifact import Artifact, admission
from llmforge.base.errors import InputError, VerificationError
from llmforge.cache import Cache
from llmforge.compile import pipeline
from llmforge.compile.stages import artifact as publishing
from llmforge.compile.stages import engine as stage
from llmforge.recipe import Recipe
from llmforge.triton import repository, vllm

from ..models.checkpoints import write_checkpoint

pytestmark = pytest.mark.thorough
Change = Callable[[Path], object]
SERVED = "triton/tiny"
CONTENT = (
    "engine/model.onnx",
    "engine/model.onnx.data",
    "engine/runtime.json",
    "tokenizer/tokenizer.json",
    "tokenizer/tokenizer_config.json",
    "tokenizer/chat_template.jinja",
    f"{SERVED}/config.pbtxt",
    f"{SERVED}/README.md",
    f"{SERVED}/warmup/prompt",
    f"{SERVED}/1/model.py",
    f"{SERVED}/1/requirements.txt",
    f"{SERVED}/1/__pycache__",
    f"{SERVED}/1/llmforge/serving/engine.py",
)
EVIDENCE = (
    "README.md",
    "provenance/bom.cdx.json",
    "provenance/lock.json",
    "provenance/statement.json",
    "report/report.html",
    "report/report.md",
)
SEAL = "manifest.json", "evidence/*.json"
# Files that one of those above stands for.
ALIKE = f"{SERVED}/1/llmforge/*", f"{SERVED}/warmup/*"
# Recipes whose artifacts have more: what besides, and what of it is compared as soon as it is written.
LOOSE = {"kld_mean": 5.0}
PACKED = {"bits": 4, "block_size": 32, "scales": "fp16", "method": "rtn", "budget": LOOSE}
PASSES: Mapping[str, Sequence[object]] = {
    "plain": ["fuse-norms"],
    "genai": ["flash-attention", "genai-interface"],
    "optimum": ["optimum-interface"],
    "ranks": ["fuse-norms"],
    "compressed-tensors": [{"quantize-weights": {**PACKED, "embedding_bits": 16}}],
    "gguf": [{"quantize-weights": {**PACKED, "symmetric": True}}],
}
EXPORTS = ("compressed-tensors", "gguf")
INTEROP = tuple(
    f"engine/{name}"
    for name in ("genai_config.json", "config.json", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja")
)
OPTIMUM = ("engine/config.json", *INTEROP[2:])
CHECKPOINT = ("engine/model.safetensors", "engine/runtime.json", "engine/config.json", *INTEROP[2:])
VLLM = tuple(f"{SERVED}/{name}" for name in ("config.pbtxt", "README.md", "1/model.json"))
RANKS = tuple(f"engine/model.rank{rank}.onnx{ending}" for rank in (0, 1) for ending in ("", ".data"))
MORE = {
    "plain": (),
    "genai": INTEROP,
    "optimum": OPTIMUM,
    "ranks": RANKS,
    "compressed-tensors": (*CHECKPOINT, *VLLM),
    "gguf": ("engine/model.gguf", "engine/runtime.json"),
}


def flip(file: Path) -> None:
    """Change one bit in the middle; the size stays."""
    content = bytearray(file.read_bytes() or b" ")
    content[len(content) // 2] ^= 1
    file.chmod(0o644)
    file.write_bytes(content)


def add(file: Path) -> None:
    """Put another file beside it."""
    file.with_name("another.json").write_bytes(b"{}")


CHANGES: tuple[Change, ...] = (flip, add, Path.unlink)


class Small:
    """A small recipe whose passes an earlier build proved, so that a build takes a second."""

    def __init__(self, folder: Path, kind: str = "plain") -> None:
        self.folder = folder
        write_checkpoint(folder / "tiny-llama")
        (folder / "tiny-llama" / "chat_template.jinja").write_text("{{ messages[0].content }}")
        facts = {
            "schema": 1,
            "name": "tiny",
            "checkpoint": "tiny-llama",
            "target": "local",
            "engine": {
                "backend": kind if kind in EXPORTS else "onnxruntime",
                "max_context": 64,
                "max_batch": 1 if kind == "gguf" else 2,
                "threads": 1,
                "tensor_parallel": 2 if kind == "ranks" else 1,
            },
            "passes": PASSES[kind],
        }
        if kind in EXPORTS:  # their codes have a budget, and it a text
            texts = [{"id": str(number), "text": f"graph engine pass weight {number} " * 6} for number in range(8)]
            (folder / "text.jsonl").write_text("\n".join(map(json.dumps, texts)))
            facts["calibration"] = {"data": "text.jsonl", "samples": 4, "length": 16}
        (folder / "recipe.yaml").write_text(json.dumps(facts))
        self.published = self.build(folder / "out")

    def build(self, out: Path) -> Path:
        recipe = Recipe.load(self.folder / "recipe.yaml")
        return pipeline.build(recipe, out, cache=partial(Cache, self.folder / "cache")).path


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Small:
    return Small(tmp_path_factory.mktemp("small"))


def written(patch: pytest.MonkeyPatch, change: Change) -> None:
    write = repository.write

    def act(model: repository.TritonModel, folder: Path) -> None:
        write(model, folder)
        change(folder.parents[1])

    write_for_vllm = vllm.write

    def act_for_vllm(model: repository.TritonModel, folder: Path) -> object:
        made = write_for_vllm(model, folder)
        change(folder)
        return made

    patch.setattr(stage.repository, "write", act)
    patch.setattr(stage.vllm, "write", act_for_vllm)


def measured(patch: pytest.MonkeyPatch, change: Change) -> None:
    judge = pipeline.judge_gates
    patch.setattr(pipeline, "judge_gates", lambda state: (judge(state), change(state.staging)))


def sealed(patch: pytest.MonkeyPatch, change: Change) -> None:
    seal = artifact.seal

    def act(folder: Path, **facts: object) -> artifact.Manifest:
        manifest = seal(folder, **facts)  # type: ignore[arg-type]
        change(folder)
        return manifest

    patch.setattr(publishing.artifact, "seal", act)


def recorded(patch: pytest.MonkeyPatch, change: Change) -> None:
    publish = artifact.publish

    def act(folder: Path, *rest: object) -> Artifact:
        change(folder)
        return publish(folder, *rest)  # type: ignore[arg-type]

    patch.setattr(publishing.artifact, "publish", act)


MOMENTS = (written, measured, sealed, recorded)
# At which a bit of some kinds of files is changed by the thorough tests; slow ones do all things to all kinds.
FEW = {
    written: CONTENT,
    measured: CONTENT[1:2],
    sealed: CONTENT[2:4],
    recorded: (CONTENT[1], "report/report.html", "provenance/lock.json"),
}


def trials() -> list[object]:
    """List moments, files and changes."""
    return [
        pytest.param(
            moment,
            path,
            change,
            marks=[] if change is flip and path in FEW[moment] else [pytest.mark.slow],
            id=f"{moment.__name__} {path} {change.__name__}",
        )
        for moment in MOMENTS
        for path in ((*CONTENT, *EVIDENCE) if moment is recorded else CONTENT)
        for change in CHANGES
    ]


@pytest.mark.parametrize(("moment", "path", "change"), trials())
def test_what_changes_before_it_is_published_is_refused(
    moment: Callable[[pytest.MonkeyPatch, Change], None],
    path: str,
    change: Change,
    small: Small,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    moment(monkeypatch, lambda folder: change(folder / path))
    said = "what was written is not what was built|after the build had written|not valid JSON"
    with pytest.raises((VerificationError, InputError), match=said):
        small.build(tmp_path)
    assert not list(tmp_path.glob("*/[!.]*"))


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("path", [*CONTENT, *EVIDENCE, *SEAL])
def test_what_changes_afterwards_is_not_verified(path: str, change: Change, small: Small, tmp_path: Path) -> None:
    folder = shutil.copytree(small.published, tmp_path / small.published.name)
    [file] = folder.glob(path)
    change(file)
    with pytest.raises(InputError):
        Artifact.open(folder).verify()
    if path.startswith(admission.LOADED) or (path in SEAL and change is not add):
        with pytest.raises(InputError):
            admission.admit(folder)


@pytest.fixture(scope="module", params=[kind for kind in PASSES if kind != "plain"])
def other(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Small, str]:
    if request.param == "gguf":
        pytest.importorskip("gguf")
    return Small(tmp_path_factory.mktemp(request.param), request.param), request.param


def test_other_files_that_change_before_they_are_published_are_refused(
    other: tuple[Small, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    small, kind = other
    for moment in (written, measured):
        for path in MORE[kind]:
            with monkeypatch.context() as patch:
                moment(patch, lambda folder, path=path: flip(folder / path))  # type: ignore[misc]
                with pytest.raises(VerificationError, match=path.replace(".", r"\.")):
                    small.build(tmp_path)
    assert not list(tmp_path.glob("*/[!.]*"))


def unlisted(folder: Path, more: tuple[str, ...]) -> list[str]:
    """List the files of an artifact that no trial changes, nor one like them."""
    patterns = (*CONTENT, *EVIDENCE, *SEAL, *ALIKE, *more)
    paths = [file.relative_to(folder).as_posix() for file in folder.rglob("*") if file.is_file()]
    return [path for path in paths if not any(fnmatch(path, pattern) for pattern in patterns)]


def test_every_kind_of_file_is_tried(small: Small, tmp_path: Path) -> None:
    assert unlisted(small.published, ()) == []
    assert all(list(small.published.glob(path)) for path in (*CONTENT, *EVIDENCE, *SEAL))
    folder = shutil.copytree(small.published, tmp_path / "more")
    (folder / "engine" / "another.json").write_bytes(b"{}")
    assert unlisted(folder, ()) == ["engine/another.json"]


def test_every_kind_of_other_artifacts_is_tried(other: tuple[Small, str]) -> None:
    small, kind = other
    assert unlisted(small.published, MORE[kind]) == []
    assert all((small.published / path).is_file() for path in MORE[kind])


def test_no_file_is_left_out(small: Small, tmp_path: Path) -> None:
    folder = shutil.copytree(small.published, tmp_path / small.published.name)
    kinds = [path for pattern in (*CONTENT, *EVIDENCE, *SEAL) for path in folder.glob(pattern)]
    others = [file for file in folder.rglob("*") if file.is_file() and file not in kinds]
    assert all(file.is_relative_to(folder / SERVED) for file in others)
    for file in others:
        kept = file.read_bytes()
        file.chmod(0o644)
        file.write_bytes(kept + b" ")
        with pytest.raises(InputError, match=str(file.relative_to(folder))):
            Artifact.open(folder).verify()
        file.write_bytes(kept)
    Artifact.open(folder).verify()
