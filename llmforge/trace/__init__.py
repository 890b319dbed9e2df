"""Checkpoint to canonical graph, with no weights in memory."""
