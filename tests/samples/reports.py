"""A fixed report for tests of what reads reports; its figures are made up and of plausible size."""

from __future__ import annotations

import math

from llmforge.gates.decision import judge, overall
from llmforge.gates.records import (
    BuildRecord,
    CalibrationRecord,
    CheckpointRecord,
    EngineFile,
    EngineRecord,
    PassRecord,
    Report,
    ReusedRecord,
    StageRecord,
    TargetRecord,
    VerificationRecord,
    WeightGroup,
)
from llmforge.measure.machine import Machine
from llmforge.metrics import catalog
from llmforge.metrics.intervals import Estimate
from llmforge.metrics.latency import Bandwidth, Footprint, Latency, LatencyPoint, Spread, Timing
from llmforge.metrics.metric import Measured, Sizes
from llmforge.metrics.quality import DocumentSums, GreedyAnswer, Quality, Sample, Segment
from llmforge.recipe import GateSpec
from llmforge.rewrite.pass_base import Numerics, Rewritten, Skipped


def spread(p50: float) -> Spread:
    def estimate(factor: float, **bounds: float | None) -> Estimate:
        return Estimate(value=p50 * factor, samples=20, of="repetitions", **{"low": None, "high": None, **bounds})

    return Spread(p50=estimate(1, low=p50 * 0.98, high=p50 * 1.03), p95=estimate(1.18), p99=estimate(1.31))


def timing(ttft_ms: float, tpot_ms: float) -> Timing:
    return Timing(
        ttft_ms=spread(ttft_ms),
        tpot_ms=spread(tpot_ms),
        itl_ms=spread(tpot_ms * 1.02),
        e2e_ms=spread(ttft_ms + 63 * tpot_ms),
        tokens_per_second=1e3 / tpot_ms,
        generations_ms=((ttft_ms, tpot_ms), (ttft_ms, tpot_ms)),
    )


def speedup(value: float) -> Estimate:
    return Estimate(value=value, low=value * 0.96, high=value * 1.05, samples=20, of="repetitions")


def rate(value: float) -> Estimate:
    return Estimate(value=value, low=value * 0.97, high=value * 1.02, samples=20, of="repetitions")


QUALITY = Quality(
    context=512,
    documents=56,
    windows=153,
    tokens=65_893,
    seed=0,
    baseline_perplexity=45.118,
    perplexity=45.604,
    perplexity_ratio=Estimate(value=1.01077, low=1.0089, high=1.0126, samples=56),
    kld_mean=Estimate(value=0.02104, low=0.01998, high=0.02215, samples=56),
    kld_median=Estimate(value=0.0114, low=0.0109, high=0.0118, samples=56),
    kld_p90=Estimate(value=0.0498, low=0.0471, high=0.0523, samples=56),
    kld_p95=Estimate(value=0.0713, low=0.0688, high=0.0741, samples=56),
    kld_p99=Estimate(value=0.1187, low=0.1125, high=0.1274, samples=56),
    kld_p999=Estimate(value=0.412, low=0.371, high=math.inf, samples=56),
    kld_max=1.872,
    kld_histogram=(0, 0, 0, 0, 2, 3, 9, 21, 48, 112, 260, 571, 1204, 2240, 3930, 6120,
                   8377, 9966, 10873, 9541, 6503, 3671, 1544, 623, 201, 58, 14, 2, 0, 0, 0, 0, 0, 0, 0, 0),
    top1_agreement=Estimate(value=0.8993, low=0.8961, high=0.9024, samples=56),
    top5_agreement=Estimate(value=0.9312, low=0.9288, high=0.9335, samples=56),
    delta_p_mean=Estimate(value=-0.00021, low=-0.0005, high=0.0001, samples=56),
    delta_p_rms=0.0312,
    kld_by_position=tuple(
        Segment(first=first, last=last, tokens=tokens,
                figure=Estimate(value=kld, low=low, high=high, samples=samples))
        for first, last, tokens, kld, low, high, samples in (
            (1, 15, 2295, 0.0188, 0.0171, 0.0204, 56), (16, 23, 1224, 0.0193, 0.0177, 0.0212, 56),
            (24, 31, 1224, 0.0199, 0.0182, 0.0218, 56), (384, 511, 19_000, 0.0257, None, None, 5),
        )
    ),
    kld_decode=Estimate(value=0.0218, low=0.0201, high=0.0236, samples=12),
    kld_decode_prefill=Estimate(value=0.0209, low=0.0193, high=0.0224, samples=12),
    kld_decode_added=Estimate(value=0.0009, low=0.0006, high=0.0012, samples=12),
    delta_p_p01=Estimate(value=-0.0871, low=-0.0915, high=-0.0832, samples=56),
    delta_p_p05=Estimate(value=-0.0402, low=-0.0425, high=-0.0381, samples=56),
    delta_p_median=Estimate(value=-0.00001, low=-0.00002, high=0.0, samples=56),
    delta_p_p95=Estimate(value=0.0388, low=0.0361, high=0.0411, samples=56),
    delta_p_p99=Estimate(value=0.0855, low=0.0812, high=0.0907, samples=56),
    greedy_same_128=Estimate(value=0.5, low=0.2109, high=0.7891, samples=12, of="answers"),
    greedy_first_difference=Estimate(value=104, low=31, high=128, samples=12, of="answers"),
    greedy_same_32=Estimate(value=0.75, low=0.4281, high=0.9451, samples=12, of="answers"),
    samples=(
        Sample(document="guide-0", prompt="A gate passes if", shared=" the whole interval ",
               baseline="lies within its limit.", artifact="is inside of it."),
        Sample(document="guide-1", prompt="Every", shared=" build is the same.", baseline="", artifact=""),
    ),
    answers=(
        GreedyAnswer(document="guide-0", prompt_tokens=32, tokens=128, first_difference=4),
        GreedyAnswer(document="guide-1", prompt_tokens=32, tokens=90, first_difference=None),
    ),
    per_document=(
        DocumentSums(document="guide-0", tokens=40_000, baseline_nll=152_000.5, nll=152_400.25, kld=840.5,
                     same_top=36_000, shared_top=37_250.5, delta_p=-8.5, delta_p_squared=38.5),
        DocumentSums(document="guide-1", tokens=25_893, baseline_nll=99_000.25, nll=99_300.5, kld=545.875,
                     same_top=23_258, shared_top=24_110.25, delta_p=-5.25, delta_p_squared=25.625),
    ),
)  # fmt: skip

