"""Arrays that were expensive to compute, kept in a file that goes away with the process.

A quantized matrix is read by the proof of each lossy pass and by what writes the engine. Its parts are small beside the
weights that they are computed from; in memory they would be as large as the engine.
"""

from __future__ import annotations

import tempfile
import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

import numpy as np
from numpy.typing import NDArray


class Scratch:
    """A file in `folder` without a name, which takes the room of what is put there, and nobody else can see.

    The system frees it when the process ends, however that comes about. It is made when the first array is put there.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._file: BinaryIO | None = None
        self.is_idle = False
        self._turn = threading.Lock()  # a proof reads beside what writes the engine
        self._places: dict[object, tuple[int, tuple[int, ...], np.dtype[np.generic]]] = {}

    @contextmanager
    def idle(self) -> Iterator[None]:
        """Let nothing be put there for a while: what is computed inside is kept elsewhere, and read from there."""
        self.is_idle = True
        try:
            yield
        finally:
            self.is_idle = False

    def put(self, key: object, array: NDArray[np.generic]) -> None:
        """Write `array` to the end of the file, under a `key` of its own."""
        with self._turn:
            self._put(key, array)

    def _put(self, key: object, array: NDArray[np.generic]) -> None:
        if self._file is None:
            self._file = tempfile.TemporaryFile(dir=self._folder)  # noqa: SIM115
            weakref.finalize(self, self._file.close)
        offset = self._file.seek(0, 2)
        self._file.write(_bytes(np.ascontiguousarray(array)))
        self._places[key] = offset, array.shape, array.dtype

    def get(self, key: object) -> NDArray[np.generic] | None:
        """Read what was put there under `key` into memory; None where nothing was."""
        if self._file is None or key not in self._places:
            return None
        offset, shape, dtype = self._places[key]
        array = np.empty(shape, dtype)
        with self._turn:
            self._file.seek(offset)
            count = self._file.readinto(_bytes(array))  # type: ignore[attr-defined]
        if count != array.nbytes:
            raise OSError(f"scratch file in {self._folder}: its end was cut off")
        return array


def _bytes(array: NDArray[np.generic]) -> memoryview:
    """View a contiguous array of any dtype, bf16 too, as bytes."""
    return array.reshape(-1).view(np.uint8).data
