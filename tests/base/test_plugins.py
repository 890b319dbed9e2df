"""Plug-ins: what each kind is found by, and what is said of those that cannot be used."""

from __future__ import annotations

import contextlib
import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner

from llmforge import backends, passes, recipe, targets
from llmforge.base import plugins
from llmforge.base.errors import EnvironmentLacks, InputError, PluginError, RecipeError, UsageError, VersionMismatch
from llmforge.base.plugins import Package
from llmforge.cache import distributions
from llmforge.cli import cli
from llmforge.doctor import plugins as examined
from llmforge.metrics import catalog
from llmforge.metrics.tokens import TokenBlock
from llmforge.quantization import methods
from llmforge.quantization.grid import Grid
from llmforge.quantization.grids import dequantize
from llmforge.recipe import Recipe
from llmforge.rewrite import pass_base
from llmforge.runtime.config import RuntimeConfig

from ..models.logits import random_logits
from ..samples import plugin_packages

ROOT = Path(__file__).parents[2]
PASS = """
from typing import ClassVar
from pydantic.dataclasses import dataclass
from llmforge.rewrite.pass_base import Changes, Numerics, Pass

@dataclass(frozen=True)
class Idle(Pass):
    \"\"\"Do nothing.\"\"\"

    name: ClassVar[str] = "idle-by"
    numerics: ClassVar[Numerics] = Numerics.EXACT

    def run(self, model, context):
        return Changes()
"""
SEAMS = {
    "passes": lambda name: pass_base.SEAM.find(name, ()),
    "methods": lambda name: methods.SEAM.find(name, methods.built_in()),
    "metrics": catalog.find,
    "targets": targets.load,
    "backends": lambda name: backends.BACKENDS[name],
}


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Path]:
    """A folder that packages are installed in, where Python looks for them first."""
    folder = tmp_path / "site"
    folder.mkdir()
    with plugin_packages.on_path(folder):
        yield folder


def install(site: Path, source: str, kind: str = "passes", value: str = "bad:THING", **more: Any) -> None:
    """Install a module `bad` that brings something called `thing`."""
    points = {f"llmforge.v{more.pop('interface', 2)}.{kind}": {more.pop("name", "thing"): value}}
    plugin_packages.install(site.parent / "later" if more.pop("later", False) else site, "bad", source, points, **more)


def write(folder: Path, *names: Any, **changes: Any) -> Path:
    """Write a recipe with these passes."""
    facts = {"schema": 1, "name": "r", "checkpoint": "none", "target": "cpu-avx2", "passes": list(names)}
    path = folder / "recipe.yaml"
    path.write_text(json.dumps({**facts, "engine": {"max_context": 64}, **changes}))
    return path


def made(folder: Path, *names: Any, **changes: Any) -> Any:
    return Recipe.load(write(folder, *names, **changes)).instantiate(passes.ALL)


# What each kind is found by -----------------------------------------------------------------------------------------


def test_the_sample_brings_one_of_each(site: Path) -> None:
    plugin_packages.install_sample(site)
    found = {each.kind: each.name for each in plugins.found().plugins}
    assert list(found) == list(plugins.KINDS)
    for kind, name in found.items():
        assert getattr(SEAMS[kind](name), "name", None) == name
    assert distributions.of_module("llmforge_sample.passes") == Package("llmforge-sample", "0.1.0")
    assert all(check.state == "yes" for check in examined.checks())


def test_nothing_is_imported_that_nobody_names(site: Path, tmp_path: Path) -> None:
    plugin_packages.install_sample(site)
    made(tmp_path, "fuse-norms", {"quantize-weights": {"method": "rtn", "budget": {"kld_mean": 1}}}, **TEXT)
    targets.load("cpu-avx2")
    recipe.json_schema(passes.ALL[:2])
    assert not [name for name in sys.modules if name.startswith("llmforge_sample")]


TEXT = {"calibration": {"data": "none.jsonl", "samples": 1, "length": 8}}
LOSSY = {"budget": {"kld_mean": 1.0}}


