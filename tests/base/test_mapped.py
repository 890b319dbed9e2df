from __future__ import annotations

import mmap
from pathlib import Path

import numpy as np
import pytest

from llmforge.base import mapped

MIB = 1 << 20


def resident(file: Path) -> int:
    """Bytes of `file` that are mapped into this process and present."""
    found, inside = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if "-" in line.split()[0] and not line.split()[0].endswith(":"):
            inside = line.endswith(str(file))
        elif inside and line.startswith("Rss:"):
            found += int(line.split()[1]) * 1024
    return found


@pytest.fixture
def file(tmp_path: Path) -> Path:
    np.arange(4 * MIB // 4, dtype=np.int32).tofile(tmp_path / "table")
    return tmp_path / "table"


@pytest.mark.skipif(not Path("/proc/self/smaps").exists(), reason="tells nothing of pages")
def test_pages_of_a_part_go_and_come_again(file: Path) -> None:
    with file.open("rb") as stream, mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ) as pages:
        whole = np.frombuffer(pages, np.int32)
        total = int(whole.sum(dtype=np.int64))
        assert resident(file) == 4 * MIB
        part = whole.reshape(4, -1)[1:3]
        mapped.forget(part)
        assert resident(file) <= 2 * MIB
        assert int(whole.sum(dtype=np.int64)) == total
        mapped.forget(whole)
        assert resident(file) == 0
        del whole, part


def test_what_is_in_memory_or_can_be_written_stays(file: Path) -> None:
    array = np.arange(5)
    mapped.forget(array)
    assert array.tolist() == [0, 1, 2, 3, 4]
    written = np.memmap(file, np.int32, "c")
    written[:] = 7
    mapped.forget(written)
    assert (written == 7).all()
