"""A method is one file: this one is registered for a test, and a recipe can name it with no other file touched."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Annotated, Any, ClassVar

import numpy as np
import pytest
from numpy.typing import NDArray
from pydantic import Field
from pydantic.dataclasses import dataclass

from llmforge import passes
from llmforge.base.errors import DataError
from llmforge.calibration import calibrate
from llmforge.checkpoint import Checkpoint
from llmforge.checkpoint.text import TokenWindow
from llmforge.compile import pipeline
from llmforge.passes import quantize_weights
from llmforge.quantization import methods
from llmforge.quantization.formats import BLOCKS, Format
from llmforge.quantization.grid import Grid
from llmforge.quantization.grids import QuantizedMatrix, dequantize
from llmforge.quantization.methods.base import NO_INPUTS, InputStatistic, LayerInputs, Method
from llmforge.quantization.statistics import WeightDemand
from llmforge.recipe import Recipe, json_schema
from llmforge.rewrite import options
from llmforge.rewrite.pass_base import Context
from llmforge.trace import trace

from ..models import graphs

# The method ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class PowersOfTwo(Method):
    """Round each weight to zero or to a power of two, with the scale of a block that its inputs mind least."""

    name: ClassVar[str] = "powers-of-two"
    summary: ClassVar[str] = "round to powers of two"
    formats: ClassVar[tuple[Format, ...]] = tuple(each for each in BLOCKS if not each.zero_points)
    demands: ClassVar[frozenset[InputStatistic]] = frozenset({InputStatistic.MOMENTS})
    remedy: ClassVar[str] = "fewer exponents"

    exponents: Annotated[int, Field(ge=1, le=8, description="largest exponents that are tried for a block")] = 2

    def quantize(self, weight: NDArray[Any], grid: Grid, inputs: LayerInputs = NO_INPUTS) -> QuantizedMatrix:
        """Choose codes 2**(bits - 1) ± 2**i, and scales that are powers of two."""
        assert set(inputs.sums) == self.demands
        (n, k), missing = weight.shape, -weight.shape[1] % grid.block_size
        blocks = np.pad(weight, ((0, 0), (0, missing))).reshape(n, -1, grid.block_size)
        energy = np.pad(inputs.sums[InputStatistic.MOMENTS].diagonal(), (0, missing)).reshape(-1, grid.block_size)
        if not energy.any():
            raise ValueError("its inputs were always 0")
        steps = np.array([0, *(2**i for i in range(grid.bits - 1))], np.float32)
        largest = np.abs(blocks).max(-1)
        top = np.ceil(np.log2(np.where(largest == 0, 1, largest)))
        codes, scales, errors = np.zeros_like(blocks), np.ones_like(top), np.full_like(top, np.inf)
        for below in range(self.exponents):
            scale = np.exp2(top - below) / steps[-1]
            nearest = np.abs(np.abs(blocks / scale[..., None])[..., None] - steps).argmin(-1)
            tried = np.sign(blocks) * steps[nearest]
            error = (np.square(blocks - tried * scale[..., None]) * energy).sum(-1)
            better = error < errors
            codes, scales = np.where(better[..., None], tried, codes), np.where(better, scale, scales)
            errors = np.minimum(error, errors)
        whole = (codes + grid.middle).reshape(n, -1)[:, :k].astype(np.uint8)
        return QuantizedMatrix(grid, whole, scales.astype(np.float32), None)


# The proof ----------------------------------------------------------------------------------------------------------

OPTIONS = {"method": "powers-of-two", "symmetric": True, "exponents": 3, "budget": {"kld_mean": 9.0}}


@pytest.fixture
def registered(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """Add the method to the tuple, as a line in its file would, and import the pass with it."""
    monkeypatch.setattr(methods, "METHODS", (*methods.METHODS, PowersOfTwo))
    spec = importlib.util.spec_from_file_location("quantize_weights_with_a_toy", str(quantize_weights.__file__))
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, spec.name, module)
    spec.loader.exec_module(module)
    known = {cls.name: cls for cls in passes.ALL} | {"quantize-weights": module.QuantizeWeights}
    monkeypatch.setattr(passes, "ALL", tuple(known.values()))
    return module


def are_powers_of_two(weight: NDArray[np.float32]) -> bool:
    mantissas, _ = np.frexp(np.abs(weight))
    return set(np.unique(mantissas)) == {0.0, 0.5}


def test_the_schema_has_it_with_its_option(registered: ModuleType) -> None:
    found = json_schema(passes.ALL)["$defs"]["quantize-weights"]["properties"]
    assert found["method"]["enum"] == ["rtn", "importance", "gptq", "powers-of-two", "auto", "stored"]
    assert found["method"]["description"].count("; powers-of-two: round to powers of two; auto: ") == 1
    assert found["exponents"] == {
        "default": 2,
        "description": "for powers-of-two: largest exponents that are tried for a block",
        "maximum": 8,
        "minimum": 1,
        "title": "Exponents",
        "type": "integer",
    }
    own = json_schema([quantize_weights.QuantizeWeights])["$defs"]["quantize-weights"]["properties"]
    assert own["method"]["enum"] == ["rtn", "importance", "gptq", "auto", "stored"]  # elsewhere it is unknown
    assert "exponents" not in own


def test_a_format_that_it_cannot_give_is_refused(registered: ModuleType) -> None:
    with pytest.raises(ValueError, match="powers-of-two cannot give int4-block32-asymmetric"):
        options.make(registered.QuantizeWeights, {**OPTIONS, "symmetric": False})


def test_calibration_serves_its_demand_and_the_pass_writes_its_codes(
    registered: ModuleType, tiny_checkpoint: Path
) -> None:
    checkpoint, random = Checkpoint.open(tiny_checkpoint), np.random.default_rng(0)
    step = options.make(registered.QuantizeWeights, OPTIONS)
    assert step.demands() == (WeightDemand(PowersOfTwo(exponents=3), Grid(4, 32, True), tables=Grid(8, 32, True)),)
    windows = [TokenWindow(f"d{i}", random.integers(3, 259, 40)) for i in range(3)]
    statistics = calibrate(checkpoint, windows, step.demands())
    assert len(statistics.linears) == 15  # with the embedding, which is the head
    model = trace(checkpoint)
    changes = step.run(model, Context(graphs.TARGET, statistics))
    assert [change.what for change in changes.rewritten].count(
        "powers-of-two, 4 bits, blocks of 32, symmetric, [64, 64]"
    )
    layers = {name: matrix for name, matrix in statistics.linears.items() if "embed_tokens" not in name}  # 8 bits
    for name, matrix in layers.items():
        assert are_powers_of_two(dequantize(matrix)), name
        codes = model.graph.initializers[f"{name}.codes"].const_value
        assert codes is not None
        np.testing.assert_array_equal(codes.numpy().reshape(-1) & 15, matrix.codes.reshape(-1)[::2])


def test_inputs_that_it_refuses_are_named_with_its_remedy(
    tiny_checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(self: Method, weight: NDArray[Any], grid: Grid, inputs: LayerInputs) -> QuantizedMatrix:
        raise ValueError("its inputs were always 0")

    monkeypatch.setattr(PowersOfTwo, "quantize", refuse)
    demand = WeightDemand(PowersOfTwo(), Grid(4, 32, True))
    with pytest.raises(
        DataError, match=r"layers\.0\.self_attn\.q_proj\.weight: .* do not allow method powers-of-two"
    ) as caught:
        calibrate(Checkpoint.open(tiny_checkpoint), [TokenWindow("d", np.arange(3, 30))], [demand])
    assert caught.value.message.endswith(": its inputs were always 0")
    assert caught.value.hint == "give more, or other, calibration text, fewer exponents, or use method: rtn"


def test_a_recipe_is_built_with_it(registered: ModuleType, tiny_checkpoint: Path, tmp_path: Path) -> None:
    lines = [
        {"id": f"{i}", "text": f"pass {i} moves a weight of layer {i} into a block, and a scale"} for i in range(8)
    ]
    (tmp_path / "calibration.jsonl").write_text("\n".join(map(json.dumps, lines)))
    recipe = {
        "schema": 1,
        "name": "toy",
        "checkpoint": str(tiny_checkpoint),
        "target": "local",
        "engine": {"max_context": 64, "threads": 1},
        "calibration": {"data": "calibration.jsonl", "samples": 4, "length": 32},
        "passes": [{"quantize-weights": OPTIONS}],
    }
    (tmp_path / "recipe.yaml").write_text(json.dumps(recipe))  # JSON is YAML
    report = pipeline.build(Recipe.load(tmp_path / "recipe.yaml"), tmp_path / "out").report
    [done] = report.passes
    assert sum(change.what.startswith("powers-of-two, 4 bits") for change in done.rewritten) == 14
    assert done.verification.kld_mean is not None
    assert done.verification.kld_mean > 0