LATENCY = Latency(
    repetitions=20,
    output_tokens=64,
    threads=2,
    seed=0,
    artifact="onnxruntime 1.31.1, CPU, threads: 2",
    baseline="transformers 5.23.0, torch 2.13.0, fp32 arithmetic on the stored weights, attention sdpa, threads: 2",
    artifact_load_ms=41.5,
    baseline_load_ms=212.0,
    footprint=Footprint(artifact_bytes=3_812_345, weight_bytes_per_token=3_790_112, kv_bytes_per_token=1_632),
    bandwidth=Bandwidth(
        threads=2,
        dram_bytes_per_second=30.5e9,
        working_set_bytes=3_894_560,
        working_set_bytes_per_second=82.4e9,
    ),
    points=(
        LatencyPoint(prompt_tokens=32, artifact=timing(2.31, 0.482), baseline=timing(9.8, 5.71),
              ttft_speedup=speedup(4.24), tpot_speedup=speedup(11.8), output_tokens_per_second=rate(1960),
              bytes_read_per_token=3_894_560, bandwidth_utilization=0.098),
        LatencyPoint(prompt_tokens=512, artifact=timing(31.7, 0.611), baseline=timing(58.2, 6.02),
              ttft_speedup=speedup(1.84), tpot_speedup=speedup(9.85), output_tokens_per_second=rate(913),
              bytes_read_per_token=4_677_920, bandwidth_utilization=0.0929),
    ),
)  # fmt: skip


def checked(numerics: Numerics, difference: float, kld: float | None = None, budget: float | None = None):
    return VerificationRecord(
        numerics=numerics,
        largest_difference=difference,
        allowed=None if numerics is Numerics.LOSSY else 0.0 if numerics is Numerics.EXACT else 1e-4,
        kld_mean=kld,
        budget=budget,
        probes=("prefill", "decode", "ragged"),
        seconds=1.5,
    )


PASSES = (
    PassRecord(
        name="fuse-norms",
        options={},
        numerics=Numerics.ROUNDING,
        rewritten=tuple(
            Rewritten(f"node_add_{layer}", "residual Add and RMSNormalization became SkipSimplifiedLayerNormalization")
            for layer in range(3)
        ),
        skipped=(Skipped("node_norm_0", "its input is no residual Add but the embedding"),),
        nodes_before=172,
        nodes_after=166,
        weight_bytes_before=27_287_552,
        weight_bytes_after=27_287_552,
        seconds=0.81,
        verification=checked(Numerics.ROUNDING, 3.8e-6, 1.2e-11),
    ),
    PassRecord(
        name="pack-qkv",
        options={},
        numerics=Numerics.EXACT,
        rewritten=(Rewritten("node_q_0", "3 MatMul on one input became one [256, 512]"),),
        skipped=(),
        nodes_before=166,
        nodes_after=154,
        weight_bytes_before=27_287_552,
        weight_bytes_after=27_287_552,
        seconds=0.66,
        verification=checked(Numerics.EXACT, 0.0, 0.0),
    ),
    PassRecord(
        name="quantize-weights",
        options={"bits": 4, "block_size": 32, "method": "gptq", "budget": {"kld_mean": 0.03}},
        numerics=Numerics.LOSSY,
        rewritten=(
            Rewritten("model.layers.0.mlp.down_proj.weight", "4 bit, blocks of 32, gptq"),
            Rewritten("model.embed_tokens.weight", "8 bit, blocks of 32, rtn; shared with the head"),
        ),
        skipped=(),
        nodes_before=154,
        nodes_after=154,
        weight_bytes_before=27_287_552,
        weight_bytes_after=5_013_504,
        seconds=9.2,
        verification=checked(Numerics.LOSSY, 2.41, 0.0174, 0.03),
    ),
    PassRecord(
        name="quantize-kv-cache",
        options={"bits": 8, "budget": {"kld_mean": 0.002}},
        numerics=Numerics.LOSSY,
        rewritten=(Rewritten("gqa_0", "K and V int8, a scale a channel"),),
        skipped=(),
        nodes_before=154,
        nodes_after=154,
        weight_bytes_before=5_013_504,
        weight_bytes_after=5_025_792,
        seconds=0.4,
        verification=checked(Numerics.LOSSY, 0.21, 0.0004, 0.002),
    ),
)

