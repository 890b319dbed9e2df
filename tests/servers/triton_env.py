"""A real Triton Inference Server for tests, from packages of PyPI: no container, no root.

`python tests/servers/triton_env.py` prepares it; tests do so too where nobody did. It lies in a folder of the user's
cache, or in that which LLMFORGE_TRITON names:

- `server/`: tritonserver 2.51 (24.10) with its python backend, out of nvidia-pytriton;
- `serving/`: the environment of the model, with nothing but what the runtime needs;
- `client/`: NVIDIA's client library, whose versions of protobuf and ml-dtypes are not those that building needs.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

CONSTRAINTS = Path(__file__).resolve().parents[2] / "constraints.txt"
SERVER = ("nvidia-pytriton==0.7.0",)
# What llmforge/triton/backend/checks.py names, in the versions of the whole project; not so numpy, for this server's
# python backend was built for numpy 1.
SERVING = ("onnxruntime", "tokenizers", "jinja2", "llguidance")
NUMPY = "numpy==1.26.4"
CLIENT = ("tritonclient[grpc]==2.73.0", "protobuf==6.33.6", "grpcio==1.85.1")


# Load generator of NVIDIA's, of 1.2 GB: installed by the slow test that runs it.
AIPERF = ("aiperf==0.13.0",)


class CannotServe(Exception):
    """This machine cannot run the server; says why."""


@dataclass(frozen=True)
class TritonEnv:
    """The folder with the server and the environments."""

    folder: Path

    @property
    def server(self) -> Path:
        return self.folder / "server/pytriton/tritonserver/bin/tritonserver"

    @property
    def client(self) -> Path:
        return self.folder / "client/bin/python"

    @property
    def serving(self) -> Path:
        return self.folder / "serving/bin/python"

    def environment(self, serving: Path | None = None) -> dict[str, str]:
        """Variables of the server's process; the model runs in `serving`, an environment's folder."""
        environment = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "VIRTUAL"))}
        environment["PATH"] = f"{serving or self.folder / 'serving'}/bin{os.pathsep}{environment['PATH']}"
        libraries = (sysconfig.get_config_var("LIBDIR"), self.folder / "server/nvidia_pytriton.libs")
        environment["LD_LIBRARY_PATH"] = os.pathsep.join(map(str, libraries))
        return environment

    def options(self, shared_memory: str) -> list[str]:
        """Options that this server needs because it lies in an unusual place, is one of many, and has no GPU.

        `shared_memory` begins the names of what it shares with its models' processes.
        """
        return [
            f"--backend-directory={self.folder / 'backends'}",
            f"--cache-directory={self.server.parent.parent / 'caches'}",
            f"--backend-config=python,shm-region-prefix-name={shared_memory}",
            "--allow-gpu-metrics=false",
            "--pinned-memory-pool-byte-size=0",
        ]


def prepare() -> TritonEnv:
    """Install what is not there yet.

    Raises:
        CannotServe: it cannot be installed here.
    """
    python = f"{sys.version_info.major}.{sys.version_info.minor}"
    if sys.platform != "linux" or os.uname().machine != "x86_64":
        raise CannotServe(f"the server is built for Linux on x86_64, not {sys.platform} on {os.uname().machine}")
    library = Path(sysconfig.get_config_var("LIBDIR"), str(sysconfig.get_config_var("INSTSONAME")))
    if not sysconfig.get_config_var("Py_ENABLE_SHARED") or not library.exists():
        raise CannotServe(f"the server's python backend needs a shared libpython{python}; {sys.base_prefix} has none")
    folder = _folder(python)
    with _locked(folder):
        if not (folder / "ready").exists():
            _install(folder, python)
            (folder / "ready").touch()
    return TritonEnv(folder)


def prepare_aiperf(env: TritonEnv) -> Path:
    """Install aiperf where it is not there yet; return its program.

    Raises:
        CannotServe: it cannot be installed here.
    """
    folder = env.folder / "aiperf"
    with _locked(env.folder):
        if not (folder / "ready").exists():
            shutil.rmtree(folder, ignore_errors=True)
            _run([sys.executable, "-m", "venv", str(folder)])
            _pip(str(folder / "bin/python"), *AIPERF)
            (folder / "ready").touch()
    return folder / "bin/aiperf"


def _folder(python: str) -> Path:
    if named := os.environ.get("LLMFORGE_TRITON"):
        return Path(named).resolve()
    cache = Path(os.environ.get("LLMFORGE_TESTS_CACHE") or os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    pins = hashlib.sha256("\n".join((*SERVER, *_serving(), *CLIENT)).encode()).hexdigest()[:12]
    return cache / "llmforge" / f"triton-py{python}-{pins}"


def _serving() -> list[str]:
    """Give the serving packages with the versions that constraints.txt pins."""
    pins = [line for line in CONSTRAINTS.read_text(encoding="utf-8").splitlines() if "==" in line]
    pinned = {pin.partition("==")[0].lower(): pin for pin in pins}
    return [NUMPY, *(pinned[name] for name in SERVING)]


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[None]:
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "lock").open("w") as stream:
        fcntl.flock(stream, fcntl.LOCK_EX)
        yield


def _install(folder: Path, python: str) -> None:
    for name in ("server", "serving", "client", "backends"):
        shutil.rmtree(folder / name, ignore_errors=True)
    _pip(sys.executable, "--no-deps", "--target", str(folder / "server"), *SERVER)
    package = folder / "server/pytriton/tritonserver"
    stub = package / "python_backend_stubs" / python / "triton_python_backend_stub"
    if not stub.exists():
        raise CannotServe(f"the server's python backend knows no Python {python}")
    backend = folder / "backends/python"
    shutil.copytree(package / "backends/python", backend)
    shutil.copy2(stub, backend)
    for name, packages in (("serving", _serving()), ("client", CLIENT)):
        _run([sys.executable, "-m", "venv", str(folder / name)])
        _pip(str(folder / name / "bin/python"), *packages)


def _pip(python: str, *arguments: str) -> None:
    _run([python, "-m", "pip", "--disable-pip-version-check", "install", "--quiet", *arguments])


def _run(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise CannotServe(f"{' '.join(command)}: {done.stderr.strip()[-2000:]}")


if __name__ == "__main__":
    try:
        print(prepare().folder)
    except CannotServe as error:
        sys.exit(f"error: {error}")
