"""Requests to a model that embeds or scores: their tensors and parameters read, and their outputs made. No server here.

A request fails alone: those that run with it do not.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from llmforge.base.errors import UsageError
from llmforge.runtime.encoder import EncoderConfig
from llmforge.serving.encoder_runner import EncoderInput, EncoderRunner, relevance
from llmforge.serving.protocol.client_json import LEAST_BYTES, LEAST_VALUES, JsonLimits, parse
from llmforge.triton.backend import encoder_signature as signature

Outputs = dict[str, NDArray[Any]]


@dataclass(frozen=True)
class EncoderRequest:
    """What a request asks to run, and what makes its outputs of fp32 [inputs, dimensions or labels]."""

    inputs: Sequence[EncoderInput]
    outputs: Callable[[NDArray[np.float32]], Outputs]


def read(tensors: Mapping[str, NDArray[Any]], parameters: str, runner: EncoderRunner) -> EncoderRequest:
    """Read a request: its tensors, [rows, n] each, and its parameters, a JSON object.

    Raises:
        UsageError: it makes no sense; says what, and what is allowed.
    """
    given = _parameters(parameters, runner.config)
    return (_embedding if runner.config.kind == "embedder" else _scoring)(tensors, given, runner)


def _embedding(tensors: Mapping[str, NDArray[Any]], given: Mapping[str, Any], runner: EncoderRunner) -> EncoderRequest:
    text, ids = (tensors.get(spec.name) for spec in (signature.TEXT, signature.INPUT_IDS))
    if (text is None) == (ids is None):
        raise UsageError("expected either text or input_ids")
    dimensions, name = runner.check_dimensions(given.get("dimensions")), given.get("prompt_name")
    if text is not None:
        texts = [_text(row[0], f"text {at}") for at, row in enumerate(text)]
        inputs = runner.texts(texts, name, truncate=given.get("truncate", False))
    else:
        assert ids is not None
        if name is not None:
            raise UsageError("prompt_name: token ids are read as they are", hint="send text, or leave prompt_name out")
        inputs = [runner.tokens(_unpadded(row), f"input_ids {at}") for at, row in enumerate(ids)]
    return EncoderRequest(inputs, lambda made: {signature.EMBEDDING.name: runner.shorten(made, dimensions)})


def _scoring(tensors: Mapping[str, NDArray[Any]], given: Mapping[str, Any], runner: EncoderRunner) -> EncoderRequest:
    queries, texts = (tensors[spec.name] for spec in (signature.QUERY, signature.TEXTS))
    pairs = [
        (_text(query, f"query {row}"), _text(text, f"text {at} of query {row}"))
        for row, ([query], own) in enumerate(zip(queries, texts, strict=True))
        for at, text in enumerate(own)
    ]
    if not pairs:
        raise UsageError("no texts")

    def outputs(made: NDArray[np.float32]) -> Outputs:
        logits = made[:, 0].reshape(texts.shape)
        return {signature.SCORES.name: relevance(logits), signature.LOGITS.name: logits}

    return EncoderRequest(runner.pairs(pairs, truncate=given.get("truncate", True)), outputs)


def _parameters(text: str, config: EncoderConfig) -> dict[str, Any]:
    """Read the parameters of a request, each of its type."""
    known = signature.of(config).parameters
    given = parse(text.encode(), _LIMITS, "the parameters") if text else {}
    if not isinstance(given, dict):
        raise UsageError("parameters: expected a JSON object")
    if unknown := sorted(given.keys() - known.keys()):
        raise UsageError(f"unknown parameter {unknown[0]}", hint=f"known: {', '.join(known)}")
    for name, value in given.items():
        if type(value) is not known[name]:
            raise UsageError(f"{name}: expected {_NAMES[known[name]]}")
    return given


_LIMITS = JsonLimits(LEAST_BYTES, LEAST_VALUES)
_NAMES = {str: "a string", int: "a whole number", bool: "true or false"}


def _text(value: Any, what: str) -> str:
    try:
        return value.decode() if isinstance(value, bytes) else str(value)
    except UnicodeDecodeError:
        raise UsageError(f"{what}: not UTF-8") from None


def _unpadded(row: NDArray[np.int64]) -> list[int]:
    """Take the ids of a row before its padding."""
    ids: list[int] = row[: np.flatnonzero(row >= 0).max(initial=-1) + 1].tolist()
    return ids
