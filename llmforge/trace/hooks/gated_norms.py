"""RMS norms with a gate, y = (x̂·w)·σ(gate), recognized by what they compute."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Sequence

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
        key = norms.norm_like(module)
        if key is None or len(inspect.signature(module.forward).parameters) != 2:
            continue
        found = probe(module, *key[1:])
        if found is not None:
            module.forward = _emitter(module, *found)


def probe(
    module: nn.Module, shape: tuple[int, ...], epsilons: Sequence[float]
) -> tuple[float, float, Callable[[Tensor], Tensor]] | None:
    """Find (offset, ε, activation) for which `module` is a gated norm; None: it computes something else."""
    for activation in ACTIVATIONS:
        constants = norms.probe(_AtGate(module, activation), shape, epsilons)
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
    plain = norms.emitter(module, offset, epsilon)

    def forward(x: Tensor, gate: Tensor) -> Tensor:
        return plain(x) * activation(gate)

    return forward
