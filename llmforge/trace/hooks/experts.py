"""Experts as transformers calls them during a trace: one `llmforge::MoE` node a layer, its arithmetic found by probing.

transformers' registry of experts implementations hands over the module, and its decorator's marks say how weights lie;
what the module computes is found by running its own forward on small numbers.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from llmforge.base.errors import UnsupportedError
from llmforge.ir.operators import canonical
from llmforge.trace.hooks import internals
from llmforge.trace.hooks.symbolic import emit

NAME = "llmforge"  # in the registry
EAGER = "eager"  # transformers' name of a module's own forward
MARKS = ("has_gate", "has_bias", "is_transposed", "is_concatenated", "has_post_expert_norm")
ARGUMENTS = ("self", "x", "expert_ids", "expert_weights")  # what a forward takes, in this order
PROBED_EXPERTS, PROBED_HIDDEN, PROBED_INNER, PROBED_TOKENS, PROBED_TOP = 3, 5, 4, 12, 2
TOLERANCE = 1e-5  # fp32, relative to the largest output
SCALES = (0.3, 3.0)  # of probed inputs; limits add larger ones
QUICK_GELU = 1.702  # x·sigmoid(1.702·x), Hendrycks and Gimpel 2016 (arXiv:1606.08415), section 2

ACTIVATIONS: Mapping[str, Callable[[Tensor, float], Tensor]] = {
    "silu": lambda x, alpha: x * torch.sigmoid(alpha * x),
    "gelu": lambda x, alpha: functional.gelu(x),
    "gelu_tanh": lambda x, alpha: functional.gelu(x, approximate="tanh"),
    "relu": lambda x, alpha: functional.relu(x),
    "relu2": lambda x, alpha: functional.relu(x).square(),
}


@dataclass(frozen=True)
class ExpertActivation:
    """What an experts module computes between its two products: the attributes of `llmforge::MoE`."""

    activation: str
    gated: int
    interleaved: int
    alpha: float
    beta: float
    limit: float

    def inner(self, h: Tensor) -> Tensor:
        """Compute h [..., 2·I or I] → [..., I]."""
        act = ACTIVATIONS[self.activation]
        if not self.gated:
            return act(h, self.alpha)
        gate, up = (h[..., 0::2], h[..., 1::2]) if self.interleaved else h.chunk(2, -1)
        if self.limit:
            gate, up = gate.clamp(max=self.limit), up.clamp(-self.limit, self.limit)
        return act(gate, self.alpha) * (up + self.beta)


@dataclass(frozen=True)
class ExpertWeights:
    """The parameters of an experts module: E experts, `up` [E, H, 2·I or I], `down` [E, I, H], biases or none."""

    up: Tensor
    down: Tensor
    up_bias: Tensor | None
    down_bias: Tensor | None


class ExpertsHook:
    """The implementation that transformers calls; remembers what it found for each kind of module."""

    def __init__(self) -> None:
        self._activations: dict[tuple[object, ...], ExpertActivation] = {}

    def __call__(self, module: nn.Module, *args: Any, **kwargs: Any) -> Tensor:
        """Emit `llmforge::MoE`: x [..., H], expert_ids and expert_weights [..., top_k] → [..., H].

        Raises:
            UnsupportedError: the module computes something that the operator cannot say.
        """
        where = type(module).__name__
        bound = inspect.signature(type(module).forward).bind(module, *args, **kwargs)
        if len(bound.arguments) != len(ARGUMENTS):
            raise UnsupportedError(f"{where} takes {', '.join(bound.arguments)}: more than tokens and their experts")
        _, x, ids, mixing = bound.arguments.values()
        return emit_experts(self._activation(module), weights(module), x, ids, mixing)

    def _activation(self, module: nn.Module) -> ExpertActivation:
        shapes = tuple((name, tuple(tensor.shape)) for name, tensor in module.named_parameters())
        key = (type(module), str(module), shapes, *_numbers(module))
        if key not in self._activations:
            self._activations[key] = probe(module)
        return self._activations[key]


def emit_experts(
    activation: ExpertActivation, parameters: ExpertWeights, x: Tensor, ids: Tensor, mixing: Tensor
) -> Tensor:
    """Emit `llmforge::MoE` for tokens x [..., H], their experts `ids` and weights `mixing` [..., top_k] → [..., H]."""
    inputs = {"x": x, "expert_ids": ids, "expert_weights": mixing.to(x.dtype), **vars(parameters)}
    (y,) = emit(canonical.MoE, inputs, asdict(activation), [(x.dtype, x.shape)])
    return y


def probe(module: nn.Module) -> ExpertActivation:
    """Find the activation of an experts module by running its own forward on three small experts.

    Raises:
        UnsupportedError: none that `llmforge::MoE` knows computes the same.
    """
    where = type(module).__name__
    if module.has_post_expert_norm:
        raise UnsupportedError(f"{where} normalizes the output of each expert, which llmforge::MoE cannot")
    weights(module)  # refuses other parameters than the operator takes
    with internals.real_tensors():
        generator = torch.Generator().manual_seed(0)
        small = _shrunk(module, generator)
        parameters = weights(small)
        ids = torch.stack(
            [torch.randperm(len(parameters.up), generator=generator)[:PROBED_TOP] for _ in range(PROBED_TOKENS)]
        )
        mixing = torch.rand(ids.shape, generator=generator) + 0.1
        noise = torch.randn(PROBED_TOKENS, parameters.up.shape[1], generator=generator)
        inputs = [noise * scale for scale in (*SCALES, *_numbers(module))]
        try:
            outputs = [small(x, ids, mixing) for x in inputs]
        except (AttributeError, IndexError, RuntimeError, TypeError, ValueError) as error:
            raise UnsupportedError(f"{where} cannot be probed: {type(error).__name__}: {error}") from error
        for activation in _candidates(module):
            if all(
                _close(y, compute(activation, parameters, x, ids, mixing)) for x, y in zip(inputs, outputs, strict=True)
            ):
                return activation
    raise UnsupportedError(f"{where} computes with its experts something that llmforge::MoE does not know")


def compute(activation: ExpertActivation, parameters: ExpertWeights, x: Tensor, ids: Tensor, mixing: Tensor) -> Tensor:
    """Compute `llmforge::MoE` for tokens x [T, H], their experts `ids` and weights `mixing` [T, top_k] → [T, H]."""
    h = torch.einsum("th,tkhn->tkn", x, parameters.up[ids])
    h = h if parameters.up_bias is None else h + parameters.up_bias[ids]
    y = torch.einsum("tki,tkih->tkh", activation.inner(h), parameters.down[ids])
    y = y if parameters.down_bias is None else y + parameters.down_bias[ids]
    return (y * mixing[..., None]).sum(1)


def _close(y: object, expected: Tensor) -> bool:
    limit = TOLERANCE * float(expected.abs().max())
    return isinstance(y, Tensor) and y.shape == expected.shape and bool(((y - expected).abs() <= limit).all())


def _candidates(module: nn.Module) -> Iterator[ExpertActivation]:
    """List the activations that a module may have; its own numbers are candidates for limits and slopes."""
    gated, interleaved = int(bool(module.has_gate)), int(bool(module.has_gate) and not module.is_concatenated)
    own = _numbers(module)
    for limit in (0.0, *own) if gated else (0.0,):
        for beta in (0.0, 1.0) if gated else (0.0,):
            for activation in ACTIVATIONS:
                for alpha in (1.0, QUICK_GELU, *own) if activation == "silu" else (1.0,):
                    yield ExpertActivation(activation, gated, interleaved, alpha, beta, limit)


def _numbers(module: nn.Module) -> list[float]:
    """Return the positive numbers that a module keeps: limits, slopes, sizes."""
    return sorted({float(x) for x in vars(module).values() if type(x) in (int, float) and x > 0})


def marked(module: nn.Module) -> bool:
    """Say whether `module` has the marks of transformers' decorator of experts."""
    return all(hasattr(module, mark) for mark in MARKS)


