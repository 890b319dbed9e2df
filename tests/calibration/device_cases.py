"""Layers of calibration on a device: what crosses, what stays there, and that the results are the CPU's.

`test_device.py` runs these in a process of their own: torch learns of devices before its first gradient.
"""

from __future__ import annotations

import gc
import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from llmforge.base.errors import EnvironmentLacks
from llmforge.calibration import calibrate
from llmforge.calibration.carriers import Carriers
from llmforge.calibration.device import ExecutionDevice
from llmforge.calibration.skeleton import Skeleton
from llmforge.checkpoint import Checkpoint
from llmforge.checkpoint.text import TokenWindow
from llmforge.quantization.grid import Grid
from llmforge.quantization.grids import dequantize
from llmforge.quantization.methods.gptq import Gptq
from llmforge.quantization.statistics import (
    ChannelDemand,
    Demand,
    InputRangeDemand,
    KvRangeDemand,
    Smoothing,
    Statistics,
    WeightDemand,
)

from ..fakes.counted_device import counted
from ..models import zoo

DEVICE = Carriers("counted:0")
WEIGHTS = WeightDemand(Gptq(), Grid(4, 32, False))
DEMANDS = (WEIGHTS, KvRangeDemand(), ChannelDemand(), InputRangeDemand(Smoothing("int8", per_token=False, alpha=0.5)))
WINDOWS = [
    TokenWindow(f"d{i}", np.random.default_rng(i).integers(3, 259, length))
    for i, length in enumerate((48, 33, 48, 2, 40, 48, 20, 48, 31, 48))
]


