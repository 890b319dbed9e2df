"""Soak `llmforge serve` as a user starts it: requests of every kind, attacks among them, and stops under load.

    python benchmarks/soak_serve.py ARTIFACT [--requests 10000] [--greedy 1000] [--stops 20]

The artifact must be one without quantization (recipes/fp32.yaml), whose chat template shows tools: its answers do not
depend on what runs beside them. What it checks:

- Of `--greedy` greedy prompts each is asked alone, then all of them by many clients at once: how many differ?
- `--requests` are sent by many clients: texts and chats, greedy and sampled, whole and streamed, clients that leave in
  the middle, answers held to a schema and calls of tools; one in twenty is an attack. Each answer must be the one that
  the same request got alone; attacks must get the status that is due to them.
- Before them, all attacks were sent at once. After each tenth of them nothing runs or waits, and the resident memory
  and the open files of the server and of its engine's process are noted: from the second tenth on they must not grow.
- `--stops` servers get SIGTERM under load: each must end in order within the grace period, and leave no process.

Exit code 0 and one JSON object where all holds; 1 and what does not, otherwise.
"""

from __future__ import annotations

import argparse
import contextlib
import gzip
import http.client
import itertools
import json
import os
import random
import re
import signal
import socket
import statistics
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import psutil

WORDS = "the file system module returns a list of values when path exists and raises an error otherwise".split()  # noqa: SIM905
QUESTIONS = 96  # distinct requests
CLIENTS = 32
MAX_QUEUE = 24  # with four slots fewer places than clients: some are refused and come again
PREFIX_CACHE_MIB = 4  # less than the requests fill: blocks come and go
TENTHS = 10
CANCELLED, ATTACKS = 0.15, 0.05  # shares of the requests
GRACE_S, LATE_S = 3, 2.0  # for answers in flight at a stop, and for the processes' own end after it
TIMEOUT_S = 120.0
SCHEMA = {
    "type": "object",
    "properties": {
        "ok": {"type": "boolean"},
        "count": {"type": "integer", "minimum": -9, "maximum": 99},
        "words": {"type": "array", "items": {"enum": ["a", "b\n", "ü"]}, "minItems": 1, "maxItems": 3},
    },
    "required": ["ok", "count", "words"],
    "additionalProperties": False,
}
TOOL = {"type": "function", "function": {"name": "note", "parameters": SCHEMA}}


@dataclass(frozen=True)
class Question:
    """One request; its answer is always the same."""

    path: str
    body: Mapping[str, Any]


@dataclass
class Answer:
    """What came: texts of an answer and of its calls, and why it ended (None: the client left)."""

    text: str = ""
    calls: str = ""
    finish_reason: str | None = None


class Refused(Exception):
    """Come again later."""


@dataclass
class Server:
    """A server of its own, as a user starts it."""

    process: subprocess.Popen[str]
    host: str
    port: int

    @classmethod
    def start(cls, artifact: Path) -> Server:
        command = [sys.executable, "-m", "llmforge", "serve", str(artifact), "--port", "0", "--grace", str(GRACE_S)]
        command += ["--max-queue", str(MAX_QUEUE), "--prefix-cache", str(PREFIX_CACHE_MIB)]
        process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env={**os.environ})
        assert process.stderr is not None
        for line in process.stderr:
            if found := re.search(r"http://([\d.]+):(\d+)/v1", line):
                threading.Thread(target=process.stderr.read, daemon=True).start()
                return cls(process, found[1], int(found[2]))
        raise SystemExit(f"the server did not start: exit code {process.wait()}")

    def processes(self) -> list[psutil.Process]:
        """Give the server, its engine, and what else they have started."""
        this = psutil.Process(self.process.pid)
        return [this, *this.children(recursive=True)]

    @contextlib.contextmanager
    def sent(self, path: str, body: bytes, **headers: str) -> Iterator[http.client.HTTPResponse]:
        connection = http.client.HTTPConnection(self.host, self.port, timeout=TIMEOUT_S)
        with contextlib.closing(connection):
            connection.request("POST", path, body, {"Content-Type": "application/json", **headers})
            yield connection.getresponse()

    def ask(self, question: Question, *, stream: bool = False, cancel_after: int | None = None) -> Answer:
        """Send a question and read its answer, or leave after some events.

        Raises:
            Refused: there was no room.
        """
        answer, body = Answer(), {**question.body, "stream": stream or cancel_after is not None}
        with self.sent(question.path, json.dumps(body).encode()) as response:
            if response.status in (http.client.TOO_MANY_REQUESTS, http.client.SERVICE_UNAVAILABLE):
                raise Refused(response.read().decode())
            if response.status != http.client.OK:
                raise ValueError(f"status {response.status}: {response.read()[:300]!r}")
            if not body["stream"]:
                _add(answer, json.loads(response.read()))
                return answer
            events = 0
            for line in response:
                if line.startswith(b"data: {"):
                    event, events = json.loads(line[6:]), events + 1
                    if "error" in event:
                        raise ValueError(event["error"]["message"])
                    _add(answer, event)
                    if events == cancel_after and answer.finish_reason is None:
                        return answer
            if answer.finish_reason is None:
                raise ValueError("the stream broke off")
        return answer

    def busy(self) -> str | None:
        """Return the metrics of what goes on, None where nothing does."""
        connection = http.client.HTTPConnection(self.host, self.port, timeout=TIMEOUT_S)
        with contextlib.closing(connection):
            connection.request("GET", "/metrics")
            lines = connection.getresponse().read().decode().splitlines()
        names = ("llmforge_requests_running", "llmforge_requests_waiting", "llmforge_kv_tokens_used")
        return ", ".join(line for line in lines if line.startswith(names) and float(line.split()[-1])) or None


