"""Builds that reuse what earlier ones computed: what is said of it, and the same bytes whatever is reused."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import fsspec
import onnx_ir as ir
import pytest
from cryptography.hazmat.primitives.asymmetric import ed25519

from llmforge import artifact, targets
from llmforge.artifact import Artifact, store
from llmforge.base import resources, signals
from llmforge.base.errors import BudgetExceeded, VerificationError
from llmforge.base.progress import Silent
from llmforge.cache import Cache, Code, installed
from llmforge.cache.remote import Remote
from llmforge.checkpoint import Checkpoint
from llmforge.compile import evidence, pipeline, reuse
from llmforge.compile.reuse import Reuse
from llmforge.compile.stages import trace as trace_stage
from llmforge.gates import records
from llmforge.ir import graph
from llmforge.measure.baseline import Baseline, open_baseline
from llmforge.measure.streamed_baseline import StreamedBaseline
from llmforge.passes.fuse_norms import FuseNorms
from llmforge.recipe import Recipe
from llmforge.report import render
from llmforge.rewrite import pass_base
from llmforge.rewrite.pass_base import Changes, Context
from llmforge.trace import trace
from llmforge.trace.export import kept_graph
from llmforge.verification.verifier import Verifier

from ..models.checkpoints import write_checkpoint

LOOSE = {"kld_mean": 5.0}  # random weights: only that the pass runs counts here
WORDS = ("graph", "engine", "pass", "weight", "scale", "token", "cache", "layer", "head", "probe", "gate", "report")
NAMES = ["fuse-norms", "pack-qkv", "flash-attention", "quantize-weights", "quantize-kv-cache"]

Write = Callable[..., Recipe]


def writer(folder: Path) -> Write:
    """Write text into `folder`, and make what writes recipes there, for the checkpoint "tiny-llama" beside them.

    Arguments of that are the last pass's budget, the weights' bits, and other fields.
    """
    rng = random.Random(0)
    lines = [{"id": str(i), "text": f"{i} " + " ".join(rng.choices(WORDS, k=30))} for i in range(10)]
    (folder / "calibration.jsonl").write_text("\n".join(map(json.dumps, lines)))

    def write(
        bits: int = 4,
        budget: float = 5.0,
        name: str = "tiny",
        quality: Any = None,
        changes: Mapping[str, Any] | None = None,
    ) -> Recipe:
        facts: Mapping[str, Any] = {
            "schema": 1,
            "name": name,
            "checkpoint": "tiny-llama",
            "target": "local",
            "engine": {"max_context": 128, "max_batch": 2, "threads": 1},
            "calibration": {"data": "calibration.jsonl", "samples": 8, "length": 64},
            "passes": [
                *NAMES[:3],
                {"quantize-weights": {"bits": bits, "block_size": 32, "budget": LOOSE}},
                {"quantize-kv-cache": {"budget": {"kld_mean": budget}}},
            ],
            "validation": {"quality": quality},
        }
        path = folder / f"{name}.yaml"
        path.write_text(json.dumps({**facts, **(changes or {})}))  # JSON is YAML
        return Recipe.load(path)

    return write


@pytest.fixture
def recipe(tmp_path: Path, tiny_checkpoint: Path) -> Write:
    """Write a recipe for the tiny checkpoint."""
    return writer(tmp_path)


@dataclass(frozen=True)
class Done:
    """The recipe as it is without arguments, built without a cache and then with an empty one, which it has filled."""

    without: str
    digest: str
    report_without: records.Report
    report: records.Report
    folder: Path

    def cache(self, tmp_path: Path, *kinds: str) -> None:
        """Let the test begin with a copy of the cache: with entries of `kinds` alone, where some are named."""
        shutil.copytree(self.folder / "cache", tmp_path / "cache")
        for entry in Cache(tmp_path / "cache").entries():
            if kinds and entry.kind not in kinds:
                shutil.rmtree(tmp_path / "cache" / "entries" / entry.digest)


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> Done:
    folder = tmp_path_factory.mktemp("done")
    write_checkpoint(folder / "tiny-llama")
    written = writer(folder)()
    without, report_without = build(written, folder, cached=False)
    digest, report = build(written, folder)
    return Done(without, digest, report_without, report, folder)


class Recorded(Silent):
    """Keeps the titles of stages, and does something when one begins."""

    def __init__(self, on_stage: Callable[[str], None] = lambda title: None) -> None:
        self.titles: list[str] = []
        self.on_stage = on_stage

    def stage(self, title: str) -> None:
        self.titles.append(title)
        self.on_stage(title)


def build(recipe: Recipe, tmp_path: Path, *, cached: bool = True, progress: Recorded | None = None) -> tuple[str, Any]:
    """Build in a folder of its own; return the content digest and the report."""
    folder = tmp_path / f"out-{len(list(tmp_path.glob('out-*')))}"
    result = pipeline.build(recipe, folder, progress, partial(Cache, tmp_path / "cache", 10**9) if cached else None)
    artifact = Artifact.open(result.path)
    artifact.verify()
    assert not list(folder.glob("*/.[!l]*"))  # no private cache is left
    return artifact.manifest.content_digest, records.read(artifact)


def reused(report: records.Report) -> list[str]:
    return [done.name for done in report.passes if done.reused]


def test_a_second_build_proves_nothing_again_and_has_the_same_bytes(
    recipe: Write, done: Done, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert reused(done.report_without) == []
    report = done.report
    assert reused(report) == []
    done.cache(tmp_path)
    for name in ("_prove", "check"):
        monkeypatch.setattr(Verifier, name, None)  # who proves, fails
    monkeypatch.setattr("llmforge.trace.trace", None)
    monkeypatch.setattr(trace_stage, "verify_trace", None)
    monkeypatch.setattr("llmforge.backends.onnxruntime.builder.prove", None)
    recorded = Recorded()
    warm, again = build(recipe(), tmp_path, progress=recorded)
    assert done.without == done.digest == warm
    assert report.build.reused == records.ReusedRecord()
    assert again.build.reused == records.ReusedRecord(
        stages=("trace", "trace-proof", "engine"), layers=(0, 1), passes=tuple(NAMES)
    )
    assert reused(again) == NAMES
    said = [title.removesuffix(": reused") for title in recorded.titles if title.endswith(" reused")]
    assert said == ["Trace", "Verify trace", "Calibrate: all layers reused", *(f"Pass {name}" for name in NAMES)]
    assert "Prepare verification of passes" not in recorded.titles
    for before, after in zip(report.passes, again.passes, strict=True):
        assert after.rewritten == before.rewritten
        assert after.skipped == before.skipped
        assert after.verification == before.verification.model_copy(update={"seconds": 0.0})


@pytest.mark.thorough
def test_an_engine_that_fails_beside_the_build_is_not_published_and_not_kept(
    recipe: Write, done: Done, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done.cache(tmp_path)
    for entry in Cache(tmp_path / "cache").entries():
        if entry.kind == "engine-proof":
            shutil.rmtree(tmp_path / "cache" / "entries" / entry.digest)

    def fail(*_: object) -> None:
        raise VerificationError("the engine returns NaN")

    with monkeypatch.context() as patched:
        patched.setattr("llmforge.backends.onnxruntime.builder.prove", fail)
        for _ in range(2):
            with pytest.raises(VerificationError, match="the engine returns NaN"):
                build(recipe(), tmp_path)
    assert not [path for path in tmp_path.glob("out-*/tiny/*") if not path.name.startswith(".")]
    digest, report = build(recipe(), tmp_path)
    assert digest == done.digest
    assert "engine" not in report.build.reused.stages


def test_the_baseline_runs_once(recipe: Write, done: Done, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    done.cache(tmp_path)
    text = {"data": "evaluation.jsonl", "context": 64}
    (tmp_path / "evaluation.jsonl").write_text(
        "\n".join(json.dumps({"id": f"e{i}", "text": f"text {i}: " + " ".join(WORDS[i:])}) for i in range(8))
    )
    cold, report = build(recipe(quality=text), tmp_path)
    assert report.build.reused.stages == ("trace", "trace-proof", "engine")
    monkeypatch.setattr(Baseline, "logits", None)
    recorded = Recorded()
    warm, again = build(recipe(quality=text), tmp_path, progress=recorded)
    assert cold == warm
    assert "Run baseline: reused" in recorded.titles
    assert again.build.reused.stages == ("trace", "trace-proof", "engine", "baseline")
    assert report.quality == again.quality
    assert again.quality is not None


@pytest.mark.slow
def test_a_baseline_that_is_streamed_gives_the_same_quality_and_is_kept_as_hidden_states(
    recipe: Write, done: Done, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = {"data": "evaluation.jsonl", "context": 64}
    (tmp_path / "evaluation.jsonl").write_text(
        "\n".join(json.dumps({"id": f"e{i}", "text": f"text {i}: " + " ".join(WORDS[i:])}) for i in range(8))
    )
    _, whole = build(recipe(quality=text), tmp_path, cached=False)
    monkeypatch.setattr(evidence, "open_baseline", partial(open_baseline, whole_bytes=0))
    recorded = Recorded()
    _, without = build(recipe(quality=text), tmp_path, cached=False, progress=recorded)
    assert recorded.titles.index("Run baseline") < recorded.titles.index("Load engine")  # not both in memory
    done.cache(tmp_path)
    _, cold = build(recipe(quality=text), tmp_path)
    monkeypatch.setattr(StreamedBaseline, "walk", None)
    _, warm = build(recipe(quality=text), tmp_path)
    assert warm.build.reused.stages == ("trace", "trace-proof", "engine", "baseline")
    assert warm.quality is not None
    assert whole.quality == without.quality == cold.quality == warm.quality
    assert "layer by layer" not in str(whole.quality_baseline)
    assert "layer by layer" in str(warm.quality_baseline)


@pytest.mark.slow
def test_a_baseline_that_does_not_fit_is_not_timed_and_the_report_says_so(
    recipe: Write, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = {"data": "evaluation.jsonl", "context": 64}
    (tmp_path / "evaluation.jsonl").write_text(
        "\n".join(json.dumps({"id": f"e{i}", "text": f"text {i}: " + " ".join(WORDS[i:])}) for i in range(8))
    )
    timed = {"prompt_tokens": [4], "output_tokens": 2, "repetitions": 1}
    asked = recipe(quality=text, changes={"validation": {"quality": text, "latency": timed}})
    monkeypatch.setattr(evidence, "open_baseline", partial(open_baseline, whole_bytes=0))
    for free, beside in ((1 << 40, True), (1000, False)):
        monkeypatch.setattr(resources, "free_memory_bytes", lambda free=free: free)
        _, report = build(asked, tmp_path, cached=False)
        assert report.quality is not None  # it runs layer by layer
        assert report.latency is not None
        assert (report.latency.points[0].baseline is not None) == beside
        notes = [note for note in report.notes if "is not timed beside the artifact" in note]
        assert len(notes) == (not beside)
    assert "its weights in fp32 take " in notes[0]
    assert notes[0].endswith(", and 1.00 kB of memory are free")


@pytest.mark.slow
def test_answers_of_a_streamed_baseline_are_short_and_the_report_says_so(
    recipe: Write, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "evaluation.jsonl").write_text(
        "\n".join(json.dumps({"id": f"e{i}", "text": f"text {i}: " + " ".join(WORDS[i:])}) for i in range(3))
    )
    write_checkpoint(tmp_path / "longer", max_position_embeddings=192)
    room = {"checkpoint": "longer", "engine": {"max_context": 192, "max_batch": 2, "threads": 1}}
    asked = recipe(quality={"data": "evaluation.jsonl", "context": 64, "samples": 3}, changes=room)
    _, whole = build(asked, tmp_path)
    monkeypatch.setattr(evidence, "open_baseline", partial(open_baseline, whole_bytes=0))
    _, streamed = build(asked, tmp_path)
    assert whole.quality is not None
    assert streamed.quality is not None
    # What the baseline answers is not written to its end, so that nobody knows how long it gets.
    unknown = {"baseline_tokens": None, "baseline_ended": None}
    to_compare = [answer.model_copy(update=unknown) for answer in whole.quality.answers]
    assert list(streamed.quality.answers) == to_compare
    assert any(answer.first_difference is not None for answer in whole.quality.answers)
    for ours, theirs in zip(streamed.quality.samples, whole.quality.samples, strict=True):
        assert theirs.baseline.startswith(ours.baseline)
    notes = [note for note in streamed.notes if "behind the first difference" in note]
    assert len(notes) == 1
    assert not [note for note in whole.notes if "behind the first difference" in note]


@pytest.mark.thorough
def test_a_changed_tail_reuses_the_head(recipe: Write, done: Done, tmp_path: Path) -> None:
    done.cache(tmp_path)
    _, report = build(recipe(budget=4.0), tmp_path)
    assert reused(report) == NAMES[:4]
    digest, report = build(recipe(bits=8), tmp_path)
    assert reused(report) == NAMES[:3]
    assert digest == build(recipe(bits=8), tmp_path, cached=False)[0]


def test_a_budget_that_a_pass_exceeds_is_not_hidden_by_the_cache(recipe: Write, done: Done, tmp_path: Path) -> None:
    done.cache(tmp_path)
    for _ in range(2):
        with pytest.raises(BudgetExceeded, match=r"pass quantize-kv-cache: mean KLD is .* its budget 1e-12"):
            build(recipe(budget=1e-12), tmp_path)


def test_proofs_on_other_threads_are_made_anew(recipe: Write, done: Done, tmp_path: Path) -> None:
    done.cache(tmp_path)
    _, report = build(recipe(changes={"engine": {"max_context": 128, "max_batch": 2, "threads": 2}}), tmp_path)
    assert reused(report) == []
    assert report.build.reused.stages == ("trace",)
    assert report.build.reused.layers == (0, 1)


def test_every_checkpoint_of_a_cache_has_the_configuration_that_is_its_own(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "short", max_position_embeddings=128)
    write_checkpoint(tmp_path / "long", max_position_embeddings=192)
    for _ in range(2):  # read by transformers, and from the cache
        for name, tokens in (("short", 128), ("long", 192)):
            opened = Checkpoint.located(tmp_path / name)
            with Cache(tmp_path / "cache") as cache:
                Reuse(cache).configure(opened, Silent())
            assert opened.geometry.context == tokens


def test_a_key_loses_none_of_its_parts(tmp_path: Path) -> None:
    with Cache(tmp_path / "cache") as cache:
        used = Reuse(cache)
        assert used.key("toy", [], settings="a").digest != used.key("toy", [], settings="b").digest
        for name in {*used.common, "installed", "code"}:
            with pytest.raises(AssertionError, match="would be lost"):
                used.key("toy", [], **{name: "a"})


@pytest.mark.slow
def test_another_checkpoint_shares_the_trace_alone(
    recipe: Write, done: Done, tmp_path: Path, tiny_checkpoint: Path
) -> None:
    done.cache(tmp_path)
    write_checkpoint(tiny_checkpoint, seed=1)
    recorded = Recorded()
    digest, report = build(recipe(), tmp_path, progress=recorded)
    assert reused(report) == []
    assert [title for title in recorded.titles if "reused" in title] == ["Trace: reused"]
    assert digest == build(recipe(), tmp_path, cached=False)[0]


def test_changed_code_proves_what_it_computes_again(
    recipe: Write, done: Done, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done.cache(tmp_path)
    own = Code._hash

    def changed(self: Code, file: Path) -> str:
        return "changed" if file.parts[-2:] == ("methods", "gptq.py") else own(self, file)

    monkeypatch.setattr(Code, "_hash", changed)
    recorded = Recorded()
    _, report = build(recipe(), tmp_path, progress=recorded)
    assert reused(report) == NAMES[:3]
    assert "Trace: reused" in recorded.titles
    assert "Calibrate: all layers reused" not in recorded.titles


@pytest.mark.thorough
def test_flipped_bits_are_noticed_said_and_computed_again(recipe: Write, done: Done, tmp_path: Path) -> None:
    done.cache(tmp_path)
    harmed = 0
    kinds = ("trace", "trace-proof", "calibrated-layer", "tensors", "proof")
    for entry in Cache(tmp_path / "cache").named(kinds):
        file = max((tmp_path / "cache" / "entries" / entry.digest).glob("[!r]*"), key=lambda path: path.stat().st_size)
        data = bytearray(file.read_bytes())
        data[len(data) // 2] ^= 1
        file.write_bytes(data)
        harmed += 1
    digest, report = build(recipe(), tmp_path)
    assert digest == done.without
    assert sum("was damaged and is not used" in note for note in report.notes) == harmed > 0
    _, report = build(recipe(), tmp_path)
    assert reused(report) == NAMES
    assert not [note for note in report.notes if "cache" in note]


@pytest.mark.slow
def test_entries_that_are_evicted_while_a_build_uses_them_stay(recipe: Write, done: Done, tmp_path: Path) -> None:
    done.cache(tmp_path)
    recorded = Recorded(lambda title: Cache(tmp_path / "cache", limit_bytes=0).evict())
    digest, report = build(recipe(), tmp_path, progress=recorded)
    assert digest == done.without
    assert "Trace: reused" not in recorded.titles  # evicted before anything held it
    assert report.notes == done.report_without.notes
    Cache(tmp_path / "cache", limit_bytes=0).close()
    assert Cache(tmp_path / "cache").entries() == []


def test_a_kept_trace_comes_back_as_it_was(tmp_path: Path, bf16_llama: tuple[Checkpoint, ir.Model]) -> None:
    checkpoint, model = bf16_llama
    (tmp_path / "kept").mkdir()
    kept_graph.write(model, tmp_path / "kept")
    again = kept_graph.read(tmp_path / "kept", checkpoint)
    assert again is not None
    assert graph.fingerprint(again) == graph.fingerprint(model)
    assert [node.name for node in again.graph] == [node.name for node in model.graph]
    assert dict(again.metadata_props) == dict(model.metadata_props)
    assert list(again.graph.initializers) == list(model.graph.initializers)
    for name, value in model.graph.initializers.items():
        other = again.graph.initializers[name]
        assert dict(other.metadata_props) == dict(value.metadata_props)
        assert (other.dtype, other.shape) == (value.dtype, value.shape)
        one, two = graph.tensor(value), graph.tensor(other)
        assert isinstance(two, ir.LazyTensor) == isinstance(one, ir.LazyTensor)
        assert two.tobytes() == one.tobytes()
    for node, other in zip(model.graph, again.graph, strict=True):
        assert [value.name for value in node.outputs] == [value.name for value in other.outputs]
        assert [(v.dtype, v.shape) for v in node.outputs] == [(v.dtype, v.shape) for v in other.outputs]
        assert dict(node.metadata_props) == dict(other.metadata_props)


def test_a_checkpoint_with_other_ties_is_traced_again(tmp_path: Path, tiny_checkpoint: Path) -> None:
    from safetensors.numpy import load_file, save_file

    file = tiny_checkpoint / "model.safetensors"
    tensors = load_file(file)
    embedding = tensors["model.embed_tokens.weight"]
    save_file({**tensors, "lm_head.weight": embedding.copy()}, file)
    checkpoint = Checkpoint.open(tiny_checkpoint)
    (tmp_path / "kept").mkdir()
    kept_graph.write(trace(checkpoint), tmp_path / "kept")
    assert kept_graph.read(tmp_path / "kept", checkpoint) is not None
    save_file({**tensors, "lm_head.weight": embedding + 1}, file)
    assert kept_graph.read(tmp_path / "kept", Checkpoint.open(tiny_checkpoint)) is None


_BUILD = """
import sys
from functools import partial
from pathlib import Path
from llmforge.base.progress import Silent
from llmforge.compile import pipeline
from llmforge.cache import Cache
from llmforge.recipe import Recipe