def test_options_are_checked_by_the_plug_in_as_ours_are(site: Path, tmp_path: Path) -> None:
    plugin_packages.install_sample(site)
    [step] = made(tmp_path, {"zero-small-weights": {**LOSSY, "share": 0.25}}, **TEXT)
    assert step.share == 0.25
    with pytest.raises(RecipeError, match=r"recipe\.yaml:1:\d+: passes.zero-small-weights.share: .*less than 1"):
        made(tmp_path, {"zero-small-weights": {**LOSSY, "share": 2.0}}, **TEXT)
    with pytest.raises(RecipeError, match="budget: required key is missing"):
        made(tmp_path, {"zero-small-weights": {}}, **TEXT)
    with pytest.raises(RecipeError, match=r"unknown pass; known: .*zero-small-weights") as caught:
        made(tmp_path, "zero-small-weight")
    assert caught.value.hint == "did you mean 'zero-small-weights'?"


def test_a_method_adds_its_options_to_the_pass(site: Path, tmp_path: Path) -> None:
    plugin_packages.install_sample(site)
    [step] = made(tmp_path, {"quantize-weights": {**LOSSY, "method": "narrow-rtn", "narrowest": 0.6}}, **TEXT)
    assert (step.chosen.name, step.chosen.narrowest) == ("narrow-rtn", 0.6)
    with pytest.raises(RecipeError, match=r"narrowest: .*greater than or equal to 0.5"):
        made(tmp_path, {"quantize-weights": {**LOSSY, "method": "narrow-rtn", "narrowest": 0.1}}, **TEXT)
    with pytest.raises(RecipeError, match="narrowest: unknown key"):
        made(tmp_path, {"quantize-weights": {**LOSSY, "method": "rtn", "narrowest": 0.6}}, **TEXT)


def test_the_schema_has_them(site: Path) -> None:
    plugin_packages.install_sample(site)
    run = CliRunner().invoke(cli, ["schema"])
    assert run.exit_code == 0, run.output
    schema = json.loads(run.stdout)
    assert "zero-small-weights" in schema["$defs"]
    assert "share" in schema["$defs"]["zero-small-weights"]["properties"]
    weights = schema["$defs"]["quantize-weights"]["properties"]
    assert "narrow-rtn" in weights["method"]["enum"]
    assert weights["narrowest"]["description"].startswith("for narrow-rtn: ")
    assert "sample-plain" in schema["$defs"]["EngineSpec"]["properties"]["backend"]["enum"]
    assert (
        schema["properties"]["gates"]["properties"]["rank_moved"]["description"] == "a metric of llmforge-sample 0.1.0"
    )


def test_a_metric_is_measured_where_a_recipe_asks_for_it(site: Path, tmp_path: Path) -> None:
    plugin_packages.install_sample(site)
    quality = {"data": "none.jsonl", "context": 32}
    gates = {"rank_moved": {"max": 0.5}}
    with pytest.raises(RecipeError, match=r"gates\.rank_moved: it would not be measured") as caught:
        Recipe.load(write(tmp_path, validation={"quality": quality}, gates=gates))
    assert caught.value.hint == "set `validation.quality.metrics: [rank_moved]`, or remove the gate"
    asked = {"quality": {**quality, "metrics": ["rank_moved"]}}
    assert Recipe.load(write(tmp_path, validation=asked, gates=gates)).gates["rank_moved"].max == 0.5
    with pytest.raises(RecipeError, match=r"no plug-in brings a metric .*; known: rank_moved"):
        Recipe.load(write(tmp_path, validation={"quality": {**quality, "metrics": ["kld_mean"]}}))


def test_a_backend_that_no_target_lists_runs_where_its_record_says(site: Path) -> None:
    plugin_packages.install_sample(site)
    assert targets.load("cpu-avx2").require_engine("sample-plain").session == "llmforge_sample.session"
    with pytest.raises(EnvironmentLacks.__mro__[1], match="sample-plain"):
        targets.load("h200").require_engine("sample-plain")


# What is refused ----------------------------------------------------------------------------------------------------

BROKEN = {
    "a module that is not there": ("import nothing_of_this_name", "ModuleNotFoundError: No module named 'nothing_of"),
    "an exception": ("raise RuntimeError('boom')", r"RuntimeError: boom \(bad\.py:1\)"),
    "a wrong value": ("int('x')", r"ValueError: invalid literal .* \(bad\.py:1\)"),
    "an exit": ("import sys; sys.exit(3)", r"SystemExit: 3 \(bad\.py:1\)"),
    "a syntax error": ("def", "SyntaxError"),
    "no such attribute": ("OTHER = 1", "AttributeError: .*THING"),
}


