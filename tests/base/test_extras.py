"""Which extra brings which module, and what is said where one is missing, in another version, or broken."""

from __future__ import annotations

import importlib
import importlib.util
from importlib import metadata
from types import ModuleType

import pytest
from click.testing import CliRunner

from llmforge.base import extras
from llmforge.base.errors import EnvironmentLacks, VersionMismatch
from llmforge.cli import cli, root


def absent(monkeypatch: pytest.MonkeyPatch, *modules: str) -> None:
    """Let modules, and what installs them, not be here."""
    spec, version = importlib.util.find_spec, metadata.version

    def find_spec(name: str) -> object:
        return None if name in modules else spec(name)

    def installed(name: str) -> str:
        if name.replace("-", "_") in modules:
            raise metadata.PackageNotFoundError(name)
        return version(name)

    monkeypatch.setattr(importlib.util, "find_spec", find_spec)
    monkeypatch.setattr(metadata, "version", installed)


def test_every_requirement_is_known_by_the_module_that_it_brings() -> None:
    known = {each.module for each in extras.requirements() if each.extra not in (extras.DEVELOPMENT, "docs")}
    assert {"torch", "onnx_ir", "ruamel.yaml", "cuda.bindings", "onnxruntime", "prometheus_client"} <= known
    export_format = {
        "tensorrt",
        "compressed_tensors",
        "gguf",
        "mlflow",
    }  # of NVIDIA's index, and what the extra `dev` does not bring
    for module in known - export_format:
        assert importlib.util.find_spec(module) is not None, module


def test_no_extra_but_its_own_brings_a_runtime() -> None:
    bringing = {each.extra for each in extras.requirements() if each.module == extras.RUNTIME}
    assert bringing == {"cpu", "cuda"}


def test_what_is_installed_whole_is_no_trouble() -> None:
    for module in ("torch", "onnxruntime.capi", "cuda", "click", "no_such_module"):
        assert extras.trouble(module) is None


@pytest.mark.parametrize(
    ("module", "gone", "hint"),
    [
        ("torch", (), "pip install 'llmforge[build]'"),
        ("torch._dynamo", ("onnxruntime",), "pip install 'llmforge[build,cpu]'"),
        ("starlette.routing", (), "pip install 'llmforge[serve]'"),
        ("starlette", ("onnxruntime",), "pip install 'llmforge[cpu,serve]'"),
        ("onnxruntime", (), "pip install 'llmforge[cpu]'"),
        ("llguidance", ("onnxruntime",), "pip install 'llmforge[constraints]'"),
        ("pydantic", (), "pip install llmforge"),
    ],
)
def test_what_is_missing_names_its_extra(
    module: str, gone: tuple[str, ...], hint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    top = module.partition(".")[0]
    absent(monkeypatch, top, *gone)
    found = extras.explain(ModuleNotFoundError(f"No module named {module!r}", name=module))
    assert found is not None
    assert (found.message, found.hint) == (f"{top} is not installed", hint)


def test_what_a_command_needs_is_looked_for_before_it_begins(monkeypatch: pytest.MonkeyPatch) -> None:
    for extra in ("build", "serve"):
        extras.require(extra)
    absent(monkeypatch, "onnxruntime")
    with pytest.raises(EnvironmentLacks, match="onnxruntime is not installed"):
        extras.require("build")
    absent(monkeypatch, "torch", "onnxscript", "onnxruntime")
    with pytest.raises(EnvironmentLacks, match="onnxscript, torch are not installed") as caught:
        extras.require("build")
    assert caught.value.hint == "pip install 'llmforge[build,cpu]'"
    for words in (["build", "recipe.yaml"], ["trace", "checkpoint"]):
        assert "onnxscript, torch are not installed" in CliRunner().invoke(cli, words).stderr


def test_the_extra_that_a_hint_names_can_be_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    absent(monkeypatch, "onnxruntime")
    found = extras.trouble("onnxruntime", "cuda")
    assert found is not None
    assert found.hint == "pip install 'llmforge[cuda]'"


def test_another_version_is_named_where_a_name_is_not_in_it(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    pin = next(each.pin for each in extras.requirements() if each.distribution == "torch")
    monkeypatch.setattr(metadata, "version", lambda name: "2.1.0+cpu")
    with pytest.raises(AttributeError) as caught:
        torch.no_such_name  # noqa: B018
    found = extras.explain(caught.value)
    assert isinstance(found, VersionMismatch)
    assert found.message == f"torch 2.1.0+cpu is installed; this llmforge requires {pin}"
    assert found.hint == f"pip install 'torch=={pin}'"


def test_errors_of_other_kinds_stay_what_they_are() -> None:
    with pytest.raises(ImportError) as caught:
        importlib.import_module("onnxruntime.no_such_part")
    assert extras.explain(caught.value) is None
    assert extras.explain(ModuleNotFoundError("No module named 'nonsense'", name="nonsense")) is None
    assert extras.explain(ImportError("no name")) is None
    assert extras.explain(AttributeError("x", name="x", obj=object())) is None
    assert extras.explain(AttributeError("x", name="x", obj=ModuleType("llmforge.base"))) is None


def test_without_metadata_or_a_source_tree_nothing_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    def nowhere(name: str) -> list[str]:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(extras, "_PROJECT", extras._PROJECT / "absent")
    monkeypatch.setattr(metadata, "requires", nowhere)
    assert extras.requirements.__wrapped__() == ()


@pytest.mark.parametrize(("missing", "code"), [("onnx_ir", 8), ("nonsense", 1)])
def test_the_command_line_tells_an_environment_from_a_bug(
    missing: str, code: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def targets(**options: object) -> None:
        raise ModuleNotFoundError(f"No module named {missing!r}", name=missing)

    absent(monkeypatch, "onnx_ir")
    monkeypatch.setattr(root.inspecting.targets, "callback", targets)
    result = CliRunner().invoke(cli, ["targets"])
    assert result.exit_code == code
    if code == 8:
        assert result.stderr.splitlines() == [
            "error: onnx-ir is not installed", "hint: pip install 'llmforge[build]'"
        ]  # fmt: skip
    else:
        assert isinstance(result.exception, ModuleNotFoundError)
