"""What each ingredient of calibration gives, on text held out: python -m benchmarks.ablation [CHECKPOINT] [options].

    python -m benchmarks.ablation                              # the sample: each ingredient taken out in turn
    python -m benchmarks.ablation --bits 3 --only sweep ranges # linears of 3 bits, rows whose name has one of these
    python -m benchmarks.ablation --methods CHECKPOINT         # rtn, GPTQ as published, gptq, a trellis, auto
    python -m benchmarks.ablation --methods --outliers         # the same, on the sample with outliers
    python -m benchmarks.ablation --auto 4.5                   # auto, and uniform formats of as many bytes and of more

Every fourth document of tests/data/calibration.jsonl is held out; no evaluation text is read. KLD is that of
dequantized weights in fp32 arithmetic. Intervals are 95 %, by a bootstrap over documents; that of a difference is
paired. Ingredients are 4 bits (or `--bits`), asymmetric, blocks of 32, int8 scales, and 6 bits of embedding and head.
An ingredient of the compiled loops is taken out of their source, which is compiled for that row.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
from numpy.typing import NDArray

from benchmarks.calibration import drawn
from benchmarks.model_size import SAMPLE
from llmforge.calibration import calibrate, driver, experts, mixed
from llmforge.calibration.skeleton import Skeleton
from llmforge.calibration.sums import InputSums
from llmforge.checkpoint import Checkpoint
from llmforge.checkpoint.text import TokenWindow
from llmforge.quantization import allocation, rounding
from llmforge.quantization.grid import Grid
from llmforge.quantization.grids import Float32, QuantizedMatrix
from llmforge.quantization.methods import gptq
from llmforge.quantization.methods.base import InputStatistic
from llmforge.quantization.methods.gptq import Curvature, Gptq
from llmforge.quantization.methods.rtn import Rtn
from llmforge.quantization.statistics import WeightDemand
from tests.models.outliers import write_outliers

GRID, TABLES = Grid(4, 32, False, "int8"), Grid(6, 64, True, "int8")
TRELLIS = Grid(4, 32, True, "int8", trellis=True)
DRAWS = 4000  # of the bootstrap
Change = Callable[[], Any]  # makes a context in which something is otherwise


@dataclass(frozen=True, eq=False)
class Measured:
    """A quantized model: KLD of each document held out, summed over its tokens; bits of each of all weights."""

    losses: NDArray[np.float64]
    tokens: NDArray[np.int64]
    bits: float
    seconds: float
    cpu_s: float
    notes: tuple[str, ...] = ()

    @property
    def kld(self) -> float:
        """Nats a token."""
        return float(self.losses.sum() / self.tokens.sum())

    def to_json(self) -> dict[str, Any]:
        """Write all but arrays as it is, and those as lists."""
        return {**vars(self), "losses": self.losses.tolist(), "tokens": self.tokens.tolist()}

    def draws(self) -> NDArray[np.float64]:
        """Return the KLD of documents drawn again and again, the same for all models."""
        again = np.random.default_rng(0).integers(0, len(self.losses), (DRAWS, len(self.losses)))
        kld: NDArray[np.float64] = self.losses[again].sum(1) / self.tokens[again].sum(1)
        return kld

    def interval(self, than: Measured | None = None) -> tuple[float, float]:
        """Return the 95 % interval of the KLD, or of what it is more `than` that of another."""
        low, high = np.quantile(self.draws() - (than.draws() if than else 0), (0.025, 0.975))
        return float(low), float(high)


class Bench:
    """A checkpoint, text to calibrate on and text that is held out."""

    def __init__(self, path: Path, tokens: int, held_tokens: int, threads: int) -> None:
        self.checkpoint, self.threads = Checkpoint.open(path), threads
        self.windows, held = drawn(self.checkpoint, 512, tokens, held=True)
        every = max(1, round(sum(len(window.ids) for window in held) / held_tokens))
        self.held: list[TokenWindow] = held[::every]
        self.calibration_tokens = sum(len(window.ids) for window in self.windows)
        self.held_tokens = sum(len(window.ids) for window in self.held)

    def measure(self, demand: WeightDemand) -> Measured:
        """Calibrate, and measure the KLD on the text held out."""
        wall, cpu = time.perf_counter(), time.process_time()
        found = calibrate(self.checkpoint, self.windows, [demand], threads=self.threads)
        wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
        with torch.no_grad():
            lost = mixed.divergences(Skeleton.build(self.checkpoint), self.held, found.linears)
        documents = list(dict.fromkeys(window.document for window in self.held))
        losses, tokens = np.zeros(len(documents)), np.zeros(len(documents), np.int64)
        for window, own in zip(self.held, lost, strict=True):
            losses[documents.index(window.document)] += own
            tokens[documents.index(window.document)] += len(window.ids)
        matrices = found.linears.values()
        size = sum(allocation.size_bytes(*matrix.shape, matrix.grid) for matrix in matrices)
        size += 4 * (self.checkpoint.parameters - sum(matrix.codes.size for matrix in matrices))
        return Measured(losses, tokens, 8 * size / self.checkpoint.parameters, wall, cpu, found.notes)

    def weights(self) -> tuple[list[str], list[str]]:
        """Name the weights that are quantized of each layer: linears, and experts."""
        names = list(driver.plan(self.checkpoint, [WeightDemand(Rtn(), GRID)], {}))
        linears = [name for name in names if name.endswith(".weight")]
        return linears, [name for name in names if name not in linears]


# What is taken out, one at a time.
def _of_numbers(**numbers: Any) -> Change:
    """Change constants of the method."""
    return lambda: mock.patch.multiple(gptq, **numbers)


def _of_options(**options: int) -> Change:
    """Change options of the function."""
    return lambda: mock.patch.object(gptq, "gptq", partial(gptq.gptq, **options))


def _of_demands(*without: InputStatistic) -> Change:
    return lambda: mock.patch.object(Gptq, "demands", frozenset(InputStatistic) - set(without))


@contextmanager
def _of_loops(*changes: tuple[str, str]) -> Iterator[None]:
    """Compile the loops with lines of their source changed."""
    with tempfile.TemporaryDirectory() as folder:
        copied = shutil.copytree(Path(rounding.__file__).parent, Path(folder) / "loops")
        source = copied / "rounding.inc"
        text = source.read_text()
        for line, instead in changes:
            assert line in text, line
            text = text.replace(line, instead)
        source.write_text(text)
        library = copied / "changed.so"
        command = ["cc", "-std=gnu11", "-O3", "-fno-math-errno", "-fno-trapping-math", "-fvisibility=hidden", "-shared"]
        files = sorted(map(str, copied.glob("*.c")))
        subprocess.run([*command, "-fPIC", "-w", "-o", str(library), *files, "-lm", "-lpthread"], check=True)
        loaded = ctypes.CDLL(str(library))
        with mock.patch.object(rounding, "_library", return_value=loaded):
            yield


@contextmanager
def _grids_of_weights() -> Iterator[None]:
    """Search grids for the weight as it is, not for the target."""
    found: list[Float32] = []
    target, choose = gptq.target, rounding.choose

    def noted(weight: Float32, *args: Any) -> Float32:
        found[:] = [weight]
        return target(weight, *args)

    def choose_so(of: Float32, *args: Any, **options: Any) -> tuple[QuantizedMatrix, NDArray[np.float64]]:
        own, found[0] = np.split(found[0], [len(of)])
        grid, _ = choose(own, *args, **{**options, "sweeps": 0})
        return choose(of, *args, **{**options, "start": grid})

    with (
        mock.patch.object(gptq, "target", noted),
        mock.patch.object(rounding, "choose", choose_so),
        mock.patch.object(gptq, "_groups", _rows_apart),
    ):
        yield


def _rows_apart(*_: Any) -> list[Any]:
    """Make no groups: rows are rounded without a view of what their outputs do to the loss."""
    return []


@contextmanager
def _inputs_of_the_checkpoint() -> Iterator[None]:
    """Take for H what the unquantized model reads."""
    add = InputSums.add

    def add_so(self: InputSums, x: torch.Tensor, lost: torch.Tensor, residual: torch.Tensor | None = None) -> None:
        add(self, x + lost, torch.zeros_like(lost), None if residual is None else torch.zeros_like(residual))

    with mock.patch.object(InputSums, "add", add_so):
        yield


@contextmanager
def _damped(share: float) -> Iterator[None]:
    of = Curvature.of
    with mock.patch.object(Curvature, "of", lambda hessian, _, threads=1: of(hessian, share, threads)):
        yield


@contextmanager
def _columns_in_order() -> Iterator[None]:
    """Round columns from the first to the last, not by falling diagonal of H."""

    class Numpy:
        def __getattr__(self, name: str) -> Any:
            return getattr(np, name)

        def argsort(self, values: NDArray[Any], **_: Any) -> NDArray[np.intp]:
            return np.arange(len(values))

    with mock.patch.object(gptq, "np", Numpy()):
        yield


@contextmanager
def _tables_to_nearest() -> Iterator[None]:
    def nearest(skeleton: Skeleton, gradients: Any, *rest: Any) -> Any:
        return tables(skeleton, None, *rest)

    tables = driver.quantize_tables
    with mock.patch.object(driver, "quantize_tables", nearest):
        yield


@contextmanager
def _shares(drift: Sequence[float], residual: Sequence[float]) -> Iterator[None]:
    """Give corrections these shares to choose from."""

    def product(_: Sequence[float], repeat: int) -> Any:
        return own(*(drift, residual)[:repeat])

    own = gptq.itertools.product
    with mock.patch.object(gptq, "itertools", mock.Mock(wraps=gptq.itertools, product=product)):
        yield


@contextmanager
def _mixing_counts_once() -> Iterator[None]:
    """Count the tokens of an expert alike, whatever weight the router gave them."""
    rounded = experts._round

    def alike(weight: Float32, x: Any, original: Any, share: torch.Tensor, *rest: Any) -> QuantizedMatrix:
        return rounded(weight, x, original, torch.ones_like(share), *rest)

    with mock.patch.object(experts, "_round", alike):
        yield


@contextmanager
def _as_published() -> Iterator[None]:
    """Leave GPTQ alone: the range of each block, errors moved from column to column, and no more."""
    with (
        mock.patch.multiple(gptq, gptq=partial(gptq.gptq, steps=0, sweeps=0), _groups=_rows_apart),
        mock.patch.object(Gptq, "demands", frozenset({InputStatistic.MOMENTS})),
        _tables_to_nearest(),
    ):
        yield


NO_REFIT = (("            if (sweep == 0) refit(r, &t, b);\n", ""), ("            refit(r, &t, b);\n", ""))
ZERO_POINTS_STAY = ("if (!r->symmetric && d > 1e-7", "if (0 && d > 1e-7")
NO_DESCENT = ("            descend(r, &t, b);\n", "")
INGREDIENTS: Mapping[str, Change] = {
    "no search of grids: the range of each block": _of_options(steps=0),
    "8 ranges a block in place of 21": _of_options(steps=7),
    "no sweeps of refinement": _of_options(sweeps=0),
    "four sweeps in place of two": _of_options(sweeps=4),
    "sweeps without refit of scales and zero points": partial(_of_loops, *NO_REFIT),
    "sweeps without refit of zero points": partial(_of_loops, ZERO_POINTS_STAY),
    "sweeps without descent": partial(_of_loops, NO_DESCENT),
    "columns in their order, not by diagonal": _columns_in_order,
    "damping .001 in place of .01": partial(_damped, 0.001),
    "damping .1 in place of .01": partial(_damped, 0.1),
    "H of the checkpoint's inputs, no targets": _inputs_of_the_checkpoint,
    "no correction for the residual (β = 0)": _of_demands(InputStatistic.RESIDUAL),
    "no correction for the input (α = 0)": partial(_shares, (0.0,), gptq.SHARES),
    "no correction (T = W)": _of_demands(InputStatistic.DRIFT, InputStatistic.RESIDUAL),
    "α = ¾, β = 0 everywhere, as without text held out": partial(_shares, (gptq.DRIFT,), (0.0,)),
    "α = β = 1 everywhere": partial(_shares, (1.0,), (1.0,)),
    "no view of the loss (O)": lambda: mock.patch.object(gptq, "_groups", _rows_apart),
    "… and grids searched for W, not for T": _grids_of_weights,
    "pairs of outputs count whole": _of_numbers(OFF_DIAGONAL=1.0),
    "one pass over groups of rows": _of_numbers(PASSES=1),
    "4 groups of rows": _of_numbers(GROUPS=4),
    "no sweep where rows are rounded again": _of_numbers(SWEEPS_AGAIN=0),
    "embedding and head to nearest": _tables_to_nearest,
}
OF_EXPERTS: Mapping[str, Change] = {
    "no more damping for few tokens": _of_numbers(SCARCITY=0.0),
    "tokens count alike, whatever the router gave them": _mixing_counts_once,
}


def main() -> None:
    """Print a row as it is measured, as a table of Markdown, and keep all in a file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint", nargs="?", type=Path, default=SAMPLE / "docs-llama-7m")
    parser.add_argument("--methods", action="store_true", help="methods beside each other, in place of ingredients")
    parser.add_argument(
        "--auto", type=float, metavar="BITS", help="auto beside uniform formats, in place of ingredients"
    )
    parser.add_argument("--outliers", action="store_true", help="give the checkpoint outliers first")
    parser.add_argument("--only", nargs="+", default=[""], help="rows whose name has one of these")
    parser.add_argument("--bits", type=int, default=GRID.bits, help="of linears, in rows of ingredients")
    parser.add_argument("--trellis", action="store_true", help="ingredients with codes of a trellis")
    parser.add_argument("--tokens", type=int, default=16384, help="to calibrate on (default: %(default)s)")
    parser.add_argument("--held-tokens", type=int, default=16384, help="to measure on (default: %(default)s)")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--keep", type=Path, help="a file of JSON lines that rows are added to")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        path = options.checkpoint
        if options.outliers:
            path = Path(folder) / "outliers"
            write_outliers(options.checkpoint, path)
        bench = Bench(path, options.tokens, options.held_tokens, options.threads)
        told = f"{bench.calibration_tokens} tokens to calibrate on, {bench.held_tokens} held out"
        print(f"{options.checkpoint.name}{' with outliers' * options.outliers}: {told}", flush=True)
        rows = (
            of_methods(bench, options.only)
            if options.methods
            else of_auto(bench, options.auto)
            if options.auto
            else None
        )
        grid = TRELLIS if options.trellis else replace(GRID, bits=options.bits)
        shown = rows or of_ingredients(bench, options.only, grid)
        print("|what|bits|KLD × 1000|more than the first|s|CPU s|\n|---|--:|--:|--:|--:|--:|")
        first = None
        for name, found in shown:
            first = first or found
            line = _row(name, found, first)
            print(line, *(f"  {note}" for note in found.notes), sep="\n", flush=True)
            if options.keep:
                with options.keep.open("a") as kept:
                    kept.write(json.dumps({"name": name, "of": path.name, "kld": found.kld, **found.to_json()}) + "\n")


