"""Calibration of experts: what each of them reads, and matrices that lose less on it than plain rounding."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from torch import nn

from llmforge.cache import Cache
from llmforge.calibration import Store, calibrate, experts
from llmforge.calibration.layer import DecoderLayer
from llmforge.calibration.skeleton import Skeleton
from llmforge.calibration.threads import over_windows
from llmforge.checkpoint import Checkpoint
from llmforge.checkpoint.text import TokenWindow
from llmforge.passes.quantize_weights import QuantizeWeights
from llmforge.quantization.grid import Grid
from llmforge.quantization.grids import QuantizedMatrix, dequantize, pack, round_to_nearest
from llmforge.quantization.methods.gptq import Gptq
from llmforge.quantization.statistics import Statistics, WeightDemand
from llmforge.rewrite.pass_base import Budget, Context
from llmforge.trace import trace
from llmforge.trace.hooks.experts import ExpertActivation, ExpertWeights, compute, probe, weights
from llmforge.verification.verifier import Verifier

from ..models import graphs, zoo

GRID = Grid(4, 32, False)
DEMAND = WeightDemand(Gptq(), GRID)


def texts(count: int, length: int) -> list[TokenWindow]:
    random = np.random.default_rng(0)
    return [TokenWindow(f"d{i}", random.integers(3, 260, length)) for i in range(count)]


def written(name: str, folder: Path) -> Checkpoint:
    zoo.write(name, folder)
    return Checkpoint.open(folder)


@pytest.mark.parametrize("name", ["qwen3-moe", "gpt-oss", "glm4-moe"])
def test_layers_one_by_one_are_the_model(name: str, tmp_path: Path) -> None:
    """Experts that the checkpoint holds apart are merged, and buffers, a router's correction, have their numbers."""
    skeleton = Skeleton.build(written(name, tmp_path))
    windows = texts(2, 20)
    with torch.inference_mode():
        calls, states = skeleton.enter([window.ids for window in windows])
        loaded = zoo.reference(tmp_path)
        expected = [
            loaded(torch.from_numpy(window.ids)[None], output_hidden_states=True).hidden_states for window in windows
        ]
        for index in range(len(skeleton.layers)):
            layer = skeleton.load(index, calls[index])
            for got, want in zip(states, expected, strict=True):
                torch.testing.assert_close(got, want[index], atol=1e-5, rtol=1e-5)
            states = [layer.run(window, state) for window, state in enumerate(states)]


def test_experts_come_in_their_turn_and_apart(tmp_path: Path) -> None:
    skeleton = Skeleton.build(written("glm4-moe", tmp_path))
    with torch.inference_mode():
        calls, states = skeleton.enter([texts(1, 20)[0].ids])
        layer = skeleton.load(1, calls[1])
        groups = layer.groups(states[0])
        tokens, ids, mixing = layer.arguments_of("model.layers.1.mlp.experts", 0, states[0])
    names = [[name.removeprefix("model.layers.1.") for name in group] for group in groups]
    assert names[2:4] == [
        ["mlp.experts"],
        ["mlp.shared_experts.gate_proj.weight", "mlp.shared_experts.up_proj.weight"],
    ]
    assert (tokens.shape, ids.shape, mixing.shape) == ((20, 64), (20, 2), (20, 2))


# One module of experts ---------------------------------------------------------------------------------------------


def module(folder: Path, name: str) -> nn.Module:
    skeleton = Skeleton.build(written(name, folder))
    [(_, found)] = DecoderLayer(skeleton.load(1, []).module, "layer", []).experts().items()
    return found


def seen(tokens: int, count: int, *, unseen: int | None = None) -> experts.RoutedInputs:
    """Inputs with a falling spectrum; the unquantized model's differ a little."""
    generator = torch.Generator().manual_seed(2)
    x = torch.randn(tokens, 64, generator=generator) @ torch.diag(torch.arange(1.0, 65) ** -0.7)
    x = x @ torch.linalg.qr(torch.randn(64, 64, generator=generator))[0]
    ids = torch.stack([torch.randperm(count, generator=generator)[:2] for _ in range(tokens)])
    if unseen is not None:
        ids[ids == unseen] = (unseen + 1) % count
    mixing = torch.rand(ids.shape, generator=generator) + 0.1
    return experts.RoutedInputs(x, ids, mixing, x + 0.02 * torch.randn(x.shape, generator=generator))


