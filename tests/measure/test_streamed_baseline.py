"""The baseline that runs layer by layer, beside the one that is loaded whole."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from llmforge.base.errors import UnsupportedError
from llmforge.calibration.skeleton import Frame, Skeleton
from llmforge.checkpoint import Checkpoint
from llmforge.measure import streamed_baseline
from llmforge.measure.baseline import Baseline, open_baseline
from llmforge.measure.streamed_baseline import StreamedBaseline
from llmforge.trace.export import stored_matrix

from ..models import zoo

# dense, tied, windows, two rotary tables and soft caps, latent attention, experts of several kinds, recurrences
NAMES = (
    "llama", "llama-tied", "mistral-window", "qwen2-mixed-windows", "gemma2", "gemma3", "gpt-neox", "deepseek-v3",
    "mixtral", "qwen3-moe", "gpt-oss", "glm4-moe", "granitemoe", "phimoe", "qwen3-5", "lfm2", "smollm3",
)  # fmt: skip


def texts(vocabulary: int, lengths: tuple[int, ...] = (12, 5, 12, 1)) -> list[np.ndarray]:
    rng = np.random.default_rng(3)
    return [rng.integers(0, vocabulary, length) for length in lengths]


def checkpoint(name: str, folder: Path, dtype: torch.dtype = torch.bfloat16) -> Checkpoint:
    zoo.write(name, folder, dtype)
    return Checkpoint.open(folder)


@pytest.mark.parametrize("name", NAMES)
def test_logits_are_those_of_the_whole_model_to_the_bit(name: str, tmp_path: Path) -> None:
    opened = checkpoint(name, tmp_path)
    cut = texts(opened.geometry.vocabulary)
    streamed, whole = open_baseline(opened, threads=1, whole_bytes=0), open_baseline(opened, threads=1)
    assert isinstance(streamed, StreamedBaseline), streamed.description
    assert isinstance(whole, Baseline)
    logits = streamed.of(cut)
    for ids in reversed(cut):  # in any order
        np.testing.assert_array_equal(logits(ids), whole.logits(ids))


def test_large_matrices_are_read_in_tiles(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened = checkpoint("llama-tied", tmp_path)
    cut = texts(opened.geometry.vocabulary)
    whole = Baseline(opened, threads=1)
    monkeypatch.setattr(stored_matrix, "TILE_BYTES", 4 * opened.geometry.hidden * 5)  # five rows
    streamed = StreamedBaseline(opened, threads=1)
    assert type(streamed._frame.model.get_input_embeddings().weight) is stored_matrix.StoredMatrix
    logits = streamed.of(cut)
    for ids in cut:  # a product of fewer columns may add in another order: some units in the last place
        expected = whole.logits(ids)
        np.testing.assert_allclose(logits(ids), expected, rtol=0, atol=2e-6 * np.abs(expected).max())


def test_no_more_than_one_layer_is_held(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened = checkpoint("smollm3", tmp_path)
    alive: list[int] = []
    held: list[torch.nn.Module] = []
    load = Skeleton.load

    def watched(self: Skeleton, index: int, calls):
        import weakref

        layer = load(self, index, calls)
        held[:] = [reference for reference in held if reference() is not None]
        held.append(weakref.ref(layer.module))
        alive.append(len(held))
        return layer

    monkeypatch.setattr(Skeleton, "load", watched)
    cut = texts(opened.geometry.vocabulary)
    logits = StreamedBaseline(opened, threads=1).of(cut)
    assert not alive  # nothing is read before it is asked for
    for ids in cut:
        logits(ids)
    assert alive == [1, 1, 1, 1]  # four layers, once each for all texts


def test_greedy_goes_on_as_the_whole_model_does(tmp_path: Path) -> None:
    opened = checkpoint("gemma3", tmp_path)
    cut = texts(opened.geometry.vocabulary, (6, 9, 4))
    streamed, whole = StreamedBaseline(opened, threads=1), Baseline(opened, threads=1)
    most = streamed_baseline.GENERATED
    assert streamed.greedy(cut, [3, 100, 1]) == whole.greedy(cut, [3, most, 1])
    assert streamed.greedy([], []) == []


class Between(torch.nn.Module):
    """Layers `block`, and something between them."""

    def __init__(self, between) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList([torch.nn.Identity(), torch.nn.Identity()])
        self.between = between

    def forward(self, input_ids, use_cache):
        return self.between(self.layers, input_ids[..., None].float())


@pytest.mark.parametrize(
    ("between", "reason"),
    [
        (lambda layers, x: layers[1](2 * layers[0](x)), "changes hidden states between its layers"),
        (lambda layers, x: layers[1](layers[0](x, shared := {}), shared), "its layers share a state"),
        (lambda layers, x: layers[1](layers[0](x, x)), "more than the hidden states"),
        (lambda layers, x: layers[0](x), "called 1 of its 2 decoder layers"),
    ],
)
def test_what_is_more_than_layers_one_by_one_is_refused(between, reason: str) -> None:
    frame = Frame("it", Between(between), ["layers.0", "layers.1"])

    def enter() -> None:
        for first in range(2):
            frame.enter(np.arange(first, first + 3))

    with pytest.raises(UnsupportedError, match=reason):
        enter()


def test_a_model_that_takes_the_first_of_a_tuple_is_entered() -> None:
    frame = Frame("it", Between(lambda layers, x: layers[1](layers[0](x)[0])[0]), ["layers.0", "layers.1"])
    states, calls = frame.enter(np.arange(3))
    assert states.shape == (1, 3, 1)
    assert len(calls) == 2


def test_what_cannot_be_walked_is_loaded_whole_and_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened = checkpoint("llama", tmp_path)

    def refuse(self: Frame, ids):
        raise UnsupportedError("its layers share a state")

    monkeypatch.setattr(Frame, "enter", refuse)
    found = open_baseline(opened, threads=1, whole_bytes=0)
    assert isinstance(found, Baseline)
    assert found.description.endswith("loaded whole: its layers share a state")


def test_the_model_decides_how_it_runs(tmp_path: Path) -> None:
    opened = checkpoint("llama", tmp_path)
    fp32 = 4 * opened.parameters
    assert isinstance(open_baseline(opened, threads=1, whole_bytes=fp32), Baseline)
    found = open_baseline(opened, threads=1, whole_bytes=fp32 - 1)
    assert isinstance(found, StreamedBaseline)
    assert "layer by layer" in found.description
