"""Sends a load to whatever answers: a fixed number of requests in flight, or each at its own time."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Protocol

from llmforge.base.errors import ForgeError, UsageError
from llmforge.measure.load.workload import LoadRequest
from llmforge.metrics.serving import RequestOutcome
from llmforge.runtime.sampling.options import Sampling
from llmforge.serving.engine import Engine
from llmforge.serving.request import Chunk, Request

# Threads that wait for answers of an open loop; a request that is due when all of them wait is sent late, and its
# lateness counts as latency.
MOST_IN_FLIGHT = 512

Done = Callable[[int], None]  # is told how many requests are done


class Responder(Protocol):
    """Something that answers requests; called from several threads at once."""

    description: str

    def answer(self, request: LoadRequest, due_s: float) -> RequestOutcome:
        """Answer one request and wait for its end; `due_s` is when it was due, by `time.perf_counter`."""
        ...


@dataclass
class InProcess:
    """The engine in this process; times are taken by its own thread as tokens are handed over."""

    engine: Engine
    description: str

    def answer(self, request: LoadRequest, due_s: float) -> RequestOutcome:
        """Answer greedily, beyond the end of sequence, until all tokens that were asked for are there."""
        tokens: list[float] = []
        ids: list[int] = []
        ended = threading.Event()
        errors: list[str] = []

        def receive(item: Chunk | ForgeError) -> None:
            if isinstance(item, ForgeError):
                errors.append(item.message)
            elif item.token_id is not None:
                tokens.append(time.perf_counter())
                ids.append(item.token_id)
            elif item.finish_reason != "length":
                errors.append(f"ended with {item.finish_reason}")
            if isinstance(item, ForgeError) or item.finish_reason is not None:
                ended.set()

        sampling = Sampling(max_tokens=request.output_tokens, ignore_eos=True)
        try:
            self.engine.submit(Request(request.prompt, sampling), receive)
        except ForgeError as error:
            receive(error)
        ended.wait()
        return RequestOutcome(
            sent_s=due_s,
            token_s=tuple(tokens),
            ended_s=time.perf_counter(),
            prompt_tokens=len(request.prompt),
            output_tokens=len(tokens),
            error=errors[0] if errors else None,
            token_ids=tuple(ids),
        )


def closed_loop(
    subject: Responder, load: Sequence[LoadRequest], concurrency: int, done: Done = lambda count: None
) -> list[RequestOutcome]:
    """Keep `concurrency` requests in flight until the load is sent; return outcomes in the order of the load.

    Raises:
        UsageError: fewer than one request in flight.
    """
    if concurrency < 1:
        raise UsageError(f"{concurrency} requests in flight: expected 1 or more")
    with ThreadPoolExecutor(concurrency, "bench") as pool:
        futures = [pool.submit(lambda each: subject.answer(each, time.perf_counter()), each) for each in load]
        return _gather(futures, done)


def conversations(
    subject: Responder, sessions: Sequence[Sequence[LoadRequest]], concurrency: int
) -> list[RequestOutcome]:
    """Hold `concurrency` conversations at once; return the outcomes of all turns, one conversation after another.

    The prompt of a turn is that of the turn before, its answer, and what the turn adds. A turn that fails ends its
    conversation: those that would follow are failures, too, with no time of their own.

    Raises:
        UsageError: fewer than one conversation at once.
    """
    if concurrency < 1:
        raise UsageError(f"{concurrency} conversations at once: expected 1 or more")

    def hold(turns: Sequence[LoadRequest]) -> list[RequestOutcome]:
        said: tuple[int, ...] = ()
        outcomes: list[RequestOutcome] = []
        for turn in turns:
            if outcomes and outcomes[-1].error is not None:
                now = time.perf_counter()
                outcomes.append(RequestOutcome(now, (), now, 0, 0, error="the turn before it failed"))
                continue
            request = replace(turn, prompt=said + turn.prompt)
            outcomes.append(subject.answer(request, time.perf_counter()))
            said = request.prompt + outcomes[-1].token_ids
        return outcomes

    with ThreadPoolExecutor(concurrency, "bench") as pool:
        return [outcome for held in pool.map(hold, sessions) for outcome in held]


def open_loop(subject: Responder, load: Sequence[LoadRequest], done: Done = lambda count: None) -> list[RequestOutcome]:
    """Send each request at its `at_s`, whatever is still in flight; return outcomes in the order of the load.

    Raises:
        UsageError: a request has no arrival.
    """
    arrivals = [request.at_s for request in load if request.at_s is not None]
    if len(arrivals) < len(load):
        raise UsageError("a load without arrival times cannot be replayed")
    with ThreadPoolExecutor(min(len(load), MOST_IN_FLIGHT), "bench") as pool:
        began = time.perf_counter()
        futures: list[Future[RequestOutcome]] = []
        for request, at_s in zip(load, arrivals, strict=True):
            due = began + at_s
            time.sleep(max(0.0, due - time.perf_counter()))
            futures.append(pool.submit(subject.answer, request, due))
        return _gather(futures, done)


def _gather(futures: list[Future[RequestOutcome]], done: Done) -> list[RequestOutcome]:
    outcomes = []
    for future in futures:
        outcomes.append(future.result())
        done(len(outcomes))
    return outcomes
