"""Servers of others: the key goes to them and nowhere else, and denied access is told."""

from __future__ import annotations

import pytest

from llmforge.base.errors import EnvironmentLacks, UsageError
from llmforge.base.http_server import HttpServer, ServerOptions

from ..servers.keyed_server import KEY, keyed_server


def test_the_key_is_sent_and_not_shown() -> None:
    with keyed_server() as url:
        server = HttpServer(url, KEY)
        with server.request("GET", "/v1/models") as response:
            assert response.status == 200
    assert KEY not in repr(server)
    assert server.shown(f"no such model for {KEY}") == "no such model for ***"


@pytest.mark.parametrize("status", [401, 403])
@pytest.mark.parametrize(("key", "says"), [(None, "it wants an API key"), ("wrong", "does not take this API key")])
def test_denied_access_names_the_key_as_the_way(status: int, key: str | None, says: str) -> None:
    with (
        keyed_server(status=status) as url,
        pytest.raises(EnvironmentLacks, match=f"access denied: HTTP {status}; .*{says}") as denied,
        HttpServer(url, key).request("GET", "/v1/models"),
    ):
        pass
    assert "--api-key, or in the environment variable OPENAI_API_KEY" in str(denied.value)
    assert "wrong" not in str(denied.value)


def test_hints_name_the_options_of_the_server() -> None:
    options = ServerOptions("--other-key", "OTHER_KEY", None)
    with (
        keyed_server() as url,
        pytest.raises(EnvironmentLacks, match="access denied") as denied,
        HttpServer(url, None, options).request("GET", "/v1/models"),
    ):
        pass
    assert denied.value.hint == "give one with --other-key, or in the environment variable OTHER_KEY"
    with pytest.raises(UsageError) as refused:
        HttpServer("http://127.0.0.1:9", " ", options)
    assert refused.value.hint == "check --other-key or OTHER_KEY"
    with pytest.raises(UsageError) as refused:
        HttpServer("http://h:1/?key=secret", None, options)
    assert refused.value.hint == "a key is given by --other-key or OTHER_KEY"


@pytest.mark.parametrize("key", ["", " ", "a\nb", "schlüssel"])
def test_a_key_that_no_header_carries_is_refused_and_not_quoted(key: str) -> None:
    with pytest.raises(UsageError, match="the API key is empty, or has characters") as refused:
        HttpServer("http://127.0.0.1:9", key)
    assert not key.strip() or key not in str(refused.value)


@pytest.mark.parametrize("url", ["http://me:secret@h:1", "http://h:1/v1?key=secret", "http://h:1/#secret"])
def test_an_address_with_a_secret_is_refused_and_not_quoted(url: str) -> None:
    with pytest.raises(UsageError, match="the address of h has a user, a password or a query") as refused:
        HttpServer(url)
    assert "secret" not in str(refused.value)
