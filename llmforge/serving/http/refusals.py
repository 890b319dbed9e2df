"""Answers to what is not done, the same in every application: errors as OpenAI writes them."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Mapping
from typing import Any

from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.types import Receive

from llmforge.base.errors import ForgeError, Unavailable, UsageError
from llmforge.serving.http import bodies
from llmforge.serving.http.access import ServerState
from llmforge.serving.http.limits import RateLimited
from llmforge.serving.http.responses import error_body, status
from llmforge.serving.protocol import client_json

RETRY_AFTER_S = 1  # a queue that is full moves within about this time
CLIENT_LEFT = 499  # nginx's status of a request whose client went away; nobody reads it


def check_draining(state: ServerState) -> None:
    """Return if the server takes calls.

    Raises:
        Unavailable: it is shutting down.
    """
    if state.draining:
        raise Unavailable("the server is shutting down")


@contextlib.asynccontextmanager
async def watched(receive: Receive, left: Callable[[], Any]) -> AsyncIterator[None]:
    """Call `left` if the client leaves while the block runs."""

    async def wait_for_disconnect() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        left()

    watch = asyncio.create_task(wait_for_disconnect())
    try:
        yield
    finally:
        watch.cancel()


def _refusal(http: Request, error: Exception) -> Response:
    assert isinstance(error, ForgeError)
    headers = {}
    if isinstance(error, Unavailable):
        headers["Retry-After"] = str(error.retry_s if isinstance(error, RateLimited) else RETRY_AFTER_S)
    if isinstance(error, client_json.TooLarge | bodies.TooSlow):
        headers["Connection"] = "close"  # what still comes of the body is not waited for
    return JSONResponse(error_body(error), status(error), headers)


def _not_served(http: Request, error: Exception) -> Response:
    """Say in JSON what Starlette says in plain text: that there is no such path, or no such method there."""
    assert isinstance(error, HTTPException)
    what = {404: f"there is no {http.url.path} here", 405: f"{http.url.path} does not take {http.method}"}
    body = error_body(UsageError(what.get(error.status_code, error.detail)))
    return JSONResponse(body, error.status_code, error.headers)


def client_left(http: Request, error: Exception) -> Response:
    """Answer where nobody reads it."""
    return Response(status_code=CLIENT_LEFT)


HANDLERS: Mapping[Any, Callable[[Request, Exception], Response]] = {
    ForgeError: _refusal,
    HTTPException: _not_served,
    ClientDisconnect: client_left,
}
