"""Starts a real Triton on free ports of the loopback, and talks to it."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from . import triton_env
from .triton_env import CannotServe, TritonEnv

CLIENT = Path(__file__).with_name("triton_client.py")
START_S = 60.0
# Twice the time between reports (llmforge/triton/backend/metrics.py, which nothing but the server can import).
REPORTS_S = 1.0
_SAMPLE = re.compile(r"(?P<name>\w+)\{(?P<labels>[^}]*)\} (?P<value>\S+)")


def environment_or_skip() -> TritonEnv:
    """Prepare the server, or skip the test with the reason; under CI, where it has to run, fail."""
    try:
        return triton_env.prepare()
    except CannotServe as error:
        if os.environ.get("CI"):
            raise
        pytest.skip(f"no Triton here: {error}")


@dataclass(frozen=True)
class Server:
    """A running server."""

    env: TritonEnv
    process: subprocess.Popen[bytes]
    log: Path
    http: int
    grpc: int
    metrics_port: int
    shared_memory: str  # begins the names of its files in /dev/shm

    def request(self, path: str, body: Mapping[str, Any] | None = None, *, port: int | None = None) -> Reply:
        """GET, or POST a JSON body; the whole reply."""
        with self.open(path, body, port=port) as response:
            assert response is not None
            return Reply(response.status, response.read().decode())

    @contextlib.contextmanager
    def open(
        self, path: str, body: Mapping[str, Any] | None = None, *, port: int | None = None, wait: bool = True
    ) -> Iterator[http.client.HTTPResponse | None]:
        """GET, or POST a JSON body; leaving the block closes the connection, whatever has been read.

        Without `wait` the response, which has not come yet, is None.
        """
        connection = http.client.HTTPConnection("127.0.0.1", port or self.http, timeout=START_S)
        try:
            connection.request("GET" if body is None else "POST", path, None if body is None else json.dumps(body))
            yield connection.getresponse() if wait else None
        finally:
            connection.close()

    def generate(self, model: str, **fields: Any) -> Reply:
        """Ask for one response."""
        return self.request(f"/v2/models/{model}/generate", fields)

    def generate_stream(self, model: str, **fields: Any) -> list[dict[str, Any]]:
        """Ask for a stream, and read all of it."""
        reply = self.request(f"/v2/models/{model}/generate_stream", {"stream": True, **fields})
        return [json.loads(line.removeprefix("data: ")) for line in reply.text.splitlines() if line]

    def ask(self, model: str, *requests: Mapping[str, Any]) -> list[dict[str, Any]]:
        """Send requests at once through NVIDIA's gRPC client (tests/servers/triton_client.py)."""
        job = {"url": f"127.0.0.1:{self.grpc}", "model": model, "requests": requests}
        return client(self.env, job)

    def metrics(self, model: str) -> dict[str, float]:
        """Scrape what the server says of a model; a label `finish_reason` or `le` stands behind the name."""
        found: dict[str, float] = {}
        for match in _SAMPLE.finditer(self.request("/metrics", port=self.metrics_port).text):
            labels = dict(re.findall(r'(\w+)="([^"]*)"', match["labels"]))
            extra = labels.get("finish_reason") or labels.get("le")
            if labels.get("model") == model:
                found[match["name"] + (f":{extra}" if extra else "")] = float(match["value"])
        return found

    def settled(self, model: str) -> dict[str, float]:
        """Give the metrics after the last report of what happened so far."""
        time.sleep(REPORTS_S)
        return self.metrics(model)

    def wait_for(self, model: str, timeout_s: float = 10.0, **wanted: float) -> float:
        """Wait until the metrics are as wanted (names without their prefix); return the seconds it took."""
        began = time.monotonic()
        while True:
            found = {name: self.metrics(model).get(f"llmforge_{name}", 0.0) for name in wanted}
            if found == wanted:
                return time.monotonic() - began
            assert time.monotonic() - began < timeout_s, f"{found}, wanted {wanted}"
            time.sleep(0.05)

    def shared_files(self) -> list[Path]:
        """List what it shares with its models' processes."""
        return list(Path("/dev/shm").glob(f"{self.shared_memory}*"))

    def stop(self, timeout_s: float = 60.0) -> int:
        """Send SIGTERM; return the exit status."""
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(timeout_s)


@dataclass(frozen=True)
class Reply:
    """Status and body of an HTTP response."""

    status: int
    text: str

    @property
    def json(self) -> Any:
        return json.loads(self.text)


def client(env: TritonEnv, job: Mapping[str, Any]) -> Any:
    """Run tests/servers/triton_client.py."""
    done = subprocess.run([env.client, CLIENT], input=json.dumps(job), capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@contextlib.contextmanager
def launched(
    env: TritonEnv,
    artifact: Path,
    repository: Path,
    *server_options: str,
    options: Sequence[str] = (),
    serving: Path | None = None,
    ready: bool = True,
) -> Iterator[Server]:
    """Run `llmforge triton ARTIFACT -o REPOSITORY --launch`, and wait until the server is ready, or has ended.

    `options` are those of `llmforge triton`. The models run in the environment `serving`, else the usual one.
    """
    ports = free_ports(3)
    names = ("--http-port", "--grpc-port", "--metrics-port")
    # Triton's python backend lets models import from the server's working directory, which is not to be this checkout.
    program = f"import os; from llmforge.cli import main; os.chdir({str(repository.parent)!r}); main()"
    command: list[str | Path] = [sys.executable, "-c", program, "triton", artifact]
    command += ["-o", repository, "--launch", "--server", env.server, *options]
    command += [word for name, port in zip(names, ports, strict=True) for word in (name, str(port))]
    log = repository.parent / f"{repository.name}.log"
    shared_memory = f"llmforge{os.getpid()}x{time.monotonic_ns()}"
    with log.open("wb") as stream:
        process = subprocess.Popen(
            [*command, "--", *env.options(shared_memory), *server_options],
            stdout=stream,
            stderr=stream,
            env=env.environment(serving),
        )
    server = Server(env, process, log, *ports, shared_memory)
    try:
        _wait(server, ready=ready)
        yield server
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        for left in server.shared_files():  # by a server that crashed
            left.unlink()


def _wait(server: Server, *, ready: bool) -> None:
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline:
        if server.process.poll() is not None:
            assert not ready, server.log.read_text()
            return
        with contextlib.suppress(OSError, http.client.HTTPException):
            # Metrics are served last.
            statuses = [
                server.request("/v2/health/ready").status,
                server.request("/metrics", port=server.metrics_port).status,
            ]
            if statuses == [200, 200]:
                assert ready, "the server is ready, and should have refused"
                return
        time.sleep(0.1)
    raise AssertionError(f"nothing after {START_S} s: {server.log.read_text()}")


def free_ports(count: int) -> Sequence[int]:
    """Find ports that nobody listens on."""
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]
