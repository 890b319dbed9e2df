"""Layers go on where they stopped, and make what they would have made."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch

from llmforge.calibration import driver, resuming
from llmforge.calibration.layer import DecoderLayer, LayerCall
from llmforge.calibration.quantize import WeightQuantization
from llmforge.calibration.resuming import Changed, ModuleOutputs, Runs
from llmforge.calibration.skeleton import Skeleton
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
    monkeypatch.setattr(Runs, "of", classmethod(lambda cls, layer, states: cls(layer, states, None)))


def test_results_are_those_of_runs_from_the_beginning(
    tiny_checkpoint: Path, windows: list[TokenWindow], monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint = Checkpoint.open(tiny_checkpoint)
    found = driver.calibrate(checkpoint, windows, DEMANDS)
    begun_anew(monkeypatch)
    assert same(found, driver.calibrate(checkpoint, windows, DEMANDS))


def test_every_linear_multiplies_a_window_once_as_it_was_and_once_as_it_is(
    tiny_checkpoint: Path, windows: list[TokenWindow], monkeypatch: pytest.MonkeyPatch
) -> None:
    skeleton = Skeleton.build(Checkpoint.open(tiny_checkpoint))
    with torch.no_grad():
        calls, states = skeleton.enter([window.ids for window in windows])
        layer = skeleton.load(0, calls[0])
        looked = 1 + 1 + 6  # what reads what; what is added to what: once plainly, and with each that fits shifted
        counts = counted(monkeypatch)
        driver.quantize_layer(layer, list(states), list(states), WeightQuantization(DEMANDS[0]))
    products = [counts[id(linear)] for linear in layer.linears().values()]
    assert max(products) <= 2 * len(windows) + looked
    assert min(products) >= 2 * len(windows)


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
    """Adds to what its first linear made in place."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made = self.one(x)
        made += x
        return self.two(made)


def test_what_was_changed_in_place_is_made_again(monkeypatch: pytest.MonkeyPatch) -> None:
    module = Changing().requires_grad_(False)
    x = torch.randn(1, 3, 4)
    expected = module(x)
    seen: list[str] = []
    plain = ModuleOutputs.going_on

    def going_on(self: ModuleOutputs, window: int, *, keep: bool = True) -> object:
        seen.append("remembered")
        return plain(self, window, keep=keep)

    monkeypatch.setattr(ModuleOutputs, "going_on", going_on)
    runs = Runs.of(DecoderLayer(module, "layer", [LayerCall((), {})]), [x])
    torch.testing.assert_close(runs.arguments("layer.two.weight", 0)[0], module.one(x)[0] + x[0])
    runs.end()
    assert torch.equal(runs.states[0], expected)
    assert runs.memory is None
    assert seen == ["remembered"] * 2
    memory = ModuleOutputs(resuming.checkpointable(module, [module.one, module.two]))
    with memory.going_on(0):
        module(x)
    with pytest.raises(Changed), memory.going_on(0):
        module(x)
    with memory.going_on(0):  # nothing is remembered any more
        assert torch.equal(module(x), expected)


def test_a_module_that_runs_twice_says_two_things() -> None:
    class Twice(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = torch.nn.Sequential(torch.nn.Linear(4, 4))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.inner(self.inner(x))

    module = Twice().requires_grad_(False)
    memory, x = ModuleOutputs(resuming.checkpointable(module, [module.inner[0]])), torch.randn(2, 4)
    expected = module(x)
    for _ in range(2):
        with memory.going_on(0):
            assert torch.equal(module(x), expected)
    assert "forward" not in vars(module.inner)
    assert "forward" not in vars(module.inner[0])
    with memory.going_on(1):  # another window, of which nothing is remembered
        assert torch.equal(module(x + 1), module(x + 1))


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
    runs = Runs.of(DecoderLayer(module, "layer", [LayerCall((), {})]), [x])
    read, after = runs.without("layer.last.weight", 0)
    assert torch.equal(read, (x + module.first(x))[0])
    assert torch.equal(after[0], read)
    runs.end()
    assert torch.equal(runs.states[0], module(x))
