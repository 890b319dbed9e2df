"""Metrics of servers by the names that Prometheus has, over HTTP and in Triton alike."""

from __future__ import annotations

from collections.abc import Mapping

from llmforge.base.errors import ForgeError, Unavailable

# Name -> a description, and the field of `EngineStats`.
COUNTERS: Mapping[str, tuple[str, str]] = {
    "llmforge_prompt_tokens_total": ("Tokens of prompts taken up", "prompt_tokens"),
    "llmforge_output_tokens_total": ("Tokens chosen", "output_tokens"),
    "llmforge_prefix_query_tokens_total": ("Prompt tokens looked up in the prefix cache", "prefix_query_tokens"),
    "llmforge_prefix_hit_tokens_total": ("Prompt tokens found in the prefix cache", "prefix_hit_tokens"),
    "llmforge_response_cache_hits_total": ("Requests answered from the response cache", "response_cache_hits"),
    "llmforge_response_cache_misses_total": (
        "Greedy requests that the response cache had no answer to",
        "response_cache_misses",
    ),
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

ANSWERS = "llmforge_answers", "Answers that ended, by reason"  # a counter: Prometheus has it as …_total
SEQUENCES = "llmforge_sequences", "Texts or pairs that ran"  # of an encoder; a counter, too
ARTIFACT = (  # of Triton's models: always 1; its labels tell
    "llmforge_artifact_info",
    "The artifact that is served; its verdict is not verified: only llmforge recomputes it",
)
TTFT = "llmforge_time_to_first_token_seconds", "From the arrival of a request to its first token"
ITL = "llmforge_inter_token_latency_seconds", "Between two tokens of an answer"
REFUSED, INVALID = "refused", "invalid"  # reasons of answers that never began: there is no room; it makes no sense


def refusal(error: ForgeError) -> str:
    """Give the reason, for `ANSWERS`, of a request that was not taken on."""
    return REFUSED if isinstance(error, Unavailable) else INVALID
