"""The steps: each measures one thing and returns it, as JSON, or raises what keeps it from that.

What builds engines imports torch, so it is imported by the steps that need it.
"""

from __future__ import annotations

import dataclasses
import importlib.metadata
import os
import platform
import shutil
import signal
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.verify_gpu import calibrating, opening, place, speed
from benchmarks.verify_gpu.scale import EVERY, Scale
from benchmarks.verify_gpu.steps import Result, Run, Step, named
from llmforge.base.errors import EnvironmentLacks, Unavailable, VerificationError
from llmforge.native import nccl
from llmforge.runtime.config import FILE, RuntimeConfig
from llmforge.runtime.device import cuda as devices
from llmforge.runtime.device.cuda import BlockCopy, MemoryBlock
from llmforge.runtime.interface import StepInputs

PACKAGES = (
    "llmforge", "onnxruntime-gpu", "onnxruntime", "cuda-bindings", "tensorrt", "tensorrt-rtx", "torch", "transformers",
    "numpy",
)  # fmt: skip
ATTENTION = {  # heads, KV heads, head_dim, window, engine.kv_cache
    "h64-group4": (8, 2, 64, None, "slots"),
    "h128-group8": (8, 1, 128, None, "slots"),
    "h128-group1": (4, 4, 128, None, "slots"),
    "h128-group4-window": (8, 2, 128, 64, "slots"),
    "h64-group4-blocks": (8, 2, 64, None, "paged"),
    "h128-group4-window-blocks": (8, 2, 128, 64, "paged"),
}
RANKS = 2
SLOTS = "-slots"  # ends names of steps whose engines have slots, where they would have blocks by default


def plan(scale: Scale) -> list[Step]:
    """List the steps in their order: what a lease that ends early should have settled comes first."""
    made = [Step("environment", 120, environment)]
    for precision, names in scale.parity.items():
        for name in zoo_names() if EVERY in names else names:
            made.append(Step(f"parity:{precision}:{name}", 300, named(parity, precision, name)))
    made.append(Step(f"parity:{scale.plain}{SLOTS}:llama", 300, named(parity, scale.plain, "llama", "slots")))
    made.append(Step("capture", 600, capture))
    made.append(Step("capture:slots", 600, named(capture, "slots")))
    made.append(Step("calibration", 600, lambda run: calibrating.calibration(run.scale)))
    for model, wanted in scale.models.items():
        made.append(Step(f"shape:{model}", 1800, named(shape, model)))
        after = (f"shape:{model}",)
        made += [Step(f"build:{model}:{each}", 3600, named(build, model, each), after) for each in wanted.precisions]
    for number in range(1, scale.rounds + 1):
        for model in scale.models:
            for subject in scale.subjects(model):
                ours = subject.startswith("llmforge-")
                needs = f"build:{model}:{subject.removeprefix('llmforge-')}" if ours else f"shape:{model}"
                made.append(Step(f"speed:{number}:{model}:{subject}", 900, named(throughput, model, subject), (needs,)))
    first, last = next(iter(scale.models)), scale.models[next(iter(scale.models))].precisions[-1]
    made.append(Step("profile", 600, named(profile, first, last), (f"build:{first}:{last}",)))
    made += [Step(name, 1200, named(plans, name)) for name in ("tensorrt", "tensorrt-rtx")]
    made.append(Step("ranks", 1200, ranks))
    if scale.attention:
        made += [Step(f"attention:{name}", 300, named(attention, name), (), read_attention) for name in ATTENTION]
    return made


def zoo_names() -> tuple[str, ...]:
    """Name every model of the zoo, which imports torch."""
    from tests.models import zoo

    return tuple(zoo.ZOO)


def environment(run: Run) -> Result:
    chosen = place.target(run.scale, run.target)
    return machine(run.scale, chosen.name, None if chosen.bandwidth_gbs is None else chosen.bandwidth_gbs.value)


