"""Continuous batching: requests join and leave a running batch between steps. No threads, no clock of its own.

A slot is one row of the preallocated cache; a sequence keeps it from its first token to its last. One step

1. ends what was cancelled or is past its deadline, and gives free slots to those that wait longest;
2. decodes: one token for every slot whose prompt is read, in one run over the rows `0 … n - 1` of the cache (`decode`).
   Sequences with a draft of their next tokens (`llmforge.serving.speculation`) run alone instead, and may get several;
3. prefills prompts, oldest first, in chunks, after what the prefix cache has of them (`prefill`). Where the decoder
   reads several at once (`Backend.prompt_shapes`), chunks of neighbouring slots are rows of one step, padded to one of
   its shapes (`prompt_batching`).

A cache of blocks has no slots, and is run in another way: see `paged`.

**One step ahead.** Where a device guesses the tokens of a decode step, the next one begins on them before the host has
chosen them, while nothing else is to be done (`run_ahead`). The host's choice is what counts: a row that was guessed
wrong has run for nothing, and runs again, at the same place, in the next step. So guesses change no token.

**Neither starves the other.** Every step gives every decoding slot a token, and reads at least one chunk of the oldest
unread prompt; more chunks only as long as the step stays within `step_tokens`. So a step runs at most `step_tokens`
tokens besides those that decode, which bounds the time between two tokens of a sequence; and once its turn has come, a
prompt of `L` tokens is read within `ceil(L / chunk)` steps, whatever decodes meanwhile.

**Nobody's tokens depend on neighbours.** Chunks end at multiples of `chunk` tokens counted from the start of the text,
wherever they begin and whatever else the step runs; each row takes the adapter of its own sequence, which has random
numbers of its own. What is left are kernels whose sums differ in the last bits with the shape of a step: those for few
tokens and those for many, and, where the decoder pads steps, those for one row and for several. What is read after a
cached prefix has many tokens where it would have many without (`Slots.reusable_tokens`).
"""

from llmforge.serving.scheduler.base import Scheduler
from llmforge.serving.scheduler.paged import PagedScheduler, scheduler_of
from llmforge.serving.scheduler.slot_scheduler import SlotScheduler

__all__ = ["PagedScheduler", "Scheduler", "SlotScheduler", "scheduler_of"]
