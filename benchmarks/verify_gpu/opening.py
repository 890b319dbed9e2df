"""Opens engines that were built, and takes steps; nothing here needs torch, or what reads a checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

from benchmarks.verify_gpu.scale import Scale
from llmforge.backends import loading
from llmforge.backends.onnxruntime.cuda.session import DeviceSession
from llmforge.base.errors import VerificationError
from llmforge.runtime.config import FILE, MODEL_FILE, RuntimeConfig
from llmforge.runtime.interface import StepInputs
from llmforge.serving import Runner
from tests.fakes.host_device import HostDevice

PIECES = [20, 1, 1, 9, 1, 1]  # a prompt, tokens one by one, several behind a past


def open_engine(folder: Path, scale: Scale) -> Any:
    """Open an engine with what runs it; in a dry run, the session that drives a GPU, over the host's memory."""
    config = RuntimeConfig.read(folder / "engine" / FILE)
    if not scale.dry or config.ranks > 1:  # ranks of a dry run are processes on the CPU
        return loading.open_engine(folder / "engine", config)
    model = folder / "engine" / MODEL_FILE
    return DeviceSession(model, config.session.resolve(), HostDevice(), buckets=(config.max_batch,))


def open_runner(folder: Path, scale: Scale) -> Runner:
    """Open an engine with its tokenizer, so that a scheduler runs it."""
    config = RuntimeConfig.read(folder / "engine" / FILE)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer" / "tokenizer.json"))
    return Runner(open_engine(folder, scale), config, tokenizer, None)


def text(vocabulary: int) -> NDArray[np.int64]:
    """Draw the tokens of a text that is run in `PIECES`, int64 [1, S]."""
    return np.random.default_rng(0).integers(3, vocabulary, (1, sum(PIECES)))


def all_logits(backend: Any, ids: NDArray[np.int64], capacity: int, pieces: list[int] = PIECES) -> NDArray[np.float32]:
    """Run one row in `pieces`, and give the logits after every token, fp32 [S, V]."""
    cache, at, found = backend.allocate(1, capacity), 0, []
    for count in pieces:
        piece, past = ids[:, at : at + count], np.array([at], np.int32)
        whole = np.array([ids.shape[1]])
        found.append(backend.step(StepInputs(piece, past, np.arange(count), text_lengths=whole), cache.rows(0, 1))[0])
        at += count
    return np.concatenate(found)


def compared(got: NDArray[np.float32], expected: NDArray[np.float32], tolerance: float) -> dict[str, Any]:
    """Hold logits [S, V] against those of the CPU.

    Raises:
        VerificationError: one differs by more than `tolerance`.
    """
    worst = float(np.abs(got - expected).max())
    result = {
        "largest_difference": worst,
        "spread": float(expected.std()),
        "kld_mean": _divergence(expected, got),
        "same_first_choice": float((got.argmax(-1) == expected.argmax(-1)).mean()),
    }
    if not worst <= tolerance:  # also where it is NaN
        raise VerificationError(f"logits differ by up to {worst:.3g}, and {tolerance:g} is allowed: {result}")
    return result


def _divergence(wanted: NDArray[np.float32], got: NDArray[np.float32]) -> float:
    """Mean KL divergence of softmax(got) from softmax(wanted), in nats a token."""
    p, q = (x.astype(np.float64) - x.max(-1, keepdims=True) for x in (wanted, got))
    p, q = (x - np.log(np.exp(x).sum(-1, keepdims=True)) for x in (p, q))
    return float((np.exp(p) * (p - q)).sum(-1).mean())
