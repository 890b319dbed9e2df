"""A recipe that names one thing of each kind from a plug-in: what is built, what is said of it, and what is reused."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from llmforge import passes, targets
from llmforge.artifact import Artifact
from llmforge.backends import engines
from llmforge.backends.engines import BuildRequest
from llmforge.backends.loading import open_engine
from llmforge.base import plugins
from llmforge.base.errors import EnvironmentLacks, PluginError, UsageError, VerificationError
from llmforge.cache import Cache, Code, distributions
from llmforge.calibration import driver
from llmforge.compile import finishing, lock, pipeline, reuse
from llmforge.compile.state import BuildResult
from llmforge.diagnosis import comparison, reproducing
from llmforge.gates import records, verdict
from llmforge.gates.decision import Verdict
from llmforge.recipe import Recipe
from llmforge.rewrite import pass_base
from llmforge.runtime.config import RuntimeConfig
from llmforge.runtime.interface import StepInputs
from llmforge.serving import load as load_runner
from llmforge.verification.verifier import Verifier

from ..models import graphs
from ..models.checkpoints import write_checkpoint
from ..samples import plugin_packages

LOOSE = {"budget": {"kld_mean": 9.0}}
WEIGHTS = {"method": "narrow-rtn", "narrowest": 0.7, "symmetric": True, **LOOSE}
PASSES = [{"quantize-weights": WEIGHTS}, {"zero-small-weights": {"share": 0.1, **LOOSE}}]
SENTENCE = "pass {0} moves a weight of layer {0} into a block, and a scale with it "


def write(folder: Path, **changes: Any) -> Recipe:
    """Write a recipe of the sample plug-in, and its text."""
    for name in ("calibration", "evaluation"):
        lines = [{"id": f"{name}-{i}", "text": SENTENCE.format(f"{name} {i}") * 2} for i in range(8)]
        (folder / f"{name}.jsonl").write_text("\n".join(map(json.dumps, lines)))
    facts = {
        "schema": 1,
        "name": "toy",
        "checkpoint": "tiny-llama",
        "target": "sample-box",
        "engine": {"backend": "sample-plain", "max_context": 64, "threads": 1},
        "calibration": {"data": "calibration.jsonl", "samples": 4, "length": 32},
        "passes": PASSES[::-1],
        "validation": {"quality": {"data": "evaluation.jsonl", "context": 32, "metrics": ["rank_moved"]}},
        "gates": {"rank_moved": {"max": 0.25}},
    }
    path = folder / "recipe.yaml"
    path.write_text(json.dumps({**facts, **changes}))
    return Recipe.load(path)


TEXTS = [np.random.default_rng(0).integers(0, graphs.PROMISES.vocabulary, 24) for _ in range(4)]


@dataclass(frozen=True)
class Place:
    """Where the checkpoint and the recipe lie, and the package of the sample that is installed."""

    folder: Path
    package: Path


@dataclass(frozen=True)
class Built(Place):
    """A build of the sample there, with its cache."""

    result: BuildResult


def build(folder: Path, out: str, **changes: Any) -> BuildResult:
    return pipeline.build(write(folder, **changes), folder / out, None, partial(Cache, folder / "cache", 10**9))


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    folder = tmp_path_factory.mktemp("plugins")
    write_checkpoint(folder / "tiny-llama")
    package = plugin_packages.install_sample(folder / "site")
    with plugin_packages.on_path(folder / "site"):
        yield Place(folder, package)


@pytest.fixture(scope="module")
def built(place: Place) -> Built:
    return Built(place.folder, place.package, build(place.folder, "first"))


def test_its_pass_is_proven_and_its_engine_is_loaded(place: Place, tmp_path: Path) -> None:
    recipe = write(place.folder)
    model, step = graphs.llama(), recipe.instantiate(passes.ALL)[0]
    verifier = Verifier(model, promises=graphs.PROMISES, folder=tmp_path, texts=TEXTS)
    found = verifier.check(step, model, pass_base.run(step, model, graphs.CPU))
    assert not pass_base.run(step, model, graphs.CPU)  # a second run changes nothing
    assert found.kld_mean is not None
    assert 0 < found.kld_mean < 9
    target = targets.load("sample-box")
    builder = engines.for_target("sample-plain", target)
    lowered, _ = builder.lower(model, target, recipe.engine)
    engine = builder.build(BuildRequest(lowered, tmp_path / "engine", recipe.engine, target, [0], None))
    engines.check_foreign(engine, pass_base.plugins.found().plugins[-1], target)
    opened = open_engine(engine.folder, RuntimeConfig.read(engine.folder / "runtime.json"))
    logits = opened.step(StepInputs(np.array([[1, 2]], np.int64), np.array([0], np.int32)), opened.allocate(1, 8))
    assert logits.shape == (1, 1, graphs.PROMISES.vocabulary)
    assert not engine.config.session.optimize


# A whole build -------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_every_record_names_the_package_and_its_code(built: Built) -> None:
    parts = (
        "pass zero-small-weights", "quantization method narrow-rtn", "target sample-box", "backend sample-plain",
        "metric rank_moved",
    )  # fmt: skip
    report, opened = built.result.report, Artifact.open(built.result.path)
    [used] = report.plugins
    assert (used.package, used.version, used.parts) == ("llmforge-sample", "0.1.0", parts)
    assert used.sha256 == Code().digest_of(plugins.Package("llmforge-sample", "0.1.0"))
    assert f"plug-in llmforge-sample 0.1.0 took part: {', '.join(parts)}" in report.notes
    locked = lock.read(opened)
    assert locked.plugins == report.plugins
    assert locked.packages["llmforge-sample"] == "0.1.0"
    assert locked.packages.get("numpy")
    assert opened.manifest.recipe["plugins"] == {"llmforge-sample": "0.1.0"}
    assert opened.manifest.requires["llmforge-sample"] == "0.1.0"
    statement = json.loads((built.result.path / "provenance" / "statement.json").read_text())
    dependencies = statement["predicate"]["buildDefinition"]["resolvedDependencies"]
    named = next(each for each in dependencies if "plug-in" in each.get("name", ""))
    assert named["name"] == "plug-in llmforge-sample 0.1.0"
    assert named["digest"] == {"llmforgePackage": used.sha256}
    shown = (built.result.path / report_folder(built) / "report.md").read_text()
    assert "llmforge-sample 0.1.0" in shown
    assert "Rank moved" in shown


def report_folder(built: Built) -> Path:
    [page] = built.result.path.rglob("report.md")
    return page.parent.relative_to(built.result.path)


@pytest.mark.slow
def test_a_foreign_pass_is_verified_as_ours_are(built: Built) -> None:
    first, second = built.result.report.passes
    assert len(first.rewritten) == 14
    assert first.verification.budget == 9.0
    assert first.verification.kld_mean is not None
    assert 0 < first.verification.kld_mean < 9
    assert {change.what.partition(",")[0] for change in second.rewritten} >= {"narrow-rtn"}
    with pytest.raises(VerificationError, match="zero-small-weights"):
        build(built.folder, "strict", passes=[{"zero-small-weights": {"share": 0.9, "budget": {"kld_mean": 1e-9}}}])


@pytest.mark.slow
def test_its_metric_decides_a_gate_and_is_made_again_of_its_raw_values(built: Built) -> None:
    report = built.result.report
    [gate] = report.gates
    assert (gate.metric, gate.verdict) == ("rank_moved", Verdict.FAIL)  # the weights are random
    assert report.quality is not None
    assert 0.25 < report.quality.figures["rank_moved"].value <= 1
    assert list(verdict._figures(report)) == []
    sums = report.quality.per_document[0]
    moved = sums.model_copy(update={"rank_moved": sums.figures["rank_moved"] + 1})
    quality = report.quality.model_copy(update={"per_document": (moved, *report.quality.per_document[1:])})
    assert "rank_moved" in list(verdict._figures(report.model_copy(update={"quality": quality})))


@pytest.mark.slow
def test_its_engine_runs_as_it_is_written(built: Built) -> None:
    runner = load_runner(built.result.path, threads=1)
    assert runner.config.provider == "sample-plain"
    assert not runner.config.session.optimize
    assert "".join(chunk.text for chunk in runner.generate([1, 5, 9])) is not None


@pytest.mark.slow
def test_a_host_without_it_reads_everything_and_runs_nothing(built: Built, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(sys, "path", [each for each in sys.path if each != str(built.package.parent)])
        with pytest.raises(
            EnvironmentLacks, match=r"backend sample-plain of the plug-in llmforge-sample 0\.1\.0"
        ) as got:
            load_runner(built.result.path, threads=1)
        assert got.value.exit_code == 8
        report = records.read(Artifact.open(built.result.path))
        assert list(verdict._figures(report)) == []
        assert report.plugins[0].package == "llmforge-sample"


# What a changed line costs -------------------------------------------------------------------------------------------

Keys = Mapping[str, str]


def keys(place: Place) -> Keys:
    """Make the digests of code that the keys of each stage have; one that changes is a miss of that stage alone."""
    recipe, code = write(place.folder, passes=PASSES), Code()
    steps = recipe.instantiate(passes.ALL)
    demands = [demand for step in steps for demand in step.demands()]
    assert demands == []  # the method needs no text
    found = {step.name: code.digest(*reuse.modules_of(step)) for step in steps}
    found["engine"] = code.digest("llmforge_sample.builder", "llmforge_sample.session")
    found["trace"] = code.digest(*reuse._TRACE_CODE)
    found["proof"] = code.digest(reuse.PROOF_CODE)
    found["fuse-norms"] = code.digest("llmforge.passes.fuse_norms")
    found["calibration"] = repr(driver._code(["llmforge.quantization.methods.gptq"]))
    return found


def edit(file: Path, add: Callable[[str], str]) -> None:
    file.write_text(add(file.read_text()))


@pytest.fixture
def package(place: Place) -> Iterator[Path]:
    """The folder of the package, which is as it was behind the test."""
    before = {file: file.read_bytes() for file in place.package.rglob("*") if file.suffix in (".py", ".yaml")}
    yield place.package
    for file in place.package.rglob("*"):
        if file.is_file() and file not in before and file.suffix != ".pyc":
            file.unlink()
    for file, content in before.items():
        file.write_bytes(content)


@pytest.mark.parametrize(
    ("file", "missed"),
    [
        ("passes.py", {"zero-small-weights"}),
        ("methods.py", {"quantize-weights"}),
        ("search.py", {"quantize-weights"}),  # which the method imports
        ("metrics.py", set()),
        ("backends.py", set()),  # the record: what it decides stands in the recipe, and in the engine's files
        ("builder.py", {"engine"}),
        ("session.py", {"engine"}),
        ("targets/__init__.py", set()),
        ("__init__.py", {"zero-small-weights", "quantize-weights", "engine"}),
        # No Python: any of its modules may read it.
        ("targets/sample-box.yaml", {"zero-small-weights", "quantize-weights", "engine"}),
    ],
)
def test_a_changed_line_is_a_miss_of_what_uses_it_alone(
    file: str, missed: set[str], place: Place, package: Path
) -> None:
    before = keys(place)
    edit(package / file, lambda text: f"{text}\n# changed\n")
    after = keys(place)
    assert {name for name in before if before[name] != after[name]} == missed


@pytest.mark.slow
def test_a_line_changes_what_is_reused(built: Built, package: Path) -> None:
    again = build(built.folder, "again").report.build.reused
    assert again.passes == ("zero-small-weights", "quantize-weights")
    assert again.stages == ("trace", "trace-proof", "engine", "baseline")
    edit(package / "methods.py", lambda text: f"{text}\n# changed\n")
    changed = build(built.folder, "changed")
    assert changed.report.build.reused.passes == ("zero-small-weights",)
    assert changed.report.plugins[0].sha256 != built.result.report.plugins[0].sha256
    assert changed.report.content == built.result.report.content  # a comment changes no byte
    told = comparison.compare(Artifact.open(built.result.path), Artifact.open(changed.path))
    assert [line.partition(":")[0] for line in told.environment] == ["code of llmforge-sample"]


@pytest.mark.slow
def test_what_an_artifact_records_is_a_recipe(built: Built, tmp_path: Path) -> None:
    texts = [built.folder / f"{name}.jsonl" for name in ("calibration", "evaluation")]
    recipe = reproducing.recorded(built.result.path, built.folder / "tiny-llama", texts, tmp_path)
    finishing.check_recipe(recipe, Artifact.open(built.result.path))
    with pytest.MonkeyPatch.context() as patch:
        away = [each for each in sys.path if each != str(built.package.parent)]
        plugin_packages.install_sample(tmp_path / "site", version="0.2.0")
        patch.setattr(sys, "path", [str(tmp_path / "site"), *away])
        with pytest.raises(UsageError, match="plugins differ"):
            finishing.check_recipe(recipe, Artifact.open(built.result.path))


def test_a_version_and_a_requirement_are_part_of_the_code(place: Place, package: Path, tmp_path: Path) -> None:
    module, before = "llmforge_sample.passes", Code().digest("llmforge_sample.passes")
    for name in ("newer", "requiring", "other"):
        plugin_packages.install_sample(tmp_path / name, version="0.1.0" if name != "newer" else "0.1.1")
    with plugin_packages.on_path(tmp_path / "other"):
        assert distributions.folders("llmforge_sample")[0] in (package, tmp_path / "other" / "llmforge_sample")
    plugin_packages.write_metadata(tmp_path / "numbers", "some-numbers", "7", {})
    metadata = tmp_path / "requiring" / "llmforge_sample-0.1.0.dist-info" / "METADATA"
    edit(metadata, lambda text: f"{text}Requires-Dist: some-numbers>=1\n")
    found = {before}
    for name in ("newer", "requiring"):
        with plugin_packages.on_path(tmp_path / name, tmp_path / "numbers"):
            found.add(Code().digest(module))
    assert len(found) == 3


def test_a_module_that_looks_for_others_counts_whole(place: Place, package: Path) -> None:
    edit(package / "search.py", lambda text: f"import importlib\n{text}")
    before = keys(place)
    edit(package / "session.py", lambda text: f"{text}\n# changed\n")
    after = keys(place)
    assert {name for name in before if before[name] != after[name]} == {"quantize-weights", "engine"}


def test_relative_imports_count(place: Place, package: Path) -> None:
    edit(package / "methods.py", lambda text: text.replace("from llmforge_sample.search", "from .search"))
    before = keys(place)
    edit(package / "search.py", lambda text: f"{text}\n# changed\n")
    assert keys(place)["quantize-weights"] != before["quantize-weights"]
    (package / "more.py").write_text("X = 1\n")
    edit(package / "search.py", lambda text: f"from . import more\n{text}")
    before = keys(place)
    (package / "more.py").write_text("X = 2\n")
    assert keys(place)["quantize-weights"] != before["quantize-weights"]


def test_a_method_of_a_plug_in_is_part_of_calibrations_key(place: Place, package: Path) -> None:
    before = driver._code(["llmforge_sample.methods"])
    edit(package / "search.py", lambda text: f"{text}\n# changed\n")
    assert driver._code(["llmforge_sample.methods"]) != before


@pytest.mark.slow
def test_a_builder_that_hides_where_its_engine_is_from_is_refused(
    built: Built, monkeypatch: pytest.MonkeyPatch
) -> None:
    import llmforge_sample.builder as builder  # type: ignore[import-not-found]

    from llmforge.backends.onnxruntime import builder as onnxruntime

    monkeypatch.setattr(builder, "build", lambda request: built_as_ours(onnxruntime.build(request), request))
    with pytest.raises(PluginError, match=r"backend sample-plain .* wrote a runtime.json with other facts"):
        build(built.folder, "hidden", passes=[], gates={}, validation={})


def built_as_ours(engine: Any, request: Any) -> Any:
    from dataclasses import replace

    config = replace(engine.config, provider="cpu", plugin=None)
    (request.folder / "runtime.json").write_text(config.to_json())
    return replace(engine, config=config)
