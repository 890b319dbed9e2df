"""A transformers model that has its structure and no weights."""

from __future__ import annotations

from collections.abc import Callable

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
    if config.is_encoder_decoder:
        raise UnsupportedError("it is an encoder-decoder; decoder-only models are supported")
    make: Callable[..., PreTrainedModel] = AutoModelForCausalLM.from_config  # untyped in transformers
    with internals.third_party("building the model"), internals.parameters_on_meta():
        model = make(config, attn_implementation=attention, dtype=torch.float32)
    model.eval()  # type: ignore[no-untyped-call]
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
