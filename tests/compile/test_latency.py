"""What a build's latency is measured with: the device's own ceilings, its data sheet and price, loads and workloads."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from llmforge import targets
from llmforge.backends.pending import Pending
from llmforge.base.errors import EnvironmentLacks
from llmforge.base.progress import Silent
from llmforge.compile import evidence, finishing
from llmforge.measure import energy, gpus
from llmforge.measure import latency as measuring
from llmforge.measure.gpus import Gpu
from llmforge.measure.latency import TimedLoad
from llmforge.measure.recipe_latency import RecipeLatency, facts, loads
from llmforge.metrics.latency import Latency
from llmforge.recipe import EngineSpec, LatencySpec, Recipe
from llmforge.serving import StepOutput

RECIPE = """
schema: 1
name: sample
checkpoint: {checkpoint}
target: h200
engine: {{backend: tensorrt, max_context: 96, max_batch: 4, deferred: true}}
passes: []
validation:
  latency:
    prompt_tokens: [8, 16]
    output_tokens: 5
    repetitions: 8
    surface: {{batches: [4], prompt_tokens: [16], output_tokens: [9], repetitions: 8}}
"""
COPY, FP16 = 4.3e12, 788e12  # what the device is made to reach: bytes and operations a second
WEIGHTS, KV, MULTIPLY_ADDS, HEAD = 40_000_000, 6_000, 70_000_000, 20_000_000
TTFT_S, TPOT_S = 0.004, 0.002


@pytest.fixture
def export_format(tmp_path: Path, tiny_checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> Latency:
    """Finish a pending engine on a machine with a GPU that is made up, whose clock only the engine moves."""
    clock = [0.0]

    def generate_batch(prompts: list[list[int]], samplings: list[Any]) -> Iterator[StepOutput]:
        for step in range(samplings[0].max_tokens):
            clock[0] += TPOT_S if step else TTFT_S
            yield StepOutput((1,) * len(prompts), (None,) * len(prompts))

    def baseline(ids: NDArray[np.int64], tokens: int) -> Iterator[list[int]]:
        for _ in range(tokens):
            clock[0] += 0.01
            yield [1] * len(ids)

    runner = SimpleNamespace(
        generate_batch=generate_batch,
        config=SimpleNamespace(vocabulary=64, plan=SimpleNamespace(module="tensorrt", version="11")),
    )
    slow = SimpleNamespace(generate=baseline, description="slow", load_seconds=1.0)
    monkeypatch.setattr(measuring, "time", SimpleNamespace(perf_counter=lambda: clock[0]))
    monkeypatch.setattr(evidence, "load_runner", lambda artifact, threads: runner)
    monkeypatch.setattr(evidence, "Baseline", lambda checkpoint, threads: slow)
    monkeypatch.setattr(evidence.engines, "why_not_run", lambda target: None)
    monkeypatch.setattr(gpus, "find", lambda: [Gpu(0, "NVIDIA H200", "90", 141 << 30)])
    monkeypatch.setattr(gpus, "copy_bandwidth", lambda gpu: COPY)
    monkeypatch.setattr(gpus, "matrix_rates", lambda gpu, product: {"fp16": FP16})
    joules = iter(range(0, 10_000, 3))  # it is read before and after each generation
    monkeypatch.setattr(energy, "counter", lambda index: lambda: float(next(joules)))
    spec = EngineSpec(backend="tensorrt", max_context=96, max_batch=4, deferred=True)
    counted = WEIGHTS, KV, MULTIPLY_ADDS, HEAD
    waiting = Pending(3, "tensorrt", "h200", "90", spec.model_dump_json(), (1,), None, *counted)
    file = tmp_path / "recipe.yaml"
    file.write_text(RECIPE.format(checkpoint=tiny_checkpoint))
    engine = SimpleNamespace(size_bytes=50_000_000)
    target = targets.load("h200")
    found = finishing.measure(waiting, tmp_path, engine, target, Recipe.load(file), Silent())  # type: ignore[arg-type]
    assert found.notes == ()
    assert found.latency is not None
    return found.latency


def test_mbu_of_an_engine_that_is_finished_elsewhere_equals_the_figure_by_hand(export_format: Latency) -> None:
    """(weights + KV touched) / TPOT / bandwidth, of the device that it runs on and not of its host's memory."""
    by_hand = {
        (1, 8, 5): WEIGHTS + KV * (8 + 2),
        (1, 16, 5): WEIGHTS + KV * (16 + 2),
        (4, 16, 9): WEIGHTS + 4 * KV * (16 + 4),
    }
    points = {(point.batch, point.prompt_tokens, point.output_tokens): point for point in export_format.points}
    assert points.keys() == by_hand.keys()
    sheet = targets.load("h200").require_gpu().bandwidth_gbs.value * 1e9
    for at, size in by_hand.items():
        figures = points[at].figures
        assert figures["bytes_read_per_token"] == size
        assert figures["bandwidth_utilization"] == pytest.approx(size / TPOT_S / COPY)
        assert figures["data_sheet_bandwidth_utilization"] == pytest.approx(size / TPOT_S / sheet)
    assert export_format.bandwidth is not None
    assert export_format.bandwidth.probe == "a copy on the device, bytes read and written"


