"""Nodes of a Ray cluster on this machine, each with caches of its own, and an S3 server that can be stopped.

A node may see another file system than the driver (a mount namespace, where this process may make one): paths that are
hidden are empty there, and `small` ones lie on a disk of a few megabytes.
"""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

ROOT = Path(__file__).parents[2]
SITE = Path(__file__).parent / "site"
# jsonschema imports it where it is installed, and it then makes a parser: 1.7 of the 2.6 CPU seconds that each of Ray's
# processes takes to begin, which must begin within 15 seconds.
SLOW_TO_IMPORT = "rfc3987_syntax"
BUCKET = "artifacts"
KEYS = {"AWS_ACCESS_KEY_ID": "farm", "AWS_SECRET_ACCESS_KEY": "secret", "AWS_DEFAULT_REGION": "us-east-1"}
RECIPE = """\
schema: 1
name: zoo
checkpoint: llama
target: cpu-avx2
engine: {max_context: 64, max_batch: 2}
passes: [fuse-norms, pack-qkv]
"""
MATRIX = """\
schema: 1
name: release
recipe: recipe.yaml
models: {llama: {checkpoint: llama}}
targets: {cpu-avx2: }
variants:
"""
_FREE = 3  # calls of moto's server that need no key: they make the first one
_START_S = 300  # 20 to 30 on a quiet machine with two cores
TRIALS = 5  # of a start: processes of Ray wait some seconds for one another, too few on a busy machine, and give up


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        return int(listening.getsockname()[1])


def has_namespaces() -> bool:
    """Whether this process may make mount namespaces."""
    try:
        return subprocess.run(["unshare", "-m", "true"], capture_output=True, check=False).returncode == 0
    except FileNotFoundError:
        return False


def environ(folder: Path, **more: str) -> dict[str, str]:
    """The environment of a machine whose files are in `folder`."""
    inherited = {
        name: value for name, value in os.environ.items() if not name.startswith(("AWS_", "LLMFORGE_", "RAY_"))
    }
    return {
        **inherited,
        "PYTHONPATH": paths(ROOT, *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))),
        "ABSENT_MODULES": SLOW_TO_IMPORT,
        "RAY_AUTH_MODE": "disabled",
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_raylet_start_wait_time_s": "60",
        "RAY_worker_niceness": "0",
        "HOME": str(folder),
        "XDG_CACHE_HOME": str(folder / "cache"),
        **more,
    }


def paths(*folders: Path | str) -> str:
    """The folders that a machine's Python finds modules in, first of all."""
    return os.pathsep.join(dict.fromkeys(map(str, (SITE, *folders))))


def until(what: Callable[[], object], seconds: float = 600) -> None:
    """Wait for something to hold."""
    limit = time.monotonic() + seconds
    while not what():
        assert time.monotonic() < limit
        time.sleep(0.1)


def output(process: subprocess.Popen[str], seconds: float) -> tuple[str, str]:
    """Wait for the end of a process, and return what it wrote; one that does not end is killed."""
    try:
        return process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        process.kill()
        stdout, stderr = process.communicate()
        raise AssertionError(f"no end within {seconds} s: {process.args}\n{stdout}\n{stderr}") from None


@dataclass
class Node:
    """One `ray start`, with all that it started."""

    name: str
    folder: Path
    process: subprocess.Popen[bytes]

    def kill(self) -> None:
        """End it as a power cut does."""
        for each in self._children():
            with contextlib.suppress(psutil.NoSuchProcess):
                each.kill()
        self.process.kill()
        self.process.wait()

    def builds(self) -> list[psutil.Process]:
        """The builds that run on it."""
        return self.processes("llmforge.farm.attached")

    def processes(self, title: str) -> list[psutil.Process]:
        """Those that are called so, such as actors of Ray."""
        return [each for each in self._children() if title in _command(each)]

    def _children(self) -> list[psutil.Process]:
        with contextlib.suppress(psutil.NoSuchProcess):
            return psutil.Process(self.process.pid).children(recursive=True)
        return []


def _command(process: psutil.Process) -> str:
    with contextlib.suppress(psutil.NoSuchProcess):
        return " ".join(process.cmdline())
    return ""


