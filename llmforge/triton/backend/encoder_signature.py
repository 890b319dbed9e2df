"""The tensors of a model that embeds or scores; stated once for config and code.

A row of an embedder is a text, or token ids; one of a reranker is a query with texts. Rows of requests that wait run
together. What else a request may say are its parameters (`PARAMETERS`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from llmforge.runtime.encoder import EncoderConfig
from llmforge.triton.backend.signature import TensorSpec

MOST_ROWS = 512  # of a request, and of those that run together

TEXT = TensorSpec("text", "TYPE_STRING")
INPUT_IDS = TensorSpec("input_ids", "TYPE_INT64", -1)  # special tokens included; negative ones at the end are padding
QUERY = TensorSpec("query", "TYPE_STRING")
TEXTS = TensorSpec("texts", "TYPE_STRING", -1)
EMBEDDING = TensorSpec("embedding", "TYPE_FP32", -1)
SCORES = TensorSpec("scores", "TYPE_FP64", -1)  # the logistic function of the logits: 0 to 1
LOGITS = TensorSpec("logits", "TYPE_FP32", -1)


@dataclass(frozen=True)
class EncoderSignature:
    """Inputs and outputs of a kind of model, which of the inputs a request may leave out, and its parameters."""

    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    optional: bool
    parameters: Mapping[str, type]


_SIGNATURES = {
    "embedder": EncoderSignature(
        (TEXT, INPUT_IDS), (EMBEDDING,), True, {"prompt_name": str, "dimensions": int, "truncate": bool}
    ),
    "reranker": EncoderSignature((QUERY, TEXTS), (SCORES, LOGITS), False, {"truncate": bool}),
}


def of(config: EncoderConfig) -> EncoderSignature:
    """Give the tensors of the model that `config` describes."""
    return _SIGNATURES[config.kind]
