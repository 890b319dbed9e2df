"""The parameters of a GGUF file, as the seam for stored formats has them (`llmforge.checkpoint.quantized`)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from llmforge.base.errors import CheckpointError
from llmforge.checkpoint.gguf import architectures, blocks
from llmforge.checkpoint.gguf.blocks import BlockType
from llmforge.checkpoint.gguf.header import DTYPES, Header, TensorInfo, read
from llmforge.checkpoint.quantized.layout import Grouped, QuantizedLayout, QuantizedTensor
from llmforge.checkpoint.safetensors_file import TensorEntry, data_type
from llmforge.quantization.stored import UnrepresentableCodes

if TYPE_CHECKING:
    from llmforge.quantization.grid import Grid, Scale
    from llmforge.quantization.grids import QuantizedMatrix

_BLOCKS = "blocks"  # the one part of a parameter
# Types whose scales are stored in fp16; of others they are products, which fp16 does not hold.
_FP16_SCALES = ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "IQ4_NL")


@dataclass(frozen=True, eq=False)
class GgufTensor(QuantizedTensor):
    """A parameter in blocks of ggml, or in plain numbers whose rows are in another order."""

    kind: BlockType
    heads: int | None = None  # of how many heads the rows are in llama.cpp's order
    minus_one: bool = False

    @property
    def format(self) -> str:
        """ggml's name of it."""
        return self.kind.name

    def dequantize(self) -> NDArray[Any]:
        """Return its weights, bit-equal to `gguf.quants.dequantize`, with rows as transformers has them."""
        values = blocks.dequantize(self._data(), self.kind, self.shape)
        self.finite(values, _BLOCKS, f"({self.kind.name}) holds NaN or infinity; weights must be finite")
        return values - values.dtype.type(1) if self.minus_one else values

    def grid(self) -> Grid:
        """Return the grid of its type; of IQ4_NL and IQ4_XS the 8 bits that hold their levels, of Q2_K 3 bits."""
        found = _grid(self.kind.name)
        if found is None or len(self.shape) != 2 or self.minus_one:
            why = "no matrix" if self.kind.quantized else "plain numbers"
            raise UnrepresentableCodes(f"are {self.kind.name}, {why}", is_plain=not self.kind.quantized)
        return found

    def codes(self) -> QuantizedMatrix:
        """Return the stored codes; without minima, a block whose scale is 0 gets the code of 0 and the scale 1."""
        from llmforge.quantization.grids import QuantizedMatrix

        grid = self.grid()
        held = blocks.codes(self._data(), self.kind, self.shape)
        assert held is not None
        if not (np.isfinite(held.scales).all() and (held.minimums is None or np.isfinite(held.minimums).all())):
            raise self.damaged(_BLOCKS, f"({self.kind.name}) holds scales that are NaN or infinite")
        if held.minimums is not None:
            return QuantizedMatrix(grid, held.codes, held.scales, None, held.minimums)
        zero = held.scales == 0
        codes, scales = held.codes, held.scales
        if zero.any():
            codes.reshape(*scales.shape, -1)[zero] = grid.middle
            scales = np.where(zero, np.float32(1), scales)
        return QuantizedMatrix(grid, codes, scales, None)

    def _data(self) -> NDArray[np.uint8]:
        """Read its bytes, the rows in transformers' order."""
        data = self.read(_BLOCKS).view(np.uint8)
        if self.heads is None:
            return data.reshape(-1)
        rows = self.shape[0]
        return data.reshape(self.heads, rows // self.heads // 2, 2, -1).swapaxes(1, 2).reshape(-1)


def _grid(kind: str) -> Grid | None:
    """Return the grid on which codes of a type lie; None: it has none."""
    from llmforge.quantization.grid import Grid

    scale: Scale = "fp16" if kind in _FP16_SCALES else "fp32"
    if kind in blocks.MINIMA:
        bits, block_size, _ = blocks.MINIMA[kind]
        return Grid(bits, block_size, False, scale, minimums=True)
    if kind in blocks.CODES:
        signed_bits, signed_block, _ = blocks.CODES[kind]
        return Grid(signed_bits, signed_block, True, scale)
    return None


class Gguf(QuantizedLayout):
    """Files of llama.cpp."""

    name: ClassVar[str] = "GGUF"
    methods: ClassVar[tuple[str, ...]] = ("gguf",)

    def check(self, config: Mapping[str, Any], where: Path) -> str:
        """Return the type in which most numbers are, which `architectures.settings` wrote down."""
        return f"most of it {config.get('type')}"

    def is_plain(self, config: Mapping[str, Any]) -> bool:
        """Say whether that type has no blocks; then none has."""
        return str(config.get("type")) in DTYPES

    def grid(self, config: Mapping[str, Any]) -> Grid | None:
        """Tell by that type."""
        return _grid(str(config.get("type")))

    def group(self, settings: Mapping[str, Any], stored: Mapping[str, TensorEntry], folder: Path) -> Grouped:
        """Give every tensor of the file the name that it has in transformers."""
        files = {entry.file for entry in stored.values()}
        [file] = files
        return grouped(read(file), settings)


def grouped(header: Header, settings: Mapping[str, Any]) -> Grouped:
    """Name the parameters of a file as transformers does; `settings` are those of `architectures.settings`.

    Raises:
        UnsupportedError: a tensor has no place in the model.
        CheckpointError: a tensor has another shape than its place demands.
    """
    quantized: list[QuantizedTensor] = []
    plain: dict[str, TensorEntry] = {}
    for info in header.tensors.values():
        target = architectures.target(header, info.name, settings)
        if target is None:
            continue
        if target.heads is not None and info.shape[0] % (2 * target.heads):
            raise CheckpointError(
                f"{header.file}: tensor {info.name!r} has {info.shape[0]} rows for {target.heads} heads"
            )
        entry = header.entry(info)
        for name, part, shape in _parts(target, entry, info):
            as_it_is = not info.kind.quantized and target.heads is None and not target.minus_one
            if as_it_is:
                plain[name] = replace(part, name=name)
                continue
            dtype = data_type(DTYPES.get(info.kind.name, "FLOAT"))
            quantized.append(GgufTensor(name, shape, dtype, {_BLOCKS: part}, info.kind, target.heads, target.minus_one))
    return Grouped(quantized, plain)


def _parts(
    target: architectures.ParameterTarget, entry: TensorEntry, info: TensorInfo
) -> list[tuple[str, TensorEntry, tuple[int, ...]]]:
    """Return the parameters that a tensor makes: name, where it lies, shape; of stacked experts one each."""
    if not target.stacked:
        return [(target.name, entry, info.shape)]
    count, size = info.shape[0], info.size_bytes // info.shape[0]
    return [
        (
            target.name.format(expert),
            replace(entry, shape=entry.shape[1:], offset=entry.offset + expert * size, size_bytes=size),
            info.shape[1:],
        )
        for expert in range(count)
    ]
