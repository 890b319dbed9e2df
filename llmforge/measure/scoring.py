"""Sides that answer the requests of a task: an engine, or its checkpoint. Token ids in; likelihoods and text out."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from llmforge.base.errors import InputError
from llmforge.base.plugins import Package
from llmforge.measure.baseline import Baseline
from llmforge.serving import Runner, Sampling

BATCH_BYTES = 256 << 20  # of the logits of one batch
BATCH = 64  # texts that the checkpoint reads at once: more make its products no faster
BATCH_TOKENS = 1 << 15  # of all texts of a batch, their filling included: 1.5 GB of keys and values in SmolLM2-135M
NOT_FINITE = "the engine returned logits that are NaN or infinite"

Pair = tuple[list[int], list[int]]  # context, not empty, and what follows it
Likelihood = tuple[float, bool]  # nats of what follows; whether each token of it is the likeliest


Reduce = Callable[[NDArray[np.float32], Sequence[int]], Any]  # of the logits [S, V] that tokens [S] are judged by
ReduceRows = Callable[[NDArray[np.float32], Sequence[int]], Iterable[Any]]  # of each row of them by itself


class ReadingSide(Protocol):
    """What reads given texts."""

    def read(self, pairs: Sequence[Pair], reduce: Reduce) -> list[Any]:
        """Give what `reduce` makes of what follows each context."""
        ...


class TaskSide(Protocol):
    """One side of a comparison. Both sides get the same token ids, and are greedy."""

    @property
    def description(self) -> str:
        """Its description."""
        ...

    @property
    def longest(self) -> int:
        """How many tokens it can read at once."""
        ...

    def score(self, pairs: Sequence[Pair]) -> list[Likelihood]:
        """Say how likely what follows each context is."""
        ...

    def answer(self, ids: Sequence[int], tokens: int, until: Sequence[str]) -> str:
        """Go on from a prompt for at most so many tokens; the text ends before the first of `until`."""
        ...


class Keep:
    """What becomes of answers; this one keeps none."""

    def block(self, kind: str, requests: Sequence[Any], compute: Callable[[], list[Any]]) -> list[Any]:
        """Give what `compute` makes of a block of `requests`, or what it made of the same before."""
        return compute()


class AnswerCache(Protocol):
    """Keeps the answers of several sides."""

    def of(self, side: str) -> Keep:
        """Keep the answers of a side, by the digest of what answers."""
        ...

    def code_of(self, package: Package) -> str:
        """Give the digest of a package's code, which may change under one version."""
        ...


@dataclass(frozen=True)
class TaskRequest:
    """Which tasks to run, and on what of them."""

    tasks: tuple[str, ...]  # names, or YAML files
    limit: int | None = None  # items of each task, the first ones
    few_shot: int | None = None  # examples before each item; None: as many as the task says


