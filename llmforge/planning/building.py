"""What a build will take: CPU time, memory and disk, from coefficients measured on this project's own builds.

One core of an AMD EPYC (Zen 4), nothing validated. int4 in blocks of 128, rounded to nearest: the shape of Qwen3-0.6B
in bf16 (596 M parameters, 1.19 GB) took 41 s, of them 13.3 for codes and the proof of the budget, 4.3 for writing the
engine, 2.0 for hashing the checkpoint. Calibrated on 2048 tokens, four of its layers (63 M parameters) took 69 s; 13 of
them are what their products with so many tokens take at 20 Gflop/s, which grows with the text. TensorRT: eight layers
of 320 MB in all, two profiles, 14 to 17 s. Validation (quality, latency, its baseline) is not in it: it depends on the
text, and loads engine and checkpoint besides.
"""

from __future__ import annotations

from dataclasses import dataclass

from llmforge.backends import BACKENDS, BackendName
from llmforge.planning.scheme import BITS, DtypeScheme
from llmforge.planning.shape import Shape

START_S = 5.0  # importing torch and transformers
TRACE_S = 7.5  # of any depth: layers that repeat are copied
VERIFY_S = 6.3  # the trace against transformers, and passes that change no weight
HASH_S_PER_GB = 1.7  # of checkpoint
QUANTIZE_S_PER_B = 22.0  # of 10**9 parameters: codes, and the proof of the budget
CALIBRATE_S_PER_B = 900.0  # of 10**9 parameters, whose codes calibration text decides
CALIBRATE_S_PER_B_TOKEN = 0.1  # … and for each token of the text
WRITE_S_PER_B = 7.2  # of 10**9 parameters
PLAN_S_PER_GB = 48.0  # of TensorRT's weights: 15.5 s for 0.32 GB
START_BYTES = 550_000_000  # resident after the trace
HELD_LAYERS = 2  # with which the trace is verified, in fp32, with the tables
PLANS_DISK = 2  # TensorRT keeps the ONNX with its weights beside the plan


@dataclass(frozen=True)
class BuildCost:
    """A prediction, good for the order of magnitude."""

    cpu_s: float
    memory_bytes: int
    disk_bytes: int  # besides the checkpoint
    checkpoint_bytes: int
    of: str  # what the coefficients were measured on


def calibration_s(shape: Shape, tokens: int) -> float:
    """Predict the CPU time in which so many tokens choose codes for all weights."""
    return shape.parameters / 1e9 * (CALIBRATE_S_PER_B + CALIBRATE_S_PER_B_TOKEN * tokens)


def predict(shape: Shape, scheme: DtypeScheme, backend: BackendName, *, calibration_tokens: int = 0) -> BuildCost:
    """Predict a build of `shape` to `scheme`; `calibration_tokens` are those that choose codes, 0: none do."""
    billions = shape.parameters / 1e9
    checkpoint = shape.parameters * BITS[shape.dtype] // 8
    weights = scheme.weight_bytes(shape)
    quantized = BITS[scheme.weights] < 16
    seconds = START_S + TRACE_S + VERIFY_S + checkpoint / 1e9 * HASH_S_PER_GB + billions * WRITE_S_PER_B
    if quantized:
        seconds += billions * QUANTIZE_S_PER_B
        if calibration_tokens:
            seconds += calibration_s(shape, calibration_tokens)
    compiled = BACKENDS[backend].compiled
    if compiled:
        seconds += weights / 1e9 * PLAN_S_PER_GB
    widest = max(layer.parameters for _, layer in shape.layers)
    held = 4 * (shape.embedding + shape.head + HELD_LAYERS * widest)
    memory = START_BYTES + held + (weights if compiled else 0)
    return BuildCost(
        cpu_s=seconds,
        memory_bytes=memory,
        disk_bytes=weights * (PLANS_DISK if compiled else 1),
        checkpoint_bytes=checkpoint,
        of="one core of an AMD EPYC (Zen 4), with up to 0.6 billion parameters",
    )
