"""The one client of OpenAI-compatible servers: completions and chats of one model. No retries.

Tasks (`served`), load (`load.endpoint`) and judgements (`logprobs`) ask through it.
"""

from __future__ import annotations

import http.client
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from llmforge.base.errors import EnvironmentLacks, RunFailed
from llmforge.base.http_server import HttpServer

CLIENTS = 8  # requests at once, of what asks for many
FORCE = 100.0  # `logit_bias` of a token that is asked for: the largest that OpenAI allows
TOKEN_ID = re.compile(r"token_id:(\d+)")  # a name of `ToldToken`, as vLLM's `return_tokens_as_token_ids` has it
Hook = Callable[[dict[str, Any]], Any]  # is given every object of JSON as it is read, and gives what stands for it


@dataclass(frozen=True)
class ToldToken:
    """A token that a server chose, ln p of it, and of the likeliest ones by what it calls them.

    A name is text, or `token_id:N` where the server says which it is (llama.cpp, and vLLM on request).
    """

    name: str
    logprob: float
    listed: tuple[tuple[str, float], ...]


class Http:
    """Requests of JSON to one server, each over a connection of its own."""

    def __init__(self, server: HttpServer) -> None:
        self.url, self.path, self.options, self._server = server.url, server.path, server.options, server

    def post(self, path: str, body: Mapping[str, Any], hook: Hook | None = None) -> dict[str, Any]:
        """Send JSON; give the JSON that comes back.

        Raises:
            EnvironmentLacks: there is no answer, or access is denied.
            RunFailed: the server refuses, or answers something else.
        """
        return self._ask("POST", path, json.dumps(body), hook)

    def get(self, path: str) -> dict[str, Any]:
        """Fetch JSON; raises as `post`."""
        return self._ask("GET", path, None)

    def events(self, path: str, body: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
        """Send JSON; yield the events of a stream as they arrive, one with `error` where the server refuses.

        Raises:
            OSError, http.client.HTTPException, ValueError: the connection ends, or an event is no JSON.
            EnvironmentLacks: access is denied.
        """
        with self._server.request("POST", path, json.dumps(body)) as response:
            if response.status != http.client.OK:
                said = self.message(_object(response.read()))
                yield {"error": f"HTTP {response.status}: {said}"}
                return
            for line in response:
                if line.startswith(b"data:") and (data := line[len(b"data:") :].strip()) != b"[DONE]":
                    yield json.loads(data)

    def message(self, event: Mapping[str, Any]) -> str:
        """Take what the server says of an error, shortened and without the key."""
        error = event.get("error", event)
        return self._server.shown(str(error.get("message", error) if isinstance(error, dict) else error))

    def _ask(self, method: str, path: str, body: str | None, hook: Hook | None = None) -> dict[str, Any]:
        try:
            with self._server.request(method, path, body) as response:
                data = response.read()
        except (OSError, http.client.HTTPException) as error:
            raise EnvironmentLacks(f"{self.url}: no answer: {error}", hint="is the server running?") from error
        try:
            found = json.loads(data, object_hook=hook)
        except ValueError:
            found = None
        if response.status != http.client.OK or not isinstance(found, dict):
            said = self._server.shown(data.decode("utf-8", "replace"))
            raise RunFailed(f"{self.url}{path}: HTTP {response.status}: {said}")
        return found


class Completions:
    """`POST /v1/completions` and `/v1/chat/completions`; `model` defaults to the first that a server has."""

    def __init__(self, server: HttpServer, model: str | None = None) -> None:
        """Raises as `Http.post`; EnvironmentLacks where no model is served, too."""
        self.http = Http(server)
        self._base = self.http.path.rstrip("/").removesuffix("/v1")
        self.model = model or self._first_model()
        self.description = f"{self.model} at {server.url}"

    def choice(self, body: Mapping[str, Any], hook: Hook | None = None) -> dict[str, Any]:
        """Ask for one completion, greedy unless `body` says otherwise; raises as `Http.post`."""
        return dict(self.answered(body, hook)["choices"][0])

    def answered(self, body: Mapping[str, Any], hook: Hook | None = None) -> dict[str, Any]:
        """Ask as `choice`, and give the whole answer, with at least one choice."""
        found = self.http.post(self._path, self._body(body), hook)
        choices = found.get("choices")
        if not (isinstance(choices, list) and choices and isinstance(choices[0], dict)):
            raise RunFailed(f"{self.description}: an answer has no choices")
        return found

    def next_token(self, ids: Sequence[int], listed: int, forced: int | None = None) -> ToldToken:
        """Ask for the token after `ids`, `forced` made the likeliest, and for log-probabilities of so many.

        Raises as `answered`, and LookupError, ValueError, TypeError or AttributeError: they are of another shape.
        """
        bias = {} if forced is None else {"logit_bias": {str(forced): FORCE}}
        body = {"prompt": list(ids), "max_tokens": 1, "logprobs": listed, "ignore_eos": True, **bias}
        found = self.choice(body)["logprobs"]
        if "content" in found:  # llama.cpp's llama-server
            [first] = found["content"]
            if len(first["top_logprobs"]) > listed:
                raise ValueError(f"{len(first['top_logprobs'])} log-probabilities, asked: {listed}")
            return ToldToken(
                _by_id(first),
                float(first["logprob"]),
                tuple((_by_id(each), float(each["logprob"])) for each in first["top_logprobs"]),
            )
        (name,), (logprob,), (row,) = found["tokens"], found["token_logprobs"], found["top_logprobs"]
        return ToldToken(str(name), float(logprob), tuple((each, float(value)) for each, value in row.items()))

    def chat(self, body: Mapping[str, Any]) -> dict[str, Any]:
        """Let the model answer a chat, greedily unless `body` says otherwise; raises as `Http.post`."""
        return self.http.post(f"{self._base}/v1/chat/completions", self._body(body))

    def post(self, call: str, body: Mapping[str, Any]) -> dict[str, Any]:
        """Ask for something else of the model, as `embeddings`; raises as `Http.post`."""
        return self.http.post(f"{self._base}/v1/{call}", {"model": self.model, **body})

    def events(self, body: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
        """Ask for one completion as a stream, and yield its events as `Http.events`; the last one counts tokens."""
        asked = {**body, "stream": True, "stream_options": {"include_usage": True}}
        return self.http.events(self._path, self._body(asked))

    @property
    def _path(self) -> str:
        return f"{self._base}/v1/completions"

    def _body(self, body: Mapping[str, Any]) -> dict[str, Any]:
        return {"model": self.model, "temperature": 0, **body}

    def _first_model(self) -> str:
        path = f"{self._base}/v1/models"
        models = self.http.get(path).get("data")
        if not (isinstance(models, list) and models and isinstance(models[0], dict) and "id" in models[0]):
            option = self.http.options.model
            raise EnvironmentLacks(
                f"{self.http.url}: HTTP 200 and no model at {path}",
                hint=None if option is None else f"name it with {option}",
            )
        return str(models[0]["id"])


def _by_id(entry: Mapping[str, Any]) -> str:
    return f"token_id:{entry['id']}" if "id" in entry else str(entry["token"])


def _object(data: bytes) -> dict[str, Any]:
    try:
        value = json.loads(data)
    except ValueError:
        return {"error": data.decode("utf-8", "replace")[:200]}
    return value if isinstance(value, dict) else {"error": str(value)[:200]}
