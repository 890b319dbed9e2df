"""Read the onnxruntime-gpu wheel on a machine without a GPU: its kernels, and where it would place a graph's nodes.

    python benchmarks/cuda_wheel.py kernels [--write]     the CUDA provider's kernels, as llmforge holds them
    python benchmarks/cuda_wheel.py place MODEL [--sm 90] [--option NAME=VALUE]    as JSON

The wheel's own CUDA provider is loaded over stand-ins for the CUDA libraries: `cuda_stand_in.c` for what it asks of a
device, and functions that do nothing for the rest. So ONNX Runtime itself lists kernels, checks types, assigns nodes,
constructs kernels and decides whether a CUDA graph may be captured. Nothing is computed: results are zeros.

Needs a C compiler and binutils, and once the wheel (256 MB), which pip puts into --wheel (default: the user's cache).
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import re
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import Any

VERSION = "1.31.1"
WHEEL = f"onnxruntime-gpu=={VERSION}"
PROVIDER = "CUDAExecutionProvider"
HERE = Path(__file__).resolve()
DATA = HERE.parents[1] / "llmforge" / "engines" / "cuda_kernels.json"
CACHE = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "llmforge" / WHEEL
DOMAINS = ("", "com.microsoft")
OPEN_END = 2**31 - 1  # ONNX Runtime's version of a kernel that has no end

# Libraries of the system, which are there; and what lies in none that the symbol names.
_SYSTEM = re.compile(r"^(lib(dl|rt|pthread|stdc\+\+|m|gcc_s|c)\.so|ld-linux)")
_UNVERSIONED = {"libcuda.so.1": r"cu[A-Z]", "libnvinfer.so.10": r"create\w+_INTERNAL$|getPluginRegistry$|getInfer"}


def install(folder: Path) -> Path:
    """Put the wheel, without what it depends on, into `folder`, unless it is there."""
    if not (folder / "onnxruntime").is_dir():
        command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(folder), WHEEL]
        subprocess.run(command, check=True, stdout=sys.stderr)
    return folder


def stand_ins(wheel: Path, folder: Path) -> Path:
    """Compile a library into `folder` for each that the wheel's providers link and the system lacks."""
    needed: set[str] = set()
    symbols: set[str] = set()
    for provider in ("cuda", "tensorrt"):
        library = wheel / "onnxruntime" / "capi" / f"libonnxruntime_providers_{provider}.so"
        needed |= set(re.findall(r"NEEDED.*\[(.*)\]", _output("readelf", "-d", str(library))))
        symbols |= {line.split()[-1] for line in _output("nm", "-D", "--undefined-only", str(library)).splitlines()}
    own = (HERE.parent / "cuda_stand_in.c").read_text(encoding="utf-8")
    for name in sorted(needed):
        if _SYSTEM.match(name):
            continue
        plain = _UNVERSIONED.get(name)
        wanted = {symbol.partition("@")[0] for symbol in symbols if symbol.endswith(f"@{name}")}
        wanted |= {symbol for symbol in symbols if plain and re.match(plain, symbol)}
        _compile(folder, name, wanted, own if name.startswith("libcudart.") else "")
    return folder


def _output(*command: str) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def _compile(folder: Path, name: str, symbols: Iterable[str], own: str) -> None:
    """Compile one library; TensorRT's functions return an object whose methods return 0."""
    result = "&object" if name.startswith("libnvinfer.") else "0"
    lines = [
        own,
        "static void *nothing(void) { return 0; }",
        "static void *methods[256], **object = methods;",
        "__attribute__((constructor)) static void fill(void) { for (int i = 0; i < 256; i++) methods[i] = nothing; }",
        *(f"void *{s}(void) {{ return {result}; }}" for s in sorted(symbols) if not re.search(rf"\b{s}\(", own)),
    ]
    with tempfile.TemporaryDirectory() as work:
        source, versions = Path(work) / "source.c", Path(work) / "versions"
        source.write_text("\n".join(lines), encoding="utf-8")
        versions.write_text(f"{name} {{ global: *; }};\n", encoding="utf-8")
        flags = ["-w", "-shared", "-fPIC", f"-Wl,-soname,{name}", f"-Wl,--version-script={versions}"]
        subprocess.run(["cc", *flags, "-o", str(folder / name), str(source)], check=True)


