"""Requests to an engine, and the chunks that come back while tokens are generated."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from llmforge.base.errors import ForgeError, UsageError
from llmforge.base.wording import quoted
from llmforge.runtime.sampling.options import GREEDY, Sampling
from llmforge.runtime.sampling.sampler import TokenLogprob

# Either way; so nobody waits longer than 2 * MOST_PRIORITY * LEVEL_S for those who come later (`next_waiting`).
MOST_PRIORITY = 100


@dataclass(frozen=True)
class Request:
    """One prompt of token ids and how to go on from it.

    `timeout_s` counts from submission: a sequence that is not complete by then ends with "timeout". Without
    `detokenize` chunks have no text, one of them has the end-of-sequence token, and stop strings are refused. Of all
    special tokens, only `special_tokens` appear in the text.
    """

    prompt: tuple[int, ...]
    sampling: Sampling = GREEDY
    timeout_s: float | None = None
    detokenize: bool = True
    special_tokens: frozenset[int] = frozenset()
    adapter: str = ""  # of those that the artifact keeps apart; "": none
    client: str = ""  # who asks: those who wait get places in turns; "": all the same
    priority: int = 0  # those with lower ones get places first, as in vLLM; see `next_waiting`

    def __post_init__(self) -> None:
        if self.timeout_s is not None and not (math.isfinite(self.timeout_s) and self.timeout_s > 0):
            raise UsageError(f"timeout {self.timeout_s} s: expected a finite number of seconds above 0")
        if type(self.priority) is not int or abs(self.priority) > MOST_PRIORITY:
            raise UsageError(
                f"priority {repr(self.priority)[:40]}: expected a whole number from -{MOST_PRIORITY} to {MOST_PRIORITY}"
            )

    def repeated(self, n: int) -> tuple[Request, ...]:
        """Ask `n` times: the same prompt, a seed for each sequence. They share the prompt in the prefix cache.

        Raises:
            UsageError: `n` is not 1 to 128.
        """
        return tuple(replace(self, sampling=sampling) for sampling in self.sampling.repeated(n))


@dataclass(frozen=True)
class Usage:
    """What one sequence took. `output_tokens` counts every sampled token, the end-of-sequence token too.

    `cached_tokens` of the prompt were found in the prefix cache. `queue_ms` is the time before prefill; `ttft_ms` runs
    from submission to the first sampled token (None: there was none), `tpot_ms` is the mean time of each token after
    it, None where there is none. `prefill_ms` runs from the begin of prefill to that token, or to the end
    where there was none (None: it never began). `drafted_tokens` were proposed by speculation, and `accepted_tokens` of
    them stood.
    """

    prompt_tokens: int
    output_tokens: int
    ttft_ms: float | None
    tpot_ms: float | None
    queue_ms: float = 0.0
    prefill_ms: float | None = None
    cached_tokens: int = 0
    drafted_tokens: int = 0
    accepted_tokens: int = 0


@dataclass(frozen=True)
class Chunk:
    """One piece of a sequence: a token and the text that is certain now, possibly none.

    The last chunk has no token; it carries the rest of the text, the usage, and why generation ended: "stop" (end of
    sequence or a stop string), "length" (`max_tokens` or the end of the context), "cancelled" or "timeout".
    """

    text: str
    token_id: int | None
    finish_reason: str | None = None
    usage: Usage | None = None
    logprob: TokenLogprob | None = None


# Receives the chunks of one sequence, the last one with a `finish_reason`; or one error, after which nothing comes.
# It is called by the engine's thread: it must hand over and return, never wait.
Receiver = Callable[[Chunk | ForgeError], None]


def adapter_number(name: str, adapters: Sequence[str]) -> int:
    """Return the number of the adapter `name` of an artifact that has `adapters`, from 1 on; of "", which is none, 0.

    Raises:
        UsageError: there is no such adapter.
    """
    if not name:
        return 0
    if name not in adapters:
        known = f"the adapters are {', '.join(adapters)}" if adapters else "the artifact has none"
        raise UsageError(f"no adapter {quoted(name)}: {known}")
    return adapters.index(name) + 1


def check_tokens(ids: Sequence[int] | NDArray[np.integer[Any]], longest: int, vocabulary: int) -> None:
    """Return if an artifact of `vocabulary` tokens, which takes at most `longest` of them, can read `ids`.

    Raises:
        UsageError: there are none, too many, or ids that the vocabulary has not.
    """
    if len(ids) == 0:
        raise UsageError("the prompt is empty", hint="give at least one token")
    if len(ids) > longest:
        raise UsageError(
            f"{len(ids)} tokens; this artifact allows at most {longest}",
            hint="shorten the prompt, or build with a larger engine.max_context",
        )
    if min(ids) < 0 or max(ids) >= vocabulary:
        unknown = next(token for token in ids if not 0 <= token < vocabulary)
        raise UsageError(f"token id {unknown}; the vocabulary has {vocabulary}")
