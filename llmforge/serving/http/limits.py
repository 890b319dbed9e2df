"""API keys, and what each may ask for: requests and tokens a minute, and calls at once.

Buckets are filled at the rate of their limit and hold a minute's worth of it. Tokens are taken when they are counted:
those of a prompt when its call is taken on, those of an answer as they come, so that a bucket can be below zero.
Names of headers and of the error are OpenAI's: https://platform.openai.com/docs/guides/rate-limits.
"""

from __future__ import annotations

import math
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

from llmforge.base.errors import Unavailable, UsageError
from llmforge.base.small_file import decode, read
from llmforge.serving.request import MOST_PRIORITY, Request

KEY_FILE_BYTES = 1 << 20
SHORTEST_KEY = 16  # characters; what is shorter can be guessed
MINUTE_S = 60.0
_ROUNDING_S = 1e-6  # less is no time to wait
Limit = Literal["requests", "tokens", "concurrent"]
LIMITS: tuple[Limit, ...] = ("requests", "tokens", "concurrent")
_HEADERS = {limit: (f"x-ratelimit-limit-{limit}", f"x-ratelimit-remaining-{limit}") for limit in ("requests", "tokens")}
RATE_HEADERS = tuple(name for names in _HEADERS.values() for name in names)

_KEY = re.compile(r"[\x21-\x7e]+")
_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")


class RateLimited(Unavailable):
    """A key has asked for all that it may for now; `retry_s`: after how many seconds it may again."""

    def __init__(self, key: str, limit: Limit, most: int, retry_s: int) -> None:
        what = "calls at once" if limit == "concurrent" else f"{limit} a minute"
        super().__init__(f"the key {key!r} may have {most:,} {what}", hint=f"try again after {retry_s} s")
        self.limit, self.retry_s = limit, retry_s


@dataclass(frozen=True)
class ApiKey:
    """A key, what logs and metrics call it, and its limits; what is not in `limits` is not limited.

    Requests have its `priority`, or a higher one where they say so: a key does not get ahead of itself.
    """

    secret: str = field(repr=False)
    name: str
    limits: Mapping[Limit, int] = field(default_factory=dict)
    priority: int = 0


def read_keys(file: Path | None, variable: str | None) -> list[ApiKey]:
    """Read API keys: a line each of a file, and those of an environment variable, separated by commas.

    A line is a key, and behind it, as far as they are given, its name, limits and priority: `KEY NAME requests=60
    tokens=20000 concurrent=4 priority=1`. A key without a name is called by its number.

    Raises:
        UsageError: a key is short or has other than printable ASCII characters, or stands there twice, as may no name;
            a limit is none; or the file has no key.
        InputError: the file cannot be read.
    """
    lines = [] if variable is None else [each.strip() for each in variable.split(",") if each.strip()]
    if file is not None:
        found = [line.strip() for line in decode(read(file, KEY_FILE_BYTES), file).splitlines()]
        found = [line for line in found if line and not line.startswith("#")]
        if not found:
            raise UsageError(f"{file}: no API key; expected one per line")
        lines += found
    keys = [_key(line.split(), number) for number, line in enumerate(lines, 1)]
    if len({key.secret for key in keys}) < len(keys) or len({key.name for key in keys}) < len(keys):
        raise UsageError("an API key, or its name, is given twice")
    return keys


