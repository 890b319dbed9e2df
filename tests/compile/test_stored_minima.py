"""Codes of GGUF files that llmforge's CPU kernels alone read: types with a minimum per block, and blocks of 16."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest
from numpy.typing import NDArray

from llmforge import native, passes, targets
from llmforge.checkpoint import Checkpoint
from llmforge.checkpoint.gguf import blocks
from llmforge.checkpoint.inspection import EXACT, inspect
from llmforge.compile import dry_run
from llmforge.ir import graph
from llmforge.ir.operators import cpu
from llmforge.quantization import methods
from llmforge.quantization.grid import Grid
from llmforge.quantization.grids import dequantize, round_to_nearest
from llmforge.quantization.stored import common, on_grid
from llmforge.rewrite import cpu_linear, options, pass_base
from llmforge.rewrite.pass_base import Changes, Context
from llmforge.trace import trace
from llmforge.verification import probe

from ..models import gguf_files
from ..models.checkpoints import write_checkpoint
from ..models.gguf_files import Tensor
from ..rewrite.test_cpu_kernels import session

pytestmark = pytest.mark.skipif(native.library() is None, reason="the CPU kernels are not compiled")
TYPES = {kind.name: kind.number for kind in blocks.TYPES.values()}
GRIDS = {
    "Q4_1": Grid(4, 32, False, "fp16", minimums=True),
    "Q5_1": Grid(5, 32, False, "fp16", minimums=True),
    "Q4_K": Grid(4, 32, False, minimums=True),
    "Q5_K": Grid(5, 32, False, minimums=True),
    "Q2_K": Grid(3, 16, False, minimums=True),
    "Q3_K": Grid(3, 16, True),
    "Q6_K": Grid(6, 16, True),
}
Kinds = Callable[[str], str]


def file_of(folder: Path, kinds: Kinds) -> Path:
    """Write a model of one layer whose matrices are random blocks of the type that `kinds` says of each."""
    write_checkpoint(folder / "hf", hidden_size=256, intermediate_size=256, num_hidden_layers=1, head_dim=64)

    def quantized(tensor: Tensor) -> Tensor:
        name, shape, _, content = tensor
        if len(shape) != 2:
            return tensor
        kind = TYPES[kinds(name)]
        return name, shape, kind, gguf_files.drawn(kind, shape) if kind else content

    file = folder / "model.gguf"
    gguf_files.write(folder / "hf", file, change=lambda tensors: [quantized(each) for each in tensors])
    return file


def rewritten(file: Path, *before: str, target: str = "local", **more: Any) -> tuple[ir.Model, Changes]:
    """Trace a file, and let quantize-weights take its codes behind other passes."""
    checkpoint = Checkpoint.open(file)
    model, known = trace(checkpoint), {each.name: each for each in passes.ALL}
    context = Context(targets.find(target), stored=dry_run.stored_codes(checkpoint))
    for name in before:
        pass_base.run(options.make(known[name], {}), model, context)
    given = {"method": methods.STORED, "budget": {"kld_mean": 0.01}, "scales": "fp16", **more}
    return model, pass_base.run(options.make(known["quantize-weights"], given), model, context)


def held(packed: cpu.CpuLinear | cpu.Embedding) -> NDArray[np.float32]:
    """Let the kernels dequantize all rows of packed weights."""
    ids = np.arange(packed.N)
    attributes = cpu_linear.grid_attributes(packed.N, packed.K, cpu_linear.grid_of(packed))
    fed, kept = {"ids": ids}, {"w": graph.tensor(packed.weights).numpy()}
    return np.asarray(session("Embedding", fed, kept, ["y"], order=("ids", "w"), **attributes).run(None, fed)[0])


def exact(model: ir.Model, file: Path) -> dict[str, Grid]:
    """Compare all packed weights with those of the file to the bit; return their grids, by the parameters in them."""
    checkpoint, found = Checkpoint.open(file), {}
    for packed in (*cpu.CpuLinear.all(model), *cpu.Embedding.all(model)):
        names = graph.sources(packed.weights)
        wanted = np.concatenate([checkpoint.tensor(name).numpy() for name in names])
        assert np.array_equal(held(packed), wanted), names  # the same bits, but for the sign of a 0
        found["+".join(names)] = cpu_linear.grid_of(packed)
    return found


QUICK = "Q5_1", "Q2_K", "Q6_K"  # blocks of 32 and of 16, with a minimum and without; the others in the thorough tests


@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=[pytest.mark.thorough] * (kind not in QUICK)) for kind in GRIDS]
)
def test_packed_weights_are_those_of_the_file_to_the_bit(kind: str, tmp_path: Path) -> None:
    file = file_of(tmp_path, lambda _: kind)
    model, changes = rewritten(file, "pack-qkv", "pack-gate-up")
    assert not changes.notes
    found = exact(model, file)
    assert set(found.values()) == {GRIDS[kind]}
    assert len(found) >= 5  # qkv, o, gate and up, down, the table
    [row] = [row for row in inspect(file, {}).stored if row.format == kind]
    assert (row.outcome, row.reason) == (EXACT, "on CPUs; other targets dequantize them")


@pytest.mark.parametrize(
    "kind", ["Q4_1", *(pytest.param(kind, marks=pytest.mark.thorough) for kind in ("Q5_K", "Q2_K"))]
)
def test_logits_are_those_of_the_dequantized_weights(kind: str, tmp_path: Path) -> None:
    """Nothing but the rounding of activations differs: in two terms it all but vanishes."""
    file, packing = file_of(tmp_path, lambda _: kind), ("pack-qkv", "pack-gate-up", "flash-attention")
    steps = {each.name: each for each in passes.ALL}

    def logits(model: ir.Model) -> list[NDArray[Any]]:
        opened = probe.open_session(model, probe.InitializerArrays(), threads=1)
        return [
            rows
            for run in probe.random_runs(96)[:2]
            for step in probe.drive(opened, run, caches=False)
            for rows in step.logits
        ]

    plain = trace(Checkpoint.open(file))
    for name in packing:
        pass_base.run(options.make(steps[name], {}), plain, Context(targets.find("local")))
    wanted, errors = logits(plain), {}
    for activations in ("int8", "int8x2"):
        model, _ = rewritten(file, *packing)
        given = {"budget": {"kld_mean": 1}, "activations": activations}
        pass_base.run(options.make(steps["cpu-kernels"], given), model, Context(targets.find("local")))
        found = zip(wanted, logits(model), strict=True)
        errors[activations] = max(float(np.abs(one - other).max() / one.std()) for one, other in found)
    assert errors["int8"] < 0.1
    assert errors["int8x2"] < 1e-3 < errors["int8"]


@pytest.mark.parametrize(("one", "other", "wanted"), [
    ("Q4_K", "Q6_K", Grid(6, 16, False, minimums=True)),  # attn_v of Q4_K_M
    pytest.param("Q4_1", "Q8_0", Grid(8, 32, False, minimums=True), marks=pytest.mark.thorough),
    pytest.param("Q4_1", "Q5_1", Grid(5, 32, False, "fp16", minimums=True), marks=pytest.mark.thorough),
    ("Q2_K", "Q3_K", Grid(3, 16, False, minimums=True)),
])  # fmt: skip
def test_types_that_are_packed_into_one_matrix_stay_exact(one: str, other: str, wanted: Grid, tmp_path: Path) -> None:
    file = file_of(tmp_path, lambda name: other if "attn_v" in name else one)
    model, changes = rewritten(file, "pack-qkv", "pack-gate-up")
    assert not changes.notes
    [packed] = [grid for names, grid in exact(model, file).items() if "v_proj" in names]
    assert packed == wanted


def test_other_targets_dequantize_and_say_so(tmp_path: Path) -> None:
    file = file_of(tmp_path, lambda name: "Q8_0" if "ffn_down" in name else "Q4_1")
    model, changes = rewritten(file, target="rtx-4090")
    assert not cpu.CpuLinear.all(model)
    [note] = changes.notes
    assert "the codes are 4 bits, blocks of 32, minima, scales fp16, which llmforge's CPU kernels alone read" in note
    assert note.endswith("the weights stay dequantized")
    assert len(changes.rewritten) == 1  # of Q8_0


def test_minima_hold_zero_points_and_symmetric_codes_of_fewer_bits() -> None:
    weight = np.random.default_rng(0).standard_normal((5, 128)).astype(np.float32)
    wide = Grid(6, 32, False, minimums=True)
    for grid in (Grid(4, 64, True, "fp16"), Grid(4, 32, False, "fp16"), Grid(6, 128, True, "fp16")):
        matrix = round_to_nearest(weight, grid)
        assert common(grid, wide) == wide
        assert dequantize(on_grid(matrix, wide)).tobytes() == (dequantize(matrix) + np.float32(0)).tobytes()


@pytest.mark.parametrize("scale", ["fp32", "fp16"])
@pytest.mark.parametrize("bits", [3, 4, 8])
def test_rounding_to_minima_reaches_both_ends_of_a_block(bits: int, scale: Any) -> None:
    grid = Grid(bits, 32, False, scale, minimums=True)
    weight = np.random.default_rng(bits).standard_normal((6, 80)).astype(np.float32)  # the last block is half one
    weight[0] = 3.5
    matrix = round_to_nearest(weight, grid)
    matrix_error = np.abs(dequantize(matrix) - weight)
    steps = np.repeat(matrix.scales, 32, axis=1)[:, :80]
    assert (matrix_error <= 0.51 * steps + 2e-3 * (scale == "fp16")).all()
    assert matrix.codes[1:].max() == grid.top
    assert not matrix_error[0].any()
