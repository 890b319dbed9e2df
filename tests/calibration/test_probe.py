"""What a probe measures: the KLD of a model with rounded weights, as computed by hand."""

from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from llmforge.cache import Cache
from llmforge.calibration import Store, probe
from llmforge.checkpoint import Checkpoint
from llmforge.quantization.costs import ModelFormats, ProbedCosts
from llmforge.quantization.grid import Grid
from llmforge.quantization.grids import dequantize, round_to_nearest

SAMPLE = Path(__file__).parents[1] / "data" / "docs-llama-7m"
FOUR = ModelFormats(Grid(4, 32, False, "int8"), Grid(6, 32, True, "int8"))
EIGHT = ModelFormats(Grid(8, 32, True, "int8"), Grid(8, 32, True, "int8"))


@pytest.fixture(scope="module")
def windows(opened: Checkpoint) -> list[np.ndarray]:
    random = np.random.default_rng(0)
    return [random.integers(0, opened.geometry.vocabulary, size) for size in (48, 40)]


@pytest.fixture(scope="module")
def found(opened: Checkpoint, windows: list[np.ndarray]) -> ProbedCosts:
    return probe.measure(opened, windows, (FOUR, EIGHT), threads=2)


def log_probabilities(formats: ModelFormats | None, windows: list[np.ndarray]) -> list[torch.Tensor]:
    model = AutoModelForCausalLM.from_pretrained(SAMPLE, dtype=torch.float32).eval()
    table = model.get_input_embeddings().weight
    for _, module in model.named_modules():
        weight = getattr(module, "weight", None)
        if formats is None or not isinstance(module, torch.nn.Linear | torch.nn.Embedding):
            continue
        is_table = weight is table or module is model.get_output_embeddings()
        grid = formats.tables if is_table else formats.linears
        assert grid is not None
        if not (is_table and isinstance(module, torch.nn.Linear) and model.config.tie_word_embeddings):
            weight.data = torch.from_numpy(dequantize(round_to_nearest(weight.detach().numpy(), grid)))
    with torch.no_grad():
        return [model(torch.from_numpy(ids)[None]).logits[0].log_softmax(-1) for ids in windows]


def test_weights_cost_what_a_model_with_them_loses(found: ProbedCosts, windows: list[np.ndarray]) -> None:
    expected = log_probabilities(None, windows)
    for formats in (FOUR, EIGHT):
        rounded = log_probabilities(formats, windows)
        pairs = zip(rounded, expected, strict=True)
        total = sum(float(torch.nn.functional.kl_div(q, p, reduction="sum", log_target=True)) for q, p in pairs)
        cost = found.of(formats)
        assert cost is not None
        assert cost.kld == pytest.approx(total / found.tokens, rel=1e-3)


def test_bytes_of_all_weights_are_counted(found: ProbedCosts) -> None:
    four, eight = (8 * each.size_bytes / found.parameters for each in found.weights)
    assert 4.4 < four < 5.2
    assert 8.3 < eight < 8.6


def test_cache_and_activations_cost_a_little(found: ProbedCosts) -> None:
    assert 0 < found.cache < found.weights[0].kld
    assert 0 < found.activations < found.weights[0].kld
    assert found.tokens == 88


def test_inputs_of_linears_are_rounded_in_blocks() -> None:
    x = torch.randn(1, 3, 64)
    rounded = probe._int8(x).reshape(-1, 32)
    steps = x.reshape(-1, 32).abs().amax(1, keepdim=True) / 127
    assert float(((rounded - x.reshape(-1, 32)).abs() / steps).max()) <= 0.5001
    assert torch.equal(probe._int8(x[..., :40]), x[..., :40])


def test_figures_are_found_again_and_do_not_depend_on_threads(
    found: ProbedCosts, opened: Checkpoint, windows: list[np.ndarray], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Cache(tmp_path, 10**8) as cache:
        store = Store(cache)
        assert probe.measure(opened, windows, (FOUR, EIGHT), threads=1, store=store) == found
        monkeypatch.setattr(probe, "_measure", lambda *given: pytest.fail("it measures again"))
        assert probe.measure(opened, windows, (FOUR, EIGHT), threads=2, store=store) == found
