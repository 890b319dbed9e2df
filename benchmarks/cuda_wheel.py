"""Read the onnxruntime-gpu wheel on a machine without a GPU: its kernels, and where it would place a graph's nodes.

    python benchmarks/cuda_wheel.py kernels [--write]     the CUDA provider's kernels, as llmforge holds them
    python benchmarks/cuda_wheel.py rehearse ENGINE [--sm 90]    load ENGINE, a folder with model.onnx and runtime.json,
                                                                take a prefill and every captured step: JSON

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
import struct
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
DATA = HERE.parents[1] / "llmforge" / "backends" / "onnxruntime" / "cuda_kernels.json"
CACHE = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "llmforge" / WHEEL
DOMAINS = ("", "com.microsoft")
PROMPT = 40  # tokens of the prefill that is rehearsed: more than any kernel for a few rows takes
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
        if name.startswith("libcudnn."):  # asked for by name when an operator needs it
            wanted |= _cudnn(wheel / "onnxruntime" / "capi" / "libonnxruntime_providers_cuda.so")
        _compile(folder, name, wanted, own if name.startswith("libcudart.") else "")
    return folder


def _output(*command: str) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def _cudnn(library: Path) -> set[str]:
    """List the functions of cuDNN that `library` names."""
    return {name.decode() for name in re.findall(rb"\0(cudnn[A-Z]\w+)(?=\0)", library.read_bytes())}


def _compile(folder: Path, name: str, symbols: Iterable[str], own: str) -> None:
    """Compile one library; TensorRT's functions return an object whose methods return 0."""
    result = "&object" if name.startswith("libnvinfer.") else "0"
    if name.startswith("libcudnn."):
        own = (HERE.parent / "cuda_stand_in_cudnn.c").read_text(encoding="utf-8") + "".join(
            f"int {symbol}(void **made) {{ static char object; *made = &object; return 0; }}\n"
            for symbol in sorted(symbols)
            if symbol.startswith("cudnnCreate")
        )
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