ENGINE = EngineRecord(
    backend="onnxruntime",
    files=(EngineFile(name="model.onnx", size_bytes=61_330), EngineFile(name="model.onnx.data", size_bytes=5_025_792)),
    weights=(
        WeightGroup(name="model.layers.*.mlp.down_proj.weight", dtype="uint8", tensors=6, size_bytes=2_949_120),
        WeightGroup(name="model.embed_tokens.weight", dtype="uint8", tensors=1, size_bytes=2_064_384),
    ),
    session={"threads": 2, "optimize": True, "entries": {"session.intra_op.allow_spinning": "1"}},
)

CHECKPOINT = CheckpointRecord(
    name="docs-llama-7m",
    digest="5b" * 32,
    architecture="LlamaForCausalLM",
    dtypes=("bf16",),
    parameters=6_819_072,
    size_bytes=13_638_144,
)

GATES = {
    "perplexity_ratio": GateSpec(max=1.02),
    "kld_mean": GateSpec(max=0.022),
    "tpot_p50_ms": GateSpec(max=0.5),
    "size_bytes": GateSpec(max=6e6),
}


MEASURED = Measured(QUALITY, LATENCY, Sizes(ENGINE.size_bytes, CHECKPOINT.size_bytes, CHECKPOINT.parameters))


def make(**changes: object) -> Report:
    """Make the fixed report, with fields replaced."""
    gates = judge(GATES, catalog.estimates(MEASURED))
    assert math.isclose(sum(QUALITY.kld_histogram), QUALITY.tokens, rel_tol=0.1)
    fields = {
        "name": "docs-llama-int4",
        "content": "3f9a1c0b7d2e" + "0" * 52,
        "created": "2026-11-21T10:42:00+00:00",
        "verdict": overall(gates),
        "gates": gates,
        "quality": QUALITY,
        "quality_baseline": LATENCY.baseline,
        "latency": LATENCY,
        "checkpoint": CHECKPOINT,
        "target": TargetRecord(name="cpu-avx512-vnni", title="x86-64 CPU with AVX-512 VNNI", kind="cpu"),
        "engine": ENGINE,
        "passes": PASSES,
        "calibration": CalibrationRecord(
            data="calibration.jsonl", digest="c1" * 32, documents=64, samples=64, tokens=32_768
        ),
        "notes": ("The embedding stays at 8 bits: GatherBlockQuantized shares it with the head.",),
        "build": BuildRecord(
            seconds=74.2,
            cpu_seconds=131.0,
            peak_rss_bytes=1_310_000_000,
            stages=tuple(
                StageRecord(title=title, seconds=seconds, peak_rss_bytes=peak)
                for title, seconds, peak in (
                    ("Trace", 9.1, 820_000_000),
                    ("Calibrate", 31.0, 1_310_000_000),
                    ("Engine", 0.4, None),
                    ("Quality", 33.7, 990_000_000),
                )
            ),
            reused=ReusedRecord(stages=("trace", "trace-proof"), layers=(0, 1, 2, 5)),
        ),
        "machine": Machine(
            cpu="Example CPU 9000",
            cores=2,
            usable_cpus=2,
            isa=("avx2", "fma", "avx512f", "avx512_vnni"),
            memory_bytes=16 * 2**30,
            os="Linux 6.1 x86_64",
            python="3.11.9",
        ),
        "versions": {"llmforge": "0.1.0", "onnxruntime": "1.31.1", "torch": "2.13.0"},
        "recipe": {"schema": 1, "name": "docs-llama-int4", "gates": {"kld_mean": {"max": 0.022}}},
    }
    return Report(**{**fields, **changes})  # type: ignore[arg-type]
