"""Figures of an engine."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class EngineStats:
    """Figures of an engine: what it does now, and totals since it started.

    `decode_s` and `decode_tokens` are the time of decode steps and the tokens they gave; `judge_s` and `judge_tokens`
    those of runs that judged guesses, guessing included.
    """

    running: int
    waiting: int
    slots: int
    kv_tokens_used: int  # that running answers hold in their slots
    kv_tokens_capacity: int
    prefix_tokens_used: int  # that the prefix cache holds
    prefix_tokens_capacity: int
    prompt_tokens: int  # of requests whose prompt was taken up
    prefill_tokens: int  # of them, those that ran through the model
    output_tokens: int
    prefix_query_tokens: int  # of prompts that were looked up
    prefix_hit_tokens: int
    drafted_tokens: int
    accepted_tokens: int
    decode_s: float
    decode_tokens: int
    judge_s: float
    judge_tokens: int
    steps: Mapping[int, int]  # decode steps by the rows that ran
    finished: Mapping[str, int]  # answers by finish reason; "error" for those that failed
    notes: tuple[str, ...]  # what was asked for and is off, and why

    @property
    def speculation_gain(self) -> float | None:
        """How many times faster a token came from judged guesses than from decode steps; None: one has no tokens."""
        if not (self.decode_tokens and self.judge_tokens and self.judge_s):
            return None
        return (self.decode_s / self.decode_tokens) / (self.judge_s / self.judge_tokens)
