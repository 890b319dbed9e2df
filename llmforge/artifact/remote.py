"""Archives at URLs, through fsspec: `s3://`, `gs://`, `https://` and what else it has a file system for.

An archive is written and read once, from its beginning to its end. Where the other side can (S3, Google Cloud, Azure,
memory), the URL shows nothing, or what it showed before, until the last byte is there; where it cannot, what a killed
export leaves behind is cut off, and `import` refuses it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from llmforge.artifact import archive, transfer
from llmforge.artifact.sealed import EvidenceRecord, Manifest
from llmforge.artifact.store import Artifact, names_locked
from llmforge.base import remote_files
from llmforge.base.errors import EnvironmentLacks, ForgeError, InputError, UsageError

_URL = re.compile(r"[a-z][a-z0-9+.-]*://")
_WEB = ("http", "https")
_CONDITIONAL = "s3://", "s3a://"  # where a write can have a condition


@dataclass(frozen=True)
class Url:
    """Where an archive is."""

    text: str

    def __str__(self) -> str:
        """Write it without a password."""
        return remote_files.without_login(self.text)


class ChangedMeanwhile(UsageError):
    """Somebody else wrote to a URL after it was read."""


def is_url(text: str) -> bool:
    """Say if `text` is a URL and not a path."""
    return _URL.match(text) is not None


def save(artifact: Artifact, url: Url) -> int:
    """Write an artifact to a URL; return its size in bytes. Nothing of it is there before all of it is, if possible.

    Raises:
        InputError: a file of the artifact is not what its manifest says.
        UsageError: the URL cannot be written.
        EnvironmentLacks: the package for its protocol is missing.
    """
    return _save(artifact, url, {})


def _save(artifact: Artifact, url: Url, condition: dict[str, str]) -> int:
    system, path = opened(url)
    if (local := _local(system, path)) is not None:
        with asking(url, writes=True):
            return archive.save_file(artifact, local)
    with asking(url, writes=True), ExitStack() as failed:
        with system.transaction, system.open(path, "wb", **condition) as stream:
            failed.callback(stream.discard)  # also where its end is refused, or S3 would keep the parts
            size = archive.save(artifact, stream)
        failed.pop_all()
    return size


def revision(url: Url) -> str | None:
    """Name what is at a URL now: its ETag on S3, and nothing elsewhere; None: there is nothing.

    Raises:
        UsageError: the URL cannot be asked.
        EnvironmentLacks: the package for its protocol is missing.
    """
    system, path = opened(url)
    with asking(url, writes=True):
        system.invalidate_cache()
        try:
            return str(system.info(path).get("ETag", ""))
        except FileNotFoundError:
            return None


def save_over(artifact: Artifact, url: Url, known: str | None) -> int:
    """Write an artifact like `save`, over what `revision` named and nothing else.

    S3 compares when the last byte is there (If-Match, If-None-Match). On a disk, hold `alone` from `revision` on. Other
    protocols of fsspec have no such condition: there the last of two that write at once wins.

    Raises:
        ChangedMeanwhile: something else is there now.
        InputError, UsageError, EnvironmentLacks: as `save`.
    """
    condition = {}
    if url.text.startswith(_CONDITIONAL):
        condition = {"IfNoneMatch": "*"} if known is None else {"IfMatch": known}
    try:
        return _save(artifact, url, condition)
    except UsageError as error:
        if condition and remote_files.is_refused_by_condition(error.__cause__):
            raise ChangedMeanwhile(f"{url}: was written by somebody else meanwhile", hint="try again") from error
        raise


@contextmanager
def alone(url: Url) -> Iterator[None]:
    """Be the only process of those that ask for it here which writes to the folder of a URL on a disk.

    Raises:
        UsageError: the folder cannot be written.
    """
    local = _local(*opened(url))
    if local is None:
        yield
        return
    with asking(url, writes=True), names_locked(local.parent):
        yield


def load(url: Url, out: Path, check: transfer.Check | None = None) -> Artifact:
    """Publish the artifact in the archive at a URL as `out/<name>/<version>`; see `archive.load`.

    Raises:
        InputError: also, the URL cannot be read.
        EnvironmentLacks: also, the package for its protocol is missing.
    """
    system, path = opened(url)
    if (local := _local(system, path)) is not None:
        return archive.load_file(local, out, check)
    with _reading(url, system, path) as (reader, size_bytes):
        return archive.load(reader, out, str(url), size_bytes=size_bytes, check=check)


def evidence(url: Url) -> tuple[Manifest, tuple[EvidenceRecord, ...]]:
    """Read the manifest and the records of evidence of the archive at a URL, oldest first; see `archive`.

    Raises:
        InputError: they are damaged, or the URL cannot be read.
        EnvironmentLacks: the package for its protocol is missing.
    """
    system, path = opened(url)
    with _reading(url, system, path) as (reader, _):
        return archive.read_evidence(reader, str(url))


@contextmanager
def _reading(url: Url, system: Any, path: str) -> Iterator[tuple[Any, int | None]]:
    """Open an archive, and give its size in bytes where it is known."""
    with asking(url, writes=False):
        # Block size 0: one request and no seeking, for servers that know no ranges.
        stream = system.open(path, "rb", **({"block_size": 0} if url.text.partition("://")[0] in _WEB else {}))
    with stream:
        size = getattr(stream, "size", None)
        yield _Reader(stream, url), size if isinstance(size, int) else None


class _Reader:
    """Reads a stream; what goes wrong is said of its URL, and not mixed up with what goes wrong on this disk."""

    def __init__(self, stream: Any, url: Url) -> None:
        self._stream = stream
        self._url = url

    def read(self, count: int) -> bytes:
        """Read at most `count` bytes."""
        with asking(self._url, writes=False):
            return bytes(self._stream.read(count))


def opened(url: Url) -> tuple[Any, str]:
    """Open the file system of a URL, and give the path in it.

    Raises:
        UsageError: it has no known protocol.
        EnvironmentLacks: the package for its protocol is missing.
    """
    from fsspec.core import url_to_fs
    from fsspec.registry import get_filesystem_class

    protocol = url.text.partition("://")[0]
    try:
        get_filesystem_class(protocol)
    except ImportError as error:
        cause = error.__cause__
        package = (cause.name or "").partition(".")[0] if isinstance(cause, ImportError) else ""
        raise EnvironmentLacks(
            f"{url}: {package or 'a package'} is not installed", hint=f"pip install {package or f'fsspec[{protocol}]'}"
        ) from error
    except ValueError as error:
        raise UsageError(f"{url}: unknown protocol {protocol!r}", hint="such as s3://, gs:// or https://") from error
    options = {"client_kwargs": {"timeout": _patient()}} if protocol in _WEB else {}
    with asking(url, writes=False):
        # fsspec would give all threads one file system of S3, and so one transaction: a probe beside a long upload
        # would wait for its end.
        system, path = url_to_fs(url.text, skip_instance_cache=True, **options)
    return system, path


def _patient() -> Any:
    """Give a download as long as bytes arrive; aiohttp's own limit is five minutes for all of it."""
    import aiohttp

    return aiohttp.ClientTimeout(total=None, sock_connect=10, sock_read=60)


def _local(system: Any, path: str) -> Path | None:
    from fsspec.implementations.local import LocalFileSystem

    return Path(path) if isinstance(system, LocalFileSystem) else None


@contextmanager
def asking(url: Url, *, writes: bool) -> Iterator[None]:
    """Turn what goes wrong on the other side into an error of ours.

    Raises:
        UsageError: it cannot be written, with `writes`.
        InputError: it cannot be read, without.
    """
    try:
        yield
    except ForgeError:
        raise
    except remote_files.errors() as error:
        said = error.__cause__ or error  # fsspec says of every failure over HTTP that there is no such file
        why = remote_files.reason(said)
        if remote_files.is_missing(said):
            why = "no such file or bucket"
        elif isinstance(error, NotImplementedError):
            why = "its protocol cannot do that"
        kind, done = (UsageError, "written") if writes else (InputError, "read")
        hint = "check the address, its credentials and what they allow"
        raise kind(f"{url}: cannot be {done}: {why}", hint=hint) from error
