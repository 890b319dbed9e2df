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
- `int-quantized`, of quantize-channels in int8 with activations: `weight` int8 [N, K], the same scales.

`servers` has which servers load which of them.

Servers hold the scales of packed codes in the dtype that they compute in: they must be fp16, and config.json says so.
All other tensors are copied. What was written is read back and compared, code by code. The same input gives the same
bytes.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Final, Literal, cast

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from llmforge.backends import signatures
from llmforge.backends.compressed_tensors import servers
from llmforge.backends.compressed_tensors.servers import FormatName
from llmforge.backends.engines import BuildRequest, BuiltEngine
from llmforge.backends.exported_parameters import Blocks, ChannelMatrix, Exported, Quantized
from llmforge.base.errors import UnsupportedError, VerificationError
from llmforge.checkpoint import CONFIG, Checkpoint
from llmforge.checkpoint.folder import CHAT_TEMPLATE, GENERATION_CONFIG
from llmforge.checkpoint.safetensors_file import DTYPES
from llmforge.checkpoint.shards import WEIGHTS, WEIGHTS_INDEX
from llmforge.ir import graph
from llmforge.quantization.grids import pack_bits
from llmforge.recipe import EngineSpec
from llmforge.rewrite.pass_base import Changes
from llmforge.runtime.config import FILE
from llmforge.targets import Target

METHOD, VERSION = "compressed-tensors", "0.20.0"
SHARD_BYTES: Final = 4 << 30
WORD_BITS = 32
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
_HEAD = "lm_head"
_CODES = {"int8": "I8", "fp8": "F8_E4M3"}
NAMES: Mapping[ir.DataType, str] = {ir.DataType[dtype]: name for name, dtype in DTYPES.items()}
ITEM_BYTES: Mapping[str, int] = {name: math.ceil(dtype.itemsize) for dtype, name in NAMES.items()}


@dataclass(frozen=True)
class StoredTensor:
    """A tensor of a file, by the name that safetensors has for its dtype."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def size_bytes(self) -> int:
        """The bytes that it takes."""
        return math.prod(self.shape) * ITEM_BYTES[self.dtype]


@dataclass(frozen=True)
class LayerScheme:
    """How a layer is stored: one group of `quantization_config`."""

    format: str
    bits: int
    kind: str  # int or float
    block_size: int | None  # None: a scale for each output feature
    symmetric: bool
    inputs: Literal["none", "static", "per_token"] = "none"

    @property
    def format_name(self) -> FormatName:
        """Its name in `servers.SERVERS`."""
        codes = f"{'fp' if self.kind == 'float' else 'int'}{self.bits}"
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
        if self.inputs != "none":
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
    schemes = {tensor: scheme_of(tensor, matrix) for tensor, matrix in exported.quantized.items()}
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


def scheme_of(tensor: str, matrix: Quantized) -> LayerScheme:
    """Say how a matrix is stored.

    Raises:
        UnsupportedError: the format does not hold it exactly, or the servers do not load it so.
    """
    if not tensor.endswith(".weight"):
        raise UnsupportedError(
            f"{tensor} is not the weight of a linear layer", hint=f"exclude it: `exclude: [{tensor}]`"
        )
    if isinstance(matrix, Blocks):
        if matrix.table or tensor == f"{_HEAD}.weight":
            raise UnsupportedError(
                f"{tensor}: the servers read embedding and head as they are", hint="set `embedding_bits: 16`"
            )
        if matrix.stored_scales != "fp16":
            raise UnsupportedError(
                f"{tensor}: its scales are {matrix.stored_scales}; the servers hold scales of packed codes in 16 bits",
                hint="set `scales: fp16` in quantize-weights",
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
        return LayerScheme("pack-quantized", matrix.bits, "int", matrix.block_size, matrix.symmetric)
    if tensor == f"{_HEAD}.weight":
        raise UnsupportedError(f"{tensor}: the servers read the head as it is", hint="set `head: false`")
    if matrix.dtype == "fp8":
        return LayerScheme("float-quantized", 8, "float", None, True, matrix.inputs)
    if matrix.inputs == "none":
        raise UnsupportedError(
            f"{tensor}: the servers multiply int8 weights with one scale per output feature by int8 activations alone",
            hint="set `activations: static` or `per_token`, or use quantize-weights with `bits: 8`",
        )
    return LayerScheme("int-quantized", 8, "int", None, True, matrix.inputs)


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
    schemes = {tensor: scheme_of(tensor, matrix) for tensor, matrix in exported.quantized.items()}
    packed = any(scheme.format == "pack-quantized" for scheme in schemes.values())
    hashes = _write_weights(request, exported, packed)
    settings = dict(exported.checkpoint.settings)
    if packed:
        settings = _in_fp16(settings)
        if isinstance(text := settings.get("text_config"), dict):
            settings["text_config"] = _in_fp16(text)
    settings["quantization_config"] = quantization_config(schemes, exported.checkpoint)
    hashes |= {CONFIG: _write_json(folder / CONFIG, settings), **copy_settings(exported.checkpoint, folder)}
    written = signatures.export_format(request, METHOD)
    (folder / FILE).write_text(written.to_json(), encoding="utf-8")
    formats = ", ".join(sorted({scheme.format for scheme in schemes.values()}))
    facts = {
        "format": f"{METHOD} {VERSION}: {formats}",
        "codes": "read back, and equal to those of the graph",
        "servers": servers.described(frozenset(scheme.format_name for scheme in schemes.values())),
    }
    notes = ["engine: config.json says dtype float16, in which scales are exact"] if packed else []
    return BuiltEngine.built(request, written, facts, notes, graph_=request.model, written=hashes)


def _in_fp16(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Let servers compute in fp16; the older name of the entry is left out."""
    return {**{key: value for key, value in settings.items() if key != "torch_dtype"}, "dtype": "float16"}