def machine(scale: Scale, target: str, data_sheet_gb_per_s: float | None) -> Result:
    """Describe the device, which stands for `target`, and its copy bandwidth."""
    device = place.device(scale)
    driver = "not asked"
    if shutil.which("nvidia-smi") and not scale.dry:
        query = ["nvidia-smi", "--query-gpu=driver_version,power.limit", "--format=csv,noheader"]
        driver = subprocess.run(query, capture_output=True, text=True, check=False).stdout.strip()
    return {
        "device": device.name,
        "sm": device.sm,
        "memory_bytes": device.memory()[1],
        "driver": driver,
        "copy_gb_per_s": _copy_bandwidth(device, scale.copy_bytes),
        "target": target,
        "data_sheet_gb_per_s": data_sheet_gb_per_s,
        "python": platform.python_version(),
        "packages": {name: version for name in PACKAGES if (version := _version(name)) is not None},
    }


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _copy_bandwidth(device: Any, size: int) -> float:
    """Copy `size` bytes within the device, ten times: bytes read and written a second, median, in GB/s."""
    source, target = device.allocate(size), device.allocate(size)
    times = []
    for _ in range(11):
        device.synchronize()
        start = time.perf_counter()
        device.copy([BlockCopy(MemoryBlock(target, 0, size), MemoryBlock(source, 0, size), size, 1)])
        device.synchronize()
        times.append(time.perf_counter() - start)
    return 2 * size / statistics.median(times[1:]) / 1e9


def attention(run: Run, name: str) -> Result:
    """Let ONNX Runtime tell which kernels it chose; `read_attention` reads it off the log when the step has ended."""
    from benchmarks.verify_gpu import subjects
    from tests.models import attention_kernels as cuda_attention
    from tests.models import zoo

    heads, kv_heads, head_dim, window, kv_cache = ATTENTION[name]
    os.environ[cuda_attention.DEBUG_VARIABLE] = "1"
    checkpoint = run.work / "checkpoints" / name
    options = {"num_attention_heads": heads, "num_key_value_heads": kv_heads, "head_dim": head_dim}
    kind = "mistral-window" if window else "llama"
    zoo.write(kind, checkpoint, **options, **({"sliding_window": window} if window else {}))
    folder = run.work / "engines" / name
    chosen = place.target(run.scale, run.target)
    subjects.build(checkpoint, folder, run.scale.plain, chosen, max_batch=1, max_context=128, kv_cache=kv_cache)
    config = RuntimeConfig.read(folder / "engine" / FILE)
    # Unrecorded: a replay chooses no kernel.
    (folder / "engine" / FILE).write_text(dataclasses.replace(config, graphs=None, buckets=()).to_json())
    session = opening.open_engine(folder, run.scale)
    ids = np.random.default_rng(0).integers(3, zoo.VOCABULARY, (1, 40))
    cache = session.allocate(1, 128)
    for said, count, past in (("PREFILL", 32, 0), ("DECODE", 1, 32)):
        print(f"\n== {said}", flush=True)
        session.step(StepInputs(ids[:, past : past + count], np.array([past], np.int32)), cache.rows(0, 1))
    sys.stdout.flush()
    described = cuda_attention.KernelCase(
        "", heads, kv_heads, head_dim, False, False, bool(window), False, paged=kv_cache == "paged"
    )
    sm = place.device(run.scale).sm
    return {
        "heads": heads,
        "kv_heads": kv_heads,
        "head_dim": head_dim,
        "window": window,
        "kv_cache": kv_cache,
        "expected": {
            said: sorted(cuda_attention.expected(described, sm, decode=said == "decode")) if sm else []
            for said in ("prefill", "decode")
        },
    }


def read_attention(result: Result, log: str) -> Result:
    """Add which kernels the log names, and whether they are among those expected; None: nothing is expected."""
    from tests.models import attention_kernels as cuda_attention

    _, _, said = log.partition("== PREFILL")
    prefill, _, decode = said.partition("== DECODE")
    found = {
        kind: sorted({choice.kernel for choice in cuda_attention.parse(text)})
        for kind, text in (("prefill", prefill), ("decode", decode))
    }
    right = all(found[kind] and set(found[kind]) <= set(result["expected"][kind]) for kind in found)
    return {**result, "found": found, "as_expected": right if result["expected"]["decode"] else None}


