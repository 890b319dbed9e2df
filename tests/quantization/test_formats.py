"""Formats: names, and the bits that a number takes with its share of scales and zero points."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest

from llmforge.quantization import formats, methods
from llmforge.quantization.grid import Grid
from llmforge.quantization.grids import pack
from llmforge.quantization.statistics import exclusion

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    ("grid", "name"), [(Grid(4, 32, False), "int4-block32-asymmetric"), (Grid(8, 64, True), "int8-block64")]
)
def test_bits_are_those_of_a_packed_matrix(grid: Grid, name: str) -> None:
    packed = pack(methods.PLAIN().quantize(np.eye(16, 128, dtype=np.float32), grid))
    stored = sum(part.nbytes for part in (packed.codes, packed.scales, packed.zero_points) if part is not None)
    assert grid.format.bits_per_number == 8 * stored / (16 * 128)
    assert grid.format.name == name
    assert grid.format in formats.BLOCKS


def test_formats_of_channels_and_of_fp4() -> None:
    assert (formats.INT8_CHANNEL.name, formats.INT8_CHANNEL.bits_per_number) == ("int8-channel", 8)
    assert (formats.FP8_CHANNEL.name, formats.FP8_CHANNEL.bits_per_number) == ("fp8-channel", 8)
    assert formats.NVFP4.bits_per_number == 4.5


def test_exclusion_says_what_and_by_which_glob() -> None:
    names = ["model.layers.0.mlp.up_proj.weight", "lm_head.weight"]
    assert exclusion(names, ("*.down_proj.*", "lm_*")) == "lm_head.weight is excluded by 'lm_*'"
    assert exclusion(names, ("LM_*",)) is None
    assert exclusion([], ("*",)) is None


def test_a_method_is_known_in_its_file_and_in_the_tuple_alone() -> None:
    own = ROOT / "llmforge" / "quantization" / "methods"
    for method in methods.METHODS:
        word = re.compile(rf"\b{re.escape(method.name)}\b", re.IGNORECASE)
        sources = [path for folder in ("llmforge", "passes", "targets") for path in (ROOT / folder).rglob("*.py")]
        # layouts of checkpoints are called like methods, and `llmforge init` writes recipes
        other = (
            *(
                ROOT / "llmforge" / name
                for name in (
                    "checkpoint",
                    "planning/starting.py",
                    "calibration/quantize.py",
                    "calibration/asked.py",
                    "calibration/driver.py",
                    "calibration/pricing.py",
                    "planning/building.py",
                    "calibration/demands.py",
                    "rewrite/weight_proposals.py",
                )
            ),
            *(ROOT / "passes" / f"quantize_{name}.py" for name in ("channels", "fp4")),  # which round to nearest alone
        )
        mine = [path for path in sources if not any(path.is_relative_to(place) for place in other)]
        knowing = {path.resolve() for path in mine if word.search(path.read_text())}
        assert knowing == {own / f"{method.name.replace('-', '_')}.py", own / "__init__.py"}
