"""Which code an entry depends on: what computes it, directly or not, and nothing besides."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from llmforge.cache import Code

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def package(tmp_path: Path) -> Path:
    """Copy the package, with its passes, into a folder of the test's own."""
    shutil.copytree(ROOT / "llmforge", tmp_path / "llmforge", ignore=shutil.ignore_patterns("__pycache__", "*.so"))
    return tmp_path / "llmforge"


def changed(package: Path, file: str, *modules: str) -> bool:
    """Say whether the digest of `modules` changes when `file` does."""
    before = Code(package).digest(*modules)
    path = package / file
    path.write_bytes(path.read_bytes() + b"\n# changed\n")
    return Code(package).digest(*modules) != before


def test_gptq_invalidates_what_quantizes_by_it_and_nothing_else(package: Path) -> None:
    gptq = "quantization/methods/gptq.py"
    assert changed(package, gptq, "llmforge.passes.quantize_weights")
    assert changed(package, gptq, "llmforge.calibration.driver")
    assert not changed(package, gptq, "llmforge.passes.fuse_norms")
    assert not changed(package, gptq, "llmforge.passes.cpu_kernels")


def test_what_is_imported_by_what_is_imported_counts(package: Path) -> None:
    assert changed(package, "quantization/grids.py", "llmforge.passes.quantize_weights")
    assert changed(package, "ir/graph.py", "llmforge.passes.fuse_norms")
    assert changed(package, "passes/fuse_norms.py", "llmforge.passes.fuse_norms")
    assert changed(package, "trace/hooks/attention.py", "llmforge.trace")  # imported in a function
    assert not changed(package, "passes/pack_qkv.py", "llmforge.passes.fuse_norms")
    assert not changed(package, "cli/root.py", "llmforge.passes.quantize_weights", "llmforge.trace")


def test_compiled_kernels_count_with_their_package(package: Path) -> None:
    before = {name: Code(package).digest(f"llmforge.passes.{name}") for name in ("cpu_kernels", "pack_qkv")}
    (package / "native" / "_kernels.abi3.so").write_bytes(b"other kernels")
    after = {name: Code(package).digest(f"llmforge.passes.{name}") for name in ("cpu_kernels", "pack_qkv")}
    assert before["cpu_kernels"] != after["cpu_kernels"]
    assert before["pack_qkv"] == after["pack_qkv"]


def test_imports_for_type_checkers_do_not_count(tmp_path: Path) -> None:
    root = tmp_path / "pack"
    root.mkdir()
    (root / "__init__.py").write_text("")
    (root / "other.py").write_text("x = 1\n")
    (root / "one.py").write_text("if TYPE_CHECKING:\n    from pack import other\n")
    (root / "two.py").write_text("def f():\n    from pack.other import x\n")
    assert not changed(root, "other.py", "pack.one")
    assert changed(root, "other.py", "pack.two")
    assert Code(root).modules("pack.two") == {"pack.two", "pack.other"}


def test_the_digest_does_not_depend_on_where_the_package_lies(package: Path) -> None:
    here = Code(ROOT / "llmforge")
    assert here.modules("llmforge.compile.pipeline") == Code(package).modules("llmforge.compile.pipeline")
    assert here.digest("llmforge.passes.pack_qkv") == Code(package).digest("llmforge.passes.pack_qkv")


def test_what_was_parsed_before_is_not_parsed_again(package: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = Code(package)
    wanted = first.digest("llmforge.passes.quantize_weights")
    kept = json.loads(json.dumps(first.parsed))
    texts = first.texts()
    again = Code(package)
    again.know(kept)
    with monkeypatch.context() as patched:
        patched.setattr("llmforge.cache.code._imports", None)
        assert again.digest("llmforge.passes.quantize_weights") == wanted
    file = package / "quantization" / "grids.py"
    file.write_bytes(file.read_bytes() + b"\nimport llmforge.trace.pattern_of_nothing, llmforge.compile.lock\n")
    changed = Code(package)
    changed.know(kept)
    assert changed.texts() != texts
    assert "llmforge.compile.lock" in changed.modules("llmforge.passes.quantize_weights")
    assert changed.digest("llmforge.passes.quantize_weights") == Code(package).digest(
        "llmforge.passes.quantize_weights"
    )


def test_proofs_do_not_depend_on_a_method(package: Path) -> None:
    gptq = "quantization/methods/gptq.py"
    assert not changed(package, gptq, "llmforge.verification.verifier", "llmforge.verification.trace_verifier")
