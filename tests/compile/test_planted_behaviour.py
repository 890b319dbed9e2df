"""Damage that KLD does not see, in a model that calls tools: gates of behaviour stop it, in a build and in a table."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from benchmarks import planted_damage
from llmforge.artifact import Artifact
from llmforge.cli import cli
from llmforge.gates import records
from llmforge.report import render

from ..samples import plugin_packages, tool_model

CALL = 8194  # <tool_call>
KLD = 0.01
PASS = '''
"""Scale the logit of a token."""
from typing import ClassVar

import numpy as np
import onnx_ir as ir
from pydantic.dataclasses import dataclass

from llmforge.ir import graph
from llmforge.rewrite.pass_base import Budget, Changes, Context, Numerics, Pass, Rewritten


@dataclass(frozen=True)
class ScaleToken(Pass):
    """Scale the logit of a token."""

    name: ClassVar[str] = "scale-token"
    numerics: ClassVar[Numerics] = Numerics.LOSSY
    budget: Budget
    token: int
    factor: float

    def run(self, model: ir.Model, context: Context) -> Changes:
        changes, logits = Changes(), graph.output_named(model, "logits")
        if "factors" in model.graph.initializers:
            return changes
        factors = np.ones(graph.width(logits), np.float32)
        factors[self.token] = self.factor
        scaled = ir.node("Mul", [logits, graph.initializer(model, "factors", factors)], name="scaled")
        graph.insert_behind(logits, [scaled], "unscaled")
        changes.rewritten.append(Rewritten("logits", "one token scaled"))
        return changes
'''


@dataclass(frozen=True)
class Place:
    """Where the checkpoint lies, and the plug-in is installed."""

    folder: Path
    checkpoint: Path


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    folder = tmp_path_factory.mktemp("planted")
    points = {"llmforge.v2.passes": {"scale-token": "scale_token:ScaleToken"}}
    plugin_packages.install(folder / "site", "scale-token", PASS, points)
    with plugin_packages.on_path(folder / "site"):
        yield Place(folder, tool_model.write(folder / "tools"))


def build(place: Place, name: str, passes: list[Any], text: Path) -> tuple[Result, Path]:
    gates: Mapping[str, Mapping[str, float]] = {
        "kld_mean": {"max": KLD},
        "behaviour.tool_decision": {"drop_max": 0.25},
        "behaviour.call_shift": {"max": 1.0},
        "behaviour.answer_odds": {"drop_max": 0.5},
    }
    recipe = {
        "schema": 1, "name": name, "checkpoint": str(place.checkpoint), "target": "local", "passes": passes,
        "engine": {"max_context": 512, "max_batch": 8, "threads": 1}, "gates": gates,
        "validation": {
            "quality": {"data": str(text), "context": 128, "max_tokens": 2048},
            "behaviour": {"data": str(tool_model.CHATS), "of_each_slice": 20},
        },
    }  # fmt: skip
    file = place.folder / f"{name}.yaml"
    file.write_text(json.dumps(recipe))
    out = place.folder / "out"
    result = CliRunner().invoke(cli, ["build", str(file), "--out", str(out), "--quiet"])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result, Path(result.stdout.splitlines()[-1])


@pytest.mark.thorough
def test_a_build_whose_calls_are_less_likely_fails_by_that_gate_alone(place: Place, data: Path) -> None:
    planted = {"scale-token": {"token": CALL, "factor": 0.5, "budget": {"kld_mean": KLD}}}
    result, artifact = build(place, "damaged", ["fuse-norms", planted], data / "evaluation.jsonl")
    assert result.exit_code == 3, result.output
    report = records.read(Artifact.open(artifact))
    assert {each.metric: each.verdict.value for each in report.gates} == {
        "kld_mean": "pass", "behaviour.tool_decision": "pass", "behaviour.call_shift": "fail",
        "behaviour.answer_odds": "pass",
    }  # fmt: skip
    assert "Shift of calls" in render.to_html(report)
    assert "behaviour.call_shift" in result.stderr
    again = CliRunner().invoke(cli, ["verify", str(artifact)])
    assert again.exit_code == 0, again.output
    whole, sound = build(place, "sound", ["fuse-norms"], data / "evaluation.jsonl")
    assert whole.exit_code == 0, whole.output
    moved = CliRunner().invoke(cli, ["diff", str(sound), str(artifact)])
    assert re.search(r"behaviour\.call_shift: .*; worse\)", moved.output)
    history = CliRunner().invoke(cli, ["history", "damaged", "--out", str(place.folder / "out")])
    assert "BEHAVIOUR.CALL_SHIFT" in history.output


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_every_damage_is_caught_and_what_is_sound_passes_on_samples_of_the_chats(place: Place, data: Path) -> None:
    run = planted_damage.prepare(place.checkpoint, tool_model.CHATS, data / "evaluation.jsonl")
    lines = list(planted_damage.table(run, KLD))
    assert lines[0] == "too few chats for: none\n"
    rows = {cells[1]: cells[2:-1] for cells in ([cell.strip() for cell in line.split("|")] for line in lines[3:])}
    assert len(rows) == 9
    passed_kld = set()
    for name, (_, by_kld, caught, samples) in rows.items():
        assert (caught == "–") is name.startswith(planted_damage.HONEST), name
        assert samples == (f"{planted_damage.SAMPLES} of {planted_damage.SAMPLES}" if caught == "–" else "")
        passed_kld |= {name} if by_kld == "pass" and caught != "–" else set()
    assert len(passed_kld) >= 3
