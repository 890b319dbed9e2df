"""Checkpoints in the format of compressed-tensors: their codes are those of ONNX Runtime's engine, bit by bit.

The slow tests read them by the tool itself: `pip install compressed-tensors==0.20.0`, apart from this.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import ml_dtypes
import numpy as np
import onnx_ir as ir
import pytest
from numpy.typing import NDArray
from safetensors import safe_open

from llmforge import passes
from llmforge.backends.compressed_tensors import builder as compressed_tensors
from llmforge.backends.compressed_tensors import layout, modelopt, servers
from llmforge.backends.compressed_tensors.schemes import LayerScheme, Schemes
from llmforge.backends.exported_parameters import check_passes
from llmforge.backends.low_precision_matrices import ChannelMatrix, Fp4Matrix
from llmforge.base.errors import UnsupportedError, VerificationError
from llmforge.checkpoint import Checkpoint
from llmforge.compile import export_proxy
from llmforge.ir import graph
from llmforge.passes import (
    CpuKernels,
    FuseNorms,
    LowerPrecision,
    PackQkv,
    QuantizeChannels,
    QuantizeFp4,
    QuantizeKvCache,
)
from llmforge.quantization.grids import dequantize
from llmforge.rewrite.pass_base import Pass
from llmforge.trace import trace

from ..models import zoo
from .exports import (
    BY_MODELOPT,
    LAYER,
    LOOSE,
    POINTS,
    Traced,
    blocks,
    check,
    dense,
    export,
    of_engine,
    of_nibbles,
    settings,
    tensors,
    write,
)

INPUTS: list[Any] = ["none", "static", "per_token"]


@pytest.mark.parametrize("scales", ["fp16", "bf16"])
@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("symmetric", [True, False])
def test_blocks_are_packed_as_they_are(
    bf16_llama: Traced, tmp_path: Path, bits: int, symmetric: bool, scales: str
) -> None:
    step = blocks(bits=bits, symmetric=symmetric, scales=scales) if bits == 4 else blocks(bits=8, scales=scales)
    model, engine = write(bf16_llama, tmp_path, step)
    found, ours = tensors(engine / "model.safetensors"), of_engine(model)
    [n, k] = found[f"{LAYER}.weight_shape"].tolist()

    codes = ours[f"{LAYER}.weight.codes"].reshape(n, -1)
    unpacked = codes if bits == 8 else np.stack([codes & 15, codes >> 4], -1).reshape(n, -1)
    assert np.array_equal(dense(found[f"{LAYER}.weight_packed"], bits), unpacked.astype(np.int64) - 2 ** (bits - 1))
    assert found[f"{LAYER}.weight_packed"].shape == (n, k * bits // 32)
    assert found[f"{LAYER}.weight_scale"].dtype == {"fp16": np.float16, "bf16": ml_dtypes.bfloat16}[scales]
    assert np.array_equal(found[f"{LAYER}.weight_scale"], ours[f"{LAYER}.weight.scales"].reshape(n, -1))
    if bits == 4 and not symmetric:
        points = ours[f"{LAYER}.weight.zero_points"]
        each = np.stack([points & 15, points >> 4], -1).reshape(n, -1)[:, : k // 32]
        packed = found[f"{LAYER}.weight_zero_point"]  # [N/8, blocks]: along the output features
        assert np.array_equal(dense(np.ascontiguousarray(packed.T), 4).T, each.astype(np.int64) - 8)
    assert ("zero_point" in " ".join(found)) == (bits == 4 and not symmetric)
    weights = settings(engine)["quantization_config"]["config_groups"]["group_0"]["weights"]
    assert (weights["num_bits"], weights["group_size"], weights["symmetric"]) == (bits, 32, bits == 8 or symmetric)
    assert settings(engine)["quantization_config"]["format"] == "pack-quantized"
    assert settings(engine)["dtype"] == {"fp16": "float16", "bf16": "bfloat16"}[scales]


@pytest.mark.parametrize("dtype", ["fp8", "int8"])
@pytest.mark.parametrize("activations", ["none", "static", "per_token"])
def test_channels_are_stored_by_output(bf16_llama: Traced, tmp_path: Path, dtype: str, activations: str) -> None:
    step = QuantizeChannels(budget=LOOSE, dtype=dtype, activations=activations, head=False, smooth=False)
    if dtype == "int8" and activations == "none":
        with pytest.raises(UnsupportedError, match="by int8 activations alone") as caught:
            check(export(bf16_llama, step)[1])
        assert "activations: static" in (caught.value.hint or "")
        return
    model, engine = write(bf16_llama, tmp_path, step)
    found, ours = tensors(engine / "model.safetensors"), of_engine(model)

    codes = ours[f"{LAYER}.weight.{dtype}"]
    assert found[f"{LAYER}.weight"].dtype == (ml_dtypes.float8_e4m3fn if dtype == "fp8" else np.int8)
    assert found[f"{LAYER}.weight"].tobytes() == np.ascontiguousarray(codes.T).tobytes()
    assert np.array_equal(found[f"{LAYER}.weight_scale"][:, 0], ours[f"{LAYER}.weight.{dtype}.scales"])
    assert found[f"{LAYER}.weight_scale"].dtype == np.float32
    group = settings(engine)["quantization_config"]["config_groups"]["group_0"]
    assert group["format"] == ("float-quantized" if dtype == "fp8" else "int-quantized")
    if activations == "static":
        largest = 448.0 if dtype == "fp8" else 127.0
        assert found[f"{LAYER}.input_scale"] == np.float32(4.0 / largest)
        assert group["input_activations"]["strategy"] == "tensor"
        assert group["input_activations"]["dynamic"] is False
    elif activations == "per_token":
        assert group["input_activations"]["strategy"] == "token"
        assert group["input_activations"]["dynamic"] is True
        assert not any("input_scale" in name for name in found)
    else:
        assert group["input_activations"] is None
    assert settings(engine)["dtype"] == "bfloat16", "that of the model"


def test_squares_of_fp8_are_stored_by_square(sample_checkpoint: Path, sample_graph: ir.Model, tmp_path: Path) -> None:
    step = QuantizeChannels(budget=LOOSE, dtype="fp8", activations="per_token", granularity="block", head=False)
    checkpoint = Checkpoint.open(sample_checkpoint)
    _, engine = write((checkpoint, sample_graph), tmp_path, step)
    found = tensors(engine / "model.safetensors")

    weight = checkpoint.tensor(f"{LAYER}.weight").numpy().astype(np.float32)
    n, k = weight.shape
    squares = weight.reshape(n // 128, 128, k // 128, 128)
    scales = np.abs(squares).max((1, 3)) / np.float32(448)
    assert np.array_equal(found[f"{LAYER}.weight_scale"], scales)
    codes = (squares / scales[:, None, :, None]).astype(ml_dtypes.float8_e4m3fn).reshape(n, k)
    assert found[f"{LAYER}.weight"].tobytes() == codes.tobytes()
    group = settings(engine)["quantization_config"]["config_groups"]["group_0"]
    assert (group["format"], group["targets"]) == ("float-quantized", ["Linear"])
    weights, inputs = group["weights"], group["input_activations"]
    assert (weights["strategy"], weights["block_structure"], weights["group_size"]) == ("block", [128, 128], None)
    assert (inputs["strategy"], inputs["group_size"], inputs["dynamic"]) == ("group", 128, True)
    assert settings(engine)["dtype"] == "bfloat16"


def test_squares_that_servers_would_put_together_must_be_whole(sample_checkpoint: Path, sample_graph: ir.Model) -> None:
    step = QuantizeChannels(budget=LOOSE, dtype="fp8", activations="per_token", granularity="block", head=False)
    _, exported = export((Checkpoint.open(sample_checkpoint), sample_graph), step)
    name = "model.layers.0.mlp.gate_proj.weight"
    narrow = replace(cast(ChannelMatrix, exported.quantized[name]), n=700)
    with pytest.raises(UnsupportedError, match="700 output features are not a multiple of 128") as caught:
        check(replace(exported, quantized={**exported.quantized, name: narrow}))
    assert "granularity: channel" in (caught.value.hint or "")


def test_nvfp4_is_packed_with_scales_that_layers_share(bf16_llama: Traced, tmp_path: Path) -> None:
    checkpoint, _ = bf16_llama
    _, engine = write(bf16_llama, tmp_path, QuantizeFp4(budget=LOOSE))
    found = tensors(engine / "model.safetensors")

    names = [f"model.layers.0.self_attn.{each}_proj" for each in "qkv"]
    weights = [checkpoint.tensor(f"{name}.weight").numpy().astype(np.float32) for name in names]
    divisor = np.float32(6 * 448) / np.float32(max(np.abs(weight).max() for weight in weights))
    for name, weight in zip(names, weights, strict=True):
        assert found[f"{name}.weight_global_scale"] == pytest.approx(divisor, rel=2e-7)
        assert np.float32(1) / found[f"{name}.weight_global_scale"] == np.float32(1) / divisor
        assert found[f"{name}.input_global_scale"] == pytest.approx(6 * 448 / 4.0)
        scales = found[f"{name}.weight_scale"]
        assert (scales.dtype, scales.shape) == (ml_dtypes.float8_e4m3fn, (len(weight), weight.shape[1] // 16))
        steps = np.repeat(scales.astype(np.float32), 16, axis=1) / divisor
        codes = of_nibbles(found[f"{name}.weight_packed"])
        nearest = np.abs(np.abs(weight)[..., None] - POINTS * steps[..., None]).min(-1)
        assert (np.abs(weight - codes * steps) <= nearest + 1e-6).all()
        largest = np.abs(weight).reshape(len(weight), -1, 16).max(-1)
        assert np.abs(largest * divisor / 6 / scales.astype(np.float32) - 1).max() < 2**-4
    group = settings(engine)["quantization_config"]["config_groups"]["group_0"]
    assert group["format"] == settings(engine)["quantization_config"]["format"] == "nvfp4-pack-quantized"
    for each in (group["weights"], group["input_activations"]):
        said = [each[key] for key in ("strategy", "group_size", "num_bits", "type")]
        assert said == ["tensor_group", 16, 4, "float"]
    assert (group["weights"]["dynamic"], group["input_activations"]["dynamic"]) == (False, "local")


def test_nvfp4_by_the_names_of_modelopt(bf16_llama: Traced, tmp_path: Path) -> None:
    """The codes and scales of compressed-tensors, whose reciprocals are stored; both files say the same."""
    step = QuantizeFp4(budget=LOOSE, exclude=("*.layers.1.*",))
    ours = tensors(write(bf16_llama, tmp_path / "own", step)[1] / "model.safetensors")
    _, engine = write(bf16_llama, tmp_path, step, spec=BY_MODELOPT)
    found = tensors(engine / "model.safetensors")

    assert found[f"{LAYER}.weight"].tobytes() == ours[f"{LAYER}.weight_packed"].tobytes()
    assert found[f"{LAYER}.weight_scale"].tobytes() == ours[f"{LAYER}.weight_scale"].tobytes()
    for name, other in (("weight_scale_2", "weight_global_scale"), ("input_scale", "input_global_scale")):
        scale = found[f"{LAYER}.{name}"]
        assert (scale.dtype, scale.shape) == (np.float32, ())
        assert scale == np.float32(1) / ours[f"{LAYER}.{other}"][0]
    assert not [name for name in found if name.endswith(("packed", "global_scale"))]
    beside = json.loads((engine / "hf_quant_config.json").read_text())["quantization"]
    inline = settings(engine)["quantization_config"]
    assert (beside["quant_algo"], beside["group_size"], beside["kv_cache_quant_algo"]) == ("NVFP4", 16, None)
    assert (inline["quant_method"], inline["quant_algo"], inline["group_size"]) == ("modelopt", "NVFP4", 16)
    assert {"lm_head", "model.embed_tokens", "model.layers.1.mlp.up_proj"} <= set(beside["exclude_modules"])
    assert beside["exclude_modules"] == inline["ignore"]
    assert "model.layers.0.mlp.up_proj" not in inline["ignore"]


def test_what_the_language_model_does_not_use_is_carried_over_and_ignored(tmp_path: Path) -> None:
    """A head for several tokens, experts in one tensor, a vision tower: bytes as they are, in fp32, too."""
    torch = pytest.importorskip("torch")
    from safetensors.torch import load_file, save_file

    folder = tmp_path / "hf"
    zoo.write("llama-tied", folder, torch.bfloat16)
    others = {
        "mtp.layers.0.mlp.up_proj.weight": torch.ones(96, 64, dtype=torch.bfloat16),
        "mtp.layers.0.mlp.experts.gate_up_proj": torch.ones(2, 96, 64, dtype=torch.bfloat16),
        "mtp.norm.weight": torch.ones(64, dtype=torch.bfloat16),
        "model.visual.patch_embed.proj.weight": torch.full((8, 3, 2, 4, 4), 1e6),
        "model.visual.blocks.0.attn.qkv.weight": torch.ones(96, 32),
    }
    save_file(load_file(folder / "model.safetensors") | others, folder / "model.safetensors", {"format": "pt"})
    checkpoint = Checkpoint.open(folder)
    for name, step in {"bf16": blocks(scales="bf16"), "fp4": QuantizeFp4(budget=LOOSE)}.items():
        _, engine = write((checkpoint, trace(checkpoint)), tmp_path / name, step)
        found = load_file(engine / "model.safetensors")
        assert all(torch.equal(found[name], tensor) for name, tensor in others.items())
        ignored = set(settings(engine)["quantization_config"]["ignore"])
        assert ignored == {
            *("lm_head", "model.embed_tokens", "mtp.layers.0.mlp.up_proj", "mtp.layers.0.mlp.experts"),
            *("model.visual.patch_embed.proj", "model.visual.blocks.0.attn.qkv"),
        }


def test_a_model_in_fp16_has_no_scales_in_bf16(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    zoo.write("llama-tied", tmp_path, torch.float16)
    checkpoint = Checkpoint.open(tmp_path)
    with pytest.raises(UnsupportedError, match=r"config\.json says dtype float16; servers would compute in bf16"):
        check(export((checkpoint, trace(checkpoint)), blocks(scales="bf16"))[1])


def test_layers_in_nvfp4_without_a_shared_scale_are_refused(bf16_llama: Traced) -> None:
    _, exported = export(bf16_llama, QuantizeFp4(budget=LOOSE))
    name = "model.layers.0.self_attn.k_proj.weight"
    alone = replace(cast(Fp4Matrix, exported.quantized[name]), weight_scale=ir.val("own"))
    with pytest.raises(UnsupportedError, match="have scales of their own; the servers take one"):
        check(replace(exported, quantized={**exported.quantized, name: alone}))


def test_outliers_are_moved_in_the_parameters_themselves(bf16_llama: Traced, tmp_path: Path) -> None:
    """SmoothQuant: the norm is divided by powers of two, which bf16 holds, and the matrices that read it multiplied."""
    checkpoint, _ = bf16_llama
    step = QuantizeChannels(budget=LOOSE, dtype="fp8", activations="per_token", head=False)
    model, engine = write(bf16_llama, tmp_path, step)
    found = tensors(engine / "model.safetensors")

    name = "model.layers.0.input_layernorm.weight"
    before = checkpoint.tensor(name).numpy().astype(np.float32)
    factors = np.ones(64, np.float32)
    factors[:5] = [1, 2, 4, 8, 1]
    assert found[name].dtype == ml_dtypes.bfloat16
    assert np.array_equal(found[name].astype(np.float32) * factors, before)
    query = "model.layers.0.self_attn.q_proj.weight"
    ours = of_engine(model)[f"{query}.smoothed.fp8"]
    assert found[query].tobytes() == np.ascontiguousarray(ours.T).tobytes()
    plain = write(bf16_llama, tmp_path / "plain", replace(step, smooth=False))[1]
    assert found[query].tobytes() != tensors(plain / "model.safetensors")[query].tobytes()


def test_the_rest_of_the_checkpoint_is_kept(bf16_llama: Traced, tmp_path: Path) -> None:
    checkpoint, _ = bf16_llama
    _, engine = write(bf16_llama, tmp_path, blocks(exclude=("*.layers.1.*",)))
    found, ignored = tensors(engine / "model.safetensors"), settings(engine)["quantization_config"]["ignore"]

    kept = [name for name in checkpoint.tensors if "layers.0" not in name or "norm" in name]
    assert kept
    for name in kept:
        assert found[name].tobytes() == checkpoint.tensor(name).tobytes(), name
    assert {"lm_head", "model.layers.1.mlp.up_proj", "model.layers.1.self_attn.q_proj"} <= set(ignored)
    assert not any("layers.0" in name for name in ignored)
    for file in ("tokenizer.json", "tokenizer_config.json"):
        assert (engine / file).read_bytes() == (checkpoint.path / file).read_bytes()
    source = json.loads((checkpoint.path / "config.json").read_text())
    assert {key: value for key, value in source.items() if settings(engine).get(key) != value}.keys() <= {"dtype"}


@pytest.mark.parametrize(
    "step",
    [
        blocks(scales="bf16"),
        QuantizeChannels(budget=LOOSE, dtype="fp8", activations="per_token", granularity="block", head=False),
        QuantizeFp4(budget=LOOSE),
    ],
    ids=["int4-bf16", "fp8-block", "nvfp4"],
)
def test_the_reader_of_checkpoints_reads_what_the_graph_multiplies_by(
    sample_checkpoint: Path, sample_graph: ir.Model, tmp_path: Path, step: Any
) -> None:
    traced = (Checkpoint.open(sample_checkpoint), sample_graph)
    _, engine = write(traced, tmp_path, step)
    read = Checkpoint.open(engine).tensor(f"{LAYER}.weight").numpy().astype(np.float32)

    matrix = export(traced, step)[1].quantized[f"{LAYER}.weight"]
    if isinstance(matrix, Fp4Matrix):
        steps = np.repeat(matrix.scales_by_output.astype(np.float32), 16, axis=1)
        wanted = matrix.codes_by_output.astype(np.float32) * (steps * graph.tensor(matrix.weight_scale).numpy())
    elif isinstance(matrix, ChannelMatrix):
        scales = np.repeat(np.repeat(matrix.scales_by_output, 128, axis=0), 128, axis=1)
        wanted = matrix.by_output.astype(np.float32) * scales
    else:
        wanted = dequantize(matrix.read())
    np.testing.assert_allclose(read, wanted, rtol=2.0**-8)  # it rounds to the dtype of the model


def test_shards_have_an_index(bf16_llama: Traced, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _, whole = write(bf16_llama, tmp_path / "whole", blocks())
    monkeypatch.setattr(compressed_tensors, "SHARD_BYTES", 30_000)
    _, engine = write(bf16_llama, tmp_path / "shards", blocks())

    index = json.loads((engine / "model.safetensors.index.json").read_text())
    files = sorted(engine.glob("*.safetensors"))
    assert len(files) > 2
    assert files[0].name == f"model-00001-of-{len(files):05}.safetensors"
    found = {name: (file.name, value) for file in files for name, value in tensors(file).items()}
    assert {name: file for name, (file, _) in found.items()} == index["weight_map"]
    wanted = tensors(whole / "model.safetensors")
    assert found.keys() == wanted.keys()
    assert all(np.array_equal(found[name][1], value) for name, value in wanted.items())
    assert index["metadata"]["total_size"] == sum(value.nbytes for value in wanted.values())


def test_the_same_input_gives_the_same_bytes(bf16_llama: Traced, tmp_path: Path) -> None:
    engines = [write(bf16_llama, tmp_path / name, blocks())[1] for name in ("a", "b")]
    first, second = ({file.name: file.read_bytes() for file in engine.iterdir()} for engine in engines)
    assert first == second


def test_a_bit_that_is_not_written_is_noticed(
    bf16_llama: Traced, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pack = layout.pack_bits

    def wrong(codes: NDArray[np.uint8], bits: int) -> NDArray[np.uint8]:
        packed = pack(codes, bits)
        packed[-1, -1] ^= 16
        return packed

    monkeypatch.setattr(layout, "pack_bits", wrong)
    with pytest.raises(VerificationError, match="was not written as it was quantized"):
        write(bf16_llama, tmp_path, blocks())


@pytest.mark.parametrize(
    ("steps", "message", "hint"),
    [
        ([blocks(scales="fp32")], "its scales are fp32", "scales: bf16"),
        (
            [blocks(scales="bf16", exclude=("*.mlp.*",)), blocks(exclude=("*.self_attn.*",))],
            "scales in bf16 and fp16",
            "one `scales`",
        ),
        ([blocks(embedding_bits=8)], "read embedding and head as they are", "embedding_bits: 16"),
        ([blocks(exclude=("*.q_proj.*",))], "have different formats", "exclude all of them"),
        ([blocks(block_size=128)], "not a multiple of 128", "block_size"),
        ([QuantizeChannels(budget=LOOSE, dtype="fp8")], "tied head of its own", "head: false"),
        ([], "nothing is quantized", ""),
    ],
)
def test_what_is_not_held_exactly_is_refused_before_a_weight_is_read(
    bf16_llama: Traced, steps: list[Any], message: str, hint: str
) -> None:
    with pytest.raises(UnsupportedError, match=message) as caught:
        check(export(bf16_llama, *steps)[1])
    assert hint in (caught.value.hint or "")


@pytest.mark.parametrize("step", [PackQkv, QuantizeKvCache, CpuKernels, LowerPrecision])
def test_a_pass_that_no_checkpoint_can_say_is_refused_by_name(step: type[Pass]) -> None:
    with pytest.raises(UnsupportedError, match=f"^{step.name}: .*cannot say what this pass does") as caught:
        check_passes("compressed-tensors", [FuseNorms, step], passes.ALL)
    assert str(caught.value.hint).endswith(
        "takes fuse-norms, quantize-kv-fp8, flash-attention, quantize-weights, quantize-channels, quantize-fp4, "
        "quantize-mx, quantize-experts"
    )
    check_passes("onnxruntime", [step], passes.ALL)


def test_a_parameter_that_a_pass_changed_is_refused(bf16_llama: Traced) -> None:
    checkpoint, model = bf16_llama
    copy = model.clone()
    norm = copy.graph.initializers["model.layers.0.input_layernorm.weight"]
    norm.const_value = ir.Tensor(graph.tensor(norm).numpy() * 2, name=norm.name)
    with pytest.raises(UnsupportedError, match=r"parameter model.layers.0.input_layernorm.weight is no longer"):
        export_proxy.exported(copy, model, checkpoint)


# --- the tool itself -------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "step",
    [
        blocks(),
        blocks(symmetric=True),
        blocks(bits=8),
        QuantizeChannels(budget=LOOSE, dtype="fp8", head=False),
        QuantizeChannels(budget=LOOSE, dtype="fp8", activations="static", head=False, smooth=False),
        QuantizeChannels(budget=LOOSE, dtype="int8", activations="per_token", head=False, smooth=False),
        QuantizeChannels(budget=LOOSE, dtype="fp8", activations="per_token", granularity="block", head=False),
        QuantizeFp4(budget=LOOSE),
    ],
    ids=["int4", "int4-symmetric", "int8", "fp8", "fp8-static", "int8-per-token", "fp8-block", "nvfp4"],
)
def test_compressed_tensors_decompresses_the_weights_that_the_graph_has(
    bf16_llama: Traced, sample_checkpoint: Path, sample_graph: ir.Model, tmp_path: Path, step: Any
) -> None:
    tool = pytest.importorskip("compressed_tensors.compressors", reason="pip install compressed-tensors==0.20.0")
    import torch
    from compressed_tensors.quantization import QuantizationConfig

    in_squares = isinstance(step, QuantizeChannels) and step.in_squares
    traced = (Checkpoint.open(sample_checkpoint), sample_graph) if in_squares else bf16_llama
    model, engine = write(traced, tmp_path, step)
    config = QuantizationConfig.model_validate(settings(engine)["quantization_config"])
    [scheme] = config.config_groups.values()
    compressor = tool.BaseCompressor.get_value_from_registry(config.format)
    with safe_open(str(engine / "model.safetensors"), "pt") as opened:
        own = {
            name.removeprefix(f"{LAYER}."): opened.get_tensor(name)
            for name in opened.keys()  # noqa: SIM118
            if name.startswith(f"{LAYER}.")
        }
    own["weight_scale"] = own["weight_scale"].float()  # in whose dtype it multiplies
    theirs = compressor.decompress(own, scheme)["weight"].to(torch.float32).numpy()

    ours = of_engine(model)
    if isinstance(step, QuantizeChannels):
        name = f"{LAYER}.weight.{step.dtype}"
        scales = ours[f"{name}.scales"]
        wanted = (ours[name].astype(np.float32) * (np.repeat(scales, 128, axis=0) if in_squares else scales)).T
    elif isinstance(step, QuantizeFp4):
        matrix = cast(Fp4Matrix, export(bf16_llama, step)[1].quantized[f"{LAYER}.weight"])
        steps = np.repeat(matrix.scales_by_output.astype(np.float32), 16, axis=1)
        wanted = matrix.codes_by_output.astype(np.float32) * (steps * graph.tensor(matrix.weight_scale).numpy())
        np.testing.assert_allclose(theirs, wanted, rtol=2.0**-7)  # theirs are in bf16
        again = compressor.compress({**own, "weight": torch.from_numpy(wanted)}, scheme)
        packed = (each["weight_packed"].numpy() for each in (again, own))  # but for the sign of 0, which they drop
        assert np.array_equal(*map(of_nibbles, packed))
        return
    else:
        [made] = [each for each in export(bf16_llama, step)[1].quantized.items() if each[0] == f"{LAYER}.weight"]
        wanted = dequantize(made[1].read())  # type: ignore[union-attr]
    assert np.array_equal(theirs, wanted)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_modelopt_quantizes_to_the_same_nvfp4(bf16_llama: Traced, tmp_path: Path) -> None:
    """Down projections, which share their scale with none: codes, block scales, and the scale up to its last bit."""
    pytest.importorskip("modelopt", reason="pip install --no-deps nvidia-modelopt==0.47.0")
    import torch
    from modelopt.torch.quantization.qtensor import NVFP4QTensor

    checkpoint, _ = bf16_llama
    _, engine = write(bf16_llama, tmp_path, QuantizeFp4(budget=LOOSE))
    found = tensors(engine / "model.safetensors")
    weight = torch.from_numpy(checkpoint.tensor(f"{LAYER}.weight").numpy().astype(np.float32))
    quantized, scales, scale = NVFP4QTensor.quantize(weight, 16)
    assert np.array_equal(quantized._quantized_data.numpy(), found[f"{LAYER}.weight_packed"])
    assert scales.view(torch.uint8).numpy().tobytes() == found[f"{LAYER}.weight_scale"].tobytes()
    assert 1 / scale.item() == pytest.approx(found[f"{LAYER}.weight_global_scale"].item(), rel=2e-7)


def test_the_documentation_has_the_table_of_servers() -> None:
    page = Path(__file__).parents[2] / "docs/other-runtimes.md"
    assert servers.table() in page.read_text(encoding="utf-8")


def test_every_format_that_is_written_stands_in_the_table_of_servers() -> None:
    schemes_ = [
        *(LayerScheme("pack-quantized", bits, "int", "group", 32) for bits in (4, 8)),
        *(LayerScheme("float-quantized", 8, "float", "channel", inputs=each) for each in INPUTS),
        *(LayerScheme("int-quantized", 8, "int", "channel", inputs=each) for each in INPUTS[1:]),
        LayerScheme("float-quantized", 8, "float", "tensor", inputs="static"),
        LayerScheme("float-quantized", 8, "float", "block", 128, inputs="per_token"),
        LayerScheme("nvfp4-pack-quantized", 4, "float", "tensor_group", 16),
        LayerScheme("mxfp4-pack-quantized", 4, "float", "group", 32, inputs="grouped"),
        LayerScheme("mxfp8-quantized", 8, "float", "group", 32, inputs="grouped"),
    ]
    written = {name for each in schemes_ for name in Schemes("compressed-tensors", {"": each}).names}
    written |= {f"{name}-modelopt" for name in modelopt.ALGORITHMS}
    assert written == set(servers.SERVERS)
    assert servers.described(frozenset({"int4", "int8"})) == (
        "by their sources: vLLM on GPUs 0.32.0, SGLang 0.5.23; refused by: vLLM on CPUs 0.32.0, TensorRT-LLM of 2026-11"
    )
    assert "TensorRT-LLM" in servers.described(frozenset({"fp8-per_token"})).partition("refused by")[0]
    refused = servers.described(frozenset({"fp8-per_token"}), caches=True).partition("not known of")[2]
    assert "TensorRT-LLM" in refused, "it reads the scheme, and scales of caches by other names"
