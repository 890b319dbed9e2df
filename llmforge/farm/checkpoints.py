"""Checkpoints at URLs, which machines fetch that lack them: `s3://bucket/folder`, or in a store by their digest.

    HOME/checkpoints/<of the URL>/NAME       a checkpoint, in llmforge's cache folder of the user
    STORE/checkpoints/<digest>/NAME/FILE     one that was shared

A file is fetched into `FILE.part`, which a later attempt goes on from. What was fetched is held to the digest that the
machine which gave the command computed, over names and contents of all files that builds read.
"""

from __future__ import annotations

import fcntl
import hashlib
import shutil
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from llmforge.artifact import remote
from llmforge.artifact.remote import Url
from llmforge.base import folders, remembered, remote_files
from llmforge.base.errors import CheckpointError, EnvironmentLacks, UsageError
from llmforge.base.hashed_files import all_sha256

_READ = frozenset({".json", ".jinja", ".safetensors", ".gguf"})  # suffixes of files that builds read of checkpoints
_CHUNK_BYTES = 8 << 20
_HUB = "hf://"


def on_hub(text: str) -> tuple[str, str | None] | None:
    """Read `hf://ORG/NAME` or `hf://ORG/NAME@REVISION`; None: it is something else."""
    if not text.startswith(_HUB):
        return None
    name, _, revision = text.removeprefix(_HUB).partition("@")
    return name, revision or None


def place_of(url: str) -> Path:
    """Name the folder of this machine in which the checkpoint at `url` is, once it was fetched.

    Raises:
        UsageError: the URL ends with no name.
    """
    name = url.rstrip("/").rpartition("/")[2]
    if not name or "://" not in url.rstrip("/").rpartition("/")[0] + "/":
        raise UsageError(f"{Url(url)}: not the folder of a checkpoint", hint="such as s3://bucket/models/llama")
    return remembered.home() / "checkpoints" / hashlib.sha256(url.encode()).hexdigest()[:16] / name


def digest(checkpoint: Path) -> str:
    """Hash the files of a checkpoint that builds may read, of each its name and content.

    Files that were hashed before are not read again.

    Raises:
        CheckpointError: there are none, or one cannot be read.
    """
    whole = folders.followed(checkpoint)
    hint = "it must be the same on all nodes: copy it, or let them fetch it from a URL"
    try:
        files = [whole] if whole.is_file() else sorted(file for file in whole.iterdir() if file.suffix in _READ)
        digests, _ = all_sha256(map(folders.followed, files))
    except OSError as error:
        raise CheckpointError(f"{checkpoint}: cannot be read: {error.strerror}", hint=hint) from error
    if not files:
        raise CheckpointError(f"{checkpoint}: is empty", hint=hint)
    lines = "".join(f"{file.name} {digests[folders.followed(file)]}\n" for file in files)
    return hashlib.sha256(lines.encode()).hexdigest()


def fetch(url: str, expected: str | None = None) -> Path:
    """Fetch the checkpoint at `url` as far as it is not here, and return its folder.

    Raises:
        CheckpointError: there is none, or, with `expected`, it has another digest; then nothing of it is kept.
        EnvironmentLacks: the disk has no room, or the package for the protocol is missing.
        InputError: the URL cannot be read.
    """
    folder = place_of(url)
    folder.mkdir(parents=True, exist_ok=True)
    with _alone(folder):
        system, path = remote.opened(Url(url))
        sizes = _sizes(url, system, path)
        missing = {name: size for name, size in sizes.items() if not _is_whole(folder / name, size)}
        free = shutil.disk_usage(folder).free
        if free < sum(missing.values()):
            raise EnvironmentLacks(f"{Url(url)}: needs {sum(missing.values()):,} bytes; {free:,} are free in {folder}")
        for name, size in missing.items():
            _fetch_file(url, system, f"{path}/{name}", folder / name, size)
        if expected is not None and digest(folder) != expected:
            shutil.rmtree(folder)
            raise CheckpointError(
                f"{Url(url)}: has other files than on the machine that gave the command", hint="give the command again"
            )
    return folder


def share(checkpoint: Path, found: str, store: str) -> str:
    """Write a checkpoint, whose digest was `found`, to the store, as far as it is not there; return its URL.

    Raises:
        UsageError: the store cannot be written.
    """
    whole = folders.followed(checkpoint)
    url = f"{store.rstrip('/')}/checkpoints/{found}/{checkpoint.name}"  # artifacts name the folder
    system, path = remote.opened(Url(url))
    with remote.asking(Url(url), writes=True):
        remote_files.make_folder(system, path)
        for file in sorted(file for file in whole.iterdir() if file.suffix in _READ):
            target = f"{path}/{file.name}"
            if not system.exists(target) or system.info(target)["size"] != file.stat().st_size:
                system.put_file(str(folders.followed(file)), target)
    return url


def require(url: str) -> None:
    """Return if there is a checkpoint at `url`.

    Raises:
        CheckpointError, InputError, UsageError, EnvironmentLacks: as `fetch`.
    """
    system, path = remote.opened(Url(url))
    _sizes(url, system, path)


def _sizes(url: str, system: Any, path: str) -> dict[str, int]:
    """Give the sizes of the files at a URL that builds read, in bytes, by their names."""
    with remote.asking(Url(url), writes=False):
        system.invalidate_cache()
        found: Iterable[dict[str, Any]] = system.ls(path, detail=True)
        sizes = {str(each["name"]).rpartition("/")[2]: int(each["size"] or 0) for each in found}
    sizes = {name: size for name, size in sizes.items() if Path(name).suffix in _READ}
    if not sizes:
        raise CheckpointError(f"{Url(url)}: holds no checkpoint", hint="a folder with config.json and safetensors")
    return sizes


def _is_whole(file: Path, size: int) -> bool:
    return file.is_file() and file.stat().st_size == size


def _fetch_file(url: str, system: Any, path: str, file: Path, size: int) -> None:
    """Fetch a file, going on from what an earlier attempt has left."""
    part = file.with_name(f"{file.name}.part")
    with part.open("ab") as stream:
        if stream.tell() > size:
            stream.truncate(0)
        with remote.asking(Url(url), writes=False):
            for start in range(stream.tell(), size, _CHUNK_BYTES):
                stream.write(system.cat_file(path, start=start, end=min(start + _CHUNK_BYTES, size)))
    if part.stat().st_size != size:
        raise CheckpointError(f"{Url(url)}: {file.name} is cut off", hint="run the same command again")
    part.rename(file)


@contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """Be the only process that fetches into a folder; waits for its turn."""
    with folder.with_name(f".{folder.name}.lock").open("w") as stream:
        fcntl.flock(stream, fcntl.LOCK_EX)
        yield
