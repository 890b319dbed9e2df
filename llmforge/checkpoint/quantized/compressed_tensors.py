"""compressed-tensors, as llm-compressor writes it, compressed: each linear layer in one of six formats.

    pack-quantized          weight_packed int32 [N, ceil(K·bits/32)], codes + 2**(bits-1) packed along the input
                            features; weight_scale [N, groups]; weight_zero_point int32 [ceil(N·bits/32), groups],
                            packed along the output features, or int8 [N, groups]; weight_shape [2]; weight_g_idx [K]
    int-quantized           weight int8 [N, K]; weight_scale [N, groups], [N, 1] or [1]; weight_zero_point int8
    float-quantized         weight fp8 (E4M3) [N, K]; weight_scale likewise, or [ceil(N/h), ceil(K/w)] of blocks [h, w]
    nvfp4-pack-quantized    weight_packed uint8 [N, K/2], two codes of fp4 (E2M1) a byte; weight_scale fp8 [N, K/16];
                            weight_global_scale fp32 [1], by which scales are divided
    mxfp4-pack-quantized    weight_packed uint8 [N, K/2] likewise; weight_scale uint8 [N, K/32], exponents from -127 on
    mxfp8-quantized         weight fp8 (E4M3) [N, K]; weight_scale uint8 [N, K/32] likewise

(compressed-tensors 0.20.0: compressors/*/base.py; quantization/lifecycle/forward.py, `dequantize`.)

Which format, and which group of the configuration, a layer has follows from what is stored: names and patterns in
`targets` and `ignore` only say what the tool was to do.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from llmforge.base.errors import CheckpointError, UnsupportedError
from llmforge.base.wording import shown
from llmforge.checkpoint.quantized.integers import (
    FLOATS,
    INPUT_SCALE,
    WORD_BITS,
    Integers,
    along_columns,
    along_rows,
    grid_of,
    modules,
    part,
    require_shape,
)
from llmforge.checkpoint.quantized.layout import CHUNK_BYTES, Grouped, QuantizedLayout, QuantizedTensor, settings_of
from llmforge.checkpoint.quantized.mxfp4 import E2M1, MXFP4_BLOCK, e8m0, scaled_blocks, unpack_e2m1
from llmforge.checkpoint.safetensors_file import DAMAGED, TensorEntry, damaged, external
from llmforge.quantization.grid import Grid
from llmforge.quantization.stored import StoredChannels, StoredFp4

FORMATS = (
    "pack-quantized",
    "int-quantized",
    "float-quantized",
    "naive-quantized",
    "nvfp4-pack-quantized",
    "mxfp4-pack-quantized",
    "mxfp8-quantized",
)
MIXED = "mixed-precision"
NVFP4_GROUP = 16
_INPUT_GLOBAL_SCALE = "input_global_scale"
_OF_INPUTS = (INPUT_SCALE, _INPUT_GLOBAL_SCALE)
_START = "start from the unquantized checkpoint"
# Of activations and caches, which are computed here in the formats of the recipe.
NOT_TAKEN = (
    "input_scale",
    "input_zero_point",
    "input_global_scale",
    "output_scale",
    "output_zero_point",
    "k_scale",
    "v_scale",
    "q_scale",
    "k_zero_point",
    "v_zero_point",
)


@dataclass(frozen=True)
class GroupScheme:
    """What a group of the configuration says of weights."""

    bits: int
    kind: str  # int or float
    strategy: str
    group_size: int | None
    block: tuple[int, int] | None  # output and input features


@dataclass(frozen=True, eq=False)
class _ScaledIntegers(Integers):
    def scales(self) -> NDArray[Any]:
        """Return the scales; that of a tensor is the one of each output feature."""
        return self._spread_groups(self.read("weight_scale"))

    def _spread_groups(self, stored: NDArray[Any]) -> NDArray[Any]:
        return np.broadcast_to(stored.reshape(-1, self.groups), (self.shape[0], self.groups))


@dataclass(frozen=True, eq=False)
class PackedTensor(_ScaledIntegers):
    """A weight [N, K] of pack-quantized."""

    def unpacked(self, rows: slice) -> NDArray[np.uint8]:
        """Return the codes of some output features."""
        return along_rows(self.read("weight_packed")[rows], self.bits, self.shape[1])

    def zero_points(self) -> NDArray[np.uint8] | None:
        """Return the zero points, which are signed where they are not packed."""
        if "weight_zero_point" not in self.parts:
            return None
        stored = self.read("weight_zero_point")
        if stored.dtype == np.int32:
            return np.ascontiguousarray(along_columns(stored, self.bits, self.shape[0]).T)
        return _unsigned(self, "weight_zero_point", stored, self.bits).reshape(-1, self.groups)

    def group_of(self) -> NDArray[np.intp]:
        """Return what stands in weight_g_idx, unless that is -1 everywhere.

        Raises:
            CheckpointError: it names a group that is none.
        """
        if "g_idx" not in self.parts:
            return super().group_of()
        groups = self.read("g_idx").astype(np.intp)
        return super().group_of() if (groups == -1).all() else self._named_groups(groups)


@dataclass(frozen=True, eq=False)
class ByteTensor(_ScaledIntegers):
    """A weight [N, K] of int-quantized: signed codes, a byte each."""

    def unpacked(self, rows: slice) -> NDArray[np.uint8]:
        """Return the codes of some output features."""
        return _unsigned(self, "weight", self.read("weight")[rows], self.bits)

    def zero_points(self) -> NDArray[np.uint8] | None:
        """Return the zero points."""
        if "weight_zero_point" not in self.parts:
            return None
        return self._spread_groups(_unsigned(self, "weight_zero_point", self.read("weight_zero_point"), self.bits))


@dataclass(frozen=True, eq=False)
class FloatQuantizedTensor(QuantizedTensor):
    """A weight [N, K] of float-quantized: each number times the scale of its block of [h, w] output and input features.

    Products are rounded to the dtype of the scales.
    """

    block: tuple[int, int]

    @property
    def format(self) -> str:
        """The blocks."""
        n, k = self.shape
        height, width = self.block
        shared = "with one scale" if height >= n and width >= k else "by channel" if (height, width) == (1, k) else ""
        return f"fp8 {shared or f'in blocks of {height} by {width}'}"

    def dequantize(self) -> NDArray[Any]:
        """Return the weights."""
        n, k = self.shape
        height, width = self.block
        codes, scales = self.read("weight"), self.read("weight_scale").astype(np.float32)
        scales = scales.reshape(-(-n // height), -(-k // width))
        made = np.empty((n, k), self.dtype.numpy())
        some = max(1, CHUNK_BYTES // (4 * k))
        columns = np.arange(k) // width
        with np.errstate(over="ignore", invalid="ignore"):
            for at in range(0, n, some):
                rows = np.arange(at, min(at + some, n))
                wide = codes[at : at + some].astype(np.float32)
                wide *= scales[rows // height][:, columns]
                made[at : at + some] = wide
        return self.finite(made, "weight_scale", f"makes weights of {self.name!r} that are not finite")

    def channels(self) -> StoredChannels:
        """Return the codes, unless blocks share scales."""
        n, k = self.shape
        height, width = self.block
        if width < k or (height > 1 and height < n):
            return super().channels()

        scales = np.broadcast_to(self.read("weight_scale").astype(np.float32).reshape(-1), (n,))
        return self.in_channels("fp8", lambda: self.read("weight"), scales, self.number(INPUT_SCALE))


@dataclass(frozen=True, eq=False)
class Fp4Tensor(QuantizedTensor):
    """A weight [N, K] of nvfp4-pack-quantized, which becomes bf16: code · (scale / global scale), in fp32."""

    @property
    def format(self) -> str:
        """The groups."""
        return f"nvfp4 in groups of {NVFP4_GROUP}"

    def dequantize(self) -> NDArray[Any]:
        """Return the weights."""
        n, k = self.shape
        whole = self._whole()
        packed, scales = self.read("weight_packed"), self.read("weight_scale")
        made = np.empty((n, k), self.dtype.numpy())
        some = max(1, CHUNK_BYTES // (4 * k))
        with np.errstate(over="ignore", invalid="ignore"):
            for at in range(0, n, some):
                stored = packed[at : at + some]
                codes = np.stack([stored & 0xF, stored >> 4], -1).reshape(len(stored), -1, NVFP4_GROUP)
                each = self._steps(scales[at : at + some].astype(np.float32), whole)
                made[at : at + some] = (E2M1[codes] * each[..., None]).reshape(len(stored), k)
        return self.finite(made, "weight_scale", f"makes weights of {self.name!r} that are not finite")

    def _steps(self, scales: NDArray[np.float32], whole: np.float32) -> NDArray[np.float32]:
        return scales / whole

    def fp4(self) -> StoredFp4:
        """Return the codes; a scale of tensors is the reciprocal of the global scale, rounded to fp32."""
        n, k = self.shape

        def codes() -> NDArray[Any]:
            import ml_dtypes  # what serves has no such package

            packed = self.read("weight_packed")
            return np.stack([packed & 0xF, packed >> 4], -1).reshape(n, k).view(ml_dtypes.float4_e2m1fn)

        inputs = self.number(_INPUT_GLOBAL_SCALE)
        scale = np.float32(1) / self._whole()
        if not np.isfinite(scale) or not scale > 0:
            raise self.damaged("weight_global_scale", "has no positive reciprocal")
        of_inputs = None if inputs is None else np.float32(1) / np.float32(inputs)
        return StoredFp4(codes, lambda: self.read("weight_scale"), scale, of_inputs)

    def _whole(self) -> np.float32:
        [whole] = self.read("weight_global_scale").astype(np.float32).reshape(-1)
        if whole == 0:
            raise self.damaged("weight_global_scale", "is 0, by which scales are divided")
        return np.float32(whole)


@dataclass(frozen=True, eq=False)
class MxTensor(QuantizedTensor):
    """A weight [N, K] of mxfp4-pack-quantized or mxfp8-quantized, which becomes bf16: code · 2**(exponent - 127)."""

    @property
    def format(self) -> str:
        """The numbers."""
        return f"{'mxfp4' if 'weight_packed' in self.parts else 'mxfp8'} in groups of {MXFP4_BLOCK}"

    def dequantize(self) -> NDArray[Any]:
        """Return the weights."""
        packed, scales = "weight_packed" in self.parts, self.read("weight_scale")
        codes = self.read("weight_packed" if packed else "weight")
        made = np.empty(self.shape, self.dtype.numpy())
        some = max(1, CHUNK_BYTES // (4 * self.shape[1]))
        for at in range(0, len(codes), some):
            part = codes[at : at + some]
            values = unpack_e2m1(part) if packed else part.astype(np.float32)
            made[at : at + some] = scaled_blocks(values, e8m0(scales[at : at + some]), MXFP4_BLOCK)
        return self.finite(made, "weight_scale", f"makes weights of {self.name!r} that are not finite")


class CompressedTensors(QuantizedLayout):
    """Checkpoints of llm-compressor, and of what else writes compressed-tensors."""

    name: ClassVar[str] = "compressed-tensors"
    methods: ClassVar[tuple[str, ...]] = ("compressed-tensors",)

    def check(self, config: Mapping[str, Any], where: Path) -> str:
        """Say the formats of its groups."""
        schemes = _schemes(config, where)
        return ", ".join(sorted({f"{'fp' if each.kind == 'float' else 'int'}{each.bits}" for each in schemes}))

    def grid(self, config: Mapping[str, Any]) -> Grid | None:
        """Guess the grid by the first group of the configuration that has integers."""
        for group in config["config_groups"].values():
            weights = group.get("weights") or {}
            if weights.get("type", "int") == "int":
                size = weights.get("group_size")
                return grid_of(weights.get("num_bits", 8), size or -1, symmetric=weights.get("symmetric", True) is True)
        return None

    def group(self, settings: Mapping[str, Any], stored: Mapping[str, TensorEntry], folder: Path) -> Grouped:
        """Find the linear layers that have a weight_packed or a weight_scale."""
        config = settings_of(settings)
        schemes = _schemes(config, folder)
        found = [_tensor(schemes, stored, module) for module in modules(stored, "weight_scale")]
        left = Grouped.of(found, stored).plain
        for name, entry in left.items():
            if name.rpartition(".")[2] in ("weight_packed", "compressed", "bitmask"):
                raise damaged(entry, "has no weight_scale beside it, and is not taken")
        plain = {name: entry for name, entry in left.items() if name.rpartition(".")[2] not in NOT_TAKEN}
        own = {entry.name for tensor in found for role, entry in tensor.parts.items() if role in _OF_INPUTS}
        return Grouped(found, plain, list(_notes(config, own | (left.keys() - plain.keys()))))


def _schemes(config: Mapping[str, Any], where: Path) -> list[GroupScheme]:
    """Read what the groups of a configuration say of weights.

    Raises:
        UnsupportedError: it stores, sparsifies or transforms them in a way that is not taken.
        CheckpointError: it makes no sense.
    """
    status, sparsity = config.get("quantization_status", "compressed"), config.get("sparsity_config") or {}
    if status != "compressed":
        raise UnsupportedError(
            f"{where}: quantization_config.quantization_status is {shown(status)}; only compressed weights are taken",
            hint=f"save it compressed with llm-compressor, or {_START}",
        )
    if not isinstance(sparsity, dict) or sparsity.get("format") not in (None, "dense"):
        raise UnsupportedError(f"{where}: quantization_config.sparsity_config is not taken", hint=_START)
    if config.get("transform_config"):
        raise UnsupportedError(
            f"{where}: quantization_config.transform_config rotates what layers read, which is not taken", hint=_START
        )
    groups = config.get("config_groups")
    if not isinstance(groups, dict) or not groups or not all(isinstance(each, dict) for each in groups.values()):
        raise CheckpointError(f"{where}: quantization_config.config_groups must map names to schemes", hint=DAMAGED)
    overall = config.get("format")
    made = []
    for name, group in groups.items():
        own = group.get("format") or overall
        weights = group.get("weights")
        if weights is None:
            continue
        if own not in FORMATS and not (own == MIXED and group.get("format") is None):
            raise UnsupportedError(
                f"{where}: quantization_config.config_groups.{name} has format {shown(own)}; taken are "
                f"{', '.join(FORMATS)}",
                hint=_START,
            )
        made.append(_scheme(weights, f"{where}: quantization_config.config_groups.{name}.weights"))
    return made


def _scheme(weights: object, where: str) -> GroupScheme:
    if not isinstance(weights, dict):
        raise CheckpointError(f"{where} must be a mapping, is {shown(weights)}", hint=DAMAGED)
    bits, kind, size = weights.get("num_bits", 8), weights.get("type", "int"), weights.get("group_size")
    strategy = weights.get("strategy") or ("tensor" if size is None else "channel" if size == -1 else "group")
    block = weights.get("block_structure")
    if isinstance(block, str) and all(each.isdecimal() and len(each) < 7 for each in block.split("x")):
        block = [int(each) for each in block.split("x")]
    if type(bits) is not int or not 1 <= bits <= 8 or kind not in ("int", "float"):
        raise CheckpointError(f"{where}: num_bits {shown(bits)} and type {shown(kind)} are no format", hint=DAMAGED)
    if bits == 1 or (kind == "float" and bits not in (4, 8)):
        raise UnsupportedError(f"{where}: {kind} of {bits} bits is not taken", hint=_START)
    if strategy not in ("tensor", "channel", "group", "block", "tensor_group"):
        raise UnsupportedError(f"{where}.strategy is {shown(strategy)}, which is not taken", hint=_START)
    if strategy in ("group", "tensor_group") and (type(size) is not int or size < 1):
        raise CheckpointError(f"{where}.group_size is {shown(size)}; it must be at least 1", hint=DAMAGED)
    if strategy == "block" and not (
        isinstance(block, list) and len(block) == 2 and all(type(each) is int and each > 0 for each in block)
    ):
        raise CheckpointError(f"{where}.block_structure is {shown(block)}; it must be two sizes", hint=DAMAGED)
    sizes = (block[0], block[1]) if strategy == "block" and block is not None else None
    return GroupScheme(bits, str(kind), str(strategy), size if strategy in ("group", "tensor_group") else None, sizes)


def _tensor(schemes: list[GroupScheme], stored: Mapping[str, TensorEntry], module: str) -> QuantizedTensor:
    """Put one weight together, by the dtype of what is stored."""
    made = _of_weight(schemes, stored, module)
    inputs = {role: stored[f"{module}.{role}"] for role in _OF_INPUTS if f"{module}.{role}" in stored}
    if f"{module}.input_zero_point" in stored:  # what is read is not around 0, as it is in what the formats here say
        inputs = {}
    return replace(made, parts={**made.parts, **inputs}) if inputs else made


def _of_weight(schemes: list[GroupScheme], stored: Mapping[str, TensorEntry], module: str) -> QuantizedTensor:
    if stored[f"{module}.weight_scale"].dtype.name == "UINT8":
        return mx_tensor(stored, module)
    if f"{module}.weight_packed" in stored:
        packed = part(stored, f"{module}.weight_packed", ["INT32", "UINT8"])
        made = _packed if packed.dtype.name == "INT32" else _fp4
        return made(schemes, stored, module, packed)
    weight = part(stored, f"{module}.weight", ["INT8", "FLOAT8E4M3FN", *FLOATS])
    if weight.dtype.name == "INT8":
        return _bytes(schemes, stored, module, weight)
    if weight.dtype.name == "FLOAT8E4M3FN":
        return _fp8(schemes, stored, module, weight)
    raise UnsupportedError(
        f"{weight.file}: tensor {weight.name!r} is {weight.dtype.name} and has a weight_scale; only compressed weights "
        "are taken",
        hint=f"save it compressed with llm-compressor, or {_START}",
    )


def _packed(
    schemes: list[GroupScheme], stored: Mapping[str, TensorEntry], module: str, packed: TensorEntry
) -> QuantizedTensor:
    shape = part(stored, f"{module}.weight_shape", ["INT64", "INT32"], rank=1)
    require_shape(shape, (2,), "output and input features")
    n, k = (int(size) for size in external(shape).numpy())
    if not 0 < n < 1 << 40 or not 0 < k < 1 << 40 or packed.shape[0] != n:
        raise damaged(shape, f"says [{n}, {k}]; {packed.name!r} has {packed.shape[0]} output features")
    scale = _scale(stored, module)
    fitting = [
        scheme
        for scheme in schemes
        if scheme.kind == "int" and packed.shape[1] == -(-k * scheme.bits // WORD_BITS) and _groups(scheme, scale, n, k)
    ]
    scheme = _only(schemes, fitting, packed, [n, k])
    groups = _groups(scheme, scale, n, k)
    parts = {"weight_packed": packed, "weight_scale": scale, "weight_shape": shape}
    if f"{module}.weight_zero_point" in stored:
        zeros = part(stored, f"{module}.weight_zero_point", ["INT32", "INT8"])
        high = n if zeros.dtype.name == "INT8" else -(-n * scheme.bits // WORD_BITS)
        require_shape(zeros, (high, groups), f"{n} output features in {groups} groups, of {scheme.bits} bits,")
        parts["weight_zero_point"] = zeros
    if f"{module}.weight_g_idx" in stored:
        g_idx = part(stored, f"{module}.weight_g_idx", ["INT32", "INT64"], rank=1)
        require_shape(g_idx, (k,), f"{k} input features")
        parts["g_idx"] = g_idx
    return PackedTensor(f"{module}.weight", (n, k), scale.dtype, parts, scheme.bits, groups)


def _bytes(
    schemes: list[GroupScheme], stored: Mapping[str, TensorEntry], module: str, weight: TensorEntry
) -> QuantizedTensor:
    n, k = weight.shape
    scale = _scale(stored, module)
    fitting = [each for each in schemes if each.kind == "int" and _groups(each, scale, n, k)]
    scheme = _only(schemes, fitting, weight, [n, k])
    groups = _groups(scheme, scale, n, k)
    parts = {"weight": weight, "weight_scale": scale}
    if f"{module}.weight_zero_point" in stored:
        zeros = stored[f"{module}.weight_zero_point"]
        part(stored, zeros.name, ["INT8"], rank=len(zeros.shape))
        require_shape(zeros, scale.shape, f"scales of {list(scale.shape)}")
        parts["weight_zero_point"] = zeros
    return ByteTensor(f"{module}.weight", (n, k), scale.dtype, parts, scheme.bits, groups)


def _fp8(
    schemes: list[GroupScheme], stored: Mapping[str, TensorEntry], module: str, weight: TensorEntry
) -> QuantizedTensor:
    n, k = weight.shape
    scale = _scale(stored, module)
    blocks = [_block(each, scale, n, k) for each in schemes if (each.kind, each.bits) == ("float", 8)]
    block = _only(schemes, [each for each in blocks if each is not None], weight, [n, k])
    return FloatQuantizedTensor(
        f"{module}.weight", (n, k), scale.dtype, {"weight": weight, "weight_scale": scale}, block
    )


def _fp4(
    schemes: list[GroupScheme], stored: Mapping[str, TensorEntry], module: str, packed: TensorEntry
) -> QuantizedTensor:
    import onnx_ir as ir

    n, k = packed.shape[0], 2 * packed.shape[1]
    scale = part(stored, f"{module}.weight_scale", ["FLOAT8E4M3FN"])
    whole = part(stored, f"{module}.weight_global_scale", ["FLOAT"], rank=1)
    require_shape(scale, (n, k // NVFP4_GROUP), f"[{n}, {k}] in groups of {NVFP4_GROUP}")
    require_shape(whole, (1,), "all scales")
    fp4 = [each for each in schemes if (each.kind, each.bits, each.group_size) == ("float", 4, NVFP4_GROUP)]
    if not fp4 or k % NVFP4_GROUP:
        raise _unmatched(packed, [n, k])
    parts = {"weight_packed": packed, "weight_scale": scale, "weight_global_scale": whole}
    return Fp4Tensor(f"{module}.weight", (n, k), ir.DataType.BFLOAT16, parts)


def mx_tensor(stored: Mapping[str, TensorEntry], module: str) -> MxTensor:
    """Put a weight in a microscaling format together.

    Raises:
        CheckpointError: a part is missing, or its shape or dtype does not fit.
    """
    import onnx_ir as ir

    role = "weight_packed" if f"{module}.weight_packed" in stored else "weight"
    codes = part(stored, f"{module}.{role}", ["UINT8"] if role == "weight_packed" else ["FLOAT8E4M3FN"])
    n, k = codes.shape[0], codes.shape[1] * (2 if role == "weight_packed" else 1)
    scale = part(stored, f"{module}.weight_scale", ["UINT8"])
    require_shape(scale, (n, k // MXFP4_BLOCK), f"[{n}, {k}] in groups of {MXFP4_BLOCK}")
    if k % MXFP4_BLOCK:
        raise damaged(codes, f"has {k} input features, which {MXFP4_BLOCK} does not divide")
    return MxTensor(f"{module}.weight", (n, k), ir.DataType.BFLOAT16, {role: codes, "weight_scale": scale})


def _scale(stored: Mapping[str, TensorEntry], module: str) -> TensorEntry:
    name = f"{module}.weight_scale"
    return part(stored, name, FLOATS, rank=min(max(len(stored[name].shape), 0), 2))


def _groups(scheme: GroupScheme, scale: TensorEntry, n: int, k: int) -> int:
    """Return the groups of input features where scales [N, groups], [N, 1] or [1] are those of a scheme; 0: not so."""
    if scheme.strategy == "tensor":
        return int(scale.shape in ((), (1,), (1, 1)))
    if scheme.strategy == "channel":
        return int(scale.shape in ((n, 1), (n,)))
    if scheme.group_size is None or k % scheme.group_size or scale.shape != (n, k // scheme.group_size):
        return 0
    return k // scheme.group_size


def _block(scheme: GroupScheme, scale: TensorEntry, n: int, k: int) -> tuple[int, int] | None:
    """Return the output and input features that share a scale; None where scales have another shape."""
    if scheme.strategy == "block":
        assert scheme.block is not None
        height, width = scheme.block
        return (height, width) if scale.shape == (-(-n // height), -(-k // width)) else None
    groups = _groups(scheme, scale, n, k)
    if not groups:
        return None
    return (n, k) if scheme.strategy == "tensor" else (1, k // groups)


def _only(schemes: list[GroupScheme], fitting: list[Any], entry: TensorEntry, shape: list[int]) -> Any:
    """Return the one that fits; several that are alike are one."""
    if len(set(fitting)) != 1:
        raise _unmatched(entry, shape, len(set(fitting)))
    return fitting[0]


def _unmatched(entry: TensorEntry, shape: list[int], count: int = 0) -> CheckpointError:
    fits = "no group of quantization_config fits it" if not count else f"{count} groups of quantization_config fit it"
    return damaged(entry, f"stores {shape}; {fits} and its weight_scale")


def _notes(config: Mapping[str, Any], left: set[str]) -> Iterator[str]:
    """Say what is quantized there and not here."""
    of = [group for group in config["config_groups"].values() if group.get("input_activations")]
    if of or any(name.rpartition(".")[2].startswith("input_") for name in left):
        yield (
            "the checkpoint says that activations are quantized, too; the recipe decides that: `method: stored` of "
            "quantize-channels and quantize-fp4 takes its static scales, and nothing else does"
        )
    if config.get("kv_cache_scheme") or any(name.endswith(("k_scale", "v_scale")) for name in left):
        yield "the checkpoint says how the KV cache is quantized, which is not taken: see the pass quantize-kv-cache"


def _unsigned(tensor: QuantizedTensor, role: str, stored: NDArray[np.int8], bits: int) -> NDArray[np.uint8]:
    """Move signed codes of so many bits to 0 … 2**bits - 1.

    Raises:
        CheckpointError: one has more bits.
    """
    moved = stored.astype(np.int16) + (1 << (bits - 1))
    if moved.size and (int(moved.min()) < 0 or int(moved.max()) >= 1 << bits):
        raise tensor.damaged(role, f"holds codes beyond {bits} bits")
    return moved.astype(np.uint8)
