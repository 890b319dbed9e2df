"""Answers of a server to the requests of a task: an OpenAI endpoint, or a model of Triton. No retries."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol
from urllib.parse import quote

from llmforge.base.errors import RunFailed, UnsupportedError
from llmforge.base.http_server import HttpServer
from llmforge.measure.completions import CLIENTS, FORCE, TOKEN_ID, Completions, Http
from llmforge.measure.scoring import Likelihood, Pair

CLOSE = 1e-3  # nats; the same prompt read in another batch differs by less
_TRITON = re.compile(r"(?P<base>.*)/v2/models/(?P<model>[^/]+)")


@dataclass(frozen=True)
class Token:
    """A token that a server gave, and how likely the model found it, and the likeliest."""

    logprob: float
    best: float
    text: str | None = None  # either of them says which it is
    number: int | None = None


class Protocolled(Protocol):
    """How a kind of server is asked."""

    description: str

    def next_token(self, ids: Sequence[int], forced: int | None) -> Token:
        """Ask for the token after `ids`; `forced` is made the likeliest."""
        ...

    def text(self, ids: Sequence[int], tokens: int, until: Sequence[str]) -> str:
        """Ask for greedy text."""
        ...

    def echoed(self, pair: Pair) -> Likelihood | None:
        """Ask for the likelihood of a prompt's end; None: the server does not tell those of prompts."""
        ...


@contextmanager
def _reading(server: str) -> Iterator[None]:
    """Turn an answer of another shape into an error.

    Raises:
        RunFailed: the answer lacks something, or has something else in its place.
    """
    try:
        yield
    except (LookupError, ValueError, TypeError, AttributeError) as error:
        raise RunFailed(f"{server}: an answer has another shape than asked for: {error!r}"[:300]) from error


class ServedSide:
    """A served artifact.

    A server that echoes the log-probabilities of a prompt is asked once for each request. Of others each token is asked
    for by itself, made the likeliest by `logit_bias`: servers whose log-probabilities are the model's own, before any
    bias, then tell that of the token (`llmforge serve`, Triton, vLLM). That they are is checked.
    """

    def __init__(self, server: Protocolled, longest: int, decode: Callable[[list[int]], str]) -> None:
        self._server, self.longest, self._decode = server, longest, decode
        self.description = server.description
        self._echoes: bool | None = None  # None: not known yet
        self._own = False  # log-probabilities are known to be the model's own

    def score(self, pairs: Sequence[Pair]) -> list[Likelihood]:
        """Ask for several pairs at once."""
        if self._echoes is None:
            self._echoes = self._server.echoed(pairs[0]) is not None
        if not self._echoes and not self._own:
            self._check(pairs)
        ask = self._echoed if self._echoes else self._forced
        with ThreadPoolExecutor(CLIENTS) as pool:
            return list(pool.map(ask, pairs))

    def answer(self, ids: Sequence[int], tokens: int, until: Sequence[str]) -> str:
        """Ask for greedy text."""
        return self._server.text(ids, tokens, until)

    def _echoed(self, pair: Pair) -> Likelihood:
        found = self._server.echoed(pair)
        if found is None:
            raise RunFailed(f"{self.description}: it echoed a prompt, and then another not")
        return found

    def _forced(self, pair: Pair) -> Likelihood:
        total, greedy = 0.0, True
        for at, token in enumerate(pair[1]):
            found = self._server.next_token([*pair[0], *pair[1][:at]], token)
            self._is(token, found)
            total += found.logprob
            greedy = greedy and found.logprob >= found.best
        return total, greedy

    def _check(self, pairs: Sequence[Pair]) -> None:
        """Force a token that is not the likeliest: its log-probability must not have become that of the likeliest."""
        for context, continuation in pairs:
            for at, token in enumerate(continuation):
                ids = [*context, *continuation[:at]]
                plain, forced = self._server.next_token(ids, None), self._server.next_token(ids, token)
                self._is(token, forced)
                if forced.logprob > plain.best + CLOSE:
                    raise UnsupportedError(
                        f"{self.description}: its log-probabilities are not the model's own, but count `logit_bias`",
                        hint="measure the artifact without --url, or use a server that echoes a prompt with `logprobs`",
                    )
                if forced.logprob < plain.best - CLOSE:
                    self._own = True
                    return

    def _is(self, token: int, found: Token) -> None:
        own, text = self._decode([token]), found.text
        other = text is not None and "\ufffd" not in own + text and own.strip() != text.strip()
        if other or found.number not in (None, token):
            raise UnsupportedError(
                f"{self.description}: gave the token {text if other else found.number!r} where the artifact's is "
                f"{own!r} ({token})",
                hint="is it another model, or does the server ignore `logit_bias`?",
            )


