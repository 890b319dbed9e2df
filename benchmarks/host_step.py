"""Time the host's part of a decode step over a device that costs nothing.

    python benchmarks/host_step.py [--rows 64 256] [--steps 200] [--run-ms 0] [--kv-cache paged] [--ahead]

The engine's process, its scheduler and the session for GPUs are the real ones; a stand-in takes the place of ONNX
Runtime's session, and of the copies from a device. A run of it returns at once; its logits are text-like: Zipf's law
over a vocabulary of 128,256, with 0.5 to 6 nats a row. As many clients as rows stream from another process.

Of each way to sample, medians over steps, in ms: `waits`, from the question for a run's heads to the beginning of the
next run, in which a device has nothing to do, and what a tenth of the steps stays below (`tenth`: for a machine that
others use, too); `cpu`, of these the processor's time of the engine's thread; `period`, from step to step, with what a
device's run would hide (detokenizing, delivering); and, a step: rows that their heads do not decide, of which blocks or
all logits are fetched, bytes copied from the device, and copies.

With `--ahead` the stand-in guesses each row's next token, as the graph does, in the time of its run, so that steps
begin before the tokens of those before are chosen. Then `waits` is from the end of a run to the beginning of the next
one; `wrong` is the part of rows that ran for nothing; and bytes are a mean over all.
"""

from __future__ import annotations

import argparse
import ctypes
import itertools
import json
import os
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

HERE = Path(__file__).resolve()
ROOT = HERE.parents[1]
sys.path[:0] = [str(ROOT), str(HERE.parent)]

from llmforge.backends.onnxruntime.cuda import paged  # noqa: E402
from llmforge.backends.onnxruntime.cuda import session as cuda  # noqa: E402
from llmforge.backends.onnxruntime.cuda.decode_runs import DecodeRuns, Running  # noqa: E402
from llmforge.backends.onnxruntime.cuda.paged import PagedSession  # noqa: E402
from llmforge.backends.onnxruntime.cuda.session import DeviceSession  # noqa: E402
from llmforge.ir import interface  # noqa: E402
from llmforge.ir.interface import HEAD  # noqa: E402
from llmforge.runtime.config import SessionConfig  # noqa: E402
from llmforge.runtime.device.cuda import BlockCopy, Buffer  # noqa: E402
from llmforge.runtime.device.top_logits import TopLogitsBuffers  # noqa: E402
from llmforge.runtime.signature import Argument  # noqa: E402
from llmforge.serving import EngineOptions, Request, Sampling  # noqa: E402
from tests.fakes.host_device import HostDevice  # noqa: E402

VOCABULARY, CONTEXT, PROMPT = 128_256, 2048, 16
BLOCK = 128  # tokens of a block, of heads of 128 channels
NATS = (0.5, 6.0)
POOL = 199  # rows of logits that steps go through: a prime, so that rows and steps meet anew
WARM = 20  # steps that do not count
SAMPLINGS = {
    "greedy": Sampling(),
    "temperature 1": Sampling(temperature=1.0),
    "top_p 0.95": Sampling(temperature=1.0, top_p=0.95),
}
_WORK = "LLMFORGE_HOST_STEP"  # what the engine's process is told: JSON


def text_like(rows: int, vocabulary: int, seed: int = 0) -> NDArray[np.float32]:
    """Make logits [rows, V] of Zipf's law, whose exponents give 0.5 to 6 nats, evenly spread."""
    random, ranks = np.random.default_rng(seed), np.log(np.arange(1, vocabulary + 1))
    exponents = np.linspace(1.0, 5.0, 200)
    entropies = [_entropy(-exponent * ranks) for exponent in exponents]  # descending
    wanted = np.linspace(*NATS, rows)
    found = np.interp(wanted, entropies[::-1], exponents[::-1])
    return np.stack([random.permutation(-exponent * ranks) for exponent in random.permutation(found)]).astype(
        np.float32
    )


def _entropy(logits: NDArray[np.float64]) -> float:
    shares = np.exp(logits - logits.max())
    shares /= shares.sum()
    return float(-(shares * np.log(shares)).sum())


