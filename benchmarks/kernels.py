"""Time linear layers of the CPU kernels beside ONNX Runtime's MatMulNBits: python benchmarks/kernels.py [--rows M …].

Every format has a session of its own, a chain of layers [SIZE, SIZE] that together are larger than the caches, so that
decoding reads its weights from memory, as in a model. Sessions take turns, in another order each round, and a turn has
one run that warms up. A time is the least of all, as whatever else the machine does adds to it. MatMulNBits has
`accuracy_level` 4: activations in int8, as here. A format is compared with MatMulNBits of the same blocks and as many
bits or, of what it lacks, the next more.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnxruntime as ort
from onnx import TensorProto, helper, numpy_helper

from llmforge import native
from llmforge.measure.machine import read_bandwidth
from llmforge.quantization import cpu_layout, grids
from llmforge.quantization.grid import Grid
from llmforge.quantization.grids import QuantizedMatrix
from llmforge.rewrite.cpu_linear import grid_attributes

PROBE_BYTES = 1 << 28


@dataclass(frozen=True)
class Format:
    """What is timed: a grid, by our operator or by ONNX Runtime's."""

    grid: Grid
    ours: bool
    terms: int = 1  # of an activation

    @property
    def name(self) -> str:
        """The format in a few words."""
        grid = self.grid
        kind = f"{'trellis, ' if grid.trellis else ''}{grid.bits} bits"
        zeros = "" if grid.symmetric else ", zero points"
        two = ", int8x2" if self.terms == 2 else ""
        return f"{'' if self.ours else 'MatMulNBits, '}{kind}, block {grid.block_size}, {grid.scale}{zeros}{two}"

    @property
    def peer(self) -> str:
        """The name of what it is compared with."""
        bits = 4 if self.grid.bits <= 4 else 8
        return Format(Grid(bits, self.grid.block_size, symmetric=False), ours=False).name


FORMATS = (
    Format(Grid(3, 32, True, "int8"), ours=True),
    Format(Grid(4, 32, False), ours=True),
    Format(Grid(4, 32, False, "fp16"), ours=True),
    Format(Grid(4, 32, False, "int8"), ours=True),
    Format(Grid(4, 32, False, "int8"), ours=True, terms=2),
    Format(Grid(4, 32, True, "int8"), ours=True),
    Format(Grid(4, 128, False), ours=True),
    Format(Grid(4, 128, False, "int8"), ours=True),
    Format(Grid(4, 32, True, "int8", trellis=True), ours=True),
    Format(Grid(4, 128, True, "fp16", trellis=True), ours=True),
    Format(Grid(5, 32, True, "int8", trellis=True), ours=True),
    Format(Grid(5, 32, True, "int8"), ours=True),
    Format(Grid(5, 32, False, "int8"), ours=True),
    Format(Grid(6, 32, False, "int8"), ours=True),
    Format(Grid(8, 32, True), ours=True),
    Format(Grid(8, 32, True, "int8"), ours=True),
    Format(Grid(8, 32, True, "int8"), ours=True, terms=2),
    Format(Grid(8, 128, True, "fp16"), ours=True),
    *(Format(Grid(bits, block, symmetric=False), ours=False) for bits in (4, 8) for block in (32, 128)),
)


def bits_per_weight(format_: Format, size: int) -> float:
    """Count the bits that a weight takes, with its share of scales and zero points."""
    grid = format_.grid
    if format_.ours:
        return 8 * cpu_layout.group_bytes(size, grid) / (cpu_layout.LANES * size)
    return grid.bits + (32 + grid.bits * (not grid.symmetric)) / grid.block_size


