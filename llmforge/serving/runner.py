"""Runs an artifact: prompts in, streamed text out. The same runner serves validation and users."""

from __future__ import annotations

import contextlib
import functools
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

from llmforge.backends.loading import open_engine
from llmforge.backends.onnxruntime.cuda.paged import PagedCache
from llmforge.base.errors import ForgeError, UsageError
from llmforge.runtime.config import DRAFT_FOLDER, FILE, RuntimeConfig
from llmforge.runtime.interface import LOGITS_CHUNK, Decoder, Rows, StepInputs
from llmforge.runtime.prefill_shapes import PREFILL_CHUNK
from llmforge.runtime.sampling.options import GREEDY, Sampling
from llmforge.runtime.sampling.sampler import Samplers
from llmforge.serving.chat import ChatTemplate
from llmforge.serving.drafting import speculation_of
from llmforge.serving.interface import EngineOptions
from llmforge.serving.prompts import PromptEncoder
from llmforge.serving.request import Chunk, Request, adapter_number, check_tokens
from llmforge.serving.scheduler import Scheduler, scheduler_of
from llmforge.serving.speculation import Speculation


@dataclass(frozen=True)
class StepOutput:
    """What one step gave a batch: a token for every row that is alive, None for those that ended before.

    `finish_reasons` holds, at the step that sampled its last token, why a row ends; else None.
    """

    token_ids: tuple[int | None, ...]
    finish_reasons: tuple[str | None, ...]


