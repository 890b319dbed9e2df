"""Serving in virtual time: the scheduler that serves, over a decoder that computes nothing and lets a clock go on.

What runs when, and who waits, is decided by `llmforge.serving.scheduler` itself. A step takes what `StepTimes` say.
What the host does between steps (sampling, text, delivery) takes no time here, unless the steps were timed with it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, cast

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

from llmforge.base.errors import ForgeError
from llmforge.ir import interface
from llmforge.measure.load.workload import LoadRequest
from llmforge.metrics.serving import RequestOutcome
from llmforge.planning.fleet.steps import StepTimes
from llmforge.runtime.block_pool import BlockPool, Copy
from llmforge.runtime.interface import Decoder, Rows, StepInputs
from llmforge.runtime.sampling.options import Sampling
from llmforge.runtime.sampling.sampler import Samplers
from llmforge.runtime.signature import Signature
from llmforge.serving.interface import EngineOptions
from llmforge.serving.request import Chunk, Request, Usage
from llmforge.serving.scheduler import PagedScheduler, Scheduler, SlotScheduler

if TYPE_CHECKING:
    from llmforge.backends.onnxruntime.cuda.paged import PagedCache, PagedSession, Piece

# Tokens of the prompts of a simulation: enough for blocks of 16 and more not to be equal by chance.
VOCABULARY = 16


@dataclass
class VirtualClock:
    """Seconds, which go on when a step runs or nothing is left to do."""

    now: float = 0.0

    def __call__(self) -> float:
        """Tell the time."""
        return self.now


@dataclass(frozen=True)
class SimulatedEngine:
    """What serves on one replica.

    `blocks`: of its pool, each of `block_tokens` tokens; None: each of its `slots` has room for `max_context` tokens.
    `prefix_cache_bytes`: 0: no prompt begins with what was computed for others.
    """

    steps: StepTimes
    slots: int
    max_context: int
    kv_bytes_per_token: int
    blocks: int | None = None
    block_tokens: int = 1
    prefix_cache_bytes: int = 0
    keeps_state: bool = False  # layers have a state: no prompt begins with what was computed for others
    reads_prompts_alone: bool = False  # of blocks in int8
    buckets: tuple[int, ...] = ()  # rows that decode steps over slots are padded to


@dataclass(frozen=True)
class SimulatedRun:
    """What became of the requests of a load, in order: times by the virtual clock, and the engine's own figures."""

    outcomes: tuple[RequestOutcome, ...]
    usages: tuple[Usage, ...]

    @property
    def running(self) -> float:
        """Mean number of requests that had a slot, from the first arrival to the last end."""
        held = sum(each.latency_ms - usage.queue_ms for each, usage in zip(self.outcomes, self.usages, strict=True))
        return held / 1e3 / self.duration_s

    @property
    def duration_s(self) -> float:
        """From the first arrival to the last end."""
        return max(each.ended_s for each in self.outcomes) - min(each.sent_s for each in self.outcomes)


@dataclass(frozen=True, eq=False)
class SimulatedRows(Rows):
    """A cache without memory."""

    token_bytes: int = 0
    pool: BlockPool | None = field(default=None, repr=False)  # of an engine over blocks

    def _view(self, start: int, stop: int) -> SimulatedRows:
        return SimulatedRows(stop - start, self.capacity, self.token_bytes, self.pool)

    @property
    def size_bytes(self) -> int:
        """Size that all rows would have."""
        return self.batch * self.capacity * self.token_bytes

    def copy(self, row: int, start: int, source: Rows, source_row: int, source_start: int, tokens: int) -> None:
        """Copy nothing: what is held is known by its number of tokens alone, and a copy takes no time."""

    def make(self, copies: Sequence[Copy]) -> None:
        """Fill no blocks, likewise."""