@pytest.mark.parametrize("how", BROKEN)
def test_one_that_does_not_load_is_one_error(how: str, site: Path, tmp_path: Path) -> None:
    source, said = BROKEN[how]
    install(site, source)
    for _ in range(2):  # what was imported by halves does not look whole the second time
        with pytest.raises(
            PluginError, match=rf"^pass thing of bad 1\.0 \(bad:THING\): it does not load: {said}"
        ) as got:
            made(tmp_path, "thing")
    assert got.value.exit_code == 8
    assert got.value.hint == "upgrade it (pip install -U bad), or pip uninstall bad"
    assert made(tmp_path, "fuse-norms")  # it harms nobody who does not name it


@pytest.mark.parametrize("kind", list(plugins.KINDS))
def test_one_of_the_wrong_type_is_one_error(kind: str, site: Path) -> None:
    install(site, "THING = 3", kind)
    with pytest.raises(PluginError, match=rf"^{plugins.KINDS[kind]} thing of bad 1\.0 \(bad:THING\): .*(is|3)"):
        SEAMS[kind]("thing")


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ('"idle-by"', '"idle-too"', "Idle.name is 'idle-too'"),
        ("Numerics.EXACT", '"exact"', "Idle.numerics is no Numerics"),
        ("Numerics.EXACT", "Numerics.LOSSY", "a lossy pass has a required option `budget`"),
        ("(frozen=True)", "", "is no pydantic.dataclasses.dataclass"),
        ("def run", "def runs", "TypeError: Can't instantiate abstract class Idle"),
        ("    numerics:", "    option: plugins.Plugin\n    numerics:", "it does not load: NameError"),
    ],
)
def test_a_pass_says_what_ours_say(old: str, new: str, said: str, site: Path, tmp_path: Path) -> None:
    assert old in PASS
    install(site, PASS.replace(old, new), name="idle-by", value="bad:Idle")
    with pytest.raises(PluginError) as caught:
        made(tmp_path, "idle-by")
    assert said in caught.value.message


def test_what_a_pass_raises_is_blamed_on_its_package(site: Path, tmp_path: Path) -> None:
    install(site, PASS.replace("return Changes()", "return 1 / 0"), name="idle-by", value="bad:Idle")
    [step] = made(tmp_path, "idle-by")
    with pytest.raises(PluginError, match=r"idle-by of bad 1\.0 .* failed: ZeroDivisionError.* \(bad\.py:\d+\)") as got:
        pass_base.run(step, None, None)  # type: ignore[arg-type]
    assert got.value.hint == "report it to the authors of bad 1.0, or leave it out"


def test_a_pass_that_returns_something_else_is_refused(site: Path, tmp_path: Path) -> None:
    install(site, PASS.replace("return Changes()", "return None"), name="idle-by", value="bad:Idle")
    [step] = made(tmp_path, "idle-by")
    with pytest.raises(PluginError, match="it returned a NoneType, not Changes"):
        pass_base.run(step, None, None)  # type: ignore[arg-type]


def test_another_interface_is_refused_before_its_code_runs(site: Path, tmp_path: Path) -> None:
    install(site, "raise SystemExit", interface=3)
    with pytest.raises(PluginError, match="written for version 3 of the plug-in interface; this llmforge has 2") as got:
        made(tmp_path, "thing")
    assert "pip install -U llmforge" in str(got.value.hint)
    assert "bad" not in sys.modules


def test_a_name_of_ours_is_refused_with_both_named(site: Path, tmp_path: Path) -> None:
    install(site, PASS, name="fuse-norms", value="bad:Idle")
    with pytest.raises(PluginError, match=r"^pass fuse-norms: both llmforge and bad 1\.0 bring one of this n") as got:
        made(tmp_path, "fuse-norms")
    assert got.value.hint == "uninstall one: pip uninstall bad"
    assert made(tmp_path, "pack-qkv")


@pytest.mark.parametrize(("kind", "name"), [("targets", "h200"), ("metrics", "kld_mean"), ("backends", "onnxruntime")])
def test_names_of_other_kinds_are_refused_likewise(kind: str, name: str, site: Path, tmp_path: Path) -> None:
    install(site, "", kind, name=name)
    quality = {"quality": {"data": "none.jsonl", "context": 32}}
    with pytest.raises(PluginError, match=rf"{name}: both llmforge and bad 1\.0 bring"):
        made(tmp_path, target="h200" if kind == "targets" else "cpu-avx2", validation=quality, gates=GATES)


GATES = {"kld_mean": {"max": 1.0}}


