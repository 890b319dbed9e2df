"""A GGUF file for llama.cpp: `engine/model.gguf`, with the tokenizer and the chat template in it.

What passes made of a weight [N, K] decides how it stands there (ggml/src/ggml-common.h), where that holds it exactly:

- the types of quantize-weights with `codes: gguf`: Q3_K, Q4_K, Q5_K and Q6_K, and where 256 does not divide the input
  features Q4_0, Q4_1, Q5_0, Q5_1 and Q8_0 (`packing`);
- Q4_0 and Q8_0, of `bits: 4` and `bits: 8` with `symmetric: true, scales: fp16`. A block of ours may be a multiple of
  32: its blocks there have the same scale.

Zero points are refused: Q4_1 has the least weight of a block in fp16, and -zero_point·scale is none. Other matrices
stay in their dtype, vectors become F32. llama.cpp's rotary embedding of `llama` pairs neighbours: the rows of each head
of queries and keys are in that order.

What was written is read by the gguf package and compared. The same input gives the same bytes.
Sources: conversion/base.py, llama.py, qwen.py of llama.cpp; the gguf package 0.19.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from types import ModuleType
from typing import Any, Final

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from llmforge.backends import signatures
from llmforge.backends.engines import BuildRequest, BuiltEngine
from llmforge.backends.exported_parameters import Blocks, Exported, KernelBlocks, Quantized
from llmforge.backends.gguf import packing
from llmforge.base import extras, hashed_files
from llmforge.base.errors import UnsupportedError, VerificationError
from llmforge.base.progress import Progress
from llmforge.checkpoint import Checkpoint
from llmforge.checkpoint.gguf import blocks
from llmforge.quantization import grids
from llmforge.recipe import EngineSpec
from llmforge.rewrite.pass_base import Changes
from llmforge.runtime.config import FILE
from llmforge.targets import Target

BACKEND, MODEL_FILE = "gguf", "model.gguf"
ALIGNMENT: Final = 32  # bytes, GGUF's default
HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"
_UNUSED = ".rotary_emb.inv_freq"  # buffers that older checkpoints hold
# What a file is said to be, by the type of most of its quantized weights, embedding and head apart.
_FILE_TYPES = {"Q3_K": "MOSTLY_Q3_K_M", "Q4_K": "MOSTLY_Q4_K_M", "Q5_K": "MOSTLY_Q5_K_M"}
_QUANTIZED = {kind.name: kind for kind in blocks.TYPES.values() if kind.quantized}
_PLAIN = {ir.DataType.FLOAT: "F32", ir.DataType.FLOAT16: "F16", ir.DataType.BFLOAT16: "BF16"}
_LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|"
    r"\s+(?!\S)|\s+"
)
# How a byte-level tokenizer splits a text, and llama.cpp's name of it (src/llama-vocab.cpp).
_SPLITS = {_LLAMA3: "llama-bpe", _LLAMA3.replace("{1,3}", ""): "qwen2"}


@dataclass(frozen=True)
class LlamaCppModel:
    """A model type of transformers that llama.cpp has by the same arithmetic."""

    name: str  # llama.cpp's
    paired: bool  # whether rotary embedding turns neighbours, and not channels half a head apart


# llama.cpp has no windows for these.
ARCHITECTURES: Mapping[str, LlamaCppModel] = {
    "llama": LlamaCppModel("llama", paired=True),
    "mistral": LlamaCppModel("llama", paired=True),
    "qwen2": LlamaCppModel("qwen2", paired=False),
    "qwen3": LlamaCppModel("qwen3", paired=False),
}


def require_host(target: Target, spec: EngineSpec) -> None:
    """Return if what writes the format is installed.

    Raises:
        EnvironmentLacks: it is not.
    """
    extras.require(BACKEND)


def lower(model: ir.Model, target: Target, spec: EngineSpec) -> tuple[ir.Model, Changes]:
    """Leave the graph as it is: what is written are its parameters."""
    return model.clone(), Changes()


def check(exported: Exported, spec: EngineSpec) -> None:
    """Return if llama.cpp has the architecture and the tokenizer, and the format every code; reads no weight.

    Raises:
        UnsupportedError: it has not; says which option would do.
    """
    checkpoint = exported.checkpoint
    assert not exported.changed, "quantize-channels alone changes vectors"
    architecture_of(checkpoint)
    pre_tokenizer(checkpoint)
    _tensors(checkpoint)
    for tensor, matrix in exported.quantized.items():
        _check_matrix(tensor, matrix)


def architecture_of(checkpoint: Checkpoint) -> LlamaCppModel:
    """Find llama.cpp's name of a model type.

    Raises:
        UnsupportedError: it is not proven, or the configuration asks for what llama.cpp's has not.
    """
    settings, kind = checkpoint.settings, str(checkpoint.settings.get("model_type"))
    if kind not in ARCHITECTURES:
        raise UnsupportedError(
            f"gguf: model type {kind} is not among those that were proven: {', '.join(ARCHITECTURES)}",
            hint="convert it by llama.cpp's convert_hf_to_gguf.py",
        )
    windows = settings.get("sliding_window") if kind == "mistral" else settings.get("use_sliding_window")
    rope = _rope(settings)
    wrong = {
        "a sliding window": bool(windows) or "sliding_attention" in (settings.get("layer_types") or ()),
        f"hidden_act {settings.get('hidden_act')}": settings.get("hidden_act", "silu") != "silu",
        "partial rotary embedding": rope.get("partial_rotary_factor", settings.get("partial_rotary_factor", 1)) != 1,
        f"rope_type {rope['rope_type']}": rope["rope_type"] not in ("default", "linear", "llama3"),
        "mlp_bias": bool(settings.get("mlp_bias")),
    }
    if found := [what for what, is_so in wrong.items() if is_so]:
        raise UnsupportedError(f"gguf: llama.cpp's {ARCHITECTURES[kind].name} does not have {', '.join(found)}")
    return ARCHITECTURES[kind]


def pre_tokenizer(checkpoint: Checkpoint) -> str:
    """Find llama.cpp's name of how the tokenizer splits a text.

    Raises:
        UnsupportedError: it is no byte-level one that llama.cpp has.
    """
    settings = json.loads(checkpoint.tokenizer.to_str())
    model, split = settings["model"], settings.get("pre_tokenizer") or {}
    parts = split.get("pretokenizers", [split])
    name = None
    if [part.get("type") for part in parts] == ["ByteLevel"] and parts[0].get("use_regex", True):
        name = "gpt-2"
    elif [part.get("type") for part in parts] == ["Split", "ByteLevel"]:
        name = _SPLITS.get(parts[0]["pattern"].get("Regex", ""))
    own = model.get("type") == "BPE" and not model.get("byte_fallback") and not parts[-1].get("add_prefix_space", False)
    own = own and bool(model.get("merges"))  # llama.cpp does not load a file without any
    normal = (settings.get("normalizer") or {}).get("type") in (None, "NFC")
    if name is None or not own or not normal or bool(model.get("ignore_merges")) != (name == "llama-bpe"):
        raise UnsupportedError(
            "gguf: the tokenizer is none of the byte-level ones that were proven in llama.cpp: those of GPT-2, Llama 3 "
            "and Qwen 2",
            hint="convert the checkpoint by llama.cpp's convert_hf_to_gguf.py",
        )
    return name


def _check_matrix(tensor: str, matrix: Quantized) -> None:
    """Return if the format holds the codes of a matrix exactly."""
    if not isinstance(matrix, Blocks | KernelBlocks):
        raise UnsupportedError(
            f"{tensor}: GGUF has no format with one fp32 scale for each output feature", hint="use quantize-weights"
        )
    if packing.type_of(matrix.grid, matrix.k) is not None:
        return
    if not isinstance(matrix, Blocks):
        raise UnsupportedError(
            f"{tensor}: no type of GGUF has {matrix.grid.format.name}", hint="set `codes: gguf` in quantize-weights"
        )
    if not matrix.symmetric:
        raise UnsupportedError(
            f"{tensor}: Q4_1 does not hold zero points exactly", hint="set `symmetric: true` in quantize-weights"
        )
    if matrix.stored_scales != "fp16":
        raise UnsupportedError(
            f"{tensor}: its scales are {matrix.stored_scales}; GGUF has them in fp16",
            hint="set `scales: fp16` in quantize-weights",
        )
    raise UnsupportedError(
        f"{tensor}: rows of {matrix.k} in blocks of {matrix.block_size} are no blocks of {packing.BLOCK}",
        hint=f"exclude it: `exclude: [{matrix.parameter}]`",
    )


def build(request: BuildRequest) -> BuiltEngine:
    """Write the file, and read it by the gguf package.

    Raises:
        UnsupportedError: see `check`.
        EnvironmentLacks: the gguf package is not installed.
        VerificationError: what was written is not what was to be.
    """
    exported, folder = request.exported, request.folder
    assert exported is not None
    check(exported, request.spec)
    folder.mkdir(parents=True, exist_ok=True)
    used, whole = write(exported, request.spec, folder / MODEL_FILE, request.progress)
    written = signatures.export_format(request, BACKEND)
    (folder / FILE).write_text(written.to_json(), encoding="utf-8")
    facts = {
        "format": f"GGUF, {architecture_of(exported.checkpoint).name}: {used}",
        "codes": "read back, and equal to those of the graph",
        "gguf": metadata.version("gguf"),
    }
    return BuiltEngine.built(request, written, facts, graph_=request.model, written={MODEL_FILE: whole})


def write(exported: Exported, spec: EngineSpec, file: Path, progress: Progress) -> tuple[str, str]:
    """Write a file of parameters that were checked, read it back, and return the types in it and its SHA-256.

    Raises:
        EnvironmentLacks: the gguf package is not installed.
        VerificationError: what was written is not what was to be.
    """
    extras.require(BACKEND)
    import gguf

    checkpoint, architecture = exported.checkpoint, architecture_of(exported.checkpoint)
    writer = gguf.GGUFWriter(None, architecture.name)
    _describe(writer, gguf, exported, spec)
    names = _names(gguf, checkpoint, architecture)
    kinds = {name: _kind(checkpoint, exported, name) for name in names}
    factors = _rope_factors(checkpoint.settings)
    for name, (kind, shape) in kinds.items():
        raw, dtype = _as_bytes(kind, shape)
        type_ = gguf.GGMLQuantizationType[kind]
        writer.add_tensor_info(names[name], raw, dtype, math.prod(raw) * dtype.itemsize, raw_dtype=type_)
    if factors is not None:
        writer.add_tensor_info("rope_freqs.weight", factors.shape, factors.dtype, factors.nbytes)
    digests = {}
    try:
        writer.write_header_to_file(file)
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        for number, (name, (kind, _)) in enumerate(kinds.items()):
            data = _data(gguf, checkpoint, exported, architecture, name, kind)
            writer.write_tensor_data(data)
            digests[names[name]] = hashlib.sha256(data.tobytes()).digest()
            progress.advance(number + 1, len(kinds))
        if factors is not None:
            writer.write_tensor_data(factors)
            digests["rope_freqs.weight"] = hashlib.sha256(factors.tobytes()).digest()
    finally:
        writer.close()
    whole = hashed_files.sha256(file)  # before its tensors are read: what changes in between is found by them
    _prove(gguf, file, digests)
    return ", ".join(sorted({kind for kind, _ in kinds.values()})), whole


def _as_bytes(kind: str, shape: tuple[int, ...]) -> tuple[tuple[int, ...], np.dtype[Any]]:
    """Return the shape and the dtype in which a tensor of a type is handed over: blocks as bytes."""
    if (own := _QUANTIZED.get(kind)) is not None:
        return (*shape[:-1], shape[-1] // own.elements * own.size_bytes), np.dtype(np.uint8)
    return shape, np.dtype(np.uint32 if kind == "F32" else np.uint16)


def _rope(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Read the rotary embedding of a configuration, of either way that transformers has written it."""
    found = dict(settings.get("rope_scaling") or {}) | dict(settings.get("rope_parameters") or {})
    kind = found.get("rope_type", found.get("type", "default"))
    return {**found, "rope_type": kind, "rope_theta": found.get("rope_theta", settings.get("rope_theta", 10000.0))}


