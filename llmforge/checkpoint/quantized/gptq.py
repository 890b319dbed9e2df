"""GPTQ, as AutoGPTQ and GPTQModel write it: `qweight`, `qzeros`, `scales` and `g_idx` of each linear layer.

    qweight int32 [K·bits/32, N]: codes packed along the input features, the first in the lowest bits
    qzeros  int32 [groups, N·bits/32]: zero points packed along the output features, each one less (v1) or not (v2)
    scales  fp16 or bf16 [groups, N]
    g_idx   int32 [K]: the group of each input feature; with `desc_act` they are in no order

(gptqmodel 7.7.0: nn_modules/qlinear/__init__.py, `dequantize_weight`; utils/model.py, `convert_gptq_v1_to_v2_format`.)
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
    WORD_BITS,
    Integers,
    along_columns,
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

BITS = (2, 3, 4, 8)
FORMATS = ("gptq", "gptq_v2")
# Of fields beside them, those that change what the tensors mean, and their values that do not.
_OTHERWISE: Mapping[str, tuple[object, ...]] = {
    "is_marlin_format": (None, False),
    "pack_dtype": (None, "int32"),
    "rotation": (None,),
    "adapter": (None,),
}


@dataclass(frozen=True, eq=False)
class GptqTensor(Integers):
    """A weight [N, K]; `added` is what its stored zero points lack."""

    added: int

    def unpacked(self, rows: slice) -> NDArray[np.uint8]:
        """Return the codes of some output features."""
        return along_columns(self.read("qweight")[:, rows], self.bits, self.shape[1])

    def scales(self) -> NDArray[Any]:
        """Return the scales."""
        return np.ascontiguousarray(self.read("scales").T)

    def zero_points(self) -> NDArray[np.uint8]:
        """Return the zero points.

        What v1 lacks is added to whole words where a zero point lies in one, which undoes borrows between them, as it
        does in the tool; zero points of 3 bits are added to one by one.
        """
        words = np.array(self.read("qzeros"))
        each = self.added and WORD_BITS % self.bits == 0
        if each:
            ones = np.uint32(sum(self.added << at for at in range(0, WORD_BITS, self.bits)))
            words = (words.view(np.uint32) + ones).view(np.int32)
        zeros = along_rows(words, self.bits, self.shape[0])
        if self.added and not each:
            zeros = (zeros + np.uint8(self.added)) & np.uint8((1 << self.bits) - 1)
        return np.ascontiguousarray(zeros.T)

    def group_of(self) -> NDArray[np.intp]:
        """Return what stands in g_idx.

        Raises:
            CheckpointError: it names a group that is none.
        """
        if "g_idx" not in self.parts:
            return super().group_of()
        return self._named_groups(self.read("g_idx").astype(np.intp))


class GptqLayout(QuantizedLayout):
    """Checkpoints of AutoGPTQ and GPTQModel."""

    name: ClassVar[str] = "GPTQ"
    methods: ClassVar[tuple[str, ...]] = ("gptq",)

    def check(self, config: Mapping[str, Any], where: Path) -> str:
        """Say bits and groups."""
        bits = config.get("bits")
        if type(bits) is not int or bits not in BITS:
            raise UnsupportedError(
                f"{where}: quantization_config.bits is {shown(bits)}; GPTQ is taken with {_either(BITS)}",
                hint="start from the unquantized checkpoint",
            )
        groups = said_groups(config, -1, where)
        _version(config, where)
        for field, plain in _OTHERWISE.items():
            if config.get(field) not in plain:
                raise UnsupportedError(
                    f"{where}: quantization_config.{field} is {shown(config[field])}, which is not taken",
                    hint="start from the unquantized checkpoint",
                )
        act = ", desc_act" if config.get("desc_act") else ""
        return f"int{bits} {groups}{act}"

    def grid(self, config: Mapping[str, Any]) -> Grid | None:
        """Guess the grid by bits and groups."""
        return grid_of(config["bits"], config.get("group_size", -1), symmetric=config.get("sym") is True)

    def group(self, settings: Mapping[str, Any], stored: Mapping[str, TensorEntry], folder: Path) -> Grouped:
        """Find the linear layers that have a qweight."""
        config = settings_of(settings)
        added = 1 if _version(config, folder) == "gptq" else 0
        found = [_tensor(config, stored, module, added) for module in modules(stored, "qweight")]
        return Grouped.of(found, stored)


def _tensor(config: Mapping[str, Any], stored: Mapping[str, TensorEntry], module: str, added: int) -> GptqTensor:
    """Put one weight together; its own bits and groups follow from the shapes: `dynamic` gives layers others."""
    qweight, qzeros = (part(stored, f"{module}.{role}", ["INT32"]) for role in ("qweight", "qzeros"))
    scales = part(stored, f"{module}.scales", FLOATS)
    g_idx = part(stored, f"{module}.g_idx", ["INT32"], rank=1) if f"{module}.g_idx" in stored else None
    (words, n), groups = qweight.shape, scales.shape[0]
    require_shape(scales, (groups, n), f"the {n} output features of {qweight.name!r}")
    fitting = [bits for bits in BITS if qzeros.shape == (groups, -(-n * bits // WORD_BITS))]
    bits = int(config["bits"]) if config["bits"] in fitting or not fitting else fitting[0]
    if not fitting or (bits != config["bits"] and not config.get("dynamic")):
        needed = [groups, -(-n * int(config["bits"]) // WORD_BITS)]
        raise damaged(
            qzeros,
            f"has shape {list(qzeros.shape)}; {n} output features in {groups} "
            f"groups, with {config['bits']} bits, make it {needed}",
        )
    k = words * WORD_BITS // bits if g_idx is None else g_idx.shape[0]
    if g_idx is not None:
        require_shape(qweight, (-(-k * bits // WORD_BITS), n), f"{k} input features, in {g_idx.name!r}, of {bits} bits")
    size = config.get("group_size", -1)
    if groups > k or (not config.get("dynamic") and groups != (1 if size == -1 else -(-k // size))):
        raise damaged(
            scales,
            f"has {groups} groups; {k} input features, and group_size {size}, "
            f"make it {1 if size == -1 else -(-k // size)}",
        )
    parts = {"qweight": qweight, "qzeros": qzeros, "scales": scales, **({} if g_idx is None else {"g_idx": g_idx})}
    return GptqTensor(f"{module}.weight", (n, k), scales.dtype, parts, bits, groups, added)


def _version(config: Mapping[str, Any], where: Path) -> str:
    """Return gptq or gptq_v2."""
    version = config.get("checkpoint_format") or config.get("format") or "gptq"
    if version not in FORMATS:
        raise UnsupportedError(
            f"{where}: quantization_config.checkpoint_format is {shown(version)}; GPTQ is taken as {_either(FORMATS)}",
            hint="start from the unquantized checkpoint",
        )
    return str(version)


def _either(values: tuple[object, ...]) -> str:
    return " or ".join([", ".join(map(str, values[:-1])), str(values[-1])])
