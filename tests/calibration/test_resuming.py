"""Layers go on where they stopped, and make what they would have made."""

from __future__ import annotations

from collections import Counter
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from llmforge.base.errors import UnsupportedError
from llmforge.calibration import driver
from llmforge.calibration.device import ExecutionDevice
from llmforge.calibration.layer import Arguments, DecoderLayer, LayerCall
from llmforge.calibration.quantize import WeightQuantization
from llmforge.calibration.resuming import Runs
from llmforge.calibration.skeleton import Skeleton
from llmforge.calibration.threads import IN_ORDER, over_windows
from llmforge.calibration.windows import WindowsHere
from llmforge.checkpoint import Checkpoint
from llmforge.checkpoint.text import TokenWindow
from llmforge.quantization.grid import Grid
from llmforge.quantization.methods.gptq import Gptq
from llmforge.quantization.statistics import KvRangeDemand, Statistics, WeightDemand

from ..models import zoo

DEMANDS = (WeightDemand(Gptq(), Grid(4, 32, False)), KvRangeDemand())


@pytest.fixture
def windows() -> list[TokenWindow]:
    random = np.random.default_rng(0)
    return [TokenWindow(f"d{i}", random.integers(3, 259, length)) for i, length in enumerate((48, 33, 48))]


def counted(monkeypatch: pytest.MonkeyPatch) -> Counter[int]:
    """Count the products of each linear, by its id, from now on."""
    calls = Counter[int]()
    plain = torch.nn.Linear.forward

    def forward(self: torch.nn.Linear, x: torch.Tensor) -> torch.Tensor:
        calls[id(self)] += 1
        return plain(self, x)

    monkeypatch.setattr(torch.nn.Linear, "forward", forward)
    return calls


def same(one: Statistics, other: Statistics) -> bool:
    return all(
        np.array_equal(one.linears[name].codes, other.linears[name].codes)
        and np.array_equal(one.linears[name].scales, other.linears[name].scales)
        for name in one.linears
    ) and all(
        np.array_equal(one.kv[layer].key, other.kv[layer].key)
        and np.array_equal(one.kv[layer].value, other.kv[layer].value)
        for layer in one.kv
    )


def begun_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let every run begin at the beginning."""

    def arguments(self: Runs, name: str, window: int) -> Arguments:
        return self.layer.arguments_of(name, window, self.states[window])

    def without(self: Runs, name: str, window: int) -> tuple[torch.Tensor, torch.Tensor]:
        with self.layer.observed([name], [name]) as observe:
            seen = observe(window, self.states[window])
        return seen.inputs[name], seen.after - seen.outputs[name]

    monkeypatch.setattr(Runs, "arguments", arguments)
    monkeypatch.setattr(Runs, "without", without)
    monkeypatch.setattr(Runs, "end", lambda self: self.layer.advance(self.states))


def test_results_are_those_of_runs_from_the_beginning(
    tiny_checkpoint: Path, windows: list[TokenWindow], monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint = Checkpoint.open(tiny_checkpoint)
    found = driver.calibrate(checkpoint, windows, DEMANDS)
    begun_anew(monkeypatch)
    assert same(found, driver.calibrate(checkpoint, windows, DEMANDS))


def test_results_are_the_same_where_a_device_has_no_room_for_runs_that_wait(
    tiny_checkpoint: Path, windows: list[TokenWindow], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("llmforge.calibration.quantize.COARSE", 0)  # products in bf16 are not counted
    checkpoint = Checkpoint.open(tiny_checkpoint)
    found = driver.calibrate(checkpoint, windows, DEMANDS)
    monkeypatch.setattr(ExecutionDevice, "fitting", lambda device, *_: replace(device, windows=1))
    counts = counted(monkeypatch)
    assert same(found, driver.calibrate(checkpoint, windows, DEMANDS))
    assert max(counts.values()) > 2 * len(windows) + 8  # they began anew


def test_every_linear_multiplies_a_window_once_as_it_was_and_once_as_it_is(
    tiny_checkpoint: Path, windows: list[TokenWindow], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("llmforge.calibration.quantize.COARSE", 0)  # products in bf16 are not counted
    skeleton = Skeleton.build(Checkpoint.open(tiny_checkpoint))
    with torch.no_grad():
        calls, states = skeleton.enter([window.ids for window in windows])
        layer = skeleton.load(0, calls[0])
        looked = 1 + 1 + 6  # what reads what; what is added to what: once plainly, and with each that fits shifted
        counts = counted(monkeypatch)
        driver.quantize_layer(layer, WindowsHere.all(layer, list(states), list(states)), WeightQuantization(DEMANDS[0]))
    products = [counts[id(linear)] for linear in layer.linears().values()]
    assert max(products) <= 2 * len(windows) + looked
    assert min(products) >= 2 * len(windows)


def test_attention_runs_once_as_it_was_and_once_as_it_is(
    tiny_checkpoint: Path, windows: list[TokenWindow], monkeypatch: pytest.MonkeyPatch
) -> None:
    skeleton = Skeleton.build(Checkpoint.open(tiny_checkpoint))
    functional, counts = torch.nn.functional, Counter[str]()
    attention = functional.scaled_dot_product_attention

    def counted_attention(*args: torch.Tensor, **options: object) -> torch.Tensor:
        counts["attention"] += 1
        return attention(*args, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(functional, "scaled_dot_product_attention", counted_attention)
    with torch.no_grad():
        calls, states = skeleton.enter([window.ids for window in windows])
        layer = skeleton.load(0, calls[0])
        looked = 1 + 1 + 6  # see above
        driver.quantize_layer(layer, WindowsHere.all(layer, list(states), list(states)), WeightQuantization(DEMANDS[0]))
    assert counts["attention"] <= 2 * len(windows) + looked


@pytest.mark.parametrize("name", ["mixtral", "qwen3-moe"])
def test_experts_go_on_too(
    name: str, windows: list[TokenWindow], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    zoo.write(name, tmp_path)
    checkpoint = Checkpoint.open(tmp_path)
    demands = (WeightDemand(Gptq(), Grid(4, 32, False)),)
    found = driver.calibrate(checkpoint, windows, demands)
    begun_anew(monkeypatch)
    assert same(found, driver.calibrate(checkpoint, windows, demands))


class Changing(torch.nn.Module):
    """Adds to what its first linear made in place, and calls its last one twice."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made = self.one(x)
        made += x
        return self.two(self.two(made))


