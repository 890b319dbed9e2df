"""Clients that are careless or hostile: another client's longest pause stays what it is without them."""

from __future__ import annotations

import functools
import json
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from llmforge.recipe import ServingSpec

from ..samples import published
from ..servers.attackers import hold_up_nobody
from ..servers.triton_server import Server, environment_or_skip, launched

pytestmark = pytest.mark.xdist_group("triton")

MEASURED_S = 0.5  # of each side
CONTEXT = 4096
SLOW = {"prompt of the longest length", "choices of the largest size", "token ids", "brackets"}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, sample_checkpoint: Path) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("attacks")
    made = published.random_decoder(
        folder, sample_checkpoint, max_context=CONTEXT, max_batch=8, serving=ServingSpec(max_queue=32)
    )
    with launched(environment_or_skip(), made.path, folder / "repository") as running:
        yield running


def longest_pause(server: Server, seconds: float) -> float:
    """Read a stream, and ask for short answers, plain, constrained and of a chat; give the longest wait, in s."""
    longest, end = 0.0, time.monotonic() + seconds
    message = json.dumps([{"role": "user", "content": "Well"}])
    guided = json.dumps({"guided_regex": "[a-z]+"})
    asks: tuple[Mapping[str, Any], ...] = (
        {"text_input": "Well", "ignore_eos": True},
        {"text_input": "Well", "sampling_parameters": guided},
        {"messages": message},
    )
    body = {"text_input": "a", "max_tokens": CONTEXT - 10, "ignore_eos": True, "stream": True}
    ended = threading.Event()
    between = [0.0]

    def read() -> None:
        while not ended.is_set():
            with server.open("/v2/models/random/generate_stream", body) as stream:
                assert stream is not None
                last = time.monotonic()
                while not ended.is_set() and stream.readline():
                    between[0], last = max(between[0], time.monotonic() - last), time.monotonic()

    reader = threading.Thread(target=read)
    reader.start()
    while time.monotonic() < end:
        for fields in asks:
            began = time.monotonic()
            reply = server.generate("random", max_tokens=4, **fields)
            assert reply.status == 200, reply.text
            longest = max(longest, time.monotonic() - began)
        began = time.monotonic()
        assert server.request("/v2/health/ready").status == 200
        longest = max(longest, time.monotonic() - began)
    ended.set()
    reader.join()
    return max(longest, between[0])


def schema(characters: int) -> str:
    """Write a JSON schema of about so many characters, unlike all before it."""
    number, properties = time.monotonic_ns(), {}
    while len(properties) * 80 < characters:
        properties[f"field_{number}_{len(properties)}"] = {"type": "string"}
    return json.dumps({"type": "object", "properties": properties, "required": list(properties)})


def attacks() -> Mapping[str, tuple[Mapping[str, Any], str]]:
    """What is sent, by its name, and what the error says; "": it is answered."""
    choices = [f"answer {number}" for number in range(10_000)]
    many = json.dumps({"guided_choice": choices})
    fits = [f"{number} {time.monotonic_ns()}" for number in range(1500)]
    return {
        "long prompt": ({"text_input": "ab " * 700_000}, "the prompt has 2,100,000 characters"),
        "prompt of the longest length": ({"text_input": "a b" * 21_000}, "this artifact allows at most"),
        "long conversation": (
            {"messages": json.dumps([{"role": "user", "content": "ab " * 700_000}])}, "is larger than"),
        "many messages": ({"messages": json.dumps([{"role": "user", "content": "a"}] * 20_000)}, "values; at most"),
        "brackets": ({"messages": "[" + "[]," * 300_000 + "[]]"}, "values; at most"),
        "string without an end": ({"messages": "[" + "," * 20_000 + '"' + '\\"' * 300_000}, "is not JSON"),
        "token ids": ({"input_ids": [7] * 200_000}, "200000 tokens; this artifact allows at most"),
        "10,000 choices": ({"text_input": "a", "sampling_parameters": many}, "bytes; at most 65,536 are allowed"),
        "choices of the largest size": (
            {"text_input": "a", "sampling_parameters": json.dumps({"guided_choice": fits})}, ""),
        "schema of 60,000 characters": (
            {"text_input": "a", "sampling_parameters": json.dumps({"guided_json": schema(60_000)})}, ""),
    }  # fmt: skip


@pytest.mark.thorough
@pytest.mark.parametrize("name", [pytest.param(name, marks=[pytest.mark.slow] * (name in SLOW)) for name in attacks()])
def test_others_go_on(server: Server, name: str) -> None:
    got: list[str] = []

    def attack() -> None:
        fields, _ = attacks()[name]
        got.append(server.generate("random", max_tokens=1, **fields).json.get("error", ""))

    hold_up_nobody(attack, functools.partial(longest_pause, server), MEASURED_S)
    assert got
    wrong = attacks()[name][1]
    assert [error for error in got if (wrong not in error if wrong else error)] == []