def test_two_packages_with_one_name_are_both_named(site: Path, tmp_path: Path) -> None:
    install(site, PASS, name="idle-by", value="bad:Idle")
    plugin_packages.install(site, "worse", PASS, {"llmforge.v2.passes": {"idle-by": "worse:Idle"}})
    with pytest.raises(PluginError, match=r"both bad 1\.0 and worse 1\.0 bring one"):
        made(tmp_path, "idle-by")


def test_a_method_cannot_take_an_option_of_the_pass(site: Path, tmp_path: Path) -> None:
    folder = plugin_packages.install_sample(site)
    file = folder / "methods.py"
    file.write_text(file.read_text().replace("narrowest", "symmetric"))
    with pytest.raises(PluginError, match="its option symmetric is one of the pass quantize-weights"):
        made(tmp_path, {"quantize-weights": {**LOSSY, "method": "narrow-rtn"}}, **TEXT)


@pytest.mark.parametrize(
    ("new", "said"),
    [
        ("return codes", r"of a weight \[2, 64\] in int4-block32-asymmetric it gave a ndarray, not a QuantizedMatrix"),
        (
            "return assemble(grid, codes.reshape(n, -1), scales, zeros)",
            r"its codes are float32 \[2, 64\]; expected uint8",
        ),
        ("return assemble(grid, np.full((n, k), 16, np.uint8), scales, zeros)", "expected uint8 .*, at most 15"),
        ("return assemble(grid, np.zeros((n, k), np.uint8), scales * np.inf, zeros)", "expected finite fp32"),
        ("return codes['a']", r"it failed: IndexError: .* \(methods\.py:\d+\)"),
    ],
)
@pytest.mark.filterwarnings("ignore:invalid value")
def test_what_a_method_gives_is_looked_at(new: str, said: str, site: Path) -> None:
    file = plugin_packages.install_sample(site) / "methods.py"
    old = "return assemble(grid, codes.reshape(n, -1)[:, :k].astype(np.uint8), scales, zeros)"
    assert old in file.read_text()
    file.write_text(file.read_text().replace(old, new))
    method, weight = methods.named("narrow-rtn")(), np.random.default_rng(0).standard_normal((2, 64))
    with pytest.raises(PluginError, match=said):
        method.quantize(weight, Grid(4, 32, False))


def test_a_method_narrows_ranges_where_that_pays(site: Path) -> None:
    plugin_packages.install_sample(site)
    weight = np.random.default_rng(0).standard_normal((8, 100)).astype(np.float32)
    errors = []
    for name in ("rtn", "narrow-rtn"):
        matrix = methods.named(name)().quantize(weight, Grid(4, 32, True))
        errors.append(np.square(dequantize(matrix) - weight).sum())
    assert errors[1] < 0.98 * errors[0]


def test_what_a_pass_says_of_itself_may_fail_too(site: Path, tmp_path: Path) -> None:
    source = PASS.replace("    def run", "    def demands(self):\n        return 1 / 0\n\n    def run")
    install(site, source, name="idle-by", value="bad:Idle")
    with pytest.raises(PluginError, match=r"idle-by of bad 1\.0 .* failed: ZeroDivisionError"):
        made(tmp_path, "idle-by")


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ('TokenValue("rank_moved"', 'TokenValue("kld"', "its value 'kld' must be called 'rank_moved'"),
        ('name="rank_moved"', 'name="rank"', "its record calls itself 'rank'"),
        ('better="lower"', 'better="less"', "`better` is none of"),
    ],
)
def test_a_metric_leaves_ours_alone(old: str, new: str, said: str, site: Path) -> None:
    file = plugin_packages.install_sample(site) / "metrics.py"
    assert old in file.read_text()
    file.write_text(file.read_text().replace(old, new))
    with pytest.raises(PluginError) as caught:
        catalog.find("rank_moved")
    assert said in caught.value.message


def test_a_metric_that_gives_no_numbers_is_blamed(site: Path) -> None:
    file = plugin_packages.install_sample(site) / "metrics.py"
    file.write_text(file.read_text().replace("return ranks[0] != ranks[1]", "return ranks[0][1:] / 2"))
    metric = catalog.SEAM.find("rank_moved", ())
    assert metric is not None
    block = TokenBlock(random_logits(1, 8), random_logits(2, 8), np.zeros(8, int))
    with pytest.raises(PluginError, match=r"rank_moved is float64 .* of 8 tokens; expected a finite number"):
        metric.form.values[0].of(block)  # type: ignore[union-attr]


