"""Models of transformers: their structure without weights, or a whole checkpoint."""

from __future__ import annotations

import copy
import logging
import threading
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn
from transformers import (
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoModelForTextEncoding,
    PretrainedConfig,
    PreTrainedModel,
)

from llmforge.base.errors import CheckpointError, NotADecoder
from llmforge.checkpoint import Checkpoint, Encoding
from llmforge.trace.export import stored_matrix, weights
from llmforge.trace.hooks import internals

_MAKING = threading.Lock()  # transformers replaces functions of its own while it makes a model, of all threads


def build(
    config: PretrainedConfig, attention: str, encoding: Encoding | None = None
) -> tuple[PreTrainedModel, internals.FakeTensorMode]:
    """Build the causal language model of `config` in fp32 without its state, and the fake mode that stands in for it.

    What a checkpoint holds, parameters and persistent buffers, has no memory and no numbers, so that no number of the
    constructor can get into a trace. Other buffers hold theirs. `attention` names the attention implementation.

    Raises:
        NotADecoder: it is an encoder-decoder.
        UnsupportedError: transformers has no causal language model for `config`, or it does not take `attention`.
    """
    if config.is_encoder_decoder and not _encodes_alone(config):
        raise NotADecoder(
            "it is an encoder-decoder; decoder-only models are supported",
            hint="needed: a graph of the encoder beside that of the decoder, and a cache for attention between them",
        )
    with internals.third_party("building the model"):
        model = on_meta(config, attention, encoding)
    return model, faked(model)


def faked(model: PreTrainedModel) -> internals.FakeTensorMode:
    """Give parameters and persistent buffers of `model` shapes without memory, in the fake mode that is returned."""
    mode = internals.fake_mode()
    parameters: dict[nn.Parameter, nn.Parameter] = {}  # what is shared stays shared
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None and parameter not in parameters:
                parameters[parameter] = nn.Parameter(_empty(parameter, mode), requires_grad=False)
            module._parameters[name] = None if parameter is None else parameters[parameter]
        for name, buffer in module._buffers.items():
            if buffer is not None and name not in module._non_persistent_buffers_set:
                module._buffers[name] = _empty(buffer, mode)
    return mode


def on_meta(config: PretrainedConfig, attention: str | None, encoding: Encoding | None = None) -> PreTrainedModel:
    """Build the model of `config` in fp32, its parameters on the meta device; buffers hold numbers.

    It is the causal language model, or what gives what `encoding` says, with its Dense layers.

    `attention` names the attention implementation; None: transformers' default.

    Raises:
        ValueError: transformers has no causal language model for `config`, or it does not take `attention`.
    """
    make: Callable[..., PreTrainedModel] = _auto_class(encoding, config).from_config  # untyped in transformers
    own = copy.deepcopy(config)  # from_config writes `attention` and the dtype into what it is given
    if encoding is not None and encoding.answers is not None:
        own.num_labels = 1
    with _MAKING, internals.parameters_on_meta():
        model = make(own, attn_implementation=attention, dtype=torch.float32)
        _shape_to(model, encoding)
    model.eval()  # type: ignore[no-untyped-call]
    return model


def load(checkpoint: Checkpoint, attention: str | None = None) -> PreTrainedModel:
    """Load the whole model of `checkpoint` by transformers, in fp32; local files only, no remote code, no pickle.

    Of one that scores by its answers it is the causal model. Where its weights are stored as codes, the model is
    transformers', and they are dequantized here.

    Raises:
        CheckpointError: transformers misses weights.
    """
    encoding = checkpoint.encoding
    if checkpoint.layout is not None or checkpoint.merge is not None or (encoding is not None and encoding.dense):
        # no file holds its numbers, or not one that transformers reads
        dense = on_meta(checkpoint.config, attention, encoding)
        sources = weights.plan(dense, checkpoint)
        stored_matrix.give_weights(dense, checkpoint, sources, without=(), in_memory=True)
        return dense
    answers = encoding is not None and encoding.answers is not None
    read: Callable[..., Any] = _auto_class(None if answers else encoding, checkpoint.config).from_pretrained
    with _MAKING, internals.no_progress_bars(), internals.quiet("transformers", logging.ERROR):
        loaded: tuple[PreTrainedModel, Mapping[str, Any]] = read(
            checkpoint.path,
            dtype=torch.float32,
            attn_implementation=attention,
            local_files_only=True,
            trust_remote_code=False,
            use_safetensors=True,
            output_loading_info=True,
        )
    model, info = loaded
    _shape_to(model, encoding)
    there = model.state_dict()
    if missing := sorted(name for name in info["missing_keys"] if name in there):
        raise CheckpointError(
            f"{checkpoint.path}: transformers would fill {len(missing)} missing weights with random numbers, "
            f"the first {missing[0]}",
            hint="a model with invented weights proves nothing; complete the checkpoint",
        )
    model.eval()  # type: ignore[no-untyped-call]
    return model


def _encodes_alone(config: PretrainedConfig) -> bool:
    """Say whether a checkpoint is the encoder of an encoder-decoder (`T5EncoderModel`)."""
    return any(str(name).endswith("EncoderModel") for name in config.architectures or ())


def _auto_class(encoding: Encoding | None, config: PretrainedConfig) -> Any:
    """Choose the class of transformers that makes a model for what is wanted of it."""
    if encoding is None:
        return AutoModelForCausalLM
    if encoding.kind == "embedder" and _encodes_alone(config):
        return AutoModelForTextEncoding
    return AutoModel if encoding.kind == "embedder" else AutoModelForSequenceClassification


def _shape_to(model: PreTrainedModel, encoding: Encoding | None) -> None:
    """Take out of an embedder what it does not compute with, and put its Dense layers in."""
    if encoding is None or encoding.kind != "embedder":
        return
    if isinstance(getattr(model, "pooler", None), nn.Module):  # of the first token, for a head that is not there
        model._modules["pooler"] = nn.Identity()  # not None: some models call it whatever it is
    for layer in encoding.dense:
        linear = nn.Linear(layer.inputs, layer.outputs, bias=layer.bias)
        model.add_module(layer.folder, nn.ModuleDict({"linear": linear}))


def _empty(tensor: torch.Tensor, mode: internals.FakeTensorMode) -> torch.Tensor:
    with mode:
        return torch.empty(tensor.shape, dtype=tensor.dtype)
