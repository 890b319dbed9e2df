"""Models of transformers, with and without weights (llmforge.trace.export.skeleton)."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from llmforge.checkpoint import Checkpoint
from llmforge.trace.export import skeleton


def test_models_can_be_made_in_several_threads(tiny_checkpoint: Path) -> None:
    """While transformers makes one, it replaces functions that tie weights, those of all threads."""
    checkpoint = Checkpoint.open(tiny_checkpoint)
    assert checkpoint.config.tie_word_embeddings

    def make(number: int) -> bool:
        if number % 2:
            return skeleton.on_meta(checkpoint.config, "sdpa").lm_head.weight.is_meta
        model = skeleton.load(checkpoint)
        return model.lm_head.weight is model.get_input_embeddings().weight

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(make, range(16)))
