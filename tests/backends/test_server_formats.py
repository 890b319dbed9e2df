"""Checkpoints in formats beside those of test_compressed_tensors: one scale a matrix, microscaling, caches, ModelOpt's.

The slow tests hold them against the tools: `pip install --no-deps compressed-tensors==0.20.0 nvidia-modelopt==0.47.0`
in a folder of their own, on PYTHONPATH.
"""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any, cast

import ml_dtypes
import numpy as np
import pytest
from numpy.typing import NDArray
from pydantic import ValidationError
from safetensors import safe_open

from llmforge.backends.compressed_tensors import modelopt
from llmforge.backends.compressed_tensors.schemes import Schemes
from llmforge.backends.exported_parameters import check_passes
from llmforge.backends.low_precision_matrices import Fp4Matrix, MxMatrix
from llmforge.base.errors import UnsupportedError
from llmforge.checkpoint import Checkpoint
from llmforge.ir import graph
from llmforge.passes import (
    ALL,
    FlashAttention,
    QuantizeChannels,
    QuantizeExperts,
    QuantizeFp4,
    QuantizeKvFp8,
    QuantizeMx,
)
from llmforge.quantization import nvfp4
from llmforge.quantization.grids import dequantize
from llmforge.quantization.low_precision_experts import FORMATS, FormatOfExperts
from llmforge.recipe import EngineSpec
from llmforge.trace import trace

from ..models import zoo
from .exports import (
    BY_MODELOPT,
    LAYER,
    LOOSE,
    SPEC,
    Traced,
    blocks,
    check,
    dense,
    export,
    of_nibbles,
    settings,
    tensors,
    write,
)

TENSOR = QuantizeChannels(
    budget=LOOSE, dtype="fp8", activations="static", granularity="tensor", head=False, smooth=False
)
TOKEN = QuantizeChannels(budget=LOOSE, dtype="fp8", activations="per_token", head=False, smooth=False)
AWQ = blocks(symmetric=True, block_size=64, scales="bf16", exclude=("*.down_proj.*",))  # whose 96 columns stay
MX = {"mxfp4": QuantizeMx(budget=LOOSE, dtype="fp4"), "mxfp8": QuantizeMx(budget=LOOSE, dtype="fp8")}
OUT = "model.layers.0.self_attn.o_proj"
QKV = [f"model.layers.0.self_attn.{each}_proj" for each in "qkv"]


def weight_of(traced: Traced, layer: str = LAYER) -> NDArray[np.float32]:
    return traced[0].tensor(f"{layer}.weight").numpy().astype(np.float32)


