"""Clients that are careless or hostile: another client's longest pause stays what it is without them."""

from __future__ import annotations

import contextlib
import functools
import http.client
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import uvicorn

from llmforge.artifact import Artifact
from llmforge.serving import EngineProcess
from llmforge.serving import http as serve
from llmforge.serving.http import bodies, connections
from llmforge.serving.http.server import make_server

from ...samples.small_artifact import publish_small
from ...servers.attackers import ALLOWED_S, hold_up_nobody

MEASURED_S = 0.5  # of each side
HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\nContent-Length: 100\r\n\r\n"


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory, sample_checkpoint: Path) -> Artifact:
    return publish_small(tmp_path_factory.mktemp("attacks"), sample_checkpoint)


@pytest.fixture(scope="module")
def address(small: Artifact) -> Iterator[tuple[str, int]]:
    listening = socket.create_server(("127.0.0.1", 0))
    with EngineProcess(small.path) as engine:
        server: uvicorn.Server = make_server(serve.create_app(engine, "small"), serve.Address(grace_s=5))
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]})
        thread.start()
        yield listening.getsockname()[:2]
        server.should_exit = True
        thread.join()


def send(address: tuple[str, int], path: str, body: bytes, timeout_s: float = 60) -> tuple[int, bytes]:
    connection = http.client.HTTPConnection(*address, timeout=timeout_s)
    with contextlib.closing(connection):
        connection.request("POST", path, body, {"Content-Type": "application/json"})
        response = connection.getresponse()
        return response.status, response.read()


def longest_pause(address: tuple[str, int], seconds: float) -> float:
    """Ask for health and for short answers, plain and constrained, again and again; give the longest wait, in s."""
    longest, end = 0.0, time.monotonic() + seconds
    bodies = (
        {"prompt": "Well", "max_tokens": 4, "ignore_eos": True},
        {"prompt": "Well", "max_tokens": 4, "guided_regex": "[a-z]+"},
        {"messages": [{"role": "user", "content": "Well"}], "max_tokens": 4},
    )
    while time.monotonic() < end:
        for body in bodies:
            path = "/v1/chat/completions" if "messages" in body else "/v1/completions"
            began = time.monotonic()
            assert send(address, path, json.dumps(body).encode())[0] == 200
            longest = max(longest, time.monotonic() - began)
        began = time.monotonic()
        connection = http.client.HTTPConnection(*address, timeout=60)
        with contextlib.closing(connection):
            connection.request("GET", "/health")
            assert connection.getresponse().status == 200
        longest = max(longest, time.monotonic() - began)
    return longest


def completion(**fields: Any) -> bytes:
    return json.dumps({"max_tokens": 1, **fields}).encode()


def long_prompt() -> bytes:
    return completion(prompt="ab " * 700_000)


def prompt_of_the_longest_length() -> bytes:
    return completion(prompt="a b" * 21_000)


def many_choices() -> bytes:
    return completion(prompt="a", guided_choice=[f"answer {i}" for i in range(100_000)])


def choices_of_the_largest_size() -> bytes:
    return completion(prompt="a", guided_choice=[f"{i} {time.monotonic_ns()}" for i in range(1_800)])


def brackets() -> bytes:
    return b"[" + b"[]," * 300_000 + b"[]]"


def string_without_an_end() -> bytes:
    return b"[" + b"," * 20_000 + b'"' + b'\\"' * 300_000


def many_messages() -> bytes:
    return json.dumps({"messages": [{"role": "user", "content": "a"}] * 20_000, "max_tokens": 1}).encode()


def many_prompts() -> bytes:
    return completion(prompt=["word " * 1000] * 150)


@pytest.mark.parametrize(
    ("make", "path", "statuses"),
    [
        (long_prompt, "/v1/completions", {400, 413}),
        (long_prompt, "/tokenize", {400, 413}),
        (prompt_of_the_longest_length, "/v1/completions", {400}),
        (many_choices, "/v1/completions", {400, 413}),
        (choices_of_the_largest_size, "/v1/completions", {200}),
        (brackets, "/v1/completions", {413}),
        (string_without_an_end, "/v1/completions", {413}),
        (many_messages, "/v1/chat/completions", {400, 413}),
        (many_prompts, "/v1/completions", {400}),
    ],
)
def test_others_go_on(address: tuple[str, int], make: Callable[[], bytes], path: str, statuses: set[int]) -> None:
    got: list[int] = []

    def attack() -> None:
        with contextlib.suppress(ConnectionError):  # the server may close before all of the body is sent
            got.append(send(address, path, make())[0])

    hold_up_nobody(attack, functools.partial(longest_pause, address), MEASURED_S)
    assert got
    assert set(got) <= statuses


def test_trickling_connections_make_room(address: tuple[str, int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Beside as many as there may be, each new one is answered: the one that is silent for longest has to go."""
    monkeypatch.setattr(connections, "MOST", 50)
    with contextlib.ExitStack() as opened:
        trickling = [opened.enter_context(socket.create_connection(address, 60)) for _ in range(60)]
        for each in trickling:
            with contextlib.suppress(ConnectionError):
                each.sendall(b"GET /health HTTP/1.1\r\nX-A: ")
        assert longest_pause(address, 0.5) < ALLOWED_S * 4
        assert b" 408 " in trickling[0].recv(4096)


def test_the_head_of_a_request_has_its_time(address: tuple[str, int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "HEAD_S", 0.3)
    with socket.create_connection(address, 60) as connection:
        connection.sendall(b"GET /health HTTP/1.1\r\nHost: a\r\n\r\n")
        assert b" 200 " in connection.recv(4096)
        for _ in range(20):  # a second request on the same connection, a byte at a time
            with contextlib.suppress(ConnectionError):
                connection.sendall(b"G")
            time.sleep(0.05)
        assert b" 408 " in connection.recv(4096)
    with socket.create_connection(address, 60) as connection:
        assert b" 408 " in connection.recv(4096)


def test_a_body_has_its_time(address: tuple[str, int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bodies, "READ_S", 0.3)
    with socket.create_connection(address, 60) as connection:
        connection.sendall(HEAD + b"{")
        assert b" 408 " in connection.recv(4096)


def test_an_upload_that_breaks_off_leaves_no_traceback(
    address: tuple[str, int], caplog: pytest.LogCaptureFixture
) -> None:
    with socket.create_connection(address, 60) as connection:
        connection.sendall(HEAD + b"{")
    longest_pause(address, 0.2)
    assert not [record for record in caplog.records if record.exc_info]
