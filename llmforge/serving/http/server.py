"""Runs the application in a server of this process, until a signal or the engine's end."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import socket
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

import uvicorn
from starlette.applications import Starlette
from starlette.types import ASGIApp

from llmforge.base import signals, small_file
from llmforge.base.errors import EnvironmentLacks, InputError, Unavailable
from llmforge.serving.encoder_engine import EncoderEngine
from llmforge.serving.http.access import AccessPolicy, AccessRecord, AuthMiddleware, ServerState
from llmforge.serving.http.app import create_app
from llmforge.serving.http.connections import Connection
from llmforge.serving.http.encoder_app import create_encoder_app
from llmforge.serving.http.recording import Recorder
from llmforge.serving.http.telemetry import Telemetry
from llmforge.serving.interface import Serving

POLL_S = 0.1  # between two looks at the engine, and at what is left to answer
LAST_S = 1  # for what is left to send when all answers have ended
_TLS_HINT = "certificate and key are files of PEM; the key has no password"
IDLE_TIMEOUT_S = 30  # after which an idle connection is closed


@dataclass(frozen=True)
class Address:
    """Where to listen; port 0 lets the system choose a free one. `grace_s` bounds the wait for answers at the end.

    With `certificate` and `private_key`, files of PEM, connections are encrypted (TLS).
    """

    host: str = "127.0.0.1"
    port: int = 8000
    grace_s: int = 30
    certificate: Path | None = None
    private_key: Path | None = None


def run(
    engine: Serving | EncoderEngine,
    model: str,
    address: Address,
    announce: Callable[[str], None],
    policy: AccessPolicy | None = None,
    log: Callable[[AccessRecord], None] | None = None,
    telemetry: Telemetry | None = None,
    recorder: Recorder | None = None,
) -> None:
    """Serve `engine` until SIGHUP, SIGINT or SIGTERM, then finish what was asked before and close the engine.

    `announce` gets the server's URL once it listens, `log` every request that was answered, `telemetry` makes spans of
    them, `recorder` writes down those that have ended; both are closed. A second signal ends answers that are not
    complete.

    Raises:
        InputError: the certificate or its key cannot be used.
        EnvironmentLacks: the address cannot be listened on.
        Unavailable: the engine failed; every request in flight got the error.
    """
    try:
        state = ServerState(recorder=recorder)
        app = AuthMiddleware(_application(engine, model, state), policy or AccessPolicy(), state, log, telemetry)
        server = make_server(app, address)
        with _listen(address) as listening, _ended_by_signals(server, state):
            announce(_url(listening, encrypted=address.certificate is not None))
            died = asyncio.run(_serve(server, engine, listening, state, address.grace_s))
    finally:
        engine.close(drain=False)
        for each in (telemetry, recorder):
            if each is not None:
                each.close()
    if died:
        raise Unavailable("the engine failed and the server stopped", hint="see the log above for the cause")


def _application(engine: Serving | EncoderEngine, model: str, state: ServerState) -> Starlette:
    if isinstance(engine, EncoderEngine):
        return create_encoder_app(engine, model, state)
    return create_app(engine, model, state)


async def _serve(
    server: uvicorn.Server,
    engine: Serving | EncoderEngine,
    listening: socket.socket,
    state: ServerState,
    grace_s: float,
) -> bool:
    """Run the server until it has drained, or the engine dies; return whether that was it."""
    closed = False

    async def watch() -> None:
        nonlocal closed
        while engine.alive and not state.draining:
            await asyncio.sleep(POLL_S)
        end = asyncio.get_running_loop().time() + grace_s
        while engine.alive and state.active and asyncio.get_running_loop().time() < end:
            await asyncio.sleep(POLL_S)
        if engine.alive:
            closed = True
            # Answers that are not complete get their error now.
            await asyncio.to_thread(engine.close, drain=False)
        server.should_exit = True

    watching = asyncio.create_task(watch())
    try:
        await server.serve(sockets=[listening])
    finally:
        watching.cancel()
    return not (closed or engine.alive)


@contextlib.contextmanager
def _ended_by_signals(server: uvicorn.Server, state: ServerState) -> Iterator[None]:
    """Let signals end the server in order: it refuses new calls, and ends when it has answered the others."""

    def end(signal_number: int, frame: FrameType | None) -> None:
        server.should_exit = server.force_exit = state.draining  # at once, when it is the second one
        state.draining = True

    previous = {number: signal.signal(number, end) for number in signals.ending()}
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


class _UvicornServer(uvicorn.Server):
    """A server that leaves signals to who runs it: uvicorn's own handlers would stop listening at once."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Capture none."""
        yield


def make_server(app: ASGIApp, address: Address) -> uvicorn.Server:
    """Make the server of `app`; when it ends, it waits up to `LAST_S` for answers that clients have not read.

    Raises:
        InputError: the certificate or its key cannot be used.
    """
    for file in (address.certificate, address.private_key):
        if file is not None:
            small_file.open_regular(file, hint=_TLS_HINT).close()
    config = uvicorn.Config(
        app,
        http=Connection,
        lifespan="off",
        ws="none",
        log_config=None,
        access_log=False,
        timeout_keep_alive=IDLE_TIMEOUT_S,
        timeout_graceful_shutdown=LAST_S,
        server_header=False,
        ssl_certfile=address.certificate,
        ssl_keyfile=address.private_key,
    )
    try:
        config.load()
    except OSError as error:  # ssl.SSLError among them
        raise InputError(
            f"{address.certificate}, {address.private_key}: no certificate with its private key: "
            f"{error.strerror or error}",
            hint=_TLS_HINT,
        ) from error
    return _UvicornServer(config)


def _listen(address: Address) -> socket.socket:
    family = socket.AF_INET6 if ":" in address.host else socket.AF_INET
    try:
        return socket.create_server((address.host, address.port), family=family, backlog=2048)
    except OSError as error:
        raise EnvironmentLacks(
            f"cannot listen on {address.host} port {address.port}: {error.strerror or error}",
            hint="use --port 0 to pick a free port",
        ) from error


def _url(listening: socket.socket, *, encrypted: bool) -> str:
    host, port = listening.getsockname()[:2]
    name = f"[{host}]" if listening.family == socket.AF_INET6 else host
    return f"{'https' if encrypted else 'http'}://{name}:{port}"
