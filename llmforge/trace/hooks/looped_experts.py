"""Experts that transformers' registry does not know: modules that loop over them, recognized by computing.

Three forms, each called on numbers, as a small copy, before `llmforge::MoE` stands for it:

- what takes tokens, their experts and weights, and holds up, gate and down as [E·I, H] (DBRX);
- the same with up and gate [E + Z, 2·I, H] and down [E, H, I], whose last Z experts hand on their tokens (LongCat);
- what takes tokens alone, with a router, and multiplies the input of each expert, not its output, by σ of its logit;
  other modules in it are added (Llama 4).
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import permutations
from typing import Any

import torch
from torch import Tensor, nn

from llmforge.trace.hooks import experts, internals, miniature
from llmforge.trace.hooks.experts import ACTIVATIONS, ExpertActivation, ExpertWeights, emit_experts

HIDDEN, INNER, EXPERTS, TOP = 6, 4, 3, 2  # sizes of a probe
TOKENS = 7
SCALES = (0.3, 3.0)  # of probed inputs
TOLERANCE = 1e-5  # fp32, relative to the largest output
Moe = Callable[[ExpertActivation, ExpertWeights, Tensor, Tensor, Tensor], Tensor]  # x [T, H], ids and weights [T, K]


@dataclass(frozen=True)
class ExpertsLayout:
    """How a module holds its experts."""

    weights: Callable[[nn.Module, int], ExpertWeights]  # of a module and its number of experts that compute
    routed: int  # experts that compute; further ones hand on their tokens
    total: int
    sizes: Mapping[int, int]  # what the sizes of the module become in a probe; {}: it is copied as it is

    def small(self) -> ExpertsLayout:
        """Return the layout of the probe."""
        return replace(
            self, routed=self.sizes.get(self.routed, self.routed), total=self.sizes.get(self.total, self.total)
        )


@dataclass(frozen=True)
class _Found:
    layout: ExpertsLayout
    activation: ExpertActivation


def substitute(model: nn.Module) -> None:
    """Let each such module of `model` emit `llmforge::MoE`; one that computes something else is left alone."""
    known: dict[object, _Found | None] = {}
    for module in list(model.modules()):
        if "forward" in vars(module) or not _may_be(module) or any(map(experts.marked, module.modules())):
            continue
        for probe, emitter in ((_probe_loop, _loop), (_probe_gated_input, _gated_input)):
            key = (probe, type(module), str(module), *((n, tuple(p.shape)) for n, p in module.named_parameters()))
            if key not in known:
                with internals.real_tensors():
                    known[key] = probe(module)
            if (found := known[key]) is not None:
                module.forward = emitter(module, found)
                break


def _may_be(module: nn.Module) -> bool:
    """Say whether a module is called like one of them and has stacks of matrices, or three matrices of one shape."""
    if len(inspect.signature(type(module).forward).parameters) not in (2, 4):
        return False
    parameters = list(module.parameters())
    stacked = sum(each.dim() == 3 for each in parameters)
    return stacked == 2 or (len(parameters) == 3 and len({each.shape for each in parameters}) == 1)


# Experts of tokens that were given theirs.


def _loop(module: nn.Module, found: _Found) -> Callable[..., Tensor]:
    def forward(hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        return run_loop(module, found.layout, found.activation, hidden_states, top_k_index, top_k_weights, emit_experts)

    return forward


def run_loop(
    module: nn.Module,
    layout: ExpertsLayout,
    activation: ExpertActivation,
    x: Tensor,
    ids: Tensor,
    mixing: Tensor,
    moe: Moe,
) -> Tensor:
    """Compute `module` on x [..., H], with experts `ids` and weights `mixing` [T, K]."""
    shape, weights = x.shape, layout.weights(module, layout.routed)
    x, mixing = x.reshape(-1, shape[-1]), mixing.to(x.dtype)
    if layout.total == layout.routed:
        return moe(activation, weights, x, ids, mixing).reshape(shape)
    computes = (layout.routed - ids).clamp(0, 1)  # 0 where an expert hands on its token
    passed = mixing * (1 - computes).to(x.dtype)
    # A product of signs that are known, not mixing - passed: kernels take no weights that may be negative.
    y = moe(activation, weights, x, ids * computes, mixing * computes.to(x.dtype))
    return (y + x * passed.sum(-1, keepdim=True)).reshape(shape)


def _probe_loop(module: nn.Module) -> _Found | None:
    taken = inspect.signature(type(module).forward).parameters
    if len(taken) != 4 or not 2 <= len(list(module.parameters())) <= 3:  # self, tokens, experts, weights
        return None
    for layout in (*_of_rows(module), *_of_stacks(module)):
        generator = torch.Generator().manual_seed(0)
        small, fewer = miniature.copied(module, layout.sizes, generator), layout.small()
        hidden = fewer.weights(small, fewer.routed).up.shape[1]
        ids = torch.stack([torch.randperm(fewer.total, generator=generator)[:TOP] for _ in range(TOKENS)])
        mixing = torch.rand(ids.shape, generator=generator) + 0.1
        inputs = [torch.randn(TOKENS, hidden, generator=generator) * scale for scale in SCALES]
        outputs = _outputs(small, [(x, ids, mixing) for x in inputs])

        def compute(activation: ExpertActivation, x: Tensor) -> Tensor:
            return run_loop(small, fewer, activation, x, ids, mixing, experts.compute)  # noqa: B023  # called here

        if (activation := _activation(inputs, outputs, compute)) is not None:
            return _Found(layout, activation)
    return None


def _of_rows(module: nn.Module) -> Iterator[ExpertsLayout]:
    """List the layouts of three matrices [E·I, H]."""
    parameters = [name for name, _ in module.named_parameters()]
    shapes = {tuple(each.shape) for each in module.parameters()}
    if len(parameters) != 3 or len(shapes) != 1 or len(rows := next(iter(shapes))) != 2:
        return
    numbers = _integers(module)
    for count in sorted(number for number in numbers if rows[0] % number == 0 and rows[0] // number in numbers):
        inner, hidden = rows[0] // count, rows[1]
        sizes = _sizes({count: EXPERTS, inner: INNER, hidden: HIDDEN, rows[0]: EXPERTS * INNER})
        for order in permutations(parameters):
            yield ExpertsLayout(_Rows(order), count, count, sizes)


@dataclass(frozen=True)
class _Rows:
    """Takes gate, up and down, in `order`, as as many rows for each expert."""

    order: Sequence[str]

    def __call__(self, module: nn.Module, count: int) -> ExpertWeights:
        tensors = [module.get_parameter(name) for name in self.order]
        rows, hidden = tensors[0].shape
        gate, up, down = (tensor.view(count, rows // count, hidden) for tensor in tensors)
        return ExpertWeights(torch.cat([gate, up], 1).transpose(1, 2), down, None, None)


def _of_stacks(module: nn.Module) -> Iterator[ExpertsLayout]:
    """List the layouts of [E + Z, 2·I, H] and [E, H, I]."""
    found = dict(module.named_parameters())
    if len(found) != 2 or any(each.dim() != 3 for each in found.values()):
        return
    for up, down in permutations(found):
        total, wide, hidden = found[up].shape
        routed, width, inner = found[down].shape
        if width != hidden or wide != 2 * inner or total < routed:
            continue
        more = min(total - routed, 2)
        sizes = {total: EXPERTS + more, routed: EXPERTS, inner: INNER, wide: 2 * INNER, hidden: HIDDEN}
        sizes |= {total - routed: more} if more else {}
        yield ExpertsLayout(_Stacks(up, down), routed, total, _sizes(sizes) if len(sizes) == 5 + bool(more) else {})


@dataclass(frozen=True)
class _Stacks:
    """Takes up and gate, of which experts that hand on their tokens have some, too, and down."""

    up: str
    down: str

    def __call__(self, module: nn.Module, count: int) -> ExpertWeights:
        up, down = module.get_parameter(self.up), module.get_parameter(self.down)
        return ExpertWeights(up[:count].transpose(1, 2), down.transpose(1, 2), None, None)


# Experts whose input is multiplied by their weight, with their router.


@dataclass(frozen=True)
class _GatedInput:
    """Names in a module: the router's weight [E, H], up and gate [E, H, 2·I], down [E, I, H]; the others; and top k."""

    router: str
    up: str
    down: str
    others: tuple[str, ...]
    top: int

    def __call__(self, module: nn.Module, count: int) -> ExpertWeights:
        return ExpertWeights(module.get_parameter(self.up), module.get_parameter(self.down), None, None)


