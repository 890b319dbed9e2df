"""Spans of requests for OpenTelemetry: a server span each, and what its answers waited for and ran.

Names are those of OpenTelemetry's semantic conventions for HTTP servers and for generative AI
(https://opentelemetry.io/docs/specs/semconv/, https://github.com/open-telemetry/semantic-conventions-genai). Neither
prompts nor answers are in spans. The SDK is an extra of its own (`pip install 'llmforge[telemetry]'`), and configures
itself from the environment: https://opentelemetry.io/docs/specs/otel/configuration/sdk-environment-variables/.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from starlette.datastructures import Headers
from starlette.types import Scope

import llmforge
from llmforge.base import extras
from llmforge.base.errors import UsageError
from llmforge.serving.request import Usage

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider

    from llmforge.serving.http.completion_call import CompletionCall

EXTRA = "telemetry"
SERVICE = "llmforge"  # its name, where the environment gives no other
CLOSE_S = 3.0  # for the last spans, where the collector does not answer
UNTRACED = frozenset({"/health", "/ready", "/metrics"})  # what is asked every few seconds
_PROTOCOL = "http/protobuf"  # OpenTelemetry's default
_PROTOCOLS = ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")
_KNOWN_METHODS = frozenset({"CONNECT", "DELETE", "GET", "HEAD", "OPTIONS", "PATCH", "POST", "PUT", "TRACE"})
_MOST_CHARACTERS = 256  # of what a client writes into a span
_NS = 10**9


def wanted(asked: bool, environment: Mapping[str, str]) -> bool:
    """Say whether to export spans: because the caller `asked`, or `OTEL_TRACES_EXPORTER` says so.

    Raises:
        UsageError: the environment wants an exporter or a protocol that is not here.
    """
    if environment.get("OTEL_SDK_DISABLED", "").strip().lower() == "true":
        return False
    exporters = {each.strip() for each in environment.get("OTEL_TRACES_EXPORTER", "").split(",")} - {"", "none"}
    if unknown := exporters - {"otlp"}:
        raise UsageError(f"OTEL_TRACES_EXPORTER {', '.join(sorted(unknown))}: expected otlp or none")
    if not asked and not exporters:
        return False
    name = next((each for each in _PROTOCOLS if environment.get(each)), None)
    if name is not None and environment[name] != _PROTOCOL:
        raise UsageError(f"{name} {environment[name]}: expected {_PROTOCOL}", hint="collectors take it on port 4318")
    return True


class Telemetry:
    """Makes the spans of requests; a thread of the SDK's own exports them. Nobody waits for the collector."""

    def __init__(self, provider: TracerProvider) -> None:
        from opentelemetry import propagate

        self._provider = provider
        self._tracer = provider.get_tracer("llmforge.serving.http", llmforge.__version__)
        self._propagator = propagate.get_global_textmap()

    @classmethod
    def from_environment(cls) -> Telemetry:
        """Export by OTLP over HTTP, as the `OTEL_…` variables of this process say.

        Raises:
            EnvironmentLacks: the extra is not installed.
            UsageError: a variable cannot be read.
        """
        extras.require(EXTRA)
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import OTELResourceDetector, Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor

        named = OTELResourceDetector().detect().attributes
        own = {"service.name": SERVICE, "service.version": llmforge.__version__}
        try:
            resource = Resource.create({name: value for name, value in own.items() if name not in named})
            provider = TracerProvider(resource=resource, shutdown_on_exit=False)
            provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
        except ValueError as error:
            raise UsageError(f"an OTEL_ variable cannot be read: {error}") from error
        return cls(provider)

    def begin(self, scope: Scope, headers: Headers, request_id: str) -> RequestSpan:
        """Begin the span of a request, in the trace that its headers name (W3C Trace Context), else in a new one."""
        carrier = {name: headers.getlist(name) for name in self._propagator.fields}
        return RequestSpan(self._tracer, self._propagator.extract(carrier), scope, headers, request_id)

    def close(self) -> None:
        """Export what is left, for at most `CLOSE_S`."""
        ending = threading.Thread(target=self._provider.shutdown, name="llmforge-telemetry", daemon=True)
        ending.start()
        ending.join(CLOSE_S)


