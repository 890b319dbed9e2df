"""What stands in an artifact beside its content: statement, bill of materials, card."""

from __future__ import annotations

import hashlib
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from huggingface_hub import ModelCard

from llmforge import artifact
from llmforge.base import extras
from llmforge.compile import lock, provenance
from llmforge.compile.lock import CheckpointLock, Lock, TextLock, ThreadsLock
from llmforge.gates.records import Report
from llmforge.metrics.retrieval import results as retrieval
from llmforge.metrics.retrieval.corpus import RetrievalCorpus
from llmforge.report import card
from llmforge.runtime.encoder import EncoderConfig

from ..samples import reports

REPOSITORY, COMMIT = "someone/docs-llama", "0123456789" * 4


def reported() -> Report:
    """A report whose recipe says what the card tells of it."""
    report = reports.make()
    return report.model_copy(update={"recipe": {**report.recipe, "engine": {"max_context": 64, "max_batch": 2}}})


def locked(**changes: Any) -> Lock:
    report = reported()
    facts = {
        "recipe": report.recipe,
        "checkpoint": CheckpointLock(
            name="docs-llama", digest=report.checkpoint.digest, revision=COMMIT, repository=REPOSITORY
        ),
        "texts": (TextLock(role="calibration", name="c.jsonl", sha256="1" * 64, documents=2, ids_sha256="2" * 64),),
        "seeds": {"calibration": 0},
        "code": lock.code(),
        "packages": {"numpy": "2.4.6", "torch": "2.13.0+cpu"},
        "threads": ThreadsLock(calibration=2, blas_core="Haswell"),
        "target": "l4",
        "machine": report.machine,
        "stages": (),
    }
    return Lock(**{**facts, **changes})


