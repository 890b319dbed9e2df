"""Time, memory and KLD of a calibration: python -m benchmarks.calibration [CHECKPOINT | SHAPE] [options].

    python -m benchmarks.calibration --tokens 39000            # the sample: seconds, peak memory, and where they went
    python -m benchmarks.calibration --tokens 8192 --held      # and the KLD on calibration documents that are held out
    python -m benchmarks.calibration qwen3-0.6b --tokens 16000 # random weights in that shape (benchmarks.model_size)

The method is gptq, with embedding and head, and ranges of keys and values. CPU seconds of a part are those of all
cores, without those of parts inside of it. Floating-point operations are those of products alone: linears and
attention forwards and backwards, sums of inputs, factors, targets, and the loops in C; after the run, as many are done
by torch's own matrix product, in bf16 or fp32, whichever is faster, and the times of both are compared. KLD is that of
dequantized weights in fp32 arithmetic, on every fourth document.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks import model_size
from llmforge.base import process
from llmforge.calibration import calibrate, driver, gradients, layer, mixed, quantize, sums
from llmforge.calibration.skeleton import Skeleton
from llmforge.calibration.threads import fixed
from llmforge.checkpoint import Checkpoint, text
from llmforge.checkpoint.documents import read_documents
from llmforge.checkpoint.text import TokenWindow
from llmforge.compile import texts
from llmforge.quantization import rounding
from llmforge.quantization.grid import Grid
from llmforge.quantization.methods import gptq
from llmforge.quantization.methods.base import InputStatistic
from llmforge.quantization.methods.gptq import Gptq
from llmforge.quantization.rounding import products
from llmforge.quantization.statistics import Demand, KvRangeDemand, WeightDemand

# What is timed: part, where its function stands, and its name there.
PARTS: tuple[tuple[str, Any, str], ...] = (
    ("runs of layers", layer.DecoderLayer, "run"),
    ("runs up to a linear", layer.DecoderLayer, "arguments_of"),
    ("what reads what", layer.DecoderLayer, "groups"),
    ("what is added to what", layer.DecoderLayer, "additions"),
    ("sums of inputs", sums.InputSums, "add"),
    ("gradients: backwards", gradients, "_backwards"),
    ("gradients: loss", gradients, "_of_window"),
    ("gradients: files", gradients, "_save"),
    ("gradients: files", gradients, "_load"),
    ("loading of layers", Skeleton, "load"),
    ("entering", Skeleton, "enter"),
    ("factors", gptq.Curvature, "of"),
    ("targets", gptq, "target"),
    ("rounding: loops in C", rounding, "choose"),
    ("rounding: the rest", Gptq, "quantize"),
    ("linears", quantize, "_quantize_linears"),
    ("tables", driver, "quantize_tables"),
    ("gradients: the rest", driver, "take"),
    ("walk", driver, "_walk"),
)


class Operations:
    """Counts the floating-point operations of products, by what they are of."""

    def __init__(self) -> None:
        self.counted: Counter[str] = Counter()
        self._lock = threading.Lock()

    def watch(self) -> None:
        """Count from now on."""
        self._before(torch.nn.functional, "linear", self._linear)
        self._before(torch.nn.functional, "scaled_dot_product_attention", self._attention)
        self._before(sums, "add_moments", self._moments)
        self._before(gradients, "add_moments", self._moments)
        self._before(sums.InputSums, "add", self._others)
        self._before(products, "multiply", self._multiply)
        self._before(gptq._Group, "feedback", self._feedback)
        self._before(products, "inverse_factor", lambda of, _: self._count("factors", 2 * len(of) ** 3 // 3))
        self._before(rounding, "choose", self._choose)

    def _count(self, what: str, operations: int) -> None:
        with self._lock:
            self.counted[what] += operations

    def _before(self, owner: Any, name: str, count: Callable[..., None]) -> None:
        plain = getattr(owner, name)

        def counting(*args: Any, **kwargs: Any) -> Any:
            count(*args, **kwargs)
            return plain(*args, **kwargs)

        setattr(owner, name, counting)

    def _linear(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> None:
        backwards = torch.is_grad_enabled() and x.requires_grad  # the gradient of x; weights have none
        self._count("linears", (4 if backwards else 2) * x.numel() * len(weight))

    def _attention(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *_: Any, **options: Any) -> None:
        count = (7 if torch.is_grad_enabled() and query.requires_grad else 2) * 2 * query.numel() * key.shape[-2]
        self._count("attention", count // (2 if options.get("is_causal") else 1))

    def _moments(self, total: torch.Tensor, x: torch.Tensor) -> None:
        width = x.shape[1]
        if sums._in_pairs():
            self._count("sums", len(x) * width * (width + 1))
            return
        panel = max(sums.SMALLEST_PANEL, -(-width // sums.PANELS))
        ends = [min(first + panel, width) for first in range(0, width, panel)]
        self._count("sums", sum(2 * len(x) * panel * end for end in ends))

    def _others(self, own: sums.InputSums, x: torch.Tensor, *_: Any) -> None:
        others = [total for key, total in own.totals.items() if key is not InputStatistic.MOMENTS]
        self._count("sums", sum(2 * len(x) * total.numel() for total in others))

    def _multiply(self, a: Any, b: Any, *, form: str = "whole", **_: Any) -> None:
        self._count("targets", (2 if form == "whole" else 1) * a.size * b.shape[1])

    def _feedback(self, group: gptq._Group, error: Any, _: int) -> None:
        if products.has_bf16():  # else they are products like others
            self._count("targets", sum(2 * pull.size for _, pull in group.pulls) * error.shape[1])

    def _choose(self, target: Any, *_: Any, sweeps: int, start: Any = None, **__: Any) -> None:
        n, k = target.shape
        self._count("loops in C", n * k * k * (1 + 2 * sweeps))


def of_products(operations: int, threads: int) -> dict[str, float]:
    """Return the seconds, of the clock and of all cores, that so many operations take in torch's matrix product."""
    found: dict[str, float] = {}
    with fixed(threads):
        for dtype in (torch.bfloat16, torch.float32):
            x, y = torch.randn(4096, 1536).to(dtype), torch.randn(1536, 1536).to(dtype)
            x @ y
            wall, cpu, rounds = time.perf_counter(), time.process_time(), 0
            while time.process_time() - cpu < threads:
                x @ y
                rounds += 1
            share = operations / (rounds * 2 * x.numel() * len(y))
            took, used = share * (time.perf_counter() - wall), share * (time.process_time() - cpu)
            if not found or used < found["cpu_s"]:
                found = {"seconds": took, "cpu_s": used}
    return found