def _add(answer: Answer, event: Mapping[str, Any]) -> None:
    for choice in event["choices"]:
        message = choice.get("message") or choice.get("delta") or {"content": choice.get("text")}
        answer.text += message.get("content") or ""
        for call in message.get("tool_calls") or ():  # ids are new ones each time
            answer.calls += (call["function"].get("name") or "") + call["function"]["arguments"]
        answer.finish_reason = choice["finish_reason"] or answer.finish_reason


def questions(draw: random.Random, count: int, *, greedy: bool = False) -> list[Question]:
    """Make distinct requests of 1 to 24 tokens, and some held to a schema or to calls, which take what they need."""
    made = []
    for i in range(count):
        prompt = f"{i} " + " ".join(draw.choices(WORDS, k=draw.randint(1, 40)))
        kind = "text" if greedy else ("text", "text", "chat", "schema", "tools")[i % 5]
        body: dict[str, Any] = {"max_tokens": draw.randint(1, 24), "temperature": 0}
        if not greedy and i % 3 == 0:  # few candidates: rounding that differs by batch size must not decide a draw
            body |= {"temperature": 0.7, "top_k": 4, "seed": i}
        if kind != "text":
            body["messages"] = [{"role": "user", "content": prompt}]
        if kind == "schema":
            form = {"type": "json_schema", "json_schema": {"name": "it", "schema": SCHEMA}}
            body |= {"response_format": form, "max_tokens": 400}  # a model may write much white space
        if kind == "tools":
            body |= {"tools": [TOOL], "tool_choice": "required", "parallel_tool_calls": False, "max_tokens": 200}
        made.append(Question("/v1/completions", {"prompt": prompt, **body}) if kind == "text" else
                    Question("/v1/chat/completions", body))  # fmt: skip
    return made


def attacks() -> dict[str, tuple[str, Callable[[], bytes], frozenset[int]]]:
    """Name attacks: their path, their body, and the statuses that are due to them."""

    def text(**fields: Any) -> bytes:
        return json.dumps({"max_tokens": 1, **fields}).encode()

    path, refused = "/v1/completions", frozenset({400, 413})
    unsupported = {"type": "json_schema", "json_schema": {"name": "it", "schema": {"type": "object", "not": {}}}}
    return {
        "long prompt": (path, lambda: text(prompt="ab " * 700_000), refused),
        "prompt of the longest length": (path, lambda: text(prompt="a b" * 21_000), refused),
        "many choices": (path, lambda: text(prompt="a", guided_choice=[f"{i}" for i in range(100_000)]), refused),
        "large constraint": (
            path,
            lambda: text(prompt="a", guided_choice=[f"{i} {time.monotonic_ns()}" for i in range(1_800)]),
            frozenset({200, 429, 503}),
        ),
        "brackets": (path, lambda: b"[" + b"[]," * 300_000 + b"[]]", refused),
        "string without an end": (path, lambda: b"[" + b"," * 20_000 + b'"' + b'\\"' * 300_000, refused),
        "many messages": (
            "/v1/chat/completions",
            lambda: json.dumps({"messages": [{"role": "user", "content": "a"}] * 20_000}).encode(),
            refused,
        ),
        "many prompts": (path, lambda: text(prompt=["word " * 1000] * 150), refused),
        "half a character": (path, lambda: b'{"prompt": "\\ud83d"}', refused),
        "no JSON": (path, lambda: os.urandom(1000), refused),
        "packed body": (path, lambda: gzip.compress(bytes(10_000_000)), frozenset({400, 413, 415})),
        "unknown path": ("/v1/secrets", lambda: b"{}", frozenset({404})),
        "schema that cannot be held to": (path, lambda: text(prompt="a", response_format=unsupported), refused),
    }


