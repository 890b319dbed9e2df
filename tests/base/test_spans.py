"""Spans: who lies in whom, how they end, and what a trace viewer gets."""

from __future__ import annotations

import json
import time

import pytest

from llmforge.base import spans
from llmforge.base.progress import Silent
from llmforge.base.spans import Span, TracedProgress, Tracer, chrome_trace


@pytest.fixture
def ended() -> list[Span]:
    return []


def test_spans_lie_in_one_another(ended: list[Span]) -> None:
    tracer = Tracer(ended.append)
    with spans.active(tracer), spans.span("outer", model="tiny"), spans.span("inner"):
        time.sleep(0.01)
        spans.annotate(peak_rss_bytes=7)
    inner, outer = ended
    assert (inner.name, outer.name) == ("inner", "outer")
    assert inner.parent_span_id == outer.span_id
    assert outer.parent_span_id is None
    assert inner.trace_id == outer.trace_id == tracer.trace_id
    assert inner.end_ns is not None
    assert outer.end_ns is not None
    assert outer.start_ns <= inner.start_ns <= inner.end_ns - 10_000_000 < inner.end_ns <= outer.end_ns
    assert abs(outer.start_ns - time.time_ns()) < 60e9
    assert inner.attributes == {"peak_rss_bytes": 7}
    data = outer.data()
    assert len(bytes.fromhex(data["trace_id"])) == 16
    assert len(bytes.fromhex(data["span_id"])) == 8
    assert data["attributes"] == {"model": "tiny"}
    assert json.loads(json.dumps(data)) == data


def test_nothing_happens_where_nobody_traces(ended: list[Span]) -> None:
    with spans.span("alone"):
        spans.annotate(x=1)
    spans.annotate(x=2)
    with spans.active(Tracer(ended.append)), spans.span("traced"):
        pass
    assert [(span.name, span.attributes) for span in ended] == [("traced", {})]


def test_an_exception_stands_in_every_span_that_it_ends(ended: list[Span]) -> None:
    tracer = Tracer(ended.append)
    with pytest.raises(RuntimeError), tracer.span("build"):  # noqa: PT012
        progress = TracedProgress(Silent(), tracer)
        progress.stage("Trace")
        progress.stage("Quantize")
        raise RuntimeError("stop")
    assert [(span.name, span.error) for span in ended] == [
        ("Trace", None),
        ("Quantize", "RuntimeError"),
        ("build", "RuntimeError"),
    ]
    assert ended[1].data()["status"] == {"code": "STATUS_CODE_ERROR", "message": "RuntimeError"}


def test_chrome_trace(ended: list[Span]) -> None:
    tracer = Tracer(ended.append)
    with tracer.span("build"), tracer.span("Trace", peak_rss_bytes=7):
        pass
    tracer.begin("open")
    written = chrome_trace(tracer.spans)
    process, build, trace = written["traceEvents"]
    assert process["ph"] == "M"
    assert [event["ph"] for event in (build, trace)] == ["X", "X"]
    assert build["ts"] == 0
    assert 0 <= trace["ts"] <= trace["ts"] + trace["dur"] <= build["dur"]
    assert trace["args"]["peak_rss_bytes"] == 7
    assert trace["args"]["parent_span_id"] == build["args"]["span_id"]
    assert written["otherData"]["trace_id"] == tracer.trace_id
    assert chrome_trace([])["traceEvents"] == [process]
