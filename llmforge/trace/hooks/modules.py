"""Modules that are one operator of the dialect, recognized by what they compute: LayerNorm without a bias, GELU."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from llmforge.ir.operators import standard
from llmforge.trace.hooks import internals, norms
from llmforge.trace.hooks.symbolic import emit

ONES = "llmforge_ones"  # buffer of a norm of each head: the scale of its LayerNormalization, whose weight is a Mul
ACTIVATION_TOLERANCE = 1e-6  # the two forms of GELU differ by 5e-4


def substitute(model: nn.Module) -> None:
    """Let each module that computes a centred norm, or GELU, emit one LayerNormalization (and Mul), or one Gelu.

    A module with other arithmetic is left alone, and traced as it is.
    """
    found: dict[norms.Key, float | None] = {}
    activations: dict[type[nn.Module], str | None] = {}
    for module in model.modules():
        if "forward" in vars(module):  # substituted already
            continue
        if not [*module.parameters(), *module.children(), *module.buffers()]:
            if any(not name.startswith("_") and name != "training" for name in vars(module)):
                continue  # with settings, two modules of a class may differ
            kind = type(module)
            if kind not in activations:
                activations[kind] = gelu(module)
            if (approximate := activations[kind]) is not None:
                module.forward = functools.partial(nn.functional.gelu, approximate=approximate)
            continue
        key = norms.norm_like(module, ranks=(1, 2))
        if key is None or isinstance(module, nn.LayerNorm):  # no norm, or one that torch translates itself
            continue
        if key not in found:
            found[key] = layer_norm(module, *key[1:])
        if (epsilon := found[key]) is not None:
            module.forward = _norm_emitter(module, epsilon)


def layer_norm(module: nn.Module, shape: tuple[int, ...], epsilons: Sequence[float]) -> float | None:
    """Find ε for which `module` computes (x - mean) / √(variance + ε) · w over the last axis; None: something else."""
    with internals.real_tensors():
        weight, inputs = norms.probes(shape, mean=0.5)
        outputs = norms.run(module, weight, inputs)
        for epsilon in epsilons:
            expected = [nn.functional.layer_norm(x, shape[-1:], None, None, epsilon) * weight for x in inputs]
            if norms.close(outputs, expected):
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


def _norm_emitter(module: nn.Module, epsilon: float) -> Callable[[Tensor], Tensor]:
    if module.get_parameter("weight").dim() == 2:
        module.register_buffer(ONES, torch.ones(module.get_parameter("weight").shape[-1]), persistent=False)

    def forward(x: Tensor) -> Tensor:
        weight = module.get_parameter("weight")
        one_axis = weight.dim() == 1
        scale = weight if one_axis else module.get_buffer(ONES)
        attributes = {"axis": -1, "epsilon": epsilon}
        inputs = {"x": x, "scale": scale}
        (y,) = emit(standard.LayerNormalization, inputs, attributes, [(x.dtype, x.shape)], version=17)
        return y if one_axis else y * weight

    return forward
