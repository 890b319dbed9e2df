"""An encoder graph (docs/dialect.md) in ONNX Runtime on the CPU: sequences of any lengths side by side, no padding."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from llmforge import native
from llmforge.backends.onnxruntime.session import PROVIDER, open_graph, ort_value, run, session_options
from llmforge.base.errors import InputError
from llmforge.ir import interface
from llmforge.runtime.config import RuntimeConfig, SessionConfig
from llmforge.runtime.encoder import EncoderConfig

_KNOWN = {interface.INPUT_IDS, interface.POSITION_IDS, interface.SEQUENCE_STARTS, interface.TOKEN_TYPE_IDS}


class OnnxEncoder:
    """Runs an encoder graph.

    Args:
        model: path of `model.onnx`, its external data beside it, or a serialized model.
        session: threads and options of ONNX Runtime.
        config: what the graph gives.
        initializers: values, by name, of initializers that the model declares as external.
        own_kernels: attention is llmforge's own kernel, whose memory does not grow with all tokens together; else
            sequences run one by one, for attention of standard ONNX scores every pair of tokens.

    Raises:
        InputError: the file of the model cannot be read or is damaged, or the graph is not that of an encoder.
        UnsupportedError: ONNX Runtime refuses a graph in memory, or has no kernel for a node.
    """

    def __init__(
        self,
        model: Path | bytes,
        session: SessionConfig,
        config: EncoderConfig,
        *,
        initializers: Mapping[str, NDArray[Any]] | None = None,
        own_kernels: bool = False,
    ) -> None:
        self.config, self.own_kernels = config, own_kernels
        options = session_options(session)
        native.register(options)
        if initializers:
            self._held = [ort_value(np.asarray(value, order="C")) for value in initializers.values()]
            options.add_external_initializers(list(initializers), self._held)
        where = str(model) if isinstance(model, Path) else "the model in memory"
        self._session = open_graph(model, options, [PROVIDER], where)
        inputs = {value.name for value in self._session.get_inputs()}
        outputs = self._session.get_outputs()
        wanted = interface.EMBEDDINGS if config.kind == "embedder" else interface.LOGITS
        if not {interface.INPUT_IDS, interface.SEQUENCE_STARTS} <= inputs <= _KNOWN or outputs[0].name != wanted:
            raise InputError(
                f"{where}: not the graph of such an encoder: inputs {sorted(inputs)}, output {outputs[0].name}, "
                f"wanted {wanted}"
            )
        width = config.dimensions if config.kind == "embedder" else config.labels
        if outputs[0].shape[-1] != width or (interface.TOKEN_TYPE_IDS in inputs) != config.token_types:
            raise InputError(f"{where}: the graph gives {outputs[0].shape[-1]} numbers a sequence, wanted {width}")
        self._inputs, self.width = inputs, width

    def encode(
        self, sequences: Sequence[NDArray[np.int64]], token_types: Sequence[NDArray[np.int64]] | None = None
    ) -> NDArray[np.float32]:
        """Give embeddings [sequences, dimensions], or logits [sequences, labels]; no sequence is empty.

        `token_types` say of each token which of two texts it is of; None: all are of the first.

        Raises:
            ValueError: a sequence is empty, longer than the model reads, or its token types have another length.
            RunFailed: a kernel fails.
        """
        if not sequences:
            return np.zeros((0, self.width), np.float32)
        lengths = [len(ids) for ids in sequences]
        if min(lengths) < 1 or max(lengths) > self.config.max_tokens:
            raise ValueError(f"sequences have {min(lengths)} to {max(lengths)} tokens; 1 to {self.config.max_tokens}")
        types = [np.zeros(length, np.int64) for length in lengths] if token_types is None else token_types
        if [len(each) for each in types] != lengths:
            raise ValueError("token types have other lengths than their sequences")
        if self.own_kernels:
            return self._run(sequences, types)
        return np.concatenate([self._run([ids], [kind]) for ids, kind in zip(sequences, types, strict=True)])

    def observe(
        self, sequences: Sequence[NDArray[np.int64]], token_types: Sequence[NDArray[np.int64]] | None = None
    ) -> list[NDArray[Any]]:
        """Give all outputs of the graph, which may have further ones behind its own, for sequences side by side."""
        types = [np.zeros(len(ids), np.int64) for ids in sequences] if token_types is None else token_types
        return self._outputs(sequences, types)

    def _run(self, sequences: Sequence[NDArray[np.int64]], types: Sequence[NDArray[np.int64]]) -> NDArray[np.float32]:
        return np.asarray(self._outputs(sequences, types)[0], np.float32)

    def _outputs(
        self, sequences: Sequence[NDArray[np.int64]], types: Sequence[NDArray[np.int64]]
    ) -> list[NDArray[Any]]:
        lengths = [len(ids) for ids in sequences]
        feeds: dict[str, NDArray[Any]] = {
            interface.INPUT_IDS: np.concatenate(sequences)[None].astype(np.int64, copy=False),
            interface.POSITION_IDS: np.concatenate([np.arange(length) for length in lengths])[None],
            interface.SEQUENCE_STARTS: np.cumsum([0, *lengths]).astype(np.int32),
            interface.TOKEN_TYPE_IDS: np.concatenate(types)[None].astype(np.int64, copy=False),
        }
        return run(self._session, None, {name: value for name, value in feeds.items() if name in self._inputs})


def open_encoder(file: Path, config: RuntimeConfig, threads: int | None) -> OnnxEncoder:
    """Open the engine whose graph is in `file`."""
    assert config.encoder is not None
    own = config.kernels is not None and config.encoder.packed
    return OnnxEncoder(file, config.session.resolve(threads), config.encoder, own_kernels=own)
