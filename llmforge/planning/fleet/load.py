"""The load of a fleet: requests at a rate, or a trace of them, and what of it one replica gets."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from llmforge.base.errors import DataError, UsageError
from llmforge.measure.load.workload import LoadRequest, RandomPrompts, poisson, read_trace
from llmforge.metrics.units import count, significant
from llmforge.planning.fleet.simulation import VOCABULARY

_RATE = re.compile(r"(?P<number>\d+(?:\.\d+)?)/(?P<unit>s|min|h)")
_SECONDS = {"s": 1, "min": 60, "h": 3600}
HIGHEST_RATE = 1e6  # requests per second
MOST_OF_A_TRACE = 20_000  # requests: a simulation of them takes a minute


def parse_rate(text: str) -> float:
    """Read `50/s`, `300/min` or `1000/h`: requests per second.

    Raises:
        UsageError: it is none of these, 0, or too high.
    """
    match = _RATE.fullmatch(text.strip())
    rate = float(match["number"]) / _SECONDS[match["unit"]] if match else 0.0
    if not 0 < rate <= HIGHEST_RATE:
        raise UsageError(
            f"rate {text!r}: expected requests above 0 per s, min or h, at most {HIGHEST_RATE:,.0f} a second",
            hint="for example 50/s or 300/min",
        )
    return rate


class FleetLoad(Protocol):
    """Requests to a fleet."""

    @property
    def rate(self) -> float:
        """Mean requests per second."""
        ...

    @property
    def longest(self) -> int:
        """Tokens that the longest prompt and its answer have together."""
        ...

    @property
    def words(self) -> str:
        """Which requests these are, as text."""
        ...

    def mean_tokens(self) -> tuple[float, float]:
        """Give the mean tokens of a prompt and of an answer."""
        ...

    def split(self, replicas: int, requests: int) -> list[list[LoadRequest]]:
        """Give the requests of replicas that are simulated, each in order of arrival: at least `requests` in all."""
        ...


@dataclass(frozen=True)
class PoissonLoad:
    """Poisson arrivals, prompts and answers of log-normal lengths that are independent of each other.

    A replica of n gets arrivals at random, which are a Poisson process of rate / n. Equal seeds give the same lengths
    and, but for their scale, the same gaps: so what differs between two fleets is not chance.

    Args:
        rate: requests per second.
        prompt: mean tokens of a prompt.
        output: mean tokens of an answer.
        variation: standard deviation of each length over its mean (coefficient of variation); 0: all are alike.
        limit: tokens of prompt and answer together at most; longer ones are cut.
        seed: of lengths and arrivals.
    """

    rate: float
    prompt: int
    output: int
    variation: float
    limit: int
    seed: int = 0

    @cached_property
    def _lengths(self) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        prompts, answers = (self._draw(mean, stream) for stream, mean in enumerate((self.prompt, self.output)))
        prompts = np.clip(prompts, 1, max(1, self.limit - 1))
        return prompts, np.clip(answers, 1, np.maximum(1, self.limit - prompts))

    def _draw(self, mean: int, stream: int) -> NDArray[np.int64]:
        """Draw a length for each request that could be simulated."""
        if self.variation == 0:
            return np.full(_MOST_REQUESTS, mean)
        sigma = math.sqrt(math.log1p(self.variation**2))
        rng = np.random.default_rng([self.seed, stream])
        drawn = rng.lognormal(math.log(mean) - sigma**2 / 2, sigma, _MOST_REQUESTS)
        return np.rint(drawn).astype(np.int64)

    @property
    def longest(self) -> int:
        """Tokens that the longest prompt and its answer have together."""
        return int(np.sum(self._lengths, axis=0).max())

    @property
    def words(self) -> str:
        """Which requests these are, as text."""
        lengths = f"prompts of {count(self.prompt)} and answers of {count(self.output)} tokens"
        if self.variation:
            lengths += f" on average, log-normal with a coefficient of variation of {significant(self.variation, 2)}"
        return f"{significant(self.rate)} requests/s, Poisson arrivals, {lengths}"

    def mean_tokens(self) -> tuple[float, float]:
        """Give the mean tokens of a prompt and of an answer, as drawn."""
        prompts, answers = self._lengths
        return float(prompts.mean()), float(answers.mean())

    def split(self, replicas: int, requests: int) -> list[list[LoadRequest]]:
        """Give `requests` requests of one replica: the others have such ones, too."""
        requests = min(requests, _MOST_REQUESTS)
        arrivals = poisson(self.rate / replicas, requests, np.random.default_rng([self.seed, 2])).tolist()
        prompts, answers = (each[:requests].tolist() for each in self._lengths)
        drawn = zip(prompts, answers, arrivals, strict=True)
        return [[LoadRequest((0,) * prompt, answer, at) for prompt, answer, at in drawn]]


_MOST_REQUESTS = 20_000  # of one simulation


@dataclass(frozen=True)
class RecordedLoad:
    """A trace of arrivals, sent to replicas at random, all of which are simulated."""

    requests: tuple[LoadRequest, ...]
    where: str
    seed: int = 0

    @classmethod
    def read(cls, path: Path, rate: float | None, seed: int = 0) -> RecordedLoad:
        """Read a trace as `llmforge bench` does; with a `rate`, arrivals are stretched or pressed to it.

        Raises:
            DataError: it cannot be read, has texts in the place of lengths, or too few or too many requests.
        """

        def refuse(text: str) -> list[int]:
            raise DataError(f"{path}: has texts; a plan knows no tokenizer", hint='use "prompt_tokens" or hashes')

        made = read_trace(path, refuse, RandomPrompts(VOCABULARY), seed=seed)
        if not 2 <= len(made) <= MOST_OF_A_TRACE:
            raise DataError(f"{path}: {len(made)} requests; a plan takes 2 to {MOST_OF_A_TRACE:,}")
        load = cls(tuple(made), path.name, seed)
        if load.duration_s <= 0:
            raise DataError(f"{path}: all requests arrive at once, which is no rate")
        if rate is None:
            return load
        pressed = load.rate / rate
        return replace(load, requests=tuple(replace(each, at_s=(each.at_s or 0.0) * pressed) for each in made))

    @property
    def duration_s(self) -> float:
        """From the first to the last arrival."""
        return (self.requests[-1].at_s or 0.0) - (self.requests[0].at_s or 0.0)

    @property
    def rate(self) -> float:
        """Mean requests per second."""
        return (len(self.requests) - 1) / self.duration_s

    @property
    def longest(self) -> int:
        """Tokens that the longest prompt and its answer have together."""
        return max(len(each.prompt) + each.output_tokens for each in self.requests)

    @property
    def words(self) -> str:
        """Which requests these are, as text."""
        prompt, output = self.mean_tokens()
        return (
            f"{significant(self.rate)} requests/s on average, {count(len(self.requests))} arrivals of {self.where}, "
            f"prompts of {count(round(prompt))} and answers of {count(round(output))} tokens on average"
        )

    def mean_tokens(self) -> tuple[float, float]:
        """Give the mean tokens of a prompt and of an answer."""
        lengths = [(len(each.prompt), each.output_tokens) for each in self.requests]
        prompts, answers = np.mean(lengths, axis=0).tolist()
        return prompts, answers

    def split(self, replicas: int, requests: int) -> list[list[LoadRequest]]:
        """Give all requests, each to one of the replicas; those that get none are left out."""
        chosen = np.random.default_rng([self.seed, replicas]).integers(0, replicas, len(self.requests)).tolist()
        sent: dict[int, list[LoadRequest]] = {}
        for replica, request in zip(chosen, self.requests, strict=True):
            sent.setdefault(replica, []).append(request)
        return [sent[replica] for replica in sorted(sent)]
