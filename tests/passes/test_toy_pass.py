"""A pass is one file and its line in the tuple: `plan` shows its effect, `init` proposes it, a recipe runs it."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, ClassVar

import onnx_ir as ir
import pytest
from pydantic import Field
from pydantic.dataclasses import dataclass

from llmforge import passes, targets
from llmforge.checkpoint.encoding import Encoding
from llmforge.planning import encoders, render, request, starting
from llmforge.planning.render import Planned
from llmforge.planning.request import PlanRequest
from llmforge.recipe import Recipe
from llmforge.rewrite import declared
from llmforge.rewrite.pass_base import Budget, Changes, Context, Numerics, Pass
from llmforge.rewrite.traits import Deployment, FewerKernels, Prediction, Proposal, Storage

from ..models.shapes import PUBLIC
from ..planning.test_starting import measured

GIVEN = {"checkpoint": "llama", "target": "cpu-avx2", "calibration": "a.jsonl", "evaluation": "b.jsonl"}


@dataclass(frozen=True)
class ToyWeights(Pass):
    """Store weights in 4 bits, by a way of its own."""

    name: ClassVar[str] = "toy-weights"
    numerics: ClassVar[Numerics] = Numerics.LOSSY

    budget: Annotated[Budget, Field(description="quality budget of the pass")]
    strength: Annotated[int, Field(ge=1, le=9, description="how strong")] = 1

    @classmethod
    def predicts(cls, there: Deployment) -> Iterable[Prediction]:
        yield Prediction("toy-weights, strength: 3", Storage(weights="int4", product="int8", block=0))

    @classmethod
    def proposes(cls, there: Deployment) -> Iterable[Proposal]:
        stores, change = Storage(weights="int4", product="int8", block=0), "toy-weights, strength: 3"
        yield Proposal("strength: 3, {budget}", 0.02, stores, change, bits=2)

    @classmethod
    def proposes_to_encode(cls, there: Deployment) -> Iterable[Proposal]:
        yield Proposal("strength: 2, {budget}", 0.01, Storage(weights="int4", block=0), reason="for texts")

    def stores(self, stored: object) -> Storage:
        return Storage(weights="int4", product="int8", block=0)

    def run(self, model: ir.Model, context: Context) -> Changes:
        return Changes()


@dataclass(frozen=True)
class ToyKernels(Pass):
    """Save half of the kernels of a layer."""

    name: ClassVar[str] = "toy-kernels"
    numerics: ClassVar[Numerics] = Numerics.EXACT

    @classmethod
    def predicts(cls, there: Deployment) -> Iterable[Prediction]:
        yield Prediction(cls.name, FewerKernels(4000, "nearly all kernels"))

    @classmethod
    def proposes(cls, there: Deployment) -> Iterable[Proposal]:
        yield Proposal(change=cls.name)

    def run(self, model: ir.Model, context: Context) -> Changes:
        return Changes()


@pytest.fixture
def checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(passes, "ALL", (*passes.ALL, ToyWeights, ToyKernels))
    monkeypatch.setattr(declared, "DECLARED", (*declared.DECLARED, ToyWeights, ToyKernels))
    (tmp_path / "llama").mkdir()
    (tmp_path / "llama" / "config.json").write_text(json.dumps(PUBLIC["llama-3.1-8b"]))
    return tmp_path / "llama"


def test_plan_shows_its_effect(checkpoint: Path) -> None:
    [made] = request.answer(checkpoint, PlanRequest(targets=("h200",)))
    assert isinstance(made, Planned)
    found = {each.change: each for each in made.advice}
    assert found["toy-weights, strength: 3"].verdict == "pays"
    assert found["toy-weights, strength: 3"].tpot == pytest.approx(found["quantize-weights, bits: 4"].tpot, rel=0.1)
    assert found["toy-kernels"].reason == "nearly all kernels"
    assert {"toy-weights, strength: 3", "toy-kernels"} <= {each["change"] for each in render.data(made)["passes"]}


def test_init_proposes_it_and_plan_reads_the_recipe(checkpoint: Path) -> None:
    start = starting.write(checkpoint, measured(targets.load("cpu-avx2")), "size", name="m", given=GIVEN)
    assert "  - toy-weights: {strength: 3, budget: {kld_mean: 0.02}}" in start.yaml
    assert "  - toy-kernels  # nearly all kernels\n" in start.yaml
    assert "quantize-weights" not in start.yaml
    path = checkpoint.parent / "recipe.yaml"
    path.write_text(start.yaml)
    assert [step.name for step in Recipe.load(path).instantiate(passes.ALL)][-2:] == ["toy-weights", "toy-kernels"]
    [made] = request.answer(path, PlanRequest(), lambda target: measured(target))
    assert isinstance(made, Planned)
    assert (made.plan.scheme.weights, made.plan.scheme.product) == ("int4", "int8")


def test_init_proposes_it_to_an_embedder(checkpoint: Path) -> None:
    given = {"name": "m", "checkpoint": "bert", "target": "cpu-avx2"}
    text = encoders.write(Encoding("embedder"), {}, targets.load("cpu-avx2"), given)
    assert "  - toy-weights: {strength: 2, budget: {kld_mean: 0.01}}  # for texts\n" in text
    path = checkpoint.parent / "recipe.yaml"
    path.write_text(text)
    assert [step.name for step in Recipe.load(path).instantiate(passes.ALL)][-1] == "toy-weights"


def test_what_a_shipped_pass_declares_is_read_by_plan_and_init() -> None:
    told = ("predicts", "proposes", "proposes_to_encode", "writes_codes")
    declaring = [step for step in passes.ALL if any(name in base.__dict__ for name in told for base in _own(step))]
    assert [step.name for step in declaring] == [each.name for each in declared.DECLARED]
    assert all(issubclass(step, each) for step, each in zip(declaring, declared.DECLARED, strict=True))


def _own(step: type[Pass]) -> list[type]:
    return [base for base in step.__mro__ if base not in Pass.__mro__]
