"""OpenTelemetry spans of `llmforge serve`: in memory, and as a collector gets them from the command."""

from __future__ import annotations

import http.client
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from starlette.testclient import TestClient

from llmforge.artifact import Artifact
from llmforge.base import extras
from llmforge.base.errors import UsageError
from llmforge.cli import cli
from llmforge.serving import Engine, EngineOptions, Request, load
from llmforge.serving import http as serve
from llmforge.serving.http.app import create_app
from llmforge.serving.http.telemetry import Telemetry, wanted

from ...models.tool_templates import HERMES
from ...samples.small_artifact import publish_small
from ...servers.otlp_collector import collecting

ROOT = Path(__file__).parents[3]
TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
PARENTS = {"traceparent": f"00-{TRACE}-{PARENT}-01", "tracestate": "vendor=1"}
NEEDS = "opentelemetry.sdk.trace"


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory, sample_checkpoint: Path) -> Artifact:
    return publish_small(tmp_path_factory.mktemp("telemetry"), sample_checkpoint)


@pytest.fixture(scope="module")
def engine(small: Artifact) -> Iterator[Engine]:
    with Engine(load(small.path), EngineOptions(max_queue=8)) as engine:
        yield engine


class Traced:
    """The application with spans that stay in memory."""

    def __init__(self, engine: Any) -> None:
        trace = pytest.importorskip(NEEDS, reason="the extra telemetry is not installed")
        from opentelemetry.sdk.trace.export import SimpleSpanProcessor
        from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

        self._exporter = InMemorySpanExporter()
        provider = trace.TracerProvider(shutdown_on_exit=False)
        provider.add_span_processor(SimpleSpanProcessor(self._exporter))
        state = serve.ServerState()
        self.log: list[serve.AccessRecord] = []
        app = serve.AuthMiddleware(
            create_app(engine, "small", state), serve.AccessPolicy(), state, self.log.append, Telemetry(provider)
        )
        self.client = TestClient(app, base_url="http://127.0.0.1:8000", raise_server_exceptions=False)

    def spans(self, count: int = 0) -> list[Any]:
        """Take the spans that have ended, by their beginnings; at least `count`, which may take a moment."""
        end = time.monotonic() + 10
        while len(found := self._exporter.get_finished_spans()) < count and time.monotonic() < end:
            time.sleep(0.01)
        self._exporter.clear()
        return sorted(found, key=lambda span: (span.kind.name != "SERVER", span.start_time))


@pytest.fixture
def traced(engine: Engine) -> Traced:
    return Traced(engine)


@pytest.mark.parametrize("stream", [False, True])
def test_a_request_is_a_span_in_its_callers_trace_with_queue_prefill_and_decode_inside(
    traced: Traced, stream: bool
) -> None:
    body = {"prompt": "If the file", "max_tokens": 5, "temperature": 0.5, "ignore_eos": True, "stream": stream}
    answer = traced.client.post("/v1/completions", json=body, headers={**PARENTS, "X-Request-Id": "mine"})
    assert answer.status_code == 200
    server, queue, prefill, decode = traced.spans()
    assert [each.name for each in (server, queue, prefill, decode)] == [
        "POST /v1/completions", "queue", "prefill", "decode",
    ]  # fmt: skip
    assert server.kind.name == "SERVER"
    assert f"{server.context.trace_id:032x}" == TRACE
    assert f"{server.parent.span_id:016x}" == PARENT
    assert server.context.trace_state.to_header() == "vendor=1"
    for child in (queue, prefill, decode):
        assert child.parent.span_id == server.context.span_id
        assert child.context.trace_id == server.context.trace_id
        assert child.attributes["llmforge.choice"] == 0
    assert server.start_time <= queue.start_time <= queue.end_time <= prefill.end_time <= decode.end_time
    assert (queue.end_time, prefill.end_time) == (prefill.start_time, decode.start_time)
    assert decode.end_time <= server.end_time
    assert abs(server.end_time / 1e9 - time.time()) < 5
    seen = server.attributes
    assert (seen["http.request.method"], seen["http.route"]) == ("POST", "/v1/completions")
    assert (seen["http.response.status_code"], seen["url.path"]) == (200, "/v1/completions")
    assert seen["http.response.header.x-request-id"] == ("mine",)
    assert (seen["gen_ai.operation.name"], seen["gen_ai.request.model"]) == ("text_completion", "small")
    assert (seen["gen_ai.request.max_tokens"], seen["gen_ai.request.temperature"]) == (5, 0.5)
    assert seen["gen_ai.request.stream"] is stream
    assert seen["gen_ai.response.finish_reasons"] == ("length",)
    assert decode.attributes["gen_ai.response.finish_reasons"] == ("length",)
    usage = (seen["gen_ai.usage.input_tokens"], seen["gen_ai.usage.output_tokens"])
    assert usage == (prefill.attributes["gen_ai.usage.input_tokens"], 5)
    assert decode.attributes["gen_ai.usage.output_tokens"] == 5
    if not stream:
        assert usage[0] == answer.json()["usage"]["prompt_tokens"]
        assert seen["gen_ai.response.id"] == answer.json()["id"]
    ttft_s = seen["gen_ai.response.time_to_first_chunk"]
    assert ttft_s == pytest.approx((prefill.end_time - server.start_time) / 1e9, abs=1e-4)
    assert server.status.status_code.name == "UNSET"
    (record,) = traced.log
    assert (record.trace_id, record.request_id) == (TRACE, "mine")