@pytest.fixture(autouse=True)
def _same_products(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the CPU attend by torch and sum in fp32, as devices do, and take gradients in bf16, whatever it has."""
    monkeypatch.setattr("llmforge.calibration.layer.compiled_attention", nullcontext)
    monkeypatch.setattr("llmforge.calibration.sums._in_pairs", lambda: False)
    monkeypatch.setattr("llmforge.calibration.layer.has_bf16", lambda: True)


def require_near(one: Statistics, other: Statistics) -> None:
    """Hold weights and ranges against each other: the last bits of sums differ, which moves hardly a code."""
    assert one.linears.keys() == other.linears.keys()
    for name, matrix in one.linears.items():
        a, b = dequantize(matrix), dequantize(other.linears[name])
        assert np.mean(np.abs(a - b) > 1e-3 * np.abs(a).max()) < 0.002, name
    assert one.kv.keys() == other.kv.keys()
    for layer, of in one.kv.items():
        np.testing.assert_allclose(of.key, other.kv[layer].key, rtol=0.02, atol=1e-3)
        np.testing.assert_allclose(of.value, other.kv[layer].value, rtol=0.02, atol=1e-3)
    for name, seen in one.inputs.items():
        np.testing.assert_allclose(seen.peaks, other.inputs[name].peaks, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kind", [pytest.param("llama", marks=pytest.mark.thorough), "qwen3-moe"])
def test_a_device_makes_what_the_cpu_makes(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In fp32, gradients too: what is rounded to bf16 on the way makes last bits of sums into many other codes."""
    monkeypatch.setattr("llmforge.calibration.quantize.COARSE", 0)
    monkeypatch.setattr("llmforge.calibration.layer.narrowed", lambda _: nullcontext())
    monkeypatch.setattr("llmforge.quantization.rounding.products.has_bf16", lambda: False)
    zoo.write(kind, tmp_path / kind)
    checkpoint = Checkpoint.open(tmp_path / kind)
    with counted(), sdpa_kernel(SDPBackend.MATH):
        expected = calibrate(checkpoint, WINDOWS, DEMANDS)
        require_near(expected, calibrate(checkpoint, WINDOWS, DEMANDS, carriers=DEVICE))


LAYERS, HIDDEN, INNER, KV = 3, 64, 160, 32


@pytest.fixture
def dense(tmp_path: Path) -> Checkpoint:
    zoo.write("llama", tmp_path / "dense", hidden_size=HIDDEN, intermediate_size=INNER, num_hidden_layers=LAYERS)
    return Checkpoint.open(tmp_path / "dense")


@contextmanager
def without_collection() -> Iterator[None]:
    """Free what nobody refers to at once, and nothing else."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def test_weights_states_and_sums_cross_as_often_as_is_said_and_nothing_else(dense: Checkpoint) -> None:
    with counted() as traffic, without_collection():
        calibrate(dense, WINDOWS, [WEIGHTS], carriers=DEVICE)
        put, fetched = dict(traffic.put), dict(traffic.fetched)
    # Weights: forwards and backwards for gradients, once more to be quantized, and quantized; codes are chosen from
    # those that come back.
    linears = Counter({(HIDDEN, HIDDEN): 2, (KV, HIDDEN): 2, (INNER, HIDDEN): 2, (HIDDEN, INNER): 1})
    vocabulary = 264
    expected = Counter({shape: 4 * LAYERS * count for shape, count in linears.items()})
    expected[(HIDDEN,)] = 3 * LAYERS * 2 + 1  # norms, of layers and in front of the head
    expected[vocabulary, HIDDEN] = 1
    expected[(8,)] = 2  # frequencies of rotary tables, of the model with the head
    for window in WINDOWS:
        tokens = len(window.ids)
        # Hidden states: in front of the first layer for gradients, in front of each on the way back, in front of the
        # first layer to quantize; and the embedding that runs with the head.
        expected[1, tokens, HIDDEN] += LAYERS + 3
        expected[tokens, 1] += 1  # what labels are drawn by
        expected[(tokens,)] += 1  # ids
    for tokens in {len(window.ids) for window in WINDOWS}:
        expected[1, tokens, HIDDEN // 4] = 2  # rotary tables, which windows and layers share
        expected[1, tokens] = 1  # positions
    assert {shape: count for (_, shape), count in put.items()} == expected
    # Back come: weights; of each of the four groups H and C, of o_proj and down_proj R, each of the text and of the
    # share held out; moments of gradients; hidden states that are written to a file.
    groups = {"qkv": HIDDEN, "o": HIDDEN, "gate_up": HIDDEN, "down": INNER}
    back = Counter({shape: LAYERS * count for shape, count in linears.items()})
    for width in groups.values():
        back[width, width] += LAYERS * 2 * 2
    back[HIDDEN, HIDDEN] += LAYERS * 2
    back[HIDDEN, INNER] += LAYERS * 2
    for (rows, _), count in linears.items():
        back[rows, rows] += LAYERS * count
    back[HIDDEN, HIDDEN] += 2  # of embedding and head
    back[1, sum(len(window.ids) for window in WINDOWS), HIDDEN] = LAYERS
    ids = Counter((1, len(window.ids)) for window in WINDOWS)
    assert {shape: count for (_, shape), count in fetched.items()} == back + ids


@pytest.mark.parametrize(
    "demands", [pytest.param([WEIGHTS], marks=pytest.mark.thorough), DEMANDS], ids=["weights", "all"]
)
def test_memory_on_the_device_is_within_what_is_said_and_nothing_is_left(
    demands: Sequence[Demand], dense: Checkpoint
) -> None:
    lengths = [len(window.ids) for window in WINDOWS]
    said = Skeleton.build(dense).widths().resident_bytes(lengths, len(lengths))
    with counted() as traffic, without_collection():
        calibrate(dense, WINDOWS, demands, carriers=DEVICE)
        assert said / 4 < traffic.peak <= said
        assert traffic.resident == 0


def test_windows_that_do_not_fit_rest_on_the_host_and_make_the_same(
    dense: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    lengths = [len(window.ids) for window in WINDOWS]
    widths = Skeleton.build(dense).widths()
    free = int(widths.resident_bytes(lengths, 3) / 0.9) + 1
    assert widths.windows_within(free, lengths) == 3
    with counted() as traffic, without_collection():
        whole = calibrate(dense, WINDOWS, [WEIGHTS, KvRangeDemand()], carriers=DEVICE)
        unlimited = traffic.peak
        traffic.clear()
        monkeypatch.setattr(ExecutionDevice, "_free_bytes", lambda self: free)
        some = calibrate(dense, WINDOWS, [WEIGHTS, KvRangeDemand()], carriers=DEVICE)
        assert traffic.peak < min(unlimited, 0.9 * free)
    for name, matrix in whole.linears.items():
        assert np.array_equal(matrix.codes, some.linears[name].codes)
    monkeypatch.setattr(ExecutionDevice, "_free_bytes", lambda self: 1000)
    with counted(), pytest.raises(EnvironmentLacks, match="one window"):
        calibrate(dense, WINDOWS, [WEIGHTS], carriers=DEVICE)


def test_the_next_layer_is_read_while_one_is_worked_on(dense: Checkpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    read = [threading.Event() for _ in range(LAYERS)]
    own = Skeleton._read

    def noted(self: Skeleton, index: int) -> torch.nn.Module:
        module = own(self, index)
        read[index].set()
        return module

    monkeypatch.setattr(Skeleton, "_read", noted)
    with counted():
        skeleton = Skeleton.build(dense, ExecutionDevice.of(DEVICE.device))
        layers = skeleton.stream(range(LAYERS), skeleton.enter([window.ids for window in WINDOWS])[0])
        next(layers)
        assert read[1].wait(10)
        assert not read[2].is_set()
        assert [layer.name for layer in layers] == ["model.layers.1", "model.layers.2"]


def test_results_of_devices_are_kept_apart() -> None:
    with counted():
        assert ExecutionDevice.of("counted:0").identity == "counted"
