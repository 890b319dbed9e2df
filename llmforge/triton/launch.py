"""Starts a Triton that is installed on this machine."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from llmforge.base.errors import EnvironmentLacks

PROGRAM = "tritonserver"


@dataclass(frozen=True)
class Ports:
    """Where the server listens."""

    host: str = "127.0.0.1"
    http: int = 8000
    grpc: int = 8001
    metrics: int = 8002


def find(server: Path | None = None) -> Path:
    """Find the server's binary: `server`, else on PATH.

    Raises:
        EnvironmentLacks: there is none.
    """
    # A path with a folder is not looked up on PATH, where another program may have the name.
    found = shutil.which(PROGRAM if server is None else str(server.absolute()))
    if found is None:
        raise EnvironmentLacks(
            f"{server}: not an executable" if server is not None else f"no {PROGRAM} is on PATH",
            hint="set --server, or use NVIDIA's container; see docs/triton.md",
        )
    return Path(found)


def command(server: Path, repository: Path, ports: Ports, extra: Sequence[str] = ()) -> list[str]:
    """Make the server's command line: this repository, nothing loaded or changed from outside."""
    return [
        str(server),
        f"--model-repository={repository}",
        "--model-control-mode=none",
        "--disable-auto-complete-config",
        f"--http-address={ports.host}",
        f"--http-port={ports.http}",
        f"--grpc-address={ports.host}",
        f"--grpc-port={ports.grpc}",
        f"--metrics-address={ports.host}",
        f"--metrics-port={ports.metrics}",
        *extra,
    ]