def of_ingredients(bench: Bench, only: Sequence[str], grid: Grid) -> Iterator[tuple[str, Measured]]:
    """Measure the method as it is, and with each ingredient taken out."""
    demand = WeightDemand(Gptq(), grid, tables=TABLES)
    yield "as it is", bench.measure(demand)
    of_these = {**INGREDIENTS, **(OF_EXPERTS if bench.weights()[1] else {})}
    for name, change in of_these.items():
        if any(part in name for part in only):
            with change():
                yield name, bench.measure(demand)


def of_methods(bench: Bench, only: Sequence[str]) -> Iterator[tuple[str, Measured]]:
    """Measure methods in the formats of one size, and auto in as many bits.

    Experts have no trellis: theirs are 4 bits, asymmetric, in each row.
    """
    plain = WeightDemand(Gptq(), GRID, tables=TABLES)
    of_trellis = tuple((name, TRELLIS) for name in bench.weights()[0])
    demands: dict[str, tuple[WeightDemand, Change]] = {
        "rtn": (replace(plain, method=Rtn()), nullcontext),
        "GPTQ as published": (plain, _as_published),
        "gptq": (plain, nullcontext),
        "gptq, trellis": (replace(plain, mixed=of_trellis), nullcontext),
    }
    bits = 0.0
    for name, (demand, change) in demands.items():
        if any(part in name for part in only):
            with change():
                found = bench.measure(demand)
            bits = max(bits, found.bits)
            yield name, found
    if any(part in "auto" for part in only):
        yield "auto", bench.measure(replace(plain, weight_bits=bits))


