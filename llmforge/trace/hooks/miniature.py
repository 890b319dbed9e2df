"""Copies of modules with other, smaller sizes and random numbers: what a module computes is found by running one."""

from __future__ import annotations

import copy
from collections.abc import Mapping

import torch
from torch import nn

from llmforge.trace.hooks import internals


def copied(module: nn.Module, sizes: Mapping[int, int], generator: torch.Generator) -> nn.Module:
    """Copy `module` with random parameters in fp32 and the code of its class, whatever was substituted.

    `sizes` has what becomes of sizes: of axes of parameters, and of integers that modules keep. Buffers without
    numbers get random ones, others keep theirs; it is an error to change their sizes.
    """
    made = copy.copy(module)
    for name, value in list(vars(module).items()):
        if name == "forward":
            del vars(made)[name]
        elif type(value) is int and not name.startswith("_"):
            vars(made)[name] = sizes.get(value, value)
    made._parameters = {
        name: None if each is None else nn.Parameter(_random(each, sizes, generator), requires_grad=False)
        for name, each in module._parameters.items()
    }
    made._buffers = {
        name: _random(each, sizes, generator) if internals.is_fake(each) else each
        for name, each in module._buffers.items()
    }
    made._modules = {
        name: None if each is None else copied(each, sizes, generator) for name, each in module._modules.items()
    }
    return made


def _random(tensor: torch.Tensor, sizes: Mapping[int, int], generator: torch.Generator) -> torch.Tensor:
    return torch.randn([sizes.get(size, size) for size in tensor.shape], generator=generator)
