"""A transformers model that has its structure and no weights."""

from __future__ import annotations

import torch
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from llmforge.errors import UnsupportedError
from llmforge.trace import internals


def build(config: PretrainedConfig, attention: str) -> tuple[PreTrainedModel, internals.FakeTensorMode]:
    """Build the causal language model of `config` in fp32 with fake parameters, and the mode that they live in.

    No parameter has memory; buffers hold their numbers. `attention` names the attention implementation.

    Raises:
        UnsupportedError: transformers has no causal language model for `config`, or it does not take `attention`.
    """
    refuse(config)
    try:
        with internals.parameters_on_meta():
            model = AutoModelForCausalLM.from_config(config, attn_implementation=attention, dtype=torch.float32)
    except ValueError as error:  # transformers' answer to a config or an attention implementation it has no class for
        raise UnsupportedError(
            f"architecture {name(config)!r} cannot be traced: {str(error).splitlines()[0]}"
        ) from error
    model.eval()
    mode = internals.fake_mode()
    shared: dict[torch.nn.Parameter, torch.nn.Parameter] = {}
    for module in model.modules():
        for key, parameter in module._parameters.items():
            if parameter is None:
                continue
            if parameter not in shared:
                with mode:
                    empty = torch.empty(parameter.shape, dtype=parameter.dtype)
                    shared[parameter] = torch.nn.Parameter(empty, requires_grad=False)
            module._parameters[key] = shared[parameter]
    return model, mode


def name(config: PretrainedConfig) -> str:
    """Name the architecture of `config` for a message."""
    return (config.architectures or [type(config).__name__])[0]


def refuse(config: PretrainedConfig) -> None:
    """Refuse the kinds of model that are no decoder-only language model of plain weights.

    Raises:
        UnsupportedError: `config` describes an encoder-decoder, or weights that are quantized already.
    """
    if config.is_encoder_decoder:
        raise UnsupportedError(f"architecture {name(config)!r} is an encoder-decoder; decoder-only models are supported")
    if getattr(config, "quantization_config", None) is not None:
        raise UnsupportedError(
            f"architecture {name(config)!r}: the checkpoint is quantized already (quantization_config)",
            hint="give the checkpoint that it was quantized from",
        )
