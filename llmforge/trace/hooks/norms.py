"""RMS norms, recognized by what they compute."""

from __future__ import annotations

import copy
from collections.abc import Callable

import torch
from torch import Tensor, nn

from llmforge.trace.hooks import internals

TOLERANCE = 1e-5  # fp32, on outputs of order one
EPSILON_LIMIT = 0.1  # no norm adds more than this to a variance


def substitute(model: nn.Module) -> None:
    """Let each module that computes x̂·w or x̂·(1 + w), x̂ = x / √(mean(x²) + ε), emit one RMSNormalization.

    A module with other arithmetic is left alone, and traced as it is.
    """
    found: dict[tuple[type[nn.Module], int, tuple[float, ...]], tuple[float, float] | None] = {}
    for module in model.modules():
        weight = dict(module.named_parameters()).get("weight")
        if weight is None or weight.dim() != 1 or len(list(module.named_parameters())) > 1:
            continue
        epsilons = sorted({x for x in vars(module).values() if isinstance(x, float) and 0 < x < EPSILON_LIMIT})
        key = (type(module), len(weight), tuple(epsilons))
        if key not in found:
            found[key] = probe(module, len(weight), epsilons)
        if (constants := found[key]) is not None:
            module.forward = _emitter(module, *constants)


def probe(module: nn.Module, width: int, epsilons: list[float]) -> tuple[float, float] | None:
    """Find (offset, ε) for which `module` computes x̂·(offset + w); None: it computes something else.

    Small inputs tell ε; the weight is not constant, so that a norm that ignores it is not taken for one that reads it.
    """
    with internals.real_tensors():
        weight = torch.linspace(0.5, 1.5, width)
        instance = copy.copy(module)
        instance._parameters = {"weight": nn.Parameter(weight, requires_grad=False)}
        noise = torch.randn(3, width, generator=torch.Generator().manual_seed(0))
        inputs = [noise * scale for scale in (3.0, 1e-2, 1e-3)]
        try:
            outputs = [instance(x) for x in inputs]
        except (AttributeError, RuntimeError, TypeError, ValueError):  # not a function of one tensor of this width
            return None
        for offset in (0.0, 1.0):
            for epsilon in epsilons:
                expected = [
                    x * torch.rsqrt(x.square().mean(-1, keepdim=True) + epsilon) * (offset + weight) for x in inputs
                ]
                if all(
                    isinstance(y, Tensor) and torch.allclose(y, e, rtol=TOLERANCE, atol=TOLERANCE)
                    for y, e in zip(outputs, expected, strict=True)
                ):
                    return offset, epsilon
    return None


def _emitter(module: nn.Module, offset: float, epsilon: float) -> Callable[[Tensor], Tensor]:
    def forward(x: Tensor) -> Tensor:
        weight = module.get_parameter("weight")
        return torch.onnx.ops.symbolic(
            "RMSNormalization",
            (x, weight if offset == 0 else weight + offset),
            {"axis": -1, "epsilon": epsilon},
            dtype=x.dtype,
            shape=x.shape,
            version=23,
        )

    return forward
