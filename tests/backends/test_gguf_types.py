"""The types of GGUF as grids: codes that a method chooses lie on them, and are read back as they were chosen."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import llmforge
from llmforge import native, targets
from llmforge.backends.engines import exporter
from llmforge.backends.exported_parameters import KernelBlocks
from llmforge.backends.gguf import packing
from llmforge.base.errors import UnsupportedError
from llmforge.cache import Cache
from llmforge.calibration import Store
from llmforge.calibration.store import LayerResult, StoredMatrices
from llmforge.checkpoint import Checkpoint
from llmforge.checkpoint.gguf import blocks
from llmforge.compile import export_proxy
from llmforge.passes import QuantizeWeights
from llmforge.quantization import allocation, codebook, cpu_layout
from llmforge.quantization.formats import GGUF
from llmforge.quantization.grid import Grid, gguf_type
from llmforge.quantization.grids import Float32, QuantizedMatrix, dequantize, round_to_nearest, split, stored
from llmforge.quantization.initializers import LazyMatrix, arrange, readable
from llmforge.quantization.methods.gptq import Curvature, gptq
from llmforge.quantization.methods.importance import columns_of
from llmforge.quantization.rounding import choose
from llmforge.recipe import EngineSpec
from llmforge.rewrite.pass_base import Budget, Context

from ..rewrite.test_cpu_kernels import linear

LOCAL, SPEC = targets.local(), EngineSpec(backend="gguf", max_context=64)
BY_NAME = {kind.name: kind for kind in blocks.TYPES.values()}
NAMES = ["Q3_K", "Q4_K", "Q5_K", "Q6_K", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q2_K", "IQ4_XS", "IQ4_NL"]
GRIDS = dict(zip(NAMES, allocation.GGUF, strict=True))
K = 512
WIDTHS = dict.fromkeys(NAMES, K) | {"IQ4_NL": 480}  # of rows that superblocks do not divide


def drawn(seed: int, n: int = 40, spread: float = 0.05, k: int = K) -> Float32:
    weight = (spread * np.random.default_rng(seed).standard_normal((n, k))).astype(np.float32)
    weight[0, : k // 2] = 0
    weight[1] *= 1e-4
    return weight


def moments(seed: int, k: int = K) -> Float32:
    generator = np.random.default_rng(seed)
    mixing = generator.standard_normal((k, k)) * np.arange(1, k + 1)[:, None] ** -0.3
    inputs = (generator.standard_normal((2048, k)) @ mixing).astype(np.float32)
    found: Float32 = inputs.T @ inputs
    return found


def lost(weight: Float32, matrix: QuantizedMatrix, hessian: Float32) -> float:
    error = (weight - dequantize(matrix)).astype(np.float64)
    return float(np.einsum("nk,nk->", error @ hessian, error))


def read_back(matrix: QuantizedMatrix) -> Float32:
    kind = packing.type_of(matrix.grid, matrix.shape[1])
    assert kind is not None
    packed = packing.pack(matrix)
    assert packed.nbytes == allocation.size_bytes(*matrix.shape, matrix.grid)
    found: Float32 = blocks.dequantize(packed.reshape(-1), BY_NAME[kind], matrix.shape)
    return found


def test_each_type_is_a_grid_and_takes_its_bits() -> None:
    assert {grid.format for grid in GRIDS.values()} == set(GGUF)
    for name, grid in GRIDS.items():
        assert packing.type_of(grid, WIDTHS[name]) == name
        assert allocation.fits([8], WIDTHS[name], grid)
        assert grid.format.bits_per_number == BY_NAME[name].bits


@settings(max_examples=30, deadline=None)
@given(name=st.sampled_from(NAMES), seed=st.integers(0, 100), spread=st.sampled_from([1e-6, 0.05, 30.0]))
def test_rounding_to_nearest_is_read_back(name: str, seed: int, spread: float) -> None:
    matrix = round_to_nearest(drawn(seed, 3, spread, WIDTHS[name]), GRIDS[name])
    assert np.array_equal(read_back(matrix), dequantize(matrix))


@pytest.mark.parametrize("name", NAMES)
def test_codes_chosen_by_calibration_are_read_back_and_lose_less(name: str) -> None:
    """Measured: .34 to .41 of what rounding to nearest loses."""
    weight, hessian, grid = drawn(0, k=WIDTHS[name]), moments(1, WIDTHS[name]), GRIDS[name]
    generator = np.random.default_rng(2).standard_normal((len(weight), 64)).astype(np.float32)
    curvature = Curvature.of(hessian, 0.01)
    nearest = lost(weight, round_to_nearest(weight, grid), hessian)
    for outputs in ((), (generator @ generator.T,)):  # rows again, from grids that are there
        matrix = gptq(weight, curvature, grid, outputs)
        assert np.array_equal(read_back(matrix), dequantize(matrix))
        assert lost(weight, matrix, hessian) < (0.6 if outputs else 0.45) * nearest


@pytest.mark.parametrize("name", NAMES)
def test_codes_chosen_by_mean_and_squares_are_read_back(name: str) -> None:
    inputs = np.random.default_rng(3).standard_normal((2, WIDTHS[name])).astype(np.float32)
    columns = columns_of(inputs[0], np.square(inputs[0]) + np.square(inputs[1]))
    matrix, _ = choose(drawn(4, k=WIDTHS[name]), columns, GRIDS[name], steps=20, sweeps=0)
    assert np.array_equal(read_back(matrix), dequantize(matrix))


def test_scales_that_are_no_codes_under_a_superscale_are_refused() -> None:
    scales = np.random.default_rng(5).random((2, K // 32), np.float32)
    with pytest.raises(ValueError, match="not rounded to int6-fp16"):
        split(scales, gguf_type(4))
    codes, _ = split(stored(scales, gguf_type(4)), gguf_type(4))
    assert codes.min() >= 1
    assert codes.max() <= 63


@pytest.mark.parametrize("bits", [3, 4, 5, 6, 8])
@pytest.mark.parametrize("kind", ["symmetric", "points", "minima"])
@pytest.mark.parametrize("scale", ["fp16", "fp32"])
def test_the_layout_of_the_kernels_is_undone(bits: int, kind: str, scale: Any) -> None:
    grid = Grid(bits, 32, kind == "symmetric", scale, minimums=kind == "minima")
    matrix = round_to_nearest(drawn(6, 37), grid)
    arranged = cpu_layout.arrange(matrix.codes, matrix.scales, matrix.zero_points, grid, matrix.minimums)
    again = cpu_layout.read(arranged, *matrix.shape, grid)
    assert np.array_equal(again.codes, matrix.codes)
    assert np.array_equal(dequantize(again), dequantize(matrix))


@pytest.mark.skipif(native.library() is None, reason="the CPU kernels are not compiled")
@pytest.mark.parametrize("name", ["Q2_K", "IQ4_XS", "IQ4_NL"])
def test_kernels_compute_with_the_numbers_of_a_type_that_they_hold_in_more_bits(name: str) -> None:
    matrix = round_to_nearest(drawn(7, k=WIDTHS[name]), GRIDS[name])
    lazy = readable(LazyMatrix(lambda: matrix, *matrix.shape, matrix.grid))
    held = lazy.calculate()
    assert held.grid == lazy.grid != matrix.grid
    assert packing.type_of(held.grid, WIDTHS[name]) == name
    again = cpu_layout.read(arrange(held), *held.shape, held.grid)
    assert np.array_equal(packing.pack(again), packing.pack(matrix))
    x = np.random.default_rng(8).standard_normal((3, WIDTHS[name])).astype(np.float32)
    wanted = x @ dequantize(matrix).T
    assert np.abs(linear(held, x, terms=2) - wanted).max() < 1e-3 * np.abs(wanted).max()


def test_codes_that_are_no_levels_of_the_codebook_are_refused() -> None:
    [codes] = codebook.of_bytes(codebook.as_bytes(np.arange(16, dtype=np.uint8)[None]))
    assert codes.tolist() == list(range(16))
    for level in (1, 241, 255):
        with pytest.raises(ValueError, match="no levels of the codebook"):
            codebook.of_bytes(np.array([[0, level]], np.uint8))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"bits": 2}, "2 bits go with minima, blocks of 16"),
        ({"bits": 4, "block_size": 32, "scale": "int4-fp16"}, "2 bits go with minima, blocks of 16"),
        ({"codebook": True, "bits": 5, "scale": "fp16"}, "a codebook has 4 bits"),
        ({"codebook": True, "symmetric": False, "scale": "fp16"}, "a codebook has 4 bits"),
        ({"codebook": True, "block_size": 64, "scale": "fp16"}, "a codebook has 4 bits"),
    ],
)
def test_grids_that_no_type_has_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Grid(**{"bits": 4, "block_size": 32, "symmetric": True, **options})


def test_int8_scales_are_not_read_back() -> None:
    with pytest.raises(ValueError, match="is not read back"):
        cpu_layout.read(np.zeros((1, 64), np.uint8), 16, 256, Grid(4, 32, True, "int8"))


@pytest.mark.parametrize(
    ("bits", "k", "name"),
    [(3, 256, "Q3_K"), (3, 288, "Q4_0"), (4, 256, "Q4_K"), (4, 288, "Q4_1"), (5, 576, "Q5_1"), (6, 576, "Q8_0")],
)
def test_rows_that_superblocks_do_not_divide_have_blocks_of_32(bits: int, k: int, name: str) -> None:
    assert packing.type_of(gguf_type(bits).of_rows(k), k) == name


# --- by the pass -----------------------------------------------------------------------------------------------------


def step(**changes: Any) -> QuantizeWeights:
    return QuantizeWeights(budget=Budget(kld_mean=1.0), **{"codes": "gguf", "method": "rtn", **changes})


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"symmetric": True}, "blocks and scales of its own"),
        ({"scales": "fp16"}, "blocks and scales of its own"),
        ({"block_size": 64}, "blocks and scales of its own"),
        ({"method": "auto", "bits": 5}, "leave out bits"),
    ],
)
def test_what_the_types_decide_is_not_asked_for(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        step(**options)


def test_auto_chooses_among_all_types() -> None:
    [demand] = step(method="auto", weight_bits=5.0).demands()
    assert allocation.LINEARS[demand.grid.scale] == allocation.GGUF  # type: ignore[union-attr]
    assert allocation.TABLES[demand.grid.scale] == allocation.GGUF  # type: ignore[union-attr]


@pytest.mark.parametrize(("bits", "name", "table"), [(3, "Q3_K", 6), (4, "Q4_K", 6), (5, "Q5_K", 8), (6, "Q6_K", 4)])
def test_a_file_holds_the_codes_of_the_graph(
    sample_checkpoint: Path, sample_graph: ir.Model, bits: int, name: str, table: int
) -> None:
    checkpoint, model = Checkpoint.open(sample_checkpoint), sample_graph.clone()
    assert step(bits=bits, embedding_bits=table).run(model, Context(LOCAL))
    exported = export_proxy.exported(model, sample_graph, checkpoint)
    exporter("gguf", LOCAL).check(exported, SPEC)
    tensor = "model.layers.1.mlp.down_proj.weight"
    matrix = exported.quantized[tensor]
    assert isinstance(matrix, KernelBlocks)
    assert packing.type_of(matrix.grid, matrix.k) == name
    wanted = round_to_nearest(checkpoint.tensor(tensor).numpy(), gguf_type(bits))
    assert np.array_equal(dequantize(matrix.read()), dequantize(wanted))
    assert np.array_equal(read_back(wanted), dequantize(wanted))


def test_compressed_tensors_has_no_such_type(sample_checkpoint: Path, sample_graph: ir.Model) -> None:
    checkpoint, model = Checkpoint.open(sample_checkpoint), sample_graph.clone()
    assert step(embedding_bits=16).run(model, Context(LOCAL))
    exported = export_proxy.exported(model, sample_graph, checkpoint)
    with pytest.raises(UnsupportedError, match="has no format with int4-block32-minima"):
        exporter("compressed-tensors", LOCAL).check(exported, EngineSpec(backend="compressed-tensors", max_context=64))


@pytest.mark.parametrize("name", NAMES)
def test_what_calibration_keeps_of_a_type_is_read_back_whole(name: str, tmp_path: Path) -> None:
    matrix = round_to_nearest(drawn(3, k=WIDTHS[name]), GRIDS[name])
    with Cache(tmp_path / "layers") as cache:
        kept = Store(cache).save("key", 0, LayerResult({"weight": matrix}, None))
        assert isinstance(kept.linears["weight"], Path)
        found = StoredMatrices(kept.linears)["weight"]
    assert found.grid == matrix.grid
    for one, other in zip(parts(found), parts(matrix), strict=True):
        np.testing.assert_array_equal(one, other)


def parts(matrix: QuantizedMatrix) -> list[Any]:
    return [each for each in (matrix.codes, matrix.scales, matrix.zero_points, matrix.minimums) if each is not None]


@pytest.mark.thorough
def test_a_recipe_that_chooses_types_is_built(sample_checkpoint: Path, data: Path, tmp_path: Path) -> None:
    pytest.importorskip("gguf", reason="the extra `gguf` is not installed")
    weights = {"codes": "gguf", "method": "auto", "weight_bytes": 4_500_000, "budget": {"kld_mean": 0.05}}
    facts = {
        "schema": 1,
        "name": "types",
        "checkpoint": str(sample_checkpoint),
        "target": "local",
        "engine": {"backend": "gguf", "max_context": 256, "max_batch": 1},
        "calibration": {"data": str(data / "calibration.jsonl"), "samples": 4, "length": 128},
        "passes": [{"quantize-weights": weights}],
    }
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(json.dumps(facts))  # JSON is YAML
    made = llmforge.build(recipe, out=tmp_path / "out")
    file = made.path / "engine" / "model.gguf"
    assert 4_000_000 < file.stat().st_size < 5_500_000  # tokenizer and header come on top
