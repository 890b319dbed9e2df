"""Loads for a server: which prompts arrive when, and how long their answers are. Equal seeds give equal loads."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from llmforge.base import small_file
from llmforge.base.errors import DataError, UsageError
from llmforge.base.wording import shown
from llmforge.checkpoint.documents import read_lines

MOST_TOKENS = 2**24  # of a prompt or an answer: no engine holds more
LATEST_S = 1e7  # at which a request arrives: four months
MOONCAKE_BLOCK = 512  # tokens of a hash in Mooncake's traces, where a line names no `block_size`
Encode = Callable[[str], list[int]]


@dataclass(frozen=True)
class LoadRequest:
    """One request of a load: a prompt of token ids, and the number of tokens that its answer shall have.

    `at_s` is its arrival, in seconds after the load begins; None in a closed loop, where it waits for its turn. The
    prompt may be several `texts` to encode, of equal lengths, one after another.
    """

    prompt: tuple[int, ...]
    output_tokens: int
    at_s: float | None = None
    texts: int = 1


@dataclass(frozen=True)
class RandomPrompts:
    """Token ids drawn from the whole vocabulary: no two prompts share a beginning that a cache could keep."""

    vocabulary: int

    def take(self, length: int, rng: np.random.Generator) -> tuple[int, ...]:
        """Draw `length` token ids."""
        return tuple(rng.integers(0, self.vocabulary, length).tolist())


@dataclass(frozen=True)
class TextPrompts:
    """Windows of a text, from places drawn at random."""

    ids: tuple[int, ...]
    where: str  # the file that the text is from

    def take(self, length: int, rng: np.random.Generator) -> tuple[int, ...]:
        """Cut `length` token ids out of the text.

        Raises:
            DataError: the text is shorter.
        """
        if length > len(self.ids):
            raise DataError(
                f"{self.where}: {len(self.ids)} tokens; the prompt needs {length}",
                hint="use more text or shorter prompts",
            )
        start = int(rng.integers(0, len(self.ids) - length + 1))
        return self.ids[start : start + length]


Prompts = RandomPrompts | TextPrompts


def make_load(
    prompts: Prompts,
    count: int,
    *,
    prompt_tokens: int,
    output_tokens: int,
    prefix_tokens: int = 0,
    rate: float | None = None,
    seed: Sequence[int] = (0,),
    texts: int | None = None,
) -> list[LoadRequest]:
    """Make a load of `count` requests; the first `prefix_tokens` of each prompt are the same in all of them.

    With `texts`, each has so many of `prompt_tokens` to encode, and no answer of tokens.

    With a `rate`, in requests per second, they arrive as a Poisson process: gaps are exponential, the first request
    comes at 0.

    Raises:
        UsageError: a number is out of its range.
    """
    if min(count, prompt_tokens, texts or output_tokens) < 1 or not 0 <= prefix_tokens <= prompt_tokens:
        raise UsageError(
            f"a load of {count} requests, prompts of {prompt_tokens} tokens, {prefix_tokens} of them shared, answers "
            f"of {output_tokens}: expected 1 or more of each, and a shared part no longer than the prompt"
        )
    text, clock = (np.random.default_rng([*seed, stream]) for stream in (0, 1))
    prefix = prompts.take(prefix_tokens, text) if prefix_tokens else ()
    arrivals = [None] * count if rate is None else poisson(rate, count, clock).tolist()
    if texts is not None:
        return [LoadRequest(prompts.take(texts * prompt_tokens, text), 0, at, texts) for at in arrivals]
    return [
        LoadRequest(prefix + prompts.take(prompt_tokens - prefix_tokens, text), output_tokens, at) for at in arrivals
    ]


def poisson(rate: float, count: int, rng: np.random.Generator) -> NDArray[np.float64]:
    """Draw the arrivals of a Poisson process of `rate` per second, in seconds after the first: fp64 [count].

    Raises:
        UsageError: the rate is not a finite number above 0.
    """
    if not (math.isfinite(rate) and rate > 0):
        raise UsageError(f"rate {rate}: expected a finite number of requests per second above 0")
    return np.concatenate([[0.0], rng.exponential(1 / rate, count - 1).cumsum()])


def read_trace(path: Path, encode: Encode, prompts: Prompts | None, *, seed: int = 0) -> list[LoadRequest]:
    """Read arrivals from JSON Lines, one request a line:
    `{"at_s": 0.25, "prompt_tokens": 200, "output_tokens": 50}`, or `"prompt": "text"` in the place of its length.

    Prompts of a given length are taken from `prompts`; None: none are made. Lines are in order of arrival. Blank lines
    are skipped.

    Lines in the form of Mooncake's traces, as `llmforge serve --record` writes them, are read as well: `{"timestamp":
    ms, "input_length", "output_length", "hash_ids"}`, in any order. The first to arrive comes at 0, and equal hashes
    give equal blocks of a prompt; `"prompt"` is used where it is there.

    Raises:
        DataError: the file cannot be read, is empty, or a line is not such an object; names the line.
    """
    rng = np.random.default_rng(seed)
    made: list[LoadRequest] = []
    recorded = False  # in Mooncake's form
    for number, line in enumerate(read_lines(path), start=1):
        if not line.strip():
            continue
        where = f"{path}:{number}"
        entry = small_file.parse_json(line, where, error=DataError)
        mooncake = isinstance(entry, dict) and "timestamp" in entry
        if made and mooncake != recorded:
            raise DataError(f"{where}: has another form than the lines before it", hint="use `at_s` or `timestamp`")
        recorded = mooncake
        if mooncake:
            made.append(_recorded(entry, where, encode, prompts, (seed, number)))
            continue
        _check(entry, where)
        at = float(entry["at_s"])
        if made and made[-1].at_s is not None and at < made[-1].at_s:
            raise DataError(f"{where}: at_s {at:g} comes after {made[-1].at_s:g}", hint="sort the lines by at_s")
        prompt: tuple[int, ...] = ()
        if "prompt" in entry:
            prompt = tuple(encode(entry["prompt"]))
        elif prompts is not None:
            prompt = prompts.take(entry["prompt_tokens"], rng)
        made.append(LoadRequest(prompt, entry["output_tokens"], at))
    if not made:
        raise DataError(f"{path}: contains no requests")
    if not recorded:
        return made
    made.sort(key=lambda each: each.at_s or 0.0)
    first = made[0].at_s or 0.0
    return [replace(each, at_s=(each.at_s or 0.0) - first) for each in made]


def check_trace(path: Path) -> None:
    """Read a trace, and make no prompts of it.

    Raises:
        DataError: as `read_trace`.
    """
    read_trace(path, lambda text: [], None)


def _recorded(
    entry: Mapping[str, Any], where: str, encode: Encode, prompts: Prompts | None, seed: tuple[int, int]
) -> LoadRequest:
    """Make the request of a line in Mooncake's form; what no hash covers of a prompt is drawn by the line's number."""
    at, output, block = entry["timestamp"], entry.get("output_length"), entry.get("block_size", MOONCAKE_BLOCK)
    if type(at) not in (int, float) or not 0 <= at <= LATEST_S * 1e3:
        raise DataError(f"{where}: timestamp is {shown(at)}; expected milliseconds, from 0 to {LATEST_S * 1e3:g}")
    for name, value in (("output_length", output), ("block_size", block)):
        if type(value) is not int or not 1 <= value <= MOST_TOKENS:
            raise DataError(f"{where}: {name} is {shown(value)}; expected a whole number from 1 to {MOST_TOKENS}")
    text = entry.get("prompt")
    if isinstance(text, str) and text:
        return LoadRequest(tuple(encode(text)), int(output or 1), at / 1e3)
    length, hashes = entry.get("input_length"), entry.get("hash_ids", [])
    if type(length) is not int or not 1 <= length <= MOST_TOKENS:
        raise DataError(f"{where}: input_length is {shown(length)}; expected a whole number from 1 to {MOST_TOKENS}")
    if not isinstance(hashes, list) or not all(type(each) is int and each >= 0 for each in hashes):
        raise DataError(f"{where}: hash_ids is {shown(hashes)}; expected a list of whole numbers, none below 0")
    if (len(hashes) - 1) * block >= length:
        raise DataError(f"{where}: {len(hashes)} hash_ids of {block} tokens; input_length is {length}")
    if prompts is None:
        return LoadRequest((), int(output or 1), at / 1e3)
    blocks = [prompts.take(block, np.random.default_rng([seed[0], each])) for each in hashes]
    rest = max(0, length - len(hashes) * block)
    if rest:
        blocks.append(prompts.take(rest, np.random.default_rng(seed)))
    return LoadRequest(tuple(token for each in blocks for token in each)[:length], int(output or 1), at / 1e3)


def _check(entry: Any, where: str) -> None:
    wanted = 'expected {"at_s": seconds, "prompt_tokens": count or "prompt": text, "output_tokens": count}'
    if not isinstance(entry, dict):
        raise DataError(f"{where}: {type(entry).__name__}; {wanted}")
    if set(entry) not in ({"at_s", "prompt_tokens", "output_tokens"}, {"at_s", "prompt", "output_tokens"}):
        raise DataError(f"{where}: has {', '.join(sorted(entry)) or 'nothing'}; {wanted}")
    at = entry["at_s"]
    if type(at) not in (int, float) or not 0 <= at <= LATEST_S:
        raise DataError(f"{where}: at_s is {shown(at)}; expected a finite number of seconds, from 0 to {LATEST_S:g}")
    if not isinstance(entry.get("prompt", "text"), str) or not entry.get("prompt", "text"):
        raise DataError(f"{where}: prompt is {shown(entry['prompt'])}; expected a non-empty string")
    for name in ("prompt_tokens", "output_tokens"):
        if name in entry and (type(entry[name]) is not int or not 1 <= entry[name] <= MOST_TOKENS):
            raise DataError(f"{where}: {name} is {shown(entry[name])}; expected a whole number from 1 to {MOST_TOKENS}")


def longest(load: Sequence[LoadRequest]) -> int:
    """Tell how many tokens the longest prompt and answer of a load have together."""
    return max(len(request.prompt) + request.output_tokens for request in load)
