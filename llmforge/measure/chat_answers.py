"""What a checkpoint itself answers to prompts: greedy, by transformers, many prompts at a time."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence

from llmforge.checkpoint import Checkpoint
from llmforge.measure import baseline
from llmforge.measure.baseline import Baseline
from llmforge.metrics import units

MOST_TOKENS = 48  # of an answer: what is said first is what a chat is like
MOST_BYTES = 8 << 30  # of fp32 weights: two billion parameters answer a hundred prompts in some ten minutes of CPU time
BATCH = 64  # prompts that are answered at once


def why_not(checkpoint: Checkpoint) -> str | None:
    """Say why a checkpoint is not asked; None: it is."""
    size_bytes = 4 * checkpoint.parameters
    if size_bytes > MOST_BYTES:
        return (
            f"its weights in fp32 take {units.size(size_bytes)}, and a model of more than {units.size(MOST_BYTES)} "
            "would take too long to answer"
        )
    return baseline.why_not_whole(checkpoint)


def answer(
    checkpoint: Checkpoint,
    prompts: Mapping[str, Sequence[int]],
    ends: Collection[int],
    *,
    threads: int,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> dict[str, list[int]]:
    """Answer `prompts`, ids by name: at most `MOST_TOKENS` greedy tokens each, the one of `ends` that ends it included.

    Prompts of about the same length are answered together. `progress` is told how many are done.
    """
    model = Baseline(checkpoint, threads=threads)
    names = sorted(prompts, key=lambda name: (len(prompts[name]), name))
    found: dict[str, list[int]] = {}
    for at in range(0, len(names), BATCH):
        progress(at, len(names))
        batch = names[at : at + BATCH]
        said = model.answers([prompts[name] for name in batch], [MOST_TOKENS] * len(batch), ends)
        found |= dict(zip(batch, said, strict=True))
    progress(len(names), len(names))
    return found
