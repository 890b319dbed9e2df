"""Finished answers of a server as lines of a trace, in the form of Mooncake's (Qin et al., FAST 2025):
https://github.com/kvcache-ai/Mooncake/tree/main/FAST25-release.

Its fields are `timestamp` (ms), `input_length`, `output_length` and `hash_ids`: a number for each block of the prompt,
equal where two prompts are equal up to the end of that block. A line has more: `block_size`, `ttft_ms`, `latency_ms`,
`finish_reason` and, only where that was asked for, `prompt` and `answer`.
"""

from __future__ import annotations

import hashlib
import json
import queue
import random
import re
import secrets
import threading
import time
from array import array
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from llmforge.base import small_file
from llmforge.base.errors import UsageError
from llmforge.serving.prompts import PromptEncoder
from llmforge.serving.request import Chunk, Request

if TYPE_CHECKING:
    from llmforge.serving.http.completion_call import CompletionCall

BLOCK_TOKENS = 64  # of a hash; Mooncake's traces have 512, in which shared system prompts of chats are not seen
MOST_WAITING = 1024  # answers between the server and the file; those beyond are dropped and counted
PARTS = 8  # files of one recording: the oldest goes when all together are too large
CLOSE_S = 5.0  # for what is left to write at the end
_DIGEST_BYTES = 6  # of a hash: whole numbers of JSON are exact below 2^53
_MOST_PATTERNS = 1 << 16  # bytes of their file
_LEAST_KEY, _MOST_KEY = 16, 64  # bytes; the latter is BLAKE2b's
OUTCOMES = ("written", "dropped", "failed")  # of an answer that was to be recorded


@dataclass(frozen=True)
class RecordOptions:
    """What is recorded where. `key` hashes blocks and what is redacted; None: one that ends with the process."""

    folder: Path
    share: float = 1.0  # of calls
    text: bool = False
    patterns: tuple[re.Pattern[str], ...] = ()  # of what is taken out of texts
    key: bytes | None = field(default=None, repr=False)
    size_bytes: int = 256 << 20  # of all files of the folder together


def read_patterns(file: Path) -> tuple[re.Pattern[str], ...]:
    """Read regular expressions, one a line; blank lines, and those that begin with `#`, are skipped.

    Raises:
        InputError: the file cannot be read.
        UsageError: a line is no regular expression, or matches where there is nothing.
    """
    found = []
    lines = small_file.read(file, _MOST_PATTERNS, hint="a regular expression a line").decode("utf-8", "replace")
    for number, line in enumerate(lines.splitlines(), start=1):
        if not line.strip() or line.startswith("#"):
            continue
        try:
            pattern = re.compile(line)
        except re.error as error:
            raise UsageError(f"{file}:{number}: no regular expression: {error}") from error
        if pattern.search(""):
            raise UsageError(f"{file}:{number}: {line!r} matches nothing at all, and so everywhere")
        found.append(pattern)
    return tuple(found)


def read_key(file: Path) -> bytes:
    """Read the key of hashes.

    Raises:
        InputError: the file cannot be read.
        UsageError: it has another length.
    """
    key = small_file.read(file, 4 * _MOST_KEY, hint="for example from `openssl rand -hex 32`").strip()
    if not _LEAST_KEY <= len(key) <= _MOST_KEY:
        raise UsageError(f"{file}: a key of {len(key)} bytes; expected {_LEAST_KEY} to {_MOST_KEY}")
    return key


@dataclass(frozen=True)
class RecordedAnswer:
    """One answer that has ended."""

    arrived_s: float  # by the clock of the recorder
    prompt: Sequence[int]
    output_tokens: int
    ttft_ms: float | None
    latency_ms: float
    finish_reason: str
    text: str | None


class CallRecording:
    """Follows the answers of one call, in the event loop."""

    def __init__(self, recorder: Recorder, requests: Sequence[Request]) -> None:
        self._recorder = recorder
        self._requests = requests
        self._arrived_s = time.perf_counter()
        self._pieces: dict[int, list[str]] = {}

    def chunk(self, index: int, chunk: Chunk) -> None:
        """Take what has come of a choice."""
        if self._recorder.options.text:
            self._pieces.setdefault(index, []).append(chunk.text)
        if chunk.finish_reason is not None and chunk.usage is not None:
            self._recorder.put(
                RecordedAnswer(
                    self._arrived_s,
                    self._requests[index].prompt,
                    chunk.usage.output_tokens,
                    chunk.usage.ttft_ms,
                    (time.perf_counter() - self._arrived_s) * 1e3,
                    chunk.finish_reason,
                    "".join(self._pieces.pop(index)) if self._recorder.options.text else None,
                )
            )


