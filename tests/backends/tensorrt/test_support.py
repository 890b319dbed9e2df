"""What TensorRT-RTX builds without a GPU: each operator with each dtype, and quantized weights as they are stored."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import onnx_ir as ir
import pytest

from llmforge import targets
from llmforge.backends import onnx_file
from llmforge.backends.tensorrt import compile_plan, library, lower, profiles, refusals
from llmforge.backends.tensorrt.compile_plan import BuildLog
from llmforge.base.progress import Silent
from llmforge.ir import graph
from llmforge.passes import LowerPrecision, PackGateUp, PackQkv, QuantizeChannels, QuantizeWeights
from llmforge.quantization.statistics import InputRange, Statistics
from llmforge.recipe import EngineSpec
from llmforge.rewrite import pass_base
from llmforge.rewrite.pass_base import Budget, Context, Pass
from llmforge.runtime.config import ProfileFacts

from ...fakes import tensorrt_operators
from ...models import graphs

pytestmark = pytest.mark.thorough

pytest.importorskip("tensorrt_rtx")

LOOSE = Budget(kld_mean=5.0)
SPEC = EngineSpec(backend="tensorrt-rtx", max_context=64, max_batch=4)


def built(model: ir.Model, sm: str, folder: Path, ranges: Any = ()) -> BuildLog:
    """Build `model`, which raises where it does not, and return what the builder said."""
    log = BuildLog()
    folder.mkdir(exist_ok=True)
    onnx_file.write(model, folder, Silent())
    of_rtx = library.of_backend("tensorrt-rtx")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compile_plan, "BuildLog", lambda: log)
        compile_plan.build(of_rtx, folder / "model.onnx", model, folder / "plan", sm=sm, profiles=ranges)
    return log


@pytest.mark.parametrize("sm", ["75", "80", "86", "89", "120"])
def test_every_row_of_the_table_builds(sm: str, tmp_path: Path) -> None:
    bench = tensorrt_operators.Bench()
    put = 0
    for operator, dtype in tensorrt_operators.rows():
        alone = tensorrt_operators.Bench()
        alone.add(operator, dtype)
        found = {feature for feature, _ in refusals.features(alone.model())}
        if any(feature.value.refuses(sm) for feature in found):
            continue
        bench.add(operator, dtype)
        put += 1
    lower.check_operators(bench.model())
    built(bench.model(), sm, tmp_path)
    everything = sum(len(seen.dtypes) for seen in tensorrt_operators.OPERATORS.values())
    fp4 = len(tensorrt_operators.OPERATORS["TRT_FP4DynamicQuantize"].dtypes)
    wanted = everything - (fp4 if int(sm) < 100 else 0)
    assert put == wanted if int(sm) >= 80 else wanted / 2 < put < wanted


def decoder(*steps: Pass, target: str = "rtx-4090") -> ir.Model:
    """A decoder whose matrices are most of it, lowered."""
    sizes = graphs.Llama(hidden=256, heads=8, kv_heads=8, head_dim=32, mlp=4096, vocabulary=8192)
    model = graphs.llama(sizes)
    names = [name for value in model.graph.initializers.values() for name in graph.sources(value)]
    inputs = {name: InputRange(np.full((), 4, np.float32)) for name in names if ".layers." in name}
    device = targets.load(target)
    context = Context(device, Statistics(samples=1, tokens=1, linears={}, kv={}, inputs=inputs))
    for step in steps:
        pass_base.run(step, model, context)
    return lower.lower(model, device, SPEC)[0]


def weights_bytes(log: BuildLog) -> int:
    """Read what a plan holds of weights."""
    said = [re.match(r"Total Weights Memory: (\d+) bytes", text) for _, text in log.lines]
    (found,) = [each for each in said if each]
    return int(found[1])


def activation_bytes(log: BuildLog) -> list[int]:
    """Read the memory that a step needs beside weights and caches, of each profile."""
    said = [re.match(r"Total Activation Memory: (\d+) bytes", text) for _, text in log.lines]
    return [int(each[1]) for each in said if each]


HALF = LowerPrecision(budget=LOOSE, dtype="fp16")
INT4 = QuantizeWeights(
    budget=LOOSE, bits=4, block_size=128, symmetric=True, method="rtn", embedding_bits=16, accuracy_level=0
)


PACKED: tuple[Pass, ...] = (PackQkv(), PackGateUp())
FORMS: dict[str, tuple[Pass, ...]] = {
    "fp16": (HALF,),
    "int4": (*PACKED, INT4, HALF),
    "int8": (*PACKED, QuantizeChannels(budget=LOOSE, dtype="int8"), HALF),
    "fp8 both": (*PACKED, QuantizeChannels(budget=LOOSE, dtype="fp8", activations="static"), HALF),
    "fp8": (*PACKED, QuantizeChannels(budget=LOOSE, dtype="fp8"), HALF),
}


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], BuildLog]:
    """What the builder says of the decoder in fp16, by compute capability."""

    @functools.cache
    def of(sm: str) -> BuildLog:
        model = decoder(*FORMS["fp16"])
        return built(model, sm, tmp_path_factory.mktemp(sm), profiles.of(model, SPEC))

    return of


@pytest.mark.parametrize(
    ("form", "sm"),
    [
        ("int4", "89"),
        ("int8", "75"),
        *(pytest.param(*each, marks=pytest.mark.slow) for each in (("int8", "80"), ("fp8", "89"), ("fp8 both", "120"))),
    ],
)
def test_plans_hold_weights_as_they_are_stored(
    form: str, sm: str, plain: Callable[[str], BuildLog], tmp_path: Path
) -> None:
    """And a step needs no memory for dequantized ones, but for int8 on Turing: the builder says what both take."""
    model = decoder(*FORMS[form])
    log = built(model, sm, tmp_path, profiles.of(model, SPEC))
    assert weights_bytes(log) == pytest.approx(graph.weight_bytes(model), rel=0.1)
    matrix = 256 * 8192 * 2  # the head, or gates and their inputs, in fp16: what dequantizing either would take
    more = [a - b for a, b in zip(activation_bytes(log), activation_bytes(plain(sm)), strict=True)]
    assert (max(more) > matrix / 2) == ((form, sm) == ("int8", "75"))


def test_a_fixed_batch_of_one_would_dequantize_in_every_step(tmp_path: Path) -> None:
    """Why no profile of an engine has one: the day this fails, `profiles.SMALLEST_LARGEST` can go."""
    k, n = 512, 1024
    bench = tensorrt_operators.Bench()
    x = ir.Value(name="x", type=ir.TensorType(ir.DataType.FLOAT16), shape=ir.Shape(["rows", k]))
    bench.graph.inputs.append(x)
    codes = np.ones((k, n), ml_dtypes.float8_e4m3fn)
    inputs = [bench.constant("codes", codes), bench.constant("scales", np.full(n, 0.5, np.float16))]
    made = bench.node("MatMul", [x, bench.node("DequantizeLinear", inputs, axis=1)])
    made.name, made.type, made.shape = "y", ir.TensorType(ir.DataType.FLOAT16), ir.Shape(["rows", n])
    bench.graph.outputs.append(made)

    def needed(largest: int) -> int:
        shapes = {"x": ((1, k), (1, k), (largest, k))}
        one = profiles.Profile(ProfileFacts("decode", largest, 1), shapes)
        return activation_bytes(built(bench.model(), "89", tmp_path / str(largest), [one]))[0]

    assert needed(1) - needed(profiles.SMALLEST_LARGEST) >= 2 * k * n