def output(
    form: ExpertActivation, held: ExpertWeights, matrices: list[torch.Tensor], given: experts.RoutedInputs
) -> torch.Tensor:
    changed = ExpertWeights(matrices[0], matrices[1], held.up_bias, held.down_bias)
    return compute(form, changed, given.tokens, given.ids, given.mixing)


@pytest.mark.parametrize("name", ["mixtral", "gpt-oss"])
def test_gptq_loses_less_than_rounding(name: str, tmp_path: Path) -> None:
    found = module(tmp_path, name)
    held, form = weights(found), probe(found)
    given = seen(600, len(held.up))
    matrices = experts.quantize(found, given, GRID, Gptq())
    assert [matrix.shape for matrix in matrices] == [(4 * 192, 64), (4 * 64, 96)]
    expected = compute(form, held, given.originals, given.ids, given.mixing)
    errors = []
    for rows in (
        [dequantize(matrix) for matrix in matrices],
        [
            dequantize(round_to_nearest(np.concatenate([m.T.numpy() for m in part.detach()]), GRID))
            for part in (held.up, held.down)
        ],
    ):
        parts = [
            torch.from_numpy(of).reshape(4, like.shape[2], -1).transpose(1, 2)
            for of, like in zip(rows, (held.up, held.down), strict=True)
        ]
        errors.append(float((output(form, held, parts, given) - expected).square().mean()))
    assert errors[0] < 0.6 * errors[1]


def test_an_expert_that_no_token_chooses_is_rounded(tmp_path: Path) -> None:
    found = module(tmp_path, "mixtral")
    held = weights(found)
    up, down = experts.quantize(found, seen(100, 4, unseen=2), GRID, Gptq())
    for matrix, part in ((up, held.up), (down, held.down)):
        n = part.shape[2]
        plain = round_to_nearest(np.ascontiguousarray(part[2].detach().numpy().T), GRID)
        np.testing.assert_array_equal(matrix.codes[2 * n : 3 * n], plain.codes)
        other = round_to_nearest(np.ascontiguousarray(part[1].detach().numpy().T), GRID)
        assert (matrix.codes[n : 2 * n] != other.codes).any()
    assert experts.scarcity(found, seen(100, 4, unseen=2)).endswith("; 1 saw none, and are rounded to nearest")
    assert experts.scarcity(found, seen(4000, 4)) == ""


def test_experts_on_several_threads_have_the_same_codes(tmp_path: Path) -> None:
    found = module(tmp_path, "qwen3-moe")
    given, made, ran = seen(300, len(weights(found).up)), [], list[set[int]]()
    for threads in (1, 2, 3):
        by, rounded = set[int](), Gptq()

        def note(*arguments: Any, by: set[int] = by, rounded: Gptq = rounded) -> QuantizedMatrix:
            by.add(threading.get_ident())
            return rounded.quantize(*arguments)

        method = Mock(wraps=rounded, demands=rounded.demands, quantize=note)
        with over_windows(threads) as each:
            made.append(experts.quantize(found, given, GRID, method, each, threads))
        ran.append(by)
    assert [len(by) > 1 for by in ran] == [False, True, True]
    for parts in made[1:]:
        for part, first in zip(parts, made[0], strict=True):
            np.testing.assert_array_equal(part.codes, first.codes)
            np.testing.assert_array_equal(part.scales, first.scales)


@pytest.mark.parametrize("name", ["mixtral", "gpt-oss"])
def test_matrices_are_put_back_as_they_lie(name: str, tmp_path: Path) -> None:
    found = module(tmp_path, name)
    for parameter, like in zip(experts.matrices(found), (weights(found).up, weights(found).down), strict=True):
        rows = np.concatenate([matrix.T.numpy() for matrix in like.detach()])
        before = found.get_parameter(parameter).clone()
        experts.assign(found, parameter, rows)
        assert torch.equal(found.get_parameter(parameter), before)
        experts.assign(found, parameter, 2 * rows)
        assert torch.equal(found.get_parameter(parameter), 2 * before)


