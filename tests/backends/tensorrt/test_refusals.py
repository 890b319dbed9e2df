"""The table of refusals says of every cell what TensorRT-RTX's builder says, and says it before a weight is read."""

from __future__ import annotations

from pathlib import Path

import onnx_ir as ir
import pytest

from llmforge import targets
from llmforge.backends import onnx_file
from llmforge.backends.tensorrt import compile_plan, library, refusals
from llmforge.backends.tensorrt.refusals import Feature
from llmforge.base.errors import ForgeError, UnsupportedError
from llmforge.base.progress import Silent
from llmforge.runtime.config import MODEL_FILE

from ...fakes.tensorrt_graphs import GRAPHS

pytestmark = pytest.mark.thorough

pytest.importorskip("tensorrt_rtx")

RTX = library.of_backend("tensorrt-rtx")
TARGETS = {"75": "t4", "80": "a100-80", "86": "a10g", "89": "rtx-4090", "120": "rtx-5090"}


def test_every_feature_has_a_rule_and_a_graph() -> None:
    assert set(Feature) == set().union(*(features for _, features in GRAPHS.values()))


@pytest.mark.parametrize("name", GRAPHS)
def test_the_table_agrees_with_the_builder(name: str, tmp_path: Path) -> None:
    make, features = GRAPHS[name]
    model = make()
    assert {feature for feature, _ in refusals.features(model)} == features
    onnx_file.write(model, tmp_path, Silent())
    for sm, target in TARGETS.items():
        refused = {feature for feature in features if feature.value.refuses(sm)}
        said = refusal(model, target)
        assert (said is not None) is bool(refused)
        if said is not None:
            assert f"(SM{sm})" in said.message
            assert all(feature.value.named in said.message for feature in refused)
            assert all(feature.value.hint in (said.hint or "") for feature in refused)
        assert builds(model, tmp_path, sm) is not bool(refused), f"SM{sm}: the table and the builder disagree"


def refusal(model: ir.Model, target: str) -> UnsupportedError | None:
    try:
        refusals.check(model, targets.load(target), RTX.title)
    except UnsupportedError as error:
        return error
    return None


def builds(model: ir.Model, folder: Path, sm: str) -> bool:
    plan = folder / f"{sm}.plan"
    try:
        compile_plan.build(RTX, folder / MODEL_FILE, model, plan, sm=sm, profiles=())
    except ForgeError:
        return False
    return plan.stat().st_size > 10_000
