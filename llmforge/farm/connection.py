"""Connections to Ray: to a cluster that is there, or one on this machine that lives as long as the command.

What Ray prints, the signals that it takes and the time that it waits are this program's own again.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import shutil
import signal
import socket
import sys
import tempfile
import threading
import zipfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from llmforge.base import extras, process, signals
from llmforge.base.errors import EnvironmentLacks, UsageError
from llmforge.farm import placing
from llmforge.farm.cluster import Farm, first_line

_STORE_BYTES = 100_000_000  # Ray takes no less than 75 MB
_PASSED_ON = "LLMFORGE_CACHE", "LLMFORGE_CACHE_BYTES"  # folders of one machine are those of all
_TOKENS = "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"  # variables that name Ray's token
_SHORT = Path("/tmp")  # sockets of Ray have paths of 107 characters at most
_COMMON: Mapping[str, Any] = {"log_to_driver": False, "logging_level": logging.ERROR}
CONNECT_S = 10.0  # in which the head of a cluster must take a connection
_END_S = 10.0  # in which a connection to a head that was lost must end
_ADDRESS = re.compile(r"(?:[a-z]+://)?\[?(?P<host>[^\[\]/]+?)\]?:(?P<port>\d+)")


@contextmanager
def opened(
    address: str | None = None, *, cpus: int | None = None, store_bytes: int = _STORE_BYTES, wheel: Path | None = None
) -> Iterator[Farm]:
    """Connect to the cluster at `address`, or start Ray on this machine, and end it with the block.

    One on this machine has `cpus`, and an object store of `store_bytes`. Workers of the cluster run the llmforge of
    `wheel`, else the one that their node has.

    Whatever the block leaves running is cancelled.

    Raises:
        EnvironmentLacks: Ray is not installed, or does not start.
        UsageError: there is no cluster at the address.
    """
    if (lack := extras.trouble("ray")) is not None:
        raise lack
    process.prepare()  # what this process has in its environment, local workers inherit
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_worker_niceness", "0")  # builds are measured; Ray would run its workers at 15
    os.environ.setdefault("RAY_raylet_start_wait_time_s", "120")  # Ray's own 30 s are too few on a busy machine
    if address is not None:
        os.environ.setdefault("RAY_NUM_REDIS_GET_RETRIES", "1")  # Ray's own 20 take minutes; a head is there or not
        if any(name in os.environ for name in _TOKENS) or (Path.home() / ".ray" / "auth_token").is_file():
            os.environ.setdefault("RAY_AUTH_MODE", "token")  # which `ray start --head` asks for, and `ray.init` lacks
    import ray

    folder = None if address else tempfile.mkdtemp(prefix="llmforge-ray-", dir=_SHORT if _SHORT.is_dir() else None)
    try:
        with _output_apart():
            with _own_signals():
                if address is None:
                    _start(ray, folder, cpus, store_bytes)
                else:
                    _connect(ray, address, wheel)
            farm = Farm(ray, address)
            try:
                yield farm
            finally:
                _end(farm)
    finally:
        if folder is not None:
            shutil.rmtree(folder, ignore_errors=True)  # a process of Ray may still write its log


def _start(ray: Any, folder: str | None, cpus: int | None, store_bytes: int) -> None:
    try:
        ray.init(**_COMMON, **_local(cpus, store_bytes), _temp_dir=folder)
    except Exception as error:
        raise EnvironmentLacks(f"Ray does not start: {first_line(error)}") from error


def _connect(ray: Any, address: str, wheel: Path | None) -> None:
    environment = {name: os.environ[name] for name in _PASSED_ON if name in os.environ}
    runtime: dict[str, Any] = {"env_vars": environment} if environment else {}
    with tempfile.TemporaryDirectory() as folder:
        if wheel is not None:
            runtime["py_modules"] = _unpacked(wheel, Path(folder))
        try:
            if (found := _ADDRESS.fullmatch(address)) is not None:
                socket.create_connection((found["host"], int(found["port"])), timeout=CONNECT_S).close()
            ray.init(address, **_COMMON, runtime_env=runtime or None)
        except Exception as error:
            raise UsageError(
                f"no Ray cluster at {address}: {first_line(error)}",
                hint="`ray start --head` starts one and prints its address; leave --address out for this machine",
            ) from error


def _unpacked(wheel: Path, folder: Path) -> list[str]:
    """Unpack a wheel into `folder`, and list what Ray is to put in front of its workers' paths.

    Of a wheel itself each node would install what it requires, from a registry, and besides what is there.

    Raises:
        UsageError: it is no wheel of llmforge.
    """
    try:
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(folder)
    except (OSError, zipfile.BadZipFile) as error:
        raise UsageError(f"{wheel}: cannot be read: {error}", hint="give the wheel of this llmforge") from error
    if not (folder / "llmforge" / "__init__.py").is_file():
        raise UsageError(f"{wheel}: is no wheel of llmforge", hint="give the wheel of this llmforge")
    return [str(each) for each in sorted(folder.iterdir()) if each.is_dir()]  # the package, and its metadata


def _end(farm: Farm) -> None:
    """Cancel what runs, and disconnect; a head that was lost is not waited for."""

    def end() -> None:
        if not farm.lost:
            farm.cancel()
        if farm.ray.is_initialized():
            farm.ray.shutdown()

    if not farm.lost:
        end()
        return
    ending = threading.Thread(target=end, name="end of Ray", daemon=True)
    ending.start()
    ending.join(_END_S)


@contextmanager
def _output_apart() -> Iterator[None]:
    """Let what Ray prints go to standard error: standard output is for data."""
    with contextlib.redirect_stdout(sys.stderr):
        yield


def _local(cpus: int | None, store_bytes: int) -> Mapping[str, Any]:
    from llmforge import targets
    from llmforge.measure import gpus

    found = [gpu.target for gpu in gpus.find()]
    return {
        "address": "local",
        "num_cpus": cpus,
        "object_store_memory": store_bytes,
        "include_dashboard": False,
        "resources": placing.here(targets.detect(), [name for name in found if name is not None]),
    }


@contextmanager
def _own_signals() -> Iterator[None]:
    """Keep this program's way to end: Ray sets a handler for SIGTERM that calls sys.exit."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.getsignal(number) for number in signals.ENDING}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
