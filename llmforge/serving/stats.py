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


# What servers tell their metrics endpoints, by the names that they have there: a description, and the field above.
COUNTERS: Mapping[str, tuple[str, str]] = {
    "llmforge_prompt_tokens_total": ("Tokens of prompts taken up", "prompt_tokens"),
    "llmforge_output_tokens_total": ("Tokens chosen", "output_tokens"),
    "llmforge_prefix_query_tokens_total": ("Prompt tokens looked up in the prefix cache", "prefix_query_tokens"),
    "llmforge_prefix_hit_tokens_total": ("Prompt tokens found in the prefix cache", "prefix_hit_tokens"),
    "llmforge_drafted_tokens_total": ("Tokens that speculation proposed", "drafted_tokens"),
    "llmforge_accepted_tokens_total": ("Proposed tokens that stood", "accepted_tokens"),
}
GAUGES: Mapping[str, tuple[str, str]] = {
    "llmforge_requests_running": ("Requests in generation", "running"),
    "llmforge_requests_waiting": ("Requests that wait for a slot", "waiting"),
    "llmforge_kv_tokens_used": ("Tokens that running requests hold in the KV cache", "kv_tokens_used"),
    "llmforge_kv_tokens_capacity": ("Tokens that the KV cache has room for", "kv_tokens_capacity"),
    "llmforge_prefix_tokens_used": ("Tokens that the prefix cache holds", "prefix_tokens_used"),
    "llmforge_prefix_tokens_capacity": ("Tokens that the prefix cache has room for", "prefix_tokens_capacity"),
}
