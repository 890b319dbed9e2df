"""quantize-channels and quantize-fp4 with the codes of a checkpoint that comes quantized."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import onnx_ir as ir
import pytest
from numpy.typing import NDArray

from llmforge import targets
from llmforge.backends.tensorrt import layers, lower, profiles
from llmforge.base.errors import CheckpointError, UnsupportedError
from llmforge.checkpoint import Checkpoint
from llmforge.checkpoint.inspection import inspect
from llmforge.ir import graph
from llmforge.ir.operators.canonical import Fp4Linear
from llmforge.ir.operators.standard import MatMul
from llmforge.passes import LowerPrecision, PackGateUp, PackQkv, QuantizeChannels, QuantizeFp4
from llmforge.recipe import EngineSpec
from llmforge.rewrite import pass_base
from llmforge.rewrite.pass_base import Budget, Changes, Context, Pass
from llmforge.trace import trace

from ..checkpoint.quantized import writers
from ..models import graphs, zoo

LOOSE = Budget(kld_mean=1.0)
FP8, FP4 = ml_dtypes.float8_e4m3fn, ml_dtypes.float4_e2m1fn
Store = Callable[[str, tuple[int, int]], tuple[writers.Tensors, NDArray[Any]]]
UP = "model.layers.1.mlp.up_proj"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama of 2 layers, not quantized; tests quantize copies, whose parameters have the same names."""
    made = tmp_path_factory.mktemp("stored") / "llama"
    zoo.write("llama", made)
    return made


@pytest.fixture(scope="module")
def traced(folder: Path) -> ir.Model:
    return trace(Checkpoint.open(folder))


def step_of(name: str) -> np.float32:
    """Give the static step of what a layer reads: another for each."""
    return np.float32(0.01 * (1 + sum(name.encode()) % 7))


def eight_bits(dtype: Any, *, by_channel: bool, inputs: bool = True) -> Store:
    def store(name: str, shape: tuple[int, int]) -> tuple[writers.Tensors, NDArray[Any]]:
        random = np.random.default_rng(sum(name.encode()))
        codes = random.normal(0, 30, shape).astype(dtype)
        scales = random.uniform(0.001, 0.002, (shape[0], 1) if by_channel else (1,)).astype(np.float32)
        made: writers.Tensors = {f"{name}.weight": codes, f"{name}.weight_scale": scales}
        if inputs:
            made[f"{name}.input_scale"] = np.array([step_of(name)])
        return made, np.empty(0)

    return store


