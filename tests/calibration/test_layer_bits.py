"""Bits by linear layer: prices against what a model loses, the bytes of one format, and globs that say them."""

import fnmatch
from pathlib import Path

import numpy as np
import pytest
import torch

from llmforge.cache import Cache
from llmforge.calibration import Store, layer_bits, probe
from llmforge.calibration.layer_bits import _Prices, globs
from llmforge.calibration.skeleton import Skeleton
from llmforge.checkpoint import Checkpoint
from llmforge.quantization.costs import MixedBits, ModelFormats
from llmforge.quantization.grid import Grid
from llmforge.quantization.methods import PLAIN
from llmforge.quantization.statistics import WeightDemand

SAMPLE = Path(__file__).parents[1] / "data" / "docs-llama-7m"
FIVE = ModelFormats(Grid(5, 32, False, "int8"), Grid(6, 32, True, "int8"))
BITS = (4, 5, 6, 8)


@pytest.fixture(scope="module")
def opened() -> Checkpoint:
    return Checkpoint.open(SAMPLE)


@pytest.fixture(scope="module")
def windows(opened: Checkpoint) -> list[np.ndarray]:
    random = np.random.default_rng(0)
    return [random.integers(0, opened.geometry.vocabulary, size) for size in (96, 80)]


def test_a_price_is_about_what_a_model_with_the_rounded_weights_loses(
    opened: Checkpoint, windows: list[np.ndarray]
) -> None:
    skeleton = Skeleton.build(opened)
    with torch.no_grad():
        linears, tables = _Prices(skeleton, windows, FIVE, BITS, map, layer_bits.Silent())._of_linears_and_tables()
    assert [len(names) for names in linears][:4] == [3, 1, 2, 1], "q, k, v; o; gate, up; down"
    assert len(tables) == 1
    predicted = sum(of[5].loss for of in linears.values()) + sum(of[6].loss for of in tables.values())
    demand = WeightDemand(PLAIN(), FIVE.linears, tables=FIVE.tables)
    measured = probe.divergences(skeleton, windows, [demand], threads=1)[0]
    assert predicted == pytest.approx(measured, rel=0.5)
    for of in (linears | tables).values():
        assert [*of] == [*BITS]
        assert sorted((each.loss for each in of.values()), reverse=True) == [each.loss for each in of.values()]


def test_the_choice_loses_less_in_as_many_bytes(
    opened: Checkpoint, windows: list[np.ndarray], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    uniform = probe.measure(opened, windows, [FIVE], threads=1).weights[0]
    with Cache(tmp_path, 10**8) as cache:
        store = Store(cache)
        found = layer_bits.choose(opened, windows, [], FIVE, BITS, threads=2, store=store)
        assert isinstance(found, MixedBits)
        assert found.kld < uniform.kld
        assert found.tokens == 176
        monkeypatch.setattr(layer_bits, "_Prices", lambda *given: pytest.fail("it prices again"))
        assert layer_bits.choose(opened, windows, [], FIVE, BITS, threads=1, store=store) == found
    demand = WeightDemand(PLAIN(), FIVE.linears, tables=FIVE.tables, layer_bits=found.layer_bits)
    skeleton = Skeleton.build(opened)
    with torch.no_grad():
        calls, states = skeleton.enter(windows)
        made = probe._entered(skeleton, windows, demand, states)
        for index in range(len(skeleton.layers)):
            probe._run_rounded(skeleton.load(index, calls[index]), [made], states[0], map)
    assert made.size_bytes + 4 * (opened.parameters - made.parameters) <= uniform.size_bytes


def test_globs_say_the_bits_of_each_weight_and_are_few() -> None:
    groups = [
        tuple(f"model.layers.{layer}.{name}.weight" for name in names)
        for layer in range(2)
        for names in (
            ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
            ("self_attn.o_proj",),
            ("mlp.gate_proj", "mlp.up_proj"),
            ("mlp.down_proj",),
        )
    ]
    usual = dict.fromkeys([*groups, ("embed[1].weight",)], 6)
    chosen = {**usual, ("embed[1].weight",): 5, groups[0]: 8, groups[2]: 5, **dict.fromkeys(groups[4:6], 4)}
    chosen |= dict.fromkeys(groups[6:], 8)
    found = globs(chosen, usual)
    assert dict(found) == {
        "embed[[]1].weight": 5,
        "model.layers.0.self_attn.[kqv]_proj.weight": 8,
        "model.layers.0.mlp.[gu]*_proj.weight": 5,
        "model.layers.1.self_attn.*": 4,
        "model.layers.1.mlp.*": 8,
    }
    for names, bits in chosen.items():
        for name in names:
            assert next((own for glob, own in found if fnmatch.fnmatchcase(name, glob)), 6) == bits
    assert globs(usual, usual) == ()
    assert dict(globs({("a.x1", "a.y1"): 4, ("a.x2",): 6}, {("a.x1", "a.y1"): 6, ("a.x2",): 6})) == {"a.[xy]1": 4}
