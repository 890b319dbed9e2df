"""GGUF files in llama.cpp itself: logits of whole models, and the tokens of texts.

`pip install gguf==0.19.0 llama-cpp-python==0.3.36`, which compiles llama.cpp; LLAMA_CPP_LIB_PATH names a folder with
its libraries where they are compiled already.
"""

from __future__ import annotations

import ctypes
import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from transformers import AutoModelForCausalLM

from llmforge import targets
from llmforge.backends.engines import BuildRequest
from llmforge.backends.exported_parameters import Exported
from llmforge.backends.gguf import builder as gguf
from llmforge.backends.gguf import packing
from llmforge.checkpoint import Checkpoint
from llmforge.compile import export_proxy
from llmforge.measure import runtime_process
from llmforge.passes import QuantizeWeights
from llmforge.quantization import allocation
from llmforge.quantization.grid import IQ4_NL, IQ4_XS, Q2_K, Grid
from llmforge.quantization.grids import dequantize, round_to_nearest
from llmforge.quantization.statistics import Statistics
from llmforge.recipe import EngineSpec
from llmforge.rewrite.pass_base import Budget, Context
from llmforge.trace import trace

from ..models import zoo
from ..models.checkpoints import write_tokenizer

pytest.importorskip("gguf", reason="pip install gguf==0.19.0")
llama_cpp = pytest.importorskip("llama_cpp", reason="pip install llama-cpp-python==0.3.36")

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]

SPEC = EngineSpec(backend="gguf", max_context=64)
LOCAL = targets.local()
K_TYPES = ("Q3_K", "Q4_K", "Q5_K", "Q6_K")
TEXT = list(range(3, 40))
SMALL: dict[str, Any] = {**zoo.BASE, "head_dim": 16}
MODELS: dict[str, dict[str, Any]] = {
    "llama": {},
    "llama-rope": {"rope_parameters": zoo.LLAMA3},
    "llama-linear": {"rope_parameters": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}},
    "llama-bias": {"attention_bias": True, "tie_word_embeddings": True},
    "mistral": {"sliding_window": None},
    "qwen2": {},
    "qwen3": {"head_dim": 32},
    "llama-wide": {"hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 8, "head_dim": 32},
}


def written(
    checkpoint: Checkpoint, folder: Path, *steps: Any, statistics: Statistics | None = None
) -> tuple[Path, Any]:
    traced = trace(checkpoint)
    model = traced.clone()
    for step in steps:
        assert step.run(model, Context(LOCAL, statistics))
    exported = export_proxy.exported(model, traced, checkpoint)
    gguf.build(BuildRequest(model, folder, SPEC, LOCAL, [0], 0, exported=exported))
    return folder, exported


