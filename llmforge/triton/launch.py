"""Starts a Triton that is installed on this machine."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from llmforge.base.errors import EnvironmentLacks

PROGRAM = "tritonserver"
PYTRITON = (
    "nvidia-pytriton==0.7.0"  # tritonserver 2.51 and its Python backend, on PyPI; also in tests/servers/triton_env.py
)
_STUB = "triton_python_backend_stub"  # the process that a model of the Python backend runs in, by version of Python
_ASKED = "import json, sysconfig as s; print(json.dumps([s.get_config_var(x) for x in ('LIBDIR', 'INSTSONAME')]))"


@dataclass(frozen=True)
class Ports:
    """Where the server listens."""

    host: str = "127.0.0.1"
    http: int = 8000
    grpc: int = 8001
    metrics: int = 8002


@dataclass(frozen=True)
class TritonServer:
    """A server's binary, and what it needs of its process where it lies in an unusual place."""

    program: Path
    environment: Mapping[str, str]
    options: tuple[str, ...] = ()


def find(server: Path | None = None, requirements: Path | None = None) -> TritonServer:
    """Find the server: the binary `server`, one in the environment `server` that has nvidia-pytriton, or on PATH.

    `requirements` is the file with the packages of the model, which the way to such an environment names; None: the
    Python backend does not run the model.

    Raises:
        EnvironmentLacks: there is none, or it cannot run here.
    """
    if server is not None and server.is_dir():
        return _of_pytriton(server.absolute(), requirements)
    # A path with a folder is not looked up on PATH, where another program may have the name.
    found = shutil.which(PROGRAM if server is None else str(server.absolute()))
    if found is None:
        raise EnvironmentLacks(
            f"{server}: not an executable" if server is not None else f"no {PROGRAM} is on PATH",
            hint=_how(requirements),
        )
    return TritonServer(Path(found), dict(os.environ))


def _how(requirements: Path | None) -> str:
    """Say where a server comes from, for people who have no repository of llmforge."""
    if requirements is None:
        return "use NVIDIA's container, or name the server's binary with --server: `llmforge docs triton`"
    return (
        f"python3 -m venv triton && triton/bin/pip install {PYTRITON} 'numpy<2' -r {shlex.quote(str(requirements))}, "
        "then add --server triton; or use NVIDIA's container: `llmforge docs triton`"
    )


def _of_pytriton(folder: Path, requirements: Path | None) -> TritonServer:
    """Find the server in an environment, and put the stub of its Python where the Python backend looks for it."""
    home = next(folder.glob(f"lib/python3.*/site-packages/pytriton/{PROGRAM}"), None)
    if home is None or not (home / "bin" / PROGRAM).is_file():
        raise EnvironmentLacks(f"{folder}: no environment with nvidia-pytriton", hint=_how(requirements))
    packages = home.parents[1]
    version = packages.parent.name.removeprefix("python")
    stub, backend = home / "python_backend_stubs" / version / _STUB, home / "backends" / "python"
    if not stub.is_file():
        known = ", ".join(sorted(path.name for path in (home / "python_backend_stubs").iterdir()))
        raise EnvironmentLacks(
            f"{folder}: this Triton's Python backend knows no Python {version}; it knows {known}",
            hint="make the environment with one of these, 3.11 or newer",
        )
    asked = [str(folder / "bin" / "python"), "-c", _ASKED]
    libraries, shared = json.loads(subprocess.run(asked, capture_output=True, text=True, check=True).stdout)
    if not Path(libraries, shared).is_file() or ".so" not in shared:
        raise EnvironmentLacks(
            f"{folder}: Triton's Python backend needs libpython{version}.so, and this Python has none in {libraries}",
            hint="make the environment with a Python that was built with --enable-shared, such as a distribution's",
        )
    if not (backend / _STUB).exists():
        shutil.copy2(stub, backend)
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "VIRTUAL"))}
    paths = {
        "PATH": [str(folder / "bin"), inherited.get("PATH", "")],
        "LD_LIBRARY_PATH": [libraries, str(packages / "nvidia_pytriton.libs"), inherited.get("LD_LIBRARY_PATH", "")],
    }
    environment = inherited | {name: os.pathsep.join(filter(None, each)) for name, each in paths.items()}
    return TritonServer(home / "bin" / PROGRAM, environment, (f"--backend-directory={backend.parent}",))


def command(server: TritonServer, repository: Path, ports: Ports, extra: Sequence[str] = ()) -> list[str]:
    """Make the server's command line: this repository, nothing loaded or changed from outside."""
    return [
        str(server.program),
        f"--model-repository={repository}",
        "--model-control-mode=none",
        "--disable-auto-complete-config",
        f"--http-address={ports.host}",
        f"--http-port={ports.http}",
        f"--grpc-address={ports.host}",
        f"--grpc-port={ports.grpc}",
        f"--metrics-address={ports.host}",
        f"--metrics-port={ports.metrics}",
        *server.options,
        *extra,
    ]