def test_a_target_of_a_plug_in_is_a_whole_target(site: Path) -> None:
    file = plugin_packages.install_sample(site) / "targets" / "sample-box.yaml"
    file.write_text(file.read_text().replace("isa: generic", "isa: quantum"))
    with pytest.raises(PluginError, match=r"target sample-box of llmforge-sample 0.1.0 .*not a target: isa: ") as got:
        targets.load("Sample-Box")
    assert got.value.exit_code == 8
    assert targets.load("h200")


# What is said of them -----------------------------------------------------------------------------------------------


def test_lists_show_where_each_is_from_and_what_fails(site: Path) -> None:
    plugin_packages.install_sample(site)
    install(site, "print('noise'); raise RuntimeError('boom')")
    run = CliRunner().invoke(cli, ["passes", "--json"])
    assert run.exit_code == 0, run.output
    rows = {row["name"]: row for row in json.loads(run.stdout)}
    assert rows["zero-small-weights"]["package"] == "llmforge-sample 0.1.0"
    assert rows["fuse-norms"]["package"] == "llmforge"
    assert "cannot be used" in rows["thing"]["summary"]
    listed = CliRunner().invoke(cli, ["targets"])
    assert "sample-box" in listed.stdout
    assert "llmforge-sample 0.1.0" in listed.stdout
    described = CliRunner().invoke(cli, ["passes", "zero-small-weights"])
    assert "share of the weights of each layer" in described.stdout
    refused = CliRunner().invoke(cli, ["passes", "thing"])
    assert refused.exit_code == 8
    assert "boom" in refused.stderr
    [bad] = [check for check in examined.checks() if check.state == "no"]
    assert "boom" in bad.found


def test_lists_are_as_before_without_plug_ins() -> None:
    run = CliRunner().invoke(cli, ["passes"])
    assert "llmforge " not in run.stdout


def test_the_doctor_lists_groups_that_nothing_reads(site: Path) -> None:
    plugin_packages.install(site, "bad", "", {"llmforge.v2.passess": {"a": "bad:A"}, "llmforge.passes": {"b": "bad:B"}})
    said = [(check.state, check.found) for check in examined.checks()]
    assert [state for state, _ in said] == ["no", "no"]
    assert "nothing reads the entry-point group llmforge.v2.passess" in said[0][1] + said[1][1]


@pytest.mark.parametrize(
    "text",
    [
        b"[llmforge.v2.passes]\ngarbage\n",
        b"\xff\xfe[llmforge.v2.passes]\nx=y:z\n",
        b"[llmforge.v99999.passes]\nx=y:z\n",
        b"[llmforge.v2.passes]\nthing = a b c\n",
        b"[llmforge.v2.passes]\nthing = :::\n",
        b"[llmforge.v2.passes]\nthing =\n",
        b"[llmforge.v2.passes]\n\x1b[31m = y:z\n",
    ],
)
@pytest.mark.parametrize("metadata", [b"Metadata-Version: 2.4\nName: bad\nVersion: 1\n", b"", b"Name: \xff\n", None])
def test_damaged_metadata_harms_nobody_else(text: bytes, metadata: bytes | None, site: Path) -> None:
    plugin_packages.install_sample(site)
    folder = site / "bad-1.dist-info"
    folder.mkdir()
    (folder / "entry_points.txt").write_bytes(text)
    if metadata is not None:
        (folder / "METADATA").write_bytes(metadata)
    assert SEAMS["passes"]("zero-small-weights") is not None
    with contextlib.suppress(PluginError):
        assert SEAMS["passes"]("thing") is None
    said = [check for check in examined.checks() if check.state == "no"]
    assert len(said) == 1
    assert said[0].found.isprintable()


def test_help_looks_for_no_plug_in(site: Path) -> None:
    plugin_packages.install_sample(site)
    code = (
        "import sys; from llmforge.cli import cli\n"
        "try: cli(['--help'])\n"
        "except SystemExit: pass\n"
        "assert 'importlib.metadata' not in sys.modules\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env={"PYTHONPATH": f"{ROOT}:{site}", "PATH": ""}
    )
    assert done.returncode == 0, done.stderr


# Engines of a plug-in's backend on other hosts -----------------------------------------------------------------------


