"""Bodies of requests: read within limits of size, time and number of values, before anything is done with them."""

from __future__ import annotations

import asyncio
import json
import re
from dataclasses import dataclass
from typing import Any

from starlette.requests import Request as HttpRequest

from llmforge.base.errors import UsageError
from llmforge.runtime.serving.prompts import PromptEncoder

LEAST_BYTES, MOST_BYTES = 1 << 20, 16 << 20  # between which the limit of a body lies, by the context
READ_S = 30.0  # for a whole body
MOST_DISCARDED = 4 * MOST_BYTES  # of a body that is too large: a client that still sends reads no answer
ESCAPED = 3  # bytes of JSON for one of UTF-8, in texts whose every character is escaped
LEAST_VALUES = 10_000  # of a body: members and elements, whatever the context is

_STRING = re.compile(rb'"(?:[^"\\]|\\.)*"', re.DOTALL)
_HALF = re.compile(rb"\\u[dD][89a-fA-F]")  # an escape of half a character, which a pair may complete


class TooLarge(UsageError):
    """A body is larger than this server reads."""


class NotJson(UsageError):
    """A body does not say that it is JSON, or is packed."""


class TooSlow(UsageError):
    """A body did not come in time."""


@dataclass(frozen=True)
class BodyLimits:
    """What a body may have: a context's worth of text, as JSON, and of token ids."""

    bytes: int
    values: int

    @classmethod
    def of(cls, encoder: PromptEncoder) -> BodyLimits:
        """Take them from the context of a model and its longest token."""
        text = LEAST_BYTES // 2 + ESCAPED * encoder.most_bytes
        return cls(min(max(text, LEAST_BYTES), MOST_BYTES), LEAST_VALUES + 4 * encoder.config.max_context)


async def read(http: HttpRequest, limits: BodyLimits) -> bytes:
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


def parse(data: bytes, limits: BodyLimits) -> Any:
    """Read JSON of a bounded number of values.

    Raises:
        TooLarge: there are more values than `limits`.
        UsageError: it is no JSON, or holds halves of characters.
    """
    # Where there are many commas, those in texts are no values.
    if _separators(data) > limits.values and (values := _separators(_STRING.sub(b"", data))) > limits.values:
        raise TooLarge(f"the body has {values:,} values; at most {limits.values:,} are allowed")
    try:
        value = json.loads(data)
        if _HALF.search(data):
            json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        raise UsageError("the body holds an unpaired surrogate", hint="use valid UTF-8 text") from error
    except (ValueError, RecursionError) as error:
        raise UsageError(f"the body is not JSON: {error}") from error
    return value


def _separators(data: bytes) -> int:
    """Count what begins or separates values, of which there are no more than one besides."""
    return sum(map(data.count, (b",", b"[", b"{")))