class RequestSpan:
    """The server span of one request; `trace_id` is that of its trace, in hex."""

    def __init__(self, tracer: Any, context: Any, scope: Scope, headers: Headers, request_id: str) -> None:
        from opentelemetry.trace import SpanKind, format_trace_id, set_span_in_context

        self._tracer = tracer
        self._scope = scope
        self._epoch_s = time.time() - time.perf_counter()  # steady within a request, whatever sets the clock
        self._began_s = time.perf_counter()
        self.reasons: Mapping[int, str] = {}  # why each choice ended, as the client is told
        self._n = 1
        self._usages: dict[int, Usage] = {}  # by choice; written by the engine's thread
        self._first_s: list[float] = []  # when each choice had its first token
        method = scope["method"] if scope["method"] in _KNOWN_METHODS else "_OTHER"
        client, server = scope.get("client"), scope.get("server")
        attributes = {
            "http.request.method": method,
            "url.scheme": scope["scheme"],
            "url.path": scope["path"][:_MOST_CHARACTERS],
            "network.protocol.version": scope["http_version"],
            "user_agent.original": headers.get("user-agent", "")[:_MOST_CHARACTERS],
            "http.response.header.x-request-id": [request_id],
            **({"client.address": client[0]} if client else {}),
            **({"server.address": server[0], "server.port": server[1]} if server and server[1] else {}),
        }
        self._method = method
        self._span = tracer.start_span(
            method if method != "_OTHER" else "HTTP",
            context,
            SpanKind.SERVER,
            attributes,
            start_time=self._ns(self._began_s),
        )
        self._context = set_span_in_context(self._span, context)
        self.trace_id = format_trace_id(self._span.get_span_context().trace_id)

    def call(self, call: CompletionCall) -> None:
        """Say what the request asks of the model."""
        self._n = call.n
        sampling = call.requests[0].sampling
        asked = {
            "gen_ai.operation.name": "chat" if call.kind == "chat" else "text_completion",
            "gen_ai.provider.name": SERVICE,
            "gen_ai.request.model": call.model,
            "gen_ai.response.model": call.model,
            "gen_ai.response.id": call.id,
            "gen_ai.request.stream": call.stream,
            "gen_ai.request.temperature": sampling.temperature,
            "gen_ai.request.top_p": sampling.top_p,
        }
        if sampling.max_tokens is not None:
            asked["gen_ai.request.max_tokens"] = sampling.max_tokens
        if call.n > 1:
            asked["gen_ai.request.choice.count"] = call.n
        self._span.set_attributes(asked)

    def encoded(self, operation: str, model: str, tokens: int) -> None:
        """Say what a request asks of an encoder."""
        self._span.set_attributes(
            {
                "gen_ai.operation.name": operation,
                "gen_ai.provider.name": SERVICE,
                "gen_ai.request.model": model,
                "gen_ai.response.model": model,
                "gen_ai.usage.input_tokens": tokens,
            }
        )

    def answered(self, choice: int, submitted_s: float, ended_s: float, reason: str, usage: Usage) -> None:
        """Make the spans of one answer, which has ended; times by `time.perf_counter`. Any thread may call it."""
        self._usages[choice] = usage
        started_s = submitted_s + usage.queue_ms / 1e3
        where = {"llmforge.choice": choice}
        self._child("queue", submitted_s, started_s, where)
        if usage.prefill_ms is not None:
            first_s = started_s + usage.prefill_ms / 1e3
            read = {
                "gen_ai.usage.input_tokens": usage.prompt_tokens,
                "gen_ai.usage.cache_read.input_tokens": usage.cached_tokens,
            }
            self._child("prefill", started_s, first_s, where | read)
        if usage.ttft_ms is not None:
            self._first_s.append(first_s)
            made = {"gen_ai.usage.output_tokens": usage.output_tokens, "gen_ai.response.finish_reasons": [reason]}
            if usage.drafted_tokens:
                made["llmforge.drafted_tokens"] = usage.drafted_tokens
                made["llmforge.accepted_tokens"] = usage.accepted_tokens
            self._child("decode", first_s, ended_s, where | made)

    def failed(self, kind: str) -> None:
        """Say that the request ended with an error, of a kind that has few values."""
        from opentelemetry.trace import StatusCode

        self._span.set_attribute("error.type", kind)
        self._span.set_status(StatusCode.ERROR)

    def end(self, status: int) -> None:
        """End the span, with the status that was sent; 0: none."""
        route = getattr(self._scope.get("route"), "path", None)
        if route is not None:
            self._span.update_name(f"{self._method} {route}")
            self._span.set_attribute("http.route", route)
        if status:
            self._span.set_attribute("http.response.status_code", status)
        if status >= 500:
            self.failed(str(status))
        elif status >= 400:
            self._span.set_attribute("error.type", str(status))
        usages = dict(self._usages)
        if usages:
            prompts = [usage for choice, usage in usages.items() if choice % self._n == 0]
            self._span.set_attributes(
                {
                    "gen_ai.usage.input_tokens": sum(usage.prompt_tokens for usage in prompts),
                    "gen_ai.usage.output_tokens": sum(usage.output_tokens for usage in usages.values()),
                    "gen_ai.usage.cache_read.input_tokens": sum(usage.cached_tokens for usage in prompts),
                }
            )
        if self._first_s:
            self._span.set_attribute("gen_ai.response.time_to_first_chunk", min(self._first_s) - self._began_s)
        if self.reasons:
            reasons = [reason for _, reason in sorted(self.reasons.items())]
            self._span.set_attribute("gen_ai.response.finish_reasons", reasons)
        self._span.end(self._ns(time.perf_counter()))

    def _child(self, name: str, start_s: float, end_s: float, attributes: Mapping[str, Any]) -> None:
        span = self._tracer.start_span(name, self._context, attributes=dict(attributes), start_time=self._ns(start_s))
        span.end(self._ns(max(start_s, end_s)))

    def _ns(self, time_s: float) -> int:
        return round((self._epoch_s + time_s) * _NS)
