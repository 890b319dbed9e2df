"""The serving runtime: no torch, no transformers."""
