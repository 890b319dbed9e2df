"""Bodies of requests: received within limits of size and time, before anything is done with them."""

from __future__ import annotations

import asyncio

from starlette.requests import Request as HttpRequest

from llmforge.base.errors import UsageError
from llmforge.serving.protocol.client_json import MOST_BYTES, JsonLimits, TooLarge

READ_S = 30.0  # for a whole body
MOST_DISCARDED = 4 * MOST_BYTES  # of a body that is too large: a client that still sends reads no answer


class NotJson(UsageError):
    """A body does not say that it is JSON, or is packed."""


class TooSlow(UsageError):
    """A body did not come in time."""


async def read(http: HttpRequest, limits: JsonLimits) -> bytes:
    """Read the body of a request.

    That its content type must say JSON keeps web pages out: a browser lets any page send other types to a server on
    loopback, and asks this server first for JSON.

    Raises:
        NotJson: it does not say that it is JSON, or is compressed.
        TooLarge: it has more bytes than `limits`.
        TooSlow: it takes more than `READ_S`.
        starlette.requests.ClientDisconnect: the client left.
    """
    if http.headers.get("content-type", "").partition(";")[0].strip().lower() != "application/json":
        raise NotJson(
            "the body's content type must be application/json", hint="curl: -H 'Content-Type: application/json'"
        )
    if (packed := http.headers.get("content-encoding", "identity").strip().lower()) != "identity":
        raise NotJson(f"content-encoding {packed!r} is not supported", hint="send the body uncompressed")
    data, size = bytearray(), 0
    try:
        async with asyncio.timeout(READ_S):
            async for piece in http.stream():
                size += len(piece)
                if size <= limits.bytes:
                    data += piece
                elif size > MOST_DISCARDED:
                    break
    except TimeoutError:
        raise TooSlow(f"the body did not come within {READ_S:g} s") from None
    if size > limits.bytes:
        raise TooLarge(f"the body is larger than {limits.bytes:,} bytes")
    return bytes(data)
