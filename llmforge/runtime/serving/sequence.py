"""One answer on its way: what is known of a request between its submission and its last chunk."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

from tokenizers import Tokenizer

from llmforge.runtime.sampling.options import Sampling
from llmforge.runtime.sampling.sampler import TokenChooser
from llmforge.runtime.serving.detokenize import Detokenizer, StopStrings
from llmforge.runtime.serving.request import Receiver, Request, Usage


class Text(Protocol):
    """The text of an answer, token by token, up to its first stop string."""

    stopped: bool

    def push(self, token: int) -> str:
        """Take one more token; return the text that is certain now."""

    def flush(self) -> str:
        """Return what was held back, after the last token."""


class NoText:
    """Stands for the text of an answer that nobody reads as text."""

    stopped = False

    def push(self, token: int) -> str:
        """Ignore the token."""
        return ""

    def flush(self) -> str:
        """Return nothing."""
        return ""


class StoppedText:
    """The text of one answer, up to its first stop string that is complete after `min_tokens` tokens."""

    def __init__(self, tokenizer: Tokenizer, sampling: Sampling) -> None:
        self.stopped = False
        self._tokens_before_stop = sampling.min_tokens
        self._detokenizer = Detokenizer(tokenizer)
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


class Ticket:
    """Stands for one submitted request."""


@dataclass(eq=False)
class Answer(Ticket):
    """The answer to one request. It waits until it has a slot, reads until it has a token, then decodes."""

    request: Request
    receive: Receiver
    submitted: float  # seconds of the scheduler's clock, as all times here
    limit: int  # tokens that may be chosen
    text: Text
    chooser: TokenChooser
    slot: int | None = None
    held: int = 0  # tokens of `context` that its slot holds
    cached: int = 0  # tokens of the prompt that came from the prefix cache
    kept: int = 0  # blocks of `context` that the prefix cache was given
    started: float | None = None  # when its prompt was first read
    times: list[float] = field(default_factory=list)  # when each token was chosen
    drafted: int = 0
    accepted: int = 0
    failed: bool = False  # what its slot holds is not to be trusted
    cancelled: bool = False  # the one thing that other threads may set

    def __post_init__(self) -> None:
        self.context = list(self.request.prompt)  # and every chosen token; the last one is not held yet

    @property
    def prompt_tokens(self) -> int:
        """Tokens of the prompt."""
        return len(self.request.prompt)

    @property
    def decoding(self) -> bool:
        """Whether the prompt is read, so that the next run gives one more token."""
        return bool(self.times)

    @property
    def left(self) -> int:
        """Tokens that may still be chosen."""
        return self.limit - len(self.times)

    def overdue(self, now: float) -> bool:
        """Whether its deadline has passed."""
        timeout_s = self.request.timeout_s
        return timeout_s is not None and now >= self.submitted + timeout_s

    def usage(self, now: float) -> Usage:
        """Sum up the answer, which ends `now`."""
        times, read = self.times, now if self.started is None else self.started
        return Usage(
            prompt_tokens=self.prompt_tokens,
            output_tokens=len(times),
            ttft_ms=(times[0] - self.submitted) * 1e3 if times else None,
            tpot_ms=(times[-1] - times[0]) / (len(times) - 1) * 1e3 if len(times) > 1 else None,
            queue_ms=(read - self.submitted) * 1e3,
            cached_tokens=self.cached,
            drafted_tokens=self.drafted,
            accepted_tokens=self.accepted,
        )
