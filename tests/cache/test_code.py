"""Which code an entry depends on: what computes it, directly or not, and nothing besides."""

from __future__ import annotations

import ast
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from llmforge.cache import Code
from llmforge.cache.code import imports_of

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


def _by_syntax(node: ast.AST) -> Iterator[tuple[str, tuple[str, ...]]]:
    """List what a tree imports, without what stands under `if TYPE_CHECKING`."""
    if isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING":
        return
    if isinstance(node, ast.Import):
        yield from ((alias.name, ()) for alias in node.names)
    if isinstance(node, ast.ImportFrom):
        yield "." * node.level + (node.module or ""), tuple(alias.name for alias in node.names)
    for child in ast.iter_child_nodes(node):
        yield from _by_syntax(child)


def test_statements_of_the_whole_package_are_found_as_by_its_syntax() -> None:
    for file in (ROOT / "llmforge").rglob("*.py"):
        source = file.read_bytes()
        assert set(_by_syntax(ast.parse(source))) <= set(imports_of(source)), file


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("import a, b.c as d  # e\n", [("a", ()), ("b.c", ())]),
        ("from a import b as c, d\n", [("a", ("b", "d"))]),
        ("from . import (\n    b,  # one\n    c as d,\n)\n", [(".", ("b", "c"))]),
        ("from ..a import b, \\\n    c\n", [("..a", ("b", "c"))]),
        ("import a; import b\nif x: from c import d\n", [("a", ()), ("b", ()), ("c", ("d",))]),
        ("def f():\n    try: import a\n    except E:\n\timport b\n", [("a", ()), ("b", ())]),
        ("if TYPE_CHECKING:\n    import a\n\n    import b\nimport c\n", [("c", ())]),
        ("class A:\n    if TYPE_CHECKING:\n        import a\n    else:\n        import b\n", [("b", ())]),
        ("important = 1\nx = 'from a import b'\nfrom_ = imports\n", []),
        ("from a import *\n", [("a", ("*",))]),
    ],
)
def test_statements_are_found_however_they_are_written(source: str, found: list[tuple[str, tuple[str, ...]]]) -> None:
    assert list(imports_of(source.encode())) == found


def test_proofs_do_not_depend_on_a_method(package: Path) -> None:
    gptq = "quantization/methods/gptq.py"
    assert not changed(package, gptq, "llmforge.verification.verifier", "llmforge.verification.trace_verifier")