class StandIn(HostDevice):
    """A device whose steps cost nothing: what a copy reads was made before.

    `copies` are the bytes of each copy from it; `runs` says when each run began, `asked` when its heads were asked for;
    `asked_cpu` and `begun_cpu` are the processor's time of the engine's thread then, and when the next one was begun.
    """

    def __init__(self, logits: NDArray[np.float32], run_s: float = 0.0) -> None:
        self.logits, self.run_s = logits, run_s
        order = np.argsort(-logits, axis=1, kind="stable")[:, :HEAD]
        best = logits.max(axis=1, keepdims=True)
        self._top = np.take_along_axis(logits, order, 1)
        self._ids = order.astype(np.int32)
        self._blocks, self._block_size = interface.mass_blocks(logits.shape[1])
        others = np.exp(logits - best) * (logits <= self._top[:, -1:])
        weights = np.pad(others, ((0, 0), (0, self._blocks * self._block_size - logits.shape[1])))
        self._masses = weights.reshape(len(logits), self._blocks, self._block_size).sum(axis=2)
        self.copies: list[int] = []
        self.runs: list[float] = []
        self.asked: list[float] = []
        self.asked_cpu: list[float] = []
        self.begun_cpu = 0.0

    @property
    def head_bytes(self) -> int:
        """Bytes of the head of one row."""
        return 4 * (2 * HEAD + self._blocks)

    def host(self, shape: tuple[int, ...], dtype: str) -> NDArray[Any]:
        """Make an array whose pages are there, as page-locked ones are."""
        return np.zeros(shape, dtype) + np.zeros(1, dtype)

    def read(self, buffer: Buffer, offset: int, values: NDArray[Any]) -> None:
        """Give the heads, or logits of one row, of the last run."""
        self.copies.append(values.nbytes)
        first, vocabulary = len(self.runs), self.logits.shape[1]
        if values.dtype == np.float32:
            row, start = divmod(offset // 4, vocabulary)
            values.reshape(-1)[:] = self.logits[(first + row) % len(self.logits), start : start + values.size]
            return
        rows = values.nbytes // self.head_bytes
        at = np.arange(first, first + rows) % len(self.logits)
        parts = np.split(values, [4 * rows * HEAD, 8 * rows * HEAD])
        for part, made in zip(parts, (self._top, self._ids, self._masses), strict=True):
            part.view(made.dtype).reshape(rows, *made.shape[1:])[:] = made[at]


class Place(NamedTuple):
    """Where an input or output lies."""

    shape: tuple[int, ...]
    address: int

    def values(self, dtype: type[np.generic]) -> NDArray[Any]:
        """Give what is there, to read and write."""
        size = int(np.prod(self.shape)) * np.dtype(dtype).itemsize
        return np.frombuffer((ctypes.c_uint8 * size).from_address(self.address), dtype).reshape(self.shape)


class Guessing(StandIn):
    """A device that guesses tokens, too: logits lie where the run before wrote them, or where they were copied to.

    `ends` says when each run ended.
    """

    def __init__(self, logits: NDArray[np.float32], run_s: float) -> None:
        super().__init__(logits, run_s)
        self._weights = np.exp(self._top - self._top[:, :1])
        self._sums = self._weights.cumsum(axis=1)
        self._running = self._masses.cumsum(axis=1)
        self.id_bytes = 0  # in front of heads
        self._number: dict[int, int] = {}  # of the run whose logits a buffer holds
        self.ends: list[float] = []

    def run(self, inputs: dict[str, Place], outputs: dict[str, Place]) -> None:
        """Guess the tokens of a decode step, in the time that a run takes."""
        number = len(self.runs)
        rows = outputs[interface.NEXT_IDS].shape[0]
        self._number[outputs[interface.LOGITS].address] = number
        at = np.arange(number, number + rows) % len(self.logits)
        guessed = self._guess(at, inputs[interface.DRAWS].values(np.float32))
        outputs[interface.NEXT_IDS].values(np.int64)[:] = guessed
        time.sleep(max(0.0, self.runs[-1] + self.run_s - time.perf_counter()))
        self.ends.append(time.perf_counter())

    def _guess(self, at: NDArray[np.int64], draws: NDArray[np.float32]) -> NDArray[np.int64]:
        uniform, second, top_p, _, _, behind = draws.T
        sums, running, every = self._sums[at], self._running[at], np.arange(len(at))
        ahead = sums[:, -1] - behind * self._weights[at, -1]
        whole = ahead + behind * running[:, -1]
        edge = top_p * whole
        within = edge <= sums[:, -1]
        cut = sums[every, np.minimum((sums < edge[:, None]).sum(1), HEAD - 1)]
        target = uniform * np.where(within, cut, whole)
        ids = self._ids[at, np.minimum((sums <= target[:, None]).sum(1), HEAD - 1)].astype(np.int64)
        for row in np.flatnonzero(~within & (target >= ahead)).tolist():
            block = min(int((running[row] <= target[row] - ahead[row]).sum()), self._blocks - 1)
            own = self.logits[at[row], block * self._block_size : (block + 1) * self._block_size]
            weights = np.exp(own - self._top[at[row], 0]) * (own <= self._top[at[row], -1])
            chosen = (weights.cumsum() <= second[row] * weights.sum()).sum()
            ids[row] = block * self._block_size + min(int(chosen), len(own) - 1)
        return ids

    def copy(self, copies: Sequence[BlockCopy]) -> None:
        """Note where logits are copied to: a device does that by itself."""
        for target, source, *_ in copies:
            self._number[target.buffer.address] = self._number.get(source.buffer.address, 0)  # caches have none

    def read(self, buffer: Buffer, offset: int, values: NDArray[Any]) -> None:
        """Give logits of one row of the run that a buffer has, or guesses and heads of the last run."""
        vocabulary = self.logits.shape[1]
        if values.dtype == np.float32:
            self.copies.append(values.nbytes)
            row, start = divmod(offset // 4, vocabulary)
            found = self.logits[(self._number[buffer.address] + row) % len(self.logits)]
            values.reshape(-1)[:] = found[start : start + values.size]
            return
        ids = self.id_bytes
        super().read(buffer, offset, values[ids:])
        self.copies[-1] += ids
        ctypes.memmove(values.ctypes.data, buffer.address, ids)


class Graph:
    """Stands for ONNX Runtime's session of a decoder with one small cache, whose runs return at once."""

    cache: Sequence[int | str] = ("batch", 1, "capacity", 8)

    def __init__(self, device: StandIn) -> None:
        self._device, self._guesses = device, isinstance(device, Guessing)

    @property
    def _of_guesses(self) -> list[Argument]:
        draws = Argument(interface.DRAWS, "tensor(float)", ["batch", len(interface.GREEDY)])
        return [draws, Argument(interface.CHOSEN_IDS, "tensor(int64)", ["rows"])] if self._guesses else []

    def get_inputs(self) -> list[Argument]:
        """Tell the inputs of a graph for GPUs."""
        whole, batch = ["batch", "sequence"], ["batch"]
        return [
            Argument(interface.INPUT_IDS, "tensor(int64)", whole),
            Argument(interface.SEQLENS_K, "tensor(int32)", batch),
            Argument(interface.TOTAL_SEQUENCE_LENGTH, "tensor(int32)", []),
            Argument(interface.TEMPERATURES, "tensor(float)", batch),
            *self._of_guesses,
            Argument("past_key_values.0.key", "tensor(float16)", self.cache),
        ]

    def get_overridable_initializers(self) -> list[Argument]:
        """Tell the inputs with defaults."""
        return [Argument(interface.LOGITS_ROWS, "tensor(int64)", ["rows"])]

    def get_outputs(self) -> list[Argument]:
        """Tell the outputs."""
        return [
            Argument(interface.LOGITS, "tensor(float)", ["batch", "rows", self._device.logits.shape[1]]),
            Argument("present.0.key", "tensor(float16)", self.cache),
            Argument(interface.TOP_LOGITS, "tensor(float)", ["batch", HEAD]),
            Argument(interface.TOP_IDS, "tensor(int32)", ["batch", HEAD]),
            Argument(interface.MASSES, "tensor(float)", ["batch", "blocks"]),
            *([Argument(interface.NEXT_IDS, "tensor(int64)", ["batch"])] if self._guesses else []),
        ]

    def io_binding(self) -> Any:
        """Make what takes addresses, and leaves them."""
        return Binding()

    def run_with_iobinding(self, binding: Any, options: Any) -> None:
        """Note when it was called."""
        self._device.runs.append(time.perf_counter())
        if isinstance(self._device, Guessing):
            self._device.run(binding.inputs, binding.outputs)
        elif self._device.run_s:
            time.sleep(self._device.run_s)


class PagedGraph(Graph):
    """The same over blocks."""

    cache = ("blocks", BLOCK, 1, 8)

    def get_inputs(self) -> list[Argument]:
        """Tell the inputs of a graph for GPUs over blocks."""
        slots = {interface.SEQLENS_K, interface.TOTAL_SEQUENCE_LENGTH}
        places = (interface.CUMULATIVE_LENGTHS, interface.PAST_SEQLENS, interface.ATTENTION_METADATA)
        made = [Argument(interface.BLOCK_TABLE, "tensor(int32)", ["batch", "blocks"])]
        made += [Argument(name, "tensor(int32)", ["numbers"]) for name in places]
        return [*(each for each in super().get_inputs() if each.name not in slots), *made]


class Binding:
    """Takes addresses, and leaves them."""

    def __init__(self) -> None:
        self.inputs: dict[str, Place] = {}
        self.outputs: dict[str, Place] = {}

    def bind_input(self, name: str, kind: str, index: int, onnx: int, shape: tuple[int, ...], address: int) -> None:
        """Note where an input lies."""
        self.inputs[name] = Place(shape, address)

    def bind_output(self, name: str, kind: str, index: int, onnx: int, shape: tuple[int, ...], address: int) -> None:
        """Note where an output goes."""
        self.outputs[name] = Place(shape, address)


class StandInSession(DeviceSession):
    """The session for GPUs over a stand-in for ONNX Runtime's."""

    device: StandIn

    def __init__(self, rows: int, vocabulary: int = VOCABULARY, run_s: float = 0.0, *, ahead: bool = False) -> None:
        device = (Guessing if ahead else StandIn)(text_like(POOL, vocabulary), run_s)
        buckets = sorted({*(1 << i for i in range(rows.bit_length()) if 1 << i <= rows), rows})
        cuda.open_on = lambda *_, **__: Graph(device)
        super().__init__(b"", SessionConfig(threads=1), device, buckets=buckets)
        _watch(device, self._heads)


class StandInPagedSession(PagedSession):
    """The session over blocks over a stand-in for ONNX Runtime's."""

    device: StandIn

    def __init__(self, rows: int, vocabulary: int = VOCABULARY, run_s: float = 0.0, *, ahead: bool = False) -> None:
        device = (Guessing if ahead else StandIn)(text_like(POOL, vocabulary), run_s)
        buckets = sorted({*(1 << i for i in range(rows.bit_length()) if 1 << i <= rows), rows})
        paged.open_on = lambda *_, **__: PagedGraph(device)
        super().__init__(b"", SessionConfig(threads=1), device, blocks=rows * CONTEXT // BLOCK, buckets=buckets)
        _watch(device, self._heads)


def _watch(device: StandIn, buffers: TopLogitsBuffers | None) -> None:
    """Note when heads of a run that is done are asked for, and when the next one is begun."""
    heads, begin = Running.heads, DecodeRuns.begin

    def ask(running: Running) -> Any:
        running.launched()
        device.asked.append(time.perf_counter())
        device.asked_cpu.append(time.thread_time())
        return heads(running)

    def note(runs: DecodeRuns, *step: Any) -> Any:
        device.begun_cpu = time.thread_time()
        return begin(runs, *step)

    Running.heads, DecodeRuns.begin = ask, note  # type: ignore[method-assign]
    if isinstance(device, Guessing) and buffers is not None:
        places = {name: address for name, _, _, address in buffers.outputs(1)}
        device.id_bytes = places[interface.TOP_LOGITS] - places[interface.NEXT_IDS]


def tokenizer(sample: Path) -> Any:
    """Make the tokenizer of `sample` one of `VOCABULARY` tokens: words of several bytes."""
    from tokenizers import Tokenizer

    content = json.loads(sample.read_text(encoding="utf-8"))
    vocabulary = content["model"]["vocab"]
    taken = set(vocabulary.values()) | {each["id"] for each in content["added_tokens"]}
    missing = (token for token in range(VOCABULARY) if token not in taken)
    vocabulary |= {f"Ġword{token}": token for token in missing}
    return Tokenizer.from_str(json.dumps(content))


# The engine's process


def serve() -> None:
    """Be the engine's process, with a stand-in in the place of its artifact."""
    from llmforge.runtime.config import RuntimeConfig, SessionOptions
    from llmforge.serving import engine_worker
    from llmforge.serving.engine import Engine
    from llmforge.serving.runner import Runner
    from llmforge.serving.scheduler import Scheduler
    from llmforge.serving.scheduler.run_ahead import RunAhead

    told = json.loads(os.environ[_WORK])
    rows = told["rows"]
    opened = StandInPagedSession if told["kv_cache"] == "paged" else StandInSession
    session = opened(rows, run_s=told["run_s"], ahead=told["ahead"])
    config = RuntimeConfig(
        3, None, None, CONTEXT, rows, VOCABULARY, (), None, session.signature.caches, SessionOptions(1, True, {})
    )  # fmt: skip
    runner = Runner(session, config, tokenizer(Path(told["tokenizer"])), None)
    begun: list[tuple[float, ...]] = []  # of each step, as the line says that adds to it
    step = Scheduler.step

    def noted() -> dict[str, Any]:
        """Give what the run-ahead way is summed up from."""
        device = session.device
        assert isinstance(device, Guessing)
        return {"begins": device.runs, "ends": device.ends, "bytes": sum(device.copies), "judged": judged}

    judged, judge = [0, 0], RunAhead.note_guess

    def counted(scheduler: RunAhead[Any], sequence: Any, right: bool) -> None:
        judged[right] += 1
        judge(scheduler, sequence, right)

    RunAhead.note_guess = counted  # type: ignore[method-assign]

    def timed(scheduler: Scheduler[Any]) -> bool:
        device = session.device
        before = len(device.copies), len(device.runs)
        start = time.perf_counter()
        went_on = step(scheduler)
        if told["ahead"]:
            if not scheduler.busy:
                Path(told["out"]).write_text(json.dumps(noted()), encoding="utf-8")
            return went_on
        copies, runs = device.copies[before[0] :], device.runs[before[1] :]
        if len(runs) == 1 and len(copies) and copies[0] == rows * device.head_bytes:  # a decode step of all rows
            whole = copies[1:].count(4 * VOCABULARY)
            blocks = len(copies) - 1 - whole
            cpu = device.begun_cpu, device.asked_cpu[-1]
            begun.append((start, runs[0], device.asked[-1], whole, blocks, sum(copies), len(copies), *cpu))
        if not scheduler.busy and begun:
            Path(told["out"]).write_text(json.dumps(begun), encoding="utf-8")
            begun.clear()
        return went_on

    Scheduler.step = timed  # type: ignore[method-assign]
    Engine.load = classmethod(lambda cls, artifact, options, *_: cls(runner, options))  # type: ignore[assignment]
    engine_worker.main()


# The clients' process


def measure(
    rows: int,
    sampling: Sampling,
    steps: int,
    sample: Path,
    folder: Path,
    run_s: float,
    kv_cache: str = "slots",
    *,
    ahead: bool = False,
) -> dict[str, float]:
    """Serve `rows` clients for `steps` steps, and sum up what the engine's process noted."""
    import dataclasses

    from llmforge.serving import EngineProcess, engine_process
    from llmforge.serving.prompts import PromptEncoder

    out = folder / "steps.json"
    out.unlink(missing_ok=True)
    told = {"rows": rows, "tokenizer": str(sample), "out": str(out), "run_s": run_s, "kv_cache": kv_cache}
    os.environ[_WORK] = json.dumps({**told, "ahead": ahead})
    os.environ["PYTHONPATH"] = os.pathsep.join([str(ROOT), str(HERE.parent)])
    engine_process._WORKER = HERE.stem
    PromptEncoder.read = classmethod(lambda cls, artifact: None)  # type: ignore[assignment, method-assign]
    left, done = rows, threading.Event()

    def receive(item: Any) -> None:
        nonlocal left
        if isinstance(item, Exception):
            raise item
        left -= item.finish_reason is not None
        if not left:
            done.set()

    with EngineProcess(folder, EngineOptions(max_queue=rows, prefix_cache_bytes=0)) as engine:
        for i in range(rows):
            own = dataclasses.replace(sampling, seed=i, max_tokens=steps + 2 * rows, ignore_eos=True)
            engine.submit(Request(tuple(range(50, 50 + PROMPT)), own), receive)
        done.wait()
    if ahead:
        return _of_runs(json.loads(out.read_text(encoding="utf-8")), steps)
    noted = json.loads(out.read_text(encoding="utf-8"))[WARM : WARM + steps]
    pairs = list(itertools.pairwise(noted))
    waits = [(after[1] - before[2]) * 1e3 for before, after in pairs]
    return {
        "waits": statistics.median(waits),
        "tenth": statistics.quantiles(waits, n=10)[0],
        "cpu": statistics.median(after[7] - before[8] for before, after in pairs) * 1e3,
        "period": statistics.median(after[0] - before[0] for before, after in pairs) * 1e3,
        "rows beyond": statistics.mean(each[3] + each[4] for each in noted),
        "blocks": statistics.mean(each[4] for each in noted),
        "whole rows": statistics.mean(each[3] for each in noted),
        "bytes": statistics.mean(each[5] for each in noted),
        "copies": statistics.mean(each[6] for each in noted),
        "steps": len(noted),
    }


def _of_runs(noted: dict[str, Any], steps: int) -> dict[str, float]:
    """Sum up the last runs, which are of all rows."""
    begins, ends = noted["begins"][-steps:], noted["ends"][-steps:]
    wrong, right = noted["judged"]
    return {
        "waits": statistics.median(after - before for after, before in zip(begins[1:], ends, strict=False)) * 1e3,
        "period": statistics.median(after - before for before, after in itertools.pairwise(begins)) * 1e3,
        "wrong": wrong / (wrong + right),
        "bytes": noted["bytes"] / len(noted["begins"]),
        "steps": len(begins),
    }


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, nargs="+", default=[64, 256])
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--run-ms", type=float, default=0.0, help="what a run takes, of no processor; default: nothing")
    parser.add_argument("--ahead", action="store_true", help="steps begin on guesses of the tokens before")
    parser.add_argument("--tokenizer", type=Path, default=ROOT / "tests" / "data" / "docs-llama-7m" / "tokenizer.json")
    parser.add_argument("--kv-cache", choices=["slots", "paged"], default="slots")
    chosen = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as folder:
        for rows in chosen.rows:
            for name, sampling in SAMPLINGS.items():
                run_s, where = chosen.run_ms / 1e3, Path(folder)
                found = measure(
                    rows, sampling, chosen.steps, chosen.tokenizer, where, run_s, chosen.kv_cache, ahead=chosen.ahead
                )
                figures = "".join(f"  {key} {value:.2f}" for key, value in found.items())
                print(f"{rows:4} rows, {name:14}{figures}", flush=True)


if __name__ == "__main__":
    if _WORK in os.environ:
        serve()
    else:
        main()