class EngineSide:
    """An artifact in the runtime that serves it."""

    def __init__(self, runner: Runner, description: str) -> None:
        self._runner, self.description = runner, description
        self.longest = runner.config.max_context

    def score(self, pairs: Sequence[Pair]) -> list[Likelihood]:
        """Say how likely what follows each context is."""
        return self.read(pairs, likelihood)

    def read(self, pairs: Sequence[Pair], reduce: Reduce) -> list[Any]:
        """Read pairs of about the same length together, as many as the engine has rows."""
        found: dict[int, Any] = {}
        order = sorted(range(len(pairs)), key=lambda i: sum(map(len, pairs[i])))
        while order:
            batch = [order.pop()]  # the longest
            while order and len(batch) < self._runner.config.max_batch and self._fits([*batch, order[-1]], pairs):
                batch.append(order.pop())
            texts = [_read(pairs[i]) for i in batch]
            starts = [len(pairs[i][0]) - 1 for i in batch]
            for i, logits in zip(batch, self._runner.logits_after(texts, starts), strict=True):
                found[i] = reduce(logits, pairs[i][1])
        return [found[i] for i in range(len(pairs))]

    def answer(self, ids: Sequence[int], tokens: int, until: Sequence[str]) -> str:
        """Go on greedily."""
        sampling = Sampling(max_tokens=tokens)
        given = (chunk.token_id for chunk in self._runner.generate(ids, sampling) if chunk.token_id is not None)
        return cut(given, until, self._runner.config.eos_token_ids, self._decode)

    def answers(self, prompts: Sequence[Sequence[int]], counts: Sequence[int]) -> list[list[int]]:
        """Answer prompts greedily, at most so many tokens each, those that end them left out; many at a time."""
        found: dict[int, list[int]] = {}
        order = sorted(range(len(prompts)), key=lambda i: (counts[i], len(prompts[i])))
        for part in blocks(len(order), self._runner.config.max_batch):
            rows = order[part]
            said: list[list[int]] = [[] for _ in rows]
            samplings = [Sampling(max_tokens=counts[i]) for i in rows]
            for step in self._runner.generate_batch([prompts[i] for i in rows], samplings):
                for row, token in zip(said, step.token_ids, strict=True):
                    if token is not None:
                        row.append(token)
            found |= {i: before_end(row, self._runner.config.eos_token_ids) for i, row in zip(rows, said, strict=True)}
        return [found[i] for i in range(len(prompts))]

    def _fits(self, batch: Sequence[int], pairs: Sequence[Pair]) -> bool:
        """Say if the logits of a batch are few enough; every row has those of all, from the first that one needs."""
        last = max(len(_read(pairs[i])) for i in batch)
        rows = last - min(len(pairs[i][0]) - 1 for i in batch)
        return len(batch) * rows * self._runner.config.vocabulary * np.dtype(np.float32).itemsize <= BATCH_BYTES

    def _decode(self, ids: list[int]) -> str:
        return self._runner.tokenizer.decode(ids)


