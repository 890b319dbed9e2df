"""Checkpoints on the Hugging Face Hub: `ORG/NAME` where a folder could be named, at a branch, tag or commit.

Downloads go through huggingface_hub, into its cache, and so follow HF_HOME, HF_TOKEN, HF_ENDPOINT and HF_HUB_OFFLINE.
Only what a build reads is fetched: configuration and tokenizer first, weights once they are needed, never pickles or
code. A branch is resolved to a commit, which is what an artifact records.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from llmforge.base import folders, small_file
from llmforge.base.errors import CheckpointError, EnvironmentLacks, ForgeError, UsageError
from llmforge.base.progress import has_bars
from llmforge.base.wording import cut, shown

MAIN = "main"
_NAME = re.compile(r"[A-Za-z0-9][\w.-]{0,95}/[A-Za-z0-9][\w.-]{0,95}", re.ASCII)  # of a repository
_REVISION = re.compile(r"[\w][\w./-]{0,254}", re.ASCII)  # what git allows in a branch, as far as the Hub does
_SHARD = re.compile(r"[\w.-]+\.safetensors", re.ASCII)
_SHA256 = re.compile(r"[0-9a-f]{64}")
_WEIGHTS, _INDEX = "model.safetensors", "model.safetensors.index.json"
_SMALL = (
    "config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json",
    "chat_template.jinja", _INDEX,
)  # fmt: skip
_RECIPES = (".yaml", ".yml")  # a recipe in a folder, not a repository
_FOLDERS = ["*/*"]  # nothing in folders of the repository


@dataclass(frozen=True)
class HubSnapshot:
    """A checkpoint at one commit, in the cache of huggingface_hub; its weights may not be there yet."""

    repository: str
    revision: str  # as it was asked for
    commit: str
    folder: Path

    def fetch(self) -> Path:
        """Download the weights as far as they are not there; return the folder.

        Raises:
            CheckpointError, EnvironmentLacks: as `snapshot`.
        """
        names = {_WEIGHTS}
        if (index := self.folder / _INDEX).exists():
            data = small_file.read_json(index, small_file.SETTINGS_BYTES, error=CheckpointError, hint="it is damaged")
            found = data.get("weight_map") if isinstance(data, dict) else None
            names = set(map(str, found.values())) if isinstance(found, dict) else set()
        if wrong := sorted(name for name in names if _SHARD.fullmatch(name) is None):
            raise CheckpointError(
                f"{index}: {shown(wrong[0])} is not the name of a shard", hint="the repository is damaged"
            )
        with _explained(self.repository, self.revision):
            _download(self.repository, self.commit, sorted(names))
        return self.folder


def is_here(path: Path) -> bool:
    """Say whether something of this path is here, be it that it cannot be read: then it is no name on the Hub."""
    try:
        path.lstat()
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError:
        return True
    return True


def is_folder(path: Path) -> bool:
    """Say whether a path is a folder here, as far as one may look."""
    try:
        return path.is_dir()
    except OSError:
        return False


def is_name(text: str) -> bool:
    """Say whether a text looks like `ORG/NAME`."""
    if text.endswith(_RECIPES):
        return False
    return _NAME.fullmatch(text) is not None and ".." not in text and "--" not in text


def find(given: Path, revision: str | None = None) -> HubSnapshot | None:
    """Resolve a checkpoint that is named as on the Hub, ORG/NAME, where no such path is here; None: it is a path.

    Raises:
        UsageError: there is a revision, of a path.
        CheckpointError, EnvironmentLacks: as `snapshot`.
    """
    if is_name(str(given)) and not is_here(given):
        return snapshot(str(given), revision)
    if revision is not None:
        raise UsageError(f"{given} is not on the Hub, and has no revisions", hint="leave out the revision")
    return None


def snapshot(repository: str, revision: str | None = None) -> HubSnapshot:
    """Resolve `revision` (None: main) to a commit, and download all but the weights.

    Raises:
        CheckpointError: there is no such model or revision, or none for this user.
        EnvironmentLacks: huggingface_hub is not installed; the Hub cannot be reached, and the cache does not have it.
        UsageError: `revision` is none.
    """
    asked = revision or MAIN
    if _REVISION.fullmatch(asked) is None or ".." in asked:
        raise UsageError(f"{shown(asked)} is not a revision", hint="give a branch, a tag or a commit")
    with _explained(repository, asked):
        folder = _download(repository, asked, _SMALL)
    return HubSnapshot(repository, asked, folder.name, folder)


def _download(repository: str, revision: str, names: Sequence[str]) -> Path:
    """Fetch files of these names, as far as they are there; return the folder of the snapshot."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.utils import tqdm

    wanted = has_bars() and sys.stderr.isatty()  # asked here: the bars of files are made in other threads

    class Bars(tqdm):  # type: ignore[misc,type-arg,unused-ignore]
        """Bars on a terminal alone, and where they are wanted."""

        def __init__(self, *arguments: Any, **options: Any) -> None:
            super().__init__(*arguments, **{**options, "disable": options.get("disable") or not wanted})

    found = snapshot_download(
        repository, revision=revision, allow_patterns=list(names), ignore_patterns=_FOLDERS, tqdm_class=Bars
    )
    return Path(found)


