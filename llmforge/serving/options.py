"""Options of an engine, which its scheduler reads too."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from llmforge.base.errors import UsageError
from llmforge.runtime.prefill_shapes import PREFILL_CHUNK


@dataclass(frozen=True)
class EngineOptions:
    """How an engine serves.

    `max_queue` requests wait while all slots are taken; one more is refused. `step_tokens` is the token budget of one
    step: every decoding sequence gets its token first, the rest is for prefill; less of it makes tokens come more
    evenly, and prefill slower. `prefix_cache_bytes` bounds the prefix cache (0: there is none). `speculation`
    "prompt-lookup" drafts tokens from the text itself, "draft-model" by a second artifact; drafts are verified where
    that was measured to be faster, and outputs stay what they are but for ties within the rounding of a kernel.
    `timeout_s` is the default deadline of a request of their own.
    """

    max_queue: int = 128
    step_tokens: int = PREFILL_CHUNK
    prefix_cache_bytes: int = 512 << 20
    speculation: Literal["off", "prompt-lookup", "draft-model"] = "off"
    timeout_s: float | None = None

    def __post_init__(self) -> None:
        if self.max_queue < 0:
            raise UsageError(f"max_queue {self.max_queue}: expected 0 or more")
        if self.step_tokens < 1:
            raise UsageError(f"step_tokens {self.step_tokens}: expected 1 or more")
        if self.prefix_cache_bytes < 0:
            raise UsageError(f"prefix_cache_bytes {self.prefix_cache_bytes}: expected 0 (disabled) or more")
        if self.speculation not in ("off", "prompt-lookup", "draft-model"):
            raise UsageError(f"speculation {self.speculation!r}: expected off, prompt-lookup or draft-model")
        if self.timeout_s is not None and not self.timeout_s > 0:
            raise UsageError(f"timeout_s {self.timeout_s}: expected more than 0")
