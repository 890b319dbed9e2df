"""SHA-256 of files, computed once: what a user's file had, and how it is told that it did not change since.

A file is taken for the same as long as device, inode, size, modification and change time are: nothing that writes to
a file leaves its change time (ctime) alone. Bits that rot on the disk do; so does who writes to the disk itself.
"""

from __future__ import annotations

import hashlib
import os
import stat
import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from llmforge.base.remembered import RememberedTexts

FILE = "hashed-files.json"
MOST = 20_000  # files that are remembered, the last ones; 3 MB
_SETTLED_NS = 1_000_000_000  # a change within one tick of the file system's clock would not show; ext4's are 4 ms
_NO_FILE = "not a regular file"
_CHUNK_BYTES = 4 << 20  # between two, a thread waits for its turn in the interpreter


def sha256(file: Path) -> str:
    """Hash a regular file; anything else, links included, gets a word that equals no hash."""
    status = file.lstat()
    if not stat.S_ISREG(status.st_mode):
        return _NO_FILE
    with file.open("rb", buffering=0) as stream:
        digest, buffer = hashlib.sha256(), memoryview(bytearray(min(_CHUNK_BYTES, status.st_size + 1)))
        while count := stream.readinto(buffer):
            digest.update(buffer[:count])
        return digest.hexdigest()


def all_sha256(files: Iterable[Path], *, again: bool = False) -> tuple[dict[Path, str], str | None]:
    """Hash files, several at a time; one that was hashed before and did not change since is not read, unless `again`.

    Returns the hash of each, and why they could not be remembered for the next time; None: they were.

    Raises:
        OSError: a file cannot be read.
    """
    memory = RememberedTexts(FILE, MOST)
    known = {} if again else memory.read()
    digests: dict[Path, str] = {}
    waiting: list[Path] = []
    for file in files:
        status = file.lstat()
        if not stat.S_ISREG(status.st_mode):
            digests[file] = _NO_FILE
        elif (digest := known.get(identity(status))) is not None:
            digests[file] = digest
        else:
            waiting.append(file)
    new: dict[str, str] = {}
    with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:
        before = {file: file.lstat() for file in waiting}
        ordered = sorted(waiting, key=lambda file: -before[file].st_size)
        for file, digest in zip(ordered, pool.map(sha256, ordered), strict=True):
            digests[file] = digest
            settled = time.time_ns() - before[file].st_ctime_ns > _SETTLED_NS
            if settled and identity(file.lstat()) == identity(before[file]):
                new[identity(before[file])] = digest
    return digests, memory.add(new) if new else None


def identity(status: os.stat_result) -> str:
    """Say which file it is, and in which state: whatever writes to it, or puts another in its place, changes that."""
    return f"{status.st_dev}:{status.st_ino}:{status.st_size}:{status.st_mtime_ns}:{status.st_ctime_ns}"