def inside(wheel: Path, arguments: list[str], environment: dict[str, str] | None = None, *, script: Path = HERE) -> Any:
    """Run `script` with the wheel in place of the installed onnxruntime; return the JSON that it prints last."""
    with tempfile.TemporaryDirectory() as folder:
        libraries = stand_ins(wheel, Path(folder))
        variables = {**os.environ, "PYTHONPATH": str(wheel), "LD_LIBRARY_PATH": str(libraries), **(environment or {})}
        command = [sys.executable, str(script), *arguments]
        done = subprocess.run(command, env=variables, check=False, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{' '.join(arguments)}: exit {done.returncode}\n{done.stdout[-4000:]}{done.stderr[-4000:]}")
    return {**json.loads(done.stdout.splitlines()[-1]), "log": done.stdout + done.stderr}


def kernels(wheel: Path) -> dict[str, Any]:
    """Read the kernels of the CUDA provider: operator → [[first, last or null, {parameter: types}], …]."""
    rows: dict[tuple[str, int, int], list[dict[str, frozenset[str]]]] = defaultdict(list)
    for domain, operator, first, last, types in inside(wheel, ["_kernels"])["kernels"]:
        types = {name: [kind for kind in kinds if "(" not in kind] for name, kinds in types.items()}
        if not all(types.values()):  # of sequences and optional values alone, which no decoder has
            continue
        key = (f"{domain}::{operator}".removeprefix("::"), first, last)
        rows[key].append({name: frozenset(allowed) for name, allowed in types.items()})
    operators: dict[str, list[Any]] = defaultdict(list)
    for (operator, first, last), alternatives in sorted(rows.items()):
        for types in _merged(alternatives):
            plain = {name: " ".join(sorted(allowed)) for name, allowed in sorted(types.items())}
            operators[operator].append([first, None if last == OPEN_END else last, plain])
    code = machine_code(wheel / "onnxruntime" / "capi" / "libonnxruntime_providers_cuda.so")
    about = {"wheel": WHEEL, "provider": PROVIDER, "read_by": f"benchmarks/{HERE.name}"}
    return {**about, "machine_code": code[_ELF], "ptx": code[_PTX], "kernels": operators}


_PTX, _ELF = 1, 2  # kinds of an entry of a fatbin


def machine_code(library: Path) -> dict[int, list[int]]:
    """Read for which compute capabilities `library` holds device code, by kind: PTX, or code of one device (ELF).

    A fatbin is 0xBA55ED50, its version and the size of its header (16), the size of all entries; an entry begins with
    its kind, the size of its header and of itself, and has its compute capability at byte 28.
    """
    found: dict[int, set[int]] = {_PTX: set(), _ELF: set()}
    content, magic = library.read_bytes(), struct.pack("<IHH", 0xBA55ED50, 1, 16)
    start = content.find(magic)
    while start >= 0:
        entry = start + 16
        end = entry + int(struct.unpack_from("<Q", content, start + 8)[0])
        while entry < end:
            kind, _, header, size = struct.unpack_from("<HHIQ", content, entry)
            found[kind].add(int(struct.unpack_from("<I", content, entry + 28)[0]))
            entry += header + size
        start = content.find(magic, end)
    return {kind: sorted(capabilities) for kind, capabilities in found.items()}


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
    leave({"kernels": rows})


def rehearse(wheel: Path, engine: Path, sm: int) -> dict[str, Any]:
    """Load `engine` on a device that claims `sm`, and take a prefill and every step that runtime.json captures.

    Returns:
        providers: nodes by provider; captured: graph id → captures and replays of two steps; forbidden: calls during a
        capture that CUDA would refuse; log: what ONNX Runtime printed, of the load, then behind PREFILL and DECODE: a
        line for each GroupQueryAttention (tests.models.attention_kernels) and each fast product that it
        ran.
    """
    debug = {
        "STAND_IN_SM": str(sm),
        "ORT_ENABLE_ATTENTION_KERNEL_DEBUG_INFO": "1",
        "ORT_FPA_INTB_DEBUG": "1",
        "ORT_ENABLE_CUDNN_FLASH_ATTENTION": "0",  # cuDNN itself, which is not there, says which shapes it takes
    }
    result: dict[str, Any] = inside(wheel, ["_rehearse", str(engine)], debug)
    return result


def _rehearse(engine: Path) -> None:
    """Inside the wheel: the work of `rehearse`."""
    import ctypes

    import onnxruntime as ort

    config, session = opened(ort, engine, verbose=True)
    device = ctypes.CDLL("libcudart.so.13")
    device.stand_in_first_forbidden.restype = ctypes.c_char_p
    steps = Steps(ort, session, config)
    print("\nPREFILL", flush=True)
    prompt = min(PROMPT, config["max_context"] - 1)
    steps.run(1, prompt, prompt, -1)
    print("\nDECODE", flush=True)
    captured = {}
    captures = (config["graphs"] or {"captures": []})["captures"]
    for capture in captures:
        before = device.stand_in_captures(), device.stand_in_replays()
        for _ in range(2):
            steps.run(capture["batch"], 1, capture["length"], capture["id"])
        after = device.stand_in_captures(), device.stand_in_replays()
        captured[capture["id"]] = [after[0] - before[0], after[1] - before[1]]
    if not captures:
        steps.run(config["max_batch"], 1, config["max_context"], -1)
    calls = device.stand_in_forbidden()
    leave({"captured": captured, "forbidden": calls, "first_forbidden": device.stand_in_first_forbidden().decode()})


def opened(ort: Any, engine: Path, *, verbose: bool = False) -> tuple[dict[str, Any], Any]:
    """Inside the wheel: read the configuration of `engine`, and open it; `verbose` tells where nodes are placed."""
    config = json.loads((engine / "runtime.json").read_text(encoding="utf-8"))
    options = ort.SessionOptions()
    if verbose:
        options.log_severity_level, options.log_verbosity_level = 0, 0
    for key, value in config["session"]["entries"].items():
        options.add_session_config_entry(key, value)
    providers = [(PROVIDER, dict(config["provider_options"]))]
    return config, ort.InferenceSession(str(engine / "model.onnx"), options, providers=providers)


class Steps:
    """Runs steps with inputs, caches and logits in device memory, as the runtime does."""

    def __init__(self, ort: Any, session: Any, config: dict[str, Any]) -> None:
        self.ort, self.session, self.config = ort, session, config
        self.held: dict[tuple[Any, ...], Any] = {}

    def run(self, batch: int, tokens: int, length: int, graph: int) -> None:
        """Run `batch` rows of `tokens` each, after which the longest row holds `length`."""
        sizes = {"batch": batch, "sequence": tokens, "rows": 1}
        if blocks := self.config.get("kv_blocks"):  # llmforge.rewrite.paged_attention names these dimensions
            sizes |= {"tokens": batch * tokens, "batch_plus_1": batch + 1, "blocks": blocks + 1}
            sizes |= {"blocks_of_a_row": -(-blocks // self.config["max_batch"])}
        at_least = self.config.get("at_least", 1)  # of cuda_attention.py
        host = {"total_sequence_length": length, "attention_metadata": [tokens, length, at_least]}
        binding = self.session.io_binding()
        for value in self.session.get_inputs():
            if value.name in host:
                import numpy as np

                binding.bind_cpu_input(value.name, np.array(host[value.name], np.int32))
            else:
                binding.bind_ortvalue_input(value.name, self._value(value, sizes))
        presents = {value.name: value for value in self.session.get_outputs()}
        for name, value in presents.items():
            past = name.replace("present.", "past_key_values.", 1).replace("present_", "past_", 1)
            inputs = {value.name: value for value in self.session.get_inputs()}
            binding.bind_ortvalue_output(name, self._value(inputs.get(past, value), sizes))
        run = self.ort.RunOptions()
        run.add_run_config_entry("gpu_graph_id", str(graph))
        self.session.run_with_iobinding(binding, run)

    def _value(self, value: Any, sizes: dict[str, int]) -> Any:
        """Return device memory for `value`, the same for the same shape."""
        capacity = self.config["max_context"]
        shape = [dim if isinstance(dim, int) else sizes.get(dim, capacity) for dim in value.shape]
        key = (value.name, *shape)
        if key not in self.held:
            kind = _ELEMENTS[value.type.removeprefix("tensor(").removesuffix(")")]
            self.held[key] = self.ort.OrtValue.ortvalue_from_shape_and_type(shape, kind, "cuda", 0)
        return self.held[key]


_ELEMENTS = {"float": 1, "uint8": 2, "int8": 3, "int32": 6, "int64": 7, "float16": 10, "bfloat16": 16}  # TensorProto


def leave(result: dict[str, Any]) -> None:
    """Print `result` and end without the destructors of libraries, which expect a device."""
    print(json.dumps(result), flush=True)
    os._exit(0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", choices=["kernels", "rehearse", "_kernels", "_rehearse"])
    parser.add_argument("engine", type=Path, nargs="?", help="of rehearse")
    parser.add_argument("--sm", type=int, default=90, help="compute capability that the device of rehearse claims")
    parser.add_argument("--wheel", type=Path, default=CACHE, help="folder that pip installs the wheel into")
    parser.add_argument("--write", action="store_true", help=f"write {DATA.name} instead of printing it")
    arguments = parser.parse_args()
    if arguments.command == "_kernels":
        _list_kernels()
    elif arguments.command == "_rehearse":
        _rehearse(arguments.engine)
    elif arguments.command == "rehearse":
        result = rehearse(install(arguments.wheel), arguments.engine, arguments.sm)
        print(json.dumps({key: value for key, value in result.items() if key != "log"}, indent=2))
        return
    text = dump(kernels(install(arguments.wheel)))
    if arguments.write:
        DATA.write_text(text, encoding="utf-8")
    else:
        print(text, end="")


if __name__ == "__main__":
    main()
