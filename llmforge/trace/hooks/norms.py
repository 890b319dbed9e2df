"""RMS norms, recognized by what they compute."""

from __future__ import annotations

import copy
import inspect
import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from llmforge.ir.operators import standard
from llmforge.trace.hooks import internals, norms
from llmforge.trace.hooks.symbolic import emit

TOLERANCE = 1e-5  # fp32, on outputs of order one
EPSILON_LIMIT = 0.1  # no norm adds more than this to a variance


Key = tuple[type[nn.Module], tuple[int, ...], tuple[float, ...]]  # a module's class, its weight's shape, its epsilons


def substitute(model: nn.Module) -> None:
    """Let each module that computes x̂·w or x̂·(1 + w), x̂ = x / √(mean(x²) + ε), emit one RMSNormalization.

    A module with other arithmetic is left alone, and traced as it is.
    """
    found: dict[Key, tuple[float, float] | None] = {}
    for module in model.modules():
        if (key := norm_like(module)) is None:
            continue
        if key not in found:
            found[key] = probe(module, *key[1:])
        if (constants := found[key]) is not None:
            module.forward = emitter(module, *constants)


def norm_like(module: nn.Module, ranks: tuple[int, ...] = (1,)) -> Key | None:
    """Tell what a module that may be a norm shares with its like; None: it has no ε, or more than `weight`."""
    parameters = dict(module.named_parameters())
    if parameters.keys() != {"weight"} or parameters["weight"].dim() not in ranks:
        return None
    epsilons = {x for x in vars(module).values() if isinstance(x, float) and 0 < x < EPSILON_LIMIT}
    return (type(module), tuple(parameters["weight"].shape), tuple(sorted(epsilons))) if epsilons else None


def probe(module: nn.Module, shape: tuple[int, ...], epsilons: Sequence[float]) -> tuple[float, float] | None:
    """Find (offset, ε) for which `module` computes x̂·(offset + w); None: it computes something else."""
    with internals.real_tensors():
        weight, inputs = probes(shape)
        outputs = run(module, weight, inputs)
        for offset in (0.0, 1.0):
            for epsilon in epsilons:
                expected = [
                    x * torch.rsqrt(x.square().mean(-1, keepdim=True) + epsilon) * (offset + weight) for x in inputs
                ]
                if close(outputs, expected):
                    return offset, epsilon
    return None


def probes(shape: tuple[int, ...], mean: float = 0.0) -> tuple[Tensor, list[Tensor]]:
    """Make a weight and inputs, whose mean is `mean` of their deviation, that tell norms apart.

    Small inputs tell ε; the weight is not constant, so that a norm that ignores it is not taken for one that reads it.
    """
    weight = torch.linspace(0.5, 1.5, math.prod(shape)).reshape(shape)
    noise = torch.randn(3, *shape, generator=torch.Generator().manual_seed(0))
    return weight, [noise * scale + mean * scale for scale in (3.0, 1e-2, 1e-3)]


def run(module: nn.Module, weight: Tensor, inputs: Sequence[Tensor]) -> list[object]:
    """Call a copy of `module` with another weight; nothing where it is no function of one tensor like these."""
    instance = copy.copy(module)
    instance._parameters = {"weight": nn.Parameter(weight, requires_grad=False)}
    try:
        return [instance(x) for x in inputs]
    except (AttributeError, IndexError, RuntimeError, TypeError, ValueError):
        return []


def close(outputs: Sequence[object], expected: Sequence[Tensor]) -> bool:
    """Say whether `outputs` are `expected`, all of them."""
    return len(outputs) == len(expected) and all(
        isinstance(y, Tensor) and y.shape == e.shape and torch.allclose(y, e, rtol=TOLERANCE, atol=TOLERANCE)
        for y, e in zip(outputs, expected, strict=True)
    )


def emitter(module: nn.Module, offset: float, epsilon: float) -> Callable[..., Tensor]:
    """Make the forward of a module that computes x̂·(offset + w), and something of its own of more than one tensor."""
    own = module.forward

    def forward(x: Tensor, *others: object, **named: object) -> Any:
        if any(other is not None for other in (*others, *named.values())):
            return own(x, *others, **named)
        weight = module.get_parameter("weight")
        return rms_norm(x, weight if offset == 0 else weight + offset, epsilon)

    return forward


def rms_norm(x: Tensor, scale: Tensor, epsilon: float) -> Tensor:
    """Emit RMSNormalization of the last axis."""
    attributes = {"axis": -1, "epsilon": epsilon}
    (y,) = emit(standard.RMSNormalization, {"x": x, "scale": scale}, attributes, [(x.dtype, x.shape)], version=23)
    return y


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


def substitute_gated(model: nn.Module) -> None:
    """Let each module that is a gated norm emit RMSNormalization and the gate.

    A module with other arithmetic is left alone, and traced as it is.
    """
    for module in model.modules():
        key = norms.norm_like(module)
        if key is None or len(inspect.signature(type(module).forward).parameters) != 3:  # self, x and the gate
            continue
        found = probe_gated(module, *key[1:])
        if found is not None:
            module.forward = _emitter(module, found)


def probe_gated(module: nn.Module, shape: tuple[int, ...], epsilons: Sequence[float]) -> GatedNorm | None:
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