def _head_dim(settings: Mapping[str, Any]) -> int:
    return int(settings.get("head_dim") or settings["hidden_size"] // settings["num_attention_heads"])


def _rope_factors(settings: Mapping[str, Any]) -> NDArray[np.float32] | None:
    """Return what Llama 3 divides each frequency by, fp32 [head_dim / 2] (conversion/llama.py); None: by nothing."""
    rope = _rope(settings)
    if rope["rope_type"] != "llama3":
        return None
    dim = _head_dim(settings)
    frequencies = 1.0 / np.float32(rope["rope_theta"]) ** (np.arange(0, dim, 2, dtype=np.float32) / np.float32(dim))
    low, high, factor = (float(rope[name]) for name in ("low_freq_factor", "high_freq_factor", "factor"))
    original = float(rope["original_max_position_embeddings"])
    lengths = 2 * math.pi / frequencies.astype(np.float64)
    smooth = (original / lengths - low) / (high - low)
    between = 1 / ((1 - smooth) / factor + smooth)
    factors = np.where(lengths < original / high, 1.0, np.where(lengths > original / low, factor, between))
    return factors.astype(np.float32)


def _describe(writer: Any, gguf: ModuleType, exported: Exported, spec: EngineSpec) -> None:
    """Write what llama.cpp reads of architecture, sizes and tokenizer."""
    checkpoint, settings = exported.checkpoint, exported.checkpoint.settings
    heads, dim, rope = int(settings["num_attention_heads"]), _head_dim(settings), _rope(settings)
    writer.add_name(checkpoint.name)
    writer.add_block_count(int(settings["num_hidden_layers"]))
    writer.add_context_length(int(settings.get("max_position_embeddings") or spec.max_context))
    writer.add_embedding_length(int(settings["hidden_size"]))
    writer.add_feed_forward_length(int(settings["intermediate_size"]))
    writer.add_head_count(heads)
    writer.add_head_count_kv(int(settings.get("num_key_value_heads") or heads))
    writer.add_layer_norm_rms_eps(float(settings.get("rms_norm_eps", 1e-6)))
    writer.add_rope_freq_base(float(rope["rope_theta"]))
    writer.add_rope_dimension_count(dim)
    writer.add_key_length(dim)
    writer.add_value_length(dim)
    writer.add_vocab_size(int(settings["vocab_size"]))
    if rope["rope_type"] == "linear":
        writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(float(rope["factor"]))
    weights: Counter[str] = Counter()
    for matrix in exported.quantized.values():
        if isinstance(matrix, Blocks | KernelBlocks):
            weights[_type_of(matrix)] += 0 if matrix.table else matrix.n * matrix.k
    kind = weights.most_common(1)[0][0] if weights else "F16"
    writer.add_file_type(gguf.LlamaFileType[_FILE_TYPES.get(kind, f"MOSTLY_{kind}")])
    writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
    _describe_tokenizer(writer, gguf, checkpoint)


def _describe_tokenizer(writer: Any, gguf: ModuleType, checkpoint: Checkpoint) -> None:
    tokenizer, size = checkpoint.tokenizer, int(checkpoint.settings["vocab_size"])
    by_id = {number: token for token, number in tokenizer.get_vocab(with_added_tokens=True).items()}
    added = tokenizer.get_added_tokens_decoder()
    types = gguf.TokenType
    tokens = [by_id.get(number, f"[PAD{number}]") for number in range(size)]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre_tokenizer(checkpoint))
    writer.add_token_list(tokens)
    writer.add_token_types(
        [
            types.UNUSED
            if number not in by_id
            else types.NORMAL
            if number not in added
            else types.CONTROL
            if added[number].special
            else types.USER_DEFINED
            for number in range(size)
        ]
    )
    merges = json.loads(tokenizer.to_str())["model"]["merges"]
    writer.add_token_merges([merge if isinstance(merge, str) else " ".join(merge) for merge in merges])
    first, last = checkpoint.bos_token_id, list(checkpoint.eos_token_ids)
    if first is not None:
        writer.add_bos_token_id(first)
    if last:
        writer.add_eos_token_id(last[0])
    if len(last) > 1:
        writer.add_eot_token_id(last[1])
    pad = checkpoint.settings.get("pad_token_id")
    if isinstance(pad, int):
        writer.add_pad_token_id(pad)
    plain, special = (tokenizer.encode("a", add_special_tokens=each).ids for each in (False, True))
    writer.add_add_bos_token(special[: len(special) - len(plain)] == [first] and special[-len(plain) :] == plain)
    writer.add_add_eos_token(special[: len(plain)] == plain and special[len(plain) :] != [])
    if checkpoint.chat_template is not None:
        writer.add_chat_template(checkpoint.chat_template)


