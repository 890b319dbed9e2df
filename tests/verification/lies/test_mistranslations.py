"""Every mistranslation is refused, by the name of what is wrong: of models that run whole, and of those in part.

The sample is tested by default, the others are slow. `FRONTEND` are mistakes of the frontend itself, from which a wrong
graph comes; those of `TABLE` are planted into a right one.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx_ir as ir
import pytest
import torch

from llmforge.base.errors import UnsupportedError, VerificationError
from llmforge.checkpoint import Checkpoint
from llmforge.trace import trace
from llmforge.trace.export import weights
from llmforge.trace.export.limits import WHOLE_BYTES
from llmforge.trace.hooks import attention, experts, masks, norms, rotary
from llmforge.verification.trace_verifier import verify_trace

from . import mistranslations
from .mistranslations import LONG_ROPE, MODELS, SAMPLE, TABLE, WINDOWS

pytestmark = pytest.mark.xdist_group("mistranslations")  # traces take seconds: they are made once

WHOLE, IN_PARTS = WHOLE_BYTES, 1  # bytes up to which a model runs whole


@pytest.fixture(scope="module")
def traced(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Checkpoint, ir.Model]]:
    """Give the checkpoint of a model of `MODELS` and its right graph, which nobody may change."""

    @functools.cache
    def make(model: str) -> tuple[Checkpoint, ir.Model]:
        checkpoint = Checkpoint.open(mistranslations.write(model, tmp_path_factory.mktemp("model")))
        return checkpoint, trace(checkpoint)

    return make


Traced = Callable[[str], tuple[Checkpoint, ir.Model]]


# Mistranslations that the sample, run whole, shows by default, too; the others there are for the thorough tests.
QUICK = {"pairs of rotary embedding", "head untied", "no positions in one layer"}


def _cases() -> list[object]:
    found: list[object] = []
    for name, mistranslation in TABLE.items():
        for model in mistranslation.models:
            for how, whole in (("whole", WHOLE), ("in parts", IN_PARTS)):
                later = [] if how == "in parts" or name in QUICK else [pytest.mark.thorough]
                marks = later if model == SAMPLE else [pytest.mark.slow]
                found.append(pytest.param(name, model, whole, marks=marks, id=f"{name}-{model}-{how}"))
    return found


def test_there_are_enough() -> None:
    assert len(TABLE) + len(FRONTEND) >= 40
    assert {model for each in TABLE.values() for model in each.models} == set(MODELS)
    assert {name for name, each in TABLE.items() if SAMPLE in each.models} > QUICK


@pytest.mark.parametrize("whole", [WHOLE, IN_PARTS])
@pytest.mark.parametrize(
    "model", [pytest.param(model, marks=[] if model == SAMPLE else [pytest.mark.slow]) for model in MODELS]
)
def test_a_right_graph_is_proven(model: str, whole: int, traced: Traced) -> None:
    checkpoint, graph = traced(model)
    proof = verify_trace(checkpoint, graph, whole_bytes=whole)
    assert proof.layers == (mistranslations.LAYERS if whole == WHOLE else 3)
    assert proof.max_abs_difference <= proof.allowed / 4
    assert proof.parameters >= 6 * mistranslations.LAYERS  # of which some hold several


@pytest.mark.parametrize(("name", "model", "whole"), _cases())
def test_a_wrong_graph_is_refused_by_name(name: str, model: str, whole: int, traced: Traced) -> None:
    checkpoint, graph = traced(model)
    wrong = graph.clone()
    TABLE[name].spoil(wrong)
    with pytest.raises(VerificationError) as caught:
        verify_trace(checkpoint, wrong, whole_bytes=whole)
    assert caught.value.exit_code == 7
    assert re.search(TABLE[name].names, caught.value.message), caught.value.message


def _wrong_windows(patch: pytest.MonkeyPatch) -> None:
    """Masks are never windows."""
    patch.setattr(attention.masks, "classify", lambda function, positions: masks.Mask(0))


def _wrong_epsilon(patch: pytest.MonkeyPatch) -> None:
    """Epsilons of norms are ten times what they are."""
    right = norms.emitter
    patch.setattr(norms, "emitter", lambda module, offset, epsilon: right(module, offset, 10 * epsilon))


def _wrong_tables(patch: pytest.MonkeyPatch) -> None:
    """Rotary tables repeat themselves from position 24 on."""
    right = rotary.table_rows

    def rows(*given: object) -> object:
        chunks = right(*given)  # type: ignore[arg-type]
        return [
            tuple(torch.cat([part[:, :24], part[:, : part.shape[1] - 24]], 1) for part in chunk) for chunk in chunks
        ]

    patch.setattr(rotary, "table_rows", rows)


def _wrong_switch(patch: pytest.MonkeyPatch) -> None:
    """A long text begins twice as late."""
    right = rotary.find_switch
    patch.setattr(rotary, "find_switch", lambda *given: 2 * right(*given))


def _wrong_limit(patch: pytest.MonkeyPatch) -> None:
    """Experts have no limit."""
    right = experts.probe

    def probe(module: torch.nn.Module) -> experts.ExpertActivation:
        found = right(module)
        return experts.ExpertActivation(**{**vars(found), "limit": 0.0})

    patch.setattr(experts, "probe", probe)


def _wrong_tensors(patch: pytest.MonkeyPatch) -> None:
    """Two layers get each other's values, in the plan that the proof is made by, too."""
    right = weights.plan

    def plan(*given: object) -> weights.WeightPlan:
        made = right(*given)  # type: ignore[arg-type]
        a, b = (f"model.layers.{layer}.self_attn.v_proj.weight" for layer in (1, 4))
        made[a], made[b] = made[b], made[a]
        return made

    patch.setattr(weights, "plan", plan)


