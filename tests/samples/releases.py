"""Real documents of two builds of the sample checkpoint, and simulated releases that are resampled from them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import numpy as np

from llmforge.metrics.quality import DocumentSums


@cache
def documents(name: str) -> list[DocumentSums]:
    """Sums of each document of a build: "gptq" or "rtn" (tests/data/README.md)."""
    read = json.loads((Path(__file__).parents[1] / "data/releases.json").read_text(encoding="utf-8"))
    # Kept before there were these two: half of the tokens that share the top one, and no change.
    since = ({"shared_top": each["same_top"] / 2, "delta_p": 0.0} for each in read[name])
    return [DocumentSums.model_validate({**each, **more}) for each, more in zip(read[name], since, strict=True)]


def drawn(count: int, size: int, seed: int = 0) -> Iterator[np.ndarray]:
    """Draw the documents of `count` simulated releases: places of `size` documents, with replacement."""
    rng = np.random.default_rng(seed)
    for _ in range(count):
        yield rng.integers(0, len(documents("gptq")), size)
