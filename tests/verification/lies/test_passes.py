"""Every lie is caught with exit code 7 and the name of the pass, on the sample and on models with other structures."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx_ir as ir
import pytest

from llmforge.checkpoint import Checkpoint
from llmforge.passes import PackQkv
from llmforge.trace import trace
from llmforge.verification.promises import Promises

from ...models import graphs, zoo, zoo_classic
from . import table

SAMPLE = Path(__file__).parents[2] / "data/docs-llama-7m"
BATCH = 8
Traced = tuple[ir.Model, Promises]


def traced(folder: Path) -> Traced:
    checkpoint = Checkpoint.open(folder)
    return trace(checkpoint), Promises.of(checkpoint, int(checkpoint.geometry.context or 128), BATCH)


@pytest.fixture(scope="module")
def sample() -> Traced:
    return traced(SAMPLE)


@pytest.fixture(scope="module", params=["qwen2-mixed-windows", "gpt-oss", "qwen3-moe", "gemma2", "phi3-longrope"])
def other(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Traced:
    folder = tmp_path_factory.mktemp(request.param)
    if request.param == "phi3-longrope":  # its angles change where a text has more than 48 tokens
        changes = {"max_position_embeddings": 1024, "sliding_window": None}
        zoo_classic.write(request.param, folder, original_max_position_embeddings=48, **changes)
    else:
        experts = {"num_experts": 32, "mlp_only_layers": []} if request.param == "qwen3-moe" else {}
        zoo.write(request.param, folder, max_position_embeddings=1024, **experts)
    return traced(folder)


def check(lie: table.Lie, on: Traced, folder: Path, *, whole: bool) -> None:
    model, promises = on
    texts = [np.random.default_rng(7).integers(0, promises.vocabulary, length) for length in (24, 20)]
    try:
        message = table.caught(lie, model, promises, folder, graphs.CPU, texts=texts, whole_bytes=2**40 if whole else 0)
    except table.NothingToLieAbout:
        pytest.skip("this model has nothing of the kind")
    assert message is not None, f"{lie.name}: not seen"
    assert message.startswith("pass lying-pass ")


def test_lies_are_many_and_have_names() -> None:
    assert len({lie.name for lie in table.LIES}) == len(table.LIES) >= 44


@pytest.mark.parametrize("lie", table.LIES, ids=lambda lie: lie.name)
def test_a_lie_is_caught(lie: table.Lie, sample: Traced, tmp_path: Path) -> None:
    check(lie, sample, tmp_path, whole=True)


@pytest.mark.parametrize("lie", [lie for lie in table.LIES if lie.numerics is table.LOSSY], ids=lambda lie: lie.name)
def test_a_lossy_lie_is_caught_where_graphs_are_streamed(lie: table.Lie, sample: Traced, tmp_path: Path) -> None:
    """Exact and rounding passes are proven in one way, whatever the size of a model."""
    check(lie, sample, tmp_path, whole=False)


@pytest.mark.slow
@pytest.mark.parametrize("lie", table.LIES, ids=lambda lie: lie.name)
def test_a_lie_is_caught_on_models_of_other_structures(lie: table.Lie, other: Traced, tmp_path: Path) -> None:
    check(lie, other, tmp_path, whole=True)


def test_what_is_no_lie_is_not_caught(sample: Traced, tmp_path: Path) -> None:
    model, promises = sample
    honest = table.Lie("no lie", table._flip)
    assert table.caught(honest, model, promises, tmp_path, graphs.CPU) is None
    rounding = table.Lie("no lie", table._flip, table.ROUNDING)
    assert table.caught(rounding, model, promises, tmp_path, graphs.CPU, inner=PackQkv()) is None
