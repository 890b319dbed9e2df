"""RMS norms with a gate, y = (x̂·w)·σ(gate), recognized by what they compute."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional

from llmforge.trace.hooks import norms

ACTIVATIONS: tuple[Callable[[Tensor], Tensor], ...] = (functional.silu, torch.sigmoid)


def substitute(model: nn.Module) -> None:
    """Let each module that computes x̂·(offset + w)·activation(gate) emit one RMSNormalization and the gate.

    A module with other arithmetic is left alone, and traced as it is.
    """
    for module in model.modules():
        weight = dict(module.named_parameters()).get("weight")
        if weight is None or weight.dim() != 1 or len(list(module.named_parameters())) > 1:
            continue
        if len(inspect.signature(module.forward).parameters) != 2:
            continue
        epsilons = sorted({x for x in vars(module).values() if isinstance(x, float) and 0 < x < norms.EPSILON_LIMIT})
        found = probe(module, len(weight), epsilons)
        if found is not None:
            module.forward = _emitter(module, *found)


def probe(
    module: nn.Module, width: int, epsilons: list[float]
) -> tuple[float, float, Callable[[Tensor], Tensor]] | None:
    """Find (offset, ε, activation) for which `module` is a gated norm; None: it computes something else."""
    for activation in ACTIVATIONS:
        constants = norms.probe(_AtGate(module, activation), width, epsilons)
        if constants is not None:
            return *constants, activation
    return None


class _AtGate(nn.Module):
    """The norm that is left of a gated one when its gate is divided out: a function of one tensor."""

    def __init__(self, module: nn.Module, activation: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self._module, self._activation = [module], activation

    def forward(self, x: Tensor) -> Tensor:
        """Normalize x [N, width] under gates of order one."""
        instance = copy.copy(self._module[0])
        instance._parameters = self._parameters
        gate = torch.linspace(0.5, 1.5, x.numel()).view_as(x)
        y: Tensor = instance(x, gate)
        return y / self._activation(gate)


def _emitter(
    module: nn.Module, offset: float, epsilon: float, activation: Callable[[Tensor], Tensor]
) -> Callable[[Tensor, Tensor], Tensor]:
    plain = norms._emitter(module, offset, epsilon)

    def forward(x: Tensor, gate: Tensor) -> Tensor:
        return plain(x) * activation(gate)

    return forward
