"""Calls of embedders and rerankers: read from bodies, and their answers written. No HTTP here.

Shapes, as of 2026: https://platform.openai.com/docs/api-reference/embeddings; https://api.jina.ai/redoc (rerank) and
https://docs.cohere.com/reference/rerank, which differ in what stands beside the results; scores are vLLM's
(https://docs.vllm.ai/en/latest/serving/openai_compatible_server.html). `prompt_name` and `truncate` are our own, as
sentence-transformers and Jina call them.
"""

from __future__ import annotations

import base64
import secrets
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from llmforge.base.errors import UsageError
from llmforge.serving.encoder_runner import EncoderInput, EncoderRunner, relevance
from llmforge.serving.http.completion_call import adapter_of

MOST_INPUTS = 2048  # of one call; OpenAI's own bound
MOST_TOKENS = 300_000  # of one call, over all its inputs; OpenAI's own bound
IGNORED = frozenset({"user", "metadata", "safety_identifier"})  # what clients send along that changes nothing
_EMBEDDING = frozenset({"model", "input", "encoding_format", "dimensions", "prompt_name", "truncate"})
_RERANK = frozenset({"model", "query", "documents", "top_n", "return_documents", "max_tokens_per_doc", "truncate"})
_SCORE = frozenset({"model", "text_1", "text_2", "truncate"})
PARAMETERS = _EMBEDDING | _RERANK | _SCORE  # that errors may be about


@dataclass(frozen=True)
class EncoderCall:
    """What a call asks the encoder to run, and what makes its answer of [inputs, dimensions or labels]."""

    operation: str  # as OpenTelemetry's conventions name it
    model: str
    inputs: Sequence[EncoderInput]
    answer: Callable[[NDArray[np.float32]], dict[str, Any]]

    @property
    def tokens(self) -> int:
        """How many tokens are read, special ones included."""
        return sum(map(len, self.inputs))


def embedding_call(body: Any, runner: EncoderRunner, model: str) -> EncoderCall:
    """Read a call to /v1/embeddings.

    Raises:
        UsageError: the body makes no sense; says what, and what is allowed.
    """
    fields = _fields(body, model, _EMBEDDING)
    form = fields.get("encoding_format", "float")
    if form not in ("float", "base64"):
        raise UsageError(f"encoding_format {form!r}: expected float or base64")
    dimensions = runner.check_dimensions(_whole(fields, "dimensions"))
    given, name = fields.get("input"), fields.get("prompt_name")
    if name is not None and not isinstance(name, str):
        raise UsageError("prompt_name: expected a string")
    if isinstance(given, str):
        given = [given]
    if not isinstance(given, list) or not given:
        raise UsageError("input: expected a string, a list of strings, a list of token ids, or a list of such lists")
    if all(type(each) is int for each in given):
        given = [given]
    _check_count("input", len(given))
    if all(isinstance(each, str) for each in given):
        inputs = runner.texts(given, name, truncate=_flag(fields, "truncate", False))
    elif all(isinstance(each, list) and all(type(token) is int for token in each) for each in given):
        if name is not None:
            raise UsageError("prompt_name: token ids are read as they are", hint="send texts, or leave prompt_name out")
        inputs = [runner.tokens(each, f"input {at}") for at, each in enumerate(given)]
    else:
        raise UsageError("input: expected strings alone, or lists of token ids alone")

    def answer(made: NDArray[np.float32]) -> dict[str, Any]:
        rows = runner.shorten(made, dimensions)
        data = [
            {"object": "embedding", "index": at, "embedding": _base64(row) if form == "base64" else row.tolist()}
            for at, row in enumerate(rows)
        ]
        return {"object": "list", "data": data, "model": fields["model"], "usage": _usage(inputs)}

    return _checked(EncoderCall("embeddings", fields["model"], inputs, answer))


def rerank_call(body: Any, runner: EncoderRunner, model: str) -> EncoderCall:
    """Read a call to /v1/rerank: documents are texts, or objects with a `text`; results come by falling relevance.

    Raises:
        UsageError: as `embedding_call`.
    """
    fields = _fields(body, model, _RERANK)
    query, documents = fields.get("query"), fields.get("documents")
    if not isinstance(query, str):
        raise UsageError("query: expected a string")
    if not isinstance(documents, list) or not documents:
        raise UsageError("documents: expected a list of strings, or of objects with text, not empty")
    _check_count("documents", len(documents))
    texts: list[Any] = [each.get("text") if isinstance(each, dict) else each for each in documents]
    if not all(isinstance(each, str) for each in texts):
        raise UsageError("documents: expected strings, or objects with text")
    top_n = _whole(fields, "top_n") or len(documents)
    returned = _flag(fields, "return_documents", False)
    most = _whole(fields, "max_tokens_per_doc")
    truncate = _flag(fields, "truncate", True)
    inputs = runner.pairs([(query, text) for text in texts], truncate=truncate, most_text_tokens=most)

    def answer(made: NDArray[np.float32]) -> dict[str, Any]:
        logits = made[:, 0]
        order = np.argsort(-logits, kind="stable")[:top_n].tolist()  # of logits: large ones have one relevance
        scores = relevance(logits)
        results = []
        for at in order:
            result = {"index": at, "relevance_score": float(scores[at])}
            if returned:
                result["document"] = documents[at] if isinstance(documents[at], dict) else {"text": texts[at]}
            results.append(result)
        made_id = "rerank-" + secrets.token_hex(12)
        whole = {"id": made_id, "model": fields["model"], "results": results, "usage": _usage(inputs)}
        return whole | _warnings(inputs, runner)

    return _checked(EncoderCall("rerank", fields["model"], inputs, answer))


