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
    read = json.loads((Path(__file__).parent / "data/releases.json").read_text(encoding="utf-8"))
    return [DocumentSums.model_validate(each) for each in read[name]]


def drawn(count: int, size: int, seed: int = 0) -> Iterator[np.ndarray]:
    """Draw the documents of `count` simulated releases: places of `size` documents, with replacement."""
    rng = np.random.default_rng(seed)
    for _ in range(count):
        yield rng.integers(0, len(documents("gptq")), size)
