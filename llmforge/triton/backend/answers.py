"""Answers on their way to clients: the engine's thread hands over, a thread of its own sends.

So the engine never waits for the server, and where sending falls behind, pieces of one answer go out together.
"""

from __future__ import annotations

import dataclasses
import json
import queue
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import triton_python_backend_utils as pb_utils
from tokenizers import Tokenizer

from llmforge.base.errors import EnvironmentLacks, ForgeError, InputError, Unavailable, UnsupportedError, UsageError
from llmforge.runtime.sampling.sampler import TokenLogprob
from llmforge.runtime.serving.engine import Engine
from llmforge.runtime.serving.request import Chunk
from llmforge.runtime.serving.sequence import Ticket
from llmforge.triton.backend import signature
from llmforge.triton.backend.inputs import Ask
from llmforge.triton.backend.metrics import Metrics
from llmforge.triton.backend.signature import TensorSpec

# How often the server is asked whether clients have gone: the longest time that a slot works for nobody.
POLL_S = 0.03
IDLE_S = 0.5  # where there is no answer to ask for, only the engine itself is looked at

_DTYPES = {"TYPE_STRING": np.object_, "TYPE_UINT32": np.uint32}


@dataclass(eq=False)
class Reply:
    """One request of a client, from its arrival to its last response; used by the sending thread alone."""

    sender: Any  # pb_utils.InferenceResponseSender
    ask: Ask
    arrived: float  # on the clock of `time.perf_counter`
    ticket: Ticket | None = None
    chunks: list[Chunk] = field(default_factory=list)  # that no response holds yet
    output_tokens: int = 0  # in the responses so far
    last_token: float | None = None  # when the last token was made
    ended: bool = False


_Item = tuple[Reply, Ticket | Chunk | ForgeError, float]


