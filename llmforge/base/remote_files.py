"""Files at URLs, through fsspec: errors of the file systems below it, and URLs without their passwords."""

from __future__ import annotations

import re
import sys
from typing import Any

_OBJECTS = frozenset({"s3", "s3a", "gs", "gcs", "az", "abfs", "abfss", "memory"})  # protocols of object stores
_LOGIN = re.compile(r"(?<=://)[^/@]*@")
_DENIED = "AccessDenied", "ExpiredToken", "InvalidAccessKeyId", "InvalidClientTokenId", "SignatureDoesNotMatch"
_CONDITION = "PreconditionFailed", "ConditionalRequestConflict"  # of S3, where a write has a condition
# What the packages below fsspec raise that is no OSError: looked up where they are loaded, imported nowhere here.
_FOREIGN = {
    "aiohttp": ("ClientError",),
    "azure.core.exceptions": ("AzureError",),
    "botocore.exceptions": ("BotoCoreError", "ClientError"),
    "google.auth.exceptions": ("GoogleAuthError",),
}


def without_login(text: str) -> str:
    """Take users and passwords out of the URLs in a text."""
    return _LOGIN.sub("", text)


def has_folders(system: Any) -> bool:
    """Say if a file system has folders that must be there before files are; object stores have none.

    There `makedirs` makes what is missing of a path, and be it the bucket.
    """
    protocol = system.protocol
    return _OBJECTS.isdisjoint([protocol] if isinstance(protocol, str) else protocol)


def make_folder(system: Any, path: str) -> None:
    """Make the folder `path` where the file system has folders; no bucket is made.

    Raises:
        OSError, and what `errors` lists: it cannot be made.
    """
    if has_folders(system):
        system.makedirs(path, exist_ok=True)


def errors() -> tuple[type[Exception], ...]:
    """List what a file system raises where it cannot read or write."""
    loaded = [(sys.modules[module], names) for module, names in _FOREIGN.items() if module in sys.modules]
    foreign = tuple(getattr(module, name) for module, names in loaded for name in names)
    return (OSError, NotImplementedError, ValueError, *foreign)


def is_missing(error: BaseException | None) -> bool:
    """Say if an error tells that there is no such file or bucket."""
    return isinstance(error, FileNotFoundError) or _code(error) in ("NoSuchBucket", "NoSuchKey")


def is_denied(error: BaseException | None) -> bool:
    """Say if an error tells that the credentials do not allow it, or that there are none."""
    named = type(error).__name__.endswith(("CredentialsError", "CredentialRetrievalError"))  # of botocore
    return named or isinstance(error, PermissionError) or _code(error) in _DENIED


def is_refused_by_condition(error: BaseException | None) -> bool:
    """Say if an error tells that something else was there than a write with a condition expected."""
    causes = error, getattr(error, "__cause__", None)
    return isinstance(error, FileExistsError) or any(_code(each) in _CONDITION for each in causes)


def _code(error: BaseException | None) -> object:
    """Give the code of an error of botocore, by which S3 says what is wrong."""
    response = getattr(error, "response", None)
    said = response.get("Error") if isinstance(response, dict) else None
    return said.get("Code") if isinstance(said, dict) else None


def reason(error: BaseException) -> str:
    """Say in one line why a file system could not."""
    return " ".join(str(error).split())[:300] or type(error).__name__