class Runner(PromptEncoder):
    """An engine with its tokenizer. Up to `config.max_batch` sequences may run at once."""

    def __init__(
        self,
        session: Decoder[Any],
        config: RuntimeConfig,
        tokenizer: Tokenizer,
        template: ChatTemplate | None,
        load_draft: Callable[[], Runner] | None = None,
    ) -> None:
        super().__init__(config, tokenizer, template)
        self.session = session
        self._load_draft = load_draft
        self.samplers = Samplers(tokenizer, config.vocabulary, config.eos_token_ids)
        self._cache: Rows | None = None  # allocated when it is first used: a GPU's memory is taken at once
        self._taken = [False] * config.max_batch
        self._lock = threading.Lock()

    @functools.cached_property
    def draft(self) -> Runner | None:
        """The artifact's own smaller model, or head, which drafts tokens (`RuntimeConfig.speculation`); None: none.

        It is loaded when it is first asked for, and raises what `load` raises.
        """
        return None if self._load_draft is None else self._load_draft()

    def generate(self, prompt: str | Sequence[int], sampling: Sampling = GREEDY, adapter: str = "") -> Iterator[Chunk]:
        """Go on from one prompt, a text or token ids, chunk by chunk, with an `adapter` of the artifact, or none.

        Tokens are drafted as the artifact says.

        Raises:
            UsageError: the prompt is empty or too long, `max_batch` sequences are running, or there is no such adapter.
        """
        start = time.perf_counter()
        ids = tuple(self.encode(prompt) if isinstance(prompt, str) else prompt)
        check_tokens(ids, self.config.max_context - 1, self.config.vocabulary)
        received: deque[Chunk | ForgeError] = deque()
        with self._lease(1) as cache:
            scheduler = self._scheduler(cache, speculation_of(self, rows=1))
            scheduler.add(Request(ids, sampling, adapter=adapter), received.append, start)
            while scheduler.step():
                while received:
                    yield _chunk(received.popleft())

    def generate_batch(self, prompts: Sequence[Sequence[int]], samplings: Sequence[Sampling]) -> Iterator[StepOutput]:
        """Go on from several prompts of token ids together, one step of all rows at a time.

        Each row gets the tokens that it would get alone. The first step comes after all prompts are read.

        Raises:
            UsageError: a prompt is empty or too long, there are more than `max_batch`, or a stop string is asked for.
        """
        if any(sampling.stop for sampling in samplings):
            raise UsageError("stop strings are not supported for a batch of token ids")
        if len(samplings) != len(prompts) or not prompts:
            raise ValueError(f"{len(prompts)} prompts, {len(samplings)} samplings")
        return self._steps([tuple(prompt) for prompt in prompts], samplings)

    def logits(
        self, ids: Sequence[int], step_tokens: int | None = None, *, first_step: int = 1, adapter: str = ""
    ) -> NDArray[np.float32]:
        """Give the logits after every token of `ids`, fp32 [S, V], reading at most `step_tokens` a step.

        None: `LOGITS_CHUNK`. With 1 every token but the first is read by a decode step, which finds all before it in
        the KV cache. The first step reads `first_step` tokens, if that is more: a prompt.
        """
        return np.concatenate(list(self.logits_chunks(ids, step_tokens, first_step=first_step, adapter=adapter)))

    def logits_chunks(
        self, ids: Sequence[int], step_tokens: int | None = None, *, first_step: int = 1, adapter: str = ""
    ) -> Iterator[NDArray[np.float32]]:
        """Give the logits after every token of `ids` in chunks, one for each step: fp32 [rows, V]."""
        check_tokens(ids, self.config.max_context, self.config.vocabulary)
        with self._lease(1) as cache:
            tokens, whole = np.array([ids], np.int64), np.array([len(ids)])
            chosen = np.array([adapter_number(adapter, self.config.adapters)])
            wanted = step_tokens or LOGITS_CHUNK
            longest = self.session.longest_step
            size, first = (min(most, longest or most) for most in (wanted, max(wanted, first_step)))
            for start in (0, *range(first, len(ids), size)):
                end = start + (size if start else first)
                chunk, past = tokens[:, start:end], np.array([start], np.int32)
                every = np.arange(chunk.shape[1])
                yield self.session.step(StepInputs(chunk, past, every, text_lengths=whole, adapters=chosen), cache)[0]

    def logits_after(self, texts: Sequence[Sequence[int]], starts: Sequence[int]) -> list[NDArray[np.float32]]:
        """Read `texts` together, and give the logits after each token from number `starts[b]` on: fp32 [S_b, V].

        Raises:
            UsageError: a text is empty or too long, or there are more than `max_batch`.
        """
        for ids in texts:
            check_tokens(ids, self.config.max_context, self.config.vocabulary)
        longest, first = max(map(len, texts)), min(starts)
        parts: list[NDArray[np.float32]] = []
        with self._lease(len(texts)) as cache:
            # Rows that pad the batch to a bucket read the first text again; tokens that pad a row are never looked at.
            rows = [*texts, *[texts[0]] * (cache.batch - len(texts))]
            tokens = np.array([[*ids, *[ids[-1]] * (longest - len(ids))] for ids in rows], np.int64)
            whole = np.array([len(ids) for ids in rows])
            size = min(LOGITS_CHUNK, self.session.longest_step or LOGITS_CHUNK)
            for start in range(0, longest, size):
                chunk, past = tokens[:, start : start + size], np.full(len(rows), start, np.int32)
                wanted = np.arange(max(0, first - start), chunk.shape[1])
                lengths = np.clip(whole - start, 1, chunk.shape[1])
                made = self.session.step(
                    StepInputs(chunk, past, wanted if len(wanted) else None, lengths=lengths, text_lengths=whole), cache
                )
                if len(wanted):
                    parts.append(made)
        logits = np.concatenate(parts, 1)  # from `first` on
        return [
            logits[b, start - first : len(ids) - first]
            for b, (ids, start) in enumerate(zip(texts, starts, strict=True))
        ]

    def _steps(self, prompts: list[tuple[int, ...]], samplings: Sequence[Sampling]) -> Iterator[StepOutput]:
        for prompt in prompts:
            check_tokens(prompt, self.config.max_context - 1, self.config.vocabulary)
        received: list[deque[Chunk | ForgeError]] = [deque() for _ in prompts]
        with self._lease(len(prompts)) as cache:
            scheduler = self._scheduler(cache)
            for prompt, sampling, chunks in zip(prompts, samplings, received, strict=True):
                scheduler.add(Request(prompt, sampling, detokenize=False), chunks.append)
            while scheduler.step():
                # Tokens that are delivered while the next step runs come with its own where that is the last.
                while any(received):
                    tokens, reasons = zip(*map(_next_token, received), strict=True)
                    yield StepOutput(tokens, reasons)

    def _scheduler(self, cache: Any, speculation: Speculation | None = None) -> Scheduler[Any]:
        """Make a scheduler for the rows of `cache` that reads all prompts in its first step."""
        options = EngineOptions(max_queue=0, step_tokens=cache.batch * cache.capacity, prefix_cache_bytes=0)
        return scheduler_of(
            self.session,
            cache,
            self.samplers,
            options,
            speculation=speculation,
            chunk=PREFILL_CHUNK,
            adapters=self.config.adapters,
        )

    @contextlib.contextmanager
    def _lease(self, wanted: int) -> Iterator[Any]:
        """Take neighbouring free rows of the cache for as long as the `with` block lasts.

        Where decode steps are padded to buckets, the rows of padding are taken, too, if they are free. Rows of one pool
        of blocks are all taken: what one scheduler plans, another one must not.
        """
        with self._lock:
            paged = self.session.signature.block_size is not None
            padded = min((size for size in self.session.buckets if size >= wanted), default=wanted)
            rows = padded if self._find_free(padded) is not None else wanted
            rows = max(wanted, len(self._taken)) if paged else rows
            start = self._find_free(rows)
            if start is None:
                raise UsageError(
                    f"{wanted} sequences requested while {sum(self._taken)} are running; this artifact runs at "
                    f"most {len(self._taken)}",
                    hint="finish or close the others first, or build with a larger engine.max_batch",
                )
            if self._cache is None:
                self._cache = self.session.allocate(self.config.max_batch, self.config.max_context)
            self._taken[start : start + rows] = [True] * rows
        cache = self._cache
        try:
            yield cache.anew().rows(0, wanted) if isinstance(cache, PagedCache) else cache.rows(start, start + rows)
        finally:
            with self._lock:
                self._taken[start : start + rows] = [False] * rows

    def _find_free(self, rows: int) -> int | None:
        """Find the first of so many neighbouring free rows."""
        places = range(len(self._taken) - rows + 1)
        return next((at for at in places if not any(self._taken[at : at + rows])), None)


