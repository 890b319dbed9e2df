"""The packages whose internals llmforge uses: each is pinned to one version, and no other is tried."""

from __future__ import annotations

from importlib import metadata

from llmforge.base import extras
from llmforge.base.errors import EnvironmentLacks, VersionMismatch

# What `trace.internals` and its neighbors reach into: tests/trace/test_hooks.py lists every name that they use.
PINNED = ("onnx-ir", "onnxscript", "torch", "transformers")


def check() -> None:
    """Return if the installed versions are those that llmforge's own metadata pins; a build tag ("+cpu") is free.

    Raises:
        VersionMismatch: one is not; names both versions.
        EnvironmentLacks: a package is missing, or nothing says which are wanted.
    """
    wanted = pins()
    for package in PINNED:
        try:
            installed = metadata.version(package)
        except metadata.PackageNotFoundError as error:
            raise EnvironmentLacks(
                f"{package} {wanted[package]} is not installed; it is required for building",
                hint=extras.hint("build"),
            ) from error
        if installed.partition("+")[0] != wanted[package]:
            raise VersionMismatch(
                f"{package} {installed} is installed; this llmforge requires {package} {wanted[package]}, "
                "whose internals it uses",
                hint=f"pip install '{package}=={wanted[package]}' (see constraints.txt for all)",
            )


def pins() -> dict[str, str]:
    """Read the version that llmforge pins each package of `PINNED` to.

    Raises:
        EnvironmentLacks: nothing says so.
    """
    found = {each.distribution: each.pin for each in extras.requirements() if each.pin is not None}
    if not found:
        raise EnvironmentLacks(
            "llmforge is not installed, so its required versions are unknown", hint="pip install -e ."
        )
    return {package: found[package] for package in PINNED}