def matrix(size: int, grid: Grid) -> QuantizedMatrix:
    """Make a matrix of random codes, which keeps the size of what it multiplies."""
    rng = np.random.default_rng(0)
    codes = rng.integers(0, 1 << grid.bits, (size, size)).astype(np.uint8)
    spread = 60.0 if grid.trellis else (1 << grid.bits) / 12**0.5
    scales = rng.uniform(0.8, 1.2, (size, size // grid.block_size)) / (spread * size**0.5)
    scales = (scales * rng.choice([-1, 1], scales.shape)).astype(np.float32)  # or a mean grows from layer to layer
    points = None if grid.symmetric else np.full(scales.shape, grid.middle, np.uint8)
    return QuantizedMatrix(grid, codes, grids.stored(scales, grid), points)


def session(format_: Format, size: int, layers: int, threads: int) -> ort.InferenceSession:
    """Make a session of a chain of layers."""
    grid, made = format_.grid, matrix(size, format_.grid)
    if format_.ours:
        held = {"w": cpu_layout.arrange(made.codes, made.scales, made.zero_points, grid)}
        kind, domain = "Linear", native.DOMAIN
        attributes = {**grid_attributes(size, size, grid), "terms": format_.terms, "activation": 0, "epsilon": 0.0}
    else:
        packed = grids.pack(made)
        assert packed.zero_points is not None
        held = {"w": packed.codes, "s": packed.scales, "z": packed.zero_points}
        kind, domain = "MatMulNBits", "com.microsoft"
        attributes = {"N": size, "K": size, "bits": grid.bits, "block_size": grid.block_size, "accuracy_level": 4}
    nodes, initializers = [], []
    for layer in range(layers):
        inputs = [f"x{layer}", *(f"{name}{layer}" for name in held)]
        nodes.append(helper.make_node(kind, inputs, [f"x{layer + 1}"], domain=domain, **attributes))
        # Of layers of the same bytes ONNX Runtime would hold what it rearranges once: each begins at another row.
        for name, array in held.items():
            initializers.append(numpy_helper.from_array(np.roll(array, layer, axis=0), f"{name}{layer}"))
    ends = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [None, None, size]) for name in ("x0", f"x{layers}")]
    graph = helper.make_graph(nodes, "chain", ends[:1], ends[1:], initializers)
    opsets = [helper.make_opsetid("", 21), helper.make_opsetid(domain, 1)]
    options = ort.SessionOptions()
    options.intra_op_num_threads, options.log_severity_level = threads, 3
    native.register(options)
    model = helper.make_model(graph, opset_imports=opsets, ir_version=10).SerializeToString()
    return ort.InferenceSession(model, options, providers=["CPUExecutionProvider"])


def measure(
    sessions: dict[Format, ort.InferenceSession], rows: int, size: int, layers: int, rounds: int, runs: int
) -> dict[Format, float]:
    """Time a layer of each format in microseconds."""
    x = np.random.default_rng(1).standard_normal((1, rows, size)).astype(np.float32)
    times: dict[Format, list[float]] = {format_: [] for format_ in sessions}
    order, shuffled = list(sessions), random.Random(0)
    for _ in range(rounds):
        shuffled.shuffle(order)
        for format_ in order:
            for run in range(runs + 1):
                began = time.perf_counter()
                [y] = sessions[format_].run(None, {"x0": x})
                if run:
                    times[format_].append((time.perf_counter() - began) * 1e6 / layers)
            assert np.isfinite(y).all(), format_.name
    return {format_: min(of) for format_, of in times.items()}


def main() -> None:
    """Print the table; write the figures where asked to."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 512], help="rows of activations (1 8 512)")
    parser.add_argument("--size", type=int, default=2048, help="input and output features of a layer (2048)")
    parser.add_argument("--layers", type=int, default=48, help="of a chain (48)")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--kernels", choices=native.INSTRUCTION_SETS, help="instruction set of ours (the best)")
    parser.add_argument("-o", "--output", type=Path, help="a file for the figures, JSON")
    given = parser.parse_args()
    kernels = native.instruction_set(given.kernels)
    size, layers = given.size, given.layers
    bandwidth = read_bandwidth(PROBE_BYTES, given.threads)
    sessions = {format_: session(format_, size, layers, given.threads) for format_ in FORMATS}
    found = {}
    for rows in given.rows:
        runs = 3 if rows < 64 else 1
        found[rows] = measure(sessions, rows, size, layers, given.rounds, runs)
    by_name = {rows: {format_.name: time_ for format_, time_ in times.items()} for rows, times in found.items()}
    print(f"kernels {kernels}, {given.threads} threads, {layers} layers [{size}, {size}]", file=sys.stderr)
    print(f"memory reads at {bandwidth / 1e9:.1f} GB/s", file=sys.stderr)
    head = ["format", "bits a weight"]
    for rows in given.rows:
        head += [f"{rows} rows, µs", "GB/s" if rows < 64 else "Gop/s", "× MatMulNBits"]
    print("| " + " | ".join(head) + " |\n|---" + "|--:" * (len(head) - 1) + "|")
    for format_ in FORMATS:
        bits = bits_per_weight(format_, size)
        cells = [format_.name, f"{bits:.2f}"]
        for rows in given.rows:
            took = found[rows][format_]
            rate = size * size * bits / 8 / took / 1e3 if rows < 64 else 2 * rows * size * size / took / 1e3
            cells += [f"{took:.0f}", f"{rate:.1f}" if rows < 64 else f"{rate:.0f}"]
            cells += [f"{by_name[rows][format_.peer] / took:.2f}"]
        print("| " + " | ".join(cells) + " |")
    if given.output:
        report = {"kernels": kernels, "threads": given.threads, "bandwidth": bandwidth, "us_per_layer": by_name}
        given.output.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
