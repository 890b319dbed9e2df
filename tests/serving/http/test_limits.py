"""What an API key may ask for: its lines in a file, its buckets, and what clients and metrics are told."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families
from starlette.testclient import TestClient

from llmforge.base.errors import InputError, UsageError
from llmforge.serving import Engine, Receiver, Request, load
from llmforge.serving import http as serve
from llmforge.serving.http.app import create_app
from llmforge.serving.http.limits import ApiKey, Client, RateLimited

from ...samples.small_artifact import publish_small

KEYS = ("0123456789abcdef", "fedcba9876543210")


def test_keys_are_read_from_a_file_and_the_environment(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text(f"# of two teams\n  {KEYS[0]} search requests=60 tokens=20000 concurrent=4\n\n")
    assert serve.read_keys(file, f" {KEYS[1]}, ") == [
        ApiKey(KEYS[1], "key-1"),
        ApiKey(KEYS[0], "search", {"requests": 60, "tokens": 20000, "concurrent": 4}),
    ]
    assert serve.read_keys(None, f"{KEYS[0]} requests=3") == [ApiKey(KEYS[0], "key-1", {"requests": 3})]
    assert serve.read_keys(None, f"{KEYS[0]} later priority=5") == [ApiKey(KEYS[0], "later", {}, 5)]
    assert serve.read_keys(None, f"{KEYS[0]} sooner requests=3 priority=-5")[0].priority == -5
    assert serve.read_keys(None, None) == []
    assert KEYS[0] not in repr(serve.read_keys(file, None))


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("# none\n", "no API key"),
        ("short\n", "API key 1 has 5 characters; expected at least 16"),
        ("é" * 20, "printable"),
        (f"{KEYS[0]} a/b", "the name of API key 1"),
        (f"{KEYS[0]} a requests=0", "'requests=0': expected requests=N"),
        (f"{KEYS[0]} a requests=-1", "expected requests=N"),
        (f"{KEYS[0]} a requests=²", "expected requests=N"),
        (f"{KEYS[0]} a other=1", "'other=1': expected requests=N"),
        (f"{KEYS[0]} a b", "'b': expected requests=N"),
        (f"{KEYS[0]} a priority=high", "priority 'high': expected a whole number from -100 to 100"),
        (f"{KEYS[0]} a priority=101", "expected a whole number from -100 to 100"),
        (f"{KEYS[0]} a\n{KEYS[0]} b", "given twice"),
        (f"{KEYS[0]} a\n{KEYS[1]} a", "given twice"),
    ],
)
def test_lines_that_are_no_keys(tmp_path: Path, text: str, says: str) -> None:
    (tmp_path / "keys").write_text(text)
    with pytest.raises(UsageError, match=says):
        serve.read_keys(tmp_path / "keys", None)
    with pytest.raises(InputError):
        serve.read_keys(tmp_path / "none", None)


def client(**limits: int) -> tuple[Client, Any]:
    clock = SimpleNamespace(now=100.0)
    return Client(ApiKey(KEYS[0], "a", limits), lambda: clock.now), clock  # type: ignore[arg-type]


def refused(asking: Client) -> int:
    """Return after how many seconds it may ask again."""
    with pytest.raises(RateLimited) as caught:
        asking.begin()
    return caught.value.retry_s


def test_requests_come_back_at_their_rate() -> None:
    asking, clock = client(requests=6)
    for _ in range(6):
        asking.begin()
        asking.end()
    assert refused(asking) == 10
    assert dict(asking.headers()) == {"x-ratelimit-limit-requests": "6", "x-ratelimit-remaining-requests": "0"}
    clock.now += 9
    assert refused(asking) == 1
    clock.now += 1
    asking.begin()
    clock.now += 1000  # no more than a minute's worth is kept
    for _ in range(6):
        asking.begin()
    assert refused(asking) == 10
    assert asking.counts["requests"] == 13
    assert asking.refused["requests"] == 3


def test_tokens_are_taken_when_they_are_counted() -> None:
    asking, clock = client(tokens=600)
    asking.begin()
    asking.use(100, "prompt tokens")
    asking.use(1100, "output tokens")
    assert refused(asking) == 61  # 600 below zero
    clock.now += 61
    asking.begin()
    assert asking.counts == {"requests": 2, "prompt tokens": 100, "output tokens": 1100}


def test_so_many_calls_at_once() -> None:
    asking, _ = client(concurrent=2)
    asking.begin()
    asking.begin()
    assert refused(asking) == 1
    asking.end()
    asking.begin()
    assert asking.active == 2
    assert not dict(asking.headers())


def test_a_key_does_not_get_ahead_of_its_priority() -> None:
    asking = Client(ApiKey(KEYS[0], "a", {}, 2))
    given = {-7: 2, 0: 2, 2: 2, 9: 9}
    for asked, expected in given.items():
        own = asking.own(Request((5,), priority=asked))
        assert (own.client, own.priority) == ("a", expected)


def test_priorities_are_read_from_requests(engine: Engine) -> None:
    held = Held(engine)
    held.go.set()
    with served(held, f"{KEYS[0]} search priority=1", KEYS[1]) as asking:
        assert ask(asking, KEYS[0], priority=-3).status_code == 200
        assert ask(asking, KEYS[1], priority=-3).status_code == 200
        assert ask(asking, KEYS[1], priority=4).status_code == 200
        assert [request.priority for request in held.asked] == [1, 0, 4]
        for wrong in (1.5, True, "high", 101):
            refusal = ask(asking, KEYS[1], priority=wrong)
            assert refusal.status_code == 400
            assert refusal.json()["error"]["param"] == "priority"


class Held:
    """An engine that answers when it is told to."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self.go = threading.Event()
        self.asked: list[Request] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def submit(self, request: Request, receive: Receiver) -> Any:
        self.asked.append(request)
        assert self.go.wait(60)
        return self._engine.submit(request, receive)


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory, sample_checkpoint: Path) -> Iterator[Engine]:
    with Engine(load(publish_small(tmp_path_factory.mktemp("limits"), sample_checkpoint).path)) as engine:
        yield engine


