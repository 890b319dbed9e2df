"""Checks that an environment can serve, before anything is imported that it may lack.

This module imports the standard library and `llmforge.base.errors` alone, for it runs first.
"""

from __future__ import annotations

import importlib.util
import re
import sys
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path

from llmforge.base.errors import EnvironmentLacks, VersionMismatch

PYTHON = (3, 11)
# Import name → oldest version that serves; ONNX Runtime's is the artifact's own business (engine/runtime.json).
NEEDED: Mapping[str, str | None] = {"jinja2": "3.1.6", "numpy": "1.26", "onnxruntime": None, "tokenizers": "0.22"}
# Needed by requests that ask for it; as pyproject.toml has it.
OPTIONAL = ("llguidance>=1.9,<2",)
# pybind11 2.12 and newer name the module `numpy._core`, which numpy 2 has; older ones read the fields of arrays where
# numpy 1 kept them, and take every array of numpy 2 for 0 bytes. Triton 24.11 is the first with the newer one.
KNOWS_NUMPY_2 = b"numpy._core"
STUB = Path("/proc/self/exe")  # the process that a python model runs in: triton_python_backend_stub


def environment() -> None:
    """Refuse a Python that is too old, and packages that are missing or too old.

    Raises:
        EnvironmentLacks: what is missing.
        VersionMismatch: what is too old.
    """
    if sys.version_info < PYTHON:
        raise VersionMismatch(
            f"Python {'.'.join(map(str, sys.version_info[:2]))} runs this model, which needs "
            f"{'.'.join(map(str, PYTHON))} or newer",
            hint="use a newer Triton, or name an environment in the parameter EXECUTION_ENV_PATH of config.pbtxt",
        )
    if missing := [name for name in NEEDED if importlib.util.find_spec(name) is None]:
        raise EnvironmentLacks(
            f"the environment of this model ({sys.prefix}) has no {', '.join(missing)}",
            hint="pip install -r requirements.txt (next to model.py)",
        )
    for name, oldest in NEEDED.items():
        if oldest is not None and _numbers(found := metadata.version(name)) < _numbers(oldest):
            raise VersionMismatch(
                f"{name} {found} is installed; this model needs {oldest} or newer",
                hint="pip install -r requirements.txt (next to model.py)",
            )


def numpy_fits(numpy_version: str, stub: Path = STUB) -> None:
    """Refuse numpy 2 in a backend whose answers would silently be empty; `stub` is the binary of that backend.

    Raises:
        VersionMismatch: the backend was built for numpy 1 alone.
    """
    if _numbers(numpy_version) >= (2,) and KNOWS_NUMPY_2 not in stub.read_bytes():
        raise VersionMismatch(
            f"numpy {numpy_version} is installed, and the python backend of this Triton was built for numpy 1: every "
            "answer would be empty",
            hint="pip install 'numpy<2', or use Triton 24.11 or newer",
        )


def _numbers(version: str) -> tuple[int, ...]:
    """Read the leading numbers of a version: "1.26.4rc1" is (1, 26, 4)."""
    match = re.match(r"\d+(\.\d+)*", version)
    return tuple(int(part) for part in match[0].split(".")) if match else ()