def _tensors(checkpoint: Checkpoint) -> Iterator[str]:
    """Name the tensors that are written."""
    tied = bool(checkpoint.settings.get("tie_word_embeddings"))
    for name in checkpoint.tensors:
        if not name.endswith(_UNUSED) and not (tied and name == HEAD):
            yield name


def _names(gguf: ModuleType, checkpoint: Checkpoint, architecture: LlamaCppModel) -> dict[str, str]:
    """Name each tensor as llama.cpp does.

    Raises:
        UnsupportedError: its architecture has none for one.
    """
    kind = next(each for each, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture.name)
    known = gguf.get_tensor_name_map(kind, int(checkpoint.settings["num_hidden_layers"]))
    found = {}
    for name in _tensors(checkpoint):
        own = known.get_name(name, try_suffixes=(".weight", ".bias"))
        if own is None:
            raise UnsupportedError(f"gguf: llama.cpp's {architecture.name} has no tensor for {name}")
        found[name] = str(own)
    return found


def _type_of(matrix: Quantized) -> str:
    """Name ggml's type of a matrix that was checked."""
    assert isinstance(matrix, Blocks | KernelBlocks)
    kind = packing.type_of(matrix.grid, matrix.k)
    assert kind is not None
    return kind


def _kind(checkpoint: Checkpoint, exported: Exported, name: str) -> tuple[str, tuple[int, ...]]:
    """Say in which type a tensor is written, and its shape."""
    matrix, entry = exported.quantized.get(name), checkpoint.tensors[name]
    if matrix is not None:
        return _type_of(matrix), (matrix.n, matrix.k)
    if entry.dtype not in _PLAIN:
        raise UnsupportedError(f"gguf: {name} is stored as {entry.dtype.name}")
    return "F32" if len(entry.shape) < 2 else _PLAIN[entry.dtype], entry.shape


