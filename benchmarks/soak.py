"""Serve thousands of short requests with cancels, deadlines and slow readers, and find nothing lost or mixed up.

    python benchmarks/soak.py ARTIFACT [--requests 10000] [--url http://127.0.0.1:8000 --pid SERVER]
    python benchmarks/soak.py ARTIFACT --triton http://127.0.0.1:8000 http://127.0.0.1:8002 MODEL --pid STUB

The artifact must be one without quantization (recipes/fp32.yaml): its answers do not depend on what runs beside them,
so that each must equal the answer to the same request alone, which is made first. Clients in threads draw requests
from a fixed set. Some leave in the middle, some read slowly, some have a deadline that is too short; when the queue is
full they come again. In the end: every request ended once, with its own tokens, or the first of them where it was cut
short; no slot is taken, nothing waits; and resident memory does not grow (a line fitted through its samples after the
first quarter of the requests).

Exit code 0 and one JSON object where all holds; 1 and what does not, otherwise.
"""

from __future__ import annotations

import argparse
import contextlib
import http.client
import itertools
import json
import os
import random
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import urlsplit

import numpy as np
import psutil

from llmforge import serving
from llmforge.base.errors import Unavailable
from llmforge.serving import Engine, EngineOptions, Request, Runner, Sampling

WORDS = "the file system module returns a list of values when path exists and raises an error otherwise".split()  # noqa: SIM905
QUESTIONS = 64  # distinct requests
CLIENTS = 32
MAX_QUEUE = 22  # with 8 slots two places fewer than the clients: some are refused and come again
PREFIX_CACHE_BYTES = 4 << 20  # less than the requests fill: blocks come and go
SAMPLES = 100  # of resident memory
# Shares of the requests.
CANCELLED, SLOW, HURRIED = 0.15, 0.05, 0.05
SLOW_READ_S = 0.02  # a slow reader's pause after each piece
DEADLINE_S = 0.005


@dataclass(frozen=True)
class Question:
    """One request and the only right answer to it."""

    request: Request
    text: str
    finish_reason: str


@dataclass
class Output:
    """What came of one request; `finish_reason` None where the client left."""

    text: str = ""
    finish_reason: str | None = None


class Client(Protocol):
    def stream(self, question: Question, deadline_s: float | None) -> Iterator[tuple[str, str | None]]:
        """Yield texts and the finish reason with the last one; closing the iterator cancels.

        Raises:
            Unavailable: come again later.
        """
        ...

    def idle(self) -> str | None:
        """Return what is still going on, None where nothing is."""
        ...


class InProcess:
    def __init__(self, engine: Engine) -> None:
        self.engine = engine

    def stream(self, question: Question, deadline_s: float | None) -> Iterator[tuple[str, str | None]]:
        request = Request(question.request.prompt, question.request.sampling, deadline_s)
        with contextlib.closing(self.engine.stream(request)) as chunks:
            for chunk in chunks:
                yield chunk.text, chunk.finish_reason

    def idle(self) -> str | None:
        stats = self.engine.stats()
        busy = stats.running or stats.waiting or stats.kv_tokens_used
        return f"{stats}" if busy else None


class OverHttp:
    """`llmforge serve` at an address; a client that leaves closes its connection. Deadlines are the server's own."""

    def __init__(self, url: str) -> None:
        self.netloc = urlsplit(url).netloc

    def stream(self, question: Question, deadline_s: float | None) -> Iterator[tuple[str, str | None]]:
        body = {"prompt": list(question.request.prompt), "stream": True, **_parameters(question.request.sampling)}
        with contextlib.closing(_events(self.netloc, "/v1/completions", body)) as events:
            for event in events:
                (choice,) = event["choices"]  # an error has none: the request fails with it
                yield choice["text"], choice["finish_reason"]

    def idle(self) -> str | None:
        return _busy(self.netloc)


