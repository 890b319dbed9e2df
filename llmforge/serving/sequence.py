"""One sequence: what is known of a request between its submission and its last chunk."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field

from tokenizers import Tokenizer

from llmforge.runtime.sampling.options import Sampling
from llmforge.runtime.sampling.sampler import TokenSampler
from llmforge.serving.detokenize import Detokenizer, StopStrings
from llmforge.serving.request import Receiver, Request, Usage

# Seconds of waiting that are worth one level of priority: what some hundred tokens of an answer take on a CPU.
LEVEL_S = 5.0


def next_waiting(waiting: Collection[Sequence], running: Iterable[Sequence], now: float) -> Sequence:
    """Choose who gets the next place.

    Of those with the lowest priority, the clients that have the fewest sequences running; of these, who waits longest.
    Every `LEVEL_S` that a sequence has waited count as one level, down to the lowest priority that waits: so one that
    is `d` levels behind is among the first after `d * LEVEL_S`, however many come meanwhile.
    """
    places = Counter(sequence.request.client for sequence in running)
    lowest = min(sequence.request.priority for sequence in waiting)

    def rank(sequence: Sequence) -> tuple[int, int]:
        aged = sequence.request.priority - int((now - sequence.submitted) // LEVEL_S)
        return max(aged, lowest), places[sequence.request.client]

    return min(waiting, key=rank)  # the first of those alike


class OutputText:
    """The text of one sequence, up to its first stop string that is complete after `min_tokens` tokens."""

    def __init__(self, tokenizer: Tokenizer, sampling: Sampling, special_tokens: Collection[int] = ()) -> None:
        self.stopped = False
        self._tokens_before_stop = sampling.min_tokens
        self._detokenizer = Detokenizer(tokenizer, special_tokens)
        self._stops = StopStrings(sampling.stop, include=sampling.include_stop)

    def push(self, token: int) -> str:
        """Take one more token; return the text that is certain now. After `stopped`, nothing follows."""
        self._tokens_before_stop -= 1
        return self._push(self._detokenizer.push(token))

    def flush(self) -> str:
        """Return what was held back, after the last token."""
        return self._push(self._detokenizer.flush()) + self._stops.flush()

    def _push(self, text: str) -> str:
        certain = self._stops.push(text, may_stop=self._tokens_before_stop < 0)
        self.stopped = self._stops.found
        return certain


class NoText:
    """Stands for the text of a sequence that nobody reads as text."""

    stopped = False

    def push(self, token: int) -> str:
        """Ignore the token."""
        return ""

    def flush(self) -> str:
        """Return nothing."""
        return ""


@dataclass(eq=False)
class Ticket:
    """Stands for one submitted request."""

    cancelled: bool = field(default=False, kw_only=True)  # the one thing that other threads may set


@dataclass(eq=False)
class Sequence(Ticket):
    """Prompt and output of one request. It waits until it has a slot, is prefilled until it has a token, then decodes.

    Times are seconds of the scheduler's clock.
    """

    request: Request
    receive: Receiver
    submitted: float
    max_tokens: int  # that may be generated
    text: OutputText | NoText
    sampler: TokenSampler
    adapter: int = 0  # its number; 0: none
    slot: int | None = None  # row of the cache; None: it waits
    computed_tokens: int = 0  # of `tokens`, whose keys and values are in its slot
    cached_tokens: int = 0  # of the prompt, that came from the prefix cache
    stored_blocks: int = 0  # of `tokens`, that are in the prefix cache
    started: float | None = None  # when its prefill began
    token_times: list[float] = field(default_factory=list)  # when each token was sampled
    drafted_tokens: int = 0
    accepted_tokens: int = 0
    guessed_right: float = 1.0  # part of its last tokens that the device guessed
    failed: bool = False  # what its slot holds is not to be trusted

    def __post_init__(self) -> None:
        self.tokens = list(self.request.prompt)  # and every sampled token; the last one is not computed yet

    @property
    def prompt_tokens(self) -> int:
        """Tokens of the prompt."""
        return len(self.request.prompt)

    @property
    def decoding(self) -> bool:
        """Whether its prefill is done, so that the next step gives one more token."""
        return bool(self.token_times)

    @property
    def remaining_tokens(self) -> int:
        """Tokens that may still be generated."""
        return self.max_tokens - len(self.token_times)

    def is_overdue(self, now: float) -> bool:
        """Whether its deadline has passed."""
        timeout_s = self.request.timeout_s
        return timeout_s is not None and now >= self.submitted + timeout_s

    def usage(self, now: float) -> Usage:
        """Sum up the sequence, which ends `now`."""
        times, started = self.token_times, now if self.started is None else self.started
        prefilled = times[0] if times else now
        return Usage(
            prompt_tokens=self.prompt_tokens,
            output_tokens=len(times),
            ttft_ms=(times[0] - self.submitted) * 1e3 if times else None,
            tpot_ms=(times[-1] - times[0]) / (len(times) - 1) * 1e3 if len(times) > 1 else None,
            queue_ms=(started - self.submitted) * 1e3,
            prefill_ms=None if self.started is None else (prefilled - started) * 1e3,
            cached_tokens=self.cached_tokens,
            drafted_tokens=self.drafted_tokens,
            accepted_tokens=self.accepted_tokens,
        )