def random(folder: Path, name: str) -> Any:
    """Write a random model of transformers, and return it."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    config = CONFIG_MAPPING[name.partition("-")[0]](**{**SMALL, **MODELS[name]})
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            drawn = torch.randn(parameter.shape, generator=generator)
            if parameter.dim() > 1:
                parameter.copy_(drawn / parameter.shape[-1] ** 0.5)
            else:
                parameter.add_(0.1 * drawn)
    model.save_pretrained(folder)
    write_tokenizer(folder)
    tokenizer = json.loads((folder / "tokenizer.json").read_text())  # llama.cpp wants a merge
    tokenizer["model"]["vocab"]["ab"] = len(tokenizer["model"]["vocab"])
    tokenizer["model"]["merges"] = [["a", "b"]]
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    return model


@torch.no_grad()
def logits(model: Any) -> NDArray[np.float32]:
    found: NDArray[np.float32] = model(input_ids=torch.tensor([TEXT])).logits[0].numpy()
    return found


@pytest.mark.parametrize("name", MODELS)
def test_an_unquantized_model_has_the_logits_of_transformers(name: str, tmp_path: Path) -> None:
    """Names, permutation, rotary embedding and sizes: in fp32, nothing else differs."""
    expected = logits(random(tmp_path / "checkpoint", name))
    folder, _ = written(Checkpoint.open(tmp_path / "checkpoint"), tmp_path / "engine")

    found = runtime_process.LlamaCpp(str(folder)).text(TEXT, None)

    print(name, "largest difference", np.abs(found - expected).max(), "of", expected.std())
    assert np.abs(found - expected).max() < 1e-4 * expected.std()


def apart_and_lost(model: Any, folder: Path, exported: Exported) -> tuple[float, float]:
    """Say how far llama.cpp's logits are from those of the dequantized weights, and these from those of the source.

    Both are in deviations of the logits. The model has the dequantized weights afterwards.
    """
    before = logits(model)
    for tensor, matrix in exported.quantized.items():
        model.state_dict()[tensor].copy_(torch.from_numpy(dequantize(matrix.read())))
    expected = logits(model)
    found = runtime_process.LlamaCpp(str(folder)).text(TEXT, 1)
    size = expected.std()
    return float(np.abs(found - expected).mean() / size), float(np.abs(before - expected).mean() / size)


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("name", ["llama", "qwen3"])
def test_a_quantized_model_has_the_logits_of_its_dequantized_weights(name: str, bits: int, tmp_path: Path) -> None:
    """llama.cpp rounds activations to int8, so a few percent of a standard deviation are its own."""
    model = random(tmp_path / "checkpoint", name)
    step = QuantizeWeights(
        budget=Budget(kld_mean=1.0), bits=bits, block_size=32, symmetric=True, scales="fp16", method="rtn"
    )
    folder, exported = written(Checkpoint.open(tmp_path / "checkpoint"), tmp_path / "engine", step)
    apart, lost = apart_and_lost(model, folder, exported)
    print(
        f"{name}, {bits} bits: llama.cpp {apart:.4f} of a deviation from our weights, they {lost:.4f} from the source"
    )
    assert apart < 0.03
    assert bits == 8 or apart < lost / 2


@pytest.mark.parametrize("bits", [3, 4, 5, 6])
@pytest.mark.parametrize(("name", "names"), [("llama", ("Q4_0", "Q4_1", "Q5_1", "Q8_0")), ("llama-wide", K_TYPES)])
def test_types_of_gguf_have_the_logits_of_their_dequantized_weights(
    name: str, names: tuple[str, ...], bits: int, tmp_path: Path
) -> None:
    """Of K types llama.cpp rounds 256 activations by one scale, which loses more than blocks of 32."""
    model = random(tmp_path / "checkpoint", name)
    step = QuantizeWeights(budget=Budget(kld_mean=1.0), bits=bits, embedding_bits=bits, codes="gguf", method="rtn")
    folder, exported = written(Checkpoint.open(tmp_path / "checkpoint"), tmp_path / "engine", step)
    kinds = {packing.type_of(matrix.grid, matrix.k) for matrix in exported.quantized.values()}
    assert kinds == {names[bits - 3]}
    apart, lost = apart_and_lost(model, folder, exported)
    print(f"{name}, {kinds}: llama.cpp {apart:.4f} of a deviation from our weights, they {lost:.4f} from the source")
    assert apart < 0.05
    assert bits > 4 or apart < lost / 2


@pytest.mark.parametrize(
    ("name", "grid", "wanted"),
    [("llama-wide", IQ4_XS, "IQ4_XS"), ("llama-wide", Q2_K, "Q2_K"), ("llama", IQ4_NL, "IQ4_NL")],
)
def test_types_that_auto_alone_chooses_have_the_logits_of_their_dequantized_weights(
    name: str, grid: Grid, wanted: str, tmp_path: Path
) -> None:
    model = random(tmp_path / "checkpoint", name)
    checkpoint = Checkpoint.open(tmp_path / "checkpoint")
    chosen = {
        tensor: round_to_nearest(checkpoint.tensor(tensor).numpy(), grid)
        for tensor, entry in checkpoint.tensors.items()
        if len(entry.shape) > 1
    }
    step = QuantizeWeights(budget=Budget(kld_mean=1.0), codes="gguf", method="auto", weight_bits=8.0)
    folder, exported = written(checkpoint, tmp_path / "engine", step, statistics=Statistics(1, 1, chosen, {}))
    kinds = {packing.type_of(matrix.grid, matrix.k) for matrix in exported.quantized.values()}
    assert kinds == {wanted}
    apart, lost = apart_and_lost(model, folder, exported)
    print(f"{name}, {kinds}: llama.cpp {apart:.4f} of a deviation from our weights, they {lost:.4f} from the source")
    assert apart < 0.05
    assert apart < lost / 2


@pytest.mark.parametrize("grid", allocation.GGUF, ids=lambda grid: grid.format.name)
def test_llama_cpp_reads_the_numbers_of_each_type(grid: Grid) -> None:
    width = 480 if grid == IQ4_NL else 512  # in whole superblocks IQ4_XS takes its place
    weight = (0.05 * np.random.default_rng(0).standard_normal((8, width))).astype(np.float32)
    matrix = round_to_nearest(weight, grid)
    packed, found = packing.pack(matrix), np.empty(weight.shape, np.float32)
    kind = packing.type_of(grid, weight.shape[1])
    assert kind is not None
    folder = Path(os.environ.get("LLAMA_CPP_LIB_PATH") or Path(llama_cpp.__file__).parent / "lib")
    [library] = folder.glob("libggml-base.so")
    read = getattr(ctypes.CDLL(str(library)), f"dequantize_row_{kind.lower().replace('_k', '_K')}")
    read(packed.ctypes.data_as(ctypes.c_void_p), found.ctypes.data_as(ctypes.c_void_p), ctypes.c_int64(found.size))
    assert np.array_equal(found, dequantize(matrix))


@pytest.mark.parametrize(
    "text", ["To install the package, run:\n\n\tpip  install x==1.2.345", "naïve café — 你好 🙂", " a  b"]
)
def test_texts_have_the_tokens_of_the_tokenizer(sample_checkpoint: Path, tmp_path: Path, text: str) -> None:
    checkpoint = Checkpoint.open(sample_checkpoint)
    folder, _ = written(checkpoint, tmp_path / "engine")
    loaded = runtime_process.LlamaCpp(str(folder))
    vocabulary = llama_cpp.llama_model_get_vocab(loaded._model)
    data = text.encode()
    ids = (llama_cpp.llama_token * 256)()
    count = llama_cpp.llama_tokenize(vocabulary, data, len(data), ids, 256, True, False)
    assert list(ids[:count]) == checkpoint.tokenizer.encode(text).ids
    template = llama_cpp.llama_model_chat_template(loaded._model, None)
    assert ctypes.string_at(template).decode() == checkpoint.chat_template
    assert llama_cpp.llama_vocab_eos(vocabulary) == checkpoint.eos_token_ids[0]