def _wrong_cast(patch: pytest.MonkeyPatch) -> None:
    """The last rows of the embeddings are zeros."""
    right = weights.tensor_of

    def tensor_of(
        checkpoint: object, source: weights.ParameterSource, *given: object, **how: object
    ) -> ir.TensorProtocol:
        made = right(checkpoint, source, *given, **how)  # type: ignore[arg-type]
        if source.tensors[0] != "model.embed_tokens.weight":
            return made
        array = np.array(made.numpy())
        array[-8:] = 0
        return ir.tensor(array, name=made.name)

    patch.setattr(weights, "tensor_of", tensor_of)


FRONTEND: dict[str, tuple[Callable[[pytest.MonkeyPatch], None], str, str]] = {
    "no windows": (_wrong_windows, WINDOWS, r"layers\.0\b.*shows the token"),
    "epsilon": (_wrong_epsilon, SAMPLE, r"layers\.0\.input_layernorm.*epsilon"),
    "rotary tables": (_wrong_tables, SAMPLE, "position 24 of a text"),
    "long rope": (_wrong_switch, LONG_ROPE, "is no rotary embedding"),  # the frontend itself sees it
    "no limit": (_wrong_limit, mistranslations.EXPERTS, r"first diverging layer: model\.layers"),
    "tensors": (_wrong_tensors, SAMPLE, "v_proj"),
    "cast": (_wrong_cast, SAMPLE, "embed_tokens"),
}


@pytest.mark.parametrize("whole", [WHOLE, IN_PARTS])
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name == "tensors" else [pytest.mark.slow]) for name in FRONTEND]
)
def test_a_mistake_of_the_frontend_is_refused(
    name: str, whole: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mistake, model, names = FRONTEND[name]
    checkpoint = Checkpoint.open(mistranslations.write(model, tmp_path))
    mistake(monkeypatch)
    with pytest.raises((VerificationError, UnsupportedError), match=rf"(?s){names}"):
        verify_trace(checkpoint, trace(checkpoint), whole_bytes=whole)
