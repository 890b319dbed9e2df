"""Weights beside those that the public tools dequantize: `pip install --no-deps gptqmodel autoawq compressed-tensors`.

Logits are beside those of transformers, which runs GPTQ and AWQ through gptqmodel (and its logbar, device-smi, pypcre,
tokenicer, defuser, accelerate, pillow) and optimum.

They are installed apart from this, and found on PYTHONPATH; a test whose tool is not there is skipped.

    pytest -m slow tests/checkpoint/quantized/test_public_tools.py
"""

from __future__ import annotations

import importlib.util
from functools import partial
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from safetensors.torch import load_file as load_torch
from safetensors.torch import save_file as save_torch
from transformers import AutoModelForCausalLM, AwqConfig, CompressedTensorsConfig, GPTQConfig

from llmforge.checkpoint import Checkpoint
from llmforge.trace import trace
from llmforge.trace.export import skeleton
from llmforge.verification import probe

from . import writers

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]
UP = "model.layers.0.mlp.up_proj"
N, K = 128, 64
IDS = torch.tensor([[5, 9, 200, 31, 7, 7, 64, 120]])


def ours(folder: Path, name: str = UP) -> torch.Tensor:
    """Dequantize a weight of a checkpoint here."""
    array = Checkpoint.open(folder).tensor(f"{name}.weight").numpy()
    if array.dtype == ml_dtypes.bfloat16:
        return torch.from_numpy(array.view(np.uint16)).view(torch.bfloat16)
    return torch.from_numpy(array)