@pytest.fixture
def written(tmp_path: Path) -> Path:
    for name in ("engine/model.onnx", "tokenizer/tokenizer.json", "report/report.html"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(name)
    manifest = artifact.seal(tmp_path, recipe={}, checkpoint="c" * 64, target="l4", requires={})
    provenance.write(tmp_path, reported(), locked().with_engine(manifest.files), manifest)
    return tmp_path


def test_none_of_it_is_content(written: Path) -> None:
    counted = list(artifact.records(written, content=True))
    assert counted == ["engine/model.onnx", "tokenizer/tokenizer.json"]


def test_the_statement_is_slsa_provenance_of_the_content(written: Path) -> None:
    found = json.loads((written / "provenance/statement.json").read_text())
    assert (found["_type"], found["predicateType"]) == (
        "https://in-toto.io/Statement/v1",
        "https://slsa.dev/provenance/v1",
    )
    manifest = artifact.seal(written, recipe={}, checkpoint="c" * 64, target="l4", requires={})
    assert {each["name"]: each["digest"]["sha256"] for each in found["subject"]} == {
        path: hashlib.sha256(path.encode()).hexdigest() for path in ("engine/model.onnx", "tokenizer/tokenizer.json")
    } | {"manifest.json": manifest.content_digest}
    definition = found["predicate"]["buildDefinition"]
    assert definition["externalParameters"]["recipe"] == reported().recipe
    assert definition["internalParameters"] == {
        "seeds": {"calibration": 0},
        "threads": {"calibration": 2, "trace": 1, "blas_core": "Haswell"},
    }
    checkpoint, text, package, *others = definition["resolvedDependencies"]
    assert checkpoint["uri"] == f"pkg:huggingface/{REPOSITORY}"
    assert checkpoint["digest"]["gitCommit"] == COMMIT
    assert text == {"name": "calibration: c.jsonl", "digest": {"sha256": "1" * 64}}
    assert package["name"] == "llmforge"
    assert [each["uri"] for each in others] == ["pkg:pypi/numpy@2.4.6", "pkg:pypi/torch@2.13.0%2Bcpu"]
    times = found["predicate"]["runDetails"]["metadata"]
    assert times["startedOn"] <= times["finishedOn"]
    assert all(moment.endswith("Z") for moment in times.values())


def test_the_statement_is_one_that_the_format_s_library_takes(written: Path) -> None:
    statements = pytest.importorskip("in_toto_attestation.v1.statement", reason="it comes with the extra `signing`")
    pb = pytest.importorskip("in_toto_attestation.v1.statement_pb2")
    json_format = pytest.importorskip("google.protobuf.json_format")
    parsed = json_format.Parse((written / "provenance/statement.json").read_text(), pb.Statement())
    statements.Statement.copy_from_pb(parsed).validate()


@pytest.mark.filterwarnings("error")
def test_the_bill_of_materials_validates(written: Path) -> None:
    pytest.importorskip("cyclonedx", reason="the extra `provenance` is not installed")
    from cyclonedx.model.bom import Bom

    text = (written / "provenance/bom.cdx.json").read_text()
    found = json.loads(text)
    assert (found["bomFormat"], found["specVersion"]) == ("CycloneDX", "1.6")
    assert found["metadata"]["component"]["type"] == "machine-learning-model"
    purls = {part["name"]: part.get("purl") for part in found["components"]}
    assert purls["torch"] == "pkg:pypi/torch@2.13.0%2Bcpu"
    assert purls["checkpoint docs-llama"] is None
    assert len(found["components"]) == 5
    assert Bom.from_json(data=found).serial_number.urn == found["serialNumber"]  # type: ignore[attr-defined]
    assert provenance.bill_of_materials(reported(), locked()) + "\n" == text  # no randomness


def test_a_missing_library_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(extras, "missing", lambda extra: ["cyclonedx-python-lib"])
    manifest = artifact.seal(tmp_path, recipe={}, checkpoint="c" * 64, target="l4", requires={})
    provenance.write(tmp_path, reported(), locked(), manifest)
    assert not (tmp_path / "provenance/bom.cdx.json").exists()
    assert "not written: cyclonedx-python-lib was not installed" in (tmp_path / "README.md").read_text()


def test_the_card_is_one_that_the_hub_reads(written: Path) -> None:
    report = reported()
    found = ModelCard((written / "README.md").read_text())
    assert found.data.base_model == REPOSITORY
    assert found.data.pipeline_tag == "text-generation"
    assert found.data.library_name == "llmforge"
    assert found.data.license is None  # nobody said it
    assert found.text.lstrip().startswith(f"# {report.name}\n")
    for done in report.passes:
        assert f"`{done.name}`" in found.text
    assert report.quality is not None
    estimate = report.quality.figures["kld_mean"]
    assert f"{estimate.value:.4g}"[:5] in found.text
    assert "95 % interval" in found.text
    assert COMMIT in found.text
    assert "## Limits" in found.text


def test_the_card_has_figures_that_the_hub_reads(written: Path) -> None:
    report = reported()
    assert report.quality is not None
    results = ModelCard((written / "README.md").read_text()).data.eval_results
    (data,) = {each.dataset_name for each in results}
    assert data.endswith(".jsonl") or data == "validation text"
    found = {each.metric_type: each.metric_value for each in results}
    assert found["kld_mean"] == report.quality.figures["kld_mean"].value
    assert {each.task_type for each in results} == {"text-generation"}
    without = report.model_copy(update={"quality": None})
    assert "model-index" not in card.write(without, repository=None, revision=None)


@pytest.mark.parametrize(
    ("data", "name"),
    [
        ([{"name": "chats.jsonl", "sha256": "1" * 64}, {"name": "docs.jsonl", "sha256": "2" * 64}],
         "chats.jsonl, docs.jsonl"),
        ({"name": "docs.jsonl", "sha256": "2" * 64}, "docs.jsonl"),
        ("texts/docs.jsonl", "docs.jsonl"),
        (None, "validation text"),
    ],
)  # fmt: skip
def test_the_card_names_the_text_that_quality_was_measured_on(data: object, name: str) -> None:
    report = reported()
    recipe = {**report.recipe, "validation": {"quality": {"data": data}}}
    text = card.write(report.model_copy(update={"recipe": recipe}), repository=None, revision=None)
    assert {each.dataset_name for each in ModelCard(text).data.eval_results} == {name}


ENCODER = EncoderConfig("embedder", "mean", normalize=True, dimensions=20, max_tokens=64)
RERANKER = EncoderConfig("reranker", "cls", normalize=False, dimensions=20, max_tokens=64)


def retrieved(*, embedder: bool) -> Report:
    """A report on an encoder, whose retrieval alone was measured."""
    texts, made = tuple(f"text {i}" for i in range(20)), np.eye(20, dtype=np.float32)
    side = retrieval.Side(list(made), np.concatenate([made, made]) if embedder else None)
    corpus = RetrievalCorpus(texts, texts, tuple(frozenset({i}) for i in range(20)))
    found = retrieval.measured(corpus, None, side, side, engine="engine", baseline="checkpoint")
    return reported().model_copy(update={"quality": None, "retrieval": found})


@pytest.mark.parametrize(
    ("encoder", "tag", "endpoint", "asked"),
    [
        (ENCODER, "sentence-similarity", "/v1/embeddings", "embedded the same 20 queries"),
        (RERANKER, "text-ranking", "/v1/rerank", "scored the same candidates of 20 queries"),
    ],
)
def test_the_card_of_an_encoder_says_how_it_serves_and_what_it_finds(
    encoder: EncoderConfig, tag: str, endpoint: str, asked: str
) -> None:
    report = retrieved(embedder=encoder.kind == "embedder")
    found = ModelCard(card.write(report, repository=None, revision=None, encoder=encoder))
    assert found.data.pipeline_tag == tag
    assert "llmforge run" not in found.text
    assert f"llmforge serve .\n# in another terminal:\ncurl http://127.0.0.1:8000{endpoint} -H" in found.text
    assert "Not measured" not in found.text
    assert "## Quality" not in found.text
    assert "\n\n## Retrieval\n\n" in found.text
    assert asked in found.text
    assert "| nDCG@10 | 1.0000 | 1.0000 |" in found.text
    assert "- Retrieval was measured on the queries and passages named above." in found.text
    unmeasured = report.model_copy(update={"retrieval": None})
    text = card.write(unmeasured, repository=None, revision=None, encoder=encoder)
    assert f"pipeline_tag: {tag}" in text
    assert "## Quality\n\nNot measured: the recipe does not ask for it." in text


def test_the_card_of_a_classifier_offers_no_call_that_is_refused() -> None:
    text = card.write(reported(), repository=None, revision=None, encoder=replace(RERANKER, labels=3))
    assert "pipeline_tag: text-classification" in text
    assert "curl" not in text


def test_an_artifact_that_embeds_gets_such_a_card(tmp_path: Path) -> None:
    manifest = artifact.seal(tmp_path, recipe={}, checkpoint="c" * 64, target="l4", requires={})
    provenance.write(tmp_path, retrieved(embedder=True), locked(), manifest, ENCODER)
    assert "/v1/embeddings" in (tmp_path / "README.md").read_text()


def test_without_the_hub_the_card_names_no_base_model() -> None:
    text = card.write(reported(), repository=None, revision=None)
    assert "base_model" not in text
    assert "revision" not in text


def test_markup_in_names_stays_text() -> None:
    report = reported().model_copy(update={"notes": ("<script>alert(1)</script> [x](http://y)",)})
    text = card.write(report, repository=None, revision=None)
    assert "<script>" not in text
    assert "[x](" not in text


@pytest.mark.parametrize("owner", ["someone", None])
def test_the_repository_is_what_the_cache_is_called_by(owner: str | None, tmp_path: Path) -> None:
    name = "--".join(filter(None, ["models", owner, "llama"]))
    folder = tmp_path / name / "snapshots" / COMMIT
    folder.mkdir(parents=True)
    assert lock.repository(folder) == "/".join(filter(None, [owner, "llama"]))
    assert lock.repository(tmp_path) is None