class OverTriton:
    """`llmforge triton --launch` at an address; the other address is that of its metrics."""

    def __init__(self, url: str, metrics: str, model: str) -> None:
        self.netloc, self.metrics, self.model = urlsplit(url).netloc, urlsplit(metrics).netloc, model

    def stream(self, question: Question, deadline_s: float | None) -> Iterator[tuple[str, str | None]]:
        asked = json.dumps(_parameters(question.request.sampling))
        body = {"input_ids": list(question.request.prompt), "sampling_parameters": asked, "stream": True}
        path = f"/v2/models/{self.model}/generate_stream"
        with contextlib.closing(_events(self.netloc, path, body)) as events:
            for event in events:
                if "error" in event:
                    raise Unavailable(event["error"]) if "the queue is full" in event["error"] else ValueError(event)
                yield event["text_output"], event["finish_reason"] or None

    def idle(self) -> str | None:
        return _busy(self.metrics)


def _parameters(sampling: Sampling) -> dict[str, Any]:
    return {
        "temperature": sampling.temperature,
        "top_k": sampling.top_k,
        "seed": sampling.seed,
        "max_tokens": sampling.max_tokens,
        "stop": list(sampling.stop),
    }


def _events(netloc: str, path: str, body: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield the events of a stream; closing the iterator closes the connection.

    Raises:
        Unavailable: status 429 or 503.
    """
    connection = http.client.HTTPConnection(netloc, timeout=60)
    try:
        connection.request("POST", path, json.dumps(body), {"Content-Type": "application/json"})
        response = connection.getresponse()
        if response.status in (http.client.TOO_MANY_REQUESTS, http.client.SERVICE_UNAVAILABLE):
            raise Unavailable(response.read().decode())
        for line in response:
            if line.startswith(b"data: {"):
                yield json.loads(line[len(b"data: ") :])
    finally:
        connection.close()


def _busy(netloc: str) -> str | None:
    """Return the metrics of what goes on, None where nothing does."""
    connection = http.client.HTTPConnection(netloc, timeout=60)
    connection.request("GET", "/metrics")
    lines = connection.getresponse().read().decode().splitlines()
    connection.close()
    names = ("llmforge_requests_running", "llmforge_requests_waiting", "llmforge_kv_tokens_used")
    return ", ".join(line for line in lines if line.startswith(names) and float(line.split()[-1])) or None


def questions(runner: Runner, seed: int) -> list[Question]:
    """Make the requests, greedy ones and sampled ones, of 1 to 24 tokens, and answer each alone."""
    draw = random.Random(seed)
    made = []
    for i in range(QUESTIONS):
        prompt = tuple(runner.encode(" ".join(draw.choices(WORDS, k=draw.randint(1, 40)))))
        sampling = Sampling(
            temperature=draw.choice([0.0, 0.7]),
            top_k=4,  # few candidates: rounding that differs by batch size must not decide a draw
            seed=i,
            max_tokens=draw.randint(1, 24),
            stop=draw.choice([(), (".", "\n\n")]),
        )
        chunks = list(runner.generate(prompt, sampling))
        reason = chunks[-1].finish_reason
        assert reason is not None
        made.append(Question(Request(prompt, sampling), "".join(chunk.text for chunk in chunks), reason))
    return made


@dataclass
class Soak:
    """Runs the clients, and collects what went wrong."""

    client: Client
    asked: list[Question]
    requests: int
    seed: int
    process: psutil.Process
    problems: list[str] = field(default_factory=list)
    ends: Counter[str] = field(default_factory=Counter)
    memory: list[tuple[int, int]] = field(default_factory=list)  # requests done, resident bytes

    def run(self, clients: int) -> None:
        numbers = itertools.count()
        lock = threading.Lock()
        done = itertools.count(1)

        def serve_client() -> None:
            while True:
                with lock:
                    number = next(numbers)
                if number >= self.requests:
                    return
                try:
                    self.one(number)
                except Exception as error:  # noqa: BLE001 (a request that is lost is what is looked for)
                    self.problems.append(f"request {number}: {type(error).__name__}: {error}")
                with lock:
                    count = next(done)
                    if count % max(1, self.requests // SAMPLES) == 0:
                        self.memory.append((count, self.process.memory_info().rss))

        threads = [threading.Thread(target=serve_client) for _ in range(clients)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    def one(self, number: int) -> None:
        """Send one request in its own way, again until it is taken on, and check its answer."""
        draw = random.Random(f"{self.seed} {number}")
        question, kind = draw.choice(self.asked), draw.random()
        cancel_after = draw.randint(1, 8) if kind < CANCELLED else None
        pause_s = SLOW_READ_S if CANCELLED <= kind < CANCELLED + SLOW else 0.0
        hurried = CANCELLED + SLOW <= kind < CANCELLED + SLOW + HURRIED
        while True:
            try:
                answer = self.read(question, cancel_after, pause_s, DEADLINE_S if hurried else None)
                break
            except Unavailable:
                self.ends["refused"] += 1
                time.sleep(draw.uniform(0.005, 0.02))
        self.ends[answer.finish_reason or "left"] += 1
        whole = answer.finish_reason not in (None, "timeout")
        if whole and (answer.text, answer.finish_reason) != (question.text, question.finish_reason):
            self.problems.append(f"request {number}: {answer}; alone: {question.finish_reason} {question.text!r}")
        if not whole and not question.text.startswith(answer.text):
            self.problems.append(f"request {number}: {answer} is no beginning of {question.text!r}")

    def read(self, question: Question, cancel_after: int | None, pause_s: float, deadline_s: float | None) -> Output:
        answer, pieces = Output(), self.client.stream(question, deadline_s)
        for count, (text, reason) in enumerate(pieces, start=1):
            answer.text += text
            answer.finish_reason = reason
            if count == cancel_after:
                break
            time.sleep(pause_s) if pause_s else None
        pieces.close()  # type: ignore[attr-defined]
        return answer

    def growth_bytes(self) -> float:
        """Fit a line through resident memory after the first quarter; return how much it grows over what is left."""
        count, resident = np.array([each for each in self.memory if each[0] > self.requests / 4], np.float64).T
        slope = np.polyfit(count, resident, 1)[0]
        return float(slope * (count[-1] - count[0]))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("artifact", type=Path)
    parser.add_argument("--requests", type=int, default=10_000)
    parser.add_argument("--clients", type=int, default=CLIENTS)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--speculation", choices=["off", "prompt-lookup"], default="off")
    parser.add_argument("--url", help="of llmforge serve; without one the engine runs in this process")
    parser.add_argument("--triton", nargs=3, metavar=("URL", "METRICS_URL", "MODEL"), help="of llmforge triton")
    parser.add_argument("--pid", type=int, default=os.getpid(), help="process whose memory is watched")
    parser.add_argument("--max-growth-mib", type=float, default=16.0)
    options = parser.parse_args()
    runner = serving.load(options.artifact)
    asked = questions(runner, options.seed)
    engine_options = EngineOptions(
        max_queue=MAX_QUEUE, prefix_cache_bytes=PREFIX_CACHE_BYTES, speculation=options.speculation
    )
    engine = None if options.url or options.triton else Engine(runner, engine_options)
    client: Client
    if engine is not None:
        client = InProcess(engine)
    else:
        client = OverTriton(*options.triton) if options.triton else OverHttp(options.url)
    soak = Soak(client, asked, options.requests, options.seed, psutil.Process(options.pid))
    began = time.perf_counter()
    soak.run(options.clients)
    seconds = time.perf_counter() - began
    # What was cancelled last leaves at the next step, or when the server sees the connection closed.
    for _ in range(50):
        if client.idle() is None:
            break
        time.sleep(0.1)
    if busy := client.idle():
        soak.problems.append(f"not idle in the end: {busy}")
    growth_mib = soak.growth_bytes() / 2**20
    if growth_mib > options.max_growth_mib:
        soak.problems.append(f"resident memory grew by {growth_mib:.1f} MiB")
    if engine is not None:
        finished = engine.stats().finished
        engine.close()
        taken = options.requests
        if sum(finished.values()) != taken:
            soak.problems.append(f"{taken} requests were taken on, and these ended: {finished}")
    print(
        json.dumps(
            {
                "requests": options.requests,
                "seconds": round(seconds, 1),
                "ends": dict(soak.ends),
                "resident_mib": round(soak.memory[-1][1] / 2**20, 1),
                "growth_mib": round(growth_mib, 2),
                "growth_kib_per_1000_requests": round(growth_mib * 2**10 / (0.75 * options.requests / 1000), 1),
                "problems": len(soak.problems),
            }
        )
    )
    for problem in soak.problems[:20]:
        print(problem, file=sys.stderr)
    return 1 if soak.problems else 0


if __name__ == "__main__":
    sys.exit(main())
