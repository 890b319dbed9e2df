"""RMS norms with a gate, (x̂·w)·σ(gate) or the norm of x·σ(gate), recognized by what they compute."""

from __future__ import annotations

import copy
import inspect
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from llmforge.trace.hooks import internals, norms

ACTIVATIONS: tuple[Callable[[Tensor], Tensor], ...] = (functional.silu, torch.sigmoid)


@dataclass(frozen=True)
class GatedNorm:
    """What a gated norm computes: `groups` parts of the last axis are normalized, each by itself."""

    offset: float  # of the weight
    epsilon: float
    activation: Callable[[Tensor], Tensor]
    gate_first: bool  # the gate is multiplied before the norm, not behind it
    groups: int

    def compute(self, x: Tensor, gate: Tensor, normalize: Callable[[Tensor], Tensor]) -> Tensor:
        """Compute the norm of x [..., width], with what normalizes and weighs such tensors."""
        x = x * self.activation(gate) if self.gate_first else x
        x = normalize(x)
        return x if self.gate_first else x * self.activation(gate)


def substitute(model: nn.Module) -> None:
    """Let each module that is a gated norm emit RMSNormalization and the gate.

    A module with other arithmetic is left alone, and traced as it is.
    """
    for module in model.modules():
        key = norms.norm_like(module)
        if key is None or len(inspect.signature(type(module).forward).parameters) != 3:  # self, x and the gate
            continue
        found = probe(module, *key[1:])
        if found is not None:
            module.forward = _emitter(module, found)


def probe(module: nn.Module, shape: tuple[int, ...], epsilons: Sequence[float]) -> GatedNorm | None:
    """Find what `module` computes; None: it is no gated norm."""
    with internals.real_tensors():
        weight, inputs = norms.probes(shape)
        gate = torch.linspace(0.5, 1.5, inputs[0].numel()).view_as(inputs[0])
        outputs = norms.run(_AtGate(module, gate), weight, inputs)
        if not outputs:
            return None
        candidates = itertools.product((0.0, 1.0), epsilons, ACTIVATIONS, (False, True), _groups(module, shape[-1]))
        for candidate in itertools.starmap(GatedNorm, candidates):
            expected = [candidate.compute(x, gate, _on_numbers(candidate, weight)) for x in inputs]
            if norms.close(outputs, expected):
                return candidate
    return None


def _groups(module: nn.Module, width: int) -> list[int]:
    """List how many groups a module of `width` features may have, by the numbers that it keeps."""
    kept = {x for x in vars(module).values() if type(x) is int and 0 < x <= width and width % x == 0}
    return sorted({1} | kept | {width // x for x in kept})


def _on_numbers(norm: GatedNorm, weight: Tensor) -> Callable[[Tensor], Tensor]:
    def normalize(x: Tensor) -> Tensor:
        parts = x.reshape(*x.shape[:-1], norm.groups, -1)
        parts = parts * torch.rsqrt(parts.square().mean(-1, keepdim=True) + norm.epsilon)
        return parts.reshape(x.shape) * (norm.offset + weight)

    return normalize


class _AtGate(nn.Module):
    """A gated norm at a given gate: a function of one tensor."""

    def __init__(self, module: nn.Module, gate: Tensor) -> None:
        super().__init__()
        self._module, self._gate = [module], gate

    def forward(self, x: Tensor) -> Tensor:
        """Normalize x [N, width]."""
        instance = copy.copy(self._module[0])
        instance._parameters = self._parameters
        instance.__dict__.pop("forward", None)  # what stands for it already, where it is a norm without a gate
        y: Tensor = instance(x, self._gate)
        return y


def _emitter(module: nn.Module, norm: GatedNorm) -> Callable[..., Tensor]:
    plain = norms.emitter(module, norm.offset, norm.epsilon)

    def normalize(x: Tensor) -> Tensor:
        if norm.groups == 1:
            return plain(x)
        width = x.shape[-1] // norm.groups
        parts = norms.rms_norm(x.reshape(*x.shape[:-1], norm.groups, width), torch.ones(width), norm.epsilon)
        return parts.reshape(x.shape) * (module.get_parameter("weight") + norm.offset)

    def forward(x: Tensor, gate: Tensor | None = None) -> Tensor:
        return normalize(x) if gate is None else norm.compute(x, gate, normalize)

    return forward
