"""`llmforge mlflow` through MLflow's own client, into its store of files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from llmforge.artifact import Artifact
from llmforge.cli import cli
from llmforge.gates import records
from llmforge.report import mlflow_run

from ..samples import stored

NEEDS = "the extra `mlflow` is not installed"
RECIPE = {"engine": {"max_batch": 8}, "passes": ["fuse-norms", {"quantize-weights": {"bits": 4, "names": ["a", "b"]}}]}


@pytest.fixture
def artifact(tmp_path: Path) -> Artifact:
    return stored.put(tmp_path / "artifacts", gates={**stored.PASSES, **stored.UNDECIDED})


def test_figures_have_their_intervals(artifact: Artifact) -> None:
    report = records.read(artifact)
    found = mlflow_run.metrics(report)
    assert report.quality is not None
    kld = report.quality.figures["kld_mean"]
    assert (found["kld_mean"], found["kld_mean.low"], found["kld_mean.high"]) == (kld.value, kld.low, kld.high)
    assert all(isinstance(value, float) for value in found.values())
    assert len(found) > 20


def test_options_are_parameters_by_their_paths() -> None:
    assert mlflow_run.parameters(RECIPE) == {
        "engine.max_batch": "8",
        "passes.0": "fuse-norms",
        "passes.1.quantize-weights.bits": "4",
        "passes.1.quantize-weights.names": "['a', 'b']",
    }
    assert len(mlflow_run.parameters({"a": "x" * 9000})["a"]) <= 6000


def test_tags_are_lineage_and_verdicts(artifact: Artifact) -> None:
    found = mlflow_run.tags(artifact, records.read(artifact))
    assert found["llmforge.artifact"] == f"tiny/{artifact.path.name}"
    assert found["llmforge.content"] == artifact.manifest.content_digest
    assert found["llmforge.checkpoint.digest"] == stored.CHECKPOINT
    assert found["llmforge.gate.kld_mean.max"] == "inconclusive"
    assert found["llmforge.gate.tpot_p50_ms.max"] == "pass"
    assert found["llmforge.verdict"] == "inconclusive"


def mlflow(artifact: Artifact, *options: str) -> Result:
    return CliRunner().invoke(cli, ["mlflow", str(artifact.path), *options])


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    pytest.importorskip("mlflow", reason=NEEDS)
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    return f"file://{tmp_path / 'runs'}"


@pytest.mark.filterwarnings("ignore")  # of MLflow's own
def test_a_run_has_all_of_it_and_is_written_once(artifact: Artifact, store: str, tmp_path: Path) -> None:
    from mlflow import MlflowClient

    result = mlflow(artifact, "--experiment", "releases", "--tracking-uri", store, "--run-name", "candidate")
    assert result.exit_code == 0, result.output
    client = MlflowClient(tracking_uri=store)
    run: Any = client.get_run(result.stdout.strip())
    assert run.info.status == "FINISHED"
    assert run.info.run_name == "candidate"
    report = records.read(artifact)
    assert run.data.metrics == pytest.approx(mlflow_run.metrics(report))
    assert run.data.params == mlflow_run.parameters(artifact.manifest.recipe)
    assert mlflow_run.tags(artifact, report).items() <= run.data.tags.items()
    kept = client.download_artifacts(run.info.run_id, "llmforge", str(tmp_path))
    for path in ("manifest.json", "report/report.html", artifact.evidence[-1].path):
        assert (Path(kept) / path).read_bytes() == (artifact.path / path).read_bytes()
    assert not (Path(kept) / "engine").exists()
    again = mlflow(artifact, "--experiment", "releases", "--tracking-uri", store, "--json")
    assert json.loads(again.stdout) == {
        "experiment": run.info.experiment_id, "run": run.info.run_id, "made": False,
    }  # fmt: skip
    assert len(client.search_runs([run.info.experiment_id])) == 1
    client.delete_experiment(run.info.experiment_id)
    assert mlflow(artifact, "--experiment", "releases", "--tracking-uri", store).exit_code == 2


@pytest.mark.filterwarnings("ignore")
def test_a_server_that_is_not_there(artifact: Artifact, store: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    result = mlflow(artifact, "--tracking-uri", "http://127.0.0.1:9")
    assert result.exit_code == 8, result.output
    assert "MLFLOW_TRACKING_URI" in result.output


def test_without_the_extra_it_says_how_to_get_it(artifact: Artifact, monkeypatch: pytest.MonkeyPatch) -> None:
    from llmforge.base import extras

    monkeypatch.setattr(extras, "missing", lambda extra: ["mlflow-skinny"])
    result = mlflow(artifact)
    assert result.exit_code == 8
    assert "pip install 'llmforge[mlflow]'" in result.output