def nvfp4(*, inputs: bool = True, alike: bool = True) -> Store:
    def store(name: str, shape: tuple[int, int]) -> tuple[writers.Tensors, NDArray[Any]]:
        random, (n, k) = np.random.default_rng(sum(name.encode())), shape
        made: writers.Tensors = {
            f"{name}.weight_packed": random.integers(0, 256, (n, k // 2), np.uint8),
            f"{name}.weight_scale": random.uniform(10, 400, (n, k // 16)).astype(FP8),
            f"{name}.weight_global_scale": np.array([3000 if alike else 3000 + sum(name.encode()) % 7], np.float32),
        }
        if inputs:
            made[f"{name}.input_global_scale"] = 1 / np.array([step_of(name)])
        return made, np.empty(0)

    return store


def quantized(folder: Path, made: Path, form: str, store: Store, **scheme: Any) -> Checkpoint:
    """Copy a checkpoint, its linear layers as compressed-tensors stores them."""
    shutil.copytree(folder, made)
    inputs = {"num_bits": 8, "strategy": "tensor", "dynamic": False}
    config = writers.compressed(form, writers.scheme(**scheme))
    config["config_groups"]["group_0"]["input_activations"] = inputs
    writers.quantize(made, config, store)
    return Checkpoint.open(made)


STORES: dict[str, tuple[str, Store, dict[str, Any]]] = {
    "fp8 by channel": (
        "float-quantized",
        eight_bits(FP8, by_channel=True),
        {"bits": 8, "strategy": "channel", "kind": "float"},
    ),
    "fp8 by tensor": (
        "float-quantized",
        eight_bits(FP8, by_channel=False),
        {"bits": 8, "strategy": "tensor", "kind": "float"},
    ),
    "int8 by channel": ("int-quantized", eight_bits(np.int8, by_channel=True), {"bits": 8, "strategy": "channel"}),
    "int8 by tensor": ("int-quantized", eight_bits(np.int8, by_channel=False), {"bits": 8, "strategy": "tensor"}),
}
OF_FP4 = {"bits": 4, "strategy": "tensor_group", "kind": "float", "group_size": 16}


def stored(folder: Path, made: Path, name: str) -> Checkpoint:
    form, store, scheme = STORES[name]
    return quantized(folder, made, form, store, **scheme)


def rewritten(traced: ir.Model, checkpoint: Checkpoint | None, *steps: Pass, target: str = "rtx-4090") -> Any:
    model, changes = traced.clone(), Changes()
    for step in steps:
        changes = pass_base.run(step, model, Context(targets.load(target), stored=checkpoint))
    return model, changes


def channels(dtype: str, **more: Any) -> QuantizeChannels:
    return QuantizeChannels(**{"budget": LOOSE, "dtype": dtype, "method": "stored", **more})


def weights(model: ir.Model) -> dict[str, tuple[NDArray[Any], NDArray[Any]]]:
    """Read codes [N, K] and scales [N] by the parameters that they come from."""
    found = {}
    for node in graphs.find(model, "DequantizeLinear"):
        codes, scales = node.inputs
        assert codes is not None
        assert scales is not None
        if codes.is_initializer():
            found["+".join(graph.sources(codes))] = graph.tensor(codes).numpy().T, graph.tensor(scales).numpy()
    return found


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("name", STORES)
def test_codes_and_scales_are_those_of_the_checkpoint(
    traced: ir.Model, folder: Path, tmp_path: Path, name: str, packed: bool
) -> None:
    checkpoint = stored(folder, tmp_path / "made", name)
    before = [PackQkv(), PackGateUp()] if packed else []
    model, changes = rewritten(traced, checkpoint, *before, channels(name.partition(" ")[0]))
    found = weights(model)
    assert len(found) == (8 if packed else 14)
    assert len(changes.rewritten) == len(found)
    for names, (codes, scales) in found.items():
        parts = [checkpoint.tensors[each].read("weight") for each in names.split("+")]  # type: ignore[union-attr]
        assert codes.tobytes() == np.concatenate(parts).tobytes()
        whole = np.concatenate([checkpoint.tensor(each).numpy() for each in names.split("+")])
        assert (codes.astype(np.float32) * scales[:, None]).tobytes() == whole.tobytes()
    assert [each.node for each in changes.skipped] == [model.graph.outputs[0].producer().name]  # the head
    assert "static scales of what" in changes.notes[0]
    assert "are dropped" in changes.notes[0]


def test_a_second_run_changes_nothing(traced: ir.Model, folder: Path, tmp_path: Path) -> None:
    checkpoint = stored(folder, tmp_path / "made", "fp8 by channel")
    model, _ = rewritten(traced, checkpoint, channels("fp8"))
    before = graph.fingerprint(model)
    assert not channels("fp8").run(model, Context(targets.load("rtx-4090"), stored=checkpoint))
    assert graph.fingerprint(model) == before


def test_static_scales_are_the_checkpoints_and_the_largest_of_packed_layers(
    traced: ir.Model, folder: Path, tmp_path: Path
) -> None:
    checkpoint = stored(folder, tmp_path / "made", "fp8 by channel")
    step = channels("fp8", activations="static")
    assert step.demands() == ()
    for before in ([], [PackQkv(), PackGateUp()]):
        model, changes = rewritten(traced, checkpoint, *before, step)
        assert changes.notes == []
        for product in MatMul.all(model):
            weight = product.w.producer()
            if weight is None or weight.op_type != "DequantizeLinear":
                continue
            names = [each.removesuffix(".weight") for each in graph.sources(weight.inputs[0])]
            scale = product.x.producer().inputs[1]
            assert graph.tensor(scale).numpy() == max(map(step_of, names))
        names = [value.name for node in model.graph for value in node.outputs]
        assert len(names) == len(set(names))


def test_layers_without_a_static_scale_read_16_bits_and_it_is_said(
    traced: ir.Model, folder: Path, tmp_path: Path
) -> None:
    store = eight_bits(FP8, by_channel=True, inputs=False)
    scheme = STORES["fp8 by channel"][2]
    checkpoint = quantized(folder, tmp_path / "made", "float-quantized", store, **scheme)
    model, changes = rewritten(traced, checkpoint, channels("fp8", activations="static"))
    assert not graphs.find(model, "QuantizeLinear")
    [note] = changes.notes
    assert note.startswith("quantize-channels: 14 of 14 layers read 16 bits")
    model, _ = rewritten(traced, checkpoint, channels("fp8", activations="per_token"))
    assert len(graphs.find(model, "QuantizeLinear")) == 8


def test_what_has_no_such_codes_is_refused(traced: ir.Model, folder: Path, tmp_path: Path) -> None:
    with pytest.raises(UnsupportedError, match="this one is not"):
        rewritten(traced, None, channels("fp8"))
    eight = stored(folder, tmp_path / "eight", "fp8 by tensor")
    with pytest.raises(UnsupportedError, match="13 more: the codes are fp8; `dtype` is int8"):
        rewritten(traced, eight, channels("int8"))

    def in_blocks(name: str, shape: tuple[int, int]) -> tuple[writers.Tensors, NDArray[Any]]:
        codes = np.ones(shape, FP8)
        scales = np.ones((-(-shape[0] // 16), -(-shape[1] // 16)), np.float32)
        return {f"{name}.weight": codes, f"{name}.weight_scale": scales}, np.empty(0)

    scheme = {"bits": 8, "strategy": "block", "kind": "float", "block_structure": [16, 16]}
    blocks = quantized(folder, tmp_path / "blocks", "float-quantized", in_blocks, **scheme)
    with pytest.raises(UnsupportedError, match="in blocks of 16 by 16, not int8 or fp8 with one scale") as caught:
        rewritten(traced, blocks, channels("fp8"))
    assert caught.value.exit_code == 6
    with pytest.raises(UnsupportedError, match="are fp8 in blocks of 16 by 16, not NVFP4"):
        rewritten(traced, blocks, QuantizeFp4(budget=LOOSE, method="stored"), target="rtx-5090")
    with pytest.raises(ValueError, match="alpha would move"):
        channels("fp8", activations="static", alpha=0.5)


def test_scales_that_are_damaged_end_in_one_message(traced: ir.Model, folder: Path, tmp_path: Path) -> None:
    def broken(name: str, shape: tuple[int, int]) -> tuple[writers.Tensors, NDArray[Any]]:
        made, weight = eight_bits(FP8, by_channel=True)(name, shape)
        return {**made, f"{name}.input_scale": np.array([np.nan], np.float32)}, weight

    scheme = STORES["fp8 by channel"][2]
    checkpoint = quantized(folder, tmp_path / "made", "float-quantized", broken, **scheme)
    with pytest.raises(CheckpointError, match=r"input_scale' must be one positive number"):
        rewritten(traced, checkpoint, channels("fp8"))

    def infinite(name: str, shape: tuple[int, int]) -> tuple[writers.Tensors, NDArray[Any]]:
        made, weight = eight_bits(np.int8, by_channel=True)(name, shape)
        return {**made, f"{name}.weight_scale": np.full((shape[0], 1), np.inf, np.float32)}, weight

    scheme = STORES["int8 by channel"][2]
    checkpoint = quantized(folder, tmp_path / "infinite", "int-quantized", infinite, **scheme)
    with pytest.raises(UnsupportedError, match="have scales that are negative or not finite"):
        rewritten(traced, checkpoint, channels("int8"))
    with pytest.raises(CheckpointError, match="weight_scale' makes weights of"):
        checkpoint.tensor(f"{UP}.weight").numpy()


def test_a_scale_of_0_is_none(traced: ir.Model, folder: Path, tmp_path: Path) -> None:
    def store(name: str, shape: tuple[int, int]) -> tuple[writers.Tensors, NDArray[Any]]:
        made, weight = eight_bits(np.int8, by_channel=True)(name, shape)
        made[f"{name}.weight_scale"][3] = 0
        return made, weight

    checkpoint = quantized(folder, tmp_path / "made", "int-quantized", store, **STORES["int8 by channel"][2])
    model, _ = rewritten(traced, checkpoint, channels("int8"))
    codes, scales = weights(model)[f"{UP}.weight"]
    assert (scales > 0).all()
    assert not codes[3].any()
    whole = checkpoint.tensor(f"{UP}.weight").numpy()
    assert np.array_equal(codes.astype(np.float32) * scales[:, None], whole)


@pytest.mark.parametrize("packed", [False, True])
def test_nvfp4_is_that_of_the_checkpoint(traced: ir.Model, folder: Path, tmp_path: Path, packed: bool) -> None:
    checkpoint = quantized(folder, tmp_path / "made", "nvfp4-pack-quantized", nvfp4(), **OF_FP4)
    step = QuantizeFp4(budget=LOOSE, method="stored")
    assert step.demands() == ()
    before = [PackQkv(), PackGateUp()] if packed else []
    model, changes = rewritten(traced, checkpoint, *before, step, target="rtx-5090")
    layers = Fp4Linear.all(model)
    assert len(layers) == len(changes.rewritten) == (8 if packed else 14)
    for layer in layers:
        names = graph.sources(layer.codes)
        parts: list[Any] = [checkpoint.tensors[name] for name in names]
        codes, scales = (graph.tensor(each).numpy().T for each in (layer.codes, layer.scales))
        packed_codes = codes.view(np.uint8)[:, ::2] | codes.view(np.uint8)[:, 1::2] << 4
        assert np.array_equal(packed_codes, np.concatenate([part.read("weight_packed") for part in parts]))
        assert scales.tobytes() == np.concatenate([part.read("weight_scale") for part in parts]).tobytes()
        assert graph.tensor(layer.weight_scale).numpy() == np.float32(1) / np.float32(3000)
        largest = max(step_of(name.removesuffix(".weight")) for name in names)
        assert graph.tensor(layer.input_scale).numpy() == pytest.approx(largest, rel=1e-6)
        steps = np.repeat(scales.astype(np.float32), 16, 1) * graph.tensor(layer.weight_scale).numpy()
        whole = np.concatenate([checkpoint.tensor(name).numpy() for name in names]).astype(np.float32)
        made = codes.astype(np.float32) * steps
        assert np.allclose(made, whole, rtol=2.0**-8, atol=0)  # whose numbers are rounded to bf16


def test_nvfp4_without_ranges_or_with_scales_of_its_own_is_told(traced: ir.Model, folder: Path, tmp_path: Path) -> None:
    step = QuantizeFp4(budget=LOOSE, method="stored")
    bare = quantized(folder, tmp_path / "bare", "nvfp4-pack-quantized", nvfp4(inputs=False), **OF_FP4)
    with pytest.raises(UnsupportedError, match="without a range of what is read"):
        rewritten(traced, bare, step, target="rtx-5090")
    apart = quantized(folder, tmp_path / "apart", "nvfp4-pack-quantized", nvfp4(alike=False), **OF_FP4)
    _, changes = rewritten(traced, apart, PackQkv(), step, target="rtx-5090")
    assert len(changes.rewritten) == 8  # all but the packed ones
    [note] = changes.notes
    assert "different scales of tensors in one matrix; leave out the pass that packs them" in note


def test_inspect_says_which_pass_takes_them(folder: Path, tmp_path: Path) -> None:
    stored(folder, tmp_path / "made", "fp8 by tensor")
    [row] = [each for each in inspect(tmp_path / "made", {"channels": "quantize-channels"}).stored if each.reason]
    assert row.reason.endswith("; `quantize-channels: {method: stored}` takes them for TensorRT")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "target", "products"),
    [
        ("fp8 by channel", "rtx-4090", {"FLOAT8E4M3FN": 8}),
        ("int8 by tensor", "rtx-4090", {"INT8": 8}),
        ("nvfp4", "rtx-5090", {"FLOAT4E2M1": 8}),
    ],
)
def test_plans_multiply_the_codes(
    traced: ir.Model, folder: Path, tmp_path: Path, name: str, target: str, products: dict[str, int]
) -> None:
    from ..backends.tensorrt.test_support import built

    device = targets.load(target)
    if name == "nvfp4":
        checkpoint = quantized(folder, tmp_path / "made", "nvfp4-pack-quantized", nvfp4(), **OF_FP4)
        step: Pass = QuantizeFp4(budget=LOOSE, method="stored")
    else:
        checkpoint = stored(folder, tmp_path / "made", name)
        step = channels(name.partition(" ")[0], activations="static")
    half = LowerPrecision(budget=LOOSE, dtype="fp16")
    model, _ = rewritten(traced, checkpoint, PackQkv(), PackGateUp(), step, half, target=target)
    spec = EngineSpec(backend="tensorrt-rtx", max_context=64, max_batch=4)
    lowered = lower.lower(model, device, spec)[0]
    ranges = profiles.of(lowered, spec)
    log = built(lowered, str(device.sm), tmp_path / "engine", ranges)
    found = layers.of((text for _, text in log.lines), lowered, len(ranges))
    assert found is not None
    assert found.counted == products
    assert found.widened == ()
