"""Runs an artifact: prompts in, streamed text out. The same runner serves validation and users."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

from llmforge.errors import InputError, UsageError
from llmforge.runtime.chat import ChatTemplate
from llmforge.runtime.chooser import Choosers, TokenChooser
from llmforge.runtime.config import DATA_FILE, FILE, MODEL_FILE, RuntimeConfig
from llmforge.runtime.detokenize import Detokenizer, StopStrings
from llmforge.runtime.request import Chunk, Usage
from llmforge.runtime.sampling import GREEDY, Sampling
from llmforge.runtime.session import Cache, Session

# Tokens of a prompt that run in one step. It bounds the memory of activations and of the attention scores.
PREFILL_CHUNK = 512
# Tokens of a text that get logits in one step: at a vocabulary of 150,000, 256 rows of fp32 logits take 154 MB.
LOGITS_CHUNK = 256


@dataclass(frozen=True)
class Step:
    """One token for every row of a batch that is alive; None for those that ended before.

    `finish_reasons` holds, at the step that chose its last token, why a row ends; else None.
    """

    token_ids: tuple[int | None, ...]
    finish_reasons: tuple[str | None, ...]


class Runner:
    """An engine with its tokenizer. Up to `config.max_batch` answers may be generated at once."""

    def __init__(
        self, session: Session, config: RuntimeConfig, tokenizer: Tokenizer, template: ChatTemplate | None
    ) -> None:
        self.session = session
        self.config = config
        self.tokenizer = tokenizer
        self.template = template
        self.choosers = Choosers(tokenizer, config.vocabulary, config.eos_token_ids)
        self._cache = session.allocate(config.max_batch, config.max_context)
        self._taken = [False] * config.max_batch
        self._lock = threading.Lock()

    def encode(self, text: str) -> list[int]:
        """Tokenize a plain prompt; the tokenizer adds what it puts before every text (BOS), if anything."""
        return list(self.tokenizer.encode(text).ids)

    def encode_chat(self, messages: Sequence[Mapping[str, Any]]) -> list[int]:
        """Tokenize a conversation with the chat template, up to where the assistant speaks.

        Raises:
            UsageError: the artifact has no chat template.
            InputError: the template refuses the messages.
        """
        if self.template is None:
            raise UsageError("the artifact has no chat template", hint="give a plain prompt")
        return list(self.tokenizer.encode(self.template.render(messages), add_special_tokens=False).ids)

    def generate(self, prompt: str | Sequence[int], sampling: Sampling = GREEDY) -> Iterator[Chunk]:
        """Answer one prompt, a text or token ids, chunk by chunk.

        Raises:
            UsageError: the prompt is empty or too long, or `max_batch` answers are being generated.
        """
        start = time.perf_counter()
        ids = self.encode(prompt) if isinstance(prompt, str) else list(prompt)
        detokenizer, stops = Detokenizer(self.tokenizer), StopStrings(sampling.stop)
        times: list[float] = []
        reason = None
        for step in self._steps([ids], [sampling]):
            times.append(time.perf_counter())
            (token,), (reason,) = step.token_ids, step.finish_reasons
            assert token is not None  # the only row is alive
            if reason != "stop":  # an end-of-sequence token has no text
                yield Chunk(stops.push(detokenizer.push(token)), token)
            if stops.found:
                break
        rest = stops.push(detokenizer.flush()) + stops.flush()
        yield Chunk(rest, None, "stop" if stops.found else reason, _usage(len(ids), start, times))

    def generate_batch(self, prompts: Sequence[Sequence[int]], samplings: Sequence[Sampling]) -> Iterator[Step]:
        """Answer several prompts of token ids together, one step of all rows at a time.

        Each row gets the tokens that it would get alone. The first step comes after all prompts are read.

        Raises:
            UsageError: a prompt is empty or too long, there are more than `max_batch`, or a stop string is asked for.
        """
        if any(sampling.stop for sampling in samplings):
            raise UsageError("a batch of token ids has no text that stop strings could be found in")
        if len(samplings) != len(prompts) or not prompts:
            raise ValueError(f"{len(prompts)} prompts, {len(samplings)} samplings")
        return self._steps([list(prompt) for prompt in prompts], samplings)

    def logits(self, ids: Sequence[int]) -> NDArray[np.float32]:
        """Give the logits after every token of `ids`, fp32 [S, V]."""
        return np.concatenate(list(self.logits_chunks(ids)))

    def logits_chunks(self, ids: Sequence[int]) -> Iterator[NDArray[np.float32]]:
        """Give the logits after every token of `ids` in pieces of at most `LOGITS_CHUNK` rows: fp32 [rows, V]."""
        self._check(ids, self.config.max_context)
        with self._lease(1) as cache:
            tokens, whole = np.array([ids], np.int64), np.array([len(ids)])
            for at in range(0, len(ids), LOGITS_CHUNK):
                piece, past = tokens[:, at : at + LOGITS_CHUNK], np.array([at], np.int32)
                yield self.session.step(piece, past, cache, np.arange(piece.shape[1]), text_lengths=whole)[0]

    def _steps(self, prompts: list[list[int]], samplings: Sequence[Sampling]) -> Iterator[Step]:
        """Prefill row by row, then decode the rows together until the last one ends."""
        for prompt in prompts:
            self._check(prompt, self.config.max_context - 1)
        batch = len(prompts)
        choosers = [self.choosers.start(sampling, prompt) for sampling, prompt in zip(samplings, prompts, strict=True)]
        limits = [
            min(sampling.max_tokens or self.config.max_context, self.config.max_context - len(prompt))
            for prompt, sampling in zip(prompts, samplings, strict=True)
        ]
        lengths = np.array([len(prompt) for prompt in prompts], np.int32)  # tokens in each row of the cache
        tokens = np.zeros((batch, 1), np.int64)
        with self._lease(batch) as cache:
            logits = np.empty((batch, 1, self.session.vocabulary), np.float32)
            for b, prompt in enumerate(prompts):
                self._prefill(prompt, cache.rows(b, b + 1), logits[b : b + 1])
            alive, made = list(range(batch)), 0
            while alive:
                chosen = {b: choosers[b].choose(logits[b, 0]).token for b in alive}
                made += 1
                reasons = {b: _finish(choosers[b], token, made, limits[b]) for b, token in chosen.items()}
                yield Step(tuple(map(chosen.get, range(batch))), tuple(map(reasons.get, range(batch))))
                alive = [b for b in alive if reasons[b] is None]
                if not alive:
                    return
                # A row that ended, between others that live on, runs as a row of one token: length 0, answer unread.
                lengths[[b for b in range(batch) if b not in alive]] = 0
                tokens[alive, 0] = [chosen[b] for b in alive]
                n = alive[-1] + 1
                self.session.step(tokens[:n], lengths[:n], cache.rows(0, n), out=logits[:n])
                lengths[alive] += 1

    @contextlib.contextmanager
    def _lease(self, rows: int) -> Iterator[Cache]:
        """Take neighbouring free rows of the cache for as long as the `with` block lasts."""
        with self._lock:
            places = range(len(self._taken) - rows + 1)
            start = next((at for at in places if not any(self._taken[at : at + rows])), None)
            if start is None:
                raise UsageError(
                    f"{rows} sequences asked for while {sum(self._taken)} run; this artifact runs {len(self._taken)}",
                    hint="finish or close the others first, or build with a larger engine.max_batch",
                )
            self._taken[start : start + rows] = [True] * rows
        try:
            yield self._cache.rows(start, start + rows)
        finally:
            with self._lock:
                self._taken[start : start + rows] = [False] * rows

    def _prefill(self, prompt: list[int], cache: Cache, out: NDArray[np.float32]) -> None:
        tokens, whole = np.array([prompt], np.int64), np.array([len(prompt)])
        for at in range(0, len(prompt), PREFILL_CHUNK):
            piece, past = tokens[:, at : at + PREFILL_CHUNK], np.array([at], np.int32)
            self.session.step(piece, past, cache, out=out, text_lengths=whole)

    def _check(self, ids: Sequence[int], longest: int) -> None:
        if len(ids) == 0:
            raise UsageError("the prompt is empty", hint="give at least one token")
        if len(ids) > longest:
            raise UsageError(
                f"{len(ids)} tokens; this artifact takes at most {longest} (max_context {self.config.max_context})",
                hint="shorten the prompt, or build with a larger engine.max_context",
            )
        if min(ids) < 0 or max(ids) >= self.config.vocabulary:
            wrong = next(token for token in ids if not 0 <= token < self.config.vocabulary)
            raise UsageError(f"token id {wrong}; the vocabulary has {self.config.vocabulary}")


def load(artifact: Path, threads: int | None = None) -> Runner:
    """Load an artifact; `threads` overrides its own number of threads.

    Raises:
        InputError: the folder is not an artifact, or its files do not belong together.
        VersionMismatch: the artifact was built for another ONNX Runtime.
    """
    engine, folder = artifact / "engine", artifact / "tokenizer"
    config = RuntimeConfig.read(engine / FILE)
    config.check_versions()
    for name in (MODEL_FILE, DATA_FILE):
        if not (engine / name).exists():
            raise InputError(f"{engine / name} is missing")
    session = Session(engine / MODEL_FILE, config.session.resolve(threads))
    if (session.vocabulary, session.caches) != (config.vocabulary, config.caches):
        raise InputError(f"{engine}: {FILE} describes another model than {MODEL_FILE}: vocabulary or caches differ")
    return Runner(session, config, read_tokenizer(folder / "tokenizer.json"), ChatTemplate.read(folder))


def read_tokenizer(path: Path) -> Tokenizer:
    """Read a `tokenizer.json`; truncation and padding, which it may ask for, are switched off.

    Raises:
        InputError: the file is missing or is not a tokenizer.
    """
    if not path.exists():
        raise InputError(f"{path} is missing")
    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:  # the class that tokenizers raises
        raise InputError(f"{path}: not a tokenizer: {error}") from error
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def _finish(chooser: TokenChooser, token: int, made: int, limit: int) -> str | None:
    if chooser.ends(token):
        return "stop"
    return "length" if made == limit else None


def _usage(prompt_tokens: int, start: float, times: list[float]) -> Usage:
    """Sum up an answer whose tokens were chosen at `times`, in seconds of the clock that showed `start`."""
    tpot_ms = (times[-1] - times[0]) / (len(times) - 1) * 1e3 if len(times) > 1 else None
    return Usage(prompt_tokens, len(times), (times[0] - start) * 1e3, tpot_ms)
