"""The scheduler of a cache whose rows are slots."""

from __future__ import annotations

from typing import Any

from llmforge.runtime.interface import C, Decoder
from llmforge.runtime.sampling.sampler import Samplers
from llmforge.serving.interface import EngineOptions
from llmforge.serving.prefix_cache import PrefixCache
from llmforge.serving.scheduler.base import Scheduler
from llmforge.serving.scheduler.decode import SlotDecode
from llmforge.serving.scheduler.prefill import SlotPrefill
from llmforge.serving.scheduler.slots import Slots
from llmforge.serving.sequence import Sequence
from llmforge.serving.speculation import Speculation


class SlotScheduler(Scheduler[C]):
    """Runs sequences in the slots of one cache; `speculation` drafts tokens, the other arguments are `Scheduler`'s.

    A decoder whose tokens cannot be used again or taken back (`no_reuse_reason`) goes without prefix cache and
    speculation, and `EngineStats.notes` says so.

    Raises:
        UsageError: `prefix_cache_bytes` has no room for one block.
    """

    def __init__(
        self,
        backend: Decoder[C],
        cache: C,
        samplers: Samplers,
        options: EngineOptions,
        *,
        speculation: Speculation | None = None,
        **others: Any,
    ) -> None:
        super().__init__(backend, cache, samplers, options, **others)
        reason = backend.signature.no_reuse_reason
        asked = {"prefix cache": options.prefix_cache_bytes, "speculation": speculation}
        self._notes += tuple(f"no {name}: {reason}" for name, value in asked.items() if value and reason)
        self._speculation = None if reason else speculation
        self._slots = Slots(backend, cache, self._chunk, 0 if reason else options.prefix_cache_bytes)
        self._notes += self._slots.notes
        parts = backend, self._slots, self._ahead, self._delivery, self._figures
        self._decode = SlotDecode(*parts, self._speculation)
        self._prefill = SlotPrefill(*parts, self.sequences, self._chunk, self._step_tokens, self._speculation)

    @property
    def prefix_cache(self) -> PrefixCache[C] | None:
        """What prompts may begin with; None: there is none."""
        return self._slots.prefix_cache

    def _run(self) -> int:
        self._slots.admit(self.waiting, self._clock())
        self._slots.compact_slots(written=self._ahead.step is not None)
        decoded = self._decode.run()
        if self._delivery.undelivered and not self._decode.is_next:
            self._delivery.hand_over_all()
        return self._prefill.run(decoded) + decoded

    def _occupancy(self) -> dict[str, int]:
        return self._slots.occupancy()

    def _release(self, sequence: Sequence) -> None:
        if self._speculation is not None:
            self._speculation.forget(sequence)
        if sequence.slot is None:
            self.waiting.remove(sequence)
        else:
            self._slots.taken[sequence.slot] = None

    def _forget(self, sequence: Sequence) -> None:
        self._slots.forget(sequence)