@pytest.fixture
def engine(tmp_path: Path) -> Path:
    """The settings of an engine that the sample's backend runs."""
    plain = {
        "format": 3, "onnxruntime": "1.31.1", "kernels": None, "max_context": 64, "max_batch": 1, "vocabulary": 8,
        "eos_token_ids": [0], "bos_token_id": None, "caches": [], "buckets": [], "device": None, "graphs": None,
        "plan": None, "provider": "sample-plain", "provider_options": {},
        "session": {"threads": None, "optimize": False, "entries": {}},
        "plugin": {"package": "llmforge-sample", "version": "0.1.0"},
    }  # fmt: skip
    path = tmp_path / "runtime.json"
    path.write_text(json.dumps(plain))
    return path


def test_a_host_without_the_plug_in_is_told_what_to_install(engine: Path) -> None:
    with pytest.raises(EnvironmentLacks) as caught:
        RuntimeConfig.read(engine)
    said = (
        "the engine runs on the backend sample-plain of the plug-in llmforge-sample 0.1.0, which is not installed here"
    )
    assert caught.value.message == f"{engine}: {said}"
    assert caught.value.hint == "pip install 'llmforge-sample==0.1.0'"


def test_a_host_with_another_version_is_told_both(engine: Path, site: Path) -> None:
    plugin_packages.install_sample(site, version="0.2.0")
    with pytest.raises(
        VersionMismatch, match=r"built with llmforge-sample 0\.1\.0, and llmforge-sample 0\.2\.0 is inst"
    ):
        RuntimeConfig.read(engine)


def test_a_host_with_the_plug_in_reads_it(engine: Path, site: Path) -> None:
    plugin_packages.install_sample(site)
    config = RuntimeConfig.read(engine)
    assert config.requires == {"onnxruntime": "1.31.1", "llmforge-sample": "0.1.0"}
    assert json.loads(config.to_json())["plugin"] == {"package": "llmforge-sample", "version": "0.1.0"}


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"provider": "cpu"}, "plugin makes no sense where provider is cpu"),
        ({"plugin": None}, "plugin is missing where provider is sample-plain"),
        ({"plugin": 3}, "int; expected an object"),
        ({"plugin": {"package": "llmforge-sample"}}, "version missing"),
        ({"provider": "sample-plain-2"}, 'provider is "sample-plain-2"; expected one of cpu'),
        ({"provider": 4}, "provider is 4; expected one of cpu"),
    ],
)
def test_settings_that_contradict_themselves(changes: dict[str, Any], said: str, engine: Path, site: Path) -> None:
    plugin_packages.install_sample(site)
    engine.write_text(json.dumps({**json.loads(engine.read_text()), **changes}))
    with pytest.raises(InputError) as caught:
        RuntimeConfig.read(engine)
    assert said in caught.value.message


def test_serving_reads_the_record_without_tools_that_build(engine: Path, site: Path) -> None:
    plugin_packages.install_sample(site)
    code = f"""
import sys
for name in ("onnx", "onnx_ir", "torch", "transformers", "pydantic", "click", "rich"):
    sys.modules[name] = None
from pathlib import Path
from llmforge.backends import PROVIDERS
from llmforge.runtime.config import RuntimeConfig
import importlib
config = RuntimeConfig.read(Path({str(engine)!r}))
importlib.import_module(PROVIDERS[config.provider].session)
"""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env={"PYTHONPATH": f"{ROOT}:{site}", "PATH": ""}
    )
    assert done.returncode == 0, done.stderr


def test_an_unknown_backend_is_a_wrong_recipe(tmp_path: Path, site: Path) -> None:
    with pytest.raises(RecipeError, match=r"engine.backend: must be 'onnxruntime', .* or 'gguf'"):
        Recipe.load(write(tmp_path, engine={"backend": "onnx", "max_context": 64}))
    with pytest.raises(UsageError, match="no target is named 'sample-box'"):
        targets.load("sample-box")


@pytest.mark.slow
def test_pip_installs_the_sample(tmp_path: Path) -> None:
    shutil.copytree(plugin_packages.SAMPLE, tmp_path / "source")
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-build-isolation", "--no-index"]
    done = subprocess.run([*pip, "--target", "site", "./source"], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    with plugin_packages.on_path(tmp_path / "site"):
        assert [check.state for check in examined.checks()] == ["yes"]
        assert targets.load("sample-box").engines == ("onnxruntime", "sample-plain")
        assert distributions.tops() == {"llmforge_sample": Package("llmforge-sample", "0.1.0")}
