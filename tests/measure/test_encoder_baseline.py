"""The checkpoint's side of retrieval on a trained embedder: padding changes nothing, and it finds passages."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from llmforge.base.errors import CheckpointError, UnsupportedError
from llmforge.base.progress import Silent
from llmforge.checkpoint import Checkpoint
from llmforge.measure import retrieval
from llmforge.measure.encoder_baseline import CheckpointEncoder
from llmforge.recipe import RetrievalSpec
from llmforge.runtime.encoder import EncoderConfig
from llmforge.serving.encoder_runner import EncoderRunner
from llmforge.serving.prompts import read_tokenizer

SAMPLE = Path(__file__).resolve().parents[1] / "data" / "docs-embedder-1m"
CONFIG = EncoderConfig("embedder", "mean", True, 128, 256, prompts={"query": "", "document": ""}, token_types=True)
TEXTS = ["the file", "A checkpoint writes all dirty pages to disk, and takes a while.", "lock"]


@pytest.fixture(scope="module")
def runner() -> EncoderRunner:
    return EncoderRunner(
        CheckpointEncoder(Checkpoint.open(SAMPLE), CONFIG, threads=1), read_tokenizer(SAMPLE / "tokenizer.json")
    )


def test_texts_together_give_what_each_gives_alone(runner: EncoderRunner) -> None:
    together = runner.run_together(runner.texts(TEXTS))
    np.testing.assert_allclose(np.linalg.norm(together, axis=1), 1, rtol=1e-5)
    for text, row in zip(TEXTS, together, strict=True):
        np.testing.assert_allclose(runner.run_together(runner.texts([text]))[0], row, atol=1e-5)


@pytest.mark.parametrize(("pooling", "place"), [("cls", 0), ("last", -1)])
def test_one_token_is_pooled(runner: EncoderRunner, pooling: str, place: int) -> None:
    config = EncoderConfig("embedder", pooling, False, 128, 256, token_types=True)
    encoder = CheckpointEncoder(Checkpoint.open(SAMPLE), config, threads=1)
    inputs = runner.texts(TEXTS)
    made = encoder.encode([each.ids for each in inputs])
    states = [encoder._model(input_ids=_row(each.ids)).last_hidden_state[0, place] for each in inputs]
    np.testing.assert_allclose(made, np.stack([state.detach().numpy() for state in states]), atol=1e-5)


def test_poolings_of_all_tokens_stand_one_behind_the_other(runner: EncoderRunner) -> None:
    config = EncoderConfig("embedder", "max+mean_sqrt_len+weightedmean", False, 384, 256, token_types=True)
    encoder = CheckpointEncoder(Checkpoint.open(SAMPLE), config, threads=1)
    inputs = runner.texts(TEXTS)
    made = encoder.encode([each.ids for each in inputs])
    for each, row in zip(inputs, made, strict=True):
        states = encoder._model(input_ids=_row(each.ids)).last_hidden_state[0].detach().numpy()
        weights = np.arange(1, len(states) + 1) / sum(range(1, len(states) + 1))
        parts = [states.max(0), states.sum(0) / len(states) ** 0.5, weights @ states]
        np.testing.assert_allclose(row, np.concatenate(parts), atol=1e-5)


def _row(ids: np.ndarray) -> object:
    import torch

    return torch.from_numpy(ids)[None]


def test_it_finds_passages_by_queries_that_it_was_not_trained_on(runner: EncoderRunner) -> None:
    spec = RetrievalSpec(queries=40, passages=300)
    found = retrieval.run(spec, runner, runner.session, Silent(), engine="it", baseline="itself")
    assert found.metrics["retrieval.cosine_p01"].artifact.value == pytest.approx(1, abs=1e-5)
    ndcg = found.metrics["retrieval.ndcg_10"]
    assert ndcg.artifact.value > 0.4  # at random: .015
    assert ndcg.difference is not None
    assert ndcg.difference.value == 0


def test_what_is_missing_or_unknown_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedError, match="pooling 'none'; known: cls, max, mean, mean_sqrt_len"):
        CheckpointEncoder(Checkpoint.open(SAMPLE), EncoderConfig("embedder", "none", True, 128, 256), threads=1)
    with pytest.raises(CheckpointError, match=r"weights are missing: .*classifier"):
        CheckpointEncoder(Checkpoint.open(SAMPLE), EncoderConfig("reranker", "cls", False, 128, 256), threads=1)
    copy = tmp_path / "copy"
    shutil.copytree(SAMPLE, copy)
    tensors = load_file(copy / "model.safetensors")
    name = next(name for name in tensors if "encoder.layer.1" in name)
    del tensors[name]
    save_file(tensors, copy / "model.safetensors", {"format": "pt"})
    with pytest.raises(CheckpointError, match=r"weights are missing: encoder\.layer\.1"):
        CheckpointEncoder(Checkpoint.open(copy), CONFIG, threads=1)


def test_the_sample_is_a_folder_of_sentence_transformers() -> None:
    modules = json.loads((SAMPLE / "modules.json").read_text())
    assert [each["type"].rpartition(".")[2] for each in modules] == ["Transformer", "Pooling", "Normalize"]
    assert json.loads((SAMPLE / "1_Pooling/config.json").read_text())["pooling_mode_mean_tokens"] is True
