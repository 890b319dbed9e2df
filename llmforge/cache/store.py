"""A content-addressed store of what builds have computed: a folder an entry, named by the digest of its key.

    FOLDER/entries/<digest>/record.json     the key in words, and the SHA-256 and size of every other file
    FOLDER/entries/.staging-<random>/       an entry that is being written
    FOLDER/locks/<digest>.lock              while a build computes that entry

An entry is written under a hidden name and published by one rename; every read verifies its bytes. One that is damaged
is dropped, with a note, and computed again: nothing needs to reach the disk in any order, and nothing is synced.

All locks are flocks, which the kernel drops with their process. Whoever uses an entry, or writes one, holds a shared
lock on its record, without which nothing is removed; who computes an entry holds its lock in `locks`, for which another
build of the same waits. The time of the last use is the record's modification time.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import secrets
import shutil
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Self

from llmforge.base import remembered
from llmforge.base.errors import EnvironmentLacks, InputError, UsageError
from llmforge.cache.entry import (
    LOCAL_KINDS,
    RECORD,
    CacheEntry,
    Key,
    RemoteRefused,
    Summary,
    problem_of,
    read_record,
    record_of,
    summary_of,
)

if TYPE_CHECKING:
    from llmforge.cache.remote import Remote

STAGING = ".staging-"
DROPPED = ".dropped-"
DEFAULT_BYTES = 20 * 10**9
SIZE_VARIABLE, FOLDER_VARIABLE = "LLMFORGE_CACHE_BYTES", "LLMFORGE_CACHE"
_LISTED = 12  # digits of a digest that messages show, and the fewest that name an entry


def default_folder() -> Path:
    """Return the folder that builds share: $LLMFORGE_CACHE, else builds/ in llmforge's cache folder of the user."""
    if given := os.environ.get(FOLDER_VARIABLE):
        return Path(given)
    return remembered.home() / "builds"


def default_size() -> int:
    """Return how many bytes the cache may hold: $LLMFORGE_CACHE_BYTES, else 20 GB.

    Raises:
        UsageError: the variable holds no number of bytes.
    """
    given = os.environ.get(SIZE_VARIABLE, "")
    if given and not given.isdecimal():
        raise UsageError(f"{SIZE_VARIABLE} is {given!r}; expected a number of bytes, such as {DEFAULT_BYTES}")
    return int(given or DEFAULT_BYTES)


def is_empty(folder: Path) -> bool:
    """Say whether the cache in `folder` holds nothing, or is not there yet."""
    return next((folder / "entries").glob("[!.]*"), None) is None


