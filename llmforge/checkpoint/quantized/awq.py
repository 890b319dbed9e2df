"""AWQ, as AutoAWQ writes it for its GEMM kernels: `qweight`, `qzeros` and `scales` of each linear layer, 4 bits.

    qweight int32 [K, N/8]: eight output features in a word, in the order 0, 2, 4, 6, 1, 3, 5, 7
    qzeros  int32 [groups, N/8]: zero points, packed alike
    scales  fp16 [groups, N]

(autoawq 0.2.9: utils/packing_utils.py, `dequantize_gemm`.)
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from llmforge.base.errors import UnsupportedError
from llmforge.base.wording import shown
from llmforge.checkpoint.quantized.integers import (
    FLOATS,
    Integers,
    along_rows,
    grid_of,
    modules,
    part,
    require_shape,
    said_groups,
)
from llmforge.checkpoint.quantized.layout import Grouped, QuantizedLayout, settings_of
from llmforge.checkpoint.safetensors_file import TensorEntry, damaged
from llmforge.quantization.grid import Grid

IN_A_WORD = 8
PLACES = (0, 4, 1, 5, 2, 6, 3, 7)  # in a word, of output features 0 to 7
_TAKEN: Mapping[str, tuple[object, ...]] = {"bits": (4, None), "zero_point": (True, None), "version": ("gemm", None)}


@dataclass(frozen=True, eq=False)
class AwqTensor(Integers):
    """A weight [N, K]."""

    def unpacked(self, rows: slice) -> NDArray[np.uint8]:
        """Return the codes of some output features."""
        words = slice(rows.start // IN_A_WORD, rows.stop // IN_A_WORD)
        return np.ascontiguousarray(_in_order(self.read("qweight")[:, words]).T)

    def scales(self) -> NDArray[Any]:
        """Return the scales."""
        return np.ascontiguousarray(self.read("scales").T)

    def zero_points(self) -> NDArray[np.uint8]:
        """Return the zero points."""
        return np.ascontiguousarray(_in_order(self.read("qzeros")).T)


class Awq(QuantizedLayout):
    """Checkpoints of AutoAWQ."""

    name: ClassVar[str] = "AWQ"
    methods: ClassVar[tuple[str, ...]] = ("awq",)

    def check(self, config: Mapping[str, Any], where: Path) -> str:
        """Say bits and groups."""
        said = {**config, "version": str(config.get("version") or config.get("format") or "gemm").lower()}
        for field, taken in _TAKEN.items():
            if said.get(field) not in taken:
                raise UnsupportedError(
                    f"{where}: quantization_config.{field} is {shown(said[field])}; AWQ is taken with "
                    f"{shown(taken[0])}",
                    hint="start from the unquantized checkpoint",
                )
        return f"int4 {said_groups(config, 128, where)}"

    def grid(self, config: Mapping[str, Any]) -> Grid | None:
        """Guess the grid by the groups."""
        return grid_of(4, config.get("group_size", 128), symmetric=False)

    def group(self, settings: Mapping[str, Any], stored: Mapping[str, TensorEntry], folder: Path) -> Grouped:
        """Find the linear layers that have a qweight."""
        size = settings_of(settings).get("group_size", 128)
        found = [_tensor(stored, module, size) for module in modules(stored, "qweight")]
        return Grouped.of(found, stored)


def _tensor(stored: Mapping[str, TensorEntry], module: str, size: int) -> AwqTensor:
    qweight, qzeros = (part(stored, f"{module}.{role}", ["INT32"]) for role in ("qweight", "qzeros"))
    scales = part(stored, f"{module}.scales", FLOATS)
    k, n = qweight.shape[0], qweight.shape[1] * IN_A_WORD
    if size != -1 and k % size:
        raise damaged(qweight, f"has {k} input features, no multiple of group_size, {size}")
    groups = 1 if size == -1 else k // size
    because = f"{n} output features in {groups} groups, as {qweight.name!r} has,"
    require_shape(scales, (groups, n), because)
    require_shape(qzeros, (groups, qweight.shape[1]), because)
    parts = {"qweight": qweight, "qzeros": qzeros, "scales": scales}
    return AwqTensor(f"{module}.weight", (n, k), scales.dtype, parts, 4, groups)


def _in_order(words: NDArray[np.int32]) -> NDArray[np.uint8]:
    """Unpack [R, W] to [R, 8·W], in the order of the output features."""
    codes = along_rows(words, 4, words.shape[1] * IN_A_WORD).reshape(len(words), -1, IN_A_WORD)
    return codes[..., PLACES].reshape(len(words), -1)
