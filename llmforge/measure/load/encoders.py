"""What answers a load of texts to encode: an embedder or a reranker in this process, or behind an address."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
from tokenizers import Tokenizer

from llmforge.base.errors import ForgeError
from llmforge.base.http_server import HttpServer
from llmforge.measure.completions import Completions
from llmforge.measure.load.workload import LoadRequest
from llmforge.metrics.serving import RequestOutcome
from llmforge.runtime.encoder import EncoderConfig
from llmforge.serving.encoder_engine import EncoderEngine
from llmforge.serving.encoder_runner import EncoderInput

_QUERY_TOKENS = 4  # of a query beside texts; a reranker's texts have the rest


@dataclass
class EncodesInProcess:
    """The engine in this process; of a reranker too, a text is one sequence of token ids."""

    engine: EncoderEngine
    description: str

    def answer(self, request: LoadRequest, due_s: float) -> RequestOutcome:
        """Encode all texts of a request."""
        inputs = [EncoderInput(row, np.zeros(len(row), np.int64)) for row in np.array(_rows(request), np.int64)]
        return _outcome(request, due_s, lambda: self.engine.submit(inputs).result() is not None)


class EncoderEndpoint:
    """`POST /v1/embeddings` of one server, texts as token ids; of a reranker `/v1/rerank`, texts as text.

    What a tokenizer makes of text that was made of token ids may have another length, and is not counted again.
    """

    def __init__(self, server: HttpServer, tokenizer: Tokenizer, config: EncoderConfig) -> None:
        self._completions = Completions(server)
        self._tokenizer, self._reranks = tokenizer, config.kind == "reranker"
        self.description = self._completions.description

    def answer(self, request: LoadRequest, due_s: float) -> RequestOutcome:
        """Answer one request."""
        rows = _rows(request)
        if not self._reranks:
            return _outcome(request, due_s, lambda: self._asked("embeddings", {"input": rows}, "data", len(rows)))
        query = self._tokenizer.decode(list(rows[0][:_QUERY_TOKENS])) or "a"
        documents = [self._tokenizer.decode(list(row[_QUERY_TOKENS:])) or "a" for row in rows]
        body = {"query": query, "documents": documents}
        return _outcome(request, due_s, lambda: self._asked("rerank", body, "results", len(rows)))

    def _asked(self, call: str, body: Mapping[str, object], wanted: str, count: int) -> bool:
        found = self._completions.post(call, body).get(wanted)
        return isinstance(found, list) and len(found) == count


def _rows(request: LoadRequest) -> list[tuple[int, ...]]:
    """Cut what a request has into its texts."""
    size = len(request.prompt) // request.texts
    return [request.prompt[at * size : (at + 1) * size] for at in range(request.texts)]


def _outcome(request: LoadRequest, due_s: float, ask: Callable[[], bool]) -> RequestOutcome:
    error = None
    try:
        if not ask():
            error = f"the answer has no {request.texts} rows"
    except ForgeError as problem:
        error = problem.message
    return RequestOutcome(
        sent_s=due_s,
        token_s=(),
        ended_s=time.perf_counter(),
        prompt_tokens=len(request.prompt),
        output_tokens=0,
        error=error,
    )
