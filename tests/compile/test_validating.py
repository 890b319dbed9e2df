"""A published artifact measured again: one more record of evidence, and documents until its gates are decided."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from llmforge.artifact import Artifact
from llmforge.cli import cli
from llmforge.gates import records


def invoke(*args: object) -> Result:
    result = CliRunner().invoke(cli, [str(word) for word in args])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result


@pytest.mark.thorough
def test_measured_again_and_until_it_is_decided(
    tmp_path: Path, sample_checkpoint: Path, data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LLMFORGE_ARTIFACTS", str(tmp_path / "store"))
    recipe = {
        "schema": 1, "name": "tiny", "checkpoint": str(sample_checkpoint), "target": "local",
        "engine": {"max_context": 128, "threads": 1}, "passes": ["fuse-norms"],
        "validation": {"quality": {"data": str(data / "evaluation.jsonl"), "context": 128, "max_tokens": 300}},
        "gates": {"kld_mean": {"max": 0.01, "rise_max": 0.001}},
    }  # fmt: skip
    file = tmp_path / "recipe.yaml"
    file.write_text(json.dumps(recipe))
    built = invoke("build", file, "--quiet")
    assert built.exit_code == 4, built.output  # three documents
    assert "decided by `llmforge gate`, not by this build" in " ".join(built.stdout.split())
    path = Path(built.stdout.splitlines()[-1])
    reference = f"tiny/{path.name}"

    again = invoke("validate", reference, "--recipe", file, "--quiet")
    assert again.exit_code == 4, again.output
    opened = Artifact.open(path)
    assert len(opened.evidence) == 2
    first, second = (records.read(opened, record) for record in opened.evidence)
    assert second.quality == first.quality  # one thread: the same numbers
    assert second.notes[:-1] == first.notes
    assert second.notes[-1].startswith("measured again on")
    assert invoke("verify", reference).exit_code == 0
    assert (path / opened.evidence[1].home / "report/report.html").is_file()

    assert invoke("gate", reference, "--against", reference).exit_code == 4
    options = ("--until-decided", "--recipe", file, "--max-documents", 16, "--json")
    done = invoke("gate", reference, "--against", reference, *options)
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout)
    assert [look["documents"] for look in found["looks"]] == [8]
    assert found["paired_documents"] == 8
    assert found["alpha"] == pytest.approx(0.0125)  # half of the documents that there may be
    assert not found["post_hoc"]

    other = json.dumps({**recipe, "passes": []})
    (tmp_path / "other.yaml").write_text(other)
    assert invoke("validate", reference, "--recipe", tmp_path / "other.yaml").exit_code == 2
    used = invoke("gate", reference, "--against", "none", *options[:-3], "--max-documents", 2)
    assert used.exit_code == 5
    assert "there are no further ones up to" in used.stderr
