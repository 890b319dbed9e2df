"""Gradients, layer by layer backwards, against autograd through the whole model; tables; what outputs are added to."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from transformers import AutoModelForCausalLM

from llmforge.calibration import calibrate, gradients, layer, sums
from llmforge.calibration.gradients import SEED, Gradients, take
from llmforge.calibration.layer import narrowed
from llmforge.calibration.pricing import LinearMoments
from llmforge.calibration.skeleton import Skeleton
from llmforge.calibration.threads import fixed, over_windows
from llmforge.checkpoint import Checkpoint
from llmforge.checkpoint.text import TokenWindow
from llmforge.quantization.grid import Grid
from llmforge.quantization.grids import dequantize, round_to_nearest
from llmforge.quantization.methods.gptq import Gptq
from llmforge.quantization.statistics import WeightDemand

from ..models import zoo_classic
from ..models.checkpoints import write_checkpoint

TIED = {"tie_word_embeddings": True}
UNTIED = {"tie_word_embeddings": False}


def texts(count: int, length: int = 24) -> list[NDArray[np.int64]]:
    random = np.random.default_rng(0)
    return [random.integers(3, 250, length) for _ in range(count)]


def taken(folder: Path, ids: list[NDArray[np.int64]], into: Path) -> tuple[Skeleton, Gradients]:
    skeleton = Skeleton.build(Checkpoint.open(folder))
    into.mkdir()
    with torch.no_grad():
        calls, states = skeleton.enter(ids)
        take(skeleton, ids, calls, states, into)
    assert all(each.is_file() for each in into.iterdir())  # hidden states are gone
    return skeleton, Gradients.read(into)


def through_the_model(folder: Path, ids: list[NDArray[np.int64]], rows: int) -> dict[str, NDArray[np.float32]]:
    """Mean g gᵀ of all linears of the layers, of what the layers read, and mean s·h hᵀ of the head.

    Labels are drawn for so many `rows` at a time.
    """
    load: Callable[..., Any] = AutoModelForCausalLM.from_pretrained
    model = load(folder, dtype=torch.float32).eval()
    sums: dict[str, torch.Tensor] = {}

    def add(name: str, rows: torch.Tensor, weight: torch.Tensor | float = 1.0) -> None:
        rows = rows.detach().reshape(-1, rows.shape[-1])
        sums[name] = sums.get(name, torch.zeros(())) + (rows * weight).T @ rows

    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Linear) and ".layers." in name:
            module.register_forward_hook(
                lambda _, given, y, name=name: y.register_hook(lambda g: add(f"{name}.weight", g)) and None
            )
    model.model.embed_tokens.register_forward_hook(
        lambda _, given, y: y.register_hook(lambda g: add("embedding", g)) and None
    )
    read: list[torch.Tensor] = []
    model.lm_head.register_forward_pre_hook(lambda _, given: read.append(given[0]))
    random = torch.Generator().manual_seed(SEED)
    for each in ids:
        logits = model(torch.from_numpy(each)[None]).logits[0]
        shares = logits.detach().softmax(-1)
        labels = torch.cat([gradients.draw(part, random)[:, 0] for part in shares.split(rows)])
        torch.nn.functional.cross_entropy(logits, labels, reduction="sum").backward()
        add("head", read[-1], (shares * (1 - shares)).sum(-1, keepdim=True))
    count = sum(map(len, ids))
    return {name: (total / count).numpy() for name, total in sums.items()}


@pytest.mark.parametrize(("form", "rows"), [(TIED, 24), (UNTIED, 24), (UNTIED, 7)], ids=["tied", "untied", "in parts"])
def test_backwards_layer_by_layer_is_backwards_through_the_model(
    form: dict[str, object], rows: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_checkpoint(tmp_path / "model", **form)
    ids, seen = texts(3), set[int]()
    plain = Skeleton.leaving

    def leaving(skeleton: Skeleton, *given: Any, **options: Any) -> Callable[..., Any]:
        leave = plain(skeleton, *given, **options)

        def watched(window: int, hidden: torch.Tensor) -> Any:
            seen.add(hidden.shape[1])
            return leave(window, hidden)

        return watched

    monkeypatch.setattr(Skeleton, "leaving", leaving)
    monkeypatch.setattr(layer, "has_bf16", lambda: False)
    monkeypatch.setattr(sums, "_in_pairs", lambda: False)
    vocabulary = Checkpoint.open(tmp_path / "model").config.vocab_size
    monkeypatch.setattr(gradients, "LOGITS", rows * vocabulary + 1)
    _, ours = taken(tmp_path / "model", ids, tmp_path / "out")
    assert seen == {24} if rows == 24 else seen == {7, 24 % 7}
    theirs = through_the_model(tmp_path / "model", ids, rows)
    assert ours.tokens == 72
    assert set(ours.places) | {"embedding", "head"} == set(theirs)
    assert ours.embedding is not None
    assert ours.head is not None
    found = {name: ours.outputs([name])[0] for name in ours.places} | {"embedding": ours.embedding, "head": ours.head}
    for name, matrix in theirs.items():
        np.testing.assert_allclose(found[name], matrix, rtol=0, atol=2e-3 * np.abs(matrix).max(), err_msg=name)
    assert ours.outputs(["no such weight"]) == ()


@pytest.mark.parametrize("windows", [3, 5])
def test_what_linears_read_is_weighted_by_their_gradients(
    windows: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Σ |g|² x xᵀ / Σ |g|² of each linear, and x xᵀ of the first that reads a tensor, against autograd.

    Of five windows, the fourth has the first, and the others the second.
    """
    write_checkpoint(tmp_path / "model", **UNTIED)
    monkeypatch.setattr(layer, "has_bf16", lambda: False)
    ids, found = texts(windows), dict[str, LinearMoments]()
    skeleton = Skeleton.build(Checkpoint.open(tmp_path / "model"))
    (tmp_path / "out").mkdir()
    with torch.no_grad():
        calls, states = skeleton.enter(ids)
        take(skeleton, ids, calls, states, tmp_path / "out", lambda layer, state, moments: found.update(moments))
    load: Callable[..., Any] = AutoModelForCausalLM.from_pretrained
    model, sums = load(tmp_path / "model", dtype=torch.float32).eval(), dict[str, Any]()

    fits, prices = [1.0] * windows, [1.0] * windows
    if windows == 5:
        fits, prices = [1.0, 1.0, 1.0, 0.0, 1.0], [0.0, 0.0, 0.0, 1.0, 0.0]
    now: list[float] = []  # of the window that runs

    def add(name: str, x: torch.Tensor, g: torch.Tensor) -> None:
        rows, squares = x.detach()[0], now[1] * g[0].square().sum(-1, keepdim=True)
        parts = now[0] * rows.T @ rows, (rows * squares).T @ rows, squares.sum(), g[0].T @ g[0]
        sums[name] = [a + b for a, b in zip(sums.get(name, [0] * 4), parts, strict=True)]

    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Linear) and ".layers." in name:
            module.register_forward_hook(
                lambda _, given, y, name=name: y.register_hook(lambda g: add(f"{name}.weight", given[0], g)) and None
            )
    random = torch.Generator().manual_seed(SEED)
    for number, each in enumerate(ids):
        now[:] = [fits[number], prices[number]]
        logits = model(torch.from_numpy(each)[None]).logits[0]
        labels = gradients.draw(logits.detach().softmax(-1), random)[:, 0]
        torch.nn.functional.cross_entropy(logits, labels, reduction="sum").backward()
    assert set(found) == set(sums)
    for name, (inputs, weighted, weights, outputs) in sums.items():
        first = not name.endswith(("k_proj.weight", "v_proj.weight", "up_proj.weight"))
        assert (found[name].inputs is not None) == first
        pairs = [(found[name].weighted, weighted / weights), (found[name].outputs, outputs / (24 * windows))]
        for one, other in [*pairs, (found[name].inputs, inputs / (24 * sum(fits)))][: 2 + first]:
            np.testing.assert_allclose(one, other, rtol=0, atol=1e-2 * float(other.abs().max()), err_msg=name)