def of_auto(bench: Bench, bits: float) -> Iterator[tuple[str, Measured]]:
    """Measure what auto chose, its mixed formats, the best uniform ones that fit, and the next larger ones."""
    seen: list[Any] = []
    candidates = mixed._candidates

    def noted(losses: Any, demand: WeightDemand, allowed: int, others: int) -> Any:
        seen[:] = [losses, others]
        return candidates(losses, demand, allowed, others)

    demand = WeightDemand(Gptq(), GRID, tables=TABLES, weight_bits=bits)
    with mock.patch.object(mixed, "_candidates", noted):
        yield f"auto {bits:g}", bench.measure(demand)
    losses, others = seen
    own, uniform = candidates(losses, demand, int(bits * bench.checkpoint.parameters / 8), others)
    yield "its mixed formats", bench.measure(own.of(demand))
    if uniform is None:
        return
    yield f"uniform {_named(uniform)}", bench.measure(uniform.of(demand))
    budgets = sorted({_size(losses, others, linear, table) for linear in losses.linears for table in losses.tables})
    for allowed in budgets:
        if allowed > bits * bench.checkpoint.parameters / 8:
            _, larger = candidates(losses, demand, allowed, others)
            if larger.size_bytes == allowed:
                yield f"uniform {_named(larger)}", bench.measure(larger.of(demand))
                return


def _named(formats: Any) -> str:
    tables = "" if formats.tables is None else f"; embedding and head {formats.tables.format.name}"
    return f"{formats.mixed[0][1].format.name}{tables}"


def _size(losses: Any, others: int, linear: Grid, table: Grid) -> int:
    """Return the bytes of all weights in one format of linears and one of tables; 0 where there is none."""
    choices = [
        *(each.get(linear) for each in losses.choices.values()),
        *(e.get(table) for e in losses.of_tables.values()),
    ]
    return others + sum(choice.size_bytes for choice in choices) if None not in choices else 0


def _row(name: str, found: Measured, first: Measured) -> str:
    half = 5e2 * (found.interval()[1] - found.interval()[0])
    more, (low, high) = 1e3 * (found.kld - first.kld), found.interval(first)
    than = "" if found is first else f"{more:+.2f} ({1e3 * low:+.2f} … {1e3 * high:+.2f})"
    timed = f"{found.seconds:.1f}|{found.cpu_s:.1f}"
    return f"|{name}|{found.bits:.2f}|{1e3 * found.kld:.2f} ± {half:.2f}|{than}|{timed}|"


if __name__ == "__main__":
    main()