def score_call(body: Any, runner: EncoderRunner, model: str) -> EncoderCall:
    """Read a call to /v1/score: `text_1` with each of `text_2`, or two lists pair by pair.

    Raises:
        UsageError: as `embedding_call`.
    """
    fields = _fields(body, model, _SCORE)
    first, second = (_texts(fields, name) for name in ("text_1", "text_2"))
    if len(first) == 1:
        first *= len(second)
    if len(first) != len(second):
        raise UsageError(f"text_1 has {len(first)} texts, text_2 {len(second)}: expected one, or as many")
    _check_count("text_2", len(second))
    inputs = runner.pairs(list(zip(first, second, strict=True)), truncate=_flag(fields, "truncate", True))

    def answer(made: NDArray[np.float32]) -> dict[str, Any]:
        scores = relevance(made[:, 0]).tolist()
        return {
            "id": "score-" + secrets.token_hex(12),
            "object": "list",
            "created": int(time.time()),
            "model": fields["model"],
            "data": [{"index": at, "object": "score", "score": score} for at, score in enumerate(scores)],
            "usage": _usage(inputs),
        } | _warnings(inputs, runner)

    return _checked(EncoderCall("score", fields["model"], inputs, answer))


def _fields(body: Any, model: str, known: Collection[str]) -> dict[str, Any]:
    """Take what a body says, less what is null or changes nothing."""
    if not isinstance(body, dict):
        raise UsageError("the body is not a JSON object")
    fields = {name: value for name, value in body.items() if value is not None and name not in IGNORED}
    named = fields.setdefault("model", model)
    if not isinstance(named, str):
        raise UsageError("model: expected a string")
    adapter_of(named, model, ())
    if unknown := sorted(fields.keys() - known):
        raise UsageError(f"{unknown[0]}: this server does not know it", hint=f"known: {', '.join(sorted(known))}")
    return fields


def _texts(fields: Mapping[str, Any], name: str) -> list[str]:
    value = fields.get(name)
    found = [value] if isinstance(value, str) else value
    if not isinstance(found, list) or not found or not all(isinstance(each, str) for each in found):
        raise UsageError(f"{name}: expected a string or a list of strings, not empty")
    return found


def _whole(fields: Mapping[str, Any], name: str) -> int | None:
    value = fields.get(name)
    if value is not None and (type(value) is not int or value < 1):
        raise UsageError(f"{name}: expected a whole number, 1 or more")
    return value


def _flag(fields: Mapping[str, Any], name: str, default: bool) -> bool:
    value = fields.get(name, default)
    if not isinstance(value, bool):
        raise UsageError(f"{name}: expected true or false")
    return value


def _check_count(name: str, count: int) -> None:
    if count > MOST_INPUTS:
        raise UsageError(f"{name}: {count:,} texts; expected at most {MOST_INPUTS:,} per call")


def _checked(call: EncoderCall) -> EncoderCall:
    if call.tokens > MOST_TOKENS:
        raise UsageError(f"the call has {call.tokens:,} tokens; expected at most {MOST_TOKENS:,}")
    return call


def _base64(row: NDArray[np.float32]) -> str:
    return base64.b64encode(row.astype("<f4").tobytes()).decode()


def _usage(inputs: Sequence[EncoderInput]) -> dict[str, int]:
    tokens = sum(map(len, inputs))
    return {"prompt_tokens": tokens, "total_tokens": tokens}


def _warnings(inputs: Sequence[EncoderInput], runner: EncoderRunner) -> dict[str, Any]:
    """Say how many texts were cut, as Cohere says what else there is to say."""
    cut = sum(each.truncated for each in inputs)
    if not cut:
        return {}
    return {"meta": {"warnings": [f"{cut} of {len(inputs)} texts were cut to what the model reads or was asked for: "
                                  f"{runner.config.max_tokens:,} tokens with the query"]}}  # fmt: skip
