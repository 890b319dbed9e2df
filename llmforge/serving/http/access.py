"""Access to the server: API keys, names that this server is reached by, and web pages that may ask.

A page of any site can send requests to a server on loopback, and can make a name of its own mean 127.0.0.1 (DNS
rebinding): https://fetch.spec.whatwg.org/#cors-protocol, RFC 9110, sections 7.2 and 11.6.1.
"""

from __future__ import annotations

import hmac
import ipaddress
import re
import secrets
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from starlette.datastructures import Headers, MutableHeaders
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from llmforge.base.errors import UsageError
from llmforge.serving.http.limits import RATE_HEADERS, ApiKey, Client
from llmforge.serving.http.recording import Recorder
from llmforge.serving.http.responses import error_body
from llmforge.serving.http.telemetry import UNTRACED, RequestSpan, Telemetry

OPEN = frozenset({"/health", "/ready"})  # what probes ask for, who have no key
LOOPBACK = frozenset({"localhost", "127.0.0.1", "[::1]"})

_REQUEST_ID = re.compile(r"[\x21-\x7e]{1,128}")


@dataclass(frozen=True)
class AccessPolicy:
    """Who may ask.

    Without `keys` everybody may. `hosts` are the names in `Host` headers that are this server; None: any. `origins` are
    the web pages that may ask from a browser, as `https://name:port`; "*": any.
    """

    keys: tuple[ApiKey, ...] = ()
    hosts: frozenset[str] | None = None
    origins: tuple[str, ...] = ()

    @classmethod
    def of(cls, host: str, keys: Sequence[ApiKey], hosts: Sequence[str], origins: Sequence[str]) -> AccessPolicy:
        """Make those of a server that listens on `host`: on loopback it is reached by loopback's names alone."""
        known = frozenset(hosts) | LOOPBACK if hosts or is_loopback(host) else None
        return cls(tuple(keys), known, tuple(origins))


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches an address to listen on."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


@dataclass(eq=False)
class ServerState:
    """Whether the server takes new calls, and how many it is answering, of whom; used in the event loop alone."""

    draining: bool = False
    active: int = 0
    clients: Sequence[Client] = ()  # one of each key
    recorder: Recorder | None = None  # of finished answers


class AuthMiddleware:
    """Refuses who may not ask, gives each request an id (`X-Request-Id`), and tells of those that are done.

    Args:
        app: what answers.
        policy: who may ask.
        state: counts what is being answered.
        log: gets a request's id, client, method, path, status and duration in s, when its answer is sent.
        telemetry: makes a span of each request.
    """

    def __init__(
        self,
        app: ASGIApp,
        policy: AccessPolicy,
        state: ServerState,
        log: Callable[[AccessRecord], None] | None = None,
        telemetry: Telemetry | None = None,
    ) -> None:
        if policy.origins:
            app = CORSMiddleware(
                app,
                allow_origins=policy.origins,
                allow_methods=["GET", "POST"],
                allow_headers=["Authorization", "Content-Type", "X-Request-Id", "traceparent", "tracestate"],
                expose_headers=["X-Request-Id", "Retry-After", *RATE_HEADERS],
            )
        self._app = app
        self._policy = policy
        self._state = state
        state.clients = [Client(key) for key in policy.keys]
        self._keys = [key.secret.encode() for key in policy.keys]
        self._log = log
        self._telemetry = telemetry

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request, as ASGI wants it."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers, began, status = Headers(scope=scope), time.perf_counter(), 0
        given = headers.get("x-request-id", "")
        request_id = given if _REQUEST_ID.fullmatch(given) else f"req-{secrets.token_hex(12)}"
        state = scope.setdefault("state", {})
        state["request_id"] = request_id
        span: RequestSpan | None = None
        if self._telemetry is not None and scope["path"] not in UNTRACED:
            state["span"] = span = self._telemetry.begin(scope, headers, request_id)

        async def answer(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                written = MutableHeaders(scope=message)
                written["X-Request-Id"] = request_id
                if (client := state.get("client")) is not None:
                    written.update(dict(client.headers()))
            await send(message)

        self._state.active += 1
        try:
            refusal = self._refusal(scope, headers)
            await (self._app if refusal is None else refusal)(scope, receive, answer)
        except BaseException as error:
            if span is not None:
                span.failed(type(error).__name__)
            raise
        finally:
            self._state.active -= 1
            if span is not None:
                span.end(status)
            if self._log is not None:
                client = scope["client"][0] if scope.get("client") else "-"
                took_s = time.perf_counter() - began
                trace_id = None if span is None else span.trace_id
                self._log(AccessRecord(request_id, client, scope["method"], scope["path"], status, took_s, trace_id))

    def _refusal(self, scope: Scope, headers: Headers) -> JSONResponse | None:
        """Give the answer to who may not ask; None: they may."""
        host, hosts = headers.get("host", ""), self._policy.hosts
        if hosts is not None and _without_port(host) not in hosts:
            message = f"this server is not {host!r}; it is reached as {', '.join(sorted(hosts))} (--allow-host)"
            return JSONResponse(error_body(UsageError(message)), 421)
        origin = headers.get("origin")
        if origin is not None and not self._allows(origin, host, scope["scheme"]):
            return JSONResponse(error_body(UsageError(f"pages of {origin} may not ask here (--cors-origin)")), 403)
        if scope["path"] in OPEN or not self._keys or scope["method"] == "OPTIONS":  # a browser asks without a key
            return None
        scheme, _, token = headers.get("authorization", "").partition(" ")
        given = token.strip().encode("latin-1", "replace")
        known = [hmac.compare_digest(given, key) for key in self._keys]  # all of them, in equal time
        if scheme.lower() == "bearer" and any(known):
            scope["state"]["client"] = self._state.clients[known.index(True)]
            return None
        message = "the API key is missing or wrong; expected the header Authorization: Bearer KEY"
        body = error_body(UsageError(message))
        body["error"]["code"] = "invalid_api_key"
        return JSONResponse(body, 401, {"WWW-Authenticate": "Bearer"})

    def _allows(self, origin: str, host: str, scheme: str) -> bool:
        """Whether a page of `origin` may ask: one of this server itself, or one that was allowed."""
        origins = self._policy.origins
        return origin == f"{scheme}://{host}" or "*" in origins or origin in origins


@dataclass(frozen=True)
class AccessRecord:
    """One request that was answered; `status` 0: it was not, for the client left. `trace_id`: of its span, if any."""

    request_id: str
    client: str
    method: str
    path: str
    status: int
    seconds: float
    trace_id: str | None = None


def _without_port(host: str) -> str:
    return re.sub(r":\d*$", "", host).lower()
