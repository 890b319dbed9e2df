from __future__ import annotations

from llmforge.checkpoint import lengths


def test_lengths_that_a_configuration_names_are_found() -> None:
    settings = {
        "sliding_window": 4096,
        "rope_parameters": {"full": {"original_max_position_embeddings": 2048}},
        "attention_chunk_size": None,
        "local": [7, 0, 8192],
        "max_window_layers": 28,
        "hidden_size": 4000,
    }
    assert list(lengths.named(settings)) == [
        ("sliding_window", 4096),
        ("original_max_position_embeddings", 2048),
        ("local", 7),
        ("local", 8192),
    ]
