"""Spans of what runs, in the shape of OpenTelemetry's trace data: who called whom, and from when to when.

Ids, names of fields and units are those of OTLP's JSON (opentelemetry-proto, trace.proto), so that a collector takes
them with their resource around them; `chrome_trace` writes the same for viewers of Chrome's trace-event format
(Perfetto, chrome://tracing). Like OpenTelemetry's, the tracer that is active belongs to the context of the call: code
that is worth a span says `with span(…)`, and costs nothing where nobody traces.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

from llmforge.base.progress import Progress

Value = str | int | float | bool


@dataclass
class Span:
    """A piece of work; it lasts until `end_ns` is set."""

    trace_id: str  # 16 bytes, hex
    span_id: str  # 8 bytes, hex
    parent_span_id: str | None
    name: str
    start_ns: int  # since the epoch, as `end_ns`
    end_ns: int | None = None
    attributes: dict[str, Value] = field(default_factory=dict)
    error: str | None = None  # name of the exception that ended it

    def data(self) -> dict[str, Any]:
        """Write it as plain data, with the names of OTLP."""
        return {
            "trace_id": self.trace_id,
            "span_id": self.span_id,
            "parent_span_id": self.parent_span_id,
            "name": self.name,
            "start_time_unix_nano": self.start_ns,
            "end_time_unix_nano": self.end_ns,
            "attributes": self.attributes,
            "status": {"code": "STATUS_CODE_UNSET"} if self.error is None else
            {"code": "STATUS_CODE_ERROR", "message": self.error},
        }  # fmt: skip


@dataclass
class Tracer:
    """Keeps the spans of one trace; each begins inside of the last one that is open."""

    ended: Callable[[Span], None]  # is told of every span that ends
    spans: list[Span] = field(default_factory=list)  # in the order of their beginnings
    trace_id: str = field(default_factory=lambda: secrets.token_hex(16))
    # Wall clock at one moment, and the steady clock that counts from it: a clock that is set back ends no span early.
    _epoch_ns: int = field(default_factory=lambda: time.time_ns() - time.perf_counter_ns())
    _open: list[Span] = field(default_factory=list)

    def begin(self, name: str, **attributes: Value) -> Span:
        """Begin a span."""
        parent = self._open[-1].span_id if self._open else None
        span = Span(self.trace_id, secrets.token_hex(8), parent, name, self._now(), attributes=attributes)
        self.spans.append(span)
        self._open.append(span)
        return span

    def end(self, span: Span, error: BaseException | None = None) -> None:
        """End a span, and first those that are open in it; nothing where it has ended."""
        while span in self._open:
            last = self._open.pop()
            last.end_ns = self._now()
            last.error = None if error is None else type(error).__name__
            self.ended(last)

    @contextmanager
    def span(self, name: str, **attributes: Value) -> Iterator[Span]:
        """Begin a span that ends with the block; an exception stands in it."""
        span = self.begin(name, **attributes)
        try:
            yield span
        except BaseException as error:
            self.end(span, error)
            raise
        self.end(span)

    @property
    def innermost(self) -> Span | None:
        """The span that began last and is open."""
        return self._open[-1] if self._open else None

    def _now(self) -> int:
        return self._epoch_ns + time.perf_counter_ns()


_ACTIVE: ContextVar[Tracer | None] = ContextVar("tracer", default=None)


@contextmanager
def active(tracer: Tracer) -> Iterator[None]:
    """Let `tracer` take the spans of the block."""
    token = _ACTIVE.set(tracer)
    try:
        yield
    finally:
        _ACTIVE.reset(token)


@contextmanager
def span(name: str, **attributes: Value) -> Iterator[None]:
    """Make the block a span, where a tracer is active."""
    tracer = _ACTIVE.get()
    if tracer is None:
        yield
        return
    with tracer.span(name, **attributes):
        yield


def annotate(**attributes: Value) -> None:
    """Add attributes to the span that began last and is open, where a tracer is active."""
    tracer = _ACTIVE.get()
    if tracer is not None and tracer.innermost is not None:
        tracer.innermost.attributes.update(attributes)


class TracedProgress:
    """Hands progress on, and makes each stage a span."""

    def __init__(self, progress: Progress, tracer: Tracer) -> None:
        self._progress = progress
        self._tracer = tracer
        self._stage: Span | None = None

    def stage(self, title: str) -> None:
        """End the span of the last stage, and begin another."""
        if self._stage is not None:
            self._tracer.end(self._stage)
        self._progress.stage(title)
        self._stage = self._tracer.begin(title)

    def advance(self, done: int, total: int) -> None:
        """Hand on how much of the stage is done."""
        self._progress.advance(done, total)


def chrome_trace(spans: Sequence[Span]) -> dict[str, Any]:
    """Write spans that have ended as Chrome's trace events: complete events, in microseconds from the first."""
    begin = min((span.start_ns for span in spans), default=0)
    events: list[dict[str, Any]] = [{"name": "process_name", "ph": "M", "pid": 1, "args": {"name": "llmforge"}}]
    for span in spans:
        if span.end_ns is None:
            continue
        error = {} if span.error is None else {"error": span.error}
        events.append(
            {
                "name": span.name,
                "cat": "llmforge",
                "ph": "X",
                "ts": (span.start_ns - begin) / 1000,
                "dur": (span.end_ns - span.start_ns) / 1000,
                "pid": 1,
                "tid": 1,
                "args": {**span.attributes, **error, "span_id": span.span_id, "parent_span_id": span.parent_span_id},
            }
        )
    facts = {"trace_id": spans[0].trace_id, "start_time_unix_nano": begin} if spans else {}
    return {"traceEvents": events, "displayTimeUnit": "ms", "otherData": facts}
