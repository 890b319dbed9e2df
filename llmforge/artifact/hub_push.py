"""Artifacts on the Hugging Face Hub: a repository of models holds the files of one artifact, as they are.

What is downloaded from there is the artifact, and `llmforge verify` says so. The Hub shows its README.md, which is the
model card, with figures as `model-index` (https://huggingface.co/docs/hub/model-cards).
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from llmforge.artifact import transfer
from llmforge.artifact.store import Artifact
from llmforge.base.errors import EnvironmentLacks, UsageError
from llmforge.base.progress import Progress
from llmforge.base.wording import cut, shown

SCHEME = "hf://"
MAIN = "main"
_NAME = re.compile(r"[A-Za-z0-9][\w.-]{0,95}/[A-Za-z0-9][\w.-]{0,95}", re.ASCII)
_KEPT = frozenset({".gitattributes"})  # the Hub's own, which says what is stored as large files


@dataclass(frozen=True)
class HubPushed:
    """What a push to the Hub did."""

    commit: str
    files: int
    size_bytes: int
    removed: int  # files of what was there before


def repository(reference: str) -> str:
    """Read hf://ORG/NAME.

    Raises:
        UsageError: it is none.
    """
    name = reference.removeprefix(SCHEME)
    if _NAME.fullmatch(name) is None or ".." in name or "--" in name:
        raise UsageError(f"{shown(reference)} names no repository of the Hub", hint="give hf://ORG/NAME")
    return name


def push(opened: Artifact, name: str, progress: Progress, *, private: bool = False) -> HubPushed:
    """Make the files of an artifact those of the repository `name`, in one commit; it is made where it is not there.

    Who may do that huggingface_hub knows: HF_TOKEN, or `hf auth login`.

    Raises:
        InputError: a file is not what manifest and evidence say.
        EnvironmentLacks: the Hub cannot be reached, or refuses.
    """
    from huggingface_hub import CommitOperationAdd, CommitOperationDelete, HfApi

    progress.stage("Check files")
    opened.verify()
    paths = sorted({*transfer.unlisted(opened), *opened.listed})
    sizes = [(opened.path / path).stat().st_size for path in paths]
    progress.stage(f"Push {opened.manifest.name}/{opened.manifest.version}")
    with _explained(name), _without_bars():
        hub = HfApi()
        hub.create_repo(name, private=private or None, exist_ok=True)
        there = set(hub.list_repo_files(name)) - _KEPT
        operations: list[CommitOperationAdd | CommitOperationDelete] = [
            CommitOperationAdd(path_in_repo=path, path_or_fileobj=opened.path / path) for path in paths
        ]
        removed = sorted(there - set(paths))
        operations += [CommitOperationDelete(path_in_repo=path) for path in removed]
        made = hub.create_commit(
            name, operations, commit_message=f"{opened.manifest.name}/{opened.manifest.version}", revision=MAIN
        )
    return HubPushed(made.oid, len(paths), sum(sizes), len(removed))


@contextmanager
def _explained(name: str) -> Iterator[None]:
    """Say in one message what is wrong with an upload."""
    from httpx2 import HTTPError  # what huggingface_hub is built on
    from huggingface_hub import constants, errors

    where = constants.ENDPOINT
    try:
        yield
    except errors.OfflineModeIsEnabled as error:
        raise EnvironmentLacks(f"{name}: HF_HUB_OFFLINE is set", hint="unset HF_HUB_OFFLINE") from error
    except errors.HfHubHTTPError as error:
        denied = error.response is not None and error.response.status_code in (401, 403, 404)
        raise EnvironmentLacks(
            f"{name}: {where} refuses: {cut(str(error), 200)}",
            hint="set HF_TOKEN to a token that may write there, or log in: hf auth login"
            if denied
            else "run the command again",
        ) from error
    except (HTTPError, RuntimeError) as error:  # the latter: a file that breaks off
        raise EnvironmentLacks(
            f"{name}: {where} failed: {cut(str(error), 200)}", hint="check the network, and run the command again"
        ) from error


@contextmanager
def _without_bars() -> Iterator[None]:
    """Hide the library's own bars."""
    from huggingface_hub.utils import are_progress_bars_disabled, disable_progress_bars, enable_progress_bars

    if are_progress_bars_disabled():
        yield
        return
    disable_progress_bars()
    try:
        yield
    finally:
        enable_progress_bars()