@dataclass
class Nodes:
    """A cluster: a head, and nodes that joined it."""

    folder: Path
    port: int = field(default_factory=free_port)
    nodes: dict[str, Node] = field(default_factory=dict)

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    def start(
        self, name: str, *, cpus: int = 1, hidden: tuple[Path, ...] = (), small: tuple[Path, ...] = (), **env: str
    ) -> Node:
        """Start a node, the first one as the head, and wait until it is up: two at once choose the same sockets."""
        folder = self.folder / name
        folder.mkdir(parents=True, exist_ok=True)
        where = ["--address", self.address]
        if not self.nodes:
            where = ["--head", "--port", str(self.port), "--include-dashboard=false", "--temp-dir", str(folder / "r")]
        command = [
            sys.executable, "-m", "ray.scripts.scripts", "start", "--block", *where, "--node-name", name, "--num-cpus",
            str(cpus), "--object-store-memory", "80000000", "--node-ip-address", "127.0.0.1", "--memory", "6000000000",
        ]  # fmt: skip
        if hidden or small:
            (folder / "empty").mkdir(exist_ok=True)
            mounts = [f"mount --bind {folder / 'empty'} {path}" for path in hidden]
            mounts += [f"mount -t tmpfs -o size=4m tmpfs {path}" for path in small]
            command = ["unshare", "-m", "sh", "-ec", "; ".join([*mounts, f"exec {shlex.join(command)}"])]
        for _ in range(TRIALS):
            node = self._started(name, command, environ(folder, **env))
            if node is not None:
                self.nodes[name] = node
                return node
        raise AssertionError((folder / "log").read_text())

    def _started(self, name: str, command: list[str], env: Mapping[str, str]) -> Node | None:
        folder = self.folder / name
        with (folder / "log").open("wb") as log:
            process = subprocess.Popen(command, env=env, stdout=log, stderr=subprocess.STDOUT, start_new_session=True)
        node, until = Node(name, folder, process), time.monotonic() + _START_S
        while process.poll() is None and time.monotonic() < until:
            if b"Ray runtime started" in (folder / "log").read_bytes():
                return node
            time.sleep(0.2)
        node.kill()
        return None

    def builds(self) -> list[psutil.Process]:
        """The builds that run on any node."""
        return [each for node in self.nodes.values() for each in node.builds()]

    def processes(self, title: str) -> list[psutil.Process]:
        """The processes on any node that are called so."""
        return [each for node in self.nodes.values() for each in node.processes(title)]

    def drop(self, name: str) -> None:
        """Kill a node, and forget it."""
        self.nodes.pop(name).kill()

    def close(self) -> None:
        for node in reversed(self.nodes.values()):
            node.kill()


@dataclass
class S3:
    """moto's server: an S3 with one key, that forgets everything when it is killed."""

    folder: Path
    port: int = field(default_factory=free_port)
    process: subprocess.Popen[bytes] | None = None
    keys: dict[str, str] = field(default_factory=lambda: dict(KEYS))

    def __post_init__(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        with (self.folder / "moto.log").open("wb") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "tests.farm.s3_server", "-H", "127.0.0.1", "-p", str(self.port)],
                cwd=ROOT,
                env={**os.environ, "INITIAL_NO_AUTH_ACTION_COUNT": str(_FREE)},
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        until = time.monotonic() + _START_S
        while True:
            with contextlib.suppress(OSError):
                socket.create_connection(("127.0.0.1", self.port), 1).close()
                break
            assert self.process.poll() is None
            assert time.monotonic() < until
            time.sleep(0.2)
        self._make_key()
        self.system.mkdir(BUCKET)

    def _make_key(self) -> None:
        from botocore.session import Session

        iam = Session().create_client(
            "iam", "us-east-1", endpoint_url=self.url, aws_access_key_id="none", aws_secret_access_key="none"
        )
        everything = {"Effect": "Allow", "Action": "*", "Resource": "*"}
        policy = json.dumps({"Version": "2012-10-17", "Statement": [everything]})
        iam.create_user(UserName="farm")
        iam.put_user_policy(UserName="farm", PolicyName="all", PolicyDocument=policy)
        made = iam.create_access_key(UserName="farm")["AccessKey"]
        self.keys |= {"AWS_ACCESS_KEY_ID": made["AccessKeyId"], "AWS_SECRET_ACCESS_KEY": made["SecretAccessKey"]}

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def env(self) -> dict[str, str]:
        """What a machine that may use it has in its environment."""
        return {**self.keys, "AWS_ENDPOINT_URL": self.url}

    @property
    def system(self) -> Any:
        import s3fs

        return s3fs.S3FileSystem(
            key=self.keys["AWS_ACCESS_KEY_ID"], secret=self.keys["AWS_SECRET_ACCESS_KEY"], use_listings_cache=False,
            endpoint_url=self.url, skip_instance_cache=True,
        )  # fmt: skip

    def archives(self, folder: str = "store") -> list[str]:
        """The archives below a folder of the bucket: NAME/VERSION.tar."""
        found = self.system.find(f"{BUCKET}/{folder}")
        return sorted(each.removeprefix(f"{BUCKET}/{folder}/") for each in found if each.endswith(".tar"))

    @contextlib.contextmanager
    def away(self) -> Iterator[None]:
        """Let it not answer for a while."""
        assert self.process is not None
        self.process.send_signal(signal.SIGSTOP)
        try:
            yield
        finally:
            self.process.send_signal(signal.SIGCONT)

    def kill(self) -> None:
        assert self.process is not None
        self.process.kill()
        self.process.wait()


@dataclass(frozen=True)
class Driver:
    """The machine that gives the commands."""

    folder: Path
    env: Mapping[str, str]

    def begin(self, *arguments: object) -> subprocess.Popen[str]:
        """Start a command."""
        return subprocess.Popen(
            [sys.executable, "-m", "llmforge", *map(str, arguments)], text=True, cwd=self.folder,
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environ(self.folder, **self.env),
        )  # fmt: skip

    def end(self, process: subprocess.Popen[str], seconds: float = 600) -> Done:
        """Wait for a command's end."""
        stdout, stderr = output(process, seconds)
        return Done(process.returncode, stdout, stderr)

    def run(self, *arguments: object, seconds: float = 600) -> Done:
        return self.end(self.begin(*arguments), seconds)


@dataclass(frozen=True)
class Done:
    """How a command ended."""

    code: int
    stdout: str
    stderr: str

    @property
    def data(self) -> dict[str, Any]:
        """What it printed as JSON, and nothing else."""
        found: dict[str, Any] = json.loads(self.stdout)
        return found
