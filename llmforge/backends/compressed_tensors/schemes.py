"""How each quantized layer is stored: as a group of `quantization_config`, or as an algorithm of ModelOpt's."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, Literal, cast

from llmforge.backends.compressed_tensors import modelopt
from llmforge.backends.compressed_tensors.layout import HALVES, TOGETHER, WORD_BITS, QuantMethod
from llmforge.backends.compressed_tensors.servers import FormatName
from llmforge.backends.exported_parameters import OF_EXPERTS, Blocks, ExpertBlocks, Exported, KernelBlocks, Quantized
from llmforge.backends.low_precision_matrices import Fp4Matrix, MxMatrix
from llmforge.base.errors import UnsupportedError
from llmforge.checkpoint import Checkpoint
from llmforge.ir import fp4, mx
from llmforge.quantization.grid import Scale

METHOD: Final = "compressed-tensors"
VERSION = "0.20.0"
DTYPES: Mapping[Scale, str] = {"fp16": "float16", "bf16": "bfloat16"}  # in config.json
KV_SCHEME: Final = {  # keys and values in fp8, a scale each for a layer
    "num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False, "symmetric": True,
}  # fmt: skip
_HEAD, _MATRIX = "lm_head", 2
_EXPERTS_SIZE = 32  # the smallest group of vLLM's and SGLang's int4 and int8 experts

Strategy = Literal["tensor", "channel", "group", "tensor_group", "block"]


@dataclass(frozen=True)
class LayerScheme:
    """How a layer is stored."""

    format: str  # of compressed-tensors
    bits: int
    kind: Literal["int", "float"]
    strategy: Strategy  # what shares a scale
    size: int | None = None  # features that do, of a group or a block
    symmetric: bool = True
    scales: Scale = "fp32"  # of packed codes, 16 bits
    inputs: Literal["none", "static", "per_token", "grouped"] = "none"  # grouped: as weights are

    @property
    def name(self) -> FormatName:
        """Its name in `servers.SERVERS`, by compressed-tensors."""
        codes = f"{'fp' if self.kind == 'float' else 'int'}{self.bits}"
        if self.strategy == "block":
            return "fp8-block"
        if self.strategy == "tensor":
            return "fp8-tensor"
        if self.kind == "float" and self.size is not None:
            return cast(FormatName, f"{'nv' if self.strategy == 'tensor_group' else 'mx'}{codes}")
        return cast(FormatName, codes if self.inputs == "none" else f"{codes}-{self.inputs}")

    @property
    def group(self) -> dict[str, Any]:
        """The group of compressed-tensors, but for its targets."""
        shared = {"num_bits": self.bits, "type": self.kind, "symmetric": True}
        weights: dict[str, Any] = {
            **shared,
            "symmetric": self.symmetric,
            "group_size": self.size,
            "strategy": self.strategy,
            "dynamic": False,
        }
        inputs: dict[str, Any] | None = None
        if self.strategy == "block":
            weights |= {"group_size": None, "block_structure": [self.size, self.size]}
            inputs = {**shared, "strategy": "group", "group_size": self.size, "dynamic": True}
        elif self.strategy == "tensor_group":
            weights |= {"scale_dtype": "torch.float8_e4m3fn"}
            inputs = {**weights, "dynamic": "local"}
        elif self.inputs == "grouped":
            weights |= {"scale_dtype": "torch.uint8"}
            inputs = {**weights, "dynamic": True}
        elif self.inputs == "static":
            inputs = {**shared, "strategy": "tensor", "dynamic": False}
        elif self.inputs == "per_token":
            inputs = {**shared, "strategy": "token", "dynamic": True}
        return {"weights": weights, "input_activations": inputs, "output_activations": None, "format": self.format}


@dataclass(frozen=True)
class Schemes:
    """How all layers of a checkpoint are stored."""

    method: QuantMethod
    layers: Mapping[str, LayerScheme]  # by the tensor of the checkpoint

    @classmethod
    def of(cls, exported: Exported, method: QuantMethod) -> Schemes:
        """Say how each quantized matrix is stored, by the `method` that config.json names.

        Raises:
            UnsupportedError: the format does not hold it exactly, or the servers do not load it so.
        """
        layers = {tensor: scheme_of(tensor, matrix) for tensor, matrix in exported.quantized.items()}
        if method == modelopt.NAME:
            if any(isinstance(matrix, OF_EXPERTS) for matrix in exported.quantized.values()):
                raise UnsupportedError(
                    "experts have no names of ModelOpt's here", hint="leave `quant_method` out, or exclude them"
                )
            for tensor, scheme in layers.items():
                _require_modelopt(tensor, scheme)
            if len(found := sorted({scheme.name for scheme in layers.values()})) > 1:
                raise UnsupportedError(
                    f"layers are {' and '.join(found)}; ModelOpt's checkpoints have one algorithm",
                    hint="quantize all layers by one pass, or leave `quant_method` out",
                )
        return cls(method, layers)

    @property
    def names(self) -> frozenset[FormatName]:
        """Their names in `servers.SERVERS`."""
        own = "" if self.method == METHOD else f"-{self.method}"
        return frozenset(cast(FormatName, f"{scheme.name}{own}") for scheme in self.layers.values())

    def experts(self, exported: Exported) -> frozenset[FormatName]:
        """Name those of experts."""
        quantized = exported.quantized
        return frozenset(each.name for key, each in self.layers.items() if isinstance(quantized[key], OF_EXPERTS))

    @property
    def packed_scales(self) -> Scale | None:
        """The dtype of scales of packed codes, where there are some."""
        return next((each.scales for each in self.layers.values() if each.format == "pack-quantized"), None)

    def quantization_config(self, checkpoint: Checkpoint, *, caches: bool) -> dict[str, Any]:
        """Describe the formats: `Linear` where all quantized layers have one, else layers by their names.

        `ignore` names every other layer that might be linear; `caches`: keys and values are cached in fp8.
        """
        groups: dict[LayerScheme, list[str]] = {}
        for tensor, scheme in self.layers.items():
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
            "ignore": self.unquantized(checkpoint),
            "kv_cache_scheme": KV_SCHEME if caches else None,
            "version": VERSION,
        }

    def algorithm(self, checkpoint: Checkpoint, *, caches: bool) -> modelopt.Algorithm:
        """Describe them as ModelOpt does."""
        scheme = next(iter(self.layers.values()))
        return modelopt.Algorithm(scheme.name, scheme.size, tuple(self.unquantized(checkpoint)), caches)

    def unquantized(self, checkpoint: Checkpoint) -> list[str]:
        """Name the layers that stay: whatever has a matrix, or one for each expert, used or not."""
        kept = {_HEAD}
        for name, entry in checkpoint.tensors.items():
            if name not in self.layers and len(entry.shape) >= _MATRIX:
                kept.add(name.rpartition(".")[0] if not name.endswith(".weight") else name.removesuffix(".weight"))
        return sorted(kept)


def check(exported: Exported, method: QuantMethod) -> Schemes:
    """Say how layers are stored if the format holds every code exactly, and the servers load it; reads no weight.

    Raises:
        UnsupportedError: it does not; says which option would.
    """
    if not exported.quantized:
        raise UnsupportedError("nothing is quantized: the checkpoint itself is what the servers load")
    schemes = Schemes.of(exported, method)
    _require_one_dtype(schemes, exported.checkpoint)
    layers: dict[tuple[str, frozenset[str]], dict[str, LayerScheme | None]] = {}
    for tensor in exported.checkpoint.tensors:
        parent, _, layer = tensor.removesuffix(".weight").rpartition(".")
        for together in TOGETHER:
            if layer in together and tensor.endswith(".weight"):
                layers.setdefault((parent, together), {})[tensor] = schemes.layers.get(tensor)
    for (parent, _), found in layers.items():
        _require_alike(parent, found, exported)
    return schemes


def _require_alike(parent: str, found: Mapping[str, LayerScheme | None], exported: Exported) -> None:
    """Return if the layers of `parent` that servers put on top of each other have one format, and what it shares."""
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
        if scheme is not None and scheme.strategy == "block":
            assert scheme.size is not None
            if (n := exported.quantized[tensor].n) % scheme.size:
                raise UnsupportedError(
                    f"{tensor}: {n} output features are not a multiple of {scheme.size}; the servers put it on top of "
                    f"others of {parent}, and so their squares",
                    hint="exclude all of them, or set `granularity: channel`",
                )


def _require_one_dtype(schemes: Schemes, checkpoint: Checkpoint) -> None:
    """Return if one dtype holds the scales of all packed codes, and no tensor that stays loses by it."""
    scales = {scheme.scales for scheme in schemes.layers.values() if scheme.format == "pack-quantized"}
    if len(scales) > 1:
        raise UnsupportedError(
            f"packed codes have scales in {' and '.join(sorted(scales))}; servers compute in one dtype",
            hint="set one `scales` in all quantize-weights of the recipe",
        )
    if "bf16" in scales and (own := _dtype(checkpoint.settings)) != DTYPES["bf16"]:
        raise UnsupportedError(
            f"config.json says dtype {own}; servers would compute in bf16, the dtype of the scales",
            hint="set `scales: fp16` in quantize-weights",
        )


def _dtype(settings: Mapping[str, Any]) -> str | None:
    """Read in which dtype config.json says that a model, or the language model in it, computes."""
    of_text = settings.get("text_config")
    parts = [settings, of_text if isinstance(of_text, dict) else {}]
    return next((str(each[key]) for each in parts for key in ("dtype", "torch_dtype") if each.get(key)), None)


def scheme_of(tensor: str, matrix: Quantized) -> LayerScheme:
    """Say how a matrix is stored.

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
    if isinstance(matrix, Blocks):
        return _of_blocks(tensor, matrix)
    if tensor == f"{_HEAD}.weight":
        raise UnsupportedError(f"{tensor}: the servers read the head as it is", hint="set `head: false`")
    if isinstance(matrix, Fp4Matrix):
        return LayerScheme("nvfp4-pack-quantized", 4, "float", "tensor_group", fp4.BLOCK)
    if isinstance(matrix, MxMatrix):
        bits = {"fp4": 4, "fp8": 8}[matrix.dtype]
        held = {4: "mxfp4-pack-quantized", 8: "mxfp8-quantized"}[bits]
        return LayerScheme(held, bits, "float", "group", mx.BLOCK, inputs="grouped")
    if matrix.dtype == "fp8":
        strategy: Strategy = "block" if matrix.square else "tensor" if matrix.whole else "channel"
        return LayerScheme("float-quantized", 8, "float", strategy, matrix.square, inputs=matrix.inputs)
    if matrix.inputs == "none":
        raise UnsupportedError(
            f"{tensor}: the servers multiply int8 weights with one scale per output feature by int8 activations alone",
            hint="set `activations: static` or `per_token`, or use quantize-weights with `bits: 8`",
        )
    return LayerScheme("int-quantized", 8, "int", "channel", inputs=matrix.inputs)


