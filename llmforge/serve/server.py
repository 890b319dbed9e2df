"""Runs the application in a server of this process, until a signal or the engine's end."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import socket
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import FrameType

import uvicorn
from starlette.applications import Starlette

from llmforge.base.errors import EnvironmentLacks, Unavailable
from llmforge.runtime.serving.interface import Serving
from llmforge.serve.app import create_app
from llmforge.serve.connections import Connection

ALIVE_POLL_S = 0.5  # between two looks at the engine
IDLE_TIMEOUT_S = 30  # after which an idle connection is closed


@dataclass(frozen=True)
class Address:
    """Where to listen; port 0 lets the system choose a free one. `grace_s` bounds the wait for answers at the end."""

    host: str = "127.0.0.1"
    port: int = 8000
    grace_s: int = 30


def run(engine: Serving, model: str, address: Address, announce: Callable[[str], None]) -> None:
    """Serve `engine` until SIGINT or SIGTERM, then finish what was asked before and close the engine.

    `announce` gets the server's URL once it listens.

    Raises:
        EnvironmentLacks: the address cannot be listened on.
        Unavailable: the engine failed; every request in flight got the error.
    """
    try:
        with _listen(address) as listening:
            server = make_server(create_app(engine, model), address.grace_s)
            with _ended_by_signals(server):
                announce(_url(listening))
                asyncio.run(_serve(server, engine, listening))
        died = not engine.alive
    finally:
        engine.close(drain=False)
    if died:
        raise Unavailable("the engine failed and the server stopped", hint="see the log above for the cause")


async def _serve(server: uvicorn.Server, engine: Serving, listening: socket.socket) -> None:
    """Run the server until it is ended, or the engine dies."""

    async def watch() -> None:
        while engine.alive:
            await asyncio.sleep(ALIVE_POLL_S)
        server.should_exit = True

    watching = asyncio.create_task(watch())
    try:
        await server.serve(sockets=[listening])
    finally:
        watching.cancel()


@contextlib.contextmanager
def _ended_by_signals(server: uvicorn.Server) -> Iterator[None]:
    """Let SIGINT and SIGTERM end the server in order.

    uvicorn has handlers of its own while it runs, and raises what it was ended by once more afterwards: by default
    that would kill this process, whose end was asked for and is no error.
    """

    def end(signal_number: int, frame: FrameType | None) -> None:
        server.should_exit = True

    previous = {number: signal.signal(number, end) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


def make_server(app: Starlette, grace_s: int) -> uvicorn.Server:
    """Make the server of `app`; when it ends, it waits up to `grace_s` seconds for answers that are being made."""
    config = uvicorn.Config(
        app,
        http=Connection,
        lifespan="off",
        ws="none",
        log_config=None,
        access_log=False,
        timeout_keep_alive=IDLE_TIMEOUT_S,
        timeout_graceful_shutdown=grace_s,
        server_header=False,
    )
    return uvicorn.Server(config)


def _listen(address: Address) -> socket.socket:
    family = socket.AF_INET6 if ":" in address.host else socket.AF_INET
    try:
        return socket.create_server((address.host, address.port), family=family, backlog=2048)
    except OSError as error:
        raise EnvironmentLacks(
            f"cannot listen on {address.host} port {address.port}: {error.strerror or error}",
            hint="use --port 0 to pick a free port",
        ) from error


def _url(listening: socket.socket) -> str:
    host, port = listening.getsockname()[:2]
    return f"http://[{host}]:{port}" if listening.family == socket.AF_INET6 else f"http://{host}:{port}"