def by_modelopt(engine: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return what hf_quant_config.json says, and what config.json does."""
    beside = json.loads((engine / "hf_quant_config.json").read_text())
    return beside["quantization"], settings(engine)["quantization_config"]


def test_matrices_that_read_one_input_share_a_scale_of_fp8(bf16_llama: Traced, tmp_path: Path) -> None:
    _, engine = write(bf16_llama, tmp_path, TENSOR)
    found = tensors(engine / "model.safetensors")
    scale = np.float32(max(np.abs(weight_of(bf16_llama, layer)).max() for layer in QKV)) / np.float32(448)
    for layer in QKV:
        assert np.array_equal(found[f"{layer}.weight_scale"], [scale])
        assert np.array_equal(found[f"{layer}.input_scale"], [np.float32(4.0 / 448)])
        codes = (weight_of(bf16_llama, layer) / scale).astype(ml_dtypes.float8_e4m3fn)
        assert found[f"{layer}.weight"].tobytes() == codes.tobytes()
    group = settings(engine)["quantization_config"]["config_groups"]["group_0"]
    assert (group["format"], group["weights"]["strategy"], group["weights"]["group_size"]) == (
        "float-quantized", "tensor", None,
    )  # fmt: skip
    assert (group["input_activations"]["strategy"], group["input_activations"]["dynamic"]) == ("tensor", False)


@pytest.mark.parametrize("given", [{"activations": "per_token"}, {"dtype": "int8"}, {"head": True}])
def test_one_scale_a_matrix_is_for_static_fp8(given: dict[str, Any]) -> None:
    options = {"dtype": "fp8", "activations": "static", "head": False, **given}
    with pytest.raises(ValidationError, match="granularity: tensor goes with"):
        QuantizeChannels(budget=LOOSE, granularity="tensor", **options)


@pytest.mark.parametrize(("step", "algorithm"), [(TENSOR, "FP8"), (TOKEN, "FP8_PER_CHANNEL_PER_TOKEN")])
def test_fp8_by_the_names_of_modelopt(step: Any, algorithm: str, bf16_llama: Traced, tmp_path: Path) -> None:
    """The tensors of compressed-tensors, scales in ModelOpt's shapes; both files say the same."""
    ours = tensors(write(bf16_llama, tmp_path / "own", step)[1] / "model.safetensors")
    _, engine = write(bf16_llama, tmp_path, step, spec=BY_MODELOPT)
    found = tensors(engine / "model.safetensors")
    assert found.keys() == ours.keys()
    assert all(found[name].tobytes() == value.tobytes() for name, value in ours.items())
    assert found[f"{LAYER}.weight_scale"].shape == (() if step is TENSOR else (len(weight_of(bf16_llama)),))
    assert step is TOKEN or found[f"{LAYER}.input_scale"].shape == ()
    beside, inline = by_modelopt(engine)
    assert beside["quant_algo"] == inline["quant_algo"] == algorithm
    assert beside["exclude_modules"] == inline["ignore"] == ["lm_head", "model.embed_tokens"]
    assert "group_size" not in beside


def test_int4_by_the_names_of_modelopt(bf16_llama: Traced, tmp_path: Path) -> None:
    """W4A16_AWQ: two rows of a column in a byte, and factors of one for layers that servers multiply alone."""
    _, engine = write(bf16_llama, tmp_path, AWQ, spec=BY_MODELOPT)
    found = tensors(engine / "model.safetensors")
    packed, [n, k] = found[f"{OUT}.weight"], weight_of(bf16_llama, OUT).shape
    assert (packed.dtype, packed.shape) == (np.uint8, (n // 2, k))
    codes = np.empty((n, k), np.int8)
    codes[0::2], codes[1::2] = (((packed >> shift & 15) ^ 8).astype(np.int8) - 8 for shift in (0, 4))
    scales = found[f"{OUT}.weight_scale"]
    assert (scales.dtype, scales.shape) == (ml_dtypes.bfloat16, (n, k // 64))
    read = export(bf16_llama, AWQ)[1].quantized[f"{OUT}.weight"].read()  # type: ignore[union-attr]
    assert np.array_equal(codes * np.repeat(scales.astype(np.float32), 64, 1), dequantize(read))
    factors = {name for name in found if name.endswith("pre_quant_scale")}
    assert factors == {f"model.layers.{i}.self_attn.o_proj.pre_quant_scale" for i in (0, 1)}
    assert (found[f"{OUT}.pre_quant_scale"] == 1).all()
    beside, inline = by_modelopt(engine)
    assert {key: beside[key] for key in ("quant_algo", "group_size", "has_zero_point", "pre_quant_scale")} == {
        "quant_algo": "W4A16_AWQ", "group_size": 64, "has_zero_point": False, "pre_quant_scale": True,
    }  # fmt: skip
    assert (inline["quant_algo"], inline["group_size"]) == ("W4A16_AWQ", 64)


@pytest.mark.parametrize(
    ("step", "message", "hint"),
    [
        (blocks(), "W4A16_AWQ has no zero points, and groups of 64 or 128", "symmetric: true"),
        (blocks(bits=8), "is int8, which has no name of ModelOpt's", "leave `quant_method` out"),
        (MX["mxfp4"], "is mxfp4, which has no name of ModelOpt's", "leave `quant_method` out"),
    ],
)
def test_what_modelopt_has_no_name_for_is_refused(bf16_llama: Traced, step: Any, message: str, hint: str) -> None:
    with pytest.raises(UnsupportedError, match=message) as caught:
        check(export(bf16_llama, step)[1], BY_MODELOPT)
    assert hint in (caught.value.hint or "")


def test_modelopt_has_one_algorithm_for_all(bf16_llama: Traced) -> None:
    attention, rest = blocks(symmetric=True, block_size=64, exclude=("*.mlp.*",)), QuantizeFp4(budget=LOOSE)
    with pytest.raises(UnsupportedError, match=r"layers are int4 and nvfp4; ModelOpt's checkpoints have one algorithm"):
        check(export(bf16_llama, attention, rest)[1], BY_MODELOPT)
    with pytest.raises(ValueError, match="quant_method: modelopt goes with backend: compressed-tensors"):
        EngineSpec(backend="onnxruntime", max_context=32, quant_method="modelopt")


@pytest.mark.parametrize("name", MX)
def test_microscaling_formats_have_exponents_for_scales(name: str, bf16_llama: Traced, tmp_path: Path) -> None:
    _, engine = write(bf16_llama, tmp_path, MX[name])
    found, weight = tensors(engine / "model.safetensors"), weight_of(bf16_llama)
    scales = found[f"{LAYER}.weight_scale"]
    assert (scales.dtype, scales.shape) == (np.uint8, (len(weight), weight.shape[1] // 32))
    steps = 2.0 ** (np.repeat(scales.astype(np.float64), 32, axis=1) - 127)
    codes = of_nibbles(found[f"{LAYER}.weight_packed"]) if name == "mxfp4" else found[f"{LAYER}.weight"]
    lost = np.abs(codes.astype(np.float64) * steps - weight)
    largest = np.abs(weight).reshape(len(weight), -1, 32).max(-1)
    top = 6 if name == "mxfp4" else 448
    ratio = largest / (2.0 ** (scales.astype(np.float64) - 127))
    assert ((ratio <= top) & (ratio > top / 2)).all(), "the smallest power of two that holds the block"
    assert (lost <= np.maximum(np.abs(weight) * (0.25 if name == "mxfp4" else 1 / 16), steps / 4)).all()
    config = settings(engine)["quantization_config"]
    assert config["format"] == {"mxfp4": "mxfp4-pack-quantized", "mxfp8": "mxfp8-quantized"}[name]
    for part, dynamic in (("weights", False), ("input_activations", True)):
        said = config["config_groups"]["group_0"][part]
        assert (said["strategy"], said["group_size"], said["scale_dtype"]) == ("group", 32, "torch.uint8")
        assert said["dynamic"] is dynamic


@pytest.mark.parametrize("lowered", [False, True])
def test_scales_of_caches_stand_beside_the_layers_that_make_them(
    bf16_llama: Traced, tmp_path: Path, lowered: bool
) -> None:
    steps = [QuantizeKvFp8(budget=LOOSE), *([FlashAttention()] if lowered else []), TOKEN]
    _, engine = write(bf16_llama, tmp_path / "own", *steps)
    found = tensors(engine / "model.safetensors")
    for layer in (0, 1):
        module = f"model.layers.{layer}.self_attn"
        assert np.array_equal(found[f"{module}.k_scale"], [np.float32(layer + 1) / np.float32(448)])
        assert np.array_equal(found[f"{module}.v_scale"], [np.float32(layer + 2) / np.float32(448)])
        assert found[f"{module}.k_scale"].dtype == np.float32
    assert settings(engine)["quantization_config"]["kv_cache_scheme"] == {
        "num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False, "symmetric": True,
    }  # fmt: skip

    _, engine = write(bf16_llama, tmp_path, *steps, spec=BY_MODELOPT)
    found = tensors(engine / "model.safetensors")
    assert found["model.layers.1.self_attn.k_proj.k_scale"] == np.float32(2) / np.float32(448)
    assert found["model.layers.1.self_attn.v_proj.v_scale"].shape == ()
    beside, inline = by_modelopt(engine)
    assert beside["kv_cache_quant_algo"] == "FP8"
    assert inline["kv_cache_scheme"] == {"dynamic": False, "num_bits": 8, "type": "float"}
    [note] = [each for each in Checkpoint.open(engine).notes if "KV cache" in each]
    assert "quantize-kv-cache" in note


def test_engines_of_our_own_do_not_take_what_servers_alone_compute() -> None:
    for step in (QuantizeKvFp8, QuantizeMx):
        with pytest.raises(
            UnsupportedError, match=f"^{step.name}: only servers of others compute as it says"
        ) as caught:
            check_passes("onnxruntime", [step], ALL)
        assert "backend: compressed-tensors" in (caught.value.hint or "")
        check_passes("compressed-tensors", [step], ALL)
        with pytest.raises(UnsupportedError, match="cannot say what this pass does"):
            check_passes("gguf", [step], ALL)


STEPS: dict[str, tuple[Any, EngineSpec]] = {
    "fp8-tensor": (TENSOR, SPEC),
    "mxfp4": (MX["mxfp4"], SPEC),
    "mxfp8": (MX["mxfp8"], SPEC),
    "fp8-tensor-modelopt": (TENSOR, BY_MODELOPT),
    "fp8-per_token-modelopt": (TOKEN, BY_MODELOPT),
    "int4-modelopt": (AWQ, BY_MODELOPT),
    "mxfp8-modelopt": (MX["mxfp8"], BY_MODELOPT),
    "nvfp4-modelopt": (QuantizeFp4(budget=LOOSE), BY_MODELOPT),
}


def layer_of(name: str) -> str:
    return OUT if STEPS[name][0] is AWQ else LAYER


@pytest.mark.parametrize("name", STEPS)
def test_the_reader_of_checkpoints_reads_what_the_graph_multiplies_by(
    name: str, bf16_llama: Traced, tmp_path: Path
) -> None:
    step, spec = STEPS[name]
    model, engine = write(bf16_llama, tmp_path, step, spec=spec)
    checkpoint = Checkpoint.open(engine)
    weight = f"{layer_of(name)}.weight"
    read = checkpoint.tensor(weight).numpy().astype(np.float32)
    np.testing.assert_allclose(read, multiplied(export(bf16_llama, step)[1].quantized[weight]), rtol=2**-8)
    kept = "model.layers.0.input_layernorm.weight"
    assert checkpoint.tensor(kept).tobytes() == bf16_llama[0].tensor(kept).tobytes()
    if name == "nvfp4-modelopt":
        stored = checkpoint.fp4(f"{LAYER}.weight")
        found = tensors(engine / "model.safetensors")
        assert stored.scale == found[f"{LAYER}.weight_scale_2"]
        assert stored.input_scale == found[f"{LAYER}.input_scale"]
    if name == "fp8-tensor-modelopt":
        assert checkpoint.channels(f"{LAYER}.weight").input_scale == np.float32(4.0 / 448)
    assert model.graph


def multiplied(matrix: Any) -> NDArray[np.float32]:
    """Compute the numbers that codes stand for, from the graph."""
    if isinstance(matrix, MxMatrix):
        steps = np.repeat(matrix.scales_by_output.view(ml_dtypes.float8_e8m0fnu).astype(np.float32), 32, axis=1)
        return cast(NDArray[np.float32], matrix.codes_by_output.astype(np.float32) * steps)
    if isinstance(matrix, Fp4Matrix):
        steps = np.repeat(matrix.scales_by_output.astype(np.float32), 16, axis=1)
        scale = graph.tensor(matrix.weight_scale).numpy()
        return cast(NDArray[np.float32], matrix.codes_by_output.astype(np.float32) * (steps * scale))
    if hasattr(matrix, "by_output"):
        return cast(NDArray[np.float32], matrix.by_output.astype(np.float32) * matrix.scales_by_output)
    return dequantize(matrix.read())


@pytest.fixture(scope="module")
def experts(tmp_path_factory: pytest.TempPathFactory) -> Traced:
    """A mixture of 8 experts whose sizes blocks of 32 divide."""
    torch = pytest.importorskip("torch")
    folder = tmp_path_factory.mktemp("experts")
    zoo.write("qwen3-moe", folder, torch.bfloat16, moe_intermediate_size=64)
    checkpoint = Checkpoint.open(folder)
    return checkpoint, trace(checkpoint)


@pytest.mark.parametrize("given", [{}, {"symmetric": True}, {"bits": 8}], ids=["int4", "int4-symmetric", "int8"])
def test_each_expert_has_its_codes_by_its_own_name(given: dict[str, Any], experts: Traced, tmp_path: Path) -> None:
    checkpoint, _ = experts
    step = blocks(scales="bf16", **given)
    _, engine = write(experts, tmp_path, step)
    found, bits = tensors(engine / "model.safetensors"), step.bits
    for expert, layer in itertools.product(range(8), ("gate_proj", "up_proj", "down_proj")):
        name = f"model.layers.1.mlp.experts.{expert}.{layer}"
        weight = checkpoint.tensor(f"{name}.weight").numpy().astype(np.float32)
        assert found[f"{name}.weight_shape"].tolist() == list(weight.shape)
        codes = dense(found[f"{name}.weight_packed"], bits)
        scales = found[f"{name}.weight_scale"].astype(np.float32)
        if f"{name}.weight_zero_point" in found:
            points = dense(np.ascontiguousarray(found[f"{name}.weight_zero_point"].T), bits).T
            codes = codes - np.repeat(points, 32, axis=1)
        steps = np.repeat(scales, 32, axis=1)
        assert (np.abs(codes * steps - weight) <= 1.01 * np.abs(steps)).all(), "rounded in their own rows"
        read = Checkpoint.open(engine).tensor(f"{name}.weight").numpy().astype(np.float32)
        np.testing.assert_allclose(read, codes * steps, rtol=2**-8)
        assert f"{name}.weight" not in found
    assert "model.layers.1.mlp.gate" in settings(engine)["quantization_config"]["ignore"]
    assert not any("experts" in name for name in settings(engine)["quantization_config"]["ignore"])


def test_experts_that_servers_have_no_kernels_for_are_refused(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    zoo.write("qwen3-moe", tmp_path, torch.bfloat16)  # 48 inner features: blocks of 16
    checkpoint = Checkpoint.open(tmp_path)
    _, exported = export((checkpoint, trace(checkpoint)), blocks(scales="bf16"))
    with pytest.raises(
        UnsupportedError, match="its blocks are of 16; the servers' kernels of experts take 32"
    ) as caught:
        check(exported)
    assert "exclude: [model.layers.1.mlp.experts" in (caught.value.hint or "")


@pytest.fixture(scope="module")
def wide_experts(tmp_path_factory: pytest.TempPathFactory) -> Traced:
    """A mixture of 8 experts whose sizes squares of 128 divide."""
    torch = pytest.importorskip("torch")
    folder = tmp_path_factory.mktemp("wide-experts")
    zoo.write("qwen3-moe", folder, torch.bfloat16, hidden_size=128, moe_intermediate_size=128)
    checkpoint = Checkpoint.open(folder)
    return checkpoint, trace(checkpoint)


@pytest.mark.parametrize("name", FORMATS)
def test_low_precision_experts_are_written_as_linear_layers_are(
    name: FormatOfExperts, wide_experts: Traced, tmp_path: Path
) -> None:
    """Codes and scales of each expert's matrices are those that its weight gets alone, gate and up together."""
    checkpoint, _ = wide_experts
    step = QuantizeExperts(budget=LOOSE, format=name)
    _, engine = write(wide_experts, tmp_path, step)
    found = tensors(engine / "model.safetensors")
    for expert, layer in itertools.product(range(8), ("gate_proj", "up_proj", "down_proj")):
        place = f"model.layers.1.mlp.experts.{expert}"
        weight = checkpoint.tensor(f"{place}.{layer}.weight").numpy().astype(np.float32)
        beside = ("gate_proj", "up_proj") if layer != "down_proj" else (layer,)
        scales = found[f"{place}.{layer}.weight_scale"]
        if name == "nvfp4":
            peak = max(np.abs(checkpoint.tensor(f"{place}.{each}.weight").numpy()).max() for each in beside)
            whole = nvfp4.tensor_scale(float(peak))
            assert np.float32(1) / found[f"{place}.{layer}.weight_global_scale"] == whole
            assert np.float32(1) / found[f"{place}.{layer}.input_global_scale"] == nvfp4.tensor_scale(4.0)
            parts = [np.ascontiguousarray(weight.T), np.asarray(whole)]
            assert scales.tobytes() == np.ascontiguousarray(nvfp4.block_scales(parts).T).tobytes()
            codes = of_nibbles(found[f"{place}.{layer}.weight_packed"])
            assert np.array_equal(codes, nvfp4.codes(parts).T.astype(np.float32))
            continue
        wanted = np.abs(weight).max(1, keepdims=True)
        if name == "fp8-block":
            wanted = np.abs(weight).max(keepdims=True)
        wanted = wanted.astype(np.float32) / np.float32(127 if name == "int8" else 448)
        assert np.array_equal(scales, wanted)
        numbers = weight / wanted
        codes = np.rint(numbers).astype(np.int8) if name == "int8" else numbers.astype(ml_dtypes.float8_e4m3fn)
        assert found[f"{place}.{layer}.weight"].tobytes() == codes.tobytes()
    told = settings(engine)["quantization_config"]
    assert "model.layers.1.mlp.gate" in told["ignore"]
    assert not any("experts" in each for each in told["ignore"])
    group, strategies = told["config_groups"]["group_0"], {"fp8-block": "block", "nvfp4": "tensor_group"}
    assert group["weights"]["strategy"] == strategies.get(name, "channel")
    assert group["targets"] == ["Linear"]
    own = {"int8": "int8-per_token", "fp8": "fp8-per_token"}.get(name, name)
    _, exported = export(wide_experts, step)
    assert Schemes.of(exported, "compressed-tensors").experts(exported) == {own}


def test_experts_have_no_names_of_modelopt(experts: Traced) -> None:
    with pytest.raises(UnsupportedError, match="experts have no names of ModelOpt's here"):
        check(export(experts, blocks(scales="bf16"))[1], BY_MODELOPT)


# --- the tools themselves --------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", ["fp8-tensor", "mxfp4", "mxfp8"])
def test_compressed_tensors_decompresses_and_compresses_to_the_same(
    name: str, bf16_llama: Traced, tmp_path: Path
) -> None:
    tool = pytest.importorskip("compressed_tensors.compressors", reason="pip install compressed-tensors==0.20.0")
    import torch
    from compressed_tensors.quantization import QuantizationConfig

    step, _ = STEPS[name]
    _, engine = write(bf16_llama, tmp_path, step)
    config = QuantizationConfig.model_validate(settings(engine)["quantization_config"])
    [scheme] = config.config_groups.values()
    compressor = tool.BaseCompressor.get_value_from_registry(config.format)
    own = parts(engine)
    theirs = compressor.decompress(dict(own), scheme)
    wanted = multiplied(export(bf16_llama, step)[1].quantized[f"{LAYER}.weight"])
    assert np.array_equal(theirs["weight"].to(torch.float32).numpy(), wanted)
    scale = theirs["weight_scale"] if name != "fp8-tensor" else own["weight_scale"]
    again = compressor.compress({**own, "weight": torch.from_numpy(wanted), "weight_scale": scale.float()}, scheme)
    packed = "weight_packed" if name == "mxfp4" else "weight"
    held = [each[packed].view(torch.uint8).numpy() for each in (again, own)]
    assert np.array_equal(*map(of_nibbles, held)) if name == "mxfp4" else np.array_equal(*held)  # but the sign of 0
    assert torch.equal(again["weight_scale"], own["weight_scale"])


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", ["fp8-tensor-modelopt", "fp8-per_token-modelopt", "int4-modelopt", "mxfp8-modelopt"])
def test_modelopt_packs_the_same_bytes(name: str, bf16_llama: Traced, tmp_path: Path) -> None:
    tool = pytest.importorskip("modelopt.torch.export.quant_utils", reason="pip install nvidia-modelopt==0.47.0")
    import torch

    step, spec = STEPS[name]
    _, engine = write(bf16_llama, tmp_path, step, spec=spec)
    own = parts(engine, layer_of(name))
    weight = torch.from_numpy(weight_of(bf16_llama, layer_of(name)))
    algorithms = {
        "fp8-tensor-modelopt": tool.QUANTIZATION_FP8, "fp8-per_token-modelopt": tool.QUANTIZATION_FP8_PC_PT,
        "int4-modelopt": tool.QUANTIZATION_INT4_AWQ, "mxfp8-modelopt": tool.QUANTIZATION_MXFP8,
    }  # fmt: skip
    scale = own["weight_scale"] if own["weight_scale"].dtype == torch.uint8 else own["weight_scale"].float()
    packed = tool.to_quantized_weight(weight, scale, algorithms[name], block_size=64)
    assert packed.shape == own["weight"].shape
    assert torch.equal(packed.view(torch.uint8), own["weight"].view(torch.uint8))
    if name == "mxfp8-modelopt":
        assert torch.equal(tool.MXFP8QTensor.get_weights_scaling_factor(weight), own["weight_scale"])
    if name == "fp8-tensor-modelopt":
        assert own["weight_scale"] == weight.abs().max() / 448


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_modelopt_quantizes_to_the_same_mxfp4(bf16_llama: Traced, tmp_path: Path) -> None:
    pytest.importorskip("modelopt", reason="pip install nvidia-modelopt==0.47.0")
    import torch
    from modelopt.torch.quantization.qtensor import MXFP4QTensor

    _, engine = write(bf16_llama, tmp_path, MX["mxfp4"])
    own = parts(engine)
    quantized, scales = MXFP4QTensor.quantize(torch.from_numpy(weight_of(bf16_llama)), 32)
    theirs = quantized._quantized_data.numpy()
    assert np.array_equal(scales.reshape(own["weight_scale"].shape).numpy(), own["weight_scale"].numpy())
    differ = of_nibbles(theirs) != of_nibbles(own["weight_packed"].numpy())
    ratios = np.abs(weight_of(bf16_llama)) / 2.0 ** (np.repeat(own["weight_scale"].numpy().astype(float), 32, 1) - 127)
    assert np.isin(ratios[differ], [0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5]).all(), "ties, which it rounds down"


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", [name for name in STEPS if name.endswith("modelopt")])
def test_modelopt_makes_the_same_of_its_config(name: str, bf16_llama: Traced, tmp_path: Path) -> None:
    tool = pytest.importorskip("modelopt.torch.export.convert_hf_config", reason="pip install nvidia-modelopt==0.47.0")
    step, spec = STEPS[name]
    _, engine = write(bf16_llama, tmp_path, QuantizeKvFp8(budget=LOOSE), step, spec=spec)
    theirs = tool.convert_hf_quant_config_format(json.loads((engine / modelopt.FILE).read_text()))
    ours = settings(engine)["quantization_config"]
    shared = {key: value for key, value in theirs.items() if key != "config_groups"}
    assert {key: ours[key] for key in shared} == shared
    if "config_groups" in theirs:
        group = {key: value for key, value in theirs["config_groups"]["group_0"].items() if value}
        assert ours["config_groups"]["group_0"] == group


def parts(engine: Path, layer: str = LAYER) -> dict[str, Any]:
    """Read the tensors of one layer by their names in it."""
    with safe_open(str(engine / "model.safetensors"), "pt") as opened:
        found = {name: opened.get_tensor(name) for name in opened.keys() if name.startswith(f"{layer}.")}  # noqa: SIM118
    return {name.removeprefix(f"{layer}."): value for name, value in found.items()}