def _gated_input(module: nn.Module, found: _Found) -> Callable[..., tuple[Tensor, None]]:
    def forward(hidden_states: Tensor) -> tuple[Tensor, None]:
        return run_gated_input(module, found.layout, found.activation, hidden_states, emit_experts), None

    return forward


def run_gated_input(
    module: nn.Module, layout: ExpertsLayout, activation: ExpertActivation, x: Tensor, moe: Moe
) -> Tensor:
    """Compute `module` on x [..., H]."""
    names = layout.weights
    assert isinstance(names, _GatedInput)
    values, ids = torch.topk(nn.functional.linear(x, module.get_parameter(names.router)), names.top, dim=-1)
    scores = torch.sigmoid(values)
    y = torch.zeros_like(x) if not names.others else module.get_submodule(names.others[0])(x)
    for name in names.others[1:]:
        y = y + module.get_submodule(name)(x)
    for place in range(names.top):
        at = slice(place, place + 1)
        ones = (ids[..., at] * 0 + 1).to(x.dtype)  # nothing computes with sizes in a graph
        y = y + moe(activation, names(module, 0), x * scores[..., at], ids[..., at], ones)
    return y


def _probe_gated_input(module: nn.Module) -> _Found | None:
    if len(inspect.signature(type(module).forward).parameters) != 2:  # self and tokens
        return None
    found = {name: tensor for name, tensor in module.named_parameters() if tensor.dim() == 3}
    for layout in _of_gated_input(module, found):
        generator = torch.Generator().manual_seed(0)
        small = miniature.copied(module, layout.sizes, generator)
        names = layout.weights
        assert isinstance(names, _GatedInput)
        for name in names.others:
            small.set_submodule(name, _Half())
        top = layout.sizes.get(names.top, names.top)
        layout = ExpertsLayout(_GatedInput(names.router, names.up, names.down, names.others, top), 0, 0, {})
        hidden = small.get_parameter(names.up).shape[1]
        inputs = [torch.randn(TOKENS, hidden, generator=generator) * scale for scale in SCALES]
        outputs = _outputs(small, [(x[None],) for x in inputs])

        def compute(activation: ExpertActivation, x: Tensor) -> Tensor:
            return run_gated_input(small, layout, activation, x, experts.compute)  # noqa: B023  # called here

        if (activation := _activation(inputs, outputs, compute)) is not None:
            return _Found(ExpertsLayout(names, 0, 0, {}), activation)
    return None


