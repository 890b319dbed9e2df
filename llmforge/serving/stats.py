"""Figures of an engine."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class EngineStats:
    """Figures of an engine: what it does now, and totals since it started.

    `decode_s` and `decode_tokens` are the time of decode steps and the tokens they gave; `verify_s` and
    `verified_tokens` those of runs that verified drafts, drafting included.
    """

    running: int
    waiting: int
    slots: int
    kv_tokens_used: int  # that running sequences hold in their slots
    kv_tokens_capacity: int
    prefix_tokens_used: int  # that the prefix cache holds
    prefix_tokens_capacity: int
    prompt_tokens: int = 0  # of requests whose prompt was taken up
    prefill_tokens: int = 0  # of them, those that ran through the model
    output_tokens: int = 0
    prefix_query_tokens: int = 0  # of prompts that were looked up
    prefix_hit_tokens: int = 0
    drafted_tokens: int = 0
    accepted_tokens: int = 0
    preemptions: int = 0  # sequences that gave their blocks to older ones, and were read again later
    decode_s: float
    decode_tokens: int = 0
    verify_s: float
    verified_tokens: int = 0
    steps: Mapping[int, int]  # decode steps by the rows that ran
    finished: Mapping[str, int]  # sequences by finish reason; "error" for those that failed
    notes: tuple[str, ...]  # what was asked for and is off, and why

    @property
    def speculation_gain(self) -> float | None:
        """How many times faster a token came from verified drafts than from decode steps; None: one has no tokens."""
        if not (self.decode_tokens and self.verified_tokens and self.verify_s):
            return None
        return (self.decode_s / self.decode_tokens) / (self.verify_s / self.verified_tokens)
