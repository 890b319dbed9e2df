"""Resources that a machine runs out of: disk, memory, rights to write. One place knows it by its many names."""

from __future__ import annotations

import errno
import re
from collections.abc import Iterator
from pathlib import Path

from llmforge.base.errors import EnvironmentLacks

_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
_DENIED = {errno.EACCES, errno.EPERM, errno.EROFS}
_WORN = {errno.EIO, errno.EMFILE, errno.ENFILE}
# numpy's `tofile` gives no number: "262144 requested and 0 written".
_SHORT_WRITE = re.compile(r"\d+ requested and \d+ written")
# ONNX Runtime, protobuf and torch make errors of their own of a failed allocation.
_NO_MEMORY = re.compile(
    r"bad[ _]alloc|Cannot allocate memory"
    r"|Failed to allocate memory|can't allocate memory|not enough memory|Unable to allocate|out of memory"
    r"|can't start new thread"  # of which each needs a stack
    r"|failed to map segment",  # of a shared library
    re.IGNORECASE,
)
_CGROUP = Path("/sys/fs/cgroup")


def is_full(error: BaseException) -> bool:
    """Say if an error tells of a disk without room, a quota, or a limit on the size of a file."""
    return isinstance(error, OSError) and (error.errno in _FULL or _SHORT_WRITE.search(str(error)) is not None)


def explain(error: BaseException) -> EnvironmentLacks | None:
    """Say what the machine lacks, where an error, or what caused it, tells that; None where it tells something else."""
    for each in _causes(error):
        if _is_memory(each):
            return EnvironmentLacks(
                "out of memory", hint="use a machine with more memory, or see `llmforge plan RECIPE` for what is needed"
            )
        if is_full(each):
            assert isinstance(each, OSError)
            return EnvironmentLacks(f"{_named(each)}the disk is full", hint="free some space")
        if isinstance(each, OSError) and each.errno in _DENIED | _WORN:
            return EnvironmentLacks(f"{_named(each)}{each.strerror}", hint="check permissions and limits")
    return None


def out_of_memory(error: BaseException) -> bool:
    """Say if an error, or what caused it, tells of a failed allocation."""
    return any(map(_is_memory, _causes(error)))


def usable_memory_bytes() -> int:
    """Bytes of memory and swap that this process could ever get: the machine's, or what its control group grants."""
    import psutil

    machine = int(psutil.virtual_memory().total + psutil.swap_memory().total)
    file = _CGROUP / "memory.max"
    limit = file.read_text(encoding="ascii").strip() if file.exists() else "max"
    return min(machine, int(limit)) if limit.isdigit() else machine


def free_memory_bytes() -> int:
    """Bytes of memory that this process could take more, beside what others of the machine hold now."""
    import psutil

    own = int(psutil.Process().memory_info().rss)
    return min(int(psutil.virtual_memory().available), usable_memory_bytes() - own)


def _is_memory(error: BaseException) -> bool:
    if isinstance(error, MemoryError) or (isinstance(error, OSError) and error.errno == errno.ENOMEM):
        return True
    return isinstance(error, Exception) and not isinstance(error, OSError) and _NO_MEMORY.search(str(error)) is not None


def _causes(error: BaseException) -> Iterator[BaseException]:
    """Yield an error and what it was raised from."""
    seen: list[BaseException] = []
    at: BaseException | None = error
    while at is not None and at not in seen:
        yield at
        seen.append(at)
        at = at.__cause__


def _named(error: OSError) -> str:
    return "" if error.filename is None else f"{error.filename}: "