def test_a_run_goes_on_with_the_weights_of_the_moment() -> None:
    module, x = Changing().requires_grad_(False), torch.randn(1, 3, 4)
    layer = DecoderLayer(module, "layer", [LayerCall((), {})])
    with Runs.of(layer, [x]) as runs:
        assert torch.equal(runs.arguments("layer.one.weight", 0)[0], x[0])
        layer.set_weight("layer.one.weight", np.eye(4, dtype=np.float32))
        read, *_ = runs.arguments("layer.two.weight", 0)
        torch.testing.assert_close(read, 2 * x[0] + module.one.bias)
        layer.set_weight("layer.two.weight", np.eye(4, dtype=np.float32))
        runs.end()
        assert torch.equal(runs.states[0], layer.run(0, x))
    assert "forward" not in vars(module.one)
    assert "forward" not in vars(module.two)


@pytest.mark.parametrize("threads", [0, 2])
def test_runs_that_are_not_ended_are_given_up(threads: int) -> None:
    class Noting(Changing):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            try:
                return super().forward(x)
            finally:
                left.append(len(x[0]))

    left: list[int] = []
    module, states = Noting().requires_grad_(False), [torch.randn(1, tokens, 4) for tokens in (1, 2, 3)]
    with over_windows(threads) if threads else nullcontext(IN_ORDER) as each:
        layer = DecoderLayer(module, "layer", [LayerCall((), {})] * 3, each=each)
        with Runs.of(layer, states) as runs:
            runs.by_window(lambda window: runs.arguments("layer.one.weight", window) if window < 2 else ())
            assert not left
    assert sorted(left) == [1, 2]
    assert "forward" not in vars(module.one)


def test_what_ends_a_run_is_raised_where_it_is_waited_for() -> None:
    module = Changing().requires_grad_(False)
    layer = DecoderLayer(module, "layer", [LayerCall((), {})])
    with Runs.of(layer, [torch.randn(1, 3, 5)]) as runs:
        runs.arguments("layer.one.weight", 0)
        with pytest.raises(RuntimeError, match="shapes"):
            runs.arguments("layer.two.weight", 0)
    with Runs.of(layer, [torch.randn(1, 3, 4)]) as runs, pytest.raises(UnsupportedError, match="does not run"):
        runs.arguments("layer.three.weight", 0)


def test_a_linear_can_be_silenced() -> None:
    class Residual(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            between = x + self.first(x)
            return between + self.last(between)

    module = Residual().requires_grad_(False)
    x = torch.randn(1, 3, 4)
    layer, last = DecoderLayer(module, "layer", [LayerCall((), {})]), "layer.last.weight"
    with Runs.of(layer, [x], (last,)) as runs:
        read, after = runs.without(last, 0)
        assert torch.equal(read, (x + module.first(x))[0])
        assert torch.equal(after[0], read)
        layer.set_weight(last, np.eye(4, dtype=np.float32))
        runs.end()
        assert torch.equal(runs.states[0], module(x))
