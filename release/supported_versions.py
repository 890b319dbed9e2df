"""Write docs/supported-versions.md from pyproject.toml, constraints.txt and the code.

Run it as `python -m release.supported_versions`.
"""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

from llmforge.base import sealed, versions
from llmforge.recipe import migration
from release import wheels

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "supported-versions.md"
# What a row is called, the distribution, and the extra that brings it.
ROWS = (
    ("torch", "torch", "build"),
    ("transformers", "transformers", "build"),
    ("huggingface_hub", "huggingface-hub", "build"),
    ("onnx", "onnx", "build"),
    ("onnx-ir", "onnx-ir", "build"),
    ("onnxscript", "onnxscript", "build"),
    ("onnxruntime", "onnxruntime", "cpu"),
    ("onnxruntime-gpu", "onnxruntime-gpu", "cuda"),
    ("TensorRT", "tensorrt", "tensorrt"),
    ("TensorRT-RTX", "tensorrt-rtx", "tensorrt-rtx"),
    ("numpy", "numpy", ""),
)
TRITON = "2.51 (24.10)"  # the server that tests start: llmforge/triton/README.md.jinja says so, too


def page() -> str:
    """Make the page."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = {"": project["dependencies"], **project["optional-dependencies"]}
    tested = dict(re.findall(r"^([\w.-]+)==(\S+)$", (ROOT / "constraints.txt").read_text(encoding="utf-8"), re.M))
    tested = {name.lower().replace("_", "-"): version for name, version in tested.items()}
    pythons = [line.rpartition(" ")[2] for line in project["classifiers"] if re.search(r":: 3\.\d+$", line)]
    rows = [("Python", "", project["requires-python"], ", ".join(pythons))]
    for title, name, extra in ROWS:
        [allowed] = [
            re.sub(r"^[\w.-]+(\[[^\]]*\])?", "", line)
            for line in extras[extra]
            if re.match(rf"{re.escape(name)}(?![\w-])", line)
        ]
        seen = tested.get(name, "not run: no GPU at hand")
        if name == "transformers":
            seen = ", ".join(versions.PROVEN)
        if name == "tensorrt-rtx":
            seen += ": builds, not run"
        rows.append((title, f"`{extra}`" if extra else "always", allowed, seen))
    rows.append(("Triton Inference Server", "", "python backend", TRITON))
    table = "\n".join(f"| {' | '.join(row)} |" for row in rows)
    glibc = ".".join(map(str, wheels.GLIBC))
    return f"""# Supported versions

Written by `python -m release.supported_versions` from `pyproject.toml` and `constraints.txt`; a test holds it to them.

| | extra | allowed | tested |
|---|---|---|---|
{table}

On Python 3.12 and 3.13 the wheel was installed and built the sample, to the same version as on 3.11; the tests run on 3.11. Another release of transformers passes once `llmforge doctor --prove-transformers` has proven it on your machine. `llmforge doctor --constraints` prints all tested versions.

Wheels: Linux on x86-64 and aarch64 with glibc {glibc} or newer (`docs/release.md`).

## Formats

| | current | older ones | newer ones |
|---|---|---|---|
| recipe | schema {migration.SCHEMA} | earlier names are read, with a note; `llmforge migrate` rewrites them | refused |
| artifact: manifest and evidence | schema {sealed.SCHEMA} | schema 1 kept no digests of content and evidence apart: build again | refused |
"""  # noqa: E501


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
    print(PAGE)
