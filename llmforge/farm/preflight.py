"""What a node must have before it builds: this llmforge, its extras, keys, files and checkpoints, a store, a disk.

The driver says what is needed, and each node looks at itself: before anything is built, at the beginning of each job,
and again after a build has failed, for then it is asked whose fault that was.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from llmforge import cache
from llmforge.base import extras, folders, resources
from llmforge.base.errors import CheckpointError, EnvironmentLacks, ForgeError, UsageError, VersionMismatch
from llmforge.base.hashed_files import all_sha256
from llmforge.cache import Code
from llmforge.farm import checkpoints, store
from llmforge.farm.matrix import Build
from llmforge.measure import task_files
from llmforge.metrics.retrieval import corpus
from llmforge.planning import request
from llmforge.recipe import TASK_FILES, Recipe, behaviour, retrieval

_LEAST_BYTES = 200_000_000  # free on a disk to build with, where nothing is predicted: logs, a trace, a tiny artifact
_SAME = "it must be the same on all nodes: copy it, or put it into a folder that they share"


@dataclass(frozen=True)
class NodeNeeds:
    """What all nodes must have in common."""

    code: str  # digest of the package; see `code`
    out: Path
    extras: tuple[str, ...] = ("build", "farm")
    store: str | None = None  # URL
    remote_cache: str | None = None  # URL, to which entries are written
    files: Mapping[Path, str] = field(default_factory=dict)  # keys, recipes and texts, with their SHA-256
    checkpoints: Mapping[Path, str] = field(default_factory=dict)  # folders, with the digest of their files
    urls: Mapping[Path, str] = field(default_factory=dict)  # of checkpoints that nodes fetch which lack them
    free_bytes: int = _LEAST_BYTES  # where artifacts and the cache are


@dataclass(frozen=True)
class NodeLack:
    """Why a node is out: as the error that a build on it would have ended with."""

    exit_code: int
    message: str
    hint: str | None = None


def code() -> str:
    """Hash the text of the package."""
    return Code().texts()


def needs(
    builds: Sequence[Build], out: Path, *, store_url: str | None, remote_cache: str | None, keys: Sequence[Path]
) -> NodeNeeds:
    """Say what nodes need for some builds, as this machine has it.

    Texts and checkpoints that are not here are left to the builds that name them, which say what is wrong.

    Raises:
        UsageError: a key is not here.
    """
    recipes = [build.load() for build in builds]
    files = {file: _sha256(file) for file in keys}
    digests: dict[Path, str] = {}
    bytes_of = [_LEAST_BYTES]
    for recipe in recipes:
        with suppress(ForgeError):
            files |= {file: _sha256(file) for file in (recipe.path, *_texts(recipe))}
        with suppress(ForgeError):
            if recipe.snapshot is None:
                digests[recipe.checkpoint] = checkpoints.digest(recipe.checkpoint)
            if (cost := request.build_of(recipe)) is not None:
                bytes_of.append(int(cost.disk_bytes))
    return NodeNeeds(
        code(),
        out,
        ("build", "farm", *(("remote",) if store_url or remote_cache else ()), *(("signing",) if keys else ())),
        store_url,
        remote_cache,
        files,
        digests,
        {checkpoints.place_of(url): url for url in dict.fromkeys(build.url for build in builds) if url is not None},
        max(bytes_of),
    )


def lack(needed: NodeNeeds, *, writes: bool) -> NodeLack | None:
    """Say what this machine lacks; None: it may build. With `writes`, small files are written to store and cache."""
    try:
        require(needed, writes=writes)
    except ForgeError as error:
        return NodeLack(error.exit_code, error.message, error.hint)
    return None


def require(needed: NodeNeeds, *, writes: bool) -> None:
    """Return if this machine has what is needed; see `lack`.

    Raises:
        VersionMismatch: another llmforge.
        EnvironmentLacks: an extra, room on a disk, or the right to write.
        UsageError: the store or the remote cache cannot be written; a key or a recipe is another, or missing.
        CheckpointError: a checkpoint is another, or missing.
    """
    if code() != needed.code:
        raise VersionMismatch("another llmforge is installed", hint="install the same version on all nodes")
    extras.require(*needed.extras)
    for file, sha256 in needed.files.items():
        if _sha256(file) != sha256:
            raise UsageError(f"{file}: has another content than on the machine that gave the command", hint=_SAME)
    for folder, digest in needed.checkpoints.items():
        if folder in needed.urls and not folder.exists():
            checkpoints.require(needed.urls[folder])
        elif checkpoints.digest(folder) != digest:
            raise CheckpointError(f"{folder}: has other files than on the machine that gave the command", hint=_SAME)
    for place in (needed.out, cache.default_folder()):
        _require_room(place, needed.free_bytes, writes=writes)
    if writes:
        for url in (needed.store, needed.remote_cache):
            if url is not None:
                store.require_answer(url)


def _texts(recipe: Recipe) -> Iterable[Path]:
    """List the files of a recipe that builds read, beside the checkpoint."""
    if recipe.calibration is not None:
        yield from recipe.calibration.data
    measured = recipe.validation
    if measured.quality is not None:
        yield from measured.quality.data
    if measured.latency is not None and measured.latency.trace is not None:
        yield measured.latency.trace.data
    for task in measured.tasks or ():
        if task.endswith(TASK_FILES):
            yield from (Path(task), *task_files.data_files(Path(task)))
    if measured.behaviour is not None and measured.behaviour.data not in behaviour.SHIPPED:
        yield measured.behaviour.file
    if measured.retrieval is not None and measured.retrieval.data != retrieval.SHIPPED:
        yield from (Path(measured.retrieval.data) / name for name in (corpus.CORPUS, corpus.QUERIES, corpus.QRELS))
    if recipe.chat_template is not None:
        yield recipe.chat_template


def _sha256(file: Path) -> str:
    """Hash a file that all nodes have.

    Raises:
        UsageError: it is not there, or cannot be read.
    """
    try:
        return all_sha256([folders.followed(file)])[0][folders.followed(file)]
    except OSError as error:
        raise UsageError(f"{file}: cannot be read: {error.strerror}", hint=_SAME) from error


def _require_room(place: Path, size_bytes: int, *, writes: bool) -> None:
    """Refuse a folder whose disk has no room, or that cannot be written.

    Raises:
        EnvironmentLacks: so it is.
    """
    there = next(each for each in (place, *place.absolute().parents) if each.is_dir())
    free = shutil.disk_usage(there).free
    if free < size_bytes:
        raise EnvironmentLacks(
            f"{place}: {free / 1e9:.2f} GB are free; a build needs {size_bytes / 1e9:.2f} GB", hint="free some space"
        )
    if not writes:
        return
    try:
        with tempfile.TemporaryFile(dir=there) as stream:
            stream.write(os.urandom(4096))
    except OSError as error:
        if resources.is_full(error):
            raise EnvironmentLacks(f"{place}: the disk is full", hint="free some space") from error
        raise EnvironmentLacks(f"{place}: cannot be written: {error.strerror}", hint="check permissions") from error
