"""Reads bodies of calls, and works on them in threads, so that others' answers go on meanwhile."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from anyio import CapacityLimiter, to_thread

from llmforge.serving.protocol import client_json
from llmforge.serving.protocol.client_json import JsonLimits

SMALL_BODY = 32 << 10  # bytes; the texts of longer ones take long to tokenize, and wait for each other only
LONG_READERS, READERS = 2, 16  # threads that read long bodies, and others
T = TypeVar("T")


class BodyReader:
    """The threads of one application that read bodies within `limits`."""

    def __init__(self, limits: JsonLimits) -> None:
        self.limits = limits
        self._long, self._short = CapacityLimiter(LONG_READERS), CapacityLimiter(READERS)

    async def work(self, data: bytes, do: Callable[[Any], T]) -> T:
        """Parse a body and do something with it, in a thread.

        Raises:
            UsageError: it is no JSON within the limits, or what `do` raises.
        """
        limiter = self._long if len(data) > SMALL_BODY else self._short
        return await to_thread.run_sync(lambda: do(client_json.parse(data, self.limits, "the body")), limiter=limiter)