def test_prompts_of_one_call_count_once_for_all_their_answers(traced: Traced) -> None:
    body = {"prompt": ["If the file", "so"], "n": 2, "max_tokens": 3, "ignore_eos": True}
    usage = traced.client.post("/v1/completions", json=body).json()["usage"]
    server, *children = traced.spans()
    assert server.attributes["gen_ai.usage.input_tokens"] == usage["prompt_tokens"]
    assert server.attributes["gen_ai.usage.output_tokens"] == usage["completion_tokens"] == 12
    assert server.attributes["gen_ai.response.finish_reasons"] == ("length",) * 4
    assert server.attributes["gen_ai.request.choice.count"] == 2
    made = sorted((each.attributes["llmforge.choice"], each.name) for each in children)
    assert made == [(i, name) for i in range(4) for name in ("decode", "prefill", "queue")]


def test_what_is_refused_or_fails_says_so_and_probes_make_no_spans(traced: Traced) -> None:
    for path in ("/health", "/ready", "/metrics"):
        assert traced.client.get(path).status_code == 200
    assert traced.spans() == []
    traced.client.post("/v1/completions", json={"prompt": 3})
    traced.client.get("/nothing" + "x" * 3000)
    traced.client.request("ODD", "/v1/models")
    wrong, unknown, odd = traced.spans()
    assert (wrong.attributes["error.type"], wrong.status.status_code.name) == ("400", "UNSET")
    assert (unknown.name, unknown.attributes["http.response.status_code"]) == ("GET", 404)
    assert len(unknown.attributes["url.path"]) == 256
    assert odd.attributes["http.request.method"] == "_OTHER"
    assert "ODD" not in odd.name