class Told(Silent):
    def stage(self, title):
        print(title, flush=True)

result = pipeline.build(Recipe.load(Path(sys.argv[1])), Path(sys.argv[2]), Told(), partial(Cache, Path(sys.argv[3])))
print("published", result.path, flush=True)
"""


def start(recipe: Recipe, tmp_path: Path, out: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", _BUILD, str(tmp_path / f"{recipe.name}.yaml"), str(tmp_path / out)]
    return subprocess.Popen(
        [*command, str(tmp_path / "cache")], stdout=subprocess.PIPE, text=True, env=dict(os.environ)
    )


def proven_passes(cache: Path) -> set[str]:
    """Name the passes whose proofs a cache holds, whatever a build does with it meanwhile."""
    found = set()
    for record in cache.glob("entries/[!.]*/record.json"):
        facts = json.loads(record.read_text())
        if facts["kind"] == "proof":
            found.add(facts["parts"]["pass"])
    return found


def wait_for_proofs(cache: Path, count: int) -> None:
    """Wait until proofs of so many passes, which run beside the build, have ended."""
    until = time.monotonic() + 120
    while len(proven_passes(cache)) < count:
        assert time.monotonic() < until, "passes are not proven"
        time.sleep(0.01)


@pytest.mark.parametrize(
    ("stage", "least"),
    [
        pytest.param("Calibrate", 0, marks=pytest.mark.slow),
        pytest.param("Pass flash-attention", 2, marks=pytest.mark.thorough),
        pytest.param("Pass quantize-kv-cache", 3, marks=pytest.mark.slow),
    ],
)
def test_a_killed_build_is_resumed_at_the_last_finished_pass(
    recipe: Write, done: Done, tmp_path: Path, stage: str, least: int
) -> None:
    done.cache(tmp_path, "trace", "trace-proof")
    with start(recipe(), tmp_path, "out") as process:
        assert process.stdout is not None
        for line in process.stdout:
            if line.startswith(stage):
                wait_for_proofs(tmp_path / "cache", least)
                process.send_signal(signal.SIGKILL)
                break
    proven = proven_passes(tmp_path / "cache")
    assert not list((tmp_path / "out").glob("*/[!.]*"))
    digest, report = build(recipe(), tmp_path)
    assert reused(report) == NAMES[: len(proven)]  # proofs follow one another
    assert set(NAMES[: len(proven)]) == proven
    assert not [note for note in report.notes if "cache" in note]
    assert digest == done.without


@pytest.mark.thorough
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("count", [2, pytest.param(8, marks=pytest.mark.slow)])
def test_builds_at_once_share_the_work_and_have_the_same_bytes(recipe: Write, tmp_path: Path, count: int) -> None:
    builds = [start(recipe(), tmp_path, f"out {number}") for number in range(count)]
    lines = [process.communicate(timeout=1200)[0].splitlines() for process in builds]
    digests = {Artifact.open(Path(told[-1].removeprefix("published "))).manifest.content_digest for told in lines}
    assert [process.returncode for process in builds] == [0] * count
    assert len(digests) == 1
    traced = [told.count("Trace") for told in lines]
    assert sum(traced) == 1
    for name in NAMES:
        assert sum(told.count(f"Pass {name}") for told in lines) == 1, name
    assert Cache(tmp_path / "cache").notes == []


@pytest.mark.thorough
def test_targets_of_a_recipe_share_all_in_front_of_the_engine(
    recipe: Write, done: Done, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    passes = [*NAMES[:3], {"quantize-weights": {"block_size": 32, "budget": LOOSE}}]
    passes.append({"lower-precision": {"dtype": "fp16", "budget": LOOSE}})
    deferred = {"max_context": 128, "max_batch": 2, "threads": 1, "deferred": True}
    others: list[dict[str, Any]] = [{"target": "cpu-generic"}, {"target": "rtx-4090", "engine": deferred}]
    expected, _ = build(recipe(changes={"passes": passes, **others[1]}), tmp_path, cached=False)
    done.cache(tmp_path)
    build(recipe(changes={"passes": passes}), tmp_path)
    for name in ("_prove", "check"):
        monkeypatch.setattr(Verifier, name, None)  # who proves, fails
    monkeypatch.setattr("llmforge.trace.trace", None)
    monkeypatch.setattr("llmforge.calibration.driver._walk", None)
    monkeypatch.setattr(trace_stage, "verify_trace", None)
    written: list[str] = []
    monkeypatch.setattr(Cache, "put", lambda cache, key, write: written.append(key.kind))
    for other in others:
        digest, report = build(recipe(changes={"passes": passes, **other}), tmp_path)
        assert reused(report) == [*NAMES[:4], "lower-precision"]
    assert digest == expected
    assert written == []


@pytest.mark.thorough
def test_a_remote_cache_gives_another_machine_all_that_one_computed(recipe: Write, tmp_path: Path) -> None:
    key = ed25519.Ed25519PrivateKey.generate()

    def remote(**keys: Any) -> Remote:
        return Remote("memory://cache", fsspec.filesystem("memory"), f"/{tmp_path.name}", **keys)

    digests = []
    for folder, reach in (("one", remote(signer=key)), ("other", remote(trusted=key.public_key()))):
        made = partial(Cache, tmp_path / folder, 10**9, remote=reach)
        result = pipeline.build(recipe(), tmp_path / f"out-{folder}", None, made)
        digests.append(Artifact.open(result.path).manifest.content_digest)
        assert not [note for note in result.report.notes if "cache" in note]
    assert digests[0] == digests[1]
    expected = records.ReusedRecord(stages=("trace", "trace-proof", "engine"), layers=(0, 1), passes=tuple(NAMES))
    assert result.report.build.reused == expected


def test_a_pass_cannot_read_the_target(bf16_llama: tuple[Checkpoint, ir.Model]) -> None:
    class Peeks(FuseNorms):
        def run(self, model: ir.Model, context: Context) -> Changes:
            assert context.target.kind  # type: ignore[attr-defined]
            return Changes()

    with pytest.raises(AttributeError, match="target") as caught:
        pass_base.run(Peeks(), bf16_llama[1].clone(), Context(targets.load("l4")))
    assert caught.value.__notes__ == ["in pass fuse-norms"]


@pytest.mark.thorough
def test_a_late_change_imports_neither_torch_nor_transformers(recipe: Write, done: Done, tmp_path: Path) -> None:
    """They take longer to import than all that is left to do."""
    done.cache(tmp_path, "trace", "trace-proof")
    rounded = recipe()
    file = tmp_path / f"{rounded.name}.yaml"
    plain = json.loads(file.read_text())
    steps = ["fuse-norms", {"quantize-weights": {"method": "rtn", "budget": {"kld_mean": 5.0}}}]
    file.write_text(json.dumps({**plain, "passes": steps}))
    build(Recipe.load(file), tmp_path)
    plain = json.loads(file.read_text())
    file.write_text(json.dumps({**plain, "engine": {**plain.get("engine", {}), "max_batch": 3}}))
    asked = _BUILD + "print(sorted({'torch', 'transformers'} & set(sys.modules)))"
    command = [sys.executable, "-c", asked, str(file), str(tmp_path / "out"), str(tmp_path / "cache")]
    told = subprocess.run(command, capture_output=True, text=True, check=True, env=dict(os.environ)).stdout
    assert "Pass quantize-weights: reused" in told
    assert told.splitlines()[-1] == "[]"


def test_packages_that_were_edited_in_place_have_keys_of_their_own(tmp_path: Path) -> None:
    with Cache(tmp_path / "cache") as cache:
        before, again, after = (Reuse(cache, installed=lambda code=code: code) for code in ("a", "a", "b"))
        for kind in ("trace", "trace-proof", "baseline", "tensors", "proof", "engine-proof"):
            keys = [each.key(kind, ["llmforge.trace"]).digest for each in (before, again, after)]
            assert keys[0] == keys[1] != keys[2]


def test_a_build_asks_for_the_code_of_packages_once_and_without_a_cache_not_at_all(
    recipe: Write, done: Done, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done.cache(tmp_path)
    asked: list[str] = []
    whole = installed.digest
    monkeypatch.setattr(installed, "digest", lambda: (asked.append("once"), whole())[1])
    _, report = build(recipe(), tmp_path)
    assert asked == ["once"]
    assert report.build.reused.layers == (0, 1)
    with reuse.opened(None, tmp_path, Silent()) as kept:
        assert kept.installed() == ""
    assert asked == ["once"]


def zero(folder: Path) -> None:
    """Overwrite the weights of an engine."""
    (file,) = (folder / "engine").glob("*.data")
    with file.open("r+b") as stream:
        stream.write(bytes(100_000))


TAMPERED: dict[str, tuple[Any, str]] = {
    "after the engine is written, before it is measured": (evidence, "measure"),
    "after it is measured, before it is sealed": (artifact, "seal"),
    "after it is sealed": (render, "write"),
    "after it got its name": (store, "_sync_folder"),
}


@pytest.mark.parametrize("at", TAMPERED)
def test_what_is_not_what_was_measured_is_not_published(
    at: str, recipe: Write, done: Done, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done.cache(tmp_path)
    out = tmp_path / "out-0" / "tiny"
    module, name = TAMPERED[at]
    whole = getattr(module, name)
    tampered: list[Path] = []

    def hooked(*given: Any, **named: Any) -> Any:
        if not tampered and (name != "_sync_folder" or out in given):  # which is called for each folder
            (folder,) = [each for each in out.iterdir() if each.is_dir()]
            assert folder.name.startswith(".") == (name != "_sync_folder")
            tampered.append(folder)
            zero(folder)
        return whole(*given, **named)

    monkeypatch.setattr(module, name, hooked)
    with pytest.raises(VerificationError, match=r"engine/model\.onnx\.data: was changed after the build") as caught:
        build(recipe(), tmp_path)
    assert caught.value.exit_code == 7
    assert len(tampered) == 1
    assert [path.name for path in out.iterdir()] == [".lock"]


def test_a_version_that_is_there_stays_where_its_successor_is_refused(
    recipe: Write, done: Done, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done.cache(tmp_path)
    cache = partial(Cache, tmp_path / "cache", 10**9)
    published = pipeline.build(recipe(), tmp_path / "out", None, cache).path
    monkeypatch.setattr(signals, "decided", lambda: zero(next((tmp_path / "out" / "tiny").glob(".building-*[!k]"))))
    with pytest.raises(VerificationError):
        pipeline.build(recipe(), tmp_path / "out", None, cache)
    Artifact.open(published).verify()
    assert len(Artifact.open(published).evidence) == 1