@dataclass(eq=False)
class Cache:
    """The store in `folder`, which takes at most `limit_bytes` (None: no limit) once the builds that fill it are done.

    `notes` tell what was not as expected. `waiting` is called where another build computes what is asked for. What is
    not on disk is looked for in `remote`.
    """

    folder: Path
    limit_bytes: int | None = None
    notes: list[str] = field(default_factory=list)
    waiting: Callable[[], None] = lambda: None
    remote: Remote | None = None
    _held: dict[str, tuple[int, CacheEntry]] = field(default_factory=dict, repr=False)  # locked, by digest
    _own: list[Path] = field(default_factory=list, repr=False)  # entries that another build published first
    _made: dict[str, CacheEntry] = field(default_factory=dict, repr=False)  # what this build computed, by digest
    _uploaded: int = field(default=0, repr=False)  # of what was made, written to the remote cache
    _uploads: ThreadPoolExecutor | None = field(
        default=None, repr=False
    )  # of what was made so far, while the build goes on

    def __post_init__(self) -> None:
        try:
            for folder in (self._entries, self._locks):
                folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            with self._names():
                self._sweep()
        except OSError as error:
            raise EnvironmentLacks(
                f"the build cache {self.folder} cannot be written: {error.strerror}",
                hint=f"set {FOLDER_VARIABLE} to a folder that can be written; `build` needs none with --no-cache",
            ) from error

    def __enter__(self) -> Self:
        """Use it as it is."""
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        """Close it."""
        self.close()

    def close(self) -> None:
        """Release every entry, and keep to the limit."""
        self._end_uploads(wait=False)
        for descriptor, _ in self._held.values():
            os.close(descriptor)
        self._held.clear()
        for path in self._own:
            shutil.rmtree(path, ignore_errors=True)  # a sweep may be at it, too
        self._own.clear()
        self.evict()

    def find(self, key: Key) -> CacheEntry | None:
        """Return the entry of `key`, verified; None where there is none, or a damaged one, which is dropped."""
        return self._found(key) or self._fetched(key)

    def _found(self, key: Key) -> CacheEntry | None:
        """Find it on disk."""
        if held := self._held.get(key.digest):
            return held[1]
        path = self._entries / key.digest
        if (descriptor := _use(path)) is None:
            if path.exists():
                self._note_damaged(path, key.kind, f"it has no {RECORD}")
                self._drop(path)
            return None
        problem = problem_of(path, key)
        if problem is not None:
            os.close(descriptor)
            self._note_damaged(path, key.kind, problem)
            self._drop(path)
            return None
        os.utime(descriptor)
        entry = CacheEntry(path)
        self._held[key.digest] = descriptor, entry
        return entry

    def _fetched(self, key: Key) -> CacheEntry | None:
        """Find it in the remote cache, and keep it."""
        if self.remote is None:
            return None
        try:
            files = self.remote.find(key)
            return None if files is None else self._publish(key, partial(self.remote.download, files))
        except RemoteRefused as refused:
            self._note_once(str(refused))
            return None

    def upload(self, entries: Iterable[CacheEntry] | None = None) -> int:
        """Write `entries` to the remote cache; return how many were written.

        By default those that this build computed: most were written as they were made, so that what a machine has
        computed outlives it.
        """
        if entries is not None:
            return self._upload(entries)
        self._end_uploads(wait=True)
        self._upload(list(self._made.values()))
        return self._uploaded

    def _upload(self, entries: Iterable[CacheEntry]) -> int:
        done = 0
        for entry in entries:
            facts = read_record(entry.path)
            if self.remote is None or facts is None or facts["kind"] in LOCAL_KINDS:
                continue
            if self.remote.unreachable:  # which a note says
                break
            try:
                self.remote.upload(entry.path, facts)
            except RemoteRefused as refused:
                self._note_once(str(refused))
                break
            done += 1
            if self._made.pop(entry.path.name, None) is not None:
                self._uploaded += 1
        return done

    def _upload_meanwhile(self, entry: CacheEntry) -> None:
        """Begin to write an entry to the remote cache, one after the other, while the build goes on."""
        if self.remote is None or self.remote.signer is None:
            return
        if self._uploads is None:
            self._uploads = ThreadPoolExecutor(1, "upload")
        self._uploads.submit(self._upload, [entry])

    def _end_uploads(self, *, wait: bool) -> None:
        if self._uploads is not None:
            self._uploads.shutdown(wait=True, cancel_futures=not wait)
            self._uploads = None

    def put(self, key: Key, write: Callable[[Path], None]) -> CacheEntry | None:
        """Publish what `write` writes into a folder as the entry of `key`; None where the disk has no room for it.

        Where another build has published it in the meantime, this one keeps its own until it closes the cache.
        """
        entry = self._publish(key, write)
        if entry is not None:
            self._made[key.digest] = entry
            self._upload_meanwhile(entry)
        return entry

    def _publish(self, key: Key, write: Callable[[Path], None]) -> CacheEntry | None:
        with self._names():
            staging = self._entries / f"{STAGING}{secrets.token_hex(8)}"
            staging.mkdir()
            descriptor = os.open(staging / RECORD, os.O_RDWR | os.O_CREAT, 0o600)
            fcntl.flock(descriptor, fcntl.LOCK_SH)
        try:
            write(staging)
            (staging / RECORD).write_text(record_of(staging, key))
        except BaseException as error:
            shutil.rmtree(staging)
            os.close(descriptor)
            if not isinstance(error, OSError):
                raise
            self.notes.append(f"cache: {key.kind} could not be kept: {error.strerror}")
            return None
        path = self._entries / key.digest
        try:
            staging.rename(path)
        except OSError:  # not empty: another build was first, or a damaged one is in use
            path = staging
            self._own.append(path)
        entry = CacheEntry(path)
        self._held[key.digest] = descriptor, entry
        return entry

    def discard(self, key: Key) -> None:
        """Take away the entry of `key`, which this build does not need any more, unless another build uses it."""
        if held := self._held.pop(key.digest, None):
            os.close(held[0])
        self._made.pop(key.digest, None)
        self._drop(self._entries / key.digest)

    @contextmanager
    def computing(self, key: Key) -> Iterator[CacheEntry | None]:
        """Be the only build that computes the entry of `key`; gives the entry where there is one, or came to be."""
        found = self.find(key)
        if found is not None:
            yield found
            return
        with self._turn(key.digest):
            yield self.find(key)

    def entries(self) -> list[Summary]:
        """Describe all entries, the one that was used last first; one whose record is damaged has kind "damaged"."""
        found = [summary for path in self._entries.glob("[!.]*") if (summary := summary_of(path)) is not None]
        return sorted(found, key=lambda entry: (-entry.used, entry.digest))

    def remove(self, entry: Summary) -> bool:
        """Remove an entry; False where a build uses it."""
        return self._drop(self._entries / entry.digest)

    def named(self, names: tuple[str, ...]) -> list[Summary]:
        """Find the entries that `names` name: kinds, or at least 12 digits of a digest.

        Raises:
            InputError: a name names nothing.
        """
        entries = self.entries()
        found: dict[str, Summary] = {}
        for name in names:
            named = [e for e in entries if e.kind == name or (len(name) >= _LISTED and e.digest.startswith(name))]
            if not named:
                kinds = ", ".join(sorted({entry.kind for entry in entries}))
                raise InputError(
                    f"{self.folder}: no entry is called {name!r}",
                    hint=f"name a kind ({kinds}) or at least {_LISTED} digits of an entry: `llmforge cache ls`",
                )
            found |= {entry.digest: entry for entry in named}
        return list(found.values())

    def evict(self) -> None:
        """Remove what was not used for longest, but nothing that is in use, until the rest is within the limit."""
        if self.limit_bytes is None:
            return
        with self._names():
            entries = self.entries()
            total = sum(entry.size_bytes for entry in entries)
            for entry in reversed(entries):
                if total <= self.limit_bytes:
                    return
                if self.remove(entry):
                    total -= entry.size_bytes

    @property
    def _entries(self) -> Path:
        return self.folder / "entries"

    @property
    def _locks(self) -> Path:
        return self.folder / "locks"

    @contextmanager
    def _names(self) -> Iterator[None]:
        """Be the only process that sweeps, evicts or begins an entry."""
        with (self.folder / ".lock").open("w") as stream:
            fcntl.flock(stream, fcntl.LOCK_EX)
            yield

    @contextmanager
    def _turn(self, digest: str) -> Iterator[None]:
        """Hold the lock `digest`; its file is there only as long as somebody wants it."""
        path = self._locks / f"{digest}.lock"
        while True:
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                self.waiting()
                fcntl.flock(descriptor, fcntl.LOCK_EX)
            if _is_at(descriptor, path):
                break
            os.close(descriptor)  # who had it took the file away
        try:
            yield
        finally:
            path.unlink()
            os.close(descriptor)

    def _note_once(self, note: str) -> None:
        if note not in self.notes:
            self.notes.append(note)

    def _note_damaged(self, path: Path, kind: str, problem: str) -> None:
        self.notes.append(f"cache: entry {path.name[:_LISTED]} ({kind}) was damaged and is not used: {problem}")

    def _drop(self, path: Path) -> bool:
        """Take an entry away; False where a build uses it."""
        try:
            descriptor = os.open(path / RECORD, os.O_RDWR)
        except FileNotFoundError:
            descriptor = None
        try:
            if descriptor is not None:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            doomed = path.with_name(f"{DROPPED}{secrets.token_hex(8)}")
            path.rename(doomed)
        except BlockingIOError:
            return False
        except FileNotFoundError:  # another process was faster
            return True
        finally:
            if descriptor is not None:
                os.close(descriptor)
        shutil.rmtree(doomed, ignore_errors=True)  # a sweep may be at it, too
        return True

    def _sweep(self) -> None:
        """Clean up after killed builds; call it with the names locked."""
        for path in self._entries.glob(".*"):
            if path.name.startswith(DROPPED):
                shutil.rmtree(path, ignore_errors=True)
            else:
                self._drop(path)  # a build that lives holds the record of what it writes
        for path in self._locks.glob("*.lock"):
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
            with contextlib.suppress(BlockingIOError):
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if _is_at(descriptor, path):
                    path.unlink()
            os.close(descriptor)


def _use(path: Path) -> int | None:
    """Lock the record of the entry at `path` for reading; None where there is none any more."""
    try:
        descriptor = os.open(path / RECORD, os.O_RDWR)
    except (FileNotFoundError, NotADirectoryError):
        return None
    fcntl.flock(descriptor, fcntl.LOCK_SH)
    if _is_at(descriptor, path / RECORD):
        return descriptor
    os.close(descriptor)
    return None


def _is_at(descriptor: int, path: Path) -> bool:
    """Say whether the open file is the one at `path` still."""
    try:
        return os.path.samestat(os.fstat(descriptor), path.stat())
    except FileNotFoundError:
        return False