class Broken:
    """An engine that fails in different ways."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self.request: Callable[[Request], Request] = lambda request: request

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def submit(self, request: Request, receive: Any) -> Any:
        return self._engine.submit(self.request(request), receive)


def test_a_deadline_and_a_bug_are_errors(engine: Engine) -> None:
    broken = Broken(engine)
    traced = Traced(broken)
    broken.request = lambda request: replace(request, timeout_s=1e-4)
    body = {"prompt": "If the file", "max_tokens": 100, "ignore_eos": True}
    assert traced.client.post("/v1/completions", json=body).status_code == 504
    server, queue, *_ = traced.spans()
    assert (server.attributes["error.type"], server.status.status_code.name) == ("504", "ERROR")
    assert (queue.name, queue.parent.span_id) == ("queue", server.context.span_id)
    assert traced.client.post("/v1/completions", json={**body, "stream": True}).status_code == 200
    server, *_ = traced.spans()
    assert (server.attributes["error.type"], server.status.status_code.name) == ("504", "ERROR")

    def bug(request: Request) -> Request:
        raise ZeroDivisionError

    broken.request = bug
    assert traced.client.post("/v1/completions", json=body).status_code == 500
    (server,) = traced.spans()
    assert server.attributes["error.type"] in ("500", "ZeroDivisionError")
    assert server.status.status_code.name == "ERROR"


def test_what_a_client_leaves_behind_is_told_when_the_engine_ends_it(engine: Engine) -> None:
    traced = Traced(engine)
    stream = {"prompt": "If the file", "max_tokens": 240, "ignore_eos": True, "stream": True}
    received = iter([{"type": "http.request", "body": json.dumps(stream).encode()}])
    left = threading.Event()

    async def main() -> None:
        import asyncio

        sent: list[Any] = []

        async def receive() -> Any:
            for message in received:
                return message
            while len(sent) < 3:
                await asyncio.sleep(0.001)
            return {"type": "http.disconnect"}

        async def send(message: Any) -> None:
            sent.append(message)

        scope = {
            "type": "http", "http_version": "1.1", "method": "POST", "path": "/v1/completions", "scheme": "http",
            "headers": [(b"content-type", b"application/json"), (b"host", b"127.0.0.1")], "query_string": b"",
            "client": ("127.0.0.1", 1), "server": ("127.0.0.1", 8000), "root_path": "", "raw_path": b"/v1/completions",
        }  # fmt: skip
        await traced.client.app(scope, receive, send)
        left.set()

    import asyncio

    asyncio.run(main())
    assert left.is_set()
    server, queue, prefill, decode = traced.spans(4)
    assert decode.attributes["gen_ai.response.finish_reasons"] == ("cancelled",)
    assert 1 <= decode.attributes["gen_ai.usage.output_tokens"] < 240
    assert {each.parent.span_id for each in (queue, prefill, decode)} == {server.context.span_id}


def test_a_call_of_a_tool_is_the_reason_that_the_client_is_told(tmp_path: Path, sample_checkpoint: Path) -> None:
    pytest.importorskip("llguidance")
    artifact = publish_small(tmp_path, sample_checkpoint, context=1024)
    template = artifact.path / "tokenizer" / "chat_template.jinja"
    template.chmod(0o644)
    template.write_text(HERMES)
    with Engine(load(artifact.path)) as engine:
        traced = Traced(engine)
        tool = {"type": "function", "function": {"name": "ping"}}
        body = {"messages": [{"role": "user", "content": "a"}], "tools": [tool], "tool_choice": "required"}
        body["parallel_tool_calls"] = False
        answer = traced.client.post("/v1/chat/completions", json=body).json()
        assert answer["choices"][0]["finish_reason"] == "tool_calls"
        server, *_ = traced.spans()
        assert server.attributes["gen_ai.response.finish_reasons"] == ("tool_calls",)
        assert server.attributes["gen_ai.operation.name"] == "chat"


@pytest.mark.parametrize(
    "headers",
    [
        {"traceparent": "00-" + "0" * 32 + f"-{PARENT}-01"},
        {"traceparent": "ff-" + TRACE + f"-{PARENT}-01"},
        {"traceparent": "00-" + "g" * 32 + f"-{PARENT}-01"},
        {"traceparent": "x" * 5000, "tracestate": "y" * 5000},
        {"traceparent": b"\xff\x00-"},
        {"traceparent": f"00-{TRACE}-{PARENT}-01", "tracestate": "=,=,,;" * 500, "baggage": "a=b," * 900},
    ],
)
def test_headers_that_name_no_trace_break_nothing(traced: Traced, headers: dict[str, Any]) -> None:
    assert traced.client.get("/v1/models", headers=headers).status_code == 200
    (server,) = traced.spans()
    named = str(headers["traceparent"]).startswith(f"00-{TRACE}")
    assert (f"{server.context.trace_id:032x}" == TRACE, server.parent is not None) == (named, named)
    assert len(server.context.trace_state) <= 32


def test_a_trace_that_is_not_sampled_has_no_spans(traced: Traced) -> None:
    parent = {"traceparent": f"00-{TRACE}-{PARENT}-00"}
    body = {"prompt": "If the file", "max_tokens": 2}
    assert traced.client.post("/v1/completions", json=body, headers=parent).status_code == 200
    assert traced.spans() == []
    assert traced.log[-1].trace_id == TRACE


def test_the_environment_or_the_option_asks() -> None:
    assert not wanted(False, {})
    assert not wanted(False, {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://collector:4318"})  # often set for everybody
    assert wanted(True, {})
    assert wanted(False, {"OTEL_TRACES_EXPORTER": "otlp"})
    assert not wanted(False, {"OTEL_TRACES_EXPORTER": "none"})
    assert not wanted(True, {"OTEL_SDK_DISABLED": "true"})
    with pytest.raises(UsageError, match="OTEL_TRACES_EXPORTER zipkin: expected otlp or none"):
        wanted(False, {"OTEL_TRACES_EXPORTER": "zipkin"})
    with pytest.raises(UsageError, match="OTEL_EXPORTER_OTLP_PROTOCOL grpc: expected http/protobuf"):
        wanted(True, {"OTEL_EXPORTER_OTLP_PROTOCOL": "grpc"})
    traces = {"OTEL_EXPORTER_OTLP_PROTOCOL": "grpc", "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL": "http/protobuf"}
    assert wanted(True, traces)


@pytest.mark.parametrize("asked", [["--telemetry"], []])
def test_without_the_extra_what_asks_for_spans_is_refused(
    small: Artifact, asked: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    found = extras._origin
    monkeypatch.setattr(extras, "_origin", lambda module: None if "opentelemetry" in module else found(module))
    if not asked:
        monkeypatch.setenv("OTEL_TRACES_EXPORTER", "otlp")
    done = CliRunner().invoke(cli, ["serve", str(small.path), "--port", "0", *asked])
    assert done.exit_code == 8
    assert done.output.splitlines() == [
        "error: opentelemetry-exporter-otlp-proto-http, opentelemetry-sdk are not installed",
        "hint: pip install 'llmforge[telemetry]'",
    ]


def serving(small: Artifact, **environment: str) -> tuple[subprocess.Popen[str], int]:
    command = [sys.executable, "-m", "llmforge", "serve", str(small.path), "--port", "0"]
    environment = {**os.environ, **environment, "OTEL_TRACES_EXPORTER": "otlp"}
    server = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, cwd=ROOT, env=environment)
    assert server.stderr is not None
    for line in server.stderr:
        if found := re.search(r"http://127\.0\.0\.1:(\d+)/v1", line):
            return server, int(found[1])
    raise AssertionError(server.wait())


def ask(port: int) -> None:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    body = json.dumps({"prompt": "If the file", "max_tokens": 2, "ignore_eos": True})
    connection.request("POST", "/v1/completions", body, {"Content-Type": "application/json", **PARENTS})
    assert connection.getresponse().status == 200
    connection.close()


def test_a_collector_gets_the_spans_of_the_command_as_the_environment_says(small: Artifact) -> None:
    pytest.importorskip(NEEDS, reason="the extra telemetry is not installed")
    from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

    with collecting() as collector:
        server, port = serving(
            small,
            OTEL_EXPORTER_OTLP_ENDPOINT=collector.url,
            OTEL_EXPORTER_OTLP_HEADERS="x-tenant=mine",
            OTEL_RESOURCE_ATTRIBUTES="deployment.environment.name=test",
        )
        with server:
            ask(port)
            server.send_signal(signal.SIGTERM)
            assert server.wait(60) == 0
            assert server.stderr is not None
            assert "Traceback" not in server.stderr.read()
    assert {path for path, *_ in collector.received} == {"/v1/traces"}
    assert all(headers["x-tenant"] == "mine" for _, headers, _ in collector.received)
    spans = []
    for *_, body in collector.received:
        (sent,) = ExportTraceServiceRequest.FromString(body).resource_spans
        resource = {each.key: each.value.string_value for each in sent.resource.attributes}
        assert resource["service.name"] == "llmforge"
        assert resource["deployment.environment.name"] == "test"
        spans += [span for scope in sent.scope_spans for span in scope.spans]
    assert sorted(span.name for span in spans) == ["POST /v1/completions", "decode", "prefill", "queue"]
    assert {span.trace_id.hex() for span in spans} == {TRACE}


@pytest.mark.thorough
def test_a_collector_that_is_silent_holds_up_neither_answers_nor_the_end(small: Artifact) -> None:
    pytest.importorskip(NEEDS, reason="the extra telemetry is not installed")
    import socket

    with socket.create_server(("127.0.0.1", 0)) as silent:
        endpoint = f"http://127.0.0.1:{silent.getsockname()[1]}"
        server, port = serving(small, OTEL_EXPORTER_OTLP_ENDPOINT=endpoint, OTEL_BSP_SCHEDULE_DELAY="50")
        with server:
            for _ in range(3):
                began = time.monotonic()
                ask(port)
                assert time.monotonic() - began < 3
                time.sleep(0.1)
            server.send_signal(signal.SIGTERM)
            began = time.monotonic()
            assert server.wait(60) == 0
            assert time.monotonic() - began < 9
            server.stderr.close()  # type: ignore[union-attr]


def test_the_variables_of_the_sdk_that_cannot_be_read_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip(NEEDS, reason="the extra telemetry is not installed")
    monkeypatch.setenv("OTEL_BSP_MAX_QUEUE_SIZE", "1")
    monkeypatch.setenv("OTEL_BSP_MAX_EXPORT_BATCH_SIZE", "2")
    with pytest.raises(UsageError, match="an OTEL_ variable cannot be read"):
        Telemetry.from_environment()
