"""An encoder's checkpoint as transformers runs it: what an artifact's embeddings and scores are held against."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from llmforge.base.errors import CheckpointError, UnsupportedError
from llmforge.checkpoint import Checkpoint, Dense
from llmforge.runtime.encoder import EncoderConfig

POOLINGS = ("cls", "max", "mean", "mean_sqrt_len", "weightedmean", "last")
_ACTIVATIONS = {
    "identity": "Identity",
    "tanh": "Tanh",
    "relu": "ReLU",
    "gelu": "GELU",
    "silu": "SiLU",
    "sigmoid": "Sigmoid",
}


class CheckpointEncoder:
    """A checkpoint in transformers, in fp32 arithmetic on its stored weights, pooled as `config` says, and its Dense.

    Sequences are padded on the right and masked. Local files only, no remote code, no pickle.
    """

    def __init__(self, checkpoint: Checkpoint, config: EncoderConfig, *, threads: int) -> None:
        """Load the weights; every later call computes on `threads` threads.

        Raises:
            CheckpointError: transformers cannot load the checkpoint, or misses weights.
            UnsupportedError: embeddings are pooled in a way that is not one of `POOLINGS`.
        """
        import torch
        import transformers

        from llmforge.trace.hooks import internals

        folder = checkpoint.path
        if config.kind == "embedder" and set(config.pooling.split("+")) - set(POOLINGS):
            raise UnsupportedError(f"{folder}: pooling {config.pooling!r}; known: {', '.join(POOLINGS)}")
        self.config, self._threads = config, threads
        encoding = checkpoint.encoding
        self._answers = None if encoding is None else encoding.answers
        began = time.perf_counter()
        kind = "AutoModel" if config.kind == "embedder" else "AutoModelForSequenceClassification"
        kind = kind if self._answers is None else "AutoModelForCausalLM"
        given: dict[str, Any] = {"local_files_only": True, "trust_remote_code": False, "use_safetensors": True}
        try:
            # A table of what is missing is no news of a pooler, and an error below of all else.
            with internals.quiet("transformers", logging.ERROR), internals.no_progress_bars():
                loaded, found = getattr(transformers, kind).from_pretrained(
                    folder, dtype=torch.float32, output_loading_info=True, **given
                )
        except (OSError, ValueError, KeyError) as error:
            raise CheckpointError(f"{folder}: transformers cannot load it: {error}") from error
        # The pooler behind [CLS], which checkpoints of sentence-transformers leave out, is in no embedding.
        missing = [name for name in found["missing_keys"] if not name.startswith("pooler.")]
        if missing:
            raise CheckpointError(f"{folder}: weights are missing: {', '.join(sorted(missing)[:3])}")
        self._model: Any = loaded.eval()
        self._dense = [] if encoding is None else [_layer(folder, each) for each in encoding.dense]
        self.load_seconds = time.perf_counter() - began
        self.description = (
            f"transformers {transformers.__version__}, torch {torch.__version__}, fp32 arithmetic on the stored "
            f"weights, threads: {threads}"
        )

    def encode(
        self, sequences: Sequence[NDArray[np.int64]], token_types: Sequence[NDArray[np.int64]] | None = None
    ) -> NDArray[np.float32]:
        """Give embeddings [sequences, dimensions], or logits [sequences, labels]."""
        import torch

        from llmforge.trace.hooks import internals

        shape = (len(sequences), max(map(len, sequences)))
        ids, types, mask = (torch.zeros(shape, dtype=torch.int64) for _ in range(3))
        for row, sequence in enumerate(sequences):
            ids[row, : len(sequence)] = torch.from_numpy(np.array(sequence, np.int64))
            mask[row, : len(sequence)] = 1
            if token_types is not None:
                types[row, : len(sequence)] = torch.from_numpy(np.array(token_types[row], np.int64))
        inputs = {"input_ids": ids, "attention_mask": mask}
        if token_types is not None:
            inputs["token_type_ids"] = types
        with torch.inference_mode(), internals.torch_threads(self._threads):
            if self._answers is not None:
                logits = self._model(**inputs, logits_to_keep=mask.sum(1) - 1).logits.diagonal(dim1=0, dim2=1)
                made = (logits[self._answers.yes] - logits[self._answers.no])[:, None]
                return np.asarray(made.float(), np.float32)
            output = self._model(**inputs)
            made = output.logits if self.config.kind == "reranker" else self._pooled(output.last_hidden_state, mask)
        result: NDArray[np.float32] = made.float().numpy()
        return result

    def _pooled(self, states: Any, mask: Any) -> Any:
        """Pool states [B, S, D] of tokens that `mask` [B, S] has, at length 1 where the model says so."""
        import torch

        pooled = torch.cat([_pool(states, mask, mode) for mode in self.config.pooling.split("+")], dim=1)
        for layer in self._dense:
            pooled = layer(pooled)
        return torch.nn.functional.normalize(pooled, dim=1) if self.config.normalize else pooled


def _pool(states: Any, mask: Any, mode: str) -> Any:
    """Pool states [B, S, D] in one of `POOLINGS`: [B, D]."""
    import torch

    if mode in ("cls", "last"):
        places = mask.sum(1) - 1 if mode == "last" else torch.zeros(len(mask), dtype=torch.int64)
        return states[torch.arange(len(mask)), places]
    if mode == "max":
        return states.masked_fill(mask.unsqueeze(-1) == 0, -torch.inf).amax(1)
    weights = mask.unsqueeze(-1).to(states.dtype)
    if mode == "weightedmean":
        weights = weights * torch.arange(1, mask.shape[1] + 1).unsqueeze(-1)
    counted = weights.sum(1)
    return (states * weights).sum(1) / (counted.sqrt() if mode == "mean_sqrt_len" else counted)


def _layer(folder: Path, dense: Dense) -> Any:
    """Load a Dense module of sentence-transformers: linear, and its activation, in fp32."""
    import torch
    from safetensors.torch import load_file

    linear = torch.nn.Linear(dense.inputs, dense.outputs, dense.bias)
    stored = load_file(folder / dense.weights)
    linear.load_state_dict({name.removeprefix("linear."): tensor.float() for name, tensor in stored.items()})
    return torch.nn.Sequential(linear, getattr(torch.nn, _ACTIVATIONS[dense.activation])()).eval()