def test_mfu_cost_and_energy_follow_from_what_was_timed(export_format: Latency) -> None:
    point = next(point for point in export_format.points if point.batch == 4)
    target = targets.load("h200")
    operations = 2 * 4 * (16 * (MULTIPLY_ADDS - HEAD) + HEAD)
    assert point.figures["compute_utilization"] == pytest.approx(operations / TTFT_S / FP16)
    sheet = target.rates["fp16"].value * 1e12
    assert point.figures["data_sheet_compute_utilization"] == pytest.approx(operations / TTFT_S / sheet)
    rate = 4 * 9 / (TTFT_S + 8 * TPOT_S)
    assert point.figures["output_tokens_per_second"].value == pytest.approx(rate)
    assert target.usd_per_hour is not None
    price = target.usd_per_hour.value / 3600 / rate * 1e6
    assert point.figures["usd_per_million"].value == pytest.approx(price)
    assert point.artifact.figures["joules_per_token"].value == pytest.approx(3 / (4 * 9))


def test_ceilings_that_a_device_does_not_give_are_noted(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def none(*_: object) -> float:
        raise EnvironmentLacks("CUDA call cudaMalloc failed")

    monkeypatch.setattr(gpus, "find", lambda: [Gpu(0, "NVIDIA H200", "90", 141 << 30)])
    monkeypatch.setattr(gpus, "copy_bandwidth", none)
    monkeypatch.setattr(energy, "counter", none)
    spec = LatencySpec(prompt_tokens=(8,), output_tokens=4)
    made = RecipeLatency(tmp_path, None, spec, targets.load("h200"), None, 1)  # type: ignore[arg-type]
    instruments = made._instruments()
    assert instruments.energy_j is None
    assert instruments.bandwidth is not None
    assert instruments.bandwidth(None, 1, 1) is None  # type: ignore[arg-type]
    assert made.notes == [
        "not measured: CUDA call cudaMalloc failed",
        "MBU against this device: not measured: CUDA call cudaMalloc failed",
    ]


def test_devices_that_share_an_engine_add_up() -> None:
    one, four = (facts(targets.load("h200"), ranks, None) for ranks in (1, 4))
    assert one.data_sheet is not None
    assert four.data_sheet is not None
    assert one.price is not None
    assert four.price is not None
    assert one.data_sheet.bytes_per_second is not None
    assert four.data_sheet.bytes_per_second == 4 * one.data_sheet.bytes_per_second
    assert four.data_sheet.operations_per_second["fp16"] == 4 * one.data_sheet.operations_per_second["fp16"]
    assert four.price.usd_per_hour == 4 * one.price.usd_per_hour


def test_a_processor_has_no_price_and_no_data_sheet() -> None:
    assert facts(targets.load("cpu-avx2"), 1, None) == measuring.Facts()


def test_today_s_loads_are_the_default_and_a_surface_adds_what_is_not_there() -> None:
    plain = LatencySpec(prompt_tokens=(512, 32), output_tokens=64)
    assert loads(plain) == [TimedLoad(1, 512, 64, 10), TimedLoad(1, 32, 64, 10)]
    surface = {"batches": (1, 2), "prompt_tokens": (32, 64), "output_tokens": (64,), "repetitions": 6}
    wide = LatencySpec(prompt_tokens=(32,), output_tokens=64, surface=surface)  # type: ignore[arg-type]
    assert loads(wide) == [
        TimedLoad(1, 32, 64, 10),
        TimedLoad(1, 64, 64, 6, 1),
        TimedLoad(2, 32, 64, 6, 1),
        TimedLoad(2, 64, 64, 6, 1),
    ]