class Routed(nn.Module):
    """A layer whose router is linear layers, and whose experts are those of a model."""

    def __init__(self, found: nn.Module) -> None:
        super().__init__()
        self.before = nn.Linear(64, 64, bias=False)
        self.router = nn.Sequential(nn.Linear(64, 16, bias=False), nn.ReLU(), nn.Linear(16, 4, bias=False))
        self.beside, self.experts = nn.Linear(64, 64, bias=False), found

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.before(x)
        values, ids = self.router(x).softmax(-1).topk(2)
        flat: torch.Tensor = self.experts(x.reshape(-1, 64), ids.reshape(-1, 2), values.reshape(-1, 2))
        return self.beside(x) + flat.reshape(x.shape)


def test_routers_are_found_by_what_they_move(tmp_path: Path) -> None:
    from llmforge.calibration.layer import LayerCall

    torch.manual_seed(0)
    layer = DecoderLayer(Routed(module(tmp_path, "mixtral")).requires_grad_(False), "layer", [LayerCall((), {})])
    state = torch.randn(1, 12, 64)
    groups = layer.groups(state)
    before = layer.run(0, state)
    assert layer.routers(groups, state) == {"layer.router.0.weight", "layer.router.2.weight"}
    assert torch.equal(layer.run(0, state), before)


# Whole models ------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def calibrated(tmp_path_factory: pytest.TempPathFactory) -> tuple[Checkpoint, Statistics]:
    folder = tmp_path_factory.mktemp("qwen3-moe")
    checkpoint = written("qwen3-moe", folder / "checkpoint")
    return checkpoint, calibrate(checkpoint, texts(6, 40), [DEMAND], store=Store(Cache(folder / "layers")))


def test_experts_and_linears_have_results_and_the_router_has_none(calibrated: tuple[Checkpoint, Statistics]) -> None:
    _, statistics = calibrated
    parts = {name: matrix for name, matrix in statistics.linears.items() if "experts" in name}
    layer = "model.layers.1.mlp.experts"
    assert {name: (matrix.shape, matrix.grid.block_size) for name, matrix in parts.items()} == {
        f"{layer}.gate_up_proj": ((8 * 96, 64), 16),  # 16: the largest block of which rows of 64 and of 48 have two
        f"{layer}.down_proj": ((8 * 64, 48), 16),
    }
    assert not [name for name in statistics.linears if name.endswith("mlp.gate.weight")]
    assert "model.layers.1.self_attn.q_proj.weight" in statistics.linears


def test_a_later_call_finds_them(calibrated: tuple[Checkpoint, Statistics]) -> None:
    checkpoint, statistics = calibrated
    again = calibrate(checkpoint, texts(6, 40), [DEMAND], store=Store(Cache(checkpoint.path.parent / "layers")))
    assert list(again.linears) == list(statistics.linears)
    for name, matrix in statistics.linears.items():
        np.testing.assert_array_equal(dequantize(again.linears[name]), dequantize(matrix))


def test_excluded_experts_stay(calibrated: tuple[Checkpoint, Statistics]) -> None:
    checkpoint, _ = calibrated
    demand = WeightDemand(Gptq(), GRID, ("*.experts.down_proj",))
    assert not [name for name in calibrate(checkpoint, texts(2, 20), [demand]).linears if "experts" in name]


@pytest.mark.thorough
def test_the_pass_takes_them(calibrated: tuple[Checkpoint, Statistics], tmp_path: Path) -> None:
    checkpoint, statistics = calibrated
    model = trace(checkpoint)
    text = texts(1, 40)[0].ids
    verifier = Verifier(model, promises=graphs.PROMISES, folder=tmp_path, texts=[text])
    step = QuantizeWeights(Budget(kld_mean=0.2))
    changes = step.run(model, Context(graphs.TARGET, statistics))
    assert [skip.node for skip in changes.skipped] == ["model.layers.1.mlp.gate/MatMul"]
    [note] = [change.what for change in changes.rewritten if "experts" in change.what]
    assert note.startswith("gptq, 4 bits, blocks of 16")
    assert (verifier.check(step, model, changes).kld_mean or 0) > 0
    codes = model.graph.initializers["model.layers.1.mlp.experts.down_proj.codes"].const_value
    assert codes is not None
    packed = pack(statistics.linears["model.layers.1.mlp.experts.down_proj"])
    np.testing.assert_array_equal(codes.numpy().reshape(-1), packed.codes.reshape(-1))
