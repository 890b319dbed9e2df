"""What an OpenAI-compatible server tells of the distribution of each token of a text.

Servers differ in what they give. Three ways are tried, in this order:

- `prompt_logprobs` (vLLM): all places of a prompt in one request, by token id, as many tokens as `--max-logprobs`
  allows (20; -1: all).
- `echo` with `logprobs` (llama-cpp-python, OpenAI's old models): all places in one request, by text, which several
  tokens may share. What is listed under such a text is not used.
- `logprobs` of the one token that is generated after each place (llmforge serve, llama.cpp's llama-server): a request a
  place. Where the server's log-probabilities are the model's own, before `logit_bias`, a token that is drawn from the
  reference is forced there, and the KLD is estimated without bias (`truncation.sampled_kld`).

A way is taken where its answer has the shape that it should have, and two of them agree on the distribution of one
token: an offset by one place is found, and undone.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import numpy as np
from tokenizers import Tokenizer

from llmforge.base.errors import RunFailed, UnsupportedError
from llmforge.measure.completions import CLIENTS, TOKEN_ID, Completions
from llmforge.metrics.truncation import Told
from llmforge.serving.token_bytes import TokenBytes

ENTRIES = 4_000_000  # log-probabilities in one answer: .7 GB while they are read
CLOSE = 0.02  # nats; servers that compute in 16 bits differ by less between two batches
Way = Literal["prompt_logprobs", "echo", "logprobs"]
Entry = tuple[str, float]  # what names a token, and ln p


@dataclass(frozen=True)
class Place:
    """What is told of one token of a text."""

    told: Told
    forced: tuple[int, float] | None = None  # the token that was forced there, and its ln p


class TokenNames:
    """Finds ids by what servers call tokens; what several tokens are called names none."""

    def __init__(self, tokenizer: Tokenizer, vocabulary: int) -> None:
        self.tokenizer, self.vocabulary = tokenizer, vocabulary
        known, found = TokenBytes(tokenizer), dict[str, set[int]]()
        for token in range(vocabulary):
            data = known.of(token)
            # As llmforge and vLLM write what is no UTF-8 by itself, and as llama-cpp-python does.
            for name in {data.decode("utf-8", "replace"), data.decode("utf-8", "ignore")}:
                found.setdefault(name, set()).add(token)
        self._of = found

    def find(self, name: str) -> int | None:
        """Give the id of a name; None: it is unknown, or of several."""
        if match := TOKEN_ID.fullmatch(name):
            return int(match[1])
        ids = self._of.get(name, ())
        return next(iter(ids)) if len(ids) == 1 else None

    def may_be(self, name: str, token: int) -> bool:
        """Say if `token` may be called so."""
        return token in self._of.get(name, ()) or self.find(name) == token


@dataclass
class ServedLogprobs:
    """The distributions of a server, by the best way that it has; `top` of each at most (None: as many as it gives)."""

    completions: Completions
    names: TokenNames
    top: int | None = None
    one_by_one: bool = False  # take the last way, whatever else there is
    way: Way | None = None
    forces: bool = False  # log-probabilities of forced tokens are the model's own
    as_text: bool = False  # prompts are sent as text
    shift: int = 0  # places by which rows lie too far to the front
    tried: dict[str, str] = field(default_factory=dict)  # way, and why it is not taken

    def open(self, ids: Sequence[int]) -> None:
        """Find the best way by asking for a text of 4 tokens or more.

        Raises:
            UnsupportedError: there is none; the message says what the server did.
            EnvironmentLacks: there is no answer.
        """
        ids, wanted = list(ids[:16]), self.top
        ways: dict[Way, Callable[[Sequence[int]], None]] = {
            "prompt_logprobs": self._open_prompt, "echo": self._open_echo, "logprobs": self._open_next,
        }  # fmt: skip
        for way, try_ in ways.items():
            if self.one_by_one and way != "logprobs":
                continue
            try:
                try_(ids)
            except (RunFailed, LookupError, ValueError, TypeError, AttributeError) as error:
                self.top, self.as_text, self.shift = wanted, False, 0
                self.tried[way] = (error.message if isinstance(error, RunFailed) else f"another shape: {error!r}")[:200]
            else:
                self.way = way
                return
        said = "; ".join(f"{way}: {why}" for way, why in self.tried.items())
        raise UnsupportedError(
            f"{self.completions.description}: gives no log-probabilities that KLD could be made of: {said}",
            hint="answers and latency can be measured: leave --reference and limits on quality out, or serve it by "
            "vLLM, llama.cpp or llmforge",
        )

    def of(self, ids: Sequence[int], forced: Sequence[int] = ()) -> list[Place] | None:
        """Tell the distributions of ids[1:]; None: the server reads the text as other tokens.

        Where a token is asked for by itself, `forced` has a token for each place.

        Raises:
            RunFailed, EnvironmentLacks: the server refuses, or there is no answer.
        """
        try:
            if self.way == "prompt_logprobs":
                return [Place(each) for each in self._prompt(ids, self._listed(len(ids)))]
            if self.way == "echo":
                rows = self._echo(ids, self._listed(len(ids)))
                return None if rows is None else [Place(each) for each in rows]
            tokens = list(forced) or [-1] * (len(ids) - 1)
            with ThreadPoolExecutor(CLIENTS) as pool:
                return list(pool.map(lambda at: self._next(ids[:at], tokens[at - 1], ids[at]), range(1, len(ids))))
        except (LookupError, ValueError, TypeError, AttributeError) as error:
            where = self.completions.description
            raise RunFailed(f"{where}: an answer has another shape than asked for: {error!r}"[:300]) from error

    def _listed(self, places: int) -> int:
        assert self.top is not None
        return max(1, min(self.top, ENTRIES // places))

    def _most(self, ask: Callable[[int], Any]) -> int:
        """Find the most log-probabilities that `ask` is given; it raises RunFailed where they are too many."""
        wanted = min(self.top or self.names.vocabulary, self.names.vocabulary)
        try:
            ask(wanted)
        except RunFailed:
            if self.top is not None:
                raise
        else:
            return wanted
        ask(1)
        low, high = 1, wanted
        while high - low > max(1, low // 64):
            middle = round(math.sqrt(low * high)) if high > 2 * low else (low + high) // 2
            try:
                ask(middle)
                low = middle
            except RunFailed:
                high = middle
        return low

    # prompt_logprobs

    def _open_prompt(self, ids: Sequence[int]) -> None:
        self.top = self._most(lambda top: self._prompt(ids[:2], top))
        self._agrees(ids, self._prompt(ids, min(self.top, 20)))

    def _prompt(self, ids: Sequence[int], top: int) -> list[Told]:
        body = {"prompt": list(ids), "max_tokens": 1, "prompt_logprobs": top}
        rows = self.completions.choice(body, _logprob_of)["prompt_logprobs"]
        if len(rows) != len(ids):
            raise ValueError(f"{len(rows)} rows of {len(ids)} tokens")
        return [
            self._told([(int(name), value) for name, value in row.items()], own=ids[at])
            for at, row in enumerate(rows) if at
        ]  # fmt: skip

    # echo

    def _open_echo(self, ids: Sequence[int]) -> None:
        try:
            self.top = self._most(lambda top: self._echoed(ids[:2], top))
        except RunFailed:
            self.top = self._most(lambda top: self._echoed(ids[:2], top, as_text=True))
            self.as_text = True
        top = min(self.top, 20)
        for end in range(len(ids), 3, -1):  # a text that ends within a word may be read as other tokens
            if (found := self._echo(ids[:end], top)) is not None:
                break
        else:
            raise ValueError("it reads a text as other tokens")
        try:
            self._agrees(ids[:end], found)
        except ValueError:
            self.shift = 1
            self._agrees(ids[:end], self._echo(ids[:end], top) or [])

    def _echoed(self, ids: Sequence[int], top: int, *, as_text: bool = False) -> tuple[dict[str, Any], int | None]:
        """Ask for an echo; give its log-probabilities, and how many tokens the prompt had."""
        prompt = self._prompt_of(ids, as_text=as_text)
        body = {"prompt": prompt, "max_tokens": 1, "logprobs": top, "echo": True}
        answer = self.completions.answered(body)
        found = answer["choices"][0].get("logprobs") or {}
        if len(found.get("top_logprobs") or ()) < len(ids) - 1:
            raise ValueError("`echo` is ignored")
        return found, (answer.get("usage") or {}).get("prompt_tokens")

    def _echo(self, ids: Sequence[int], top: int) -> list[Told] | None:
        found, counted = self._echoed(ids, top)
        named = [str(each) for each in found["tokens"]]
        if counted is not None and counted != len(ids):
            return None
        for first in (0, 1):  # llama-cpp-python leaves BOS out
            if len(named) >= len(ids) - first and all(map(self.names.may_be, named, ids[first:])):
                break
        else:
            return None
        told = []
        for place in range(1, len(ids)):
            row = place - first - self.shift
            entries = found["top_logprobs"][row] if row >= 0 else None
            own = ids[place - self.shift]  # the token of the row, which is listed though it be unlikely
            told.append(self._named((entries or {}).items(), own, top))
        return told

    # logprobs of what is generated

    def _open_next(self, ids: Sequence[int]) -> None:
        self.top = self._most(lambda top: self._generated(ids[:1], top))
        plain, named, _ = self._generated(ids[:-1], self.top)
        likeliest = int(plain.ids[plain.logprobs.argmax()])
        unlikely = next(token for token in (ids[-1], 0, 1) if token != likeliest)
        try:
            _, name, logprob = self._generated(ids[:-1], self.top, unlikely)
        except RunFailed:  # it takes no `logit_bias`
            return
        if self.names.may_be(name, unlikely):
            self.forces = logprob < plain.highest - CLOSE
        elif name != named:  # else it ignores the bias
            raise ValueError(f"it calls token {unlikely} {name!r}")

    def _next(self, ids: Sequence[int], forced: int, target: int) -> Place:
        assert self.top is not None
        if forced < 0 or not self.forces:
            return Place(self._generated(ids, self.top)[0])
        told, name, logprob = self._generated(ids, self.top, forced)
        self._is(name, forced)
        if len(told.ids) and told.ids[told.logprobs.argmin()] == forced:
            # vLLM lists the chosen token beside the likeliest ones; what is known must not hang on what was drawn
            told = self._generated(ids, self.top)[0]
        if target not in told.ids:  # whatever was drawn, or the estimate would have a bias
            of_target = logprob
            if target != forced:
                _, name, of_target = self._generated(ids, self.top, target)
                self._is(name, target)
            known = np.append(told.ids, target), np.append(told.logprobs, of_target)
            told = Told(*known, told.vocabulary, told.largest_other)
        return Place(told, (forced, logprob))

    def _is(self, name: str, token: int) -> None:
        if not self.names.may_be(name, token):
            raise RunFailed(f"{self.completions.description}: gave {name!r} where token {token} was forced")

    def _generated(self, ids: Sequence[int], top: int, forced: int | None = None) -> tuple[Told, str, float]:
        """Ask for the token after `ids`: the distribution, the token's name and its ln p."""
        found = self.completions.next_token(ids, top, forced)
        if not found.listed:
            raise ValueError("no log-probabilities")
        return self._named(found.listed, -1 if forced is None else forced, top), found.name, found.logprob

    # both

    def _named(self, entries: Collection[Entry], own: int, asked: int) -> Told:
        """Read what is listed by name; `own` may be listed though it is unlikely.

        What names no token for sure is left out. Several tokens of one name are one entry, so that fewer are there than
        were `asked`: then nothing bounds those that are not known.
        """
        named = [(self.names.find(name), float(value)) for name, value in entries]
        known = [(token, value) for token, value in named if token is not None]
        told = self._told(known, own)
        if len(known) == len(named):
            return told
        is_extra = own in told.ids and told.ids[told.logprobs.argmin()] == own
        if len(named) < asked + is_extra:
            return replace(told, largest_other=0.0)
        return replace(told, largest_other=max(value for token, value in named if token is None))

    def _told(self, entries: Sequence[tuple[int, float]], own: int) -> Told:
        """Make what is told of one token; the least of `entries` bounds all others, unless it is that of `own`."""
        vocabulary = max([self.names.vocabulary, *(token + 1 for token, _ in entries)])
        ids = np.array([token for token, _ in entries], np.int64)
        values = np.maximum(np.array([value for _, value in entries], np.float64), -9999.0)  # as vLLM writes -inf
        if len(ids) >= vocabulary:
            values = values - math.log(np.exp(values).sum())
        others = values[ids != own] if len(ids) > 1 and ids[values.argmin()] == own else values
        return Told(ids, values, vocabulary, float(others.min()) if len(others) else 0.0)

    def _prompt_of(self, ids: Sequence[int], *, as_text: bool = False) -> list[int] | str:
        if not (as_text or self.as_text):
            return list(ids)
        return self.names.tokenizer.decode(list(ids), skip_special_tokens=False)

    def _agrees(self, ids: Sequence[int], told: Sequence[Told]) -> None:
        """Hold what is told of a prompt to the token that is generated after a part of it.

        Raises:
            ValueError: it is of another place.
        """
        at = len(ids) // 2
        body = {"prompt": self._prompt_of(ids[:at]), "max_tokens": 1, "logprobs": 1}
        found = self.completions.choice(body)["logprobs"]
        best = max(float(value) for value in found["top_logprobs"][0].values())
        if len(told) < at or abs(told[at - 1].highest - best) > CLOSE:
            raise ValueError("log-probabilities of a prompt are not those of its places")


def _logprob_of(entry: dict[str, Any]) -> Any:
    """Keep of an entry of vLLM's the log-probability alone, as it is read: an answer has millions of them."""
    return entry["logprob"] if "logprob" in entry and "rank" in entry else entry
