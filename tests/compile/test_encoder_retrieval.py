"""An embedder from its checkpoint to what clients get: built, measured, loaded, served."""

from __future__ import annotations

import base64
import json
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner
from starlette.testclient import TestClient

import llmforge
from llmforge.base.errors import BudgetExceeded, UsageError
from llmforge.checkpoint import Checkpoint
from llmforge.cli import cli
from llmforge.gates import records
from llmforge.gates.decision import Verdict
from llmforge.measure.encoder_baseline import CheckpointEncoder
from llmforge.serving import http as serve
from llmforge.serving.encoder_engine import EncoderEngine

pytestmark = pytest.mark.thorough
SAMPLE = Path(__file__).resolve().parents[1] / "data" / "docs-embedder-1m"
RECIPE = f"""\
schema: 1
name: docs-embedder
checkpoint: {SAMPLE}
target: local
engine: {{backend: onnxruntime, max_context: 256, threads: 1}}
passes: []
validation:
  retrieval: {{queries: 60, passages: 300}}
  latency: {{lengths: [8, 32], batches: [1, 3], repetitions: 6, starts: 1}}
gates:
  retrieval.cosine_mean: {{min: 0.995}}
  retrieval.ndcg_10: {{drop_max: 0.005}}
"""
TEXTS = ["how to force a checkpoint by hand", "CHECKPOINT forces one.", "The list is a compound data type."]


def test_an_embedder_is_built_measured_loaded_and_served(tmp_path: Path) -> None:
    (tmp_path / "recipe.yaml").write_text(RECIPE)
    built = llmforge.build(tmp_path / "recipe.yaml", out=tmp_path / "artifacts")
    model = llmforge.load(built.path)
    retrieval = records.read(model.artifact).retrieval
    assert retrieval is not None
    assert retrieval.kind == "embedder"
    assert retrieval.metrics["retrieval.cosine_p01"].artifact.value > 0.99999
    assert retrieval.metrics["retrieval.ndcg_10"].artifact.value > 0.4
    assert_timed(built.path)
    made = model.embed(TEXTS)
    theirs = CheckpointEncoder(Checkpoint.open(SAMPLE), model.encoder.config, threads=1)
    np.testing.assert_allclose(made, theirs.encode([each.ids for each in model.encoder.texts(TEXTS)]), atol=1e-5)
    assert made[0] @ made[1] > made[0] @ made[2]
    recorded = CliRunner().invoke(cli, ["serve", str(built.path), "--record", str(tmp_path / "records")])
    assert recorded.exit_code == 2
    assert "--record cannot be used with an embedder or a reranker" in recorded.stderr
    with pytest.raises(UsageError, match="embeds texts, and scores no pairs"):
        model.score(TEXTS[0], TEXTS[1:])
    with EncoderEngine(model.encoder) as engine, TestClient(serve.create_encoder_app(engine, "docs")) as client:
        data = client.post("/v1/embeddings", json={"input": TEXTS, "encoding_format": "base64"}).json()["data"]
    rows = [np.frombuffer(base64.b64decode(each["embedding"]), "<f4") for each in data]
    np.testing.assert_allclose(np.stack(rows), made, atol=1e-6)


def assert_timed(path: Path) -> None:
    """Hold that batches were timed beside the checkpoint, are timed again, and that loads are sent."""
    report = records.read(llmforge.load(path).artifact)
    assert report.latency is not None
    assert [(each.batch, each.prompt_tokens) for each in report.latency.points] == [(1, 8), (1, 32), (3, 8), (3, 32)]
    assert all(len(point.baseline.generations_ms) == 6 for point in report.latency.points if point.baseline)
    assert report.latency.footprint.multiply_adds_per_token
    (start,) = report.latency.starts
    assert start.peak_host_bytes > 2**20
    again = CliRunner().invoke(cli, ["validate", str(path), "--json", "-q"])
    assert again.exit_code == 0, again.output
    assert json.loads(again.stdout)["report"]["latency"]["points"][0]["artifact"]["encode_ms"]["p50"]["samples"] == 6
    refused = CliRunner().invoke(cli, ["bench", str(path), "--texts", "2", "--prompt-tokens", "300", "-q"])
    assert refused.exit_code == 2
    assert "texts of 300 tokens; this artifact reads at most 256" in refused.output
    sent = CliRunner().invoke(cli, ["bench", str(path), "--texts", "2", "--requests", "6", "--json", "-q"])
    assert sent.exit_code == 0, sent.output
    (first, _) = json.loads(sent.stdout)["points"]
    assert (first["texts"], first["figures"]["completed"], first["figures"]["prompt_tokens"]) == (2, 6, 6 * 2 * 128)