def parity(run: Run, precision: str, name: str, kv_cache: str | None = None) -> Result:
    """Hold the device's logits against the CPU's, which computes the same codes in fp32: one text, piece by piece."""
    from benchmarks.verify_gpu import subjects
    from tests.models import zoo

    checkpoint = run.work / "checkpoints" / name
    zoo.write(name, checkpoint)
    chosen = place.target(run.scale, run.target)
    folder = run.work / "engines" / f"{name}-{precision}{SLOTS if kv_cache else ''}"
    subjects.build(checkpoint, folder, precision, chosen, max_batch=2, max_context=128, kv_cache=kv_cache)
    wanted = subjects.reference(checkpoint, run.work / "engines" / f"{name}-{precision}-cpu", precision)
    session = opening.open_engine(folder, run.scale)
    return _compared(session, wanted, run.scale.tolerances[precision], zoo.VOCABULARY)


def _compared(session: Any, wanted: Any, tolerance: float, vocabulary: int) -> Result:
    ids = opening.text(vocabulary)
    return opening.compared(*(opening.all_logits(each, ids, 128) for each in (session, wanted)), tolerance)


def capture(run: Run, kv_cache: str | None = None) -> Result:
    """Record every planned decode step of the sample checkpoint; the session proves each as it is loaded."""
    from benchmarks.verify_gpu import subjects

    folder = run.work / "engines" / f"capture{SLOTS if kv_cache else ''}"
    chosen = place.target(run.scale, run.target)
    sizes = {"max_batch": 8, "max_context": 1024}
    subjects.build(subjects.SAMPLE, folder, run.scale.plain, chosen, **sizes, kv_cache=kv_cache)
    return captures(run.scale, folder)


def captures(scale: Scale, folder: Path) -> Result:
    """Record every planned decode step of an engine."""
    session = opening.open_engine(folder, scale)
    config = RuntimeConfig.read(folder / "engine" / FILE)
    session.allocate(config.max_batch, config.max_context)
    planned = 0 if config.graphs is None else len(config.graphs.captures)
    return {"planned": planned, "recordings": [_recording(each) for each in session.capture_results]}


def _recording(recording: Any) -> Result:
    found: Result = dataclasses.asdict(recording)
    return found


def plans(run: Run, backend: str) -> Result:
    """Build a plan of the sample checkpoint, deserialize it, and hold its logits against fp32 on the CPU."""
    if run.scale.dry:
        raise EnvironmentLacks("a plan is loaded on a CUDA device alone")
    from benchmarks.verify_gpu import subjects

    folder, chosen = run.work / "engines" / backend, place.target(run.scale, run.target)
    facts = subjects.build(subjects.SAMPLE, folder, "fp16", chosen, max_batch=8, max_context=128, backend=backend)
    session = opening.open_engine(folder, run.scale)
    wanted = subjects.reference(subjects.SAMPLE, run.work / "engines" / f"{backend}-cpu")
    compared = _compared(session, wanted, 0.2, wanted.vocabulary)  # logits of a trained model spread over some 3
    step = speed.decode(session, session.allocate(8, 128), 8, 16, 16)
    recordings = [_recording(each) for each in session.capture_results]
    return {**compared, "size_bytes": facts["size_bytes"], "decode_ms@8": step * 1e3, "recordings": recordings}


