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
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Final, Literal, cast

import numpy as np
import onnx_ir as ir

from llmforge.backends import signatures
from llmforge.backends.compressed_tensors import modelopt, servers
from llmforge.backends.compressed_tensors.layout import (
    HALVES,
    ITEM_BYTES,
    NAMES,
    WORD_BITS,
    QuantMethod,
    StoredTensor,
    layout,
    write,
)
from llmforge.backends.compressed_tensors.servers import FormatName
from llmforge.backends.engines import BuildRequest, BuiltEngine
from llmforge.backends.exported_parameters import Blocks, Exported, Fp4Matrix, KernelBlocks, Quantized
from llmforge.base.errors import UnsupportedError
from llmforge.checkpoint import CONFIG, Checkpoint
from llmforge.checkpoint.folder import CHAT_TEMPLATE, GENERATION_CONFIG
from llmforge.checkpoint.shards import WEIGHTS, WEIGHTS_INDEX
from llmforge.ir.fp4 import BLOCK
from llmforge.quantization.grid import Scale
from llmforge.recipe import EngineSpec
from llmforge.rewrite.pass_base import Changes
from llmforge.runtime.config import FILE
from llmforge.targets import Target

METHOD: Final = "compressed-tensors"
VERSION = "0.20.0"
SHARD_BYTES: Final = 4 << 30
# Layers that servers put on top of each other, and that must have one format.
TOGETHER = (frozenset({"q_proj", "k_proj", "v_proj"}), frozenset({"gate_proj", "up_proj"}))
TOKENIZER = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "tokenizer.model",
    "vocab.json",
    "merges.txt",
)
_HEAD, _MATRIX = "lm_head", 2
_NVFP4 = "nvfp4-pack-quantized"
_DTYPES: Mapping[Scale, str] = {"fp16": "float16", "bf16": "bfloat16"}  # in config.json


@dataclass(frozen=True)
class LayerScheme:
    """How a layer is stored: one group of `quantization_config`."""

    format: str
    bits: int
    kind: str  # int or float
    block_size: int | None  # None: a scale for each output feature
    symmetric: bool
    scales: Scale = "fp32"  # of packed codes, 16 bits
    inputs: Literal["none", "static", "per_token"] = "none"
    square: int | None = None  # features, of either kind, that share a scale, and features of a token

    @property
    def format_name(self) -> FormatName:
        """Its name in `servers.SERVERS`."""
        codes = f"{'fp' if self.kind == 'float' else 'int'}{self.bits}"
        if self.square is not None:
            return "fp8-block"
        if self.format in (_NVFP4, modelopt.NAME):
            return "nvfp4" if self.format == _NVFP4 else "nvfp4-modelopt"
        return cast(FormatName, codes if self.inputs == "none" else f"{codes}-{self.inputs}")

    @property
    def group(self) -> dict[str, Any]:
        """The group, but for its targets, as compressed-tensors writes it."""
        weights = {
            "num_bits": self.bits,
            "type": self.kind,
            "symmetric": self.symmetric,
            "group_size": self.block_size,
            "strategy": "channel" if self.block_size is None else "group",
            "dynamic": False,
        }
        inputs = None
        if self.square is not None:
            weights |= {"strategy": "block", "block_structure": [self.square, self.square]}
            own = {"strategy": "group", "group_size": self.square, "dynamic": True}
            inputs = {"num_bits": self.bits, "type": self.kind, "symmetric": True, **own}
        elif self.format == _NVFP4:
            blocks = {"strategy": "tensor_group", "scale_dtype": "torch.float8_e4m3fn"}
            weights |= blocks
            inputs = {**weights, "dynamic": "local"}
        elif self.inputs != "none":
            own = {"strategy": "tensor", "dynamic": False}
            if self.inputs == "per_token":
                own = {"strategy": "token", "dynamic": True}
            inputs = {"num_bits": self.bits, "type": self.kind, "symmetric": True, **own}
        return {"weights": weights, "input_activations": inputs, "output_activations": None, "format": self.format}


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
    if not exported.quantized:
        raise UnsupportedError("nothing is quantized: the checkpoint itself is what the servers load")
    schemes = {tensor: scheme_of(tensor, matrix, spec.quant_method) for tensor, matrix in exported.quantized.items()}
    _require_one_dtype(schemes, exported.checkpoint)
    layers: dict[tuple[str, frozenset[str]], dict[str, LayerScheme | None]] = {}
    for tensor in exported.checkpoint.tensors:
        parent, _, layer = tensor.removesuffix(".weight").rpartition(".")
        for together in TOGETHER:
            if layer in together and tensor.endswith(".weight"):
                layers.setdefault((parent, together), {})[tensor] = schemes.get(tensor)
    for (parent, _), found in layers.items():
        if len(set(found.values())) > 1:
            raise UnsupportedError(
                f"{', '.join(found)} have different formats; the servers read those of {parent} as one matrix",
                hint="give them one format, or exclude all of them",
            )
        matrices = [each for each in map(exported.quantized.get, found) if isinstance(each, Fp4Matrix)]
        if len({each.weight_scale for each in matrices}) > 1:
            raise UnsupportedError(
                f"{', '.join(found)} have scales of their own; the servers take one for all of {parent}",
                hint="leave passes between them out of the recipe",
            )
        for tensor, scheme in found.items():
            if scheme is not None and scheme.square and (n := exported.quantized[tensor].n) % scheme.square:
                raise UnsupportedError(
                    f"{tensor}: {n} output features are not a multiple of {scheme.square}; the servers put it on "
                    f"top of others of {parent}, and so their squares",
                    hint="exclude all of them, or set `granularity: channel`",
                )