def quantization_config(schemes: Mapping[str, LayerScheme], checkpoint: Checkpoint) -> dict[str, Any]:
    """Describe the formats: `Linear` where all quantized layers have one, else layers by their names.

    `ignore` names every other layer that might be linear.
    """
    groups: dict[LayerScheme, list[str]] = {}
    for tensor, scheme in schemes.items():
        groups.setdefault(scheme, []).append(tensor.removesuffix(".weight"))
    plain = {
        name.removesuffix(".weight")
        for name, entry in checkpoint.tensors.items()
        if name.endswith(".weight") and len(entry.shape) == 2 and name not in schemes
    }
    formats = {scheme.format for scheme in groups}
    return {
        "quant_method": METHOD,
        "format": formats.pop() if len(formats) == 1 else "mixed-precision",
        "quantization_status": "compressed",
        "config_groups": {
            f"group_{number}": {"targets": ["Linear"] if len(groups) == 1 else sorted(layers), **scheme.group}
            for number, (scheme, layers) in enumerate(groups.items())
        },
        "ignore": sorted(plain | {_HEAD}),
        "kv_cache_scheme": None,
        "version": VERSION,
    }


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


def _words(codes: NDArray[np.uint8], bits: int) -> NDArray[np.int32]:
    """Pack codes [N, C] into words [N, C·bits/32], the first in the lowest bits."""
    return np.ascontiguousarray(pack_bits(np.ascontiguousarray(codes), bits)).view("<i4")