class Sender:
    """Sends answers from its own thread until `close`; `died` is called once if the engine ends on its own."""

    def __init__(self, engine: Engine, metrics: Metrics, died: Callable[[], None]) -> None:
        self._engine = engine
        self._tokenizer: Tokenizer = engine.runner.tokenizer
        self._metrics = metrics
        self._died = died
        self._items: queue.SimpleQueue[_Item] = queue.SimpleQueue()
        self._open: set[Reply] = set()
        self._closing, self._drained = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._run, name="llmforge-sender")
        self._thread.start()

    def submit(self, ask: Ask, sender: Any, arrived: float) -> None:
        """Give the engine a request, whose answer will be sent.

        Raises:
            UsageError, Unavailable: the engine does not take it; nothing will be sent.
        """
        reply = Reply(sender, ask, arrived)
        ticket = self._engine.submit(ask.request, lambda item: self._post(reply, item))
        self._post(reply, ticket)

    def close(self, timeout_s: float) -> None:
        """Close the engine, which may answer for `timeout_s` seconds, send what it hands over, and end the thread."""
        self._closing.set()
        self._engine.close(drain=True, timeout_s=timeout_s)
        self._drained.set()
        self._thread.join()

    def _post(self, reply: Reply, item: Ticket | Chunk | ForgeError) -> None:
        self._items.put((reply, item, time.perf_counter()))

    def _run(self) -> None:
        try:
            self._loop()
        finally:
            if not self._closing.is_set():  # a bug: nobody would send what the engine still makes
                self._died()

    def _loop(self) -> None:
        polled, told = 0.0, False
        while True:
            items = self._take(POLL_S if self._open else IDLE_S)
            for reply in dict.fromkeys(self._sort(item) for item in items):
                self._send(reply)
            if (now := time.perf_counter()) - polled >= POLL_S:
                polled = now
                self._cancel_abandoned()
            if self._drained.is_set() and not items:
                return
            if not (told or self._closing.is_set() or self._open or self._engine.alive):
                told = True
                self._died()

    def _take(self, timeout_s: float) -> list[_Item]:
        """Wait for one item, and take all that are there."""
        items: list[_Item] = []
        try:
            items.append(self._items.get(timeout=timeout_s))
            while True:
                items.append(self._items.get_nowait())
        except queue.Empty:
            return items

    def _sort(self, item: _Item) -> Reply:
        """Put an item to its answer; an error ends it at once."""
        reply, what, when = item
        if isinstance(what, Ticket):
            reply.ticket = what
        elif isinstance(what, ForgeError):
            self._end(reply)
            fail(reply.sender, what)
        else:
            reply.chunks.append(what)
            if what.token_id is not None:
                self._time(reply, when)
        if not reply.ended:
            self._open.add(reply)
        return reply

    def _time(self, reply: Reply, when: float) -> None:
        if reply.last_token is None:
            self._metrics.first_token(when - reply.arrived)
        else:
            self._metrics.next_token(when - reply.last_token)
        reply.last_token = when

    def _send(self, reply: Reply) -> None:
        """Send what is there of an answer, if it is to be sent now."""
        if reply.ended or not reply.chunks:
            return
        reason = reply.chunks[-1].finish_reason
        if reason is None and not (reply.ask.stream and any(chunk.text for chunk in reply.chunks)):
            return
        response = pb_utils.InferenceResponse(output_tensors=self._tensors(reply, reason))
        reply.chunks.clear()
        if reason is None:
            reply.sender.send(response)
            return
        self._end(reply)
        reply.sender.send(response, flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)

    def _tensors(self, reply: Reply, reason: str | None) -> list[Any]:
        """Make the outputs of one response from the chunks that no response holds yet."""
        chunks, usage = reply.chunks, reply.chunks[-1].usage
        # The end-of-sequence token is in no chunk, and in the usage.
        tokens = sum(chunk.token_id is not None for chunk in chunks)
        tokens = usage.output_tokens - reply.output_tokens if usage is not None else tokens
        reply.output_tokens += tokens
        text = "".join(chunk.text for chunk in chunks)
        values: dict[TensorSpec, Any] = {
            signature.TEXT_OUTPUT: reply.ask.before + text,
            signature.FINISH_REASON: reason or "",
            signature.NUM_INPUT_TOKENS: len(reply.ask.request.prompt),
            signature.NUM_OUTPUT_TOKENS: tokens,
        }
        if usage is not None:
            values[signature.USAGE] = json.dumps(dataclasses.asdict(usage))
        if logprobs := [self._logprob(chunk.logprob) for chunk in chunks if chunk.logprob is not None]:
            values[signature.LOGPROBS] = json.dumps(logprobs, ensure_ascii=False)
        return [_tensor(spec, value) for spec, value in values.items() if spec.name not in reply.ask.omitted]

    def _logprob(self, entry: TokenLogprob) -> dict[str, Any]:
        def named(token: int, logprob: float) -> dict[str, Any]:
            return {"token_id": token, "token": self._tokenizer.id_to_token(token), "logprob": logprob}

        return {**named(entry.token_id, entry.logprob), "top": [named(*each) for each in entry.top]}

    def _cancel_abandoned(self) -> None:
        for reply in self._open:
            if reply.ticket is not None and reply.sender.is_cancelled():
                self._engine.cancel(reply.ticket)

    def _end(self, reply: Reply) -> None:
        """Note that an answer gets its last response; Triton allows no use of its sender after that."""
        reply.ended = True
        self._open.discard(reply)


def fail(sender: Any, error: ForgeError) -> None:
    """End a request with an error, which clients see with its hint."""
    code = pb_utils.TritonError.INTERNAL
    if isinstance(error, Unavailable):
        code = pb_utils.TritonError.UNAVAILABLE
    elif isinstance(error, UsageError | InputError):
        code = pb_utils.TritonError.INVALID_ARG
    elif isinstance(error, UnsupportedError | EnvironmentLacks):
        code = pb_utils.TritonError.UNSUPPORTED
    response = pb_utils.InferenceResponse(error=pb_utils.TritonError(str(error), code))
    sender.send(response, flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)


def _tensor(spec: TensorSpec, value: Any) -> Any:
    return pb_utils.Tensor(spec.name, np.array([[value]], _DTYPES[spec.data_type]))
