"""A GGUF file in the place of a folder: traced, planned and built."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from llmforge import trace
from llmforge.checkpoint import Checkpoint
from llmforge.cli import cli
from llmforge.planning import config

from ... import zoo
from ...gguf_files import F16, F32, Q4_0, write


def test_a_traced_file_computes_what_its_checkpoint_does(tmp_path: Path) -> None:
    """Plain numbers, so that nothing but names, orders and configuration can differ."""
    zoo.write("llama", tmp_path / "hf")
    write(tmp_path / "hf", tmp_path / "model.gguf", kind=F32)
    graph = trace.trace(Checkpoint.open(tmp_path / "model.gguf"))
    assert zoo.largest_difference(graph, zoo.reference(tmp_path / "hf"), zoo.SCHEDULES["ragged"]) < 1e-5


def test_its_shape_is_read_for_a_plan(tmp_path: Path, sample_checkpoint: Path) -> None:
    write(sample_checkpoint, tmp_path / "sample.gguf", kind=F16)
    ours, own = config.read(tmp_path / "sample.gguf"), config.read(sample_checkpoint)
    assert (ours.name, ours.layers, ours.parameters) == ("sample", own.layers, own.parameters)


@pytest.mark.slow  # a whole build
def test_a_file_builds_with_its_codes_as_they_are(sample_checkpoint: Path, tmp_path: Path) -> None:
    write(sample_checkpoint, tmp_path / "sample.gguf", kind=Q4_0)
    (tmp_path / "text.jsonl").write_text(json.dumps({"text": "The function returns the length of the list. " * 40}))
    recipe = {
        "schema": 1,
        "name": "sample",
        "checkpoint": "sample.gguf",
        "target": "cpu-generic",
        "engine": {"backend": "onnxruntime", "max_context": 128},
        "passes": [{"quantize-weights": {"method": "stored", "budget": {"kld_mean": 0.01}}}],
        "validation": {"quality": {"data": "text.jsonl", "context": 64}},
    }
    (tmp_path / "recipe.yaml").write_text(json.dumps(recipe))
    built = CliRunner().invoke(
        cli, ["build", str(tmp_path / "recipe.yaml"), "--out", str(tmp_path / "artifacts"), "--json"]
    )
    assert built.exit_code == 0, built.output
    assert "stored, int4-block32-fp16" in built.output