class SimulatedDecoder(Decoder[SimulatedRows]):
    """Gives every text the same token, and lets `clock` go on by what a step takes."""

    def __init__(self, engine: SimulatedEngine, clock: VirtualClock) -> None:
        self._engine, self._clock = engine, clock
        self.signature = Signature(
            inputs=(interface.INPUT_IDS, interface.LOGITS_ROWS),
            outputs=(interface.LOGITS,),
            caches=(),
            states=(),
            vocabulary=VOCABULARY,
            growing=False,
            declared_rows=None,
        )
        self.reads_prompts_alone = engine.reads_prompts_alone
        self.buckets = engine.buckets

    def allocate(self, batch: int, capacity: int) -> SimulatedRows:
        """Make a cache, of blocks if the engine has some."""
        blocks = self._engine.blocks
        pool = None if blocks is None else BlockPool(blocks, self._engine.block_tokens)
        return SimulatedRows(batch, capacity, self._engine.kv_bytes_per_token, pool)

    def _run(self, inputs: StepInputs, cache: SimulatedRows, out: NDArray[np.float32]) -> None:
        self._pass([inputs.ids.shape[1]] * len(inputs.ids), inputs.past_lengths.tolist(), out)

    def run(self, pieces: Sequence[Piece], cache: SimulatedRows, out: NDArray[np.float32]) -> None:
        """Run the tokens of several texts in one step, as an engine over blocks does."""
        self._pass([len(piece.tokens) for piece in pieces], [piece.past for piece in pieces], out)

    def _pass(self, tokens: Sequence[int], pasts: Sequence[int], out: NDArray[np.float32]) -> None:
        self._clock.now += self._engine.steps.seconds(tokens, pasts)
        out[...] = 0


def simulate(engine: SimulatedEngine, load: Sequence[LoadRequest]) -> SimulatedRun:
    """Serve `load`, in order of arrival, with no bound on the queue; every answer has the tokens that were asked for.

    Raises:
        UsageError: a prompt and its answer do not fit the context.
    """
    clock = VirtualClock()
    scheduler = _scheduler(engine, clock, len(load))
    answers = [_Answer(request, clock) for request in load]
    arrived = 0
    while arrived < len(load) or scheduler.busy:
        if not scheduler.busy:
            clock.now = max(clock.now, answers[arrived].due)
        while arrived < len(load) and answers[arrived].due <= clock.now:
            answer, arrived = answers[arrived], arrived + 1
            scheduler.add(answer.asked, answer.receive, answer.due)
        assert scheduler.step(), "a scheduler with requests ran nothing"
    return SimulatedRun(
        tuple(answer.outcome for answer in answers), tuple(each for answer in answers for each in answer.usages)
    )


def _scheduler(engine: SimulatedEngine, clock: VirtualClock, requests: int) -> Scheduler[Any]:
    decoder = SimulatedDecoder(engine, clock)
    cache = decoder.allocate(engine.slots, engine.max_context)
    samplers = Samplers(Tokenizer(WordLevel({}, unk_token="")), VOCABULARY, ())
    prefixes = 0 if engine.keeps_state else engine.prefix_cache_bytes
    options = EngineOptions(max_queue=requests, prefix_cache_bytes=prefixes)
    if engine.blocks is None:
        return SlotScheduler(decoder, cache, samplers, options, clock=clock)
    session, blocks = cast("PagedSession", decoder), cast("PagedCache", cache)
    return PagedScheduler(session, blocks, samplers, options, clock=clock)


class _Answer:
    """Receives one answer."""

    def __init__(self, request: LoadRequest, clock: VirtualClock) -> None:
        self.due = request.at_s or 0.0
        sampling = Sampling(max_tokens=request.output_tokens, ignore_eos=True)
        self.asked = Request(request.prompt, sampling, detokenize=False)
        self._clock = clock
        self._tokens: list[float] = []
        self._ended = 0.0
        self.usages: list[Usage] = []  # one, at its end

    def receive(self, item: Chunk | ForgeError) -> None:
        if isinstance(item, ForgeError):
            raise item
        if item.token_id is not None:
            self._tokens.append(self._clock.now)
        if item.usage is not None:
            self._ended = self._clock.now
            self.usages.append(item.usage)

    @property
    def outcome(self) -> RequestOutcome:
        return RequestOutcome(
            sent_s=self.due,
            token_s=tuple(self._tokens),
            ended_s=self._ended,
            prompt_tokens=len(self.asked.prompt),
            output_tokens=len(self._tokens),
        )
