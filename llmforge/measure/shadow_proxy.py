"""An HTTP server before another one: it passes everything on as it is, and offers copies of completions to a mirror."""

from __future__ import annotations

import http.client
import json
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import urlsplit

from llmforge.base.errors import EnvironmentLacks
from llmforge.base.http_server import HttpServer
from llmforge.measure.shadow import COPIED, Exchange, Mirror, ShadowRequest

MOST_BODY = 64 << 20  # bytes
IDLE_S = 30.0  # after which an idle connection is closed
GRACE_S = 30.0  # for answers in flight at the end
# What belongs to one connection (RFC 9110, section 7.6.1), and what the client library writes itself.
_OF_A_CONNECTION = frozenset(
    {"connection", "keep-alive", "proxy-authenticate", "proxy-authorization", "proxy-connection", "te", "trailer",
     "transfer-encoding", "upgrade"}
)  # fmt: skip
_WRITTEN_ANEW = frozenset({"host", "content-length", "accept-encoding"})


class ShadowProxy(ThreadingHTTPServer):
    """Listens, and passes on; a thread for each connection."""

    daemon_threads = True
    request_queue_size = 512

    def __init__(self, address: tuple[str, int], server: HttpServer, mirror: Mirror, timeout_s: float) -> None:
        self.server, self.mirror, self.timeout_s = server, mirror, timeout_s
        self.address_family = socket.AF_INET6 if ":" in address[0] else socket.AF_INET
        self.active = 0
        self.changed = threading.Condition()
        super().__init__(address, _Forward)


@contextmanager
def listening(
    address: tuple[str, int], server: HttpServer, mirror: Mirror, *, timeout_s: float
) -> Iterator[ShadowProxy]:
    """Pass requests at an address on to `server`, until the block ends and answers in flight are given.

    Raises:
        EnvironmentLacks: the address cannot be listened on.
    """
    try:
        proxy = ShadowProxy(address, server, mirror, timeout_s)
    except OSError as error:
        raise EnvironmentLacks(
            f"cannot listen on {address[0]} port {address[1]}: {error.strerror or error}",
            hint="use another port: --listen PORT",
        ) from error
    threading.Thread(target=proxy.serve_forever, args=(0.05,), name="llmforge-proxy", daemon=True).start()
    try:
        yield proxy
    finally:
        proxy.shutdown()
        proxy.server_close()
        with proxy.changed:
            proxy.changed.wait_for(lambda: proxy.active == 0, GRACE_S)


class _Forward(BaseHTTPRequestHandler):
    """One connection of a client."""

    server: ShadowProxy
    protocol_version = "HTTP/1.1"
    timeout = IDLE_S
    disable_nagle_algorithm = True

    def log_message(self, format: str, *args: object) -> None:
        """Say nothing."""

    def _forward(self) -> None:
        with self.server.changed:
            self.server.active += 1
        try:
            self._pass_on()
        except OSError:  # the client left
            self.close_connection = True
        finally:
            with self.server.changed:
                self.server.active -= 1
                self.server.changed.notify_all()

    do_GET = do_POST = do_PUT = do_DELETE = do_PATCH = do_OPTIONS = do_HEAD = _forward  # noqa: N815

    def _pass_on(self) -> None:
        length = self.headers.get("Content-Length", "0")
        if "chunked" in self.headers.get("Transfer-Encoding", "") or not length.isdigit():
            self._say(411, "a body must say its length")
            return
        if int(length) > MOST_BODY:
            self._say(413, f"the body is larger than {MOST_BODY:,} bytes")
            return
        headers = {
            name: value for name, value in self.headers.items() if name.lower() not in _OF_A_CONNECTION | _WRITTEN_ANEW
        }
        headers["Accept-Encoding"] = "identity"  # an answer is to be read here, too
        request = ShadowRequest(self.path, self.rfile.read(int(length)), headers, self.command)
        exchange = Exchange(self.server.server, request, self.server.timeout_s)
        try:
            response = exchange.open()
        except (OSError, http.client.HTTPException) as error:
            self._offer(request, exchange)
            self._say(502, f"{self.server.server.url}: no answer: {error}")
            return
        try:
            self._answer(response, exchange)
        except http.client.HTTPException:  # it breaks off: so does what the client gets
            self.close_connection = True
        finally:
            exchange.close()
            self._offer(request, exchange)

    def _answer(self, response: http.client.HTTPResponse, exchange: Exchange) -> None:
        """Write the answer as it comes; with no length, in chunks."""
        self.send_response_only(response.status, response.reason)
        for name, value in response.getheaders():
            if name.lower() not in _OF_A_CONNECTION:
                self.send_header(name, value)
        bare = self.command == "HEAD" or response.status in (204, 304)
        chunked = not bare and response.getheader("Content-Length") is None
        if chunked:
            self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        for piece in exchange.pieces():
            self.wfile.write(b"%x\r\n%b\r\n" % (len(piece), piece) if chunked else piece)
        if chunked:
            self.wfile.write(b"0\r\n\r\n")

    def _offer(self, request: ShadowRequest, exchange: Exchange) -> None:
        """Offer a completion that the server answered; a client that left before leaves nothing to compare."""
        path = urlsplit(request.path).path
        if request.method != "POST" or path not in COPIED or not exchange.complete:
            return
        self.server.mirror.offer(request, exchange)

    def _say(self, status: int, message: str) -> None:
        body = json.dumps({"error": {"message": message, "type": "proxy_error"}}).encode()
        self.send_response_only(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Connection", "close")
        self.end_headers()
        self.wfile.write(body)
        self.close_connection = True
