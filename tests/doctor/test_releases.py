"""A release of transformers that nobody knows is proven by a command, and passes from then on."""

from __future__ import annotations

import json
from importlib import metadata
from pathlib import Path

import onnx_ir as ir
import pytest
import transformers
from click.testing import CliRunner

from llmforge import trace
from llmforge.base.errors import VerificationError
from llmforge.base.progress import Silent
from llmforge.checkpoint import Checkpoint, versions
from llmforge.cli import cli
from llmforge.doctor import releases
from llmforge.trace.hooks import table

ONE = {"llama": releases.TYPES["llama"]}


@pytest.fixture
def unknown(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> str:
    """Let the installed release be one that llmforge was not proven with."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    asked = metadata.version
    monkeypatch.setattr(metadata, "version", lambda package: "5.24.0" if package == "transformers" else asked(package))
    return "5.24.0"


def test_the_command_lets_a_release_pass(unknown: str, tiny_checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runner = CliRunner()
    before = runner.invoke(cli, ["trace", str(tiny_checkpoint)])
    assert before.exit_code == 8
    assert "llmforge doctor --prove-transformers" in " ".join(before.output.split())

    monkeypatch.setattr(releases, "TYPES", ONE)
    monkeypatch.setattr(releases.prove, "__defaults__", (ONE,))
    proven = runner.invoke(cli, ["doctor", "--prove-transformers"])

    assert proven.exit_code == 0, proven.output
    assert f"transformers {unknown}: {len(table.HOOKS)} hooks are there" in proven.stdout
    assert "llama: trace: logits match transformers within" in proven.stdout
    written = json.loads(Path(proven.stdout.splitlines()[-1]).read_text())
    assert written["proof"]["transformers"] == unknown
    assert written["hooks"] == table.digests()
    Checkpoint.open(tiny_checkpoint)


def test_a_release_whose_graphs_are_wrong_is_not_written_down(unknown: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(checkpoint: Checkpoint) -> ir.Model:
        graph = traced(checkpoint)
        next(node for node in graph.graph if node.op_type == "Attention").attributes["window"] = ir.AttrInt64(
            "window", 3
        )
        return graph

    traced = trace.trace
    monkeypatch.setattr(trace, "trace", wrong)
    with pytest.raises(VerificationError, match=rf"^transformers {unknown}, llama: "):
        releases.prove(Silent(), ONE)
    assert not versions.record_of(unknown).exists()


def test_a_release_without_a_hook_is_refused_by_its_name(unknown: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(transformers.masking_utils, "eager_mask")
    with pytest.raises(VerificationError, match=r"transformers\.masking_utils:eager_mask is what .* and is gone"):
        releases.prove(Silent(), {})
    assert not versions.record_of(unknown).exists()


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.filterwarnings("ignore")
def test_the_installed_release_is_proven_by_its_command(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    proof = releases.prove(Silent())
    assert proof.known
    assert not proof.changed
    assert proof.types.keys() == releases.TYPES.keys()