def title(folder: Path) -> str:
    """Name a checkpoint: ORG/NAME where it lies in the cache of huggingface_hub, else by its folder."""
    home = folder.parent.parent.name
    if folder.parent.name == "snapshots" and home.startswith("models--"):
        return home.removeprefix("models--").replace("--", "/", 1)
    return folder.name


def check_content(file: Path, sha256: str) -> None:
    """Return if a file is what the Hub says it is: in the cache, weights are called by their SHA-256.

    Raises:
        CheckpointError: it has other content.
    """
    blob = folders.followed(file)
    if file.is_symlink() and _SHA256.fullmatch(blob.name) and blob.name != sha256:
        raise CheckpointError(
            f"{file}: its SHA-256 is {sha256}, and the Hub names {blob.name}",
            hint=f"delete {blob}, then fetch it again",
        )


@contextmanager
def _explained(repository: str, revision: str) -> Iterator[None]:
    """Say in one message what is wrong with a download."""
    try:
        from httpx2 import HTTPError  # what huggingface_hub is built on
        from huggingface_hub import constants, errors
    except ModuleNotFoundError as error:
        raise EnvironmentLacks(
            f"{repository}: huggingface_hub is not installed", hint="pip install 'llmforge[build]', or name a folder"
        ) from error
    where = constants.ENDPOINT
    try:
        yield
    except errors.GatedRepoError as error:
        raise CheckpointError(
            f"{repository}: access on {where} is restricted",
            hint=f"ask for it at {where}/{repository}, then set HF_TOKEN",
        ) from error
    except errors.RepositoryNotFoundError as error:
        raise CheckpointError(
            f"{repository}: neither a folder here nor a model on {where} that you may read",
            hint="check the name; a private model requires HF_TOKEN",
        ) from error
    except errors.RevisionNotFoundError as error:
        raise CheckpointError(
            f"{repository}: has no revision {shown(revision)} on {where}", hint="give a branch, a tag or a commit"
        ) from error
    except errors.LocalEntryNotFoundError as error:
        offline = constants.HF_HUB_OFFLINE
        why = "HF_HUB_OFFLINE is set" if offline else f"{where} cannot be reached"
        raise EnvironmentLacks(
            f"{repository}: no such folder here; as a name on the Hub: {why}, and the cache, {constants.HF_HUB_CACHE}, "
            f"lacks files of {shown(revision)}",
            hint="unset HF_HUB_OFFLINE, or name a folder" if offline else "check the network, or name a folder",
        ) from error
    except ForgeError:
        raise
    except (HTTPError, errors.FileMetadataError, errors.OfflineModeIsEnabled) as error:
        raise EnvironmentLacks(
            f"{repository}: {where} failed: {cut(str(error), 200)}",
            hint="run the command again: what was downloaded is kept",
        ) from error