@dataclass
class Soak:
    """Runs the clients, and collects what went wrong."""

    server: Server
    seed: int
    asked: list[tuple[Question, Answer]]
    problems: list[str] = field(default_factory=list)
    ends: Counter[str] = field(default_factory=Counter)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def run(self, numbers: range) -> None:
        """Send the requests of these numbers, and wait until nothing goes on."""
        waiting = iter(numbers)

        def serve_client() -> None:
            while True:
                with self.lock:
                    number = next(waiting, None)
                if number is None:
                    return
                try:
                    self.one(number)
                except Exception as error:  # noqa: BLE001 (a request that is lost is what is looked for)
                    self.problems.append(f"request {number}: {type(error).__name__}: {error}")

        threads = [threading.Thread(target=serve_client) for _ in range(CLIENTS)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        end = time.monotonic() + 10
        while (busy := self.server.busy()) and time.monotonic() < end:
            time.sleep(0.05)
        if busy:
            self.problems.append(f"not idle after request {numbers[-1]}: {busy}")

    def one(self, number: int) -> None:
        """Send one request in its own way, again until it is taken on, and check its answer."""
        draw = random.Random(f"{self.seed} {number}")
        kind = draw.random()
        if kind < ATTACKS:
            self.attack(draw.choice([*attacks(), "trickle", "broken upload", "connection without a request"]))
            return
        (question, alone), stream = draw.choice(self.asked), draw.random() < 0.5
        cancel_after = draw.randint(1, 8) if kind < ATTACKS + CANCELLED else None
        while True:
            try:
                answer = self.server.ask(question, stream=stream, cancel_after=cancel_after)
                break
            except Refused:
                self.count("refused")
                time.sleep(draw.uniform(0.005, 0.05))
        self.count(answer.finish_reason or "left")
        if answer.finish_reason is not None and answer != alone:
            self.problems.append(f"request {number}: {answer}; alone: {alone}")
        if not (alone.text.startswith(answer.text) and alone.calls.startswith(answer.calls)):
            self.problems.append(f"request {number}: {answer} is no beginning of {alone}")

    def attack(self, name: str) -> None:
        """Send one attack, and check that it got what is due to it."""
        known = attacks()
        self.count(f"attack: {name}")
        if name not in known:
            with socket.create_connection((self.server.host, self.server.port), TIMEOUT_S) as connection:
                head = (
                    f"POST /v1/completions HTTP/1.1\r\nHost: {self.server.host}\r\nContent-Type: application/json\r\n"
                )
                if name == "trickle":
                    for byte in head.encode()[:20]:
                        connection.sendall(bytes([byte]))
                        time.sleep(0.02)
                elif name == "broken upload":
                    connection.sendall(head.encode() + b'Content-Length: 100\r\n\r\n{"prompt"')
            return
        path, make, statuses = known[name]
        packed = {"Content-Encoding": "gzip"} if name == "packed body" else {}
        try:
            with self.server.sent(path, make(), **packed) as response:
                response.read()
        except (ConnectionError, http.client.HTTPException):
            self.count("attack: connection closed")  # before the whole body was sent
            return
        if response.status not in statuses:
            self.problems.append(f"attack {name}: status {response.status}; expected {sorted(statuses)}")

    def count(self, end: str) -> None:
        with self.lock:
            self.ends[end] += 1


def answered_alone(server: Server, asked: list[Question]) -> list[tuple[Question, Answer]]:
    """Ask for each answer by itself."""
    made = [(question, server.ask(question)) for question in asked]
    for question, answer in made:
        if "response_format" in question.body:
            _check(json.loads(answer.text))
        if "tools" in question.body:
            _check(json.loads(answer.calls.removeprefix("note")))
    return made


def _check(value: Any) -> None:
    """Assert that a value is one of `SCHEMA`."""
    assert value.keys() == SCHEMA["properties"].keys(), value  # type: ignore[attr-defined]
    assert type(value["ok"]) is bool, value
    assert type(value["count"]) is int and -9 <= value["count"] <= 99, value  # noqa: PT018
    assert 1 <= len(value["words"]) <= 3 and set(value["words"]) <= {"a", "b\n", "ü"}, value  # noqa: PT018


def greedy_differences(server: Server, draw: random.Random, count: int) -> int:
    """Count greedy answers that differ between alone and together."""
    asked = answered_alone(server, questions(draw, count, greedy=True))

    def differs(each: tuple[Question, Answer]) -> bool:
        question, alone = each
        while True:
            with contextlib.suppress(Refused):
                return server.ask(question) != alone
            time.sleep(0.01)

    with ThreadPoolExecutor(CLIENTS) as clients:
        return sum(clients.map(differs, asked))


def stopped_under_load(artifact: Path, draw: random.Random) -> tuple[float, list[str]]:
    """Start a server, load it with answers that are longer than the grace period, too, and stop it.

    Returns the seconds from SIGTERM to the end of the last process, and what was wrong.
    """
    server = Server.start(artifact)
    problems: list[str] = []
    stopped = threading.Event()
    answered = itertools.count()

    def load(number: int) -> None:
        body = {"prompt": f"{number} the file", "max_tokens": [8, 64, 10_000][number % 3], "ignore_eos": True}
        body["max_tokens"] = min(body["max_tokens"], 900)  # type: ignore[type-var]
        while not stopped.is_set():
            try:
                server.ask(Question("/v1/completions", body), stream=number % 2 == 0)
                next(answered)
            except Refused:
                time.sleep(0.01)
            except (OSError, http.client.HTTPException, ValueError) as error:
                if not stopped.is_set():
                    problems.append(f"before the stop: {type(error).__name__}: {error}")
                return

    clients = [threading.Thread(target=load, args=(number,)) for number in range(CLIENTS)]
    for client in clients:
        client.start()
    time.sleep(draw.uniform(0.3, 1.5))
    processes = server.processes()
    stopped.set()
    began = time.monotonic()
    server.process.send_signal(signal.SIGTERM)
    _, alive = psutil.wait_procs(processes, timeout=GRACE_S + 30)
    took_s = time.monotonic() - began
    for process in alive:
        problems.append(f"{process} is left")
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    for client in clients:
        client.join()
    if not next(answered):
        problems.append("nothing was answered before the stop")
    if code := server.process.wait():
        problems.append(f"exit code {code}")
    if took_s > GRACE_S + LATE_S:
        problems.append(f"{took_s:.1f} s from SIGTERM to the end; the grace period is {GRACE_S} s")
    return took_s, problems


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("artifact", type=Path)
    parser.add_argument("--requests", type=int, default=10_000)
    parser.add_argument("--greedy", type=int, default=1_000)
    parser.add_argument("--stops", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--max-growth-mib", type=float, default=16.0)
    options = parser.parse_args()
    draw = random.Random(options.seed)
    server = Server.start(options.artifact)
    differ = greedy_differences(server, draw, options.greedy)
    soak = Soak(server, options.seed, answered_alone(server, questions(draw, QUESTIONS)))
    if differ:
        soak.problems.append(f"{differ} of {options.greedy} greedy answers differ between alone and together")
    with ThreadPoolExecutor(CLIENTS) as clients:  # what reading the largest bodies side by side takes is not growth
        list(clients.map(soak.attack, [*attacks()] * 4))
    samples: list[list[tuple[int, int]]] = []  # after each tenth: resident bytes and open files of each process
    began = time.perf_counter()
    for tenth in range(TENTHS):
        soak.run(range(options.requests * tenth // TENTHS, options.requests * (tenth + 1) // TENTHS))
        time.sleep(1)  # connections are closed
        samples.append([(each.memory_info().rss, each.num_fds()) for each in server.processes()])
    seconds = time.perf_counter() - began
    server.process.send_signal(signal.SIGTERM)
    if code := server.process.wait(GRACE_S + 30):
        soak.problems.append(f"exit code {code}")
    figures: dict[str, Any] = {}
    if len({len(each) for each in samples[1:]}) != 1:
        soak.problems.append(f"processes came or went: {[len(each) for each in samples]}")
    else:
        resident, files = np.moveaxis(np.array(samples[1:], np.float64), 2, 0)  # [tenths - 1, processes] each
        # Per process, in the order of their start: the server, then its engine.
        slopes = np.polyfit(np.arange(len(resident)), resident, 1)[0] * (len(resident) - 1) / 2**20
        figures = {
            "resident_mib": [[round(float(each) / 2**20, 1) for each in row] for row in resident],
            "growth_mib": [round(float(each), 2) for each in slopes],
            "files": [[int(each) for each in row] for row in (files[0], files[-1])],
        }
        if max(slopes) > options.max_growth_mib:
            soak.problems.append(f"resident memory grew: {figures}")
        if (files[-1] > files[0]).any():
            soak.problems.append(f"open files grew: {files.tolist()}")
    stops = []
    for number in range(options.stops):
        took_s, wrong = stopped_under_load(options.artifact, draw)
        stops.append(took_s)
        soak.problems += [f"stop {number}: {each}" for each in wrong]
    print(
        json.dumps(
            {
                "requests": options.requests,
                "seconds": round(seconds, 1),
                "ends": dict(sorted(soak.ends.items())),
                **figures,
                "greedy": options.greedy,
                "greedy_that_differ": differ,
                "stops": len(stops),
                "stop_s": [round(each, 2) for each in (statistics.median(stops), max(stops))] if stops else None,
                "problems": len(soak.problems),
            }
        )
    )
    for problem in soak.problems[:20]:
        print(problem, file=sys.stderr)
    return 1 if soak.problems else 0


if __name__ == "__main__":
    sys.exit(main())
