"""The packages whose internals llmforge uses: only versions that it was proven with are used.

torch and ONNX's tools are pinned to one version each. Of transformers there are several releases, those of `PROVEN`,
and whatever `llmforge doctor --prove-transformers` has proven on this machine (`llmforge.doctor.releases`).
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache
from importlib import metadata
from pathlib import Path

from llmforge.base import extras, remembered, small_file
from llmforge.base.errors import EnvironmentLacks, InputError, VersionMismatch

# What `trace.hooks.internals` and its neighbors reach into: llmforge/trace/hooks/table.py lists every name.
PINNED = ("onnx-ir", "onnxscript", "torch", "transformers")
# Releases of transformers that the tests were run with; the newest is the one of constraints.txt.
PROVEN = ("5.21.1", "5.22.2", "5.23.0")
PROVE = "llmforge doctor --prove-transformers"
FORMAT = 1
_TRANSFORMERS = "transformers"
_ROOMS = ("trace", "checkpoint")  # whose code a proof is of
_ON_TRIAL: ContextVar[str | None] = ContextVar("on_trial", default=None)


def check() -> None:
    """Return if the installed versions are those that llmforge was proven with; a build tag ("+cpu") is free.

    Raises:
        VersionMismatch: one is not; names both versions.
        EnvironmentLacks: a package is missing, or nothing says which are wanted.
    """
    wanted = pins()
    for package in PINNED:
        version, _, tag = installed(package).partition("+")
        if package == _TRANSFORMERS:
            if version not in (*PROVEN, _ON_TRIAL.get()) and not is_proven_here(version):
                raise VersionMismatch(
                    f"{package} {version} is installed; this llmforge requires {package} {wanted[package]}, whose "
                    "internals it uses",
                    hint=f"pip install '{package}=={PROVEN[-1]}' (see constraints.txt for all), or prove that this "
                    f"release works: `{PROVE}`",
                )
        elif version != wanted[package]:
            tagged = f"{version}+{tag}" if tag else version
            raise VersionMismatch(
                f"{package} {tagged} is installed; this llmforge requires {package} {wanted[package]}, "
                "whose internals it uses",
                hint=f"pip install '{package}=={wanted[package]}' (see constraints.txt for all)",
            )


@contextmanager
def on_trial(version: str) -> Iterator[None]:
    """Let a release of transformers pass in this thread for as long as the `with` block lasts, to prove it."""
    token = _ON_TRIAL.set(version)
    try:
        yield
    finally:
        _ON_TRIAL.reset(token)


def installed(package: str) -> str:
    """Return the installed version of `package`.

    Raises:
        EnvironmentLacks: it is not installed.
    """
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError as error:
        raise EnvironmentLacks(
            f"{package} {pins()[package]} is not installed; it is required for building",
            hint=extras.hint("build"),
        ) from error


def pins() -> dict[str, str]:
    """Read the version that llmforge pins each package of `PINNED` to; of transformers, those that it was proven with.

    Raises:
        EnvironmentLacks: nothing says so.
    """
    found = {each.distribution: each.pin for each in extras.requirements() if each.pin is not None}
    if not found:
        raise EnvironmentLacks(
            "llmforge is not installed, so its required versions are unknown", hint="pip install -e ."
        )
    proven = f"{', '.join(PROVEN[:-1])} or {PROVEN[-1]}"
    return {package: proven if package == _TRANSFORMERS else found[package] for package in PINNED}


def is_proven_here(version: str) -> bool:
    """Say whether this release of transformers was proven on this machine, with this llmforge and this torch."""
    path = record_of(version)
    try:
        written = small_file.read_json(path) if path.is_file() else None
    except InputError:  # it was cut off: as good as none
        return False
    return isinstance(written, dict) and written.get("proof") == dict(proof_of(version))


def record_of(version: str) -> Path:
    """Return the file that says that a release of transformers was proven."""
    return remembered.home() / "proven" / f"transformers-{version}.json"


def proof_of(version: str) -> Mapping[str, str]:
    """Say what a proof is of: it holds for these versions, and for this code, alone."""
    return {
        "format": str(FORMAT),
        "transformers": version,
        **{package: installed(package).partition("+")[0] for package in PINNED if package != _TRANSFORMERS},
        "code": _code(),
    }


@cache
def _code() -> str:
    """Digest the code that reaches into transformers."""
    package = Path(__file__).resolve().parents[1]
    digest = hashlib.sha256()
    for file in sorted(each for room in _ROOMS for each in (package / room).rglob("*.py")):
        digest.update(str(file.relative_to(package)).encode() + b"\0" + file.read_bytes() + b"\0")
    return digest.hexdigest()