class Clock:
    """CPU seconds and calls of parts, each without what runs inside of it, or for it on other threads."""

    def __init__(self) -> None:
        self.cpu: Counter[str] = Counter()
        self.calls: Counter[str] = Counter()
        self._lock = threading.Lock()
        self._inside: list[float] = []  # of the main thread, whose products may have helpers: all that is no other part
        self._elsewhere = threading.local()

    def watch(self, part: str, owner: Any, name: str) -> None:
        """Time a function from now on."""
        plain = owner.__dict__[name]
        bound = isinstance(plain, classmethod)
        function: Callable[..., Any] = plain.__func__ if bound else plain

        def timed(*args: Any, **kwargs: Any) -> Any:
            on_main = threading.current_thread() is threading.main_thread()
            clock = time.process_time if on_main else time.thread_time
            inside = self._inside if on_main else vars(self._elsewhere).setdefault("inside", [])
            inside.append(0.0)
            began = clock()
            try:
                return function(*args, **kwargs)
            finally:
                took = clock() - began
                with self._lock:
                    self.cpu[part] += took - inside.pop()
                    self.calls[part] += 1
                    outer = inside or self._inside
                    if outer:
                        outer[-1] += took

        setattr(owner, name, classmethod(timed) if bound else timed)


def main() -> None:
    """Calibrate once, and print what it took."""
    if "OMP_WAIT_POLICY" not in os.environ:  # torch has read it: as builds run, without it twice the CPU seconds
        process.prepare()
        os.execv(sys.executable, [sys.executable, "-m", "benchmarks.calibration", *sys.argv[1:]])
    process.keep_freed_memory()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint", nargs="?", default=str(model_size.SAMPLE / "docs-llama-7m"))
    parser.add_argument("--tokens", type=int, default=8192, help="of calibration text (default: %(default)s)")
    parser.add_argument("--length", type=int, default=512, help="tokens of a window (default: %(default)s)")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--bits", type=int, default=4)
    parser.add_argument("--embedding-bits", type=int, default=8, help="0: embedding and head stay")
    parser.add_argument("--scales", default="fp16", choices=["fp32", "fp16", "int8"])
    parser.add_argument("--held", action="store_true", help="measure the KLD on every fourth document, held out")
    parser.add_argument("--layers", type=int, help="of a shape, in place of its own")
    parser.add_argument("--work", type=Path, default=Path("/tmp"), help="where checkpoints of a shape are made")
    options = parser.parse_args()
    path = Path(options.checkpoint)
    if options.checkpoint in model_size.SHAPES:
        path = _shaped(options.checkpoint, options.layers, options.work)
    checkpoint = Checkpoint.open(path)
    windows, held = drawn(checkpoint, options.length, options.tokens, held=options.held)
    symmetric = options.bits == 8
    tables = Grid(options.embedding_bits, 32, True, options.scales) if options.embedding_bits else None
    grid = Grid(options.bits, 32, symmetric, options.scales)
    demands: list[Demand] = [WeightDemand(Gptq(), grid, tables=tables), KvRangeDemand()]
    operations = Operations()
    operations.watch()
    clock = Clock()
    for part in PARTS:
        clock.watch(*part)
    wall, cpu = time.perf_counter(), time.process_time()
    found = calibrate(checkpoint, windows, demands, threads=options.threads)
    wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    told: dict[str, Any] = {
        "tokens": found.tokens,
        "seconds": round(wall, 2),
        "cpu_s": round(cpu, 2),
        "peak_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024,
    }
    if options.held:
        with torch.no_grad():
            told["kld"] = round(mixed.divergence(Skeleton.build(checkpoint), held, found.linears), 6)
    matched = of_products(operations.counted.total(), options.threads)
    told["tflop"] = {what: round(count / 1e12, 3) for what, count in operations.counted.items()}
    told["products"] = {what: round(took, 2) for what, took in matched.items()}
    told["ratio"] = {"seconds": round(wall / matched["seconds"], 2), "cpu_s": round(cpu / matched["cpu_s"], 2)}
    print(json.dumps(told))
    for part, used in clock.cpu.most_common():
        print(f"{part:28}{used:8.2f} CPU s {100 * used / cpu:5.1f} % {clock.calls[part]:7} calls")


