"""Each backend's record names modules that are there, extras that bring it, and the devices that it has code for."""

from __future__ import annotations

import ast
import importlib
import json
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import get_args

import pytest

from llmforge import backends, passes, targets
from llmforge.backends import BACKENDS, PROVIDERS, BackendName, PlanModule, ProviderName
from llmforge.backends.onnxruntime import kernels
from llmforge.backends.record import BackendRecord, Provider, Use
from llmforge.metrics.agreement import RUNTIMES

ROOT = Path(__file__).resolve().parents[2]
ELSEWHERE = ("compressed-tensors", "gguf")


@pytest.mark.parametrize("provider", PROVIDERS.values(), ids=lambda provider: provider.name)
def test_a_provider_names_what_builds_and_what_loads(provider: Provider) -> None:
    builder = importlib.import_module(provider.builder)
    assert all(callable(getattr(builder, name)) for name in ("require_host", "lower", "build"))
    assert callable(importlib.import_module(provider.session).open_engine)


@pytest.mark.parametrize("provider", PROVIDERS.values(), ids=lambda provider: provider.name)
def test_an_extra_of_its_name_brings_a_provider(provider: Provider) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extra = project["optional-dependencies"][provider.name]
    assert any(
        each.startswith((f"{provider.package}[", f"{provider.package}=", f"{provider.package}>")) for each in extra
    )
    if provider.requirements == ():  # servers of others load what it writes
        return
    needed = [each for each in provider.requirements if "{version}" not in each and each != "onnxruntime"]
    assert set(needed) <= set(extra)


def test_the_wheel_has_code_for_the_capabilities_of_its_record() -> None:
    cuda = PROVIDERS["cuda"]
    record = json.loads((ROOT / "llmforge" / "backends" / "onnxruntime" / kernels.FILE).read_text(encoding="utf-8"))
    assert cuda.capabilities == tuple(map(str, record["machine_code"]))
    assert not record["ptx"]
    assert record["wheel"].replace("==", " ") in cuda.uncovered


def test_annotations_list_what_the_records_hold() -> None:
    assert BackendName.__metadata__[0].choices() == list(BACKENDS)  # type: ignore[attr-defined]
    assert tuple(BACKENDS) == ("onnxruntime", "tensorrt", "tensorrt-rtx", *ELSEWHERE)
    assert ProviderName.__metadata__[0].choices() == list(PROVIDERS)  # type: ignore[attr-defined]
    assert tuple(PROVIDERS) == ("cpu", "cuda", "tensorrt", "tensorrt-rtx", *ELSEWHERE)
    assert get_args(PlanModule) == ("tensorrt", "tensorrt_rtx")
    assert {backends.of_provider(name).name for name in PROVIDERS} == set(BACKENDS)
    assert backends.of_module("tensorrt_rtx") is BACKENDS["tensorrt-rtx"]


FOLDERS = [
    file.parent for file in (ROOT / "llmforge" / "backends").glob("*/__init__.py") if "BACKEND" in file.read_text()
]
SESSIONS = sorted(
    {each.session for each in PROVIDERS.values()} | {each.paged.session for each in PROVIDERS.values() if each.paged}
)
BUILD_TOOLS = ("click", "ml_dtypes", "onnx", "onnx_ir", "onnxscript", "psutil", "pydantic", "safetensors", "torch")
BUILD_ROOMS = ("checkpoint", "compile", "quantization", "recipe", "rewrite", "targets", "trace")


def imported(file: Path) -> set[str]:
    """Name the modules that a file imports, anywhere."""
    nodes = [*ast.walk(ast.parse(file.read_text(encoding="utf-8")))]
    whole = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
    return whole | {str(node.module) for node in nodes if isinstance(node, ast.ImportFrom)}


def test_the_table_has_every_folder() -> None:
    assert {folder.name for folder in FOLDERS} == {name.replace("-", "_") for name in BACKENDS}


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.name)
def test_a_record_is_data(folder: Path) -> None:
    known = {"__future__", "dataclasses", "llmforge.backends", "llmforge.backends.record"}
    assert imported(folder / "__init__.py") <= known
    types = imported(ROOT / "llmforge" / "backends" / "record.py")
    assert types <= {"__future__", "collections.abc", "dataclasses", "typing"}


@pytest.mark.parametrize("session", SESSIONS)
def test_a_session_imports_nothing_that_building_needs(session: str) -> None:
    program = f"import sys, importlib; importlib.import_module({session!r}); print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=ROOT, check=True)
    loaded = set(done.stdout.split())
    assert session in loaded
    assert not loaded & {*BUILD_TOOLS, *(f"llmforge.{room}" for room in BUILD_ROOMS)}


def test_a_backend_of_cpus_alone_says_so() -> None:
    own = Provider("toy", "cpu", "toy", (), "toy.builder", "toy.session", {"fp32": Use(("compute", "weights", "kv"))})
    toy = BackendRecord("toy", "Toy", "toy", (own,), compiled=False, scales="blocks", alone="it is a toy")
    assert toy.unsupported(None) is None
    assert toy.unsupported("89") == "it builds engines for CPUs only"
    assert own.support(None).kv == {"fp32"}


@pytest.mark.parametrize("name", ELSEWHERE)
def test_what_servers_of_others_load_is_written_for_any_target(name: str) -> None:
    record = BACKENDS[name].export_format
    assert record is not None
    assert set(record.runtimes) <= set(RUNTIMES)
    assert {each.writes_codes for each in passes.ALL} >= record.codes
    for target in ("cpu-generic", "t4", "b200"):
        assert targets.load(target).require_engine(name).name == name
    assert all(BACKENDS[other].export_format is None for other in BACKENDS if other not in ELSEWHERE)


def test_why_a_dtype_is_missing_on_a_device() -> None:
    taken = PROVIDERS["tensorrt"].support("75")
    assert taken.refusal("int4", "weights") == "TensorRT refuses int4 weights on SM 7.5"
    assert taken.refusal("fp8", "weights") == "SM 7.5 has no fp8 arithmetic, which came with SM 8.9"
    assert PROVIDERS["cuda"].support("80").refusal("fp8", "kv") == "it caches keys and values as bf16, fp16, int4, int8"
    assert PROVIDERS["cuda"].support("89").refusal("fp8", "kv") is None
