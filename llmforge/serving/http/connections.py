"""Connections of clients: how many there are, and how long one may take to ask for something.

uvicorn waits for ever for the head of a request, and for as many connections as come.
"""

from __future__ import annotations

import asyncio
import json
from typing import Any

from uvicorn.protocols.http.h11_impl import H11Protocol

from llmforge.base.errors import QueueFull, UsageError
from llmforge.serving.http.responses import RETRY_AFTER_S, error_body

HEAD_S = 10.0  # for the head of a request, from its first byte or the connection's beginning
MOST = 512  # connections; each takes a file, of which a process often has 1024


class Connection(H11Protocol):
    """One connection. Where there are too many, the one that has said nothing for the longest time makes room."""

    _head: asyncio.TimerHandle | None = None  # ends the wait for the head of a request

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Begin to wait for a request, or refuse to."""
        super().connection_made(transport)
        if len(self.connections) > MOST:
            silent = [each for each in self.connections if isinstance(each, Connection) and each._head is not None]
            if not silent:
                self._refuse(429, error_body(QueueFull(f"more than {MOST} connections are open")))
                return
            min(silent, key=lambda each: each._head.when() if each._head else 0.0)._too_slow()
        self._wait()

    def connection_lost(self, exc: Exception | None) -> None:
        """Wait no more."""
        self._wait_no_more()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Read on; the head of a request has come when there is something that answers it."""
        if self._head is None and not self._answering:
            self._wait()
        super().data_received(data)
        if self._answering:
            self._wait_no_more()

    @property
    def _answering(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    def _wait(self) -> None:
        self._head = self.loop.call_later(HEAD_S, self._too_slow)

    def _wait_no_more(self) -> None:
        if self._head is not None:
            self._head.cancel()
            self._head = None

    def _too_slow(self) -> None:
        if self._answering:
            return
        self._refuse(408, error_body(UsageError(f"no request came within {HEAD_S:g} s")))

    def _refuse(self, status: int, body: dict[str, Any]) -> None:
        self._wait_no_more()
        if not self.transport.is_closing():
            content = json.dumps(body).encode()
            head = f"HTTP/1.1 {status} \r\nContent-Type: application/json\r\nContent-Length: {len(content)}\r\n"
            if status == 429:
                head += f"Retry-After: {RETRY_AFTER_S}\r\n"
            self.transport.write(head.encode() + b"Connection: close\r\n\r\n" + content)
            self.transport.close()
