"""Where the Python that runs is: processes that this one starts run in it, too."""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path

from llmforge.base.errors import EnvironmentLacks

# Arguments after `-I -c`: a module or a file to run, then all of sys.path. Nothing of the environment or of the current
# folder decides what the new process imports.
BOOT = "import sys; sys.path[:] = sys.argv[2:]; import runpy; runpy.run_module(sys.argv[1], run_name='__main__')"
_BOOT_FILE = BOOT.replace("run_module", "run_path")


def find(purpose: str) -> str:
    """Find the Python that runs: a host that embeds it, as Triton's, is none itself. `purpose` says what needs it.

    Raises:
        EnvironmentLacks: there is none.
    """
    name = f"python{sys.version_info.major}.{sys.version_info.minor}"
    candidates = [sys.executable, f"{sys.prefix}/bin/{name}", f"{sys.base_prefix}/bin/{name}", shutil.which(name)]
    for candidate in candidates:
        if candidate and Path(candidate).name.startswith("python") and os.access(candidate, os.X_OK):
            return candidate
    raise EnvironmentLacks(
        f"{purpose} takes a process of its own, and there is no {name} to start",
        hint="install Python beside the server",
    )


def command(module: str, purpose: str) -> list[str]:
    """Give the command that runs a module of this installation in a process of its own; raises what `find` does.

    It writes no bytecode: where the module lies may be an artifact.
    """
    return [find(purpose), "-I", "-B", "-c", BOOT, module, *sys.path]


def file_command(file: str, purpose: str) -> list[str]:
    """Give the command that runs a file as `command` runs a module, without importing its package first."""
    return [find(purpose), "-I", "-B", "-c", _BOOT_FILE, file, *sys.path]
