"""Count the kernels that the onnxruntime-gpu wheel launches, without a GPU (see cuda_wheel.py).

    python benchmarks/cuda_launches.py topk CASES.json      kernels that take the largest logits, for each case
    python benchmarks/cuda_launches.py step ENGINE [--sm 90] [--processors 132]    those of each planned decode step

A case is an object: rows, vocabulary, slices (of `topk_outputs`), sm, processors. ENGINE is a folder with model.onnx
and runtime.json. Printed is a list of objects: kernel → [launches, blocks].

How many blocks of a kernel a multiprocessor holds, by which ONNX Runtime chooses some kernels, is reckoned from the
registers and shared memory that `cuobjdump` (a wheel of 0.3 MB, which pip puts beside the other one) reads out of the
provider.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import cuda_wheel

HERE = Path(__file__).resolve()
CUOBJDUMP = "nvidia-cuda-cuobjdump==13.5.37"
_ARCHITECTURES = {90: "sm_90a", 120: "sm_120a"}  # others: as they are numbered
_USAGE = re.compile(r"Function (\S+):\s+REG:(\d+) STACK:\d+ SHARED:(\d+)")


def usage(wheel: Path, sm: int) -> dict[str, tuple[int, int]]:
    """Read registers of a thread and bytes of shared memory of every kernel of the provider, of one architecture."""
    tools = wheel.parent / CUOBJDUMP
    if not tools.is_dir():
        command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(tools), CUOBJDUMP]
        subprocess.run(command, check=True, stdout=sys.stderr)
    library = wheel / "onnxruntime" / "capi" / "libonnxruntime_providers_cuda.so"
    program = next(tools.rglob("cuobjdump"))
    program.chmod(0o755)
    said = subprocess.run(
        [str(program), "-res-usage", "-arch", _ARCHITECTURES.get(sm, f"sm_{sm}"), str(library)],
        check=True,
        capture_output=True,
        text=True,
    ).stdout
    return {name: (int(registers), int(shared)) for name, registers, shared in _USAGE.findall(said)}


def device(wheel: Path, sm: int, processors: int, folder: Path) -> dict[str, str]:
    """Describe a device to the stand-ins, as environment variables; a file for them comes into `folder`."""
    file = folder / f"usage-{sm}"
    if not file.exists():
        lines = [f"{name} {registers} {shared}" for name, (registers, shared) in usage(wheel, sm).items()]
        file.write_text("\n".join(lines), encoding="utf-8")
    return {"STAND_IN_SM": str(sm), "STAND_IN_PROCESSORS": str(processors), "STAND_IN_OCCUPANCY": str(file)}


def topk(wheel: Path, cases: Sequence[Mapping[str, Any]]) -> list[dict[str, list[int]]]:
    """Launch what takes the largest logits, and return the kernels of each case."""
    found: dict[int, dict[str, list[int]]] = {}
    with tempfile.TemporaryDirectory() as folder:
        for sm, processors in sorted({(case["sm"], case["processors"]) for case in cases}):
            runs = []
            for i, case in enumerate(cases):
                if (case["sm"], case["processors"]) == (sm, processors):
                    model = Path(folder, f"{i}.onnx")
                    model.write_bytes(_heads(case["vocabulary"], case["slices"]))
                    runs.append([i, str(model), case["rows"]])
            file = Path(folder, "runs.json")
            file.write_text(json.dumps(runs), encoding="utf-8")
            about = device(wheel, sm, processors, Path(folder))
            found |= dict(cuda_wheel.inside(wheel, ["_topk", str(file)], about, script=HERE)["launches"])
    return [found[i] for i in range(len(cases))]


def _heads(vocabulary: int, slices: Sequence[int]) -> bytes:
    """Write a graph of nothing but the heads of rows [batch, 1, vocabulary]."""
    sys.path.insert(0, str(HERE.parents[1]))
    import onnx_ir as ir

    from llmforge.rewrite.topk_outputs import add_topk_outputs

    kind, shape = ir.TensorType(ir.DataType.FLOAT), ir.Shape(["batch", 1, vocabulary])
    given = ir.Value(name="in", type=kind, shape=shape)
    node = ir.Node("", "Neg", [given], name="neg")
    [logits] = node.outputs
    logits.name, logits.type, logits.shape = "logits", kind, shape
    model = ir.Model(ir.Graph([given], [logits], nodes=[node], opset_imports={"": 21}), ir_version=10)
    add_topk_outputs(model, slices)
    content: bytes = ir.to_proto(model).SerializeToString()
    return content


def _run_heads(file: Path) -> None:
    """Inside the wheel: run each graph, and say what it launched."""
    import onnxruntime as ort

    found = []
    for i, model, rows in json.loads(file.read_text(encoding="utf-8")):
        session = ort.InferenceSession(model, providers=[(cuda_wheel.PROVIDER, {})])
        steps = cuda_wheel.Steps(ort, session, {"max_context": 1})
        launches()
        steps.run(rows, 1, 1, -1)
        found.append([i, launches()])
    cuda_wheel.leave({"launches": found})


def step(wheel: Path, engine: Path, sm: int, processors: int) -> list[dict[str, Any]]:
    """Take each planned decode step, eagerly, and return its rows, its longest text and its kernels."""
    with tempfile.TemporaryDirectory() as folder:
        about = {**device(wheel, sm, processors, Path(folder)), "ORT_ENABLE_CUDNN_FLASH_ATTENTION": "0"}
        steps: list[dict[str, Any]] = cuda_wheel.inside(wheel, ["_step", str(engine)], about, script=HERE)["steps"]
    return steps


def _run_steps(engine: Path) -> None:
    """Inside the wheel: the work of `step`."""
    import onnxruntime as ort

    config, session = cuda_wheel.opened(ort, engine)
    steps, found = cuda_wheel.Steps(ort, session, config), []
    for capture in config["graphs"]["captures"]:
        steps.run(capture["batch"], 1, capture["length"], -1)  # fpA_intB times its tactics in the first one
        launches()
        steps.run(capture["batch"], 1, capture["length"], -1)
        found.append({"rows": capture["batch"], "length": capture["length"], "launches": launches()})
    cuda_wheel.leave({"steps": found})


def launches() -> dict[str, list[int]]:
    """Inside the wheel: kernel → [launches, blocks], since this was asked last."""
    import ctypes

    library = ctypes.CDLL("libcudart.so.13")
    library.stand_in_launches.restype = ctypes.c_char_p
    lines = [line.split() for line in library.stand_in_launches().decode().splitlines()]
    return {name: [int(count), int(blocks)] for name, count, blocks in lines}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", choices=["topk", "step", "_topk", "_step"])
    parser.add_argument("file", type=Path, help="CASES.json or ENGINE")
    parser.add_argument("--sm", type=int, default=90, help="compute capability that the device claims")
    parser.add_argument("--processors", type=int, default=132, help="multiprocessors of the device")
    parser.add_argument("--wheel", type=Path, default=cuda_wheel.CACHE, help="folder that pip installs the wheel into")
    arguments = parser.parse_args()
    if arguments.command == "_topk":
        _run_heads(arguments.file)
    elif arguments.command == "_step":
        _run_steps(arguments.file)
    wheel, found = cuda_wheel.install(arguments.wheel), []
    if arguments.command == "topk":
        found = topk(wheel, json.loads(arguments.file.read_text(encoding="utf-8")))
    else:
        found = step(wheel, arguments.file, arguments.sm, arguments.processors)
    print(json.dumps(found, indent=2))


if __name__ == "__main__":
    main()
