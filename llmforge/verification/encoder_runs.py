"""Sequences that encoders are compared on, and how a graph runs on them as it is written."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from llmforge.backends import signatures
from llmforge.backends.onnxruntime.encoder import OnnxEncoder
from llmforge.checkpoint import Encoding
from llmforge.ir import interface
from llmforge.runtime.config import SessionConfig
from llmforge.verification import probe

LONGEST = 1536  # tokens: eager attention takes quadratic memory
_SHORT = (1, 2, 3, 5, 8, 17, 33)  # kernels treat few tokens, and ends of vectors, in ways of their own


@dataclass(frozen=True, eq=False)
class EncoderRun:
    """Sequences side by side: ids of each, int64 [length], and which of two texts a token is of."""

    name: str
    sequences: tuple[NDArray[np.int64], ...]
    types: tuple[NDArray[np.int64], ...]


def make_runs(
    vocabulary: int, most: int, borders: Sequence[int], seed: int, without: Sequence[int]
) -> list[EncoderRun]:
    """Draw sequences: many short ones of unequal lengths, at every border ± 1, and one of `most` tokens beside one.

    No id of `without` is drawn: what stands for padding is none in a text.
    """
    random = np.random.default_rng(seed)
    most = min(most, LONGEST)
    usable = np.setdiff1d(np.arange(vocabulary), np.array(without, np.int64))
    near = [border + by for border in borders for by in (-1, 0, 1)]
    short = sorted({length for length in (*_SHORT, *near) if 1 <= length <= most})

    def run(name: str, lengths: Sequence[int]) -> EncoderRun:
        ids = tuple(random.choice(usable, length).astype(np.int64) for length in lengths)
        kinds = tuple((np.arange(length) >= length // 2).astype(np.int64) for length in lengths)
        return EncoderRun(name, ids, kinds)

    return [run("short sequences", [*short, *short[:3]]), run("the longest sequence", [most, min(most, 7)])]


def open_graph(model: ir.Model, encoding: Encoding, threads: int, weights: probe.InitializerArrays) -> OnnxEncoder:
    """Load `model`, which stays as it is, for checks: it runs as written, sequences side by side."""
    limit = interface_limit(model)
    config = replace(
        signatures.encoder(model, encoding, limit), max_tokens=limit
    )  # also what texts are cut to is proven
    written = probe.executable(model)
    arrays = {name: weights.array(tensor) for name, tensor in probe.strip(written).items()}
    serialized = ir.serde.serialize_model(written).SerializeToString()
    session = SessionConfig(threads=threads, optimize=False, entries=probe.QUIET)
    return OnnxEncoder(serialized, session, config, initializers=arrays, own_kernels=True)


def interface_limit(model: ir.Model) -> int:
    """Return how many tokens a sequence of `model` may have."""
    limit = interface.recorded_limit(model)
    return LONGEST if limit is None else limit.tokens


def deviation(expected: NDArray[np.float32], made: NDArray[np.float32]) -> float:
    """Return the largest difference in root mean squares of what is expected; infinite where one is not finite."""
    if expected.shape != made.shape or not np.isfinite(made).all():
        return float("inf")
    scale = float(np.sqrt(np.mean(np.square(expected, dtype=np.float64))))
    return float(np.abs(expected - made).max()) / max(scale, 1e-30)
