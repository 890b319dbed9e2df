"""The store of a farm: a folder or bucket that is there already, with an archive of each artifact.

    URL/NAME/VERSION.tar

What a store has of some content stays. Where another host published the same content, the record of this build goes
behind those that are there, as it would have in one folder of artifacts.
"""

from __future__ import annotations

import queue
import secrets
import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from llmforge.artifact import Artifact, remote
from llmforge.artifact import store as artifacts
from llmforge.artifact.remote import Url
from llmforge.base import remote_files, resources
from llmforge.base.errors import EnvironmentLacks, ForgeError, InputError, UsageError
from llmforge.gates import confirmed

PATIENCE_S = 60.0  # in which a store that does not answer is asked again: a restart takes seconds
ANSWER_S = 30.0  # in which it must answer: a server that restarts takes seconds
_PAUSE_S = 2.0
_JOINED = ".joined-"  # folders in which evidence of two hosts becomes one line


class StoreLost(EnvironmentLacks):
    """A store that was there does not answer any more."""


def archive_of(artifact: Path, store: str) -> str:
    """Name the archive of an artifact in the store: URL/NAME/VERSION.tar."""
    return f"{store.rstrip('/')}/{artifact.parent.name}/{artifact.name}.tar"


def probe(store: str) -> None:
    """Write a small file into the store, read it and remove it; the store must be there.

    Raises:
        UsageError: there is no such folder or bucket, or it cannot be written; the credentials do not allow it.
        InputError: what was written cannot be read.
        EnvironmentLacks: the package for its protocol is missing.
    """
    url, content = Url(store), secrets.token_bytes(16)
    system, path = remote.opened(url)
    file = f"{path.rstrip('/')}/.llmforge-{content.hex()}"
    with remote.asking(url, writes=True):
        if remote_files.has_folders(system) and not system.isdir(path):
            raise UsageError(
                f"{url}: there is no such folder",
                hint="make it first: none is made here, for the name may be wrong",
            )
        with system.open(file, "wb") as stream:
            stream.write(content)
    try:
        with remote.asking(url, writes=False):
            system.invalidate_cache()
            found = system.cat_file(file)
    finally:
        with remote.asking(url, writes=True):
            system.rm_file(file)
    if found != content:
        raise InputError(f"{url}: a file has other bytes than were written to it", hint="another store")


def share(path: Path, store: str) -> None:
    """Write the artifact at `path` to the store.

    Raises:
        StoreLost: it does not answer for a minute.
        UsageError, InputError, EnvironmentLacks: as `remote.save`.
    """
    artifact, url = confirmed.open_artifact(path), Url(archive_of(path, store))

    def write() -> None:
        system, place = remote.opened(url)
        with remote.asking(url, writes=True):
            remote_files.make_folder(system, place.rpartition("/")[0])
        while True:
            with suppress(remote.ChangedMeanwhile), remote.alone(url):  # another host was faster: behind its evidence
                _put(artifact, url)
                return

    _patiently(write, store)


def _put(artifact: Artifact, url: Url) -> None:
    """Write an artifact to a URL, or bring what it has behind the evidence that is there of its content.

    Raises:
        ChangedMeanwhile: another host has written there meanwhile.
        UsageError: the version is another content, or the evidence there is damaged.
    """
    known = remote.revision(url)
    if known is None:
        remote.save_over(artifact, url, None)
        return
    manifest, there = remote.evidence(url)
    if manifest != artifact.manifest:
        raise UsageError(f"{url}: holds the content {manifest.content_digest}", hint="remove it, or use another store")
    digests, own = {record.digest for record in there}, [record.digest for record in artifact.evidence]
    if own[-1] in digests:
        return
    if digests <= set(own):  # all of what is there goes on in this one
        remote.save_over(artifact, url, known)
        return
    with tempfile.TemporaryDirectory(prefix=_JOINED, dir=artifact.path.parent.parent) as folder:
        remote.load(url, Path(folder), confirmed.confirm)
        remote.save_over(artifacts.publish_again(artifact, Path(folder)), url, known)


def fetch(path: Path, store: str | None) -> None:
    """Get the artifact that another node has published as `path`.

    Raises:
        StoreLost: the store does not answer for a minute.
        EnvironmentLacks: there is no store.
        InputError, UsageError: as `remote.load`.
    """
    if store is None:
        raise EnvironmentLacks(
            f"{path} is not on this node",
            hint="let the folder of artifacts be one that all nodes have, or give --store URL",
        )
    url = Url(archive_of(path, store))
    _patiently(lambda: remote.load(url, path.parent.parent, confirmed.confirm), store)


def remove(path: Path, store: str) -> None:
    """Remove the archive of the artifact at `path` from the store, where it is there.

    Raises:
        UsageError: it cannot be removed.
    """
    url = Url(archive_of(path, store))
    system, place = remote.opened(url)
    with remote.asking(url, writes=True):
        system.invalidate_cache()
        if system.exists(place):
            system.rm_file(place)


def require_answer(store: str) -> None:
    """Do as `probe`, within ANSWER_S: not every file system has a time limit.

    Raises:
        StoreLost: there was no answer.
        UsageError, InputError, EnvironmentLacks: as `probe`.
    """
    _limited(lambda: probe(store), lambda: _lose(store, f"no answer within {ANSWER_S:g} s"))


def _patiently(act: Callable[[], object], store: str) -> None:
    """Do what asks the store, again while it does not answer; what takes long may, as long as the store answers.

    Raises:
        StoreLost: it did not within PATIENCE_S.
    """
    until = time.monotonic() + PATIENCE_S
    while True:
        try:
            _limited(act, lambda: require_answer(store))
            return
        except (UsageError, InputError) as error:
            if not is_lost(error):
                raise
            if time.monotonic() > until:
                _lose(store, error.message, error)
        time.sleep(_PAUSE_S)


def _lose(store: str, why: str, cause: Exception | None = None) -> None:
    raise StoreLost(
        f"store {Url(store)} does not answer: {why}",
        hint="run the same command when it does: it goes on from what the cache kept",
    ) from cause


def _limited(act: Callable[[], object], late: Callable[[], None]) -> None:
    """Do something in a thread, and every ANSWER_S that it has not ended what is `late`, which may raise."""
    ends: queue.SimpleQueue[BaseException | None] = queue.SimpleQueue()

    def run() -> None:
        try:
            act()
            ends.put(None)
        except BaseException as error:  # noqa: BLE001 - raised again by who waits
            ends.put(error)

    threading.Thread(target=run, name="store", daemon=True).start()
    while True:
        try:
            error = ends.get(timeout=ANSWER_S)
            break
        except queue.Empty:
            late()
    if error is not None:
        raise error


def is_lost(error: ForgeError) -> bool:
    """Say if an error of the other side may pass by itself: it tells of no missing file, right or room."""
    cause = error.__cause__
    causes = [cause, cause.__cause__] if cause is not None else []
    if not causes or isinstance(cause, ValueError | NotImplementedError | ForgeError):
        return False
    return not any(
        remote_files.is_missing(each) or remote_files.is_denied(each) or resources.is_full(each)
        for each in causes
        if each is not None
    )
