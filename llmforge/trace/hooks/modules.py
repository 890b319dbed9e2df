"""Modules that are one operator of the dialect, recognized by what they compute: LayerNorm without a bias, GELU."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable

import torch
from torch import Tensor, nn

from llmforge.trace.hooks import internals
from llmforge.trace.hooks.norms import EPSILON_LIMIT

ONES = "llmforge_ones"  # buffer of a norm of each head: the scale of its LayerNormalization, whose weight is a Mul
TOLERANCE = 1e-5  # fp32, on outputs of order one
ACTIVATION_TOLERANCE = 1e-6  # the two forms of GELU differ by 5e-4


def substitute(model: nn.Module) -> None:
    """Let each module that computes a centred norm, or GELU, emit one LayerNormalization (and Mul), or one Gelu.

    A module with other arithmetic is left alone, and traced as it is.
    """
    norms: dict[tuple[type[nn.Module], tuple[int, ...], tuple[float, ...]], float | None] = {}
    activations: dict[type[nn.Module], str | None] = {}
    for module in model.modules():
        if "forward" in vars(module):  # substituted already
            continue
        parameters = dict(module.named_parameters())
        if not parameters and not list(module.children()) and not list(module.buffers()):
            if any(not name.startswith("_") and name != "training" for name in vars(module)):
                continue  # with settings, two modules of a class may differ
            kind = type(module)
            if kind not in activations:
                activations[kind] = gelu(module)
            if (approximate := activations[kind]) is not None:
                module.forward = _gelu_emitter(approximate)
        elif parameters.keys() == {"weight"} and parameters["weight"].dim() in (1, 2):
            shape = tuple(parameters["weight"].shape)
            epsilons = tuple(
                sorted({x for x in vars(module).values() if isinstance(x, float) and 0 < x < EPSILON_LIMIT})
            )
            if not epsilons or isinstance(module, nn.LayerNorm):  # no norm, or one that torch translates itself
                continue
            key = (type(module), shape, epsilons)
            if key not in norms:
                norms[key] = layer_norm(module, shape, epsilons)
            if (epsilon := norms[key]) is not None:
                module.forward = _norm_emitter(module, epsilon)


def layer_norm(module: nn.Module, shape: tuple[int, ...], epsilons: tuple[float, ...]) -> float | None:
    """Find ε for which `module` computes (x - mean) / √(variance + ε) · w over the last axis; None: something else."""
    with internals.real_tensors():
        weight = torch.linspace(0.5, 1.5, math.prod(shape))
        weight = weight.reshape(shape)
        instance = copy.copy(module)
        instance._parameters = {"weight": nn.Parameter(weight, requires_grad=False)}
        noise = torch.randn(3, *shape, generator=torch.Generator().manual_seed(0))
        inputs = [noise * scale + 0.5 * scale for scale in (3.0, 1e-2, 1e-3)]
        try:
            outputs = [instance(x) for x in inputs]
        except (AttributeError, IndexError, RuntimeError, TypeError, ValueError):  # not a function of one such tensor
            return None
        for epsilon in epsilons:
            expected = [nn.functional.layer_norm(x, shape[-1:], None, None, epsilon) * weight for x in inputs]
            if all(
                isinstance(y, Tensor) and y.shape == e.shape and torch.allclose(y, e, rtol=TOLERANCE, atol=TOLERANCE)
                for y, e in zip(outputs, expected, strict=True)
            ):
                return epsilon
    return None


def gelu(module: nn.Module) -> str | None:
    """Find the form of GELU that `module` computes, as torch names it; None: something else."""
    with internals.real_tensors():
        x = torch.linspace(-9.0, 9.0, 361)
        try:
            y = module(x)
        except (AttributeError, IndexError, RuntimeError, TypeError, ValueError):  # not a function of one tensor
            return None
        for approximate in ("none", "tanh"):
            expected = nn.functional.gelu(x, approximate=approximate)
            if isinstance(y, Tensor) and y.shape == x.shape and torch.allclose(y, expected, 0, ACTIVATION_TOLERANCE):
                return approximate
    return None


def _gelu_emitter(approximate: str) -> Callable[[Tensor], Tensor]:
    def forward(x: Tensor) -> Tensor:
        return nn.functional.gelu(x, approximate=approximate)

    return forward


def _norm_emitter(module: nn.Module, epsilon: float) -> Callable[[Tensor], Tensor]:
    if module.get_parameter("weight").dim() == 2:
        module.register_buffer(ONES, torch.ones(module.get_parameter("weight").shape[-1]), persistent=False)

    def forward(x: Tensor) -> Tensor:
        weight = module.get_parameter("weight")
        one_axis = weight.dim() == 1
        scale = weight if one_axis else module.get_buffer(ONES)
        y: Tensor = torch.onnx.ops.symbolic(
            "LayerNormalization",
            (x, scale),
            {"axis": -1, "epsilon": epsilon},
            dtype=x.dtype,
            shape=x.shape,
            version=17,
        )
        return y if one_axis else y * weight

    return forward
