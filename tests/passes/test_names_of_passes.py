"""Nobody outside of `passes/` knows a pass by the string of its name, or by its class."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import llmforge
from llmforge import passes

ROOT = Path(llmforge.__file__).parent
NAMES = "|".join(re.escape(step.name) for step in passes.ALL)
CLASSES = {step.__name__ for step in passes.ALL}
# A name by itself, an entry of a recipe, or a change of a plan; hints for people may name a pass inside of a sentence.
CHOOSES = re.compile(rf"({NAMES})(: ?\{{.*|, .*)?", re.DOTALL)
TABLES = {"recipe/migration.py", "rewrite/declared.py"}  # of names that recipes once had, and what passes declare
RUNS = {"measure/ceilings.py"}  # times the kernels that a pass writes, and so runs it


def docstrings(tree: ast.Module) -> set[int]:
    bodies = [node.body for node in ast.walk(tree) if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef)]
    return {id(body[0].value) for body in bodies if body and isinstance(body[0], ast.Expr)}


def known(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Find what knows a pass: its line, and how."""
    prose = docstrings(tree)
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in prose:
            if CHOOSES.fullmatch(node.value):
                yield node.lineno, node.value
        elif isinstance(node, ast.ImportFrom) and str(node.module).startswith("llmforge.passes"):
            yield node.lineno, ast.unparse(node)
        elif isinstance(node, ast.Attribute) and node.attr in CLASSES:
            yield node.lineno, node.attr


def test_no_room_knows_a_pass_by_its_name() -> None:
    files = [path for path in ROOT.rglob("*.py") if not path.relative_to(ROOT).as_posix().startswith("passes/")]
    assert len(files) > 400
    found = [
        f"{path.relative_to(ROOT)}:{line}: {what}"
        for path in files
        if path.relative_to(ROOT).as_posix() not in TABLES | RUNS
        for line, what in known(ast.parse(path.read_text(encoding="utf-8")))
    ]
    assert found == []


def test_the_scan_sees_what_it_is_for() -> None:
    source = '''
"""quantize-weights"""
from llmforge.passes.quantize_weights import QuantizeWeights
if step.name == "quantize-weights" or isinstance(step, passes.FuseNorms):
    write("quantize-weights: {bits: 4", f"quantize-weights, bits: {bits}", "put quantize-weights in front")
'''
    assert sorted(line for line, _ in known(ast.parse(source))) == [3, 4, 4, 5, 5]
