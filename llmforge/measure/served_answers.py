"""Greedy answers of a server to the beginnings of documents, and when each piece of them arrived. One at a time."""

from __future__ import annotations

import http.client
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from tokenizers import Tokenizer

from llmforge.base.errors import EnvironmentLacks
from llmforge.checkpoint.text import TokenWindow
from llmforge.measure.completions import Completions
from llmforge.metrics.quality import PROMPT_TOKENS
from llmforge.metrics.serving import RequestOutcome


@dataclass(frozen=True)
class Prompt:
    """What is to be gone on from."""

    document: str
    ids: list[int]


def prompts(windows: Sequence[TokenWindow], count: int) -> list[Prompt]:
    """Take the beginnings of `count` documents: of a chat what comes before its first answer, else a few tokens."""
    found: dict[str, Prompt] = {}
    for window in windows:
        if window.document in found or len(found) == count:
            continue
        end = min(PROMPT_TOKENS, len(window.ids))
        if window.answers is not None:
            end = int(window.answers.argmax()) if window.answers.any() else len(window.ids)
        if end:
            found[window.document] = Prompt(window.document, window.ids[:end].tolist())
    return list(found.values())


@dataclass(frozen=True)
class Streamed:
    """An answer, and when its pieces came."""

    text: str
    outcome: RequestOutcome


def ask(
    completions: Completions,
    asked: Sequence[Prompt],
    tokens: int,
    tokenizer: Tokenizer,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> list[Streamed]:
    """Let a server go on from each prompt by at most `tokens`, as a stream.

    Prompts are token ids; text, where the server refuses the first as ids. What it refuses or breaks off is an outcome
    with an error.

    Raises:
        EnvironmentLacks: there is no answer to the first, or access is denied.
    """
    found: list[Streamed] = []
    as_text = False
    for number, each in enumerate(asked):
        progress(number, len(asked))
        made = _stream(completions, _prompt(each, tokenizer, as_text), len(each.ids), tokens)
        if not found and made.outcome.error is not None:
            as_text = True
            made = _stream(completions, _prompt(each, tokenizer, as_text), len(each.ids), tokens)
        if not found and made.outcome.error is not None and made.outcome.error.startswith("ConnectionRefusedError"):
            raise EnvironmentLacks(f"{completions.http.url}: no answer", hint="is the server running?")
        found.append(made)
    progress(len(asked), len(asked))
    return found


def _prompt(prompt: Prompt, tokenizer: Tokenizer, as_text: bool) -> Any:
    return tokenizer.decode(prompt.ids, skip_special_tokens=False) if as_text else prompt.ids


def _stream(completions: Completions, prompt: Any, length: int, tokens: int) -> Streamed:
    sent, pieces, arrivals, usage, error = time.perf_counter(), list[str](), list[float](), dict[str, Any](), None
    try:
        for event in completions.events({"prompt": prompt, "max_tokens": tokens}):
            if "error" in event:
                error = completions.http.message(event)
            elif said := "".join(str(choice.get("text") or "") for choice in event.get("choices", ())):
                arrivals.append(time.perf_counter())
                pieces.append(said)
            usage = event.get("usage") or usage
    except (OSError, http.client.HTTPException, ValueError) as problem:
        error = f"{type(problem).__name__}: {problem}"
    outcome = RequestOutcome(
        sent_s=sent,
        token_s=tuple(arrivals),
        ended_s=time.perf_counter(),
        prompt_tokens=usage.get("prompt_tokens", length),
        output_tokens=usage.get("completion_tokens", len(arrivals)),
        error=error,
    )
    return Streamed("".join(pieces), outcome)