def inside(wheel: Path, arguments: list[str], environment: dict[str, str] | None = None) -> Any:
    """Run this file with the wheel in place of the installed onnxruntime; return the JSON that it prints last."""
    with tempfile.TemporaryDirectory() as folder:
        libraries = stand_ins(wheel, Path(folder))
        variables = {**os.environ, "PYTHONPATH": str(wheel), "LD_LIBRARY_PATH": str(libraries), **(environment or {})}
        command = [sys.executable, str(HERE), *arguments]
        done = subprocess.run(command, env=variables, check=False, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{' '.join(arguments)}: exit {done.returncode}\n{done.stdout[-4000:]}{done.stderr[-4000:]}")
    return {**json.loads(done.stdout.splitlines()[-1]), "log": done.stdout + done.stderr}


def kernels(wheel: Path) -> dict[str, Any]:
    """Read the kernels of the CUDA provider: operator → [[first, last or null, {parameter: types}], …]."""
    rows: dict[tuple[str, int, int], list[dict[str, frozenset[str]]]] = defaultdict(list)
    for domain, operator, first, last, types in inside(wheel, ["_kernels"])["kernels"]:
        key = (f"{domain}::{operator}".removeprefix("::"), first, last)
        rows[key].append({name: frozenset(allowed) for name, allowed in types.items()})
    operators: dict[str, list[Any]] = defaultdict(list)
    for (operator, first, last), alternatives in sorted(rows.items()):
        for types in _merged(alternatives):
            plain = {name: " ".join(sorted(allowed)) for name, allowed in sorted(types.items())}
            operators[operator].append([first, None if last == OPEN_END else last, plain])
    return {"wheel": WHEEL, "provider": PROVIDER, "read_by": f"benchmarks/{HERE.name}", "kernels": operators}


def _merged(rows: list[dict[str, frozenset[str]]]) -> list[dict[str, frozenset[str]]]:
    """Put two rows that differ in one parameter alone into one, until none are left: the same combinations."""
    rows = sorted(rows, key=_order)
    for one, other in itertools.combinations(rows, 2):
        differing = [name for name in one if one.keys() == other.keys() and one[name] != other[name]]
        if one == other or len(differing) == 1:
            joined = {name: one[name] | other[name] for name in one}
            return _merged([row for row in rows if row is not one and row is not other] + [joined])
    return rows


def _order(row: dict[str, frozenset[str]]) -> list[tuple[str, list[str]]]:
    return sorted((name, sorted(allowed)) for name, allowed in row.items())


def dump(data: dict[str, Any]) -> str:
    """Write the kernels, an operator a line."""
    head = {key: value for key, value in data.items() if key != "kernels"}
    lines = [f"  {json.dumps(key)}: {json.dumps(value)}," for key, value in head.items()]
    operators = [f"    {json.dumps(name)}: {json.dumps(rows)}" for name, rows in sorted(data["kernels"].items())]
    return "\n".join(["{", *lines, '  "kernels": {', ",\n".join(operators), "  }", "}", ""])


def _list_kernels() -> None:
    """Inside the wheel: print every kernel of the CUDA provider."""
    from onnxruntime.capi.onnxruntime_pybind11_state import get_all_opkernel_def

    found = [kernel for kernel in get_all_opkernel_def() if kernel.provider == PROVIDER and kernel.domain in DOMAINS]
    rows = [
        [
            kernel.domain,
            kernel.op_name,
            *kernel.version_range,
            {
                name: [kind.removeprefix("tensor(").removesuffix(")") for kind in kinds]
                for name, kinds in kernel.type_constraints.items()
            },
        ]
        for kernel in found
    ]
    _leave({"kernels": rows})


def _leave(result: dict[str, Any]) -> None:
    """Print `result` and end without the destructors of libraries, which expect a device."""
    print(json.dumps(result), flush=True)
    os._exit(0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", choices=["kernels", "_kernels"])
    parser.add_argument("--wheel", type=Path, default=CACHE, help="folder that pip installs the wheel into")
    parser.add_argument("--write", action="store_true", help=f"write {DATA.name} instead of printing it")
    arguments = parser.parse_args()
    if arguments.command == "_kernels":
        _list_kernels()
    text = dump(kernels(install(arguments.wheel)))
    if arguments.write:
        DATA.write_text(text, encoding="utf-8")
    else:
        print(text, end="")


if __name__ == "__main__":
    main()
