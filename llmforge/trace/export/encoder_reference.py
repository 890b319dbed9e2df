"""What transformers gives for sequences: what a traced encoder has to compute.

Pooling, Dense layers and normalization are computed here anew, by their definition.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from llmforge.base.errors import UnsupportedError
from llmforge.checkpoint import Checkpoint, Encoding
from llmforge.trace.export import reference, skeleton
from llmforge.trace.export.encoder import ACTIVATIONS
from llmforge.trace.hooks import internals


class EncoderReference:
    """The whole model of a checkpoint in transformers, eager and in fp32.

    Raises:
        UnsupportedError: transformers cannot load it.
    """

    def __init__(self, checkpoint: Checkpoint, encoding: Encoding) -> None:
        with internals.third_party("loading the model"):
            self._model = skeleton.load(checkpoint, reference.EAGER)
        self._encoding = encoding
        loaded: Any = self._model
        # Where its weights are stored as codes, the model is the classifier that it is traced as.
        self._predicts = encoding.answers is not None and loaded.get_output_embeddings() is not None
        self.padding: int | None = getattr(checkpoint.config.get_text_config(), "pad_token_id", None)

    def run(
        self, sequences: Sequence[NDArray[np.int64]], types: Sequence[NDArray[np.int64]] | None
    ) -> NDArray[np.float32]:
        """Run a batch, padded on the right: embeddings [sequences, dimensions], or logits [sequences, labels].

        `types` say of each token which of two texts it is of; None: the model does not read it.

        Raises:
            UnsupportedError: transformers cannot run the model.
        """
        longest = max(map(len, sequences))
        ids, kinds, mask = (np.full((len(sequences), longest), fill, np.int64) for fill in (self.padding or 0, 0, 0))
        for row, own in enumerate(sequences):
            ids[row, : len(own)], mask[row, : len(own)] = own, 1
            if types is not None:
                kinds[row, : len(own)] = types[row]
        given: dict[str, Any] = {"input_ids": torch.from_numpy(ids), "attention_mask": torch.from_numpy(mask)}
        if types is not None:
            given["token_type_ids"] = torch.from_numpy(kinds)
        if "use_cache" in inspect.signature(self._model.forward).parameters:
            given["use_cache"] = False
        if self._predicts:
            given["logits_to_keep"] = torch.tensor([len(own) - 1 for own in sequences])
        with internals.third_party("running the model"), torch.inference_mode():
            output = self._model(**given)
            if self._encoding.kind == "reranker":
                return np.asarray(self._scores(output.logits), np.float32)
            hidden = output.last_hidden_state
            return np.stack([self._embed(hidden[row, : len(own)]) for row, own in enumerate(sequences)])

    def _scores(self, logits: torch.Tensor) -> torch.Tensor:
        """Take [sequences, labels], or of a causal model, [sequences, sequences, V] behind each one's last token."""
        if not self._predicts:
            return logits
        answers = self._encoding.answers
        assert answers is not None
        last = logits.diagonal(dim1=0, dim2=1).T  # [sequences, V]
        return last[:, answers.yes : answers.yes + 1] - last[:, answers.no : answers.no + 1]

    def _embed(self, hidden: torch.Tensor) -> NDArray[np.float32]:
        """Pool the hidden states [length, H] of a sequence, and compute what stands behind that."""
        x = torch.cat([_pooled(hidden, mode) for mode in self._encoding.pooling.split("+")])
        for layer in self._encoding.dense:
            module: Any = self._model.get_submodule(layer.folder)
            x = ACTIVATIONS[layer.activation](module["linear"](x))
        normalized = torch.nn.functional.normalize(x, dim=-1) if self._encoding.normalize else x
        return np.asarray(normalized, np.float32)


def _pooled(hidden: torch.Tensor, mode: str) -> torch.Tensor:
    """Make one row of the tokens [length, H] of a sequence, as sentence-transformers defines `mode`."""
    exact, count = hidden.double(), len(hidden)
    match mode:
        case "cls":
            return hidden[0]
        case "last":
            return hidden[-1]
        case "max":
            return hidden.amax(0)
        case "mean":
            return exact.mean(0).float()
        case "mean_sqrt_len":
            return (exact.sum(0) / math.sqrt(count)).float()
        case "weightedmean":
            weights = torch.arange(1, count + 1, dtype=torch.float64)[:, None]
            weighted: torch.Tensor = (exact * weights).sum(0) / weights.sum()
            return weighted.float()
    raise UnsupportedError(f"pooling {mode!r} is unknown")
