"""Starts an engine in a process of its own: how long it takes to load, and how much memory it needs at most.

Run as `python -m llmforge.measure.start` with one JSON object as its argument; prints another one.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

import numpy as np

from llmforge.base.errors import RunFailed
from llmforge.measure import machine
from llmforge.measure.latency import TimedModel, timed_generation
from llmforge.metrics.latency import EngineStart

_TIMEOUT_S = 1800.0


def measure(artifact: Path, *, threads: int, batch: int, prompt_tokens: int, output_tokens: int) -> EngineStart:
    """Load the engine in `artifact`, give `batch` prompts so many tokens, or encode them, and tell what that took.

    Raises:
        RunFailed: the process ended with an error, or too late.
    """
    asked = {
        "artifact": str(artifact), "threads": threads, "batch": batch, "prompt_tokens": prompt_tokens,
        "output_tokens": output_tokens,
    }  # fmt: skip
    command = [sys.executable, "-m", __name__, json.dumps(asked)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False)
    except subprocess.TimeoutExpired as error:
        raise RunFailed(f"a start of the engine took more than {_TIMEOUT_S:g} s") from error
    if done.returncode != 0:
        last = done.stderr.strip().splitlines()[-1:] or ["no message"]
        raise RunFailed(f"a start of the engine ended with {done.returncode}: {last[0]}")
    return EngineStart.model_validate_json(done.stdout)


def run(artifact: Path, *, threads: int, batch: int, prompt_tokens: int, output_tokens: int) -> EngineStart:
    """Do in this process what `measure` asks for."""
    from llmforge.runtime.config import FILE, RuntimeConfig
    from llmforge.runtime.device.cuda import CudaDevice
    from llmforge.serving import Sampling, load
    from llmforge.serving.encoder_runner import load_encoder

    config = RuntimeConfig.read(artifact / "engine" / FILE)
    device = None if config.device is None else CudaDevice()
    before = 0 if device is None else device.memory()[0]
    began = time.perf_counter()
    if config.encoder is not None:
        encoder = load_encoder(artifact, threads)
        load_ms = (time.perf_counter() - began) * 1e3
        ids = np.random.default_rng(0).integers(0, encoder.vocabulary, (batch, prompt_tokens), np.int64)
        timed_generation(TimedModel.of_encoder(encoder, description="", load_seconds=load_ms / 1e3), ids, 0)
        return EngineStart(load_ms=load_ms, peak_host_bytes=machine.peak_resident_bytes(), peak_device_bytes=None)
    runner = load(artifact, threads=threads)
    load_ms = (time.perf_counter() - began) * 1e3
    prompts = np.random.default_rng(0).integers(0, config.vocabulary, (batch, prompt_tokens)).tolist()
    sampling = Sampling(temperature=0.0, max_tokens=output_tokens, ignore_eos=True)
    for _ in runner.generate_batch(prompts, [sampling] * batch):
        pass
    return EngineStart(
        load_ms=load_ms,
        peak_host_bytes=machine.peak_resident_bytes() + sum(map(machine.peak_resident_bytes, runner.session.processes)),
        # What is taken stays taken: weights and cache are allocated once, and arenas return nothing.
        peak_device_bytes=None if device is None else max(0, before - device.memory()[0]),
    )


if __name__ == "__main__":
    asked = json.loads(sys.argv[1])
    sys.stdout.write(run(Path(asked.pop("artifact")), **asked).to_json())
