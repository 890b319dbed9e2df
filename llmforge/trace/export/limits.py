"""How long a text, and how large a model, a proof of a graph can run."""

from __future__ import annotations

LONGEST = 1536  # tokens: eager attention takes quadratic memory
TAIL = 16  # rows of a long prompt whose logits are compared
WHOLE_BYTES = 2**30  # of fp32 weights: up to here a model runs whole, twice over in memory
