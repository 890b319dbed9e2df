"""Credentials for registries where `docker login` keeps them: config.json and credential helpers."""

from __future__ import annotations

import base64
import binascii
import json
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

from llmforge.base import small_file
from llmforge.base.errors import EnvironmentLacks

_HUB = "https://index.docker.io/v1/"  # what Docker calls its own registry in the file
_TIMEOUT = 30.0  # seconds; a helper may ask somebody


def file() -> Path:
    """Name Docker's configuration, which need not exist."""
    folder = os.environ.get("DOCKER_CONFIG")
    return (Path(folder) if folder else Path.home() / ".docker") / "config.json"


def login(host: str) -> tuple[str, str] | None:
    """Find user name and password for a registry; None: there are none.

    Raises:
        EnvironmentLacks: the file or a helper that it names cannot be used.
    """
    config = _read()
    keys = [_HUB] if host == "docker.io" else [host, f"https://{host}", f"http://{host}"]
    helpers, auths = config.get("credHelpers", {}), config.get("auths", {})
    for key in keys:
        helper = helpers.get(key) or config.get("credsStore")
        if helper and (found := _ask(str(helper), key)) is not None:
            return found
        if (entry := auths.get(key)) is not None and (found := _decode(entry, key)) is not None:
            return found
    return None


def _read() -> dict[str, Any]:
    path = file()
    if not path.exists():
        return {}
    config = small_file.read_json(path, error=EnvironmentLacks, hint="repair it, or log in again")
    parts = [config.get(key, {}) for key in ("auths", "credHelpers")] if isinstance(config, dict) else [None]
    if not all(isinstance(part, dict) for part in parts):
        raise EnvironmentLacks(f"{path}: is not a configuration of Docker", hint="repair it, or log in again")
    assert isinstance(config, dict)
    return config


def _decode(entry: Any, key: str) -> tuple[str, str] | None:
    """Read one of `auths`: the Base64 of `user:password`."""
    if not isinstance(entry, dict) or not (entry.get("auth") or entry.get("identitytoken")):
        return None  # the credentials are with a helper, or there are none
    if entry.get("identitytoken"):
        raise EnvironmentLacks(
            f"{file()}: has an identity token for {key}, which is not supported", hint="log in with a password or token"
        )
    try:
        user, colon, password = base64.b64decode(entry["auth"], validate=True).decode().partition(":")
    except (binascii.Error, ValueError, TypeError) as error:
        raise EnvironmentLacks(f"{file()}: the credentials for {key} cannot be read", hint="log in again") from error
    return (user, password) if colon else None


def _ask(helper: str, key: str) -> tuple[str, str] | None:
    """Ask a credential helper, as Docker does: the registry on its standard input, JSON on its standard output."""
    program = f"docker-credential-{helper}"
    if shutil.which(program) is None:
        raise EnvironmentLacks(f"{file()}: names the credential helper {program}, which is not in PATH")
    try:
        done = subprocess.run([program, "get"], input=key.encode(), capture_output=True, timeout=_TIMEOUT, check=False)
        if done.returncode:
            return None  # it has none for this registry
        answer = json.loads(done.stdout)
        user, password = str(answer["Username"]), str(answer["Secret"])
    except (OSError, subprocess.SubprocessError, ValueError, KeyError, TypeError) as error:
        raise EnvironmentLacks(f"{program}: gave no credentials for {key}", hint="log in again") from error
    if user == "<token>":
        raise EnvironmentLacks(
            f"{program}: has an identity token for {key}, which is not supported",
            hint="log in with a password or token",
        )
    return user, password