def _require_one_dtype(schemes: Mapping[str, LayerScheme], checkpoint: Checkpoint) -> None:
    """Return if one dtype holds the scales of all packed codes, and no tensor that stays loses by it."""
    scales = {scheme.scales for scheme in schemes.values() if scheme.format == "pack-quantized"}
    if len(scales) > 1:
        raise UnsupportedError(
            f"packed codes have scales in {' and '.join(sorted(scales))}; servers compute in one dtype",
            hint="set one `scales` in all quantize-weights of the recipe",
        )
    if "bf16" in scales and (own := _dtype(checkpoint.settings)) != _DTYPES["bf16"]:
        raise UnsupportedError(
            f"config.json says dtype {own}; servers would compute in bf16, the dtype of the scales",
            hint="set `scales: fp16` in quantize-weights",
        )


def _dtype(settings: Mapping[str, Any]) -> str | None:
    """Read in which dtype config.json says that a model, or the language model in it, computes."""
    of_text = settings.get("text_config")
    parts = [settings, of_text if isinstance(of_text, dict) else {}]
    return next((str(each[key]) for each in parts for key in ("dtype", "torch_dtype") if each.get(key)), None)


def scheme_of(tensor: str, matrix: Quantized, method: QuantMethod) -> LayerScheme:
    """Say how a matrix is stored, by the `method` that config.json names.

    Raises:
        UnsupportedError: the format does not hold it exactly, or the servers do not load it so.
    """
    if not tensor.endswith(".weight"):
        raise UnsupportedError(
            f"{tensor} is not the weight of a linear layer", hint=f"exclude it: `exclude: [{tensor}]`"
        )
    if isinstance(matrix, KernelBlocks):
        raise UnsupportedError(
            f"{tensor}: compressed-tensors has no format with {matrix.grid.format.name}",
            hint="set `bits: 4` or `bits: 8` and `scales: fp16` in quantize-weights",
        )
    if method == modelopt.NAME and not isinstance(matrix, Fp4Matrix):
        raise UnsupportedError(
            f"{tensor} is no NVFP4, which alone is written by ModelOpt's names",
            hint="use quantize-fp4, or leave `quant_method` out: TensorRT-LLM loads fp8 of compressed-tensors",
        )
    if isinstance(matrix, Blocks):
        if matrix.table or tensor == f"{_HEAD}.weight":
            raise UnsupportedError(
                f"{tensor}: the servers read embedding and head as they are", hint="set `embedding_bits: 16`"
            )
        if matrix.stored_scales not in HALVES:
            raise UnsupportedError(
                f"{tensor}: its scales are {matrix.stored_scales}; the servers hold scales of packed codes in 16 bits",
                hint="set `scales: bf16` in quantize-weights, or `scales: fp16` where the model is no bf16",
            )
        if matrix.k % matrix.block_size:
            raise UnsupportedError(
                f"{tensor}: {matrix.k} input features are not a multiple of {matrix.block_size}",
                hint="set a smaller `block_size` in quantize-weights, or exclude it",
            )
        if matrix.n % (WORD_BITS // matrix.bits):
            raise UnsupportedError(
                f"{tensor}: {matrix.n} output features are no multiple of {WORD_BITS // matrix.bits}, as words of zero "
                "points hold",
                hint=f"exclude it: `exclude: [{matrix.parameter}]`",
            )
        scales = matrix.stored_scales
        return LayerScheme("pack-quantized", matrix.bits, "int", matrix.block_size, matrix.symmetric, scales)
    if tensor == f"{_HEAD}.weight":
        raise UnsupportedError(f"{tensor}: the servers read the head as it is", hint="set `head: false`")
    if isinstance(matrix, Fp4Matrix):
        return LayerScheme(_NVFP4 if method == METHOD else modelopt.NAME, 4, "float", BLOCK, True)
    if matrix.dtype == "fp8":
        return LayerScheme("float-quantized", 8, "float", None, True, inputs=matrix.inputs, square=matrix.square)
    if matrix.inputs == "none":
        raise UnsupportedError(
            f"{tensor}: the servers multiply int8 weights with one scale per output feature by int8 activations alone",
            hint="set `activations: static` or `per_token`, or use quantize-weights with `bits: 8`",
        )
    return LayerScheme("int-quantized", 8, "int", None, True, inputs=matrix.inputs)


def build(request: BuildRequest) -> BuiltEngine:
    """Write the checkpoint, and read its codes back.

    Raises:
        UnsupportedError: see `check`; or a tensor that stays holds numbers that fp16 cannot.
        VerificationError: what was written is not what was to be.
    """
    exported, folder = request.exported, request.folder
    assert exported is not None
    check(exported, request.spec)
    folder.mkdir(parents=True, exist_ok=True)
    method = request.spec.quant_method
    schemes = {tensor: scheme_of(tensor, matrix, method) for tensor, matrix in exported.quantized.items()}
    scales = next((scheme.scales for scheme in schemes.values() if scheme.format == "pack-quantized"), None)
    hashes = _write_weights(request, exported, in_fp16=scales == "fp16")
    settings = dict(exported.checkpoint.settings)
    if scales is not None:
        settings = _in_dtype(settings, scales)
        if isinstance(text := settings.get("text_config"), dict):
            settings["text_config"] = _in_dtype(text, scales)
    if method == modelopt.NAME:
        excluded = unquantized(schemes, exported.checkpoint)
        hashes[modelopt.FILE] = _write_json(folder / modelopt.FILE, modelopt.quant_config(excluded))
        settings["quantization_config"] = modelopt.inline_config(excluded)
    else:
        settings["quantization_config"] = quantization_config(schemes, exported.checkpoint)
    hashes |= {CONFIG: _write_json(folder / CONFIG, settings), **copy_settings(exported.checkpoint, folder)}
    written = signatures.export_format(request, METHOD)
    (folder / FILE).write_text(written.to_json(), encoding="utf-8")
    formats = ", ".join(sorted({scheme.format for scheme in schemes.values()}))
    facts = {
        "format": "NVFP4 as ModelOpt has it" if method == modelopt.NAME else f"{METHOD} {VERSION}: {formats}",
        "codes": "read back, and equal to those of the graph",
        "servers": servers.described(frozenset(scheme.format_name for scheme in schemes.values())),
    }
    notes = [f"engine: config.json says dtype {_DTYPES[scales]}, in which scales are exact"] if scales else []
    return BuiltEngine.built(request, written, facts, notes, graph_=request.model, written=hashes)


def _in_dtype(settings: Mapping[str, Any], scales: Scale) -> dict[str, Any]:
    """Let servers compute in the dtype of scales; the older name of the entry is left out."""
    return {**{key: value for key, value in settings.items() if key != "torch_dtype"}, "dtype": _DTYPES[scales]}


def quantization_config(schemes: Mapping[str, LayerScheme], checkpoint: Checkpoint) -> dict[str, Any]:
    """Describe the formats: `Linear` where all quantized layers have one, else layers by their names.

    `ignore` names every other layer that might be linear.
    """
    groups: dict[LayerScheme, list[str]] = {}
    for tensor, scheme in schemes.items():
        groups.setdefault(scheme, []).append(tensor.removesuffix(".weight"))
    formats = {scheme.format for scheme in groups}
    return {
        "quant_method": METHOD,
        "format": formats.pop() if len(formats) == 1 else "mixed-precision",
        "quantization_status": "compressed",
        "config_groups": {
            f"group_{number}": {"targets": ["Linear"] if len(groups) == 1 else sorted(layers), **scheme.group}
            for number, (scheme, layers) in enumerate(groups.items())
        },
        "ignore": unquantized(schemes, checkpoint),
        "kv_cache_scheme": None,
        "version": VERSION,
    }


def unquantized(schemes: Mapping[str, LayerScheme], checkpoint: Checkpoint) -> list[str]:
    """Name the layers that stay: whatever has a matrix, or one for each expert, whether the language model uses it."""
    kept = {_HEAD}
    for name, entry in checkpoint.tensors.items():
        if name not in schemes and len(entry.shape) >= _MATRIX:
            kept.add(name.rpartition(".")[0] if not name.endswith(".weight") else name.removesuffix(".weight"))
    return sorted(kept)


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
                done += 1
                request.progress.advance(done, total)
            stream.seek(0)
            hashes[file.name] = hashlib.file_digest(stream, "sha256").hexdigest()
    if len(shards) > 1:
        size = sum(part.size_bytes for shard in shards for parts in shard.values() for part in parts)
        described = {"metadata": {"total_size": size}, "weight_map": dict(sorted(index.items()))}
        hashes[WEIGHTS_INDEX] = _write_json(folder / WEIGHTS_INDEX, described)
    return hashes


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