def weights(module: nn.Module) -> ExpertWeights:
    """Collect the parameters of a module that transformers' decorator marks, laid out as `llmforge::MoE` takes them.

    Raises:
        UnsupportedError: it has others.
    """
    taken, found = names(module), dict(module.named_parameters())
    if sorted(found) != sorted(taken):
        raise UnsupportedError(
            f"{type(module).__name__} has parameters {', '.join(sorted(found))}; llmforge::MoE takes {', '.join(taken)}"
        )
    tensors: list[Tensor] = [found[name] for name in taken]
    matrices = [tensor if module.is_transposed else tensor.transpose(1, 2) for tensor in tensors[:2]]
    return ExpertWeights(*matrices, *(tensors[2:] or (None, None)))


def names(module: nn.Module) -> list[str]:
    """Name the parameters that transformers' implementations of experts read."""
    matrices = ["gate_up_proj" if module.has_gate else "up_proj", "down_proj"]
    return [*matrices, *(f"{name}_bias" for name in matrices)] if module.has_bias else matrices


def _shrunk(module: nn.Module, generator: torch.Generator) -> nn.Module:
    """Copy `module` with a few small experts of random numbers, set to run its own forward."""
    parameters = weights(module)
    experts, hidden = min(PROBED_EXPERTS, len(parameters.up)), PROBED_HIDDEN
    wide = PROBED_INNER * (2 if module.has_gate else 1)
    shapes: list[tuple[int, ...]] = [(experts, hidden, wide), (experts, PROBED_INNER, hidden)]
    shapes = shapes if module.is_transposed else [(count, n, k) for count, k, n in shapes]
    shapes += [(experts, wide), (experts, hidden)] if module.has_bias else []
    small = copy.copy(module)
    small._parameters = {
        name: nn.Parameter(torch.randn(shape, generator=generator), requires_grad=False)
        for name, shape in zip(names(module), shapes, strict=True)
    }
    vars(small)["config"] = SimpleNamespace(_experts_implementation=EAGER)  # what transformers' dispatch reads
    return small
