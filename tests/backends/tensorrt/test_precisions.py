"""What a finished plan multiplies in: layer by layer, as the builder says, for each profile."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from llmforge import targets
from llmforge.backends import onnx_file
from llmforge.backends.tensorrt import compile_plan, layers, library, lower, profiles
from llmforge.backends.tensorrt.layers import Products
from llmforge.base.errors import VerificationError
from llmforge.base.progress import Silent
from llmforge.ir import graph
from llmforge.passes import LowerPrecision, PackGateUp, PackQkv, QuantizeChannels, QuantizeFp4, Sparsify
from llmforge.quantization import sparsity
from llmforge.quantization.statistics import InputRange, Statistics
from llmforge.recipe import EngineSpec
from llmforge.rewrite import pass_base
from llmforge.rewrite.pass_base import Budget, Context, Pass

from ...models import graphs

pytest.importorskip("tensorrt_rtx")
from .test_support import built

LOOSE = Budget(kld_mean=5.0)
SPEC = EngineSpec(backend="tensorrt-rtx", max_context=64, max_batch=4)
HALF = LowerPrecision(budget=LOOSE, dtype="fp16")


def sizes(kv_heads: int) -> graphs.Llama:
    return graphs.Llama(
        layers=1, hidden=256, heads=8, kv_heads=kv_heads, head_dim=32, mlp=512, vocabulary=1024, query_norm=False
    )


def products(target: str, folder: Path, *steps: Pass, kv_heads: int = 4) -> tuple[Products | None, set[str]]:
    """Build a decoder for `target`; what its plan multiplies codes in, and the products that should."""
    device = targets.load(target)
    model = graphs.llama(sizes(kv_heads))
    names = [name for value in model.graph.initializers.values() for name in graph.sources(value)]
    inputs = {name: InputRange(np.full((), 4, np.float32)) for name in names if ".layers." in name}
    context = Context(device, Statistics(samples=1, tokens=1, linears={}, kv={}, inputs=inputs))
    for step in (*steps, HALF):
        pass_base.run(step, model, context)
    lowered = lower.lower(model, device, SPEC)[0]
    ranges = profiles.of(lowered, SPEC)
    log = built(lowered, str(device.sm), folder, ranges)
    found = layers.of((text for _, text in log.lines), lowered, len(ranges))
    return found, set(layers.codes_by_codes(lowered))


def channels(**options: object) -> QuantizeChannels:
    return QuantizeChannels(budget=LOOSE, smooth=False, **options)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("target", "dtype", "activations"),
    [
        ("t4", "int8", "static"),
        ("rtx-4090", "int8", "per_token"),
        ("rtx-4090", "fp8", "static"),
        *(
            pytest.param(*each, marks=pytest.mark.slow)
            for each in (
                ("a10g", "int8", "static"),
                ("rtx-5090", "int8", "per_token"),
                ("rtx-4090", "fp8", "per_token"),
                ("rtx-5090", "fp8", "static"),
            )
        ),
    ],
)
def test_codes_are_multiplied_as_codes(target: str, dtype: str, activations: str, tmp_path: Path) -> None:
    step = channels(dtype=dtype, activations=activations)
    found, wanted = products(target, tmp_path / "engine", PackQkv(), PackGateUp(), step)
    assert found is not None
    assert found.widened == ()
    assert len(wanted) == (4 if activations == "static" else 5)  # qkv, o, gate and up, down; and the head
    assert found.counted == {"INT8" if dtype == "int8" else "FLOAT8E4M3FN": len(wanted)}


@pytest.mark.parametrize("target", ["rtx-5090", pytest.param("rtx-pro-6000", marks=pytest.mark.slow)])
def test_nvfp4_is_multiplied_as_nvfp4(target: str, tmp_path: Path) -> None:
    found, wanted = products(target, tmp_path / "engine", PackQkv(), PackGateUp(), QuantizeFp4(budget=LOOSE))
    assert found == Products({"FLOAT4E2M1": 4}, ())
    assert len(wanted) == 4


@pytest.mark.parametrize(
    ("target", "rounded"), [("rtx-4090", "int8"), pytest.param("a10g", None, marks=pytest.mark.slow)]
)
def test_plans_of_2_to_4_weights_are_built_with_them(target: str, rounded: str | None, tmp_path: Path) -> None:
    """Codes keep the zeros; which kernels multiply them, TensorRT-RTX does not say."""
    device = targets.load(target)
    model = graphs.llama(sizes(4))
    PackQkv().run(model, Context(device))
    linears = {name: value for value in model.graph.initializers.values() for name in graph.sources(value)}
    pruned = {}
    for name, value in linears.items():
        if ".layers." in name and len(graph.static(value)) == 2:
            whole = graph.tensor(value).numpy().T
            parts = np.split(whole, [256, 384]) if "qkv" in str(value.name) else [whole]
            pruned |= dict(zip(graph.sources(value), map(sparsity.magnitude, parts), strict=True))
    inputs = {name: InputRange(np.full((), 4, np.float32)) for name in pruned}
    context = Context(device, Statistics(samples=1, tokens=1, linears={}, kv={}, inputs=inputs, sparse=pruned))
    steps: list[Pass] = [Sparsify(budget=LOOSE)]
    steps += [] if rounded is None else [channels(dtype=rounded, activations="static", head=False)]
    for step in (*steps, HALF):
        assert pass_base.run(step, model, context)
    lowered = lower.lower(model, device, SPEC)[0]
    folder = tmp_path / "engine"
    folder.mkdir()
    onnx_file.write(lowered, folder, Silent())
    made = compile_plan.build(
        library.of_backend("tensorrt-rtx"),
        folder / "model.onnx",
        lowered,
        folder / "plan",
        sm=str(device.sm),
        profiles=profiles.of(lowered, SPEC),
    )
    assert compile_plan.added_flags(lowered) == ("SPARSE_WEIGHTS",)
    assert made.layers["MATRIX_MULTIPLY of 2:4 weights"] == 5  # qkv, o, gate, up, down
    assert made.layers.get("MATRIX_MULTIPLY of INT8 by INT8") == (5 if rounded else None)
    assert "does not say whether it multiplies them on sparse tensor cores" in made.warnings[-1]


def test_zeros_that_were_filled_are_seen() -> None:
    model = lower.rewrite(graphs.llama(sizes(4)), 8)[0]
    with pytest.raises(VerificationError, match="none of its products does"):
        layers.sparse(model)


def test_a_product_that_is_widened_is_told(tmp_path: Path) -> None:
    """TensorRT-RTX 1.7 divides a packed query, key and value of one size into a batch of three, in 16 bits."""
    step = channels(dtype="int8", activations="static")
    found, wanted = products("rtx-4090", tmp_path / "packed", PackQkv(), step, kv_heads=8)
    assert found is not None
    assert found.widened == ("model.layers.0.self_attn.qkv_proj/MatMul",)
    assert found.counted == {"INT8": len(wanted) - 1}
    assert "multiplied in 16 bits in 1 products, model.layers.0.self_attn.qkv_proj/MatMul" in found.warnings[0]
    apart, wanted = products("rtx-4090", tmp_path / "apart", step, kv_heads=8)
    assert apart is not None
    assert apart.counted == {"INT8": len(wanted)} == {"INT8": 7}
    assert apart.warnings == ()


def test_weights_alone_promise_no_such_product(tmp_path: Path) -> None:
    found, wanted = products("rtx-4090", tmp_path / "engine", channels(dtype="int8"))
    assert found == Products({}, ())
    assert not wanted


def test_a_builder_that_lists_no_layers_is_not_believed() -> None:
    assert layers.of(["Total Weights Memory: 3 bytes"], graphs.llama(), 2) is None
