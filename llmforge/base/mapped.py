"""Pages of mapped files: what was read of one stays in the memory of this process until it is told to let go."""

from __future__ import annotations

import mmap
from typing import Any

import numpy as np
from numpy.typing import NDArray


def forget(array: NDArray[Any]) -> None:
    """Let go of the pages of `array`, where it is a contiguous part of a mapped file; they are read again when used.

    The system keeps them as long as it has room. Nothing happens to an array in memory, or to one that can be written.
    """
    owner: Any = array
    while isinstance(owner, np.ndarray | memoryview):
        owner = owner.base if isinstance(owner, np.ndarray) else owner.obj
    advice = getattr(mmap, "MADV_DONTNEED", None)
    if not isinstance(owner, mmap.mmap) or advice is None or array.flags.writeable or not array.flags.c_contiguous:
        return
    start = array.ctypes.data - np.frombuffer(owner, np.uint8).ctypes.data
    first = start - start % mmap.PAGESIZE  # a page that is shared with a neighbour is read again, too
    owner.madvise(advice, first, start + array.nbytes - first)