def test_an_embedder_in_int8_passes_the_gates_and_a_budget_is_held(tmp_path: Path) -> None:
    int8 = "quantize-channels: {dtype: int8, activations: per_token, smooth: false, budget: {kld_mean: 0.02}}"
    steps = f"passes: [pack-qkv, {int8}, cpu-kernels: {{budget: {{kld_mean: 0.02}}}}]"
    (tmp_path / "recipe.yaml").write_text(RECIPE.replace("passes: []", steps))
    built = llmforge.build(tmp_path / "recipe.yaml", out=tmp_path / "artifacts")
    report = records.read(llmforge.load(built.path).artifact)
    assert {gate.verdict for gate in report.gates} == {Verdict.PASS}
    losses = [done.verification.kld_mean for done in report.passes]
    assert losses[0] is None
    assert all(lost is not None and 0 < lost < 0.001 for lost in losses[1:])
    (tmp_path / "gates.yaml").write_text("gates:\n  retrieval.cosine_mean: {min: 0.999999}\n")
    judged = CliRunner().invoke(cli, ["gate", str(built.path), "--gates", str(tmp_path / "gates.yaml")])
    assert judged.exit_code == 3, judged.output
    assert judged.stderr.rstrip().endswith("hint: other limits: llmforge gate --gates FILE.yaml")  # nothing to bisect
    (tmp_path / "recipe.yaml").write_text(
        RECIPE.replace("passes: []", steps.replace("kld_mean: 0.02", "kld_mean: 1e-9"))
    )
    with pytest.raises(BudgetExceeded, match="pass quantize-channels: mean KLD is") as ended:
        llmforge.build(tmp_path / "recipe.yaml", out=tmp_path / "artifacts")
    assert "retreat" not in str(ended.value.hint)


def test_a_reranker_is_built_measured_loaded_and_served(tmp_path: Path) -> None:
    text = RECIPE.replace("docs-embedder", "docs-reranker").partition("gates:")[0]
    gates = "gates:\n  retrieval.spearman: {min: 0.99}\n  retrieval.ndcg_10: {drop_max: 0.005}\n"
    (tmp_path / "recipe.yaml").write_text(text + gates)
    built = llmforge.build(tmp_path / "recipe.yaml", out=tmp_path / "artifacts")
    model = llmforge.load(built.path)
    retrieval = records.read(model.artifact).retrieval
    assert retrieval is not None
    assert retrieval.kind == "reranker"
    assert retrieval.metrics["retrieval.kendall"].artifact.value > 0.99
    assert retrieval.metrics["retrieval.ndcg_10"].artifact.value > 0.5  # of ten candidates by BM25; at random .45
    query = "how to force a checkpoint by hand"
    documents = ["The list is a compound data type.", "You can force a checkpoint by the command CHECKPOINT."]
    scores = model.score(query, documents)
    assert scores[1] > scores[0]
    with EncoderEngine(model.encoder) as engine, TestClient(serve.create_encoder_app(engine, "docs")) as client:
        made = client.post("/v1/rerank", json={"query": query, "documents": documents}).json()["results"]
    assert [each["index"] for each in made] == [1, 0]
    np.testing.assert_allclose([each["relevance_score"] for each in made], scores[::-1], atol=1e-6)