def load(artifact: Path, threads: int | None = None, device: int = 0, template: ChatTemplate | None = None) -> Runner:
    """Load an artifact; `threads` overrides its own number of threads, `device` says which GPU an engine for one gets.

    A `template` for chats stands in place of the artifact's own.

    Raises:
        InputError: the folder is not an artifact, or its files do not belong together.
        VersionMismatch: the artifact was built for another version of what runs it, or for another GPU.
        EnvironmentLacks: there is no such GPU here.
    """
    prompts = PromptEncoder.read(artifact, template)
    session = open_engine(artifact / "engine", prompts.config, threads, device)
    folder = artifact / "engine" / DRAFT_FOLDER

    def load_draft() -> Runner:
        config = RuntimeConfig.read(folder / FILE)
        return Runner(open_engine(folder, config, threads, device), config, prompts.tokenizer, None)

    facts = prompts.config.speculation
    drafts = facts is not None and facts.method != "prompt-lookup"
    return Runner(session, prompts.config, prompts.tokenizer, prompts.template, load_draft if drafts else None)


def _next_token(items: deque[Chunk | ForgeError]) -> tuple[int | None, str | None]:
    """Take the next token that a row received, and the reason that follows it if it is the last; None: nothing."""
    token = reason = None
    while items and (token is None or (isinstance(items[0], Chunk) and items[0].token_id is None)):
        chunk = _chunk(items.popleft())
        token, reason = token if chunk.token_id is None else chunk.token_id, chunk.finish_reason
    return token, reason


def _chunk(item: Chunk | ForgeError) -> Chunk:
    """Raise an error that came in the place of a chunk."""
    if isinstance(item, ForgeError):
        raise item
    return item