class Recorder:
    """Writes what it is given, in a thread of its own; nobody waits for it.

    Files are `trace-TIME-NUMBER.jsonl`, for their owner alone; `counts` has how each answer ended, by `OUTCOMES`.
    """

    def __init__(self, options: RecordOptions, encoder: PromptEncoder) -> None:
        """Make the folder, and the first file in it.

        Raises:
            UsageError: a number is out of its range.
            OSError: they cannot be made.
        """
        if not 0 < options.share <= 1:
            raise UsageError(f"a share of {options.share:g}: expected more than 0, and at most 1")
        self.options = options
        self.counts: Counter[str] = Counter(dict.fromkeys(OUTCOMES, 0))
        self._encoder = encoder
        self._begin = encoder.encode("")  # what a text gets in front of it when it is read again
        self._key = options.key or secrets.token_bytes(32)
        self._random = random.Random()  # samples calls, and guards nothing
        self._started_s = time.perf_counter()
        self._name = f"trace-{datetime.now(UTC):%Y%m%dT%H%M%S}-{secrets.token_hex(2)}"
        self._parts = 0
        options.folder.mkdir(parents=True, exist_ok=True)
        self._file: IO[bytes] | None = self._next()
        self._items: queue.Queue[RecordedAnswer | None] = queue.Queue(MOST_WAITING)
        self._thread = threading.Thread(target=self._run, name="llmforge-recorder", daemon=True)
        self._thread.start()

    def begin(self, call: CompletionCall) -> CallRecording | None:
        """Follow a call, if it is of the share that is recorded."""
        if self._random.random() >= self.options.share:
            return None
        return CallRecording(self, call.requests)

    def put(self, answer: RecordedAnswer) -> None:
        """Hand an answer over; one that finds no room is dropped."""
        try:
            self._items.put_nowait(answer)
        except queue.Full:
            self.counts["dropped"] += 1

    def close(self) -> None:
        """Write what is left, for at most `CLOSE_S`."""
        try:
            self._items.put(None, timeout=CLOSE_S)
        except queue.Full:
            return
        self._thread.join(CLOSE_S)

    def line(self, answer: RecordedAnswer) -> dict[str, Any]:
        """Make the line of an answer."""
        made: dict[str, Any] = {
            "timestamp": round((answer.arrived_s - self._started_s) * 1e3),
            "input_length": len(answer.prompt),
            "output_length": answer.output_tokens,
            "hash_ids": hash_ids(answer.prompt, self._key),
            "block_size": BLOCK_TOKENS,
            "ttft_ms": None if answer.ttft_ms is None else round(answer.ttft_ms, 3),
            "latency_ms": round(answer.latency_ms, 3),
            "finish_reason": answer.finish_reason,
        }
        if answer.text is not None:
            ids = list(answer.prompt)
            if self._begin and ids[: len(self._begin)] == self._begin:
                ids = ids[len(self._begin) :]
            made["prompt"] = self.redacted(self._encoder.tokenizer.decode(ids, skip_special_tokens=False))
            made["answer"] = self.redacted(answer.text)
        return made

    def redacted(self, text: str) -> str:
        """Replace what the patterns match; equal texts are replaced by equal ones, and only the key tells which."""
        for pattern in self.options.patterns:
            text = pattern.sub(lambda found: f"[redacted-{self._digest(found[0].encode()).hex()}]", text)
        return text

    def _digest(self, data: bytes) -> bytes:
        return hashlib.blake2b(data, key=self._key, digest_size=_DIGEST_BYTES).digest()

    def _run(self) -> None:
        while (answer := self._items.get()) is not None:
            try:
                self._write(json.dumps(self.line(answer), ensure_ascii=False).encode() + b"\n")
                self.counts["written"] += 1
            except OSError:  # a disk that is full, say: there may be room later
                self.counts["failed"] += 1
        if self._file is not None:
            self._file.close()

    def _write(self, line: bytes) -> None:
        if self._file is None or self._file.tell() + len(line) > self.options.size_bytes // PARTS:
            if self._file is not None:
                self._file.close()
                self._file = None
            self._file = self._next()
        self._file.write(line)
        if self._items.empty():
            self._file.flush()

    def _next(self) -> IO[bytes]:
        """Begin the next file, after room was made for it."""
        self._parts += 1
        files = sorted(self.options.folder.glob("trace-*.jsonl"), key=lambda file: (file.stat().st_mtime_ns, file))
        sizes = {file: file.stat().st_size for file in files}
        while sizes and sum(sizes.values()) > self.options.size_bytes * (PARTS - 1) // PARTS:
            oldest = next(iter(sizes))
            oldest.unlink(missing_ok=True)
            del sizes[oldest]
        file = self.options.folder / f"{self._name}-{self._parts:06d}.jsonl"
        stream = file.open("xb")
        file.chmod(0o600)
        return stream


def hash_ids(prompt: Sequence[int], key: bytes, block: int = BLOCK_TOKENS) -> list[int]:
    """Number the blocks of a prompt, the last one maybe shorter, each by all tokens up to its end."""
    tokens = array("q", prompt)
    found, before = [], b""
    for start in range(0, len(tokens), block):
        before = hashlib.blake2b(before + tokens[start : start + block], key=key, digest_size=_DIGEST_BYTES).digest()
        found.append(int.from_bytes(before))
    return found
