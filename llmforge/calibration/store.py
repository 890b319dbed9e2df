"""Results of calibrated layers: in memory, or one file a layer that is read when a result is asked for."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import zipfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from llmforge.quantization.grids import Grid, Packed, QuantizedMatrix, pack, unpack
from llmforge.quantization.statistics import KvRange

FOLDER = ".calibration"
_KEY_CHARACTERS = 32  # of SHA-256 in a file's name: 128 bits


@contextmanager
def kept(parent: Path) -> Iterator[Path]:
    """Give the folder in `parent` where calibrations keep their layers, for the time that a build reads them.

    It is deleted when the block ends well and no other build is in its own: results of a build that failed, or was
    killed, stay for the next one.
    """
    folder = parent / FOLDER
    folder.mkdir(parents=True, exist_ok=True)
    with (parent / f"{FOLDER}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_SH)
        yield folder
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:  # another build is in its block
            return
        shutil.rmtree(folder)


class StoredMatrices(Mapping[str, QuantizedMatrix]):
    """Linears by parameter name, each in memory or in the file of its layer, from which each access reads it."""

    def __init__(self, places: Mapping[str, QuantizedMatrix | Path]) -> None:
        self._places = places

    def __getitem__(self, name: str) -> QuantizedMatrix:
        place = self._places[name]
        if isinstance(place, QuantizedMatrix):
            return place
        with np.load(place, allow_pickle=False) as arrays:
            described = json.loads(arrays["grids"].tobytes())[name]
            k = described.pop("k")
            points = arrays.get(f"{name}/zero_points")
            return unpack(Packed(arrays[f"{name}/codes"], arrays[f"{name}/scales"], points), Grid(**described), k)

    def __iter__(self) -> Iterator[str]:
        return iter(self._places)

    def __len__(self) -> int:
        return len(self._places)


@dataclass(frozen=True)
class LayerResult:
    """What one layer yielded: its linears by parameter name, the ranges of its keys and values, and of inputs.

    A linear is here, or in a file: see `StoredMatrices`.
    """

    linears: Mapping[str, QuantizedMatrix | Path]
    kv: KvRange | None
    inputs: Mapping[str, float] = field(default_factory=dict)  # largest |x| that a linear reads, by parameter name


@dataclass(frozen=True)
class Store:
    """Keeps the layers of one calibration, which depend on `key`, in `folder`; None: they stay in memory."""

    folder: Path | None
    key: str

    def __post_init__(self) -> None:
        if self.folder is not None:
            self.folder.mkdir(parents=True, exist_ok=True)

    def load(self, index: int) -> LayerResult | None:
        """Return the result of layer `index` of an earlier run with the same key; None where there is no whole one."""
        file = self._file(index)
        if file is None or not file.exists():
            return None
        try:
            with zipfile.ZipFile(file) as archive:
                if archive.testzip() is not None:  # reads it all: a bad checksum, and the layer is done again
                    return None
        except zipfile.BadZipFile:
            return None
        with np.load(file, allow_pickle=False) as arrays:
            kv = KvRange(arrays["kv/key"], arrays["kv/value"]) if "kv/key" in arrays else None
            names, inputs = (json.loads(arrays[part].tobytes()) for part in ("grids", "inputs"))
        return LayerResult(dict.fromkeys(names, file), kv, inputs)

    def save(self, index: int, result: LayerResult) -> LayerResult:
        """Write the result of layer `index` in one step, and return one that reads from there."""
        file = self._file(index)
        if file is None:
            return result
        arrays: dict[str, NDArray[Any]] = {}
        grids = {}
        for name, matrix in StoredMatrices(result.linears).items():
            parts = vars(pack(matrix))
            arrays |= {f"{name}/{part}": array for part, array in parts.items() if array is not None}
            grids[name] = {**asdict(matrix.grid), "k": matrix.shape[1]}
        if result.kv is not None:
            arrays["kv/key"], arrays["kv/value"] = result.kv.key, result.kv.value
        arrays["inputs"] = np.frombuffer(json.dumps(dict(result.inputs)).encode(), np.uint8)
        arrays["grids"] = np.frombuffer(json.dumps(grids).encode(), np.uint8)
        partial = file.with_suffix(f".{os.getpid()}.partial")  # of this process: another may build the same
        with partial.open("wb") as stream:
            np.savez(stream, allow_pickle=False, **arrays)
            stream.flush()
            os.fsync(stream.fileno())
        partial.replace(file)
        return replace(result, linears=dict.fromkeys(result.linears, file))

    def _file(self, index: int) -> Path | None:
        return None if self.folder is None else self.folder / f"{self.key[:_KEY_CHARACTERS]}-layer-{index:05d}.npz"
