"""Show where the time of a step goes: python benchmarks/step.py ARTIFACT [--threads N] [--case CONTEXT,TOKENS,BATCH …].

For each case: the time of a step through the session that serves; the share of every operator, from ONNX Runtime's own
profile of a second session (which makes steps slower); what the step would take if it read its weights and cache at the
memory bandwidth that was measured just before; and, for decoding, the time of a token through the engine, whose
difference to the step is choosing tokens, text, bookkeeping and the hand-over to the caller's thread.
"""

from __future__ import annotations

import argparse
import collections
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np

from llmforge.backends.onnxruntime.session import Session
from llmforge.measure.machine import read_bandwidth
from llmforge.runtime.config import DATA_FILE, FILE, MODEL_FILE, RuntimeConfig, SessionConfig
from llmforge.runtime.interface import StepInputs
from llmforge.serving import Request, Sampling
from llmforge.serving.engine import Engine

CASES = ("32,1,1", "2048,1,1", "32,1,8", "0,32,1", "0,512,1", "1536,512,1")
PROBE_BYTES = 1 << 28
PIECE = 512  # tokens of the context that are read at a time


def stepper(session: Session, context: int, tokens: int, batch: int) -> Callable[[], None]:
    """Make a function that runs one step of `tokens` after `context` in `batch` rows, over and over the same.

    The context is read before: pages of a cache that nothing was written to are all one page, which is read for free.
    """
    cache = session.allocate(batch, context + tokens)
    rng = np.random.default_rng(0)
    for start in range(0, context, PIECE):
        piece = rng.integers(0, session.vocabulary, (batch, min(PIECE, context - start)), np.int64)
        session.step(StepInputs(piece, np.full(batch, start, np.int32)), cache)
    ids = rng.integers(0, session.vocabulary, (batch, tokens), np.int64)
    past = np.full(batch, context, np.int32)
    out = np.empty((batch, 1, session.vocabulary), np.float32)
    return lambda: (session.step(StepInputs(ids, past), cache, out=out), None)[1]


def timed(step: Callable[[], None], repetitions: int) -> float:
    """Time a step, in ms: the median, after two that warm up."""
    times = []
    for repetition in range(repetitions + 2):
        began = time.perf_counter()
        step()
        if repetition >= 2:
            times.append((time.perf_counter() - began) * 1e3)
    return statistics.median(times)


def operators(model: Path, config: SessionConfig, case: tuple[int, int, int], repetitions: int) -> dict[str, float]:
    """Profile a step: ms of each kind of operator, linear layers by the shape of their weights."""
    with tempfile.TemporaryDirectory() as folder:
        session = Session(model, replace(config, profile=str(Path(folder, "profile"))))
        timed(stepper(session, *case), repetitions)
        events = json.loads(session.end_profile().read_text())
    runs = [event["ts"] for event in events if event["name"] == "model_run"]
    measured = runs[len(range(0, case[0], PIECE)) + 2]  # what reads the context and warms up comes before
    share: collections.Counter[str] = collections.Counter()
    for event in events:
        if event.get("cat") == "Node" and event["name"].endswith("_kernel_time") and event["ts"] >= measured:
            name = event["args"]["op_name"]
            if name in ("Linear", "MatMulNBits"):
                weights = next(iter(event["args"]["input_type_shape"][1].values()))
                name += f" {weights[0] * (16 if name == 'Linear' else 1)} rows"
            share[name] += event["dur"]
    return {name: micros / repetitions / 1e3 for name, micros in share.most_common()}


def bytes_read(engine: Path, context: int, batch: int) -> int:
    """Sum up what a decode step reads: the data file, which is weights but for tables of angles, and the cache."""
    caches = RuntimeConfig.read(engine / FILE).caches
    token = sum(cache.kv_heads * cache.head_dim * np.dtype(cache.dtype).itemsize for cache in caches)
    return (engine / DATA_FILE).stat().st_size + batch * context * token


def through_engine(artifact: Path, threads: int | None, context: int, batch: int) -> float:
    """Time a decoded token of every row through the engine, in ms: the median."""
    engine = Engine.load(artifact, threads=threads)
    rng = np.random.default_rng(0)
    stamps: list[float] = []
    sampling = Sampling(max_tokens=48, ignore_eos=True)
    prompts = [tuple(rng.integers(0, engine.runner.config.vocabulary, context).tolist()) for _ in range(batch)]
    streams = [engine.stream(Request(prompt, sampling)) for prompt in prompts]
    for index, stream in enumerate(streams):
        for chunk in stream:
            if index == 0 and chunk.token_id is not None:
                stamps.append(time.perf_counter())
    engine.close()
    return float(np.median(np.diff(stamps[8:]))) * 1e3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("artifact", type=Path)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--case", action="append", metavar="CONTEXT,TOKENS,BATCH", help=f"default: {' '.join(CASES)}")
    parser.add_argument("--repetitions", type=int, default=20)
    args = parser.parse_args()
    engine = args.artifact / "engine"
    config = RuntimeConfig.read(engine / FILE).session.resolve(args.threads)
    for text in args.case or CASES:
        context, tokens, batch = (int(part) for part in text.split(","))
        repetitions = args.repetitions if tokens == 1 else max(3, args.repetitions // 5)
        bandwidth = read_bandwidth(PROBE_BYTES, args.threads)
        step = timed(stepper(Session(engine / MODEL_FILE, config), context, tokens, batch), repetitions)
        print(f"\ncontext {context}, tokens {tokens}, batch {batch}: {step:.2f} ms a step")
        shares = operators(engine / MODEL_FILE, config, (context, tokens, batch), repetitions)
        for name, ms in shares.items():
            print(f"  {ms:9.2f} ms  {name}")
        print(f"  {sum(shares.values()):9.2f} ms  all operators, while profiled")
        if tokens == 1:
            served = through_engine(args.artifact, args.threads, context, batch)
            print(f"  {served:9.2f} ms  a token through the engine")
            size = bytes_read(engine, context, batch)
            print(f"  {size / bandwidth * 1e3:9.2f} ms  to read {size / 1e6:.0f} MB at {bandwidth / 1e9:.1f} GB/s")


if __name__ == "__main__":
    main()
