"""A layout of quantized checkpoints: how tools store parameters as codes and scales, and how those are read.

A checkpoint has two kinds of tensors: those of its files (`TensorEntry`), and the parameters of the model. In a plain
checkpoint they are the same. A layout puts several of the files' tensors together to one parameter, which is called
and shaped as transformers has it in the model that is not quantized.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import numpy as np
from numpy.typing import NDArray

from llmforge.base.errors import CheckpointError
from llmforge.checkpoint.safetensors_file import TensorEntry, damaged, external, same_bytes
from llmforge.quantization.stored import StoredChannels, StoredFp4, UnrepresentableCodes

if TYPE_CHECKING:
    import onnx_ir as ir

    from llmforge.quantization.grid import Grid
    from llmforge.quantization.grids import QuantizedMatrix

CHUNK_BYTES = 1 << 22  # of fp32 weights that are dequantized at a time: what a result takes beside itself


@dataclass(frozen=True, eq=False)
class QuantizedTensor(ABC):
    """A parameter that is stored as codes. Nothing is read before it is asked for, and nothing is kept.

    Layouts subclass it, one class a way to store; what their codes mean stands in fields of their own.
    """

    name: str  # of the parameter: model.layers.0.mlp.up_proj.weight
    shape: tuple[int, ...]  # as transformers has it: [N, K] of a linear layer, [E, …] of experts
    dtype: ir.DataType  # that the public tool dequantizes to
    parts: Mapping[str, TensorEntry]  # role (qweight, scales, …) → what the files hold

    @property
    @abstractmethod
    def format(self) -> str:
        """The format in a few words: int4 in groups of 128, asymmetric."""

    @abstractmethod
    def dequantize(self) -> NDArray[Any]:
        """Return its weights [*shape] in `dtype`, bit-equal to what the public tool makes of them.

        Beside the result, memory is bounded: it is made in chunks of `CHUNK_BYTES`.

        Raises:
            CheckpointError: parts hold what the layout forbids.
        """

    def grid(self) -> Grid:
        """Return the grid on which the stored codes lie as they are; reads at most what is small (g_idx, zero points).

        Raises:
            UnrepresentableCodes: no grid of ours holds them.
            CheckpointError: as `dequantize`.
        """
        raise UnrepresentableCodes(f"are {self.format}, for which there is no format here")

    def codes(self) -> QuantizedMatrix:
        """Return the stored codes, scales and zero points on `grid`, of experts [E·N, K]: those on top of each other.

        Its columns are in the order of `columns`.

        Raises:
            UnrepresentableCodes, CheckpointError: as `grid`.
        """
        raise UnrepresentableCodes(f"are {self.format}, for which there is no format here")

    def columns(self) -> NDArray[np.intp] | None:
        """Return which input feature each column of `codes` belongs to, [K]; None where they are in their order."""
        return None

    def channels(self) -> StoredChannels:
        """Return the stored codes where they are 8 bits with a scale an output feature, or one for all.

        Raises:
            UnrepresentableCodes: they are not.
            CheckpointError: as `dequantize`.
        """
        raise UnrepresentableCodes(f"are {self.format}, not int8 or fp8 with one scale per output feature")

    def fp4(self) -> StoredFp4:
        """Return the stored codes where they are NVFP4.

        Raises:
            UnrepresentableCodes: they are not.
            CheckpointError: as `dequantize`.
        """
        raise UnrepresentableCodes(f"are {self.format}, not NVFP4")

    def in_channels(
        self,
        dtype: Literal["int8", "fp8"],
        codes: Callable[[], NDArray[Any]],
        scales: NDArray[np.float32],
        input_scale: float | None,
    ) -> StoredChannels:
        """Put codes [N, K] and scales [N] together; a scale of 0 is 1 over codes that are 0.

        Raises:
            UnrepresentableCodes: scales are negative, or no numbers.
        """
        if not (np.isfinite(scales) & (scales >= 0)).all():
            raise UnrepresentableCodes("have scales that are negative or not finite")
        nothing = scales == 0
        if not nothing.any():
            return StoredChannels(dtype, codes, lambda: scales, input_scale)

        def with_zeros() -> NDArray[Any]:
            made = codes().copy()
            made[nothing] = 0
            return made

        return StoredChannels(dtype, with_zeros, lambda: np.where(nothing, np.float32(1), scales), input_scale)

    def number(self, role: str) -> float | None:
        """Read a part that is one positive number; None: there is no such part.

        Raises:
            CheckpointError: it is none.
        """
        if role not in self.parts:
            return None
        stored = self.read(role).astype(np.float32)
        if stored.size != 1 or not np.isfinite(stored).all() or not (stored > 0).all():
            raise self.damaged(role, "must be one positive number")
        return float(stored.reshape(()))

    @property
    def file(self) -> Path:
        """The file of its first part."""
        return self._first.file

    @property
    def offset(self) -> int:
        """Where its first part begins in that file, in bytes."""
        return self._first.offset

    @property
    def size_bytes(self) -> int:
        """The bytes of all its parts."""
        return sum(part.size_bytes for part in self.parts.values())

    @property
    def _first(self) -> TensorEntry:
        return next(iter(self.parts.values()))

    def read(self, role: str) -> NDArray[Any]:
        """Map a part."""
        return external(self.parts[role]).numpy()

    def finite(self, weights: NDArray[Any], role: str, what: str) -> NDArray[Any]:
        """Return `weights`, looked at some at a time.

        Raises:
            CheckpointError: one is NaN or infinite; `what` says so of the part `role`.
        """
        flat = weights.reshape(-1)
        if not all(np.isfinite(flat[at : at + CHUNK_BYTES]).all() for at in range(0, flat.size, CHUNK_BYTES)):
            raise self.damaged(role, what)
        return weights

    def damaged(self, role: str, what: str) -> CheckpointError:
        """Say what is wrong with a part: "… tensor 'a.g_idx': `what`"."""
        return damaged(self.parts[role], what)


@dataclass(frozen=True)
class Grouped:
    """What a layout makes of the tensors of files."""

    quantized: Sequence[QuantizedTensor]
    plain: Mapping[str, TensorEntry]  # what is stored as it is, by the name of the parameter
    notes: Sequence[str] = field(default=())  # what is in the checkpoint and is not taken, a sentence each

    @classmethod
    def of(cls, found: Sequence[QuantizedTensor], stored: Mapping[str, TensorEntry]) -> Grouped:
        """Say that what is no part of `found` is stored as it is."""
        used = {entry.name for tensor in found for entry in tensor.parts.values()}
        return cls(found, {name: entry for name, entry in stored.items() if name not in used})


class QuantizedLayout(ABC):
    """How one tool stores quantized checkpoints."""

    name: ClassVar[str]  # as people call it: GPTQ
    methods: ClassVar[tuple[str, ...]]  # what `quant_method` says in quantization_config

    @abstractmethod
    def check(self, config: Mapping[str, Any], where: Path) -> str:
        """Return what `quantization_config` says, in a few words; `where` is the file in which it stands.

        Raises:
            UnsupportedError: it says what is not taken.
            CheckpointError: it says what makes no sense.
        """

    def is_plain(self, config: Mapping[str, Any]) -> bool:
        """Say whether there are no codes in it all the same, by what passed `check`."""
        return False

    def grid(self, config: Mapping[str, Any]) -> Grid | None:
        """Guess, by what passed `check`, the grid on which most codes lie as they are; None: none is known to."""
        return None

    @abstractmethod
    def group(self, settings: Mapping[str, Any], stored: Mapping[str, TensorEntry], folder: Path) -> Grouped:
        """Put the tensors of files together to parameters, by their headers alone; `check` has passed `settings`.

        Raises:
            UnsupportedError: they are stored in a way that is not taken.
            CheckpointError: parts are missing, or their shapes or dtypes do not fit.
        """


def settings_of(settings: Mapping[str, Any]) -> Any:
    """Return the quantization_config of a configuration, or that of the language model inside; None: it has none.

    transformers leaves that of the GGUF file behind whose weights it dequantized; it says nothing of what lies here,
    and an empty one does not, either.
    """
    own = settings.get("quantization_config")
    text = settings.get("text_config")
    found = text.get("quantization_config") if own is None and isinstance(text, dict) else own
    return None if isinstance(found, dict) and (not found or "gguf_file" in found) else found


def same_content(left: TensorEntry | QuantizedTensor, right: TensorEntry | QuantizedTensor) -> bool:
    """Tell whether two parameters are stored alike, byte for byte; reads up to the first difference."""
    if isinstance(left, TensorEntry) and isinstance(right, TensorEntry):
        return same_bytes(left, right)
    if isinstance(left, TensorEntry) or isinstance(right, TensorEntry) or type(left) is not type(right):
        return False
    if (left.dtype, left.shape, left.format) != (right.dtype, right.shape, right.format):
        return False
    if left.parts.keys() != right.parts.keys():
        return False
    return all(same_bytes(part, right.parts[role]) for role, part in left.parts.items())