class OpenAI:
    """`POST /v1/completions`, with prompts as token ids."""

    def __init__(self, completions: Completions) -> None:
        self._completions, self.description = completions, completions.description

    def next_token(self, ids: Sequence[int], forced: int | None) -> Token:
        """Ask for one token."""
        with _reading(self.description):
            found = self._completions.next_token(ids, 1, forced)
        best = max([found.logprob, *(value for _, value in found.listed)])
        if match := TOKEN_ID.fullmatch(found.name):
            return Token(found.logprob, best, number=int(match[1]))
        return Token(found.logprob, best, text=found.name)

    def text(self, ids: Sequence[int], tokens: int, until: Sequence[str]) -> str:
        """Ask for greedy text."""
        stop = {"stop": list(until)} if until else {}
        choice = self._completions.choice({"prompt": list(ids), "max_tokens": tokens, **stop})
        with _reading(self.description):
            return str(choice["text"])

    def echoed(self, pair: Pair) -> Likelihood | None:
        """Ask for the log-probabilities of a prompt."""
        body = {"prompt": [*pair[0], *pair[1]], "max_tokens": 1, "logprobs": 1, "echo": True}
        try:
            found = self._completions.choice(body).get("logprobs") or {}
        except RunFailed:  # `echo` is refused
            return None
        with _reading(self.description):
            own, top = found.get("token_logprobs", ()), found.get("top_logprobs", ())
            count = len(pair[0]) + len(pair[1])
            if len(own) < count or len(top) < count:  # `echo` is ignored
                return None
            rows = list(zip(own[:count], top[:count], strict=True))[len(pair[0]) :]
            likeliest = all(row[0] >= max(row[1].values(), default=row[0]) for row in rows)
            return float(sum(row[0] for row in rows)), likeliest


class Triton:
    """`POST /v2/models/MODEL/generate` of a model that `llmforge triton` wrote."""

    def __init__(self, http_: Http, base: str, model: str) -> None:
        self._http, self._place = http_, f"{base}/v2/models/{quote(model)}/generate"
        self.description = f"{model} of Triton at {http_.url}"

    def next_token(self, ids: Sequence[int], forced: int | None) -> Token:
        """Ask for one token."""
        bias = {} if forced is None else {"logit_bias": {str(forced): FORCE}}
        asked = {"max_tokens": 1, "temperature": 0, "logprobs": 1, "ignore_eos": True, **bias}
        answered = self._ask(ids, asked)
        with _reading(self.description):
            (found,) = json.loads(answered["logprobs"])
            best = max([found["logprob"], *(each["logprob"] for each in found["top"])])
            return Token(float(found["logprob"]), best, number=int(found["token_id"]))

    def text(self, ids: Sequence[int], tokens: int, until: Sequence[str]) -> str:
        """Ask for greedy text."""
        stop = {"stop": list(until)} if until else {}
        answered = self._ask(ids, {"max_tokens": tokens, "temperature": 0, **stop})
        with _reading(self.description):
            return str(answered["text_output"])

    def echoed(self, pair: Pair) -> Likelihood | None:
        """It does not tell the log-probabilities of prompts."""
        return None

    def _ask(self, ids: Sequence[int], sampling: Mapping[str, Any]) -> dict[str, Any]:
        return self._http.post(self._place, {"input_ids": list(ids), "sampling_parameters": json.dumps(sampling)})


def connect(server: HttpServer, model: str | None) -> Protocolled:
    """Say how a server is asked: one whose address ends with /v2/models/MODEL is Triton's, others are OpenAI's."""
    if (found := _TRITON.fullmatch(server.path.rstrip("/"))) is not None:
        return Triton(Http(server), found["base"], found["model"])
    return OpenAI(Completions(server, model))