class CheckpointSide:
    """The original checkpoint, through transformers."""

    def __init__(
        self,
        baseline: Callable[[], Baseline],
        description: str,
        longest: int,
        ends: Sequence[int],
        decode: Callable[[list[int]], str],
    ) -> None:
        self._make, self._made = baseline, list[Baseline]()  # loaded when it is first asked
        self.description, self.longest, self._ends, self._decode = description, longest, ends, decode

    @property
    def _baseline(self) -> Baseline:
        if not self._made:
            self._made.append(self._make())
        return self._made[0]

    def score(self, pairs: Sequence[Pair]) -> list[Likelihood]:
        """Say how likely what follows each context is."""
        return self.read(pairs, likelihood)

    def read(self, pairs: Sequence[Pair], reduce: Reduce) -> list[Any]:
        """Read each context once for all that follow it, as far as their logits fit `BATCH_BYTES`."""
        groups: dict[tuple[int, ...], list[int]] = {}
        for place, (context, _) in enumerate(pairs):
            groups.setdefault(tuple(context), []).append(place)
        found: dict[int, Any] = {}
        row_bytes = self._baseline.vocabulary * np.dtype(np.float32).itemsize
        for ids, places in groups.items():
            longest = max(len(pairs[place][1]) for place in places)
            for part in blocks(len(places), max(1, BATCH_BYTES // (row_bytes * max(1, longest)))):
                if len(places) > 1:
                    texts = [pairs[place][1] for place in places[part]]
                    logits = self._baseline.following(ids, texts)
                    found.update(zip(places[part], map(reduce, logits, texts), strict=True))
        alone = [pairs[places[0]] for places in groups.values() if len(places) == 1]
        wanted = [max(1, len(text)) for _, text in alone]
        for batch in alike([len(_read(pair)) for pair in alone], wanted, BATCH_BYTES // row_bytes):
            rows = self._baseline.last_logits([_read(alone[at]) for at in batch], max(wanted[at] for at in batch))
            for at, last in zip(batch, rows, strict=True):
                context, text = alone[at]
                found[groups[tuple(context)][0]] = reduce(last[len(last) - len(text) :], text)
        return [found[place] for place in range(len(pairs))]

    def answers(self, prompts: Sequence[Sequence[int]], counts: Sequence[int]) -> list[list[int]]:
        """Answer prompts greedily, at most so many tokens each, those that end them left out; many at a time."""
        return [said for said, _ in self.answers_read(prompts, counts, None)]

    def answers_read(
        self, prompts: Sequence[Sequence[int]], counts: Sequence[int], reduce: ReduceRows | None
    ) -> list[tuple[list[int], list[Any]]]:
        """Answer prompts, and give what `reduce` makes of the row of logits that each token was chosen by.

        The one that ends an answer has a row, but is left out of it.
        """
        rows: list[list[Any]] = [[] for _ in prompts]
        found: dict[int, list[int]] = {}
        for batch in alike([len(ids) + count for ids, count in zip(prompts, counts, strict=True)], counts, None):

            def seen(
                places: Sequence[int], logits: NDArray[np.float32], tokens: Sequence[int], batch: list[int] = batch
            ) -> None:
                if reduce is not None:
                    for place, row in zip(places, reduce(logits, tokens), strict=True):
                        rows[batch[place]].append(row)

            said = self._baseline.answers([prompts[i] for i in batch], [counts[i] for i in batch], self._ends, seen)
            found |= {i: before_end(ids, self._ends) for i, ids in zip(batch, said, strict=True)}
        return [(found[i], rows[i]) for i in range(len(prompts))]

    def answer(self, ids: Sequence[int], tokens: int, until: Sequence[str]) -> str:
        """Go on greedily."""
        steps = self._baseline.generate(np.asarray([ids], np.int64), tokens)
        return cut((step[0] for step in steps), until, self._ends, self._decode)


def before_end(ids: Iterable[int], ends: Collection[int]) -> list[int]:
    """Take what stands before the first of `ends`."""
    return list(itertools.takewhile(lambda token: token not in ends, ids))


def likelihood(logits: NDArray[np.float32], tokens: Sequence[int]) -> Likelihood:
    """Sum the log-probabilities of `tokens` [S], each under its row of `logits` [S, V]; in float64.

    Raises:
        InputError: a logit is NaN or infinite.
    """
    if len(logits) != len(tokens):
        raise ValueError(f"{len(logits)} rows of logits for {len(tokens)} tokens")
    if not len(tokens):
        return 0.0, True
    exact = logits.astype(np.float64)
    if not np.isfinite(exact).all():
        raise InputError(NOT_FINITE)
    largest = exact.max(1)
    normalizer = largest + np.log(np.exp(exact - largest[:, None]).sum(1))
    own = exact[np.arange(len(tokens)), np.asarray(tokens)]
    return float((own - normalizer).sum()), bool((exact.argmax(1) == np.asarray(tokens)).all())


def cut(tokens: Iterable[int], until: Sequence[str], ends: Sequence[int], decode: Callable[[list[int]], str]) -> str:
    """Take tokens up to the first of `ends`, or their text up to the first of `until`, which is left out."""
    taken: list[int] = []
    for token in itertools.takewhile(lambda token: token not in ends, tokens):
        taken.append(token)
        text = decode(taken)
        places = [at for stop in until if stop and (at := text.find(stop)) >= 0]
        if places:
            return text[: min(places)]
    return decode(taken)


def alike(lengths: Sequence[int], rows: Sequence[int], most_rows: int | None) -> Iterator[list[int]]:
    """Group texts, by number, to be filled up to the longest: of up to twice the shortest, within what a batch holds.

    `rows`: how many each has logits of, or has to be given; a group has at most `most_rows`, filled up.
    """
    group: list[int] = []
    for number in sorted(range(len(lengths)), key=lambda number: (lengths[number], rows[number])):
        several, widest = len(group) + 1, max(rows[at] for at in [*group, number])
        fits = several <= BATCH and several * lengths[number] <= BATCH_TOKENS
        if group and not (
            fits and lengths[number] <= 2 * lengths[group[0]] and (most_rows is None or several * widest <= most_rows)
        ):
            yield group
            group = []
        group.append(number)
    if group:
        yield group


def blocks(count: int, size: int) -> Iterator[slice]:
    """Split `count` things into blocks of at most `size`."""
    for start in range(0, count, size):
        yield slice(start, min(start + size, count))


def _read(pair: Pair) -> list[int]:
    """What has to be read to know what follows: all but the last token."""
    return [*pair[0], *pair[1]][:-1] if pair[1] else pair[0]