def _data(
    gguf: ModuleType, checkpoint: Checkpoint, exported: Exported, architecture: LlamaCppModel, name: str, kind: str
) -> NDArray[Any]:
    """Make the bytes of a tensor; codes are read by the gguf package, and compared.

    Raises:
        VerificationError: they are not those of the graph.
    """
    rows = _rows(checkpoint, architecture, name)
    matrix = exported.quantized.get(name)
    if matrix is not None:
        assert isinstance(matrix, Blocks | KernelBlocks)
        read = matrix.read()
        if rows is not None:
            read = grids.rows(read, rows)
        data = packing.pack(read)
        theirs = gguf.quants.dequantize(data, gguf.GGMLQuantizationType[kind])
        if not np.array_equal(theirs, grids.dequantize(read)):
            raise VerificationError(f"{name} was not written as it was quantized")
        return data
    array = checkpoint.tensor(name).numpy()
    array = array if rows is None else array[rows]
    if kind == "F32":
        return np.ascontiguousarray(array, np.float32).view(np.uint32)
    return np.ascontiguousarray(array).view(np.uint16)


def _rows(checkpoint: Checkpoint, architecture: LlamaCppModel, name: str) -> NDArray[np.intp] | None:
    """Return the order of the output features of queries and keys; None: as they are."""
    layer = name.rsplit(".", 2)[-2]
    if not architecture.paired or layer not in ("q_proj", "k_proj"):
        return None
    n = checkpoint.tensors[name].shape[0]
    dim = _head_dim(checkpoint.settings)
    return np.arange(n).reshape(n // dim, 2, dim // 2).swapaxes(1, 2).reshape(-1)


def _prove(gguf: ModuleType, file: Path, digests: Mapping[str, bytes]) -> None:
    """Read the file by the gguf package, and hold every tensor against what was to be written.

    Raises:
        VerificationError: one differs, or is missing.
    """
    found = {tensor.name: hashlib.sha256(tensor.data.tobytes()).digest() for tensor in gguf.GGUFReader(file).tensors}
    if wrong := sorted(name for name in {*found, *digests} if found.get(name) != digests.get(name)):
        raise VerificationError(f"{file.name}: {wrong[0]} was not written as it was to be")
