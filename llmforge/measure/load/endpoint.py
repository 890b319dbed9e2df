"""A client of OpenAI-compatible endpoints for `llmforge bench --url`: as little as times need, no retries."""

from __future__ import annotations

import http.client
import time
from typing import Any

from llmforge.base.http_server import HttpServer
from llmforge.measure.completions import Completions
from llmforge.measure.load.workload import LoadRequest
from llmforge.metrics.serving import RequestOutcome


class Endpoint:
    """`POST /v1/completions` of one server, streamed, with prompts as token ids.

    Servers must take `prompt` as token ids and `ignore_eos`, as `llmforge serve` and vLLM do. Each request has a
    connection of its own, which counts into its TTFT.
    """

    def __init__(self, server: HttpServer, model: str | None = None) -> None:
        self._completions = Completions(server, model)
        self.description = self._completions.description

    def answer(self, request: LoadRequest, due_s: float) -> RequestOutcome:
        """Answer one request and wait for its end; each event with text counts as one arrival.

        Raises:
            EnvironmentLacks: the server denies access, which it would to every request.
        """
        arrivals: list[float] = []
        usage: dict[str, Any] = {}
        error = None
        try:
            for event in self._completions.events(
                {"prompt": list(request.prompt), "max_tokens": request.output_tokens, "ignore_eos": True}
            ):
                if "error" in event:
                    error = self._completions.http.message(event)
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
