"""Response cache: greedy answers that were given before, for requests that are the same.

A greedy answer follows from the artifact, the tokens and the parameters, so that it may be given again. The engine of
one artifact has one cache, and a key is a digest of all else that decides: who asks (no client gets, or can time, what
another one asked), prompt, sampling parameters, adapter. Answers at a temperature above 0, with log probabilities, and
those that did not end by themselves or by their length are not kept.
"""

from __future__ import annotations

import hashlib
import threading
import time
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from llmforge.base.errors import ForgeError
from llmforge.serving.request import Chunk, Receiver, Request

MOST_ANSWERS = 1 << 20
MOST_TOKENS = 1 << 20  # of all answers together; a token takes some 200 bytes
_WHOLE = ("stop", "length")


@dataclass(frozen=True)
class _Answer:
    """The chunks of an answer."""

    chunks: tuple[Chunk, ...]

    def again(self, submitted: float) -> Iterator[Chunk]:
        """Give the chunks once more; nothing of the prompt was computed for it."""
        *first, last = self.chunks
        yield from first
        assert last.usage is not None
        ttft_ms = (time.perf_counter() - submitted) * 1e3
        usage = replace(
            last.usage,
            cached_tokens=last.usage.prompt_tokens,
            ttft_ms=ttft_ms,
            tpot_ms=None,
            queue_ms=0.0,
            prefill_ms=None,
            drafted_tokens=0,
            accepted_tokens=0,
        )
        yield replace(last, usage=usage)


class ResponseCache:
    """The last answers, `most` at most, and `MOST_TOKENS` tokens. Any thread may call any method."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._answers: OrderedDict[bytes, _Answer] = OrderedDict()  # the least recently used first
        self._tokens = 0
        self._lock = threading.Lock()
        self.hits = self.misses = 0

    @staticmethod
    def serves(request: Request) -> bool:
        """Say whether a request always has the same answer."""
        return request.sampling.temperature == 0 and request.sampling.logprobs is None

    def find(self, request: Request, submitted: float) -> Iterator[Chunk] | None:
        """Give the chunks of the answer to a request that `serves` allows; None: it was not asked, or was forgotten."""
        key = _key(request)
        with self._lock:
            answer = self._answers.get(key)
            if answer is None:
                self.misses += 1
                return None
            self.hits += 1
            self._answers.move_to_end(key)
        return answer.again(submitted)

    def recording(self, request: Request, receive: Receiver) -> Receiver:
        """Make what hands chunks to `receive`, and keeps the answer when it is whole."""
        chunks = list[Chunk]()

        def record(item: Chunk | ForgeError) -> None:
            if isinstance(item, Chunk):
                chunks.append(item)
                if item.finish_reason in _WHOLE and item.usage is not None:
                    self._keep(_key(request), _Answer(tuple(chunks)))
            receive(item)

        return record

    def _keep(self, key: bytes, answer: _Answer) -> None:
        with self._lock:
            before = self._answers.pop(key, None)
            self._tokens += len(answer.chunks) - (0 if before is None else len(before.chunks))
            self._answers[key] = answer
            while len(self._answers) > self._most or self._tokens > MOST_TOKENS:
                _, oldest = self._answers.popitem(last=False)
                self._tokens -= len(oldest.chunks)


def _key(request: Request) -> bytes:
    """Digest all that decides about an answer, and who may have it; a greedy one draws nothing by its seed."""
    said = (
        request.client, request.adapter, request.detokenize, sorted(request.special_tokens),
        replace(request.sampling, seed=0),
    )  # fmt: skip
    digest = hashlib.sha256(repr(said).encode())
    digest.update(np.array(request.prompt, np.int64).tobytes())
    return digest.digest()
