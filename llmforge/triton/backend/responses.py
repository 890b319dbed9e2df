"""Responses on their way to clients: the engine's thread hands over, a thread of its own sends.

So the engine never waits for the server, and where sending is late, chunks of one sequence go out together.
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

from llmforge.base.errors import ForgeError
from llmforge.runtime.sampling.sampler import TokenLogprob
from llmforge.serving.interface import Serving
from llmforge.serving.protocol.answer import AnswerPiece, AnswerReader, call_deltas, text_of, whole_calls
from llmforge.serving.request import Chunk
from llmforge.serving.sequence import Ticket
from llmforge.triton.backend import signature
from llmforge.triton.backend.failures import failed
from llmforge.triton.backend.inputs import InferenceRequest
from llmforge.triton.backend.metrics import Metrics
from llmforge.triton.backend.signature import TensorSpec

# How often the server is asked whether clients have gone: the longest time that a slot works for nobody.
POLL_S = 0.03
IDLE_S = 0.5  # where nothing runs, only the engine itself is looked at

_DTYPES = {"TYPE_STRING": np.object_, "TYPE_UINT32": np.uint32}


@dataclass(eq=False)
class ActiveRequest:
    """One request of a client, from its arrival to its last response; used by the sending thread alone."""

    sender: Any  # pb_utils.InferenceResponseSender
    asked: InferenceRequest
    arrived: float  # on the clock of `time.perf_counter`
    ticket: Ticket | None = None
    chunks: list[Chunk] = field(default_factory=list)  # that no response holds yet
    pieces: list[AnswerPiece] = field(default_factory=list)  # of their text, as far as it is known what it is
    output_tokens: int = 0  # in the responses so far
    last_token: float | None = None  # when it was made
    reason: str | None = None  # why it ended, as the client is told
    ended: bool = False

    def __post_init__(self) -> None:
        self.reader = AnswerReader(self.asked.parser)


_Item = tuple[ActiveRequest, Ticket | Chunk | ForgeError, float]


class ResponseSender:
    """Sends responses from its own thread until `close`; `died` is called once if the engine ends on its own."""

    def __init__(self, engine: Serving, metrics: Metrics, died: Callable[[], None]) -> None:
        self._engine = engine
        self._tokenizer: Tokenizer = engine.encoder.tokenizer
        self._metrics = metrics
        self._died = died
        self._items: queue.SimpleQueue[_Item] = queue.SimpleQueue()
        self._active: set[ActiveRequest] = set()
        self._closing, self._drained = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._run, name="llmforge-sender")
        self._thread.start()

    def submit(self, asked: InferenceRequest, sender: Any, arrived: float) -> None:
        """Give the engine a request, whose output will be sent.

        Raises:
            UsageError, Unavailable: the engine does not take it; nothing will be sent.
        """
        active = ActiveRequest(sender, asked, arrived)
        ticket = self._engine.submit(asked.request, lambda item: self._queue_item(active, item))
        self._queue_item(active, ticket)

    def close(self, timeout_s: float) -> None:
        """Close the engine, which may go on for `timeout_s` seconds, send what it hands over, and end the thread."""
        self._closing.set()
        self._engine.close(drain=True, timeout_s=timeout_s)
        self._drained.set()
        self._thread.join()

    def _queue_item(self, active: ActiveRequest, item: Ticket | Chunk | ForgeError) -> None:
        self._items.put((active, item, time.perf_counter()))

    def _run(self) -> None:
        try:
            self._loop()
        finally:
            if not self._closing.is_set():  # a bug: nobody would send what the engine still makes
                self._died()

    def _loop(self) -> None:
        polled, told = 0.0, False
        while True:
            items = self._take(POLL_S if self._active else IDLE_S)
            for active in dict.fromkeys(self._assign(item) for item in items):
                self._send(active)
            if (now := time.perf_counter()) - polled >= POLL_S:
                polled = now
                self._cancel_abandoned()
            if self._drained.is_set() and not items:
                return
            if not (told or self._closing.is_set() or self._active or self._engine.alive):
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

    def _assign(self, item: _Item) -> ActiveRequest:
        """Put an item to its request; an error ends it at once."""
        active, what, when = item
        if isinstance(what, Ticket):
            active.ticket = what
        elif isinstance(what, ForgeError):
            self._end(active)
            fail(active.sender, what)
        else:
            active.chunks.append(what)
            pieces, active.reason = active.reader.read(what.text, what.finish_reason)
            active.pieces += pieces
            if what.token_id is not None:
                before, active.last_token = active.last_token, when
                self._metrics.token(when - (active.arrived if before is None else before), first=before is None)
        if not active.ended:
            self._active.add(active)
        return active

    def _send(self, active: ActiveRequest) -> None:
        """Send what is there of an output, if it is to be sent now."""
        if active.ended or not active.chunks:
            return
        if active.reason is None and not (active.asked.stream and active.pieces):
            return
        response = pb_utils.InferenceResponse(output_tensors=self._tensors(active))
        active.chunks.clear()
        active.pieces.clear()
        if active.reason is None:
            active.sender.send(response)
            return
        self._end(active)
        active.sender.send(response, flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)

    def _tensors(self, active: ActiveRequest) -> list[Any]:
        """Make the outputs of one response from the chunks that no response holds yet."""
        chunks, usage = active.chunks, active.chunks[-1].usage
        # The end-of-sequence token is in no chunk, and in the usage.
        tokens = sum(chunk.token_id is not None for chunk in chunks)
        tokens = usage.output_tokens - active.output_tokens if usage is not None else tokens
        active.output_tokens += tokens
        values: dict[TensorSpec, Any] = {
            signature.TEXT_OUTPUT: active.asked.echo + text_of(active.pieces),
            signature.FINISH_REASON: active.reason or "",
            signature.NUM_INPUT_TOKENS: len(active.asked.request.prompt),
            signature.NUM_OUTPUT_TOKENS: tokens,
        }
        if usage is not None:
            values[signature.USAGE] = json.dumps(dataclasses.asdict(usage))
        if logprobs := [self._logprob(chunk.logprob) for chunk in chunks if chunk.logprob is not None]:
            values[signature.LOGPROBS] = json.dumps(logprobs, ensure_ascii=False)
        if calls := call_deltas(active.pieces):
            said = calls if active.asked.stream else whole_calls(calls)
            values[signature.TOOL_CALLS] = json.dumps(said, ensure_ascii=False)
        return [_tensor(spec, value) for spec, value in values.items() if spec.name not in active.asked.omitted]

    def _logprob(self, entry: TokenLogprob) -> dict[str, Any]:
        def named(token: int, logprob: float) -> dict[str, Any]:
            return {"token_id": token, "token": self._tokenizer.id_to_token(token), "logprob": logprob}

        return {**named(entry.token_id, entry.logprob), "top": [named(*each) for each in entry.top]}

    def _cancel_abandoned(self) -> None:
        for active in self._active:
            if active.ticket is not None and active.sender.is_cancelled():
                self._engine.cancel(active.ticket)

    def _end(self, active: ActiveRequest) -> None:
        """Note that a request gets its last response; Triton allows no use of its sender after that."""
        active.ended = True
        self._active.discard(active)


def fail(sender: Any, error: ForgeError) -> None:
    """End a request with an error."""
    sender.send(failed(error), flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)


def _tensor(spec: TensorSpec, value: Any) -> Any:
    return pb_utils.Tensor(spec.name, np.array([[value]], _DTYPES[spec.data_type]))