def _of_blocks(tensor: str, matrix: Blocks) -> LayerScheme:
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
    if isinstance(matrix, ExpertBlocks) and matrix.block_size < _EXPERTS_SIZE:
        raise UnsupportedError(
            f"{tensor}: its blocks are of {matrix.block_size}; the servers' kernels of experts take {_EXPERTS_SIZE} "
            "input features or more",
            hint=f"exclude them: `exclude: [{matrix.parameter}]`",
        )
    size, scales = matrix.block_size, matrix.stored_scales
    return LayerScheme("pack-quantized", matrix.bits, "int", "group", size, matrix.symmetric, scales)


def _require_modelopt(tensor: str, scheme: LayerScheme) -> None:
    """Return if ModelOpt has an algorithm for it."""
    if scheme.name not in modelopt.ALGORITHMS:
        raise UnsupportedError(
            f"{tensor} is {scheme.name}, which has no name of ModelOpt's here; {', '.join(modelopt.ALGORITHMS)} have",
            hint="see docs/other-runtimes.md for the passes, or leave `quant_method` out",
        )
    if scheme.name == "int4" and not (scheme.symmetric and scheme.size in modelopt.INT4_GROUPS):
        raise UnsupportedError(
            f"{tensor}: W4A16_AWQ has no zero points, and groups of {' or '.join(map(str, modelopt.INT4_GROUPS))}",
            hint="set `symmetric: true` and `block_size: 128` in quantize-weights",
        )
    if scheme.name == "fp8-tensor" and scheme.inputs != "static":
        raise UnsupportedError(
            f"{tensor}: calibration has no range of what it reads, and FP8 of ModelOpt has a static scale of it",
            hint=f"use more calibration text, or exclude it: `exclude: [{tensor}]`",
        )