def _shaped(shape: str, layers: int | None, work: Path) -> Path:
    """Make a checkpoint in `shape`, or one of as many `layers`."""
    if layers is None:
        return model_size.make_checkpoint(shape, work, sparse=False)
    shallow = {**model_size.SHAPES[shape], "num_hidden_layers": layers}
    return model_size.make_checkpoint(f"{shape}-{layers}", work, sparse=False, facts=shallow)


def drawn(
    checkpoint: Checkpoint, length: int, tokens: int, *, held: bool
) -> tuple[list[TokenWindow], list[TokenWindow]]:
    """Draw windows of so many tokens together, and those that are held out."""
    documents = read_documents(model_size.SAMPLE / "calibration.jsonl")
    pool = texts.windows_of(checkpoint, documents, length)
    apart: list[TokenWindow] = []
    if held:
        names = list(dict.fromkeys(window.document for window in pool))
        out = set(names[mixed.HELD_OUT - 1 :: mixed.HELD_OUT])
        apart = [window for window in pool if window.document in out and len(window.ids) > 1]
        pool = [window for window in pool if window.document not in out]
    chosen = text.sample(pool, len(pool), 0)
    enough = int(np.searchsorted(np.cumsum([len(window.ids) for window in chosen]), tokens)) + 1
    return chosen[:enough], apart


if __name__ == "__main__":
    main()
