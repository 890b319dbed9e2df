"""A client of OpenAI-compatible endpoints for `llmforge bench --url`: as little as times need, no retries."""

from __future__ import annotations

import http.client
import json
import time
from collections.abc import Iterator
from typing import Any

from llmforge.base.errors import EnvironmentLacks
from llmforge.base.http_server import HttpServer
from llmforge.measure.load.workload import LoadRequest
from llmforge.metrics.serving import RequestOutcome


class Endpoint:
    """`POST /v1/completions` of one server, streamed, with prompts as token ids.

    Servers must take `prompt` as token ids and `ignore_eos`, as `llmforge serve` and vLLM do. Each request has a
    connection of its own, which counts into its TTFT.
    """

    def __init__(self, server: HttpServer, model: str | None = None) -> None:
        self._server = server
        self._base = server.path.rstrip("/").removesuffix("/v1")
        self.model = model or self._first_model()
        self.description = f"{self.model} at {server.url}"

    def answer(self, request: LoadRequest, due_s: float) -> RequestOutcome:
        """Answer one request and wait for its end; each event with text counts as one arrival.

        Raises:
            EnvironmentLacks: the server denies access, which it would to every request.
        """
        arrivals: list[float] = []
        usage: dict[str, Any] = {}
        error = None
        try:
            for event in self._events(request):
                if "error" in event:
                    error = self._server.shown(_message(event))
                elif any(choice.get("text") for choice in event.get("choices", ())):
                    arrivals.append(time.perf_counter())
                usage = event.get("usage") or usage
        except (OSError, http.client.HTTPException, ValueError) as problem:
            error = f"{type(problem).__name__}: {problem}"
        output = usage.get("completion_tokens", len(arrivals))
        if error is None and output != request.output_tokens:
            error = f"{output} tokens; asked: {request.output_tokens}"
        return RequestOutcome(
            sent_s=due_s,
            token_s=tuple(arrivals),
            ended_s=time.perf_counter(),
            prompt_tokens=usage.get("prompt_tokens", len(request.prompt)),
            output_tokens=output,
            error=error,
        )

    def _events(self, request: LoadRequest) -> Iterator[dict[str, Any]]:
        """Yield the events of one streamed answer; one with `error` where the server refuses."""
        body = {
            "model": self.model,
            "prompt": list(request.prompt),
            "max_tokens": request.output_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        with self._server.request("POST", f"{self._base}/v1/completions", json.dumps(body)) as response:
            if response.status != http.client.OK:
                yield {"error": f"HTTP {response.status}: {_message(_json(response.read()))}"}
                return
            for line in response:
                if line.startswith(b"data:") and (data := line[len(b"data:") :].strip()) != b"[DONE]":
                    yield json.loads(data)

    def _first_model(self) -> str:
        try:
            with self._server.request("GET", f"{self._base}/v1/models") as response:
                models = _json(response.read()).get("data")
        except (OSError, http.client.HTTPException) as error:
            raise EnvironmentLacks(f"{self._server.url}: no answer: {error}", hint="is the server running?") from error
        if not models:
            raise EnvironmentLacks(f"{self._server.url}: HTTP {response.status} and no model at {self._base}/v1/models")
        return str(models[0]["id"])


def _json(data: bytes) -> dict[str, Any]:
    try:
        value = json.loads(data)
    except ValueError:
        return {"error": data.decode("utf-8", "replace")[:200]}
    return value if isinstance(value, dict) else {"error": str(value)[:200]}


def _message(event: dict[str, Any]) -> str:
    error = event.get("error", event)
    return str(error.get("message", error) if isinstance(error, dict) else error)
