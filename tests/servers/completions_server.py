"""A server of /v1/completions whose logits a test gives; it tells of them as servers that are known do."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

from .text_server import TextHandler, serving

Logits = Callable[[Sequence[int]], NDArray[np.float32]]  # ids [S] -> logits [S, V]
# vLLM; OpenAI's old models; llama-cpp-python 0.3.36 where a text gets no BOS; llmforge serve; vLLM of one token, which
# lists the chosen one as well; llama-server; a server whose log-probabilities count `logit_bias`; one that tells none.
Gives = Literal["prompt_logprobs", "echo", "echo-shifted", "logprobs", "chosen", "content", "biased", "nothing"]


@dataclass
class CompletionsServer:
    """What is served, and what was asked."""

    tokenizer: Tokenizer
    logits: Logits
    gives: Gives
    most: int  # log-probabilities of a place
    url: str = ""
    asked: list[dict[str, Any]] = field(default_factory=list)

    def answer(self, body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        """Answer one request."""
        self.asked.append(body)
        prompt = body["prompt"]
        if self.gives == "echo-shifted":
            if not isinstance(prompt, str):
                return 422, {"error": {"message": "prompt: a string is expected"}}
            prompt = self.tokenizer.encode(prompt).ids
        known = {"prompt_logprobs"} if self.gives == "prompt_logprobs" else {"echo"} if "echo" in self.gives else set()
        if refused := {"prompt_logprobs", "echo"} & body.keys() - known:
            return 400, {"error": {"message": f"unknown parameter {refused.pop()}"}}
        wanted = max(body.get("prompt_logprobs", 0), body.get("logprobs", 0))
        if wanted > self.most:
            return 400, {"error": {"message": f"{wanted} log-probabilities; at most {self.most}"}}
        made, choice = self._generated(prompt, body), {"index": 0, "finish_reason": "length"}
        choice["text"] = self.tokenizer.decode(made)
        if "prompt_logprobs" in body:
            choice["prompt_logprobs"] = self._by_id(prompt, wanted)
        if body.get("logprobs") is not None and self.gives != "nothing":
            choice["logprobs"] = self._by_name(prompt, made, body)
        usage = {"prompt_tokens": len(prompt), "completion_tokens": len(made)}
        return 200, {"choices": [choice], "usage": usage}

    def _generated(self, prompt: Sequence[int], body: dict[str, Any]) -> list[int]:
        ids = list(prompt)
        for _ in range(body["max_tokens"]):
            row = self.logits(ids)[-1].copy()
            for token, bias in body.get("logit_bias", {}).items():
                row[int(token)] += bias
            ids.append(int(row.argmax()))
        return ids[len(prompt) :]

    def _rows(self, ids: Sequence[int]) -> NDArray[np.float64]:
        rows = self.logits(ids).astype(np.float64)
        rows -= rows.max(-1, keepdims=True)
        return rows - np.log(np.exp(rows).sum(-1, keepdims=True))

    def _by_id(self, ids: Sequence[int], wanted: int) -> list[Any]:
        found: list[Any] = [None]
        for row, target in zip(self._rows(ids), ids[1:], strict=False):
            told = [*np.argsort(-row, kind="stable")[:wanted].tolist(), target]
            found.append({str(each): {"logprob": row[each], "rank": 1, "decoded_token": "?"} for each in told})
        return found

    def _by_name(self, prompt: Sequence[int], made: Sequence[int], body: dict[str, Any]) -> dict[str, Any]:
        whole, wanted = [*prompt, *made], body["logprobs"]
        rows = self._rows(whole)
        if self.gives == "biased":
            for token, bias in body.get("logit_bias", {}).items():
                rows[:, int(token)] += bias
            rows -= rows.max(-1, keepdims=True)
            rows -= np.log(np.exp(rows).sum(-1, keepdims=True))
        name = self.tokenizer.id_to_token

        def told(row: NDArray[np.float64], own: int) -> dict[str, float]:
            listed = [
                *np.argsort(-row, kind="stable")[:wanted].tolist(),
                *([own] if "echo" in body or self.gives == "chosen" else []),
            ]
            return {str(name(each)): row[each] for each in listed}

        first = 0 if body.get("echo") else len(prompt)
        places = range(first, len(prompt) if self.gives == "echo-shifted" and first == 0 else len(whole))
        after = 0 if self.gives == "echo-shifted" and first == 0 else 1
        tops = [None if at == 0 else told(rows[at - after], whole[at]) for at in places]
        own = [None if at == 0 else rows[at - after][whole[at]] for at in places]
        names = [str(name(whole[at])) for at in places]
        if self.gives == "content":
            row = rows[len(prompt) - 1]
            listed = [{"id": int(each), "logprob": row[each]} for each in np.argsort(-row, kind="stable")[:wanted]]
            return {"content": [{"id": made[0], "logprob": row[made[0]], "top_logprobs": listed}]}
        return {"tokens": names, "token_logprobs": own, "top_logprobs": tops}


@contextmanager
def completions_server(
    tokenizer: Tokenizer, logits: Logits, gives: Gives, most: int = 20
) -> Iterator[CompletionsServer]:
    """Serve `logits` at the address that is given."""
    served = CompletionsServer(tokenizer, logits, gives, most)

    class Handler(TextHandler, BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_text(200, json.dumps({"data": [{"id": "m"}]}))

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            status, answer = served.answer(body)
            if not body.get("stream") or status != 200:
                self.send_text(status, json.dumps(answer))
                return
            choices = [{"text": word + " "} for word in answer["choices"][0]["text"].split()]
            events = [*({"choices": [each]} for each in choices), {"choices": [], "usage": answer["usage"]}]
            self.send_text(200, "".join(f"data: {json.dumps(each)}\n\n" for each in events) + "data: [DONE]\n\n")

    with serving(Handler) as served.url:
        yield served
