"""Calibration of the sample checkpoint on the GPU, held against the same on the CPU."""

from __future__ import annotations

import time
from typing import Any

import numpy as np

from benchmarks.verify_gpu.scale import Scale
from llmforge.base.errors import VerificationError

TOKENS, LENGTH = 4096, 256
# Sums in another order, and of fp32 where the CPU's are of bf16, choose some other codes: what they lose is the same.
MOST_MORE = 0.1  # of the KLD that codes chosen on the CPU lose


def calibration(scale: Scale) -> dict[str, Any]:
    """Choose codes of 4 bits twice, and compare them, the KLD of both, and the memory with what is said of it.

    Raises:
        EnvironmentLacks: torch has no GPU.
        VerificationError: codes chosen on the device lose more, or more memory was taken.
    """
    import torch

    from benchmarks.verify_gpu import subjects
    from llmforge.calibration import calibrate, mixed
    from llmforge.calibration.carriers import Carriers
    from llmforge.calibration.device import ExecutionDevice
    from llmforge.calibration.skeleton import Skeleton
    from llmforge.checkpoint import Checkpoint
    from llmforge.checkpoint.text import TokenWindow
    from llmforge.quantization.grid import Grid
    from llmforge.quantization.methods.gptq import Gptq
    from llmforge.quantization.statistics import KvRangeDemand, WeightDemand

    device = ExecutionDevice.of("cpu" if scale.dry else "cuda:0")
    checkpoint = Checkpoint.open(subjects.SAMPLE)
    random, count = np.random.default_rng(0), 2 * TOKENS // LENGTH
    vocabulary = checkpoint.config.get_text_config().vocab_size
    windows = [TokenWindow(f"{i}", random.integers(3, vocabulary, LENGTH)) for i in range(count)]
    seen, held = windows[: count // 2], windows[count // 2 :]
    demands = [WeightDemand(Gptq(), Grid(4, 32, False)), KvRangeDemand()]
    skeleton, found, seconds = Skeleton.build(checkpoint), {}, {}
    for name, carriers in (("cpu", Carriers()), ("device", device.carriers)):
        start = time.perf_counter()
        found[name] = calibrate(checkpoint, seen, demands, carriers=carriers).linears
        seconds[name] = time.perf_counter() - start
    with torch.no_grad():
        kld = {name: mixed.divergence(skeleton, held, matrices) for name, matrices in found.items()}
    equal = [np.mean(matrix.codes == found["device"][name].codes) for name, matrix in found["cpu"].items()]
    result = {
        "codes_equal": float(np.mean(equal)),
        "kld_mean": kld,
        "seconds": seconds,
        "said_bytes": skeleton.widths().resident_bytes([LENGTH] * len(seen), len(seen))
        + device.thread_bytes * (len(seen) + 1),
        "taken_bytes": 0 if device.is_host else torch.cuda.max_memory_allocated(device.device),
    }
    if not kld["device"] <= (1 + MOST_MORE) * kld["cpu"]:  # also where it is NaN
        raise VerificationError(f"codes chosen on the device lose more than those of the CPU: {result}")
    if result["taken_bytes"] > result["said_bytes"]:
        raise VerificationError(f"calibration took more memory of the device than is said: {result}")
    return result
