"""Numbers of a parameter of a checkpoint's model, read independently of how a graph was bound to it.

Numbers come from transformers' model, where that has them in memory, or from the safetensors library.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import safe_open

from llmforge.checkpoint import Checkpoint, gguf
from llmforge.checkpoint.quantized import QuantizedTensor
from llmforge.checkpoint.safetensors_file import external
from llmforge.trace.export.reference import ReferenceModel
from llmforge.trace.export.stored_matrix import StoredMatrix


class Parameters:
    """The parameters of a checkpoint's model, by the name of the first that shares a tensor."""

    def __init__(self, checkpoint: Checkpoint, reference: ReferenceModel) -> None:
        self._checkpoint, self._reference = checkpoint, reference
        self._state: Mapping[str, torch.Tensor] = reference.model.state_dict(keep_vars=True)
        self._files: dict[Any, Any] = {}
        self.names = reference.parameters

    def __enter__(self) -> Parameters:
        return self

    def __exit__(self, *error: object) -> None:
        for file in self._files.values():
            file.__exit__(None, None, None)

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a parameter."""
        return tuple(self._state[name].shape)

    def rows(self, name: str, rows: NDArray[np.int64]) -> NDArray[np.float32]:
        """Read rows of a parameter, fp32."""
        tensor = self._state[name]
        if tensor.is_meta or isinstance(tensor, StoredMatrix):
            return self._read(name, rows)
        tensor = tensor.detach()
        return (tensor[torch.from_numpy(rows)] if tensor.dim() else tensor).float().numpy()

    def reads_rows(self, name: str) -> bool:
        """Say whether some rows of a parameter are read without all others."""
        tensor = self._state[name]
        if not tensor.is_meta and not isinstance(tensor, StoredMatrix):
            return True
        assert self._reference.sources is not None
        source = self._reference.sources[name]
        if source.converted is not None:
            return False
        stored = name if name in self._checkpoint.tensors else source.tensors[0]
        merged = self._checkpoint.merge is not None and stored in self._checkpoint.merge.steps
        return not merged and not isinstance(self._checkpoint.tensors[stored], QuantizedTensor)

    def _read(self, name: str, rows: NDArray[np.int64]) -> NDArray[np.float32]:
        """Read rows of a parameter that is not in memory."""
        assert self._reference.sources is not None
        source = self._reference.sources[name]
        if source.converted is not None:
            return next(source.converted())[torch.from_numpy(rows)].float().numpy()
        [stored] = source.tensors
        if name in self._checkpoint.tensors:
            stored = name  # whatever was planned
        if self._checkpoint.merge is not None and stored in self._checkpoint.merge.steps:  # no file holds its numbers
            return self._checkpoint.tensor(stored).numpy()[rows].astype(np.float32)
        entry = self._checkpoint.tensors[stored]
        if isinstance(entry, QuantizedTensor):
            whole = entry.dequantize()
            return np.asarray(whole if not entry.shape else whole[rows], np.float32)
        file = entry.file
        if file.suffix == gguf.SUFFIX:
            plain = external(entry).numpy()
            return np.asarray(plain if not entry.shape else plain[rows], np.float32)
        if file not in self._files:
            self._files[file] = safe_open(file, "pt").__enter__()  # type: ignore[no-untyped-call]
        part = self._files[file].get_slice(stored)
        if not part.get_shape():
            return np.asarray(self._files[file].get_tensor(stored).float())
        if len(rows) and np.array_equal(rows, np.arange(rows[0], rows[0] + len(rows))):
            return np.asarray(part[int(rows[0]) : int(rows[-1]) + 1].float())
        return torch.cat([part[int(row) : int(row) + 1] for row in rows]).float().numpy()