@pytest.mark.parametrize("act", [False, True])
@pytest.mark.parametrize("symmetric", [False, True])
@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize("bits", [2, 3, 4, 8])
def test_gptqmodel(tiny_checkpoint: Path, bits: int, version: int, symmetric: bool, act: bool) -> None:
    qlinear = pytest.importorskip("gptqmodel.nn_modules.qlinear.torch", reason="gptqmodel is not installed")
    from gptqmodel.utils.model import convert_gptq_v1_to_v2_format_module

    def store(name: str, shape: tuple[int, int]) -> tuple[writers.Tensors, NDArray[Any]]:
        made = writers.draw(*shape, bits, shape[1] // 32, symmetric=symmetric, shuffled=act)
        return writers.gptq(name, made, bits, version=version), made.weight

    form = "gptq" if version == 1 else "gptq_v2"
    config = {"quant_method": "gptq", "bits": bits, "group_size": 32, "desc_act": act, "sym": symmetric}
    writers.quantize(tiny_checkpoint, {**config, "checkpoint_format": form}, store)
    tool = qlinear.TorchLinear(
        bits=bits, group_size=32, sym=symmetric, desc_act=act, in_features=K, out_features=N, bias=False,
        pack_dtype=torch.int32,
    )  # fmt: skip
    stored = load_torch(tiny_checkpoint / "model.safetensors")
    for role in ("qweight", "qzeros", "scales", "g_idx"):
        getattr(tool, role).data.copy_(stored[f"{UP}.{role}"])
    if version == 1:
        convert_gptq_v1_to_v2_format_module(tool, bits, torch.int32)
    tool.post_init()
    assert torch.equal(ours(tiny_checkpoint), tool.dequantize_weight().T)


def test_autoawq(tiny_checkpoint: Path) -> None:
    found = importlib.util.find_spec("awq")
    if found is None or not found.submodule_search_locations:
        pytest.skip("autoawq is not installed")
    file = Path(found.submodule_search_locations[0]) / "utils" / "packing_utils.py"  # the package wants GPUs
    spec = importlib.util.spec_from_file_location("packing_utils", file)
    assert spec is not None
    assert spec.loader is not None
    tool = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(tool)

    def store(name: str, shape: tuple[int, int]) -> tuple[writers.Tensors, NDArray[Any]]:
        made = writers.draw(*shape, 4, shape[1] // 32)
        return writers.awq(name, made), made.weight

    config = {"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True, "version": "gemm"}
    writers.quantize(tiny_checkpoint, config, store)
    stored = load_torch(tiny_checkpoint / "model.safetensors")
    parts = [stored[f"{UP}.{role}"] for role in ("qweight", "qzeros", "scales")]
    assert torch.equal(ours(tiny_checkpoint), tool.dequantize_gemm(*parts, 4, 32).T)


@pytest.mark.parametrize("act", [False, True])
@pytest.mark.parametrize("symmetric", [False, True])
@pytest.mark.parametrize("form", ["gptq", "gptq_v2"])
@pytest.mark.parametrize("bits", [4, 8])
def test_logits_of_gptq(tiny_checkpoint: Path, bits: int, form: str, symmetric: bool, act: bool) -> None:
    def store(name: str, shape: tuple[int, int]) -> tuple[writers.Tensors, NDArray[Any]]:
        made = writers.draw(*shape, bits, shape[1] // 32, symmetric=symmetric, shuffled=act)
        return writers.gptq(name, made, bits, version=1 if form == "gptq" else 2), made.weight

    said = {"bits": bits, "group_size": 32, "desc_act": act, "sym": symmetric}
    writers.quantize(tiny_checkpoint, {"quant_method": "gptq", "checkpoint_format": form, **said}, store)
    how = GPTQConfig(**said, backend="gptq_torch", checkpoint_format=form)
    loaded = by_gptqmodel(tiny_checkpoint, how, "TorchLinear")
    hold(tiny_checkpoint, logits_of(loaded), 1e-5)


def test_logits_of_awq(tiny_checkpoint: Path) -> None:
    def store(name: str, shape: tuple[int, int]) -> tuple[writers.Tensors, NDArray[Any]]:
        made = writers.draw(*shape, 4, shape[1] // 32)
        return writers.awq(name, made), made.weight

    config = {"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True, "version": "gemm"}
    writers.quantize(tiny_checkpoint, config, store)
    loaded = by_gptqmodel(tiny_checkpoint, AwqConfig(bits=4, group_size=32, backend="torch_awq"), "AwqTorchLinear")
    hold(tiny_checkpoint, logits_of(loaded), 1e-3)  # it rounds what every layer reads and makes to fp16
    for module in loaded.modules():
        if type(module).__name__ == "AwqTorchLinear":
            weight = module(torch.eye(module.in_features, dtype=torch.float16)).float()  # [K, N], exact
            module.forward = partial(torch.matmul, other=weight)
    hold(tiny_checkpoint, logits_of(loaded), 1e-5)


def by_gptqmodel(folder: Path, how: Any, layer: str) -> Any:
    """Load a checkpoint as transformers does, in fp32, with modules called `layer`."""
    pytest.importorskip("gptqmodel", reason="gptqmodel is not installed")
    pytest.importorskip("optimum.gptq", reason="optimum is not installed")
    loaded = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, quantization_config=how)
    assert type(loaded.model.layers[0].mlp.up_proj).__name__ == layer
    return loaded


def logits_of(loaded: Any) -> NDArray[Any]:
    with torch.inference_mode():
        return loaded(IDS).logits.numpy()


def hold(folder: Path, wanted: NDArray[Any], limit: float) -> None:
    """Hold logits of the model with weights that are dequantized here, and of the compiled graph, against `wanted`."""
    checkpoint = Checkpoint.open(folder)
    session = probe.open_session(trace(checkpoint), probe.InitializerArrays(), 1)
    [compiled] = probe.logits(session, probe.schedule("text", [IDS[0].numpy()], [(IDS.shape[1],)]))
    for found in (logits_of(skeleton.load(checkpoint)), compiled):
        assert np.abs(wanted - found).max() <= limit * np.abs(wanted).max()


FORMS = {
    "w4-group": ("pack-quantized", {"num_bits": 4, "strategy": "group", "group_size": 32}),
    "w4-group-asymmetric": (
        "pack-quantized",
        {"num_bits": 4, "strategy": "group", "group_size": 32, "symmetric": False},
    ),
    "w8-channel": ("pack-quantized", {"num_bits": 8, "strategy": "channel"}),
    "w3-group": ("pack-quantized", {"num_bits": 3, "strategy": "group", "group_size": 32}),
    "int8-channel": ("int-quantized", {"num_bits": 8, "strategy": "channel"}),
    "int8-tensor": ("int-quantized", {"num_bits": 8, "strategy": "tensor"}),
    "int8-asymmetric": ("int-quantized", {"num_bits": 8, "strategy": "channel", "symmetric": False}),
    "fp8-tensor": ("float-quantized", {"num_bits": 8, "type": "float", "strategy": "tensor"}),
    "fp8-channel": ("float-quantized", {"num_bits": 8, "type": "float", "strategy": "channel"}),
    "fp8-block": (
        "float-quantized",
        {"num_bits": 8, "type": "float", "strategy": "block", "block_structure": [32, 32]},
    ),
    "nvfp4": ("nvfp4-pack-quantized", {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16}),
}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("form", FORMS)
def test_compressed_tensors(tiny_checkpoint: Path, form: str, dtype: torch.dtype) -> None:
    """The tool compresses; its own decompression and transformers' run of the checkpoint are what is wanted."""
    pytest.importorskip("compressed_tensors", reason="compressed-tensors is not installed")
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme

    name, said = FORMS[form]
    args = QuantizationArgs(**said)
    scheme = QuantizationScheme(targets=["Linear"], weights=args)
    compressor = BaseCompressor.get_value_from_registry(name)
    expected: dict[str, torch.Tensor] = {}

    def store(module: str, shape: tuple[int, int]) -> tuple[writers.Tensors, NDArray[Any]]:
        torch.manual_seed(shape[0])
        weight = torch.randn(shape, dtype=dtype) / 20
        state = {"weight": weight, **_parameters(weight, said)}
        made = compressor.compress(state, scheme)
        expected[module] = compressor.decompress(dict(made), scheme)["weight"]
        return {f"{module}.{key}": _numpy(value) for key, value in made.items()}, np.empty(0)

    config = writers.compressed(name, {**said, "symmetric": said.get("symmetric", True)})
    writers.quantize(tiny_checkpoint, config, store)
    if dtype == torch.bfloat16:
        _rounded(tiny_checkpoint)
    for module, weight in expected.items():
        mine = ours(tiny_checkpoint, module)
        assert mine.dtype == weight.dtype
        assert torch.equal(mine, weight), module
    # compressed, transformers 5.23 loads no zero points that are packed
    how = CompressedTensorsConfig(dequantize=not said.get("symmetric", True))
    runs = torch.bfloat16 if form == "nvfp4" else torch.float32  # the tool dequantizes nvfp4 to bf16 alone
    theirs = AutoModelForCausalLM.from_pretrained(tiny_checkpoint, dtype=runs, quantization_config=how)
    with torch.inference_mode():
        wanted = theirs(IDS).logits
        found = skeleton.load(Checkpoint.open(tiny_checkpoint))(IDS).logits
    # It dequantizes to fp32 where ours rounds to the dtype of the scales, as the tool itself does.
    limit = 1e-5 if dtype == torch.float32 and form != "nvfp4" else 0.02
    assert (wanted - found).abs().max() <= limit * wanted.abs().max()


def _parameters(weight: torch.Tensor, said: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Choose scales, and zero points, as observers do; any would do here."""
    n, k = weight.shape
    if said["strategy"] == "block":
        blocks = weight.reshape(n // 32, 32, k // 32, 32).abs().amax((1, 3))
        return {"weight_scale": (blocks / 448).to(weight.dtype)}
    size = {"group": 32, "tensor_group": 16, "channel": k, "tensor": k}[said["strategy"]]
    largest = weight.reshape(n, k // size, size).abs().amax(-1)
    if said["strategy"] == "tensor":
        largest = weight.abs().max().reshape(1)
    if said["strategy"] == "tensor_group":
        whole = (448 * 6 / weight.abs().max().float()).reshape(1)
        return {"weight_scale": (largest.float() * whole / 6).to(weight.dtype), "weight_global_scale": whole}
    steps = 448 if said.get("type") == "float" else 2 ** (said["num_bits"] - 1) - 1
    made = {"weight_scale": (largest / steps).to(weight.dtype)}
    if said.get("symmetric", True):
        return made
    return {**made, "weight_zero_point": torch.randint(-3, 4, largest.shape, dtype=torch.int8)}


def _numpy(tensor: torch.Tensor) -> NDArray[Any]:
    tensor = tensor.detach().contiguous()
    if tensor.dtype == torch.bfloat16:
        return tensor.view(torch.uint16).numpy().view(ml_dtypes.bfloat16)
    if tensor.dtype == torch.float8_e4m3fn:
        return tensor.view(torch.uint8).numpy().view(ml_dtypes.float8_e4m3fn)
    return tensor.numpy()


def _rounded(folder: Path) -> None:
    """Store what is not quantized in bf16, too."""
    file = folder / "model.safetensors"
    stored = load_torch(file)
    rest = {name: tensor.to(torch.bfloat16) for name, tensor in stored.items() if "_proj." not in name}
    save_torch({**stored, **rest}, file)