def layout(tensor: str, matrix: Quantized) -> list[StoredTensor]:
    """Name what stands in place of a weight."""
    layer = tensor.removesuffix(".weight")
    if isinstance(matrix, ChannelMatrix):
        parts = [
            StoredTensor(tensor, _CODES[matrix.dtype], (matrix.n, matrix.k)),
            StoredTensor(f"{layer}.weight_scale", "F32", (matrix.n, 1)),
        ]
        return parts if matrix.input_scale is None else [*parts, StoredTensor(f"{layer}.input_scale", "F32", (1,))]
    blocks, a_word = matrix.k // matrix.block_size, WORD_BITS // matrix.bits
    parts = [
        StoredTensor(f"{layer}.weight_packed", "I32", (matrix.n, matrix.k // a_word)),
        StoredTensor(f"{layer}.weight_scale", "F16", (matrix.n, blocks)),
        StoredTensor(f"{layer}.weight_shape", "I64", (2,)),
    ]
    return (
        parts
        if matrix.symmetric
        else [*parts, StoredTensor(f"{layer}.weight_zero_point", "I32", (matrix.n // a_word, blocks))]
    )


def _write_weights(request: BuildRequest, exported: Exported, packed: bool) -> dict[str, str]:
    """Write one file, or shards of about `SHARD_BYTES` in the order of names; return the SHA-256 of each, by name."""
    checkpoint, folder = exported.checkpoint, request.folder
    shards: list[dict[str, list[StoredTensor]]] = [{}]
    held = 0
    for name, entry in checkpoint.tensors.items():
        matrix = exported.quantized.get(name)
        own = [StoredTensor(name, NAMES[entry.dtype], entry.shape)] if matrix is None else layout(name, matrix)
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
                    _copy(stream, places[name], checkpoint, name, packed)
                else:
                    _write(stream, places, name, matrix)
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


def _copy(stream: BinaryIO, place: int, checkpoint: Checkpoint, name: str, packed: bool) -> None:
    """Copy a tensor that stays; where codes are `packed`, servers bring it into fp16."""
    tensor = checkpoint.tensor(name)
    if packed and tensor.dtype in (ir.DataType.FLOAT, ir.DataType.BFLOAT16):
        largest = float(np.abs(tensor.numpy().astype(np.float32)).max(initial=0))
        if largest > np.finfo(np.float16).max:
            raise UnsupportedError(
                f"{name} has numbers up to {largest:g}, which fp16 does not hold: scales of packed codes need it",
                hint="use quantize-channels with `dtype: fp8`, which leaves the dtype of the model alone",
            )
    stream.seek(place)
    tensor.tofile(stream)


def _write(stream: BinaryIO, places: Mapping[str, int], tensor: str, matrix: Quantized) -> None:
    """Write codes and scales, read them back, and hold them against those of the graph.

    Raises:
        VerificationError: they differ.
    """
    parts = {part.name: part for part in layout(tensor, matrix)}
    layer = tensor.removesuffix(".weight")

    def put(name: str, array: NDArray[Any]) -> None:
        data = np.ascontiguousarray(array)
        assert (data.shape, data.nbytes) == (parts[name].shape, parts[name].size_bytes), name
        stream.seek(places[name])
        stream.write(data.tobytes())

    def get(name: str, dtype: Any) -> NDArray[Any]:
        stream.seek(places[name])
        return np.frombuffer(stream.read(parts[name].size_bytes), dtype).reshape(parts[name].shape)

    if isinstance(matrix, ChannelMatrix):
        codes, scales = matrix.by_output, graph.tensor(matrix.scales).numpy()
        put(tensor, codes)
        put(f"{layer}.weight_scale", scales[:, None])
        same = np.array_equal(get(tensor, np.uint8), codes.view(np.uint8))
        same &= np.array_equal(get(f"{layer}.weight_scale", "<f4")[:, 0], scales)
        if matrix.input_scale is not None:
            put(f"{layer}.input_scale", graph.tensor(matrix.input_scale).numpy().reshape(1))
    else:
        read = matrix.read()
        put(f"{layer}.weight_packed", _words(read.codes, matrix.bits))
        put(f"{layer}.weight_scale", read.scales.astype(np.float16))
        put(f"{layer}.weight_shape", np.array([matrix.n, matrix.k], np.int64))
        words = get(f"{layer}.weight_packed", "<i4")
        same = np.array_equal(unpacked(words, matrix.bits), read.codes)
        same &= np.array_equal(get(f"{layer}.weight_scale", "<f2").astype(np.float32), read.scales)
        if read.zero_points is not None:
            put(f"{layer}.weight_zero_point", _words(read.zero_points.T, matrix.bits).T)
            points = get(f"{layer}.weight_zero_point", "<i4")
            same &= np.array_equal(unpacked(points.T, matrix.bits).T, read.zero_points)
    if not same:
        raise VerificationError(f"{tensor} was not written as it was quantized")


def unpacked(words: NDArray[np.int32], bits: int) -> NDArray[np.uint8]:
    """Read codes [N, C], from 0 on, of words [N, C·bits/32]."""
    places = np.arange(WORD_BITS // bits, dtype=np.uint32) * np.uint32(bits)
    each = words.astype(np.int64)[..., None].astype(np.uint32) >> places & np.uint32(2**bits - 1)
    return each.reshape(len(words), -1).astype(np.uint8)


def _write_json(file: Path, content: Mapping[str, Any]) -> str:
    """Write a file, and return its SHA-256."""
    text = (json.dumps(content, indent=2, sort_keys=True, ensure_ascii=False) + "\n").encode()
    file.write_bytes(text)
    return hashlib.sha256(text).hexdigest()