def test_bf16_products_give_nearly_the_same_moments(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_checkpoint(tmp_path / "model", **UNTIED)
    monkeypatch.setattr(gradients, "draw", lambda shares, random: torch.zeros(len(shares), 1, dtype=torch.int64))
    made = []
    for narrow in (False, True):
        monkeypatch.setattr(layer, "has_bf16", lambda narrow=narrow: narrow)
        made.append(taken(tmp_path / "model", texts(3), tmp_path / f"out-{narrow}")[1])
    wide, narrow = made
    for name in wide.places:
        one, other = wide.outputs([name])[0], narrow.outputs([name])[0]
        assert 0 < np.linalg.norm(one - other) < 0.05 * np.linalg.norm(one), name


def test_narrowed_linears_multiply_in_bf16_and_are_put_back() -> None:
    torch.manual_seed(0)
    linear, x = torch.nn.Linear(64, 32).requires_grad_(False), torch.randn(8, 64, requires_grad=True)
    with narrowed([linear]):
        y = linear(x)
        y.sum().backward()
    assert "forward" not in vars(linear)
    assert y.dtype == torch.float32
    assert x.grad is not None
    rounded = torch.nn.functional.linear(x.detach().bfloat16().float(), linear.weight.bfloat16().float(), linear.bias)
    torch.testing.assert_close(y.detach(), rounded, rtol=2**-7, atol=2**-7)
    assert not torch.equal(y.detach(), linear(x.detach()))
    torch.testing.assert_close(x.grad, linear.weight.sum(0).expand(8, -1), rtol=0.02, atol=0.02)


def test_labels_are_drawn_by_their_shares() -> None:
    shares = torch.tensor([0.0, 0.5, 0.0, 0.3, 0.2]).expand(20000, -1)
    labels = gradients.draw(shares, torch.Generator().manual_seed(1))
    assert labels.shape == (20000, 1)
    found = torch.bincount(labels[:, 0], minlength=5) / len(labels)
    torch.testing.assert_close(found, shares[0], rtol=0, atol=0.015)
    assert not found[shares[0] == 0].any()


def test_what_outputs_are_added_to_is_found(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "model")
    skeleton = Skeleton.build(Checkpoint.open(tmp_path / "model"))
    with torch.no_grad():
        calls, states = skeleton.enter(texts(1))
        layer = skeleton.load(0, calls[0])
        added = layer.additions(layer.groups(states[0]), states[0])
    assert added.first == ("model.layers.0.self_attn.o_proj.weight",)
    assert added.last == ("model.layers.0.mlp.down_proj.weight",)


@pytest.mark.parametrize("form", [TIED, UNTIED], ids=["tied", "untied"])
def test_tables_lose_less_than_rounded_ones_and_layers_see_them(form: dict[str, object], tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "model", **form)
    checkpoint, ids = Checkpoint.open(tmp_path / "model"), texts(12)
    windows = [TokenWindow(str(i), each) for i, each in enumerate(ids)]
    grid = Grid(4, 1024, True, "fp16")
    plain = calibrate(checkpoint, windows, [WeightDemand(Gptq(), Grid(4, 32, False))])
    both = calibrate(checkpoint, windows, [WeightDemand(Gptq(), Grid(4, 32, False), tables=grid)])
    names = set(both.linears) - set(plain.linears)
    embedding = "model.embed_tokens.weight"
    assert names == ({embedding} if form == TIED else {embedding, "lm_head.weight"})
    _, gradients = taken(tmp_path / "model", ids, tmp_path / "out")
    assert gradients.embedding is not None
    assert gradients.head is not None
    for name in names:
        table = checkpoint.tensor(name).numpy().astype(np.float32)
        hessian = gradients.embedding if name == embedding else gradients.head
        if form == TIED:
            hessian = gradients.embedding + gradients.head

        def cost(of: NDArray[np.float32], table: Any = table, hessian: Any = hessian) -> float:
            return float(np.vdot(of - table, (of - table) @ hessian))

        assert both.linears[name].grid == grid.dividing(64)
        assert cost(dequantize(both.linears[name])) < 0.8 * cost(
            dequantize(round_to_nearest(table, grid.dividing(64) or grid))
        )
    first = "model.layers.0.self_attn.q_proj.weight"
    assert (both.linears[first].codes != plain.linears[first].codes).any()  # it read other numbers


def test_a_table_in_front_of_a_projection_is_rounded_and_said(tmp_path: Path) -> None:
    """What is known of the first layer's states says nothing of the narrower table that is projected onto them."""
    zoo_classic.write("opt", tmp_path, num_hidden_layers=1, tie_word_embeddings=True)
    checkpoint = Checkpoint.open(tmp_path)
    windows = [TokenWindow("a", texts(1)[0])]
    found = calibrate(checkpoint, windows, [WeightDemand(Gptq(), Grid(4, 32, False), tables=Grid(4, 16, True))])
    name = "model.decoder.embed_tokens.weight"
    assert any(f"{name}: rounded to nearest: it has no gradients" in note for note in found.notes)
    table = checkpoint.tensor(name).numpy().astype(np.float32)
    rounded = dequantize(round_to_nearest(table, Grid(4, 16, True)))
    np.testing.assert_array_equal(dequantize(found.linears[name]), rounded)


def test_gradients_are_the_same_on_any_number_of_threads(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "model")
    skeleton, ids = Skeleton.build(Checkpoint.open(tmp_path / "model")), texts(11)
    found = []
    with torch.no_grad(), fixed(1):
        calls, states = skeleton.enter(ids)
        for count in (1, 3):
            folder = tmp_path / str(count)
            folder.mkdir()
            with over_windows(count) as each:
                take(skeleton, ids, calls, states, folder, each=each)
            found_here = Gradients.read(folder)
            assert found_here.embedding is not None
            outputs = [found_here.outputs([name])[0].tobytes() for name in sorted(found_here.places)]
            found.append([found_here.embedding.tobytes(), *outputs])
    assert len(found[0]) == 1 + 14
    assert found[0] == found[1]