def served(engine: Any, *lines: str) -> TestClient:
    keys = serve.read_keys(None, ",".join(lines))
    state = serve.ServerState()
    policy = serve.AccessPolicy.of("127.0.0.1", keys, (), ())
    app = serve.AuthMiddleware(create_app(engine, "small", state), policy, state)
    return TestClient(app, base_url="http://127.0.0.1:8000")


def ask(asking: TestClient, key: str, **options: Any) -> Any:
    body = {"prompt": [5, 6, 7], "max_tokens": 4, "ignore_eos": True, **options}
    return asking.post("/v1/completions", json=body, headers={"Authorization": f"Bearer {key}"})


def figures(asking: TestClient) -> dict[str, float]:
    text = asking.get("/metrics", headers={"Authorization": f"Bearer {KEYS[1]}"}).text
    return {
        " ".join([sample.name, *sample.labels.values()]): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if sample.name.startswith("llmforge_key_")
    }


def test_clients_are_told_when_they_may_again(engine: Engine) -> None:
    with served(engine, f"{KEYS[0]} search requests=2 tokens=1000", f"{KEYS[1]} chat") as asking:
        first = ask(asking, KEYS[0])
        assert first.status_code == 200
        assert first.headers["x-ratelimit-limit-requests"] == "2"
        assert first.headers["x-ratelimit-remaining-requests"] == "1"
        assert first.headers["x-ratelimit-remaining-tokens"] == str(1000 - 3 - 4)
        assert ask(asking, KEYS[0], prompt="").status_code == 400  # counts
        limited = ask(asking, KEYS[0])
        assert limited.status_code == 429
        assert 1 <= int(limited.headers["retry-after"]) <= 30
        error = limited.json()["error"]
        assert (error["type"], error["code"]) == ("requests", "rate_limit_exceeded")
        assert "'search' may have 2 requests a minute" in error["message"]
        other = ask(asking, KEYS[1], stream=True, n=2)
        assert other.status_code == 200
        assert "x-ratelimit-limit-requests" not in other.headers
        told = figures(asking)
        assert 993 <= told.pop("llmforge_key_remaining search tokens") <= 1000  # they come back with time
        assert told == {
            "llmforge_key_requests_total search": 2,
            "llmforge_key_requests_total chat": 1,
            "llmforge_key_tokens_total search prompt": 3,
            "llmforge_key_tokens_total search output": 4,
            "llmforge_key_tokens_total chat prompt": 3,
            "llmforge_key_tokens_total chat output": 8,
            **{f"llmforge_key_limited_total search {limit}": limit == "requests" for limit in serve.LIMITS},
            **{f"llmforge_key_limited_total chat {limit}": 0 for limit in serve.LIMITS},
            **{f"llmforge_key_limit search {limit}": most for limit, most in (("requests", 2), ("tokens", 1000))},
            "llmforge_key_remaining search requests": 0,
            "llmforge_key_active search": 0,
            "llmforge_key_active chat": 0,
        }


def test_calls_at_once_are_counted_however_they_end(engine: Engine) -> None:
    held = Held(engine)
    with served(held, f"{KEYS[0]} search concurrent=1", KEYS[1]) as asking:
        answers: list[Any] = []
        first = threading.Thread(target=lambda: answers.append(ask(asking, KEYS[0])))
        first.start()
        while not held.asked:
            pass
        limited = ask(asking, KEYS[0])
        assert limited.status_code == 429
        assert limited.headers["retry-after"] == "1"
        assert limited.json()["error"]["type"] == "concurrent"
        held.go.set()
        first.join()
        assert answers[0].status_code == 200
        assert held.asked[0].client == "search"
        for options in ({}, {"prompt": ""}, {"prompt": [99999]}, {"stream": True}, {"temperature": -1}):
            assert ask(asking, KEYS[0], **options).status_code in (200, 400)
        assert ask(asking, KEYS[0]).status_code == 200
        assert figures(asking)["llmforge_key_active search"] == 0
