"""An HTTP server of someone else: its address, and the key that requests to it carry."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from llmforge.base.errors import EnvironmentLacks, UsageError

if TYPE_CHECKING:
    import http.client

KEY_VARIABLE = "OPENAI_API_KEY"  # as OpenAI's own clients read it
TIMEOUT_S = 600.0  # for a byte to arrive
_DENIED = (401, 403)
_SAID = 200  # characters of what a server says of an error


@dataclass(frozen=True)
class ServerOptions:
    """What a command calls the key and the model of a server: hints name them."""

    key: str = "--api-key"
    variable: str = KEY_VARIABLE
    model: str | None = "--model"  # None: it has no such option


@dataclass(frozen=True)
class HttpServer:
    """Where a server is. Each request has a connection of its own; `key` is sent as a bearer token, and never shown."""

    url: str
    key: str | None = field(default=None, repr=False)
    options: ServerOptions = ServerOptions()

    def __post_init__(self) -> None:
        """Refuse what is no address, and a key that no header carries.

        Raises:
            UsageError: as said; what may be secret is not quoted.
        """
        parts = urlsplit(self.url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise UsageError(
                f"{self.url!r} is not an address: expected http://HOST:PORT", hint="for example http://127.0.0.1:8000"
            )
        if "@" in parts.netloc or parts.query or parts.fragment:
            raise UsageError(
                f"the address of {parts.hostname} has a user, a password or a query: expected http://HOST:PORT/PATH",
                hint=f"a key is given by {self.options.key} or {self.options.variable}",
            )
        if self.key is not None and not (self.key.isascii() and self.key.isprintable() and self.key.strip()):
            raise UsageError(
                "the API key is empty, or has characters that no HTTP header carries: expected printable ASCII",
                hint=f"check {self.options.key} or {self.options.variable}",
            )

    @property
    def path(self) -> str:
        """Path of the address."""
        return urlsplit(self.url).path

    @contextmanager
    def request(self, method: str, path: str, body: str | None = None) -> Iterator[http.client.HTTPResponse]:
        """Send a request whose body is JSON, and give the answer while it may be read.

        Raises:
            OSError, http.client.HTTPException: there is no answer.
            EnvironmentLacks: the server wants a key, or another one.
        """
        import http.client  # 30 ms, which every command would take

        parts = urlsplit(self.url)
        kind = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
        headers = {"Content-Type": "application/json"}
        if self.key is not None:
            headers["Authorization"] = f"Bearer {self.key}"
        with closing(kind(parts.netloc, timeout=TIMEOUT_S)) as connection:
            connection.request(method, path, body, headers)
            response = connection.getresponse()
            if response.status in _DENIED:
                raise self._denied(response)
            yield response

    def shown(self, said: str) -> str:
        """Shorten what the server says, without the key, should it repeat it."""
        return (said if self.key is None else said.replace(self.key, "***"))[:_SAID]

    def _denied(self, response: http.client.HTTPResponse) -> EnvironmentLacks:
        said = self.shown(response.read().decode("utf-8", "replace"))
        what = "it wants an API key" if self.key is None else "it does not take this API key"
        how = "give one" if self.key is None else "give another"
        return EnvironmentLacks(
            f"{self.url}: access denied: HTTP {response.status}; {what}: {said}",
            hint=f"{how} with {self.options.key}, or in the environment variable {self.options.variable}",
        )