def ranks(run: Run) -> Result:
    """Hold the logits of two ranks, on a GPU each, against the CPU's; time their steps, and end one of them."""
    from benchmarks.verify_gpu import subjects

    if not run.scale.dry and (seen := devices.count()) < RANKS:
        raise EnvironmentLacks(f"{RANKS} ranks take one GPU each, and there {'is' if seen == 1 else 'are'} {seen}")
    folder, chosen = run.work / "engines" / "ranks", place.target(run.scale, run.target)
    subjects.build(subjects.SAMPLE, folder, run.scale.plain, chosen, max_batch=8, max_context=128, ranks=RANKS)
    session = opening.open_engine(folder, run.scale)
    wanted = subjects.reference(subjects.SAMPLE, run.work / "engines" / "ranks-cpu")
    compared = _compared(session, wanted, 1e-3 if run.scale.dry else 0.2, wanted.vocabulary)
    cache = session.allocate(8, 128)
    step = speed.decode(session, cache, 8, 16, 16)
    os.kill(session.processes[1], signal.SIGKILL)
    start = time.perf_counter()
    try:
        speed.decode(session, cache, 8, 16, 16)
        raise VerificationError("a rank was killed, and steps go on")
    except Unavailable as error:
        ended = {"said": error.message, "after_s": time.perf_counter() - start}
    left = [each for each in session.processes if Path(f"/proc/{each}").exists()]
    if left:
        raise VerificationError(f"a rank was killed, and {len(left)} processes of ranks are left")
    return {
        **compared,
        "nccl": nccl.version(),
        "decode_ms@8": step * 1e3,
        "killed": ended,
        "notes": list(session.notes),
    }


def shape(run: Run, model: str) -> Result:
    from benchmarks.verify_gpu import subjects

    checkpoint = run.work / "checkpoints" / model
    checkpoint.parent.mkdir(parents=True, exist_ok=True)
    subjects.shape_checkpoint(run.scale.models[model].config, checkpoint)
    return {"bytes": sum(path.stat().st_size for path in checkpoint.iterdir())}


def build(run: Run, model: str, precision: str) -> Result:
    from benchmarks.verify_gpu import subjects

    start = time.perf_counter()
    sizes = {"max_batch": max(run.scale.batches), "max_context": run.scale.max_context}
    chosen = place.target(run.scale, run.target)
    facts = subjects.build(run.work / "checkpoints" / model, _engine(run, model, precision), precision, chosen, **sizes)
    return {**facts, "seconds": time.perf_counter() - start}


def _engine(run: Run, model: str, precision: str) -> Path:
    return run.work / "engines" / f"{model}-{precision}"


def throughput(run: Run, model: str, subject: str) -> Result:
    """Time decode steps at every batch size, and ours and vLLM's through their schedulers; first uses are not timed."""
    scale, checkpoint = run.scale, run.work / "checkpoints" / model
    if subject.startswith("torch"):
        return speed.torch_steps(checkpoint, scale, compiled=subject == "torch-compile")
    if subject == "vllm":
        return speed.vllm(checkpoint, scale)
    start = time.perf_counter()
    runner = opening.open_runner(_engine(run, model, subject.removeprefix("llmforge-")), scale)
    session = runner.session
    cache = session.allocate(max(scale.batches), scale.max_context)
    loaded = time.perf_counter() - start
    steps = {str(batch): speed.decode(session, cache, batch, scale.context, scale.tokens) for batch in scale.batches}
    notes = list(getattr(session, "notes", ()))
    del cache  # the engine has its own
    return {"load_s": loaded, "step_s": steps, "notes": notes, **speed.served(runner, scale)}


def profile(run: Run, model: str, precision: str) -> Result:
    """Say where the time of a served step goes: steps, sampling and copies, with ranges for a profiler."""
    from benchmarks.verify_gpu.ranges import Ranges
    from llmforge.runtime.sampling.sampler import TokenSampler

    ranges, rows = Ranges(), max(run.scale.batches)
    runner = opening.open_runner(_engine(run, model, precision), run.scale)
    device = runner.session.device
    parts = {
        "step": [(runner.session, "step")],
        "sampling": [(TokenSampler, "sample")],
        "copies": [(device, method) for method in ("read", "write", "copy")],
    }
    with ranges.watch(parts):
        start = time.perf_counter()
        found = speed.served(runner, dataclasses.replace(run.scale, batches=(rows,), prompts=run.scale.prompts[:1]))
        whole = time.perf_counter() - start
    return {"rows": rows, "whole_s": whole, "parts": ranges.table(), "nvtx": ranges.marked, **found}