def _key(words: Sequence[str], number: int) -> ApiKey:
    """Read one line."""
    secret, *rest = words
    if len(secret) < SHORTEST_KEY or not _KEY.fullmatch(secret):
        raise UsageError(
            f"API key {number} has {len(secret)} characters; expected at least {SHORTEST_KEY}, printable ASCII, no "
            "spaces",
            hint="make one: python -c 'import secrets; print(secrets.token_urlsafe())'",
        )
    name = rest.pop(0) if rest and "=" not in rest[0] else f"key-{number}"
    if not _NAME.fullmatch(name):
        raise UsageError(f"the name of API key {number}: expected 1 to 64 letters, digits, _, . or -")
    limits: dict[Limit, int] = {}
    priority = 0
    for word in rest:
        found, _, value = word.partition("=")
        if found == "priority":
            priority = _priority(name, value)
            continue
        limit = next((each for each in LIMITS if each == found), None)
        if limit is None or not value.isascii() or not value.isdigit() or int(value) < 1:
            raise UsageError(
                f"API key {name}: {word[:40]!r}: expected requests=N, tokens=N (a minute) or concurrent=N, N at least "
                "1, or priority=N"
            )
        limits[limit] = int(value)
    return ApiKey(secret, name, limits, priority)


def _priority(name: str, value: str) -> int:
    """Read the priority of the key `name`."""
    if not re.fullmatch(r"-?[0-9]{1,4}", value) or abs(int(value)) > MOST_PRIORITY:
        raise UsageError(
            f"API key {name}: priority {value[:40]!r}: expected a whole number from -{MOST_PRIORITY} to {MOST_PRIORITY}"
        )
    return int(value)


class Client:
    """What one key has asked for so far. Used in the event loop alone.

    Args:
        key: whose limits hold.
        clock: seconds, from any origin.
    """

    def __init__(self, key: ApiKey, clock: Callable[[], float] = time.monotonic) -> None:
        self.name = key.name
        self.limits = key.limits
        self.priority = key.priority
        self.active = 0  # calls
        self.counts = {"requests": 0, "prompt tokens": 0, "output tokens": 0}
        self.refused: dict[Limit, int] = dict.fromkeys(LIMITS, 0)
        self._clock = clock
        self._levels = {limit: float(most) for limit, most in key.limits.items() if limit != "concurrent"}
        self._filled = clock()

    def begin(self) -> None:
        """Take up a call.

        Raises:
            RateLimited: the key may not have it now.
        """
        self._fill()
        for limit, most in self.limits.items():
            if (wait_s := self._wait_s(limit, most) - _ROUNDING_S) > 0:
                self.refused[limit] += 1
                raise RateLimited(self.name, limit, most, math.ceil(wait_s))
        self.counts["requests"] += 1
        self._take("requests", 1)
        self.active += 1

    def own(self, request: Request) -> Request:
        """Say of a request whose it is: its turn, and a priority that is at best that of the key."""
        return replace(request, client=self.name, priority=max(request.priority, self.priority))

    def rest(self) -> Iterator[tuple[Limit, int]]:
        """Yield what is left of each limit now."""
        self._fill()
        for limit, most in self.limits.items():
            yield limit, max(0, most - self.active if limit == "concurrent" else int(self._levels[limit]))

    def use(self, tokens: int, kind: Literal["prompt tokens", "output tokens"]) -> None:
        """Count tokens of a call."""
        self.counts[kind] += tokens
        self._fill()
        self._take("tokens", tokens)

    def end(self) -> None:
        """Count a call that is done, however it ended."""
        self.active -= 1

    def headers(self) -> Iterator[tuple[str, str]]:
        """Yield what OpenAI tells in headers: each limit a minute, and what is left of it."""
        for limit, left in self.rest():
            if limit in _HEADERS:
                of_limit, of_rest = _HEADERS[limit]
                yield of_limit, str(self.limits[limit])
                yield of_rest, str(left)

    def _wait_s(self, limit: Limit, most: int) -> float:
        """Say how long a call must wait for a limit, in s."""
        if limit == "concurrent":
            return 1.0 if self.active >= most else 0.0
        return (1 - self._levels[limit]) / most * MINUTE_S

    def _take(self, limit: Limit, amount: int) -> None:
        if limit in self._levels:
            self._levels[limit] -= amount

    def _fill(self) -> None:
        now = self._clock()
        for limit, level in self._levels.items():
            self._levels[limit] = min(self.limits[limit], level + (now - self._filled) / MINUTE_S * self.limits[limit])
        self._filled = now
