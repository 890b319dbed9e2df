"""ModelOpt's checkpoints: one algorithm for all linear layers that config.json does not ignore.

    NVFP4                      weight uint8 [N, K/2], two codes of fp4 (E2M1) a byte; weight_scale fp8 [N, K/16];
                               weight_scale_2 fp32 [], by which scales are multiplied; input_scale fp32 []
    FP8                        weight fp8 (E4M3) [N, K]; weight_scale fp32 []; input_scale fp32 []
    FP8_PER_CHANNEL_PER_TOKEN  weight fp8 (E4M3) [N, K]; weight_scale fp32 [N]
    MXFP8                      weight fp8 (E4M3) [N, K]; weight_scale uint8 [N, K/32], exponents from -127 on
    W4A16_AWQ                  weight uint8 [N/2, K], two signed codes of a column a byte; weight_scale [N, groups];
                               pre_quant_scale [K], by which what the layer reads is multiplied

(ModelOpt 0.47: torch/export/quant_utils.py, torch/quantization/qtensor.)
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from llmforge.base.errors import UnsupportedError
from llmforge.base.wording import shown
from llmforge.checkpoint.quantized.compressed_tensors import (
    NOT_TAKEN,
    NVFP4_GROUP,
    FloatQuantizedTensor,
    Fp4Tensor,
    mx_tensor,
)
from llmforge.checkpoint.quantized.integers import (
    FLOATS,
    INPUT_SCALE,
    Integers,
    modules,
    part,
    require_shape,
    said_groups,
)
from llmforge.checkpoint.quantized.layout import Grouped, QuantizedLayout, QuantizedTensor, settings_of
from llmforge.checkpoint.safetensors_file import TensorEntry, damaged
from llmforge.quantization.grid import Grid
from llmforge.quantization.grids import QuantizedMatrix
from llmforge.quantization.stored import StoredFp4, UnrepresentableCodes

ALGORITHMS = ("NVFP4", "FP8", "FP8_PER_CHANNEL_PER_TOKEN", "MXFP8", "W4A16_AWQ")
_PRE, _WHOLE = "pre_quant_scale", "weight_scale_2"


@dataclass(frozen=True, eq=False)
class ModelOptFp4(Fp4Tensor):
    """A weight [N, K] of NVFP4, which becomes bf16: code · (scale · weight_scale_2), in fp32."""

    def _steps(self, scales: NDArray[np.float32], whole: np.float32) -> NDArray[np.float32]:
        return scales * whole

    def fp4(self) -> StoredFp4:
        """Return the codes, and the scales as they are stored."""
        found, inputs = super().fp4(), self.number(INPUT_SCALE)
        return replace(found, scale=self._whole(), input_scale=None if inputs is None else np.float32(inputs))


@dataclass(frozen=True, eq=False)
class AwqBytes(Integers):
    """A weight [N, K] of W4A16_AWQ, of which `pre_quant_scale` is a factor."""

    def unpacked(self, rows: slice) -> NDArray[np.uint8]:
        """Return the codes of some output features."""
        held = self.read("weight")[rows.start // 2 : -(-rows.stop // 2)]
        codes: NDArray[np.uint8] = np.stack([held & 15, held >> 4], 1).reshape(-1, self.shape[1]) ^ np.uint8(8)
        return codes

    def scales(self) -> NDArray[Any]:
        """Return the scales."""
        return self.read("weight_scale")

    def zero_points(self) -> None:
        """Return None: codes are around 0."""

    def dequantize(self) -> NDArray[Any]:
        """Return the weights, times what their inputs are multiplied by."""
        made = super().dequantize()
        return made if self._factors is None else (made * self._factors).astype(made.dtype)

    def grid(self) -> Grid:
        """Return the grid of the codes, where inputs are not multiplied."""
        self._require_plain()
        return super().grid()

    def codes(self) -> QuantizedMatrix:
        """Return codes and scales, where inputs are not multiplied."""
        self._require_plain()
        return super().codes()

    @property
    def _factors(self) -> NDArray[np.float32] | None:
        """What inputs are multiplied by; None: by nothing but one."""
        if _PRE not in self.parts:
            return None
        found = self.read(_PRE).astype(np.float32)
        return None if (found == 1).all() else found

    def _require_plain(self) -> None:
        if self._factors is not None:
            raise UnrepresentableCodes("stand for weights whose inputs are multiplied by pre_quant_scale")


class ModelOpt(QuantizedLayout):
    """Checkpoints that ModelOpt, or who writes as it does, has quantized."""

    name: ClassVar[str] = "ModelOpt"
    methods: ClassVar[tuple[str, ...]] = ("modelopt",)

    def check(self, config: Mapping[str, Any], where: Path) -> str:
        """Name the algorithm."""
        algorithm = config.get("quant_algo")
        if algorithm not in ALGORITHMS:
            raise UnsupportedError(
                f"{where}: quantization_config.quant_algo is {shown(algorithm)}; taken are {', '.join(ALGORITHMS)}",
                hint="start from the unquantized checkpoint",
            )
        said_groups(config, 128, where)
        return str(algorithm)

    def group(self, settings: Mapping[str, Any], stored: Mapping[str, TensorEntry], folder: Path) -> Grouped:
        """Find the linear layers that have a weight_scale."""
        config = settings_of(settings)
        found = [_tensor(config, stored, module) for module in modules(stored, "weight_scale")]
        left = Grouped.of(found, stored).plain
        plain = {name: entry for name, entry in left.items() if name.rpartition(".")[2] not in NOT_TAKEN}
        return Grouped(found, plain, list(_notes(found, left.keys() - plain.keys())))


def _tensor(config: Mapping[str, Any], stored: Mapping[str, TensorEntry], module: str) -> QuantizedTensor:
    """Put one weight together, by the dtype of what is stored."""
    made = _of_weight(config, stored, module)
    own = {role: stored[f"{module}.{role}"] for role in (INPUT_SCALE,) if f"{module}.{role}" in stored}
    return replace(made, parts={**made.parts, **own})


def _of_weight(config: Mapping[str, Any], stored: Mapping[str, TensorEntry], module: str) -> QuantizedTensor:
    name = f"{module}.weight"
    weight = part(stored, name, ["FLOAT8E4M3FN", "UINT8"])
    scale = stored[f"{module}.weight_scale"]
    if scale.dtype.name == "UINT8":
        return mx_tensor(stored, module)
    rows, columns = weight.shape
    if weight.dtype.name == "FLOAT8E4M3FN":
        part(stored, scale.name, FLOATS, rank=len(scale.shape))
        blocks = {(): (rows, columns), (1,): (rows, columns), (rows,): (1, columns), (rows, 1): (1, columns)}
        if scale.shape not in blocks:
            raise damaged(scale, f"has shape {list(scale.shape)}; [] or [{rows}] are the scales of {name!r}")
        parts = {"weight": weight, "weight_scale": scale}
        return FloatQuantizedTensor(name, (rows, columns), scale.dtype, parts, blocks[scale.shape])
    if f"{module}.{_WHOLE}" in stored:
        part(stored, scale.name, ["FLOAT8E4M3FN"])
        require_shape(scale, (rows, 2 * columns // NVFP4_GROUP), f"[{rows}, {2 * columns}] in groups of {NVFP4_GROUP}")
        whole = stored[f"{module}.{_WHOLE}"]
        part(stored, whole.name, ["FLOAT"], rank=min(len(whole.shape), 1))
        parts = {"weight_packed": weight, "weight_scale": scale, "weight_global_scale": whole}
        import onnx_ir as ir  # of the extra `build`

        return ModelOptFp4(name, (rows, 2 * columns), ir.DataType.BFLOAT16, parts)
    size = config.get("group_size", 128)
    part(stored, scale.name, FLOATS)
    require_shape(scale, (2 * rows, columns // size), f"[{2 * rows}, {columns}] in groups of {size}")
    parts = {"weight": weight, "weight_scale": scale}
    if f"{module}.{_PRE}" in stored:
        parts[_PRE] = part(stored, f"{module}.{_PRE}", FLOATS, rank=1)
        require_shape(parts[_PRE], (columns,), f"{columns} input features")
    return AwqBytes(name, (2 * rows, columns), scale.dtype, parts, 4, columns // size)


def _notes(found: list[QuantizedTensor], left: set[str]) -> Iterator[str]:
    """Say what is quantized there and not here."""
    if any(INPUT_SCALE in tensor.parts for tensor in found):
        yield (
            "the checkpoint says that activations are quantized, too; the recipe decides that: `method: stored` of "
            "quantize-channels and quantize-fp4 takes its static scales, and nothing else does"
        )
    if any(name.endswith(("k_scale", "v_scale")) for name in left):
        yield "the checkpoint says how the KV cache is quantized, which is not taken: see the pass quantize-kv-cache"
