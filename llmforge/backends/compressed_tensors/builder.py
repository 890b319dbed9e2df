"""A checkpoint with quantized weights in the format of compressed-tensors 0.20: for vLLM and SGLang.

    engine/config.json               that of the checkpoint, with `quantization_config`
           model.safetensors         or shards of it, with model.safetensors.index.json
           tokenizer.json, …         the tokenizer's files, and generation_config.json
           runtime.json              who this is for

What passes made of a weight [N, K] decides how it stands there (compressed_tensors/compressors):

- `pack-quantized`, of quantize-weights: `weight_packed` int32 [N, K·bits/32], codes dense from the lowest bits, offset
  by 2**(bits-1); `weight_scale` [N, K/block]; `weight_shape`; of asymmetric codes `weight_zero_point` int32
  [N·bits/32, K/block], packed along N. These are the very codes of com.microsoft::MatMulNBits.
- `float-quantized`, of quantize-channels in fp8: `weight` float8_e4m3fn [N, K], `weight_scale` fp32 [N, 1]; with
  `activations: static` also `input_scale` fp32 [1]; with `per_token` the servers make the scales of tokens.
  With `granularity: block`, `weight_scale` is fp32 [ceil(N/128), K/128]; the servers make scales of 128 features of a
  token.
- `int-quantized`, of quantize-channels in int8 with activations: `weight` int8 [N, K], the same scales.
- `nvfp4-pack-quantized`, of quantize-fp4: `weight_packed` uint8 [N, K/2], the first of two codes in the lower bits;
  `weight_scale` float8_e4m3fn [N, K/16]; `weight_global_scale` and `input_global_scale` fp32 [1] are reciprocals.

With `quant_method: modelopt`, NVFP4 stands there by ModelOpt's names (`modelopt`), and hf_quant_config.json beside.
`servers` has which servers load which of them.

Servers hold the scales of packed codes in the dtype that they compute in: fp16, or bf16 where the model is bf16, and
config.json says which.
All other tensors are copied. What was written is read back and compared, code by code. The same input gives the same
bytes.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO, Final

import numpy as np
import onnx_ir as ir

from llmforge.backends import signatures
from llmforge.backends.compressed_tensors import modelopt, schemes, servers
from llmforge.backends.compressed_tensors.layout import (
    ITEM_BYTES,
    NAMES,
    StoredTensor,
    cache_layout,
    layout,
    write,
    write_caches,
)
from llmforge.backends.compressed_tensors.schemes import DTYPES, METHOD, VERSION
from llmforge.backends.engines import BuildRequest, BuiltEngine
from llmforge.backends.exported_parameters import Exported
from llmforge.base.errors import UnsupportedError
from llmforge.checkpoint import CONFIG, Checkpoint
from llmforge.checkpoint.folder import GENERATION_CONFIG
from llmforge.checkpoint.shards import WEIGHTS, WEIGHTS_INDEX
from llmforge.checkpoint.tokenizer_files import CHAT_TEMPLATE
from llmforge.quantization.grid import Scale
from llmforge.recipe import EngineSpec
from llmforge.rewrite.pass_base import Changes
from llmforge.runtime.config import FILE
from llmforge.targets import Target

SHARD_BYTES: Final = 4 << 30
TOKENIZER = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "tokenizer.model",
    "vocab.json",
    "merges.txt",
)


def require_host(target: Target, spec: EngineSpec) -> None:
    """Return: a file can be written anywhere."""


def lower(model: ir.Model, target: Target, spec: EngineSpec) -> tuple[ir.Model, Changes]:
    """Leave the graph as it is: what is written are its parameters."""
    return model.clone(), Changes()


def check(exported: Exported, spec: EngineSpec) -> None:
    """Return if the format holds every code exactly, and the servers load it; reads no weight.

    Raises:
        UnsupportedError: it does not; says which option would.
    """
    schemes.check(exported, spec.quant_method)


def build(request: BuildRequest) -> BuiltEngine:
    """Write the checkpoint, and read its codes back.

    Raises:
        UnsupportedError: see `check`; or a tensor that stays holds numbers that fp16 cannot.
        VerificationError: what was written is not what was to be.
    """
    exported, folder = request.exported, request.folder
    assert exported is not None
    found = schemes.check(exported, request.spec.quant_method)
    folder.mkdir(parents=True, exist_ok=True)
    scales, checkpoint = found.packed_scales, exported.checkpoint
    hashes = _write_weights(request, exported, in_fp16=scales == "fp16")
    settings = dict(checkpoint.settings)
    if scales is not None:
        settings = _in_dtype(settings, scales)
        if isinstance(text := settings.get("text_config"), dict):
            settings["text_config"] = _in_dtype(text, scales)
    caches = bool(exported.caches)
    if found.method == modelopt.NAME:
        algorithm = found.algorithm(checkpoint, caches=caches)
        hashes[modelopt.FILE] = _write_json(folder / modelopt.FILE, algorithm.quant_config())
        settings["quantization_config"] = algorithm.inline_config()
        held = f"{algorithm.name} as ModelOpt has it"
    else:
        settings["quantization_config"] = found.quantization_config(checkpoint, caches=caches)
        formats = ", ".join(sorted({scheme.format for scheme in found.layers.values()}))
        held = f"{METHOD} {VERSION}: {formats}"
    hashes |= {CONFIG: _write_json(folder / CONFIG, settings), **copy_settings(checkpoint, folder)}
    written = signatures.export_format(request, METHOD)
    (folder / FILE).write_text(written.to_json(), encoding="utf-8")
    facts = {
        "format": held + (", keys and values cached in fp8" if caches else ""),
        "codes": "read back, and equal to those of the graph",
        "servers": servers.described(found.names, experts=found.experts(exported), caches=caches),
    }
    notes = [f"engine: config.json says dtype {DTYPES[scales]}, in which scales are exact"] if scales else []
    return BuiltEngine.built(request, written, facts, notes, graph_=request.model, written=hashes)


def _in_dtype(settings: Mapping[str, Any], scales: Scale) -> dict[str, Any]:
    """Let servers compute in the dtype of scales; the older name of the entry is left out."""
    return {**{key: value for key, value in settings.items() if key != "torch_dtype"}, "dtype": DTYPES[scales]}


def copy_settings(checkpoint: Checkpoint, folder: Path) -> dict[str, str]:
    """Copy what servers read beside config.json and weights; return the SHA-256 of each, by name."""
    sources = {name: checkpoint.path / name for name in (GENERATION_CONFIG, *TOKENIZER)}
    # The content: a Hub snapshot holds symbolic links.
    copied = {name: source.read_bytes() for name, source in sources.items() if source.exists()}
    if checkpoint.chat_template is not None:  # which may be the recipe's; the file wins over tokenizer_config.json
        copied[CHAT_TEMPLATE] = checkpoint.chat_template.encode()
    for name, content in copied.items():
        (folder / name).write_bytes(content)
    return {name: hashlib.sha256(content).hexdigest() for name, content in copied.items()}


def _write_weights(request: BuildRequest, exported: Exported, *, in_fp16: bool) -> dict[str, str]:
    """Write one file, or shards of about `SHARD_BYTES` in the order of names; return the SHA-256 of each, by name."""
    checkpoint, folder, method = exported.checkpoint, request.folder, request.spec.quant_method
    shards: list[dict[str, list[StoredTensor]]] = [{}]
    held = 0
    for name, entry in checkpoint.tensors.items():
        matrix = exported.quantized.get(name)
        own = [StoredTensor(name, NAMES[entry.dtype], entry.shape)] if matrix is None else layout(name, matrix, method)
        own += cache_layout(module, method) if (module := _caching(name, exported)) is not None else []
        size = sum(part.size_bytes for part in own)
        if shards[-1] and held + size > SHARD_BYTES:
            shards.append({})
            held = 0
        shards[-1][name], held = own, held + size
    index: dict[str, str] = {}
    hashes: dict[str, str] = {}
    done, total = 0, len(checkpoint.tensors)
    for number, shard in enumerate(shards, 1):
        file = folder / (WEIGHTS if len(shards) == 1 else f"model-{number:05}-of-{len(shards):05}.safetensors")
        with file.open("w+b") as stream:
            places = _write_header(stream, [part for parts in shard.values() for part in parts])
            for name, parts in shard.items():
                index |= {part.name: file.name for part in parts}
                matrix = exported.quantized.get(name)
                if name in exported.changed:
                    _change(stream, places[name], checkpoint.tensors[name].dtype, name, exported.changed[name])
                elif matrix is None:
                    _copy(stream, places[name], checkpoint, name, in_fp16=in_fp16)
                else:
                    write(stream, places, name, matrix, method)
                if (module := _caching(name, exported)) is not None:
                    write_caches(stream, places, module, exported.caches[module], method)
                done += 1
                request.progress.advance(done, total)
            stream.seek(0)
            hashes[file.name] = hashlib.file_digest(stream, "sha256").hexdigest()
    if len(shards) > 1:
        size = sum(part.size_bytes for shard in shards for parts in shard.values() for part in parts)
        described = {"metadata": {"total_size": size}, "weight_map": dict(sorted(index.items()))}
        hashes[WEIGHTS_INDEX] = _write_json(folder / WEIGHTS_INDEX, described)
    return hashes


def _caching(name: str, exported: Exported) -> str | None:
    """Name the module whose scales of keys and values stand beside the tensor `name`; None: there are none."""
    module = name.removesuffix(".k_proj.weight")
    return module if module != name and module in exported.caches else None


def _write_header(stream: BinaryIO, parts: Sequence[StoredTensor]) -> dict[str, int]:
    """Write the header of a safetensors file, make room for the tensors, and return where each begins."""
    ordered = sorted(parts, key=lambda part: (-ITEM_BYTES[part.dtype], part.name))  # so that each is aligned
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    at = 0
    for part in ordered:
        offsets = [at, at + part.size_bytes]
        header[part.name] = {"dtype": part.dtype, "shape": list(part.shape), "data_offsets": offsets}
        at += part.size_bytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    stream.write(len(text).to_bytes(8, "little") + text)
    begin = stream.tell()
    stream.truncate(begin + at)
    return {part.name: begin + header[part.name]["data_offsets"][0] for part in ordered}


def _change(stream: BinaryIO, place: int, dtype: ir.DataType, name: str, numbers: ir.TensorProtocol) -> None:
    """Write other numbers in place of a tensor's, in its dtype, which must hold them."""
    wide = numbers.numpy()
    stored = wide.astype(dtype.numpy())
    if not np.array_equal(stored.astype(wide.dtype), wide):
        raise UnsupportedError(
            f"{name}: {dtype.name} does not hold it once outliers are moved out of it",
            hint="set `smooth: false` in quantize-channels",
        )
    stream.seek(place)
    stream.write(stored.tobytes())


def _copy(stream: BinaryIO, place: int, checkpoint: Checkpoint, name: str, *, in_fp16: bool) -> None:
    """Copy a tensor that stays, which servers then perhaps bring into fp16."""
    tensor = checkpoint.tensor(name)
    if in_fp16 and tensor.dtype in (ir.DataType.FLOAT, ir.DataType.BFLOAT16):
        largest = float(np.abs(tensor.numpy().astype(np.float32)).max(initial=0))
        if largest > np.finfo(np.float16).max:
            raise UnsupportedError(
                f"{name} has numbers up to {largest:g}, which fp16 does not hold: scales of packed codes need it",
                hint="set `scales: bf16` where the model is bf16, or use quantize-channels with `dtype: fp8`",
            )
    stream.seek(place)
    tensor.tofile(stream)


def _write_json(file: Path, content: Mapping[str, Any]) -> str:
    """Write a file, and return its SHA-256."""
    text = (json.dumps(content, indent=2, sort_keys=True, ensure_ascii=False) + "\n").encode()
    file.write_bytes(text)
    return hashlib.sha256(text).hexdigest()