class _Half(nn.Module):
    """Stands for a module that is added: any function of a token alone."""

    def forward(self, x: Tensor) -> Tensor:
        return x / 2


def _of_gated_input(module: nn.Module, found: Mapping[str, Tensor]) -> Iterator[ExpertsLayout]:
    if len(found) != 2:
        return
    for up, down in permutations(found):
        count, hidden, wide = found[up].shape
        if found[down].shape != (count, wide // 2, hidden) or wide % 2:
            continue
        routers = [n for n, p in module.named_parameters() if tuple(p.shape) == (count, hidden)]
        for router in routers:
            used = {name.partition(".")[0] for name in (up, down, router)}
            others = tuple(name for name, child in module.named_children() if name not in used and _holds(child))
            for top in sorted(number for number in _integers(module) if number <= count):
                kept = max(EXPERTS, top + 1)
                sizes = _sizes({count: kept, hidden: HIDDEN, wide: 2 * INNER, wide // 2: INNER})
                clash = top in sizes or len({count, hidden, wide, wide // 2}) < 4
                yield ExpertsLayout(_GatedInput(router, up, down, others, top), 0, 0, {} if clash else sizes)


def _holds(module: nn.Module) -> bool:
    return next(module.parameters(), None) is not None


def _integers(module: nn.Module) -> set[int]:
    """Return the positive integers that a module and those in it keep: sizes, counts."""
    return {x for each in module.modules() for x in vars(each).values() if type(x) is int and x > 0}


def _sizes(wanted: Mapping[int, int]) -> dict[int, int]:
    """Return `wanted` where it makes sizes smaller, {} where one number is two sizes."""
    return dict(wanted) if all(small <= size for size, small in wanted.items()) else {}


def _outputs(module: nn.Module, calls: Sequence[tuple[Tensor, ...]]) -> list[Tensor]:
    """Run `module`; [] where it cannot, or gives no tensor first."""
    outputs: list[Any] = []
    for arguments in calls:
        try:
            made = module(*arguments)
        except (AttributeError, IndexError, NotImplementedError, RuntimeError, TypeError, ValueError):
            return []
        outputs.append(made[0] if isinstance(made, tuple) else made)
    return outputs if all(isinstance(each, Tensor) for each in outputs) else []


def _activation(
    inputs: Sequence[Tensor], outputs: Sequence[Tensor], compute: Callable[[ExpertActivation, Tensor], Tensor]
) -> ExpertActivation | None:
    """Find the activation with which `compute` gives `outputs`; None: there is none."""
    for name in ACTIVATIONS if outputs else ():
        activation = ExpertActivation(name, 1, 0, 1.0, 0.0, 0.0)
        if all(_close(y, compute(activation, x)) for x, y in zip(inputs, outputs, strict=True)):
            return activation
    return None


def _close(y: Tensor, expected: Tensor) -> bool:
    if y.numel() != expected.numel():
        return False
    return bool(((y.reshape(expected.shape) - expected).abs() <= TOLERANCE * expected.abs().max()).all())
